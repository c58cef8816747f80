"""The packing of a step's rows into one copy to the device.

Runs once a step, before the device can begin, so it must be fast.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...step.batch import Rows, SequenceSpan, StepBatch
from .tables import DeviceBatch, TableCache, as_tables, pack
from .transfer import Numbers, Uplink

# Arrays of `decode_batch` that have a number for each row; the blocks follow.
NUM_PARTS = 9


class StepPacker:
    """Packs batches. Not thread-safe."""

    def __init__(self, device: torch.device, *, block_size: int, group: int) -> None:
        """`group` is the number of query heads that share a key head."""
        self._uplink = Uplink(device)
        self._block_size = block_size
        self._group = group
        self._tables = TableCache()

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

        The arrays have fixed places in `into`. Its `spans` are only those of `parts`.
        """
        spans, numbers = self._numbers(parts)
        _, lengths, contexts, table_starts, _, tiles, blocks = pack(spans, self._group, self._tables)
        everybody = np.arange(num_rows)
        missing = num_rows - len(parts)
        tokens, positions, slots, _ = (_filled(part, missing) for part in numbers)
        slots[len(parts) :] = -1
        filled = [_filled(part, missing) for part in (lengths, contexts, table_starts)]
        assert not len(tiles)
        sent = self._uplink.send(
            [tokens, positions, slots, everybody, everybody, *filled, everybody, tiles, blocks], into
        )
        # All of the remaining buffer, not only the part in use now: a recorded step must have its
        # address.
        rest = into[NUM_PARTS * num_rows :]
        on_device = DeviceBatch(sent[0], sent[1], sent[2], sent[3], as_tables((*sent[4:-1], rest)))
        return StepBatch(numbers[0], numbers[1], numbers[2], spans, numbers[3], on_device)

    def _numbers(self, parts: Sequence[Rows]) -> tuple[tuple[SequenceSpan, ...], list[Numbers]]:
        """Spans, and (tokens, positions, slots, logit_rows)."""
        spans: list[SequenceSpan] = []
        tokens: list[int] = []
        slots: list[Numbers] = []
        positions: list[Numbers] = []
        logit_rows: list[int] = []
        for part in parts:
            blocks = part.lane.blocks
            spans.append(SequenceSpan(len(tokens), part.end - part.first, part.end, blocks))
            tokens += part.tokens[part.first : part.end]
            some = np.arange(part.first, part.end)
            positions.append(some)
            slots.append(self._tables.array(blocks)[some // self._block_size] * self._block_size)
            logit_rows += range(len(tokens) - part.num_logits, len(tokens))
        own = np.concatenate([np.empty(0, np.int64), *positions])
        in_slots = np.concatenate([np.empty(0, np.int64), *slots]) + own % self._block_size
        as_array = [np.array(each, dtype=np.int64) for each in (tokens, logit_rows)]
        return tuple(spans), [as_array[0], own, in_slots, as_array[1]]


def _filled(part: Numbers, num_zeros: int) -> Numbers:
    """Pad with zeros. np.pad takes ten times as long."""
    return np.concatenate([part, np.zeros(num_zeros, np.int64)]) if num_zeros else part
