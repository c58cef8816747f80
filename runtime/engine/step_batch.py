"""From rows of sequences to the tensors of a step. Runs once a step, beside the model: it must cost little."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .batch import SequenceSpan, StepBatch
from .scheduler import Share
from .sequence import Lane
from .sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True)
class Rows:
    """The tokens [first, end) of one sequence, whose keys and values go to a lane that holds the blocks for them.

    Logits are wanted of the last `num_logits` of them.
    """

    lane: Lane
    tokens: Sequence[int]  # from the sequence's first on
    first: int
    end: int
    num_logits: int

    @classmethod
    def of(cls, share: Share[TokenSequence]) -> Rows:
        """What the scheduler gave to a sequence."""
        lane = share.sequence.exact
        end = lane.num_computed + share.num_tokens
        return cls(lane, lane.tokens, lane.num_computed, end, int(share.is_last))


def build_batch(parts: Sequence[Rows], block_size: int) -> StepBatch:
    """The batch for these rows, on the CPU; all lanes must be of one epoch. `logit_rows` are in this order."""
    assert len({part.lane.epoch for part in parts}) == 1, "exact and draft keys and values in one pass"
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans: list[SequenceSpan] = []
    for part in parts:
        blocks = part.lane.blocks
        spans.append(SequenceSpan(len(tokens), part.end - part.first, part.end, blocks))
        tokens += part.tokens[part.first : part.end]
        positions += range(part.first, part.end)
        position = part.first
        while position < part.end:  # block by block: a prompt has many tokens
            block, offset = divmod(position, block_size)
            num_in_block = min(block_size - offset, part.end - position)
            slot = blocks[block] * block_size + offset
            slots += range(slot, slot + num_in_block)
            position += num_in_block
        logit_rows += range(len(tokens) - part.num_logits, len(tokens))
    # One tensor and views of it: making a tensor from a list costs more than anything else here.
    num_tokens = len(tokens)
    all_numbers = torch.tensor(tokens + positions + slots + logit_rows, dtype=torch.int64)
    split = all_numbers.split_with_sizes([num_tokens, num_tokens, num_tokens, len(logit_rows)])
    return StepBatch(split[0], split[1], split[2], tuple(spans), split[3])
