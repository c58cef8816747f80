"""Incremental search in a text that arrives in pieces, with the result of a search in the whole
text.

A `Scanner` holds back the minimum: a match is decided once `max_match_chars` after its beginning
have arrived. So for patterns whose matches, with lookahead and lookbehind, are no longer than that,
the result does not depend on the pieces. A longer match is awaited while it reaches the end of the
text so far, up to `MAX_HELD_CHARS`, and is cut there. This module does not know the use of the
matches.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

MAX_HELD_CHARS = 1 << 16

Span = tuple[int, int]
Finder = re.Pattern[str] | Callable[[str], Iterable[Span]]


@dataclass(slots=True)
class _Cursor:
    """The position of one finder. Its matches that begin before `position` are known."""

    finder: Finder
    position: int = 0  # in the whole text, as all places here


@dataclass(slots=True)
class Scanner:
    """Scans one text. `feed` and `finish` return it as (part, whether it matched), without the held
    text. Overlapping matches are merged.
    """

    finders: Sequence[Finder]
    max_match_chars: int
    _held: str = ""
    # `max_match_chars` before the undecided text: patterns look behind.
    _held_start: int = 0
    # End of the text returned so far.
    _given: int = 0
    # Decided but not returned yet.
    _found: list[Span] = field(default_factory=list)
    _cursors: list[_Cursor] = field(init=False)

    def __post_init__(self) -> None:
        self._cursors = [_Cursor(finder) for finder in self.finders]

    @property
    def num_held_chars(self) -> int:
        """The length of the text held back."""
        return self._held_start + len(self._held) - self._given

    def feed(self, piece: str) -> list[tuple[str, bool]]:
        result = []
        for start in range(
            0,
            len(piece),
            MAX_HELD_CHARS,
            # Bounds the text of each search.
        ):
            self._held += piece[start : start + MAX_HELD_CHARS]
            result += self._decide(at_end=False)
        return result

    def finish(self) -> list[tuple[str, bool]]:
        return self._decide(at_end=True)

    def _decide(self, *, at_end: bool) -> list[tuple[str, bool]]:
        end = self._held_start + len(self._held)
        # A match that begins before has arrived completely.
        certain = end + 1 if at_end else end - self.max_match_chars
        for cursor in self._cursors:
            if isinstance(cursor.finder, re.Pattern):
                self._search(cursor, cursor.finder, certain, at_end=at_end)
            else:
                self._ask(cursor, cursor.finder, certain)
        safe = min(end, *(cursor.position for cursor in self._cursors)) if self._cursors else end
        result = self._give(safe)
        keep = max(self._held_start, min(self._given, safe) - self.max_match_chars)
        self._held = self._held[keep - self._held_start :]
        self._held_start = keep
        return result

    def _search(self, cursor: _Cursor, pattern: re.Pattern[str], certain: int, *, at_end: bool) -> None:
        base, end = self._held_start, self._held_start + len(self._held)
        while cursor.position < certain:
            match = pattern.search(self._held, cursor.position - base)
            if match is None or match.start() + base >= certain:
                cursor.position = certain
                return
            start, stop = match.start() + base, match.end() + base
            if stop == end and not at_end and end - start < MAX_HELD_CHARS:
                cursor.position = start  # it may become longer
                return
            if start < stop:
                self._found.append((start, stop))
            cursor.position = max(stop, start + 1)

    def _ask(self, cursor: _Cursor, find: Callable[[str], Iterable[Span]], certain: int) -> None:
        base = self._held_start
        for start, stop in find(self._held):
            if cursor.position <= start + base < certain and start < stop:
                self._found.append((start + base, stop + base))
        cursor.position = max(cursor.position, certain)

    def _give(self, safe: int) -> list[tuple[str, bool]]:
        result = []
        regions = _joined(self._found)
        self._found = []
        for start, stop in regions:
            if stop > safe:  # another may overlap it
                safe = min(safe, start)
                self._found.append((start, stop))
                continue
            result += [(self._text(self._given, start), False), (self._text(start, stop), True)]
            self._given = stop
        if safe > self._given:
            result.append((self._text(self._given, safe), False))
            self._given = safe
        return [part for part in result if part[0]]

    def _text(self, start: int, stop: int) -> str:
        return self._held[start - self._held_start : stop - self._held_start]


def _joined(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, with overlapping ones merged."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
