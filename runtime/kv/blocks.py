"""The reference-counted allocator of the KV pool's blocks.

Blocks are allocated so that one sequence's blocks tend to be consecutive: a consecutive block table
is read as a view, where a scattered one has to be gathered, at twice the time a step. Blocks that
nothing can grow behind are followed closely by the next sequence's: where a head's part of a block
is smaller than a page, scattered blocks would each take pages of their own. Invariant: a block is
free exactly when it has no references, and the free blocks are kept as maximal runs. This module
knows nothing of tokens, tensors or threads; the caller serialises access.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from msgspec import Struct

from ..step.batch import Epoch


class BlockStatistics(Struct, frozen=True):
    """A snapshot of the counts. `num_shared` counts blocks with more than one reference."""

    num_blocks: int
    num_free: int
    num_shared: int
    num_free_runs: int
    largest_free_run: int


class BlockAllocator:
    """Reference-counted blocks 0 … num_blocks - 1.

    Misuse (too many blocks requested, a free block shared or released) is the caller's bug: raises
    ValueError, and nothing has changed.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self._references = [0] * num_blocks
        self._epochs = [Epoch.EXACT] * num_blocks  # of blocks in use
        self._num_free = num_blocks
        # The last blocks of sequences that may grow. A hint: it decides about places alone.
        self._tails: set[int] = set()
        # Free runs, half-open. There is at most one more of them than there are runs in use, so a
        # linear search for the largest costs less than keeping them ordered.
        self._end_of_run = {0: num_blocks}  # start → end
        self._start_of_run = {num_blocks: 0}  # end → start

    @property
    def free_count(self) -> int:
        return self._num_free

    def reference_count(self, block: int) -> int:
        return self._references[block]

    def epoch(self, block: int) -> Epoch:
        """The epoch of a block in use."""
        return self._epochs[block]

    def allocate(self, count: int, *, after: int | None = None, epoch: Epoch = Epoch.EXACT) -> list[int]:
        """Allocate `count` blocks with one reference each, ascending within each run, for keys and
        values of one epoch.

        `after` is the last block of a growing sequence: the blocks that follow it are taken first.
        Otherwise a run begins in the largest free one: in its middle if the blocks before it may
        grow, too, and else at its beginning.
        """
        if not 0 <= count <= self._num_free:
            raise ValueError(f"{count} blocks requested, {self._num_free} are free")
        blocks: list[int] = []
        if after is not None and count and after + 1 in self._end_of_run:
            blocks += self._take(after + 1, after + 1, count)
        while len(blocks) < count:
            missing = count - len(blocks)
            start, end = max(self._end_of_run.items(), key=lambda run: (run[1] - run[0], -run[0]))
            spare = end - start - missing
            first = start + spare // 2 if start - 1 in self._tails and spare > 0 else start
            blocks += self._take(start, first, missing)
        for block in blocks:
            self._epochs[block] = epoch
        if blocks:
            self._tails.discard(-1 if after is None else after)
            self._tails.add(blocks[-1])
        return blocks

    def share(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these blocks, all of which must be in use."""
        blocks = list(blocks)
        self._require_in_use(blocks)
        for block in blocks:
            self._references[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Drop a reference of each of these distinct blocks; those without references become free."""
        blocks = list(blocks)
        self._require_in_use(blocks)
        self._tails.difference_update(blocks)
        freed = []
        for block in blocks:
            self._references[block] -= 1
            if not self._references[block]:
                freed.append(block)
        freed.sort()
        first = 0
        for index in range(1, len(freed) + 1):
            if index == len(freed) or freed[index] != freed[index - 1] + 1:
                self._give_back(freed[first], freed[index - 1] + 1)
                first = index
        self._num_free += len(freed)

    def statistics(self) -> BlockStatistics:
        return BlockStatistics(
            num_blocks=self.num_blocks,
            num_free=self._num_free,
            num_shared=sum(count > 1 for count in self._references),
            num_free_runs=len(self._end_of_run),
            largest_free_run=max((end - start for start, end in self._end_of_run.items()), default=0),
        )

    def check_integrity(self) -> None:
        """Raise AssertionError unless counts and runs agree. O(num_blocks); for tests."""
        assert self._start_of_run == {end: start for start, end in self._end_of_run.items()}
        runs = sorted(self._end_of_run.items())
        for (_, end), (next_start, _) in pairwise(runs):
            assert end < next_start, (
                f"free runs touch or overlap: one ends at {end}, one starts at {next_start}"
            )
        in_runs = [block for start, end in runs for block in range(start, end)]
        unused = [block for block, count in enumerate(self._references) if count == 0]
        assert in_runs == unused, "free runs and reference counts disagree"
        assert len(unused) == self._num_free
        assert all(count >= 0 for count in self._references)

    def _take(self, start: int, first: int, count: int) -> list[int]:
        """Take up to `count` blocks from `first` on, out of the free run that begins at `start`."""
        end = self._end_of_run.pop(start)
        del self._start_of_run[end]
        stop = min(end, first + count)
        self._add_run(start, first)
        self._add_run(stop, end)
        for block in range(first, stop):
            self._references[block] = 1
        self._num_free -= stop - first
        return list(range(first, stop))

    def _give_back(self, start: int, end: int) -> None:
        """Mark [start, end) as free, merged with the free runs on both sides."""
        if start in self._start_of_run:
            start = self._start_of_run.pop(start)
            del self._end_of_run[start]
        if end in self._end_of_run:
            after = self._end_of_run.pop(end)
            del self._start_of_run[after]
            end = after
        self._add_run(start, end)

    def _add_run(self, start: int, end: int) -> None:
        if start < end:
            self._end_of_run[start] = end
            self._start_of_run[end] = start

    def _require_in_use(self, blocks: Sequence[int]) -> None:
        if len(set(blocks)) != len(blocks):
            raise ValueError("duplicate blocks")
        for block in blocks:
            if not 0 <= block < self.num_blocks or not self._references[block]:
                raise ValueError(f"block {block} is not in use")
