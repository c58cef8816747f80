"""The memory that weights live in: one anonymous mapping that holds every group's slab.

A slab exists, at its final address, before a byte of it has arrived, so that tensors can be made
over it at once. The memory is never returned while anything looks at it: every view holds the
mapping, and the last one to go frees it. It does not know what a slab holds, and works without
numpy, whose import the first bytes must not wait for.
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from ..format.manifest import align
from ..process.cpu import has_idle_core
from .limits import refused

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MADV_POPULATE_READ, MADV_POPULATE_WRITE = 22, 23  # Linux 5.14; Python's mmap has no names for them
MADV_COLLAPSE = 25  # Linux 6.1
MAP_NORESERVE = 0x4000  # Linux; Python has a name for it from 3.13 on
# A huge page: for so long the kernel keeps others from mapping memory.
PREFAULT_STEP_BYTES = 2 * 1024 * 1024
HUGE_PAGE_BYTES = 2 * 1024 * 1024
# The same, for memory taken in the background: 0.4 ms, or 4 at worst.
RESERVE_STEP_BYTES = 1024 * 1024
BUSY_REST_S = 0.05  # between such steps while others have all cores: 20 MB/s
# CPU time; usual are 0.2 ms for a huge page, and 0.7 ms for as much in small ones.
SLOW_STEP_S = 1.5e-3
PAID_STEP_S = 5e-5  # what takes less has found its pages there
MAX_SLOW_STEPS = 3
# Small pages into a huge one: 1 ms of CPU time, and 4 to 5 where the host has to provide it.
MAX_COLLAPSE_S = 10e-3  # CPU time, on average: with more, small pages stay
COLLAPSE_REST_S = 0.01  # between two pages while others have all cores
MAX_FAILED_COLLAPSES = 8  # one after another; a page that something else holds right now is one


class Arena:
    """Slabs of given sizes, each aligned to `SLAB_ALIGNMENT_BYTES`, zero until written."""

    def __init__(
        self,
        slab_sizes_bytes: Sequence[int],
        *,
        shared_fd: int | None = None,
        reserve: Reserve | None = None,
        is_sparse: bool = False,
    ) -> None:
        """With `shared_fd`, the slabs lie in that memory file, which is made large enough and stays
        the caller's; with `reserve`, in the memory that it has taken ahead, of which the rest is
        given back. `is_sparse`: never all of them are filled, and they may be more than there is.

        Raises `InsufficientMemoryError` when the system refuses the address space.
        """
        self.size_bytes = sum(align(size_bytes) for size_bytes in slab_sizes_bytes)
        self._tries_huge_pages = False
        self._is_shared = shared_fd is not None
        self._is_sparse = is_sparse
        self._is_discarded = False
        self._ahead_bytes = 0  # from the beginning: pages that this process has mapped already
        if shared_fd is not None:
            memory = map_shared(shared_fd, self.size_bytes, what="the model's weights")
        elif reserve is not None:
            self._ahead_bytes = min(reserve.taken_bytes, self.size_bytes)
            memory = reserve.hand_over(self.size_bytes, what="the model's weights")
        else:
            memory = map_bytes(self.size_bytes, what="the model's weights", is_sparse=is_sparse)
            # Until it is known what they cost here.
            self._tries_huge_pages = _advise(memory, "MADV_NOHUGEPAGE")
        self._memory = memory
        slabs, start = [], 0
        self._starts: list[int] = []
        for size_bytes in slab_sizes_bytes:
            slabs.append(memory[start : start + size_bytes])
            self._starts.append(start)
            start += align(size_bytes)
        self.slabs: tuple[memoryview, ...] = tuple(slabs)

    def prefault(self, stopped: Callable[[], bool], *, slow_step_s: float = SLOW_STEP_S) -> bool:
        """Take all pages from the system now, front to back, changing no content; `stopped` ends it
        early.

        First writes cost as much as decoding does, or more. A thread that pays this while all wait
        for the network takes it off the bytes' way. Blocks, without the GIL. Returns whether all
        pages are there now, which they are not where the kernel cannot do this.

        Huge pages are usually the cheaper ones, and faster to compute with. But on a virtual
        machine whose host has to provide them first they were seen to cost 1 to 4 CPU-s a GB,
        against 0.3 for small ones. So the last ones are tried before others write to the first, and
        where they are slow, all that is left comes in small ones. So it does where they become
        slow; steps that found their pages there say nothing of that, and there are many: threads
        that read a local file are ahead of this one.
        """
        advise = adviser(self._memory)
        is_huge = self._tries_huge_pages and self._are_huge_pages_fast(advise, slow_step_s)
        if is_huge:
            advise(0, self.size_bytes, mmap.MADV_HUGEPAGE)
        slow_steps = 0
        for offset in range(self._ahead_bytes, self.size_bytes, PREFAULT_STEP_BYTES):
            begun_s = time.thread_time()
            if stopped() or not advise(offset, PREFAULT_STEP_BYTES, MADV_POPULATE_WRITE):
                return False
            cost_s = time.thread_time() - begun_s
            if cost_s > PAID_STEP_S:
                slow_steps = slow_steps + 1 if cost_s > slow_step_s else 0
            if is_huge and slow_steps == MAX_SLOW_STEPS:
                is_huge = False
                advise(offset, self.size_bytes, mmap.MADV_NOHUGEPAGE)
        return True

    def _are_huge_pages_fast(self, advise: Callable[[int, int, int], bool], slow_step_s: float) -> bool:
        """Take the last few of them, if there are that many. Leaves the advice against them
        everywhere.
        """
        begin = max(0, self.size_bytes // PREFAULT_STEP_BYTES - MAX_SLOW_STEPS) * PREFAULT_STEP_BYTES
        slow_steps = 0
        for offset in range(begin, self.size_bytes, PREFAULT_STEP_BYTES):
            advise(offset, PREFAULT_STEP_BYTES, mmap.MADV_HUGEPAGE)
            begun_s = time.thread_time()
            advise(offset, PREFAULT_STEP_BYTES, MADV_POPULATE_WRITE)
            slow_steps += time.thread_time() - begun_s > slow_step_s
            advise(offset, PREFAULT_STEP_BYTES, mmap.MADV_NOHUGEPAGE)
        return slow_steps < 2  # one may have been held up by something else

    @property
    def takes_huge_pages(self) -> bool:
        """True if `collapse` may do something: not for memory files, nor where parts may never come."""
        return not (self._is_shared or self._is_sparse)

    def collapse(self, stopped: Callable[[], bool]) -> int:
        """Replace small pages by huge ones, front to back, changing no content; `stopped` ends it
        early. Returns the number of huge pages.

        For threads that wait for nothing: it rests between two pages while others have all cores,
        and gives up where the system has no huge pages, or they cost too much. Others can read and
        write the memory meanwhile. Blocks, without the GIL.
        """
        if not self.takes_huge_pages or not _advise(self._memory, "MADV_HUGEPAGE"):
            return 0
        advise = adviser(self._memory)
        first = -_address(self._memory) % HUGE_PAGE_BYTES
        num, failed, cost_s = 0, 0, 0.0
        for offset in range(first, self.size_bytes - HUGE_PAGE_BYTES + 1, HUGE_PAGE_BYTES):
            if not has_idle_core():
                time.sleep(COLLAPSE_REST_S)
            if self._is_discarded or stopped():
                break
            begun_s = time.thread_time()
            is_huge = advise(offset, HUGE_PAGE_BYTES, MADV_COLLAPSE)
            cost_s += time.thread_time() - begun_s
            num, failed = num + is_huge, 0 if is_huge else failed + 1
            tried = (offset - first) // HUGE_PAGE_BYTES + 1
            if failed == MAX_FAILED_COLLAPSES or (
                tried >= MAX_FAILED_COLLAPSES and cost_s > tried * MAX_COLLAPSE_S
            ):
                break
        return num

    def discard(self) -> None:
        """Return the memory to the system; its content is lost, and reads as zeros. The views stay valid."""
        self._is_discarded = True
        mapping = self._memory.obj
        if isinstance(mapping, mmap.mmap):
            with suppress(OSError):  # of a kernel that cannot: it goes with the last view
                # A memory file keeps what was written to it until it is cut out of the file.
                mapping.madvise(mmap.MADV_REMOVE if self._is_shared else mmap.MADV_DONTNEED)

    def discard_range(self, index: int, begin: int, end: int) -> None:
        """Return the pages of a slab's bytes [begin, end) to the system, but for those that they share
        with their neighbours; their content is lost. No effect in a memory file.
        """
        start = self._starts[index]
        first, end = align(start + begin, mmap.PAGESIZE), start + end
        size_bytes = end - end % mmap.PAGESIZE - first
        if size_bytes > 0 and not self._is_shared:
            adviser(self._memory)(first, size_bytes, mmap.MADV_DONTNEED)

    def map_ahead(self) -> None:
        """Enter the pages that another process has taken into this one's tables, changing no
        content.

        Else the first forward pass would pay for it, layer by layer. Blocks, without the GIL.
        """
        advise = adviser(self._memory)
        for offset in range(self._ahead_bytes, self.size_bytes, PREFAULT_STEP_BYTES):
            if not advise(offset, PREFAULT_STEP_BYTES, MADV_POPULATE_READ):
                return


class Reserve:
    """Memory taken from the system before it is known what it will hold.

    A thread does the taking until `stop`, and pauses while others need the cores. Huge pages: they
    cost the least where the system has them, and a standby has the time where it has not.
    """

    def __init__(self, size_bytes: int) -> None:
        """Begin to take so much. Raises `InsufficientMemoryError`."""
        self._memory = map_bytes(size_bytes, what="memory for weights")
        self._taken_bytes = 0
        self._wanted = threading.Event()
        _advise(self._memory, "MADV_HUGEPAGE")
        self._thread = threading.Thread(target=self._take_pages, name="teneral-reserve", daemon=True)
        self._thread.start()

    @property
    def taken_bytes(self) -> int:
        """The bytes from the beginning whose pages are there."""
        return self._taken_bytes

    def stop(self) -> None:
        """Take no more. The thread ends within a step."""
        self._wanted.set()

    def hand_over(self, size_bytes: int, *, what: str) -> memoryview:
        """The beginning of the memory, made longer where it is short; the rest returns to the
        system. The view owns the mapping.

        Raises `InsufficientMemoryError`, naming `what`, when the system refuses more.
        """
        self.stop()
        self._thread.join()  # it shows the memory, which can be neither moved nor cut meanwhile
        memory, self._memory, self._taken_bytes = self._memory, memoryview(b""), 0
        mapping = memory.obj
        if size_bytes == 0 or not isinstance(mapping, mmap.mmap):
            return map_bytes(size_bytes, what=what)
        memory.release()
        if size_bytes != len(mapping):
            try:
                mapping.resize(size_bytes)
            except (OSError, SystemError, ValueError) as error:
                raise refused(size_bytes, None, what=what) from error
        return memoryview(mapping)

    def release(self) -> None:
        """Return all of it to the system, on a thread of its own: it takes 0.1 s for 1 GB."""
        self.stop()
        threading.Thread(target=self._give_back, name="teneral-release", daemon=True).start()

    def _give_back(self) -> None:
        self.hand_over(0, what="nothing")

    def _take_pages(self) -> None:
        advise = adviser(self._memory)
        for offset in range(0, len(self._memory), RESERVE_STEP_BYTES):
            # A lower priority would not do: pools and servers are sessions of their own, which
            # share cores evenly.
            if self._wanted.wait(0 if has_idle_core() else BUSY_REST_S):
                return
            if not advise(offset, RESERVE_STEP_BYTES, MADV_POPULATE_WRITE):
                return
            self._taken_bytes = offset + RESERVE_STEP_BYTES


def adviser(memory: memoryview) -> Callable[[int, int, int], bool]:
    """Gives the kernel advice on a number of bytes of a mapping from an offset on, or as many as
    there are; says if it took it.
    """
    size_bytes = len(memory)
    if sys.platform != "linux" or size_bytes == 0:
        return lambda offset, size_bytes, advice: False
    import ctypes  # 5 ms, on a thread that nothing waits for

    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    begin = _address(memory)  # of a mapping, so at a page's start

    def advise(offset: int, num_bytes: int, advice: int) -> bool:
        taken: bool = madvise(begin + offset, min(num_bytes, size_bytes - offset), advice) == 0
        return taken

    return advise


def _address(memory: memoryview) -> int:
    import ctypes

    return ctypes.addressof(ctypes.c_char.from_buffer(memory)) if len(memory) else 0


def as_array(slab: memoryview) -> npt.NDArray[np.uint8]:
    """The slab as numpy knows it: the same memory, which the array keeps alive."""
    import numpy as np  # the first bytes are requested before this is needed

    return np.frombuffer(slab, np.uint8)


def map_bytes(size_bytes: int, *, what: str, is_sparse: bool = False) -> memoryview:
    """Fresh zeroed memory that the system hands over as it is first written. If it `is_sparse`, the
    system need not have that much.

    The view, (size_bytes,) uint8, owns the mapping. Raises `InsufficientMemoryError`, naming
    `what`, when the system refuses.
    """
    if size_bytes == 0:
        return memoryview(bytearray())
    try:
        # Private, because Python's default is shared: shared memory is never huge-paged and faults
        # several times slower.
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        mapping = mmap.mmap(-1, size_bytes, flags=flags | (MAP_NORESERVE if is_sparse else 0))
    except (OSError, OverflowError, ValueError) as error:
        raise refused(size_bytes, None, what=what) from error
    return memoryview(mapping)


def map_shared(fd: int, size_bytes: int, *, what: str) -> memoryview:
    """The first `size_bytes` of a memory file, seen by every process that maps it. It is made
    longer where it is short.

    The view owns the mapping, not the file. Raises `InsufficientMemoryError`, naming `what`.
    """
    if size_bytes == 0:
        return memoryview(bytearray())
    try:
        if os.fstat(fd).st_size < size_bytes:
            os.ftruncate(fd, size_bytes)
        mapping = mmap.mmap(fd, size_bytes)
    except (OSError, OverflowError, ValueError) as error:
        raise refused(size_bytes, None, what=what) from error
    memory = memoryview(mapping)
    _advise(memory, "MADV_HUGEPAGE")  # taken where the system lets memory files have them
    return memory


def map_private(fd: int, size_bytes: int, *, what: str) -> memoryview:
    """The first `size_bytes` of a file, as they are in it until this process writes to them: that
    changes a copy of its own.

    The view owns the mapping, not the file. Raises `InsufficientMemoryError`, naming `what`.
    """
    if size_bytes == 0:
        return memoryview(bytearray())
    try:
        mapping = mmap.mmap(fd, size_bytes, access=mmap.ACCESS_COPY)
    except (OSError, OverflowError, ValueError) as error:
        raise refused(size_bytes, None, what=what) from error
    return memoryview(mapping)


def _advise(memory: memoryview, name: str) -> bool:
    """Give the kernel this advice on a whole mapping; says if it took it. Linux only, and not all
    of them.
    """
    advice, mapping = getattr(mmap, name, None), memory.obj
    if advice is None or not isinstance(mapping, mmap.mmap):
        return False
    try:
        mapping.madvise(advice)
    except OSError:
        return False  # a kernel built without transparent huge pages
    return True
