"""Finding stretches of a text that comes in pieces, as if it had come whole.

A `Scanner` holds back just enough to know: a stretch is decided once `max_match_chars` behind its beginning are there.
So for patterns whose matches, with all that they look at around them, are no longer than that, what is found does not
depend on the pieces. A longer match is waited for while it reaches to the end of what is there, up to
`MAX_HELD_CHARS`, and is cut there. It does not know what is done with what was found.
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
    """How far one finder is. Its matches that begin before `position` are known."""

    finder: Finder
    position: int = 0  # in the whole text, as all places here


@dataclass(slots=True)
class Scanner:
    """Takes one text. `feed` and `finish` give it back as (stretch, whether something was found there), without what
    is held. Stretches that overlap are one.
    """

    finders: Sequence[Finder]
    max_match_chars: int
    _held: str = ""
    _held_start: int = 0  # `max_match_chars` before what is undecided: patterns look behind
    _given: int = 0  # up to where the text was given back
    _found: list[Span] = field(default_factory=list)  # decided, not given back
    _cursors: list[_Cursor] = field(init=False)

    def __post_init__(self) -> None:
        self._cursors = [_Cursor(finder) for finder in self.finders]

    @property
    def num_held_chars(self) -> int:
        """Of the text, not given back."""
        return self._held_start + len(self._held) - self._given

    def feed(self, piece: str) -> list[tuple[str, bool]]:
        result = []
        for start in range(
            0, len(piece), MAX_HELD_CHARS
        ):  # so that no search goes over more than bounded text
            self._held += piece[start : start + MAX_HELD_CHARS]
            result += self._decide(at_end=False)
        return result

    def finish(self) -> list[tuple[str, bool]]:
        return self._decide(at_end=True)

    def _decide(self, *, at_end: bool) -> list[tuple[str, bool]]:
        end = self._held_start + len(self._held)
        certain = end + 1 if at_end else end - self.max_match_chars  # a match that begins before is all there
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
                cursor.position = start  # it may go on
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
    """In order, those that overlap as one."""
    joined: list[Span] = []
    for start, stop in sorted(spans):
        if joined and start < joined[-1][1]:
            joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
        else:
            joined.append((start, stop))
    return joined
