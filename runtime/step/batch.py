"""The batch of one step: tokens of several sequences back to back, without padding."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .logprobs import PromptScores

Int64s = npt.NDArray[np.int64]


class Epoch(enum.IntEnum):
    """The weights that keys and values were computed with. Those of one epoch never serve the
    other.
    """

    DRAFT = 0  # some of them were not exact
    EXACT = 1


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's share of a step: rows [start, start + length) of the batch.

    `context_len` counts the tokens that its KV blocks hold once this step's rows are written (cached +
    length); `blocks` is its block table: token t of the sequence lies in block blocks[t // block_size]. `adapter` is
    the `Adapter` (`models/adapter.py`) that its rows have.
    """

    start: int
    length: int
    context_len: int
    blocks: tuple[int, ...]
    adapter: Any = None


@dataclass(frozen=True, slots=True)
class ScoredRows:
    """Rows [start, start + length) of the batch, a prompt's tokens from `position` on, whose logits
    go to `scores`.
    """

    scores: PromptScores
    position: int
    start: int
    length: int


@dataclass(frozen=True, slots=True, eq=False)
class StepBatch:
    """T tokens of all sequences together, and R rows whose logits are needed. All arrays are
    contiguous.
    """

    tokens: Int64s  # (T,)
    positions: Int64s  # (T,), position of each token in its own sequence
    slots: Int64s  # (T,), block * block_size + offset: where this step's keys and values go
    spans: tuple[SequenceSpan, ...]
    logit_rows: Int64s  # (R,), indices into the T rows
    # The backend's copy of the batch on a device.
    on_device: Any = None
    scored: tuple[ScoredRows, ...] = ()


def join(batches: Sequence[StepBatch]) -> StepBatch:
    """Concatenate batches."""
    spans: list[SequenceSpan] = []
    logit_rows: list[Int64s] = []
    scored: list[ScoredRows] = []
    num_rows = 0
    for batch in batches:
        spans += [replace(span, start=span.start + num_rows) for span in batch.spans]
        logit_rows.append(batch.logit_rows + num_rows)
        scored += [replace(rows, start=rows.start + num_rows) for rows in batch.scored]
        num_rows += len(batch.tokens)
    return StepBatch(
        np.concatenate([batch.tokens for batch in batches]),
        np.concatenate([batch.positions for batch in batches]),
        np.concatenate([batch.slots for batch in batches]),
        tuple(spans),
        np.concatenate(logit_rows),
        scored=tuple(scored),
    )


def select(batch: StepBatch, numbers: Sequence[int]) -> tuple[StepBatch, Int64s]:
    """Select these spans of the batch, by number, ascending. Returns the new batch and the numbers
    of its rows.
    """
    kept = [batch.spans[number] for number in numbers]
    rows = [row for span in kept for row in range(span.start, span.start + span.length)]
    place = {row: index for index, row in enumerate(rows)}
    spans: list[SequenceSpan] = []
    start = 0
    for span in kept:
        spans.append(replace(span, start=start))
        start += span.length
    logit_rows = [place[row] for row in batch.logit_rows.tolist() if row in place]
    index = np.array(rows, dtype=np.int64)
    chosen = StepBatch(
        batch.tokens[index],
        batch.positions[index],
        batch.slots[index],
        tuple(spans),
        np.array(logit_rows, dtype=np.int64),
        scored=tuple(replace(own, start=place[own.start]) for own in batch.scored if own.start in place),
    )
    return chosen, index
