"""From the scheduler's shares to the tensors of a step. Runs once a step, beside the model: it must cost
little.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .batch import SequenceSpan, StepBatch
from .scheduler import Share
from .sequence import Sequence as TokenSequence


def build_batch(shares: Sequence[Share[TokenSequence]], block_size: int) -> StepBatch:
    """The batch for these shares, whose sequences hold the blocks that they need, on the CPU.

    `logit_rows` has one row for each share that is the last of its sequence, in this order.
    """
    tokens: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    logit_rows: list[int] = []
    spans: list[SequenceSpan] = []
    for share in shares:
        sequence, first = share.sequence, share.sequence.num_computed
        end = first + share.num_tokens
        spans.append(SequenceSpan(len(tokens), share.num_tokens, end, sequence.blocks))
        tokens += sequence.tokens[first:end]
        positions += range(first, end)
        position = first
        while position < end:  # block by block: a prompt has many tokens
            block, offset = divmod(position, block_size)
            num_in_block = min(block_size - offset, end - position)
            slot = sequence.blocks[block] * block_size + offset
            slots += range(slot, slot + num_in_block)
            position += num_in_block
        if share.is_last:
            logit_rows.append(len(tokens) - 1)
    # One tensor and views of it: making a tensor from a list costs more than anything else here.
    num_tokens = len(tokens)
    all_numbers = torch.tensor(tokens + positions + slots + logit_rows, dtype=torch.int64)
    split = all_numbers.split_with_sizes([num_tokens, num_tokens, num_tokens, len(logit_rows)])
    return StepBatch(split[0], split[1], split[2], tuple(spans), split[3])
