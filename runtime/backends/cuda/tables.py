"""The tables from which kernels read a step's sequences, packed into one tensor, and its copy to
the device.

The block tables are concatenated, each as long as its sequence needs, so that one copy of just
these numbers describes a whole step to the device. They also assign rows to kernels: a span of one
row goes to the kernel that splits its keys, all others are cut into tiles of rows.

A step's rows are packed before the device can begin, so that must be fast. Copies go through pinned
memory; uploads rotate among several buffers, because filling one must not wait for the copy of
another, which waits for a step. On a CPU, where tests run, there are no copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, repeat
from operator import is_

import numpy as np
import numpy.typing as npt
import torch

from ...step.batch import Rows, SequenceSpan, StepBatch
from .variants import MAX_SPLITS, TILE_ROWS

# Of attention, including those that find nothing to do.
PROGRAMS_A_PROCESSOR = 16

Numbers = npt.NDArray[np.int64]
MIN_NUMBERS = 1 << 12
MAX_CACHED_TABLES = 1_024
NUM_ROOMS = 8  # more than a step sends
# Arrays of `decode_batch` that have a number for each row; the blocks follow.
NUM_PARTS = 9


@dataclass(frozen=True, slots=True)
class StepTables:
    """The tables of one step, all int64, on the device. S spans, of which D have one row."""

    starts: torch.Tensor  # (S,)
    lengths: torch.Tensor  # (S,)
    contexts: torch.Tensor  # (S,)
    table_starts: torch.Tensor  # (S,), indices into `blocks`
    decoding: torch.Tensor  # (D,), numbers of spans
    tiles: torch.Tensor  # (tiles, 2), see `chunk_attention`
    blocks: torch.Tensor


class TableCache:
    """Block tables as arrays: made when a sequence gets a block, and used in all steps until the
    next.
    """

    def __init__(self) -> None:
        # Keyed by the tuple's identity; the tuple is kept alive, so that its identity is not
        # reused.
        self._arrays: dict[int, tuple[tuple[int, ...], Numbers]] = {}

    def array(self, blocks: tuple[int, ...]) -> Numbers:
        found = self._arrays.get(id(blocks))
        if found is None:
            if len(self._arrays) >= MAX_CACHED_TABLES:
                self._arrays.clear()
            found = self._arrays[id(blocks)] = (blocks, np.array(blocks, dtype=np.int64))
        return found[1]


def join_tables(tables: Sequence[tuple[int, ...]], cache: TableCache) -> tuple[Numbers, Numbers]:
    """All block tables one after the other, and the beginning of each, (len(tables),)."""
    arrays = [cache.array(table) for table in tables]
    starts = [0, *accumulate(map(len, arrays))][: len(arrays)]
    return np.concatenate([np.empty(0, np.int64), *arrays]), np.array(starts, dtype=np.int64)


def pack(spans: Sequence[SequenceSpan], group: int, cache: TableCache) -> list[Numbers]:
    """The parts of `StepTables`, in its order. `group` query heads share a key head."""
    blocks, table_starts = join_tables([span.blocks for span in spans], cache)
    spans_table = np.array([(span.start, span.length, span.context_len) for span in spans], dtype=np.int64)
    spans_table = spans_table.reshape(-1, 3).T
    decoding = np.flatnonzero(spans_table[1] == 1)
    tiles = [
        (number, first)
        for number, span in enumerate(spans)
        if span.length > 1
        for first in range(0, span.length * group, TILE_ROWS)
    ]
    return [*spans_table, table_starts, decoding, np.array(tiles, dtype=np.int64).reshape(-1), blocks]


def as_tables(parts: Sequence[torch.Tensor]) -> StepTables:
    """The tables from the parts of `pack`, on the device."""
    starts, lengths, contexts, table_starts, decoding, tiles, blocks = parts
    return StepTables(starts, lengths, contexts, table_starts, decoding, tiles.view(-1, 2), blocks)


def tables_of(spans: Sequence[SequenceSpan], group: int, device: torch.device) -> StepTables:
    """The tables of a batch that was not packed."""
    parts = pack(spans, group, TableCache())
    together = torch.from_numpy(np.concatenate(parts)).to(device)
    return as_tables(together.split_with_sizes([len(part) for part in parts]))


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A batch's arrays on the device (`StepBatch.on_device`), and its tables."""

    tokens: torch.Tensor  # (T,) int64, as in `StepBatch`
    positions: torch.Tensor
    slots: torch.Tensor
    logit_rows: torch.Tensor  # (R,)
    tables: StepTables


def tell_device(batch: StepBatch, group: int, device: torch.device) -> DeviceBatch:
    """The arrays of a batch that was not packed, on the device."""
    arrays = (batch.tokens, batch.positions, batch.slots, batch.logit_rows)
    sent = [torch.from_numpy(array).to(device) for array in arrays]
    return DeviceBatch(sent[0], sent[1], sent[2], sent[3], tables_of(batch.spans, group, device))


def split_keys(num_spans: int, num_kv_heads: int, num_processors: int, max_context: int, keys: int) -> int:
    """The number of keys that one program of a split computes, for sequences of up to `max_context`
    tokens.

    As few as 4 times the keys that a program reads at a time, so that a few sequences keep the
    device busy; more if there would be more than `MAX_SPLITS`, or more programs than the device
    finishes soon. Depends on the power of 2 above `num_spans` and on no length, so that a step has
    the same splits launched, and recorded for more rows.
    """
    num_rows = 1 << max(0, num_spans - 1).bit_length()
    most = max(1, min(MAX_SPLITS, PROGRAMS_A_PROCESSOR * num_processors // (num_rows * num_kv_heads)))
    return max(4 * keys, -(-max_context // (most * keys)) * keys)


class _Pinned:
    """A pinned host buffer of int64, and the event that ends its last copy."""

    def __init__(self) -> None:
        self.tensor = torch.empty(0, dtype=torch.int64)
        self.copied: torch.cuda.Event | None = None

    def at_least(self, size: int) -> torch.Tensor:
        """The buffer with at least `size` numbers. May wait for its previous copy."""
        if self.copied is not None:
            self.copied.synchronize()
        if len(self.tensor) < size:
            room = max(MIN_NUMBERS, 1 << (size - 1).bit_length())
            self.tensor = torch.empty(room, dtype=torch.int64, pin_memory=True)
        return self.tensor[:size]


class Uplink:
    """Copies to the device. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._rooms = [_Pinned() for _ in range(NUM_ROOMS if device.type == "cuda" else 0)]
        self._turn = 0

    def send(self, parts: Sequence[Numbers], into: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
        """Send the parts, as views of one tensor: a new one, or the beginning of `into`. Does not
        wait.
        """
        sizes = [len(part) for part in parts]
        size = sum(sizes)
        if not self._rooms:
            together = torch.from_numpy(np.concatenate(parts))
            target = together if into is None else into[:size].copy_(together)
        else:
            self._turn = (self._turn + 1) % NUM_ROOMS
            room = self._rooms[self._turn]
            host = room.at_least(size)
            np.concatenate(parts, out=host.numpy())
            target = torch.empty(size, dtype=torch.int64, device=self.device) if into is None else into[:size]
            target.copy_(host, non_blocking=True)
            if room.copied is None:
                room.copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            room.copied.record()
        return target.split_with_sizes(sizes)


class Downlink:
    """Copies to the host, the one wait of a step. Not thread-safe."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = torch.empty(0, dtype=torch.float64)
        self._done: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]

    def fetch(self, numbers: torch.Tensor) -> npt.NDArray[np.float64]:
        """(N,) float64, once all work enqueued on the stream before is done. Valid until the next
        call.
        """
        if self._done is None:
            return numbers.numpy()
        if len(self._room) < len(numbers):
            self._room = torch.empty(max(1024, 2 * len(numbers)), dtype=torch.float64, pin_memory=True)
        host = self._room[: len(numbers)]
        host.copy_(numbers, non_blocking=True)
        self.wait()
        return host.numpy()

    def wait(self) -> None:
        """Wait until all work enqueued on the stream is done."""
        if self._done is not None:
            self._done.record()
            self._done.synchronize()


def bits(values: Sequence[float]) -> Numbers:
    """Floats as int64 bits, to share a copy with integers; `as_floats` is the reverse."""
    return np.array(values, dtype=np.float64).view(np.int64)


def as_floats(tensor: torch.Tensor) -> torch.Tensor:
    """(N,) int64 from `bits` → float64."""
    return tensor.view(torch.float64)


class _DecodeArrays:
    """The arrays of `StepPacker.decode_batch`, on the host and in a buffer on the device.

    Most steps have the sequences and the block tables of the step before: then only the numbers of
    their rows change.
    """

    def __init__(self, num_rows: int, into: torch.Tensor) -> None:
        self._into = into
        self._blocks: list[tuple[int, ...]] = []  # of each sequence
        self._together = np.empty(0, np.int64)  # the same, one after the other
        self._numbers = np.zeros((NUM_PARTS, num_rows), np.int64)
        self.tokens, self.positions, self.slots, self.rows, *others = self._numbers
        logit_rows, self._lengths, self._contexts, self._table_starts, decoding = others
        for each in (self.rows, logit_rows, decoding):
            each[:] = np.arange(num_rows)
        places = into[: NUM_PARTS * num_rows].view(NUM_PARTS, num_rows).unbind()
        # All of the remaining buffer, not only the part in use now: a recorded step must have its
        # address.
        rest = into[NUM_PARTS * num_rows :]
        tables = as_tables((*places[4:], rest[:0], rest))
        self.on_device = DeviceBatch(places[0], places[1], places[2], places[3], tables)

    def is_for(self, num_rows: int, into: torch.Tensor) -> bool:
        return self._into is into and len(self.rows) == num_rows

    def put_blocks(self, blocks: list[tuple[int, ...]], cache: TableCache) -> bool:
        """Put the block tables of a step's sequences. Returns False if they are those of the step
        before.
        """
        num = len(blocks)
        if num == len(self._blocks) > 0 and all(map(is_, blocks, self._blocks)):
            return False
        self._together, self._table_starts[:num] = join_tables(blocks, cache)
        self._blocks = blocks
        self._lengths[:num] = 1
        for each in (self.tokens, self.positions, self._lengths, self._contexts, self._table_starts):
            each[num:] = 0
        self.slots[num:] = -1
        return True

    def put_tokens(self, parts: Sequence[Rows], block_size: int) -> None:
        """Put the token of each sequence, whose blocks are those of `put_blocks`."""
        num = len(parts)
        positions = np.array([part.first for part in parts], np.int64)
        blocks, offsets = np.divmod(positions, block_size)
        self.tokens[:num] = [part.tokens[part.first] for part in parts]
        self.positions[:num] = positions
        self.slots[:num] = self._together[self._table_starts[:num] + blocks] * block_size + offsets
        self._contexts[:num] = positions + 1

    def parts(self, *, with_blocks: bool) -> list[Numbers]:
        """The beginning of the buffer, or all of it."""
        numbers = self._numbers.reshape(-1)
        return [numbers, self._together] if with_blocks else [numbers]


class StepPacker:
    """Packs batches. Not thread-safe."""

    def __init__(self, device: torch.device, *, block_size: int, group: int) -> None:
        """`group` is the number of query heads that share a key head."""
        self._uplink = Uplink(device)
        self._block_size = block_size
        self._group = group
        self._tables = TableCache()
        # What the buffer of `decode_batch` holds.
        self._decoding: _DecodeArrays | None = None

    def batch(self, parts: Sequence[Rows]) -> StepBatch:
        """Build the batch like `build_batch`, on the device and with its tables."""
        assert len({part.lane.epoch for part in parts}) == 1, "exact and draft keys and values in one pass"
        spans, numbers = self._numbers(parts)
        sent = self._uplink.send([*numbers, *pack(spans, self._group, self._tables)])
        on_device = DeviceBatch(sent[0], sent[1], sent[2], sent[3], as_tables(sent[4:]))
        scored = [own for part, span in zip(parts, spans, strict=True) for own in part.scored(span.start)]
        return StepBatch(numbers[0], numbers[1], numbers[2], spans, numbers[3], on_device, tuple(scored))

    def decode_batch(self, parts: Sequence[Rows], num_rows: int, into: torch.Tensor) -> StepBatch:
        """Build a batch of rows that are each a sequence's next token, padded to `num_rows` rows.

        The arrays have fixed places in `into`, which nothing else may write. Its `spans` are only
        those of `parts`. The batch is valid until the next call.
        """
        # After an error it is not known what is in the buffer.
        kept, self._decoding = self._decoding, None
        if kept is None or not kept.is_for(num_rows, into):
            kept = _DecodeArrays(num_rows, into)
        blocks = [part.lane.blocks for part in parts]
        has_changed = kept.put_blocks(blocks, self._tables)
        kept.put_tokens(parts, self._block_size)
        self._uplink.send(kept.parts(with_blocks=has_changed), into)
        self._decoding = kept
        num = len(parts)
        tokens, positions, slots, rows = (
            each[:num] for each in (kept.tokens, kept.positions, kept.slots, kept.rows)
        )
        spans = tuple(map(SequenceSpan, range(num), repeat(1), (positions + 1).tolist(), blocks))
        return StepBatch(tokens, positions, slots, spans, rows, kept.on_device, is_recorded=True)

    def _numbers(self, parts: Sequence[Rows]) -> tuple[tuple[SequenceSpan, ...], list[Numbers]]:
        """Spans, and (tokens, positions, slots, logit_rows)."""
        spans: list[SequenceSpan] = []
        tokens: list[int] = []
        logit_rows: list[int] = []
        for part in parts:
            spans.append(SequenceSpan(len(tokens), part.end - part.first, part.end, part.lane.blocks))
            tokens += part.tokens[part.first : part.end]
            logit_rows += range(len(tokens) - part.num_logits, len(tokens))
        blocks, table_starts = join_tables([span.blocks for span in spans], self._tables)
        lengths = [span.length for span in spans]
        first_minus_row = [part.first - span.start for part, span in zip(parts, spans, strict=True)]
        positions = np.arange(len(tokens)) + np.repeat(np.array(first_minus_row, np.int64), lengths)
        places = np.repeat(table_starts, lengths) + positions // self._block_size
        slots = blocks[places] * self._block_size + positions % self._block_size
        as_array = [np.array(each, dtype=np.int64) for each in (tokens, logit_rows)]
        return tuple(spans), [as_array[0], positions, slots, as_array[1]]
