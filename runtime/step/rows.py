"""The conversion of sequences' rows to the arrays of a step. Runs once a step, so it must be fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from .batch import Epoch, ScoredRows, SequenceSpan, StepBatch

if TYPE_CHECKING:
    from .logprobs import PromptScores


class LaneLike(Protocol):
    """The location of a sequence's keys and values of one epoch."""

    epoch: Epoch
    blocks: tuple[int, ...]
    num_computed: int
    adapter: Any  # as `SequenceSpan` has it


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens [first, end) of one sequence, whose lane holds the blocks for their keys and
    values.

    Logits are needed of the last `num_logits` of them, and those of the prompt's rows go to
    `scores`.
    """

    lane: LaneLike
    tokens: Sequence[int]  # from the sequence's first token on
    first: int
    end: int
    num_logits: int
    scores: PromptScores | None = None

    def scored(self, start: int) -> tuple[ScoredRows, ...]:
        """The rows whose logits go to `scores`, none or one range; `start` is the first row of
        these tokens in the batch.
        """
        end = 0 if self.scores is None else min(self.end, self.scores.num_rows)
        if self.scores is None or end <= self.first:
            return ()
        return (ScoredRows(self.scores, self.first, start, end - self.first),)


def build_batch(parts: Sequence[Rows], block_size: int) -> StepBatch:
    """Build the batch of these rows; all lanes must be of one epoch. `logit_rows` are in this
    order.
    """
    assert len({part.lane.epoch for part in parts}) == 1, "exact and draft keys and values in one pass"
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans: list[SequenceSpan] = []
    scored: list[ScoredRows] = []
    for part in parts:
        blocks = part.lane.blocks
        scored += part.scored(len(tokens))
        spans.append(SequenceSpan(len(tokens), part.end - part.first, part.end, blocks, part.lane.adapter))
        tokens += part.tokens[part.first : part.end]
        positions += range(part.first, part.end)
        position = part.first
        while position < part.end:  # block by block, because a prompt has many tokens
            block, offset = divmod(position, block_size)
            num_in_block = min(block_size - offset, part.end - position)
            slot = blocks[block] * block_size + offset
            slots += range(slot, slot + num_in_block)
            position += num_in_block
        logit_rows += range(len(tokens) - part.num_logits, len(tokens))
    # One array and views of it: making an array from a list costs more than everything else here.
    num_tokens = len(tokens)
    numbers = np.array(tokens + positions + slots + logit_rows, dtype=np.int64)
    return StepBatch(
        numbers[:num_tokens],
        numbers[num_tokens : 2 * num_tokens],
        numbers[2 * num_tokens : 3 * num_tokens],
        tuple(spans),
        numbers[3 * num_tokens :],
        scored=tuple(scored),
    )
