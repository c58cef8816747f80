"""Staging memory for parts between the network and the decoder: one fixed mapping, lent out part by
part.

First fit by address: while decoding keeps up, the same low, already-faulted pages are used again
and again, and the rest of the mapping costs no memory. `acquire` does not wait; `work.WorkQueue`
does, and its lock guards every call here. It does not know what is staged.
"""

from __future__ import annotations

import mmap
from bisect import insort
from collections.abc import Sequence
from typing import NamedTuple

from ..format.manifest import align
from .arena import adviser, map_bytes

ALIGNMENT_BYTES = 4096


DEFAULT_BYTES = 96 * 1024 * 1024
# Each decoder holds a part, and as much again is on its way meanwhile.
DECODER_BYTES = 16 * 1024 * 1024
# Of the memory that the weights leave; the rest is for what uses them, and for what was not foreseen.
SHARE = 0.25


def staging_bytes(
    part_sizes_bytes: Sequence[int],
    wanted_bytes: int | None,
    room_bytes: int | None,
    *,
    num_decoders: int = 0,
) -> int:
    """The size of a staging buffer for parts of these sizes.

    What is wanted, or 96 MiB and enough for `num_decoders`, as far as `room_bytes`, the memory that
    the weights leave (None: unknown), can be shared; but enough for the largest part, and no more
    than all parts take together.
    """
    sizes = [align(size_bytes, ALIGNMENT_BYTES) for size_bytes in part_sizes_bytes]
    most = max(DEFAULT_BYTES, num_decoders * DECODER_BYTES) if wanted_bytes is None else wanted_bytes
    if room_bytes is not None:
        share = SHARE if wanted_bytes is None else 1
        most = min(most, int(share * max(0, room_bytes)))
    return min(max(most, max(sizes, default=0)), sum(sizes))


class Buffer(NamedTuple):
    """Staging memory on loan. `data` (the bytes asked for) must not be used after the release."""

    offset_bytes: int
    data: memoryview


class Staging:
    """At most `capacity_bytes` on loan at a time. Not thread-safe."""

    def __init__(self, capacity_bytes: int, *, memory: memoryview | None = None) -> None:
        """Map, but do not touch, whole pages for `capacity_bytes`. Raises
        `InsufficientMemoryError`.

        With `memory`, whole pages of the caller's, it lends that instead.
        """
        self.capacity_bytes = align(capacity_bytes, ALIGNMENT_BYTES)
        self._memory = (
            map_bytes(self.capacity_bytes, what="the loader's staging") if memory is None else memory
        )
        self._lent: list[tuple[int, int]] = []  # [start, end) in pages' multiples, by address
        self.used_bytes = 0
        self.peak_bytes = 0  # most on loan at once
        self.touched_bytes = 0  # highest address ever lent: what the mapping costs at most

    def acquire(self, size_bytes: int) -> Buffer | None:
        """The lowest hole that fits; None when there is none now. Content is undefined.

        Raises `ValueError` for more than `capacity_bytes`, which would never fit.
        """
        length = align(size_bytes, ALIGNMENT_BYTES)
        if length > self.capacity_bytes:
            raise ValueError(f"{size_bytes} bytes never fit a staging of {self.capacity_bytes}")
        start = 0
        for lent_start, lent_end in self._lent:
            if lent_start - start >= length:
                break
            start = lent_end
        if start + length > self.capacity_bytes:
            return None
        insort(self._lent, (start, start + length))
        self.used_bytes += length
        self.peak_bytes = max(self.peak_bytes, self.used_bytes)
        self.touched_bytes = max(self.touched_bytes, start + length)
        return Buffer(start, self._memory[start : start + size_bytes])

    def release(self, buffer: Buffer) -> None:
        """Take a loan back. Raises `ValueError` when it is not out."""
        end = buffer.offset_bytes + align(len(buffer.data), ALIGNMENT_BYTES)
        self._lent.remove((buffer.offset_bytes, end))
        self.used_bytes -= end - buffer.offset_bytes

    def unmap(self) -> memoryview:
        """Lend nothing any more. Returns the memory that was ever lent: all goes back to the system
        as soon as neither the caller nor a loan looks at it.
        """
        lent, self._memory = self._memory[: self.touched_bytes], memoryview(b"")
        self.capacity_bytes = 0
        return lent

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when loans overlap, leave the mapping, or do not add up."""
        end = 0
        for lent_start, lent_end in self._lent:
            if lent_start < end or lent_end > self.capacity_bytes:
                raise RuntimeError(f"staging loan [{lent_start}, {lent_end}) overlaps or leaves the mapping")
            end = lent_end
        if sum(lent_end - lent_start for lent_start, lent_end in self._lent) != self.used_bytes:
            raise RuntimeError("staging loans do not add up")


def discard(memory: memoryview) -> None:
    """Return the pages of a mapping's beginning to the system, without the GIL, which the last view
    to go would keep meanwhile: 6 ms for 96 MiB. The content is lost.
    """
    adviser(memory)(0, len(memory), mmap.MADV_DONTNEED)
