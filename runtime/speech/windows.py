"""From the tokens of a window of sound to timed segments, and how far the next window begins behind it: the sequential
algorithm for long sound, as transformers' generation of Whisper has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

S_PER_TIME = 0.02  # from one token of time to the next
COLUMNS_PER_TIME = 2  # of a spectrogram


class SpokenSegment(NamedTuple):
    """A stretch of speech. Times are seconds from the sound's beginning."""

    start_s: float
    end_s: float
    tokens: tuple[int, ...]  # with those of times
    first_column: int  # of its window


def segments_of(
    tokens: Sequence[int], times_from: int, *, first_column: int, num_columns: int
) -> tuple[list[SpokenSegment], int]:
    """The segments of a window of `num_columns` from this one of the spectrogram on, whose tokens end before the end
    token; and how many columns the next window begins behind it.

    Two times next to each other end a segment. What follows the last pair is cut off in its middle, and heard again,
    unless one time alone comes last: then there is silence behind it.
    """
    begin_s = first_column / COLUMNS_PER_TIME * S_PER_TIME
    is_time = [token >= times_from for token in tokens]
    ends = [place + 1 for place in range(len(tokens) - 1) if is_time[place] and is_time[place + 1]]
    is_single = is_time[-2:] == [False, True]

    def seconds(token: float) -> float:
        return begin_s + (token - times_from) * S_PER_TIME

    if not ends:
        last = num_columns // COLUMNS_PER_TIME
        times = [token for token in tokens if token >= times_from]
        if times and times[-1] != times_from:
            last = times[-1] - times_from
        return [SpokenSegment(begin_s, begin_s + last * S_PER_TIME, tuple(tokens), first_column)], num_columns
    if is_single:
        ends.append(len(tokens))
    segments, first = [], 0
    for end in ends:
        own = tuple(tokens[first:end])
        segments.append(SpokenSegment(seconds(own[0]), seconds(own[-1]), own, first_column))
        first = end
    if is_single:
        return segments, num_columns
    return segments, (tokens[first - 1] - times_from) * COLUMNS_PER_TIME


def prompt_of(segments: Sequence[SpokenSegment], times_from: int) -> list[int]:
    """Their tokens as the prompt of the next window. Of two times at the end of one, the last is not used."""
    return [
        token
        for each in segments
        for token in (each.tokens[:-1] if _ends_in_pair(each.tokens, times_from) else each.tokens)
    ]


def _ends_in_pair(tokens: Sequence[int], times_from: int) -> bool:
    return len(tokens) > 2 and tokens[-2] >= times_from
