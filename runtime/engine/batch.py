"""One step's work as the model sees it: tokens of several sequences back to back, without padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from ..cuda.tables import StepTables


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's share of a step: rows [start, start + length) of the batch.

    `context_len` counts the tokens that its KV blocks hold once this step's rows are written (cached +
    length); `blocks` is its block table: token t of the sequence lies in block blocks[t // block_size].
    """

    start: int
    length: int
    context_len: int
    blocks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """All tensors lie on the model's device. T tokens of all sequences together, R rows whose logits are
    wanted.
    """

    tokens: torch.Tensor  # (T,) int64
    positions: torch.Tensor  # (T,) int64, position of each token in its own sequence
    slots: torch.Tensor  # (T,) int64, block * block_size + offset: where this step's keys and values go
    spans: tuple[SequenceSpan, ...]
    logit_rows: torch.Tensor  # (R,) int64, indices into the T rows
    tables: StepTables | None = None  # the spans once more, where a CUDA device has been told of them


def join(batches: Sequence[StepBatch]) -> StepBatch:
    """All of them as one, their rows behind one another."""
    spans: list[SequenceSpan] = []
    logit_rows: list[torch.Tensor] = []
    num_rows = 0
    for batch in batches:
        spans += [replace(span, start=span.start + num_rows) for span in batch.spans]
        logit_rows.append(batch.logit_rows + num_rows)
        num_rows += len(batch.tokens)
    return StepBatch(
        torch.cat([batch.tokens for batch in batches]),
        torch.cat([batch.positions for batch in batches]),
        torch.cat([batch.slots for batch in batches]),
        tuple(spans),
        torch.cat(logit_rows),
    )


def select(batch: StepBatch, numbers: Sequence[int]) -> tuple[StepBatch, torch.Tensor]:
    """Only these spans of it, by number, ascending; and which of its rows they are, int64."""
    kept = [batch.spans[number] for number in numbers]
    rows = [row for span in kept for row in range(span.start, span.start + span.length)]
    place = {row: index for index, row in enumerate(rows)}
    spans: list[SequenceSpan] = []
    start = 0
    for span in kept:
        spans.append(replace(span, start=start))
        start += span.length
    logit_rows = [place[row] for row in batch.logit_rows.tolist() if row in place]
    index = batch.tokens.new_tensor(rows)
    chosen = StepBatch(
        batch.tokens[index],
        batch.positions[index],
        batch.slots[index],
        tuple(spans),
        batch.logit_rows.new_tensor(logit_rows),
    )
    return chosen, index
