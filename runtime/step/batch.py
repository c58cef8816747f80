"""The batch of one step, tokens of several sequences back to back without padding, and its arrays.

The conversion of sequences' rows to arrays runs once a step, so it must be fast.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from .images import PromptImage, SoundAttention
    from .logprobs import PromptScores


class LaneLike(Protocol):
    """The location of a sequence's keys and values of one epoch."""

    epoch: Epoch
    blocks: tuple[int, ...]
    num_computed: int
    adapter: Any  # as `SequenceSpan` has it
    images: tuple[PromptImage, ...]  # of the prompt; all have rows
    state: int | None  # as `SequenceSpan` has them
    saves: tuple[StateSave, ...]


class Rows(Struct, frozen=True):
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

    @property
    def is_next_token(self) -> bool:
        """True for one token, after which the next one is chosen, and nothing else."""
        is_one = self.num_logits == 1 and self.end - self.first == 1
        return is_one and (self.scores is None or not self.scored(0))

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
    images: list[ImageRows] = []
    axes: list[tuple[int, Int64s]] = []  # of rows from the first one on
    runs: list[tuple[int, int, int]] = []  # rows [first, end), and what these see the tokens before
    for part in parts:
        blocks = part.lane.blocks
        attention = None
        for image in part.lane.images:
            attention = image.attention or attention
            own = image.within(part.first, part.end)
            if own.stop > own.start:
                rows = image.places[own] + (len(tokens) - part.first)
                images.append(ImageRows(rows, image.rows[own]))
                start = len(tokens) - part.first
                runs += [
                    (start + max(first, part.first), start + end, end)
                    for first, end in image.runs
                    if first < part.end and part.first < end
                ]
        if any(image.grid is not None for image in part.lane.images):
            from .images import axes_of  # of few requests

            axes.append((len(tokens), axes_of(part.lane.images, part.first, part.end)))
        scored += part.scored(len(tokens))
        lane, length = part.lane, part.end - part.first
        spans.append(
            SequenceSpan(
                len(tokens), length, part.end, blocks, lane.adapter, lane.state, lane.saves, attention
            )
        )
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
    ends = None
    if runs:
        ends = numbers[num_tokens : 2 * num_tokens] + 1
        for first, end, seen in runs:
            ends[first:end] = seen
    turned = None
    if axes:
        turned = np.tile(numbers[num_tokens : 2 * num_tokens], (3, 1))
        for first, positions_of in axes:
            turned[:, first : first + positions_of.shape[1]] = positions_of
    return StepBatch(
        numbers[:num_tokens],
        numbers[num_tokens : 2 * num_tokens],
        numbers[2 * num_tokens : 3 * num_tokens],
        tuple(spans),
        numbers[3 * num_tokens :],
        scored=tuple(scored),
        images=tuple(images),
        ends=ends,
        axes=turned,
    )


Int64s = npt.NDArray[np.int64]


class Epoch(enum.IntEnum):
    """The weights that keys and values were computed with. Those of one epoch never serve the
    other.
    """

    DRAFT = 0  # some of them were not exact
    EXACT = 1


class StateSave(NamedTuple):
    """A copy of a sequence's recurrent state as it is after its first `num_tokens` tokens."""

    num_tokens: int
    state: int  # where it goes


class SequenceSpan(Struct, frozen=True):
    """One sequence's share of a step: rows [start, start + length) of the batch.

    `context_len` counts the tokens that its KV blocks hold once this step's rows are written (cached +
    length); `blocks` is its block table: token t of the sequence lies in block blocks[t // block_size]. `adapter` is
    the `Adapter` (`models/adapter.py`) that its rows have. `state` is the place of the sequence's recurrent state, of
    models that have one: the step reads it unless the span begins the sequence, and leaves it as it is after its last
    row. None: that with the number of its first block. `saves` are copies in between, ascending. `attention` gets what
    is computed of the attention over its sound.
    """

    start: int
    length: int
    context_len: int
    blocks: tuple[int, ...]
    adapter: Any = None
    state: int | None = None
    saves: tuple[StateSave, ...] = ()
    attention: SoundAttention | None = None


class ScoredRows(Struct, frozen=True):
    """Rows [start, start + length) of the batch, a prompt's tokens from `position` on, whose logits
    go to `scores`.
    """

    scores: PromptScores
    position: int
    start: int
    length: int


class ImageRows(Struct, frozen=True, eq=False):
    """Rows of the batch that take these values in place of their tokens' embeddings."""

    rows: Int64s  # (N,), ascending
    values: (
        Any  # (N, hidden_size) in the model's dtype; then, side by side, those of `DecoderSpec.num_deep_rows`
    )


class StepBatch(Struct, frozen=True, eq=False):
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
    images: tuple[ImageRows, ...] = ()
    # (T,): a token sees those of its sequence before this one; None: itself and all before it.
    ends: Int64s | None = None
    # (3, T): what turns a token in place of its position, on three axes; None: no sequence needs others.
    axes: Int64s | None = None
    # Its pass is launched as a whole: `forward` returns at once, and waits for no weights.
    is_recorded: bool = False


def join(batches: Sequence[StepBatch]) -> StepBatch:
    """Concatenate batches."""
    spans: list[SequenceSpan] = []
    logit_rows: list[Int64s] = []
    scored: list[ScoredRows] = []
    images: list[ImageRows] = []
    num_rows = 0
    for batch in batches:
        spans += [replace(span, start=span.start + num_rows) for span in batch.spans]
        logit_rows.append(batch.logit_rows + num_rows)
        scored += [replace(rows, start=rows.start + num_rows) for rows in batch.scored]
        images += [replace(image, rows=image.rows + num_rows) for image in batch.images]
        num_rows += len(batch.tokens)
    return StepBatch(
        np.concatenate([batch.tokens for batch in batches]),
        np.concatenate([batch.positions for batch in batches]),
        np.concatenate([batch.slots for batch in batches]),
        tuple(spans),
        np.concatenate(logit_rows),
        scored=tuple(scored),
        images=tuple(images),
        ends=_joined_ends(batches),
        axes=_joined_axes(batches),
    )


def _joined_ends(batches: Sequence[StepBatch]) -> Int64s | None:
    if all(batch.ends is None for batch in batches):
        return None
    return np.concatenate([batch.positions + 1 if batch.ends is None else batch.ends for batch in batches])


def _joined_axes(batches: Sequence[StepBatch]) -> Int64s | None:
    if all(batch.axes is None for batch in batches):
        return None
    axes = [np.tile(batch.positions, (3, 1)) if batch.axes is None else batch.axes for batch in batches]
    return np.concatenate(axes, axis=1)


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
        images=tuple(_images_at(batch.images, index)),
        ends=None if batch.ends is None else batch.ends[index],
        axes=None if batch.axes is None else batch.axes[:, index],
    )
    return chosen, index


def part_of(batch: StepBatch, rows: Int64s) -> StepBatch:
    """These rows of the batch, ascending, without what tells rows apart in it: of each span, one run."""
    spans: list[SequenceSpan] = []
    for span in batch.spans:
        first, end = np.searchsorted(rows, (span.start, span.start + span.length)).tolist()
        if first < end:
            behind = span.start + span.length - 1 - int(rows[end - 1])
            spans.append(
                replace(span, start=first, length=end - first, context_len=span.context_len - behind)
            )
    return StepBatch(
        batch.tokens[rows], batch.positions[rows], batch.slots[rows], tuple(spans), np.empty(0, np.int64)
    )


def _images_at(images: Sequence[ImageRows], index: Int64s) -> Iterator[ImageRows]:
    """The rest of the images in a batch of the rows with these numbers, ascending."""
    for image in images:
        is_left = np.isin(image.rows, index)
        if is_left.any():
            yield ImageRows(np.searchsorted(index, image.rows[is_left]), image.values[is_left])
