"""The tables from which kernels read a step's sequences, in one tensor.

The block tables are concatenated, each as long as its sequence needs, so that one copy of just
these numbers describes a whole step to the device. They also assign rows to kernels: a span of one
row goes to the kernel that splits its keys, all others are cut into tiles of rows. Pure arithmetic;
only `tables_of` and `tell_device` copy to a device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt
import torch

from ...step.batch import SequenceSpan, StepBatch
from .variants import MAX_SPLITS, TILE_ROWS

# Of attention, including those that find nothing to do.
PROGRAMS_A_PROCESSOR = 16

Numbers = npt.NDArray[np.int64]


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

    def __init__(self, max_tables: int = 1_024) -> None:
        self._max_tables = max_tables
        # Keyed by the tuple's identity; the tuple is kept alive, so that its identity is not
        # reused.
        self._arrays: dict[int, tuple[tuple[int, ...], Numbers]] = {}

    def array(self, blocks: tuple[int, ...]) -> Numbers:
        found = self._arrays.get(id(blocks))
        if found is None:
            if len(self._arrays) >= self._max_tables:
                self._arrays.clear()
            found = self._arrays[id(blocks)] = (blocks, np.array(blocks, dtype=np.int64))
        return found[1]


def pack(spans: Sequence[SequenceSpan], group: int, cache: TableCache) -> list[Numbers]:
    """The parts of `StepTables`, in its order. `group` query heads share a key head."""
    tables = [cache.array(span.blocks) for span in spans]
    spans_table = np.array([(span.start, span.length, span.context_len) for span in spans], dtype=np.int64)
    spans_table = spans_table.reshape(-1, 3).T
    sizes = [len(table) for table in tables]
    table_starts = np.array([0, *accumulate(sizes)][: len(sizes)], dtype=np.int64)
    decoding = np.flatnonzero(spans_table[1] == 1)
    tiles = [
        (number, first)
        for number, span in enumerate(spans)
        if span.length > 1
        for first in range(0, span.length * group, TILE_ROWS)
    ]
    blocks = np.concatenate(tables) if tables else np.empty(0, np.int64)
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
