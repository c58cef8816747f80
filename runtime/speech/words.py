"""Times of words: the attention of some heads over the sound, and by it the stretch of the sound that each token is of
(dynamic time warping), as transformers' `_extract_token_timestamps` has it; then words out of tokens, as its tokenizer
of Whisper has them. It knows no model.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from .windows import SpokenSegment

# Of languages without spaces between words.
_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
_OPENING = "\"'“¡¿([{-"  # before a word
_CLOSING = "\"'.。,，!！?？:：”)]}、"  # behind it
_REPLACEMENT = "\ufffd"

Floats = npt.NDArray[np.float32]
Decode = Callable[[Sequence[int]], str]


class SpokenWord(NamedTuple):
    """Times are seconds from the sound's beginning."""

    text: str
    start_s: float
    end_s: float


def token_ends(heads: Iterable[Floats], num_places: int, filter_width: int) -> list[int]:
    """The place of the window at which each token ends, of the first `num_places`: `heads` have the shares (tokens,
    places) that each token's attention gives the places. Needs a head, and a token.
    """
    total: Floats | None = None
    num_heads = 0
    for each in heads:
        shares = each[:, :num_places]
        spread = shares.std(axis=0)
        apart = np.divide(shares - shares.mean(axis=0), spread, out=np.zeros_like(shares), where=spread > 0)
        smooth = _median(apart, filter_width)
        total = smooth if total is None else total + smooth
        num_heads += 1
    assert total is not None
    return _path(-(total / np.float32(num_heads)).astype(np.float64))


def _median(rows: Floats, width: int) -> Floats:
    """The median of each number and its neighbours in the row, `width` together; rows are mirrored at their ends."""
    near = width // 2
    if rows.shape[1] <= near:
        return rows
    padded = np.pad(rows, ((0, 0), (near, near)), mode="reflect")
    windows = np.lib.stride_tricks.sliding_window_view(padded, width, axis=1)
    return np.stack([np.partition(row, near, axis=1)[:, near] for row in windows])


def _path(costs: npt.NDArray[np.float64]) -> list[int]:
    """The column at which the cheapest way through (rows, columns) comes into each row: a step goes one row on, one
    column, or both.
    """
    num_rows, num_columns = costs.shape
    total = np.full((num_rows + 1, num_columns + 1), np.inf, np.float32)
    total[0, 0] = 0
    steps = np.full(total.shape, 2, np.int8)
    steps[:, 0] = 1
    for diagonal in range(2, num_rows + num_columns + 1):
        row = np.arange(max(1, diagonal - num_columns), min(num_rows, diagonal - 1) + 1)
        column = diagonal - row
        both, down, right = total[row - 1, column - 1], total[row - 1, column], total[row, column - 1]
        is_both, is_down = (both < down) & (both < right), (down < both) & (down < right)
        before = np.where(is_both, both, np.where(is_down, down, right))
        total[row, column] = costs[row - 1, column - 1] + before
        steps[row, column] = np.where(is_both, 0, np.where(is_down, 1, 2))
    at, column, found = num_rows, num_columns, [0] * num_rows
    while at > 0:
        step = int(steps[at, column])
        found[at - 1] = max(column - 1, 0)  # the last one noted is the first column
        at -= step != 2
        column -= step != 1
    return found


def words_of(
    segment: SpokenSegment, ends_s: Sequence[float], times_from: int, decode: Decode, language: str
) -> list[SpokenWord]:
    """The words of a segment, whose tokens end at these times; before them is the end of the token before the first.
    A word begins where the token before it ends.
    """
    own = [place for place, token in enumerate(segment.tokens) if token < times_from]
    parts = _characters([segment.tokens[place] for place in own], decode)
    if language not in _WITHOUT_SPACES:
        parts = _spaced(parts)
    words = []
    for text, numbers in _with_marks(parts):
        if text.strip():
            words.append(SpokenWord(text.strip(), ends_s[own[numbers[0]]], ends_s[own[numbers[-1]] + 1]))
    return words


Parts = list[tuple[str, list[int]]]  # texts, and the numbers of their tokens


def _characters(tokens: Sequence[int], decode: Decode) -> Parts:
    """The shortest runs of tokens that are whole characters."""
    whole, parts, length = decode(tokens), [], 0
    numbers: list[int] = []
    for number in range(len(tokens)):
        numbers.append(number)
        text = decode([tokens[each] for each in numbers])
        at = length + text.find(_REPLACEMENT)
        # A mark of replacement may be the text's own.
        if _REPLACEMENT not in text or at >= len(whole) or whole[at] == _REPLACEMENT:
            parts.append((text, numbers))
            numbers = []
            length += len(text)
    return parts


def _spaced(parts: Parts) -> Parts:
    """Joined up to the next space or punctuation mark."""
    made: Parts = []
    for text, numbers in parts:
        is_mark = text.strip() in string.punctuation
        if not made or text.startswith(" ") or is_mark:
            made.append((text, numbers))
        else:
            made[-1] = (made[-1][0] + text, made[-1][1] + numbers)
    return made


def _with_marks(parts: Parts) -> Parts:
    """With punctuation at the words that it belongs to."""
    opened: Parts = []
    for text, numbers in reversed(parts):
        if opened and text.startswith(" ") and text.strip() in _OPENING:
            opened[-1] = (text + opened[-1][0], numbers + opened[-1][1])
        else:
            opened.append((text, numbers))
    made: Parts = []
    for text, numbers in reversed(opened):
        if made and not made[-1][0].endswith(" ") and text in _CLOSING:
            made[-1] = (made[-1][0] + text, made[-1][1] + numbers)
        else:
            made.append((text, numbers))
    return made
