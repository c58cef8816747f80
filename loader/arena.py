"""The memory that weights live in: one anonymous mapping that holds every group's slab.

A slab exists, at its final address, before a byte of it has arrived, so that tensors can be made over it at
once. The memory is never returned while anything looks at it: every view holds the mapping, and the last one
to go frees it. It does not know what a slab holds.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from .manifest import align
from .memory import refused

ByteArray = npt.NDArray[np.uint8]

MADV_POPULATE_WRITE = 23  # Linux 5.14; Python's mmap has no name for it
PREFAULT_STEP_BYTES = 2 * 1024 * 1024  # a huge page: for so long the kernel keeps others from mapping memory


class Arena:
    """Slabs of given sizes, each aligned to `SLAB_ALIGNMENT_BYTES`, zero until written."""

    def __init__(self, slab_sizes_bytes: Sequence[int]) -> None:
        """Raises `InsufficientMemoryError` when the system refuses the address space."""
        self.size_bytes = sum(align(size_bytes) for size_bytes in slab_sizes_bytes)
        self._memory = memory = map_bytes(self.size_bytes, what="the model's weights")
        slabs, start = [], 0
        for size_bytes in slab_sizes_bytes:
            slabs.append(memory[start : start + size_bytes])
            start += align(size_bytes)
        self.slabs: tuple[ByteArray, ...] = tuple(slabs)

    def prefault(self, stopped: Callable[[], bool]) -> None:
        """Take all pages from the system now, front to back, changing no content; `stopped` ends it early.

        First writes cost as much as decoding does, and on a fresh virtual machine several times as much. A
        thread that pays this while all wait for the network takes it off the bytes' way. Blocks, without the
        GIL. Does nothing where the kernel cannot.
        """
        if sys.platform != "linux":
            return
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        begin = self._memory.ctypes.data  # of a mapping, so at a page's start
        for offset in range(0, self.size_bytes, PREFAULT_STEP_BYTES):
            length = min(PREFAULT_STEP_BYTES, self.size_bytes - offset)
            if stopped() or madvise(begin + offset, length, MADV_POPULATE_WRITE) != 0:
                return


def map_bytes(size_bytes: int, *, what: str) -> ByteArray:
    """Fresh zeroed memory that the system hands over as it is first written, in huge pages if it can.

    The array owns the mapping. Raises `InsufficientMemoryError`, naming `what`, when the system refuses.
    """
    if size_bytes == 0:
        return np.empty(0, np.uint8)
    try:
        # Private, because Python's default is shared: shared memory is never huge-paged and faults several
        # times slower.
        mapping = mmap.mmap(-1, size_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError, ValueError) as error:
        raise refused(size_bytes, None, what=what) from error
    advise_huge_pages(mapping)
    return np.frombuffer(mapping, np.uint8)


def advise_huge_pages(mapping: mmap.mmap) -> None:
    """Ask for 2 MiB pages, which make first writes several times cheaper. No kernel need heed it."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)  # Linux only
    if advice is None:
        return
    try:
        mapping.madvise(advice)
    except OSError:
        return  # a kernel built without transparent huge pages
