"""A step's tables: what a batch is to the kernels, at fixed places of one buffer.

Attention is cut into items, which a block computes for each key head. Those of few rows and long
contexts are cut by keys, too, so that all processors take part; what a row gives does not depend on
it (`kernels/attention.cuh`). This module knows no driver: tables are numbers on the host.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ....errors import ModelError
from ....step.batch import Int64s, SequenceSpan, StepBatch

U32s = npt.NDArray[np.uint32]

SPLIT_KEYS = 256
FEW_PAIRS, MANY_PAIRS = 16, 64  # pairs (token, head) of an item
ALONE = 0xFFFFFFFF  # an item that folds its splits itself
# Splits that are folded by a launch of its own: a step has room for one of these.
SLOTS = (0, 64, 512)
MAX_MERGES = SLOTS[-1] // 2  # of two splits and more
MAX_SPLITS_PER_ITEM = 16
BLOCKS_PER_PROCESSOR = 4  # a guess, until it was measured

NUM_COUNTS = 8
_COUNT_ROWS, _COUNT_LOGITS, _COUNT_ITEMS, _COUNT_MERGES, _COUNT_PAIRS = range(5)
_ITEM_SIZE, _MERGE_SIZE = 5, 4


class ProgramKey(NamedTuple):
    """The steps that a program serves: all that fit."""

    rows: int  # at most
    many: bool  # items of MANY_PAIRS
    slots: int  # of SLOTS
    is_adapted: bool = False  # some rows have adapters

    def num_items(self, group: int, max_spans: int) -> int:
        """The most items of a step."""
        if self.many:
            return self.rows * group // MANY_PAIRS + min(self.rows, max_spans) + self.slots
        return self.rows * -(-group // FEW_PAIRS) + self.slots

    def num_merges(self, group: int) -> int:
        """The most items of a step whose splits are folded by a launch of its own."""
        return min(self.rows * -(-group // FEW_PAIRS), self.slots)


class TableSizes(Struct, frozen=True):
    """The limits of a step, and where its tables lie in the buffer, in numbers of 4 bytes."""

    max_rows: int
    max_spans: int
    max_logits: int
    max_items: int
    max_blocks: int
    max_types: int = 0  # of tokens

    @property
    def offsets(self) -> dict[str, int]:
        sizes = {
            "counts": NUM_COUNTS,
            "tokens": self.max_rows,
            "positions": self.max_rows,
            "slots": self.max_rows,
            "logit_rows": self.max_logits,
            "adapters": self.max_rows,
            "starts": self.max_spans,
            "lengths": self.max_spans,
            "contexts": self.max_spans,
            "table_starts": self.max_spans,
            "merges": _MERGE_SIZE * MAX_MERGES,
            "items": _ITEM_SIZE * self.max_items,
            "types": self.max_types,
            "blocks": self.max_blocks,
        }
        begins = itertools.accumulate(sizes.values(), initial=0)
        return dict(zip((*sizes, "end"), begins, strict=True))


class AttentionPlan(NamedTuple):
    items: list[tuple[int, int, int, int, int]]  # as `arguments.Item`
    merges: list[tuple[int, int, int, int]]  # as `arguments.Merge`
    num_slots: int
    many: bool


def plan_attention(
    spans: Sequence[SequenceSpan],
    group: int,
    *,
    num_kv_heads: int,
    num_processors: int,
    sees_ahead: bool = False,
    takes_many: bool = True,
    max_slots: int = SLOTS[-1],
) -> AttentionPlan:
    """Cut the attention of a step into items. `group` query heads share a key head. With `sees_ahead` rows see keys
    behind their own. Without `takes_many` items have FEW_PAIRS. Up to `max_slots` splits are folded by a launch of its
    own.
    """
    many = takes_many and any(span.length * group > FEW_PAIRS for span in spans)
    size = MANY_PAIRS if many else FEW_PAIRS
    num_items = sum(-(-span.length * group // size) for span in spans)
    wanted = -(-BLOCKS_PER_PROCESSOR * num_processors // max(1, num_items * num_kv_heads))
    plan = AttentionPlan([], [], 0, many)
    num_slots = 0
    for number, span in enumerate(spans):
        num_pairs = span.length * group
        for first in range(0, num_pairs, size):
            last = min(first + size, num_pairs) - 1
            last_key = span.context_len - (1 if sees_ahead else span.length - last // group)
            num_splits = last_key // SPLIT_KEYS + 1
            pieces = min(num_splits, max(wanted, -(-num_splits // MAX_SPLITS_PER_ITEM)))
            if last - first >= FEW_PAIRS or pieces == 1 or num_slots + num_splits > max_slots:
                plan.items.append((number, first, 0, num_splits, ALONE))
                continue
            length = -(-num_splits // pieces)
            plan.merges.append((number, first, num_slots, num_splits))
            for begin in range(0, num_splits, length):
                end = min(begin + length, num_splits)
                plan.items.append((number, first, begin, end, num_slots + begin))
            num_slots += num_splits
    return plan._replace(num_slots=num_slots)


class StepTables:
    """Fills a buffer of `TableSizes` with one batch after another. Not thread-safe."""

    def __init__(
        self,
        sizes: TableSizes,
        *,
        group: int,
        num_kv_heads: int,
        num_processors: int,
        vocab_size: int,
        num_blocks: int,
        block_size: int,
        num_experts_used: int = 0,
        sees_ahead: bool = False,
        takes_many: bool = True,
        max_slots: int = SLOTS[-1],
    ) -> None:
        self._sizes = sizes
        self._plan = partial(
            plan_attention,
            group=group,
            num_kv_heads=num_kv_heads,
            num_processors=num_processors,
            sees_ahead=sees_ahead,
            takes_many=takes_many,
            max_slots=max_slots,
        )
        self._vocab_size = vocab_size
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._num_experts_used = num_experts_used
        self._offsets = sizes.offsets

    def fill(
        self,
        batch: StepBatch,
        into: U32s,
        adapters: Sequence[int] = (),
        types: Int64s | Sequence[int] = (),
    ) -> tuple[AttentionPlan, int]:
        """Write the batch's tables, with the slot of each span's adapter where some have one, and tokens' types where
        there are such. Returns its plan, and the numbers of `into` that are in use.

        Raises `ModelError` for a batch that is too large, and for ids that nothing has.
        """
        spans, offsets = batch.spans, self._offsets
        self._check(batch)
        plan = self._plan(spans)
        self._require("items of attention", len(plan.items), self._sizes.max_items)
        num_merges = len(plan.merges)
        counts = into[offsets["counts"] : offsets["counts"] + NUM_COUNTS]
        counts[:] = 0
        counts[_COUNT_ROWS], counts[_COUNT_LOGITS] = len(batch.tokens), len(batch.logit_rows)
        counts[_COUNT_ITEMS], counts[_COUNT_MERGES] = len(plan.items), num_merges
        counts[_COUNT_PAIRS] = len(batch.tokens) * self._num_experts_used
        blocks = list(itertools.chain.from_iterable(span.blocks for span in spans))
        self._require("blocks", len(blocks), self._sizes.max_blocks)
        lengths = [len(span.blocks) for span in spans]
        for name, numbers in (
            ("tokens", batch.tokens),
            ("positions", batch.positions),
            ("slots", batch.slots),
            ("logit_rows", batch.logit_rows),
            ("adapters", np.repeat(adapters, [span.length for span in spans]) if adapters else ()),
            ("starts", [span.start for span in spans]),
            ("lengths", [span.length for span in spans]),
            ("contexts", [span.context_len for span in spans]),
            ("table_starts", list(itertools.accumulate(lengths, initial=0))[:-1]),
            ("merges", list(itertools.chain.from_iterable(plan.merges))),
            ("items", list(itertools.chain.from_iterable(plan.items))),
            ("types", types),
            ("blocks", blocks),
        ):
            begin = offsets[name]
            into[begin : begin + len(numbers)] = numbers
        if (
            blocks
            and int(into[offsets["blocks"] : offsets["blocks"] + len(blocks)].max()) >= self._num_blocks
        ):
            raise ModelError(f"a block of a step is outside the pool's {self._num_blocks}")
        return plan, offsets["blocks"] + len(blocks)

    def fill_logit_rows(self, rows: Int64s, into: U32s) -> int:
        """Write tables that only say which rows are scored. Returns the numbers that are in use."""
        self._require("rows of logits", len(rows), self._sizes.max_logits)
        begin = self._offsets["logit_rows"]
        into[:begin] = 0
        into[_COUNT_LOGITS] = len(rows)
        into[begin : begin + len(rows)] = rows
        return begin + len(rows)

    def _check(self, batch: StepBatch) -> None:
        self._require("rows", len(batch.tokens), self._sizes.max_rows)
        self._require("sequences", len(batch.spans), self._sizes.max_spans)
        self._require("rows of logits", len(batch.logit_rows), self._sizes.max_logits)
        num_slots = self._num_blocks * self._block_size
        for what, numbers, end in (
            ("token", batch.tokens, self._vocab_size),
            ("slot", batch.slots, num_slots),
            ("row of logits", batch.logit_rows, len(batch.tokens)),
        ):
            if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < end:
                raise ModelError(f"a {what} of a step is outside [0, {end})")
        for span in batch.spans:
            if span.context_len > len(span.blocks) * self._block_size:
                raise ModelError(
                    f"a sequence of {span.context_len} tokens has {len(span.blocks)} blocks of {self._block_size}"
                )

    def _require(self, what: str, num: int, most: int) -> None:
        if num > most:
            raise ModelError(
                f"a step has {num} {what}, more than the {most} that the device's tables have room for"
            )


def bucket_of(num: int, most: int) -> int:
    """The next power of 2, at most `most`."""
    return min(1 << max(0, num - 1).bit_length(), most)


def slots_of(num: int) -> int:
    """The smallest of SLOTS that holds this many."""
    return next(slots for slots in SLOTS if num <= slots)
