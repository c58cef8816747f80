"""Safety filters: requests refused before the model sees them, and parts of answers removed as they arrive.

The developer supplies the patterns: regular expressions, or functions. Teneral comes with no word lists. Texts are
bounded before matching; the running time of a pattern is its author's responsibility, as Python's `re` has no limit.

A `Scanner` searches a text that arrives in pieces, with the result of a search in the whole text, and holds back the
minimum: a match is decided once `max_match_chars` after its beginning have arrived. So for patterns whose matches, with
lookahead and lookbehind, are no longer than that, the result does not depend on the pieces. A longer match is awaited
while it reaches the end of the text so far, up to `MAX_HELD_CHARS`, and is cut there. This module knows nothing of
models or platforms.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ....loader.errors import UsageError
from ....runtime.errors import HandlerError, RefusedError, RequestError
from ...function.context import Context

MAX_HELD_CHARS = 1 << 16

Span = tuple[int, int]
Finder = re.Pattern[str] | Callable[[str], Iterable[Span]]
MAX_CHARS = 1 << 20  # of all texts of one event or value
MAX_DEPTH = 64  # of nested lists and objects

Pattern = str | re.Pattern[str]


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


class Refuse:
    """A `pre` function: raises `RefusedError` for an event with a matching text; a client gets a
    400 with `code`.
    """

    def __init__(
        self,
        *checks: Pattern | Callable[[str], bool],
        message: str = "this request is not served here",
        code: str = "content_refused",
        max_chars: int = MAX_CHARS,
    ) -> None:
        """A check is a regular expression, or a function that returns True for a text to refuse.
        All strings within the event are checked separately, names of fields included. An event with
        more than `max_chars` is refused.
        """
        if not checks:
            raise UsageError("Refuse needs at least one check", key="checks")
        self._checks = [check if callable(check) else _searching(check) for check in checks]
        self._message = message
        self._code = code
        self._max_chars = max_chars

    def __call__(self, event: Any, context: Context) -> Any:
        num_chars = 0
        for path, text in _texts(event):
            num_chars += len(text)
            if num_chars > self._max_chars:
                raise RequestError(f"the texts have more than {self._max_chars} characters", param=path)
            if any(check(text) for check in self._checks):
                context.logger.info("refused: %s", self._code)
                raise RefusedError(self._message, code=self._code, param=path)
        return event


class Redact:
    """Replaces matches. `Redact(…)` is a `post` function for whole values, its `stream` a
    `post_stream` for texts in pieces.

    Pieces are held back as far as needed: together they equal the redacted whole text.
    """

    def __init__(
        self,
        *finders: Pattern | Callable[[str], Iterable[Span]],
        replacement: str = "[redacted]",
        max_match_chars: int = 256,
        text_field: str = "text",
        max_chars: int = MAX_CHARS,
    ) -> None:
        """A finder is a regular expression, or a function that returns (start, end) of its matches,
        and decides by no more than `max_match_chars` around. Longer matches of expressions are
        found in whole texts, and in streams up to 65,536 characters. `text_field` is the field of
        stream objects that has their piece of text; strings elsewhere in a value are texts of their
        own.
        """
        if not finders or not 0 < max_match_chars <= MAX_HELD_CHARS:
            raise UsageError(
                f"Redact needs at least one finder, and max_match_chars from 1 to {MAX_HELD_CHARS}",
                key="max_match_chars",
            )
        self._finders: list[Finder] = [
            re.compile(finder) if isinstance(finder, str) else finder for finder in finders
        ]
        self._replacement = replacement
        self._max_match_chars = max_match_chars
        self._text_field = text_field
        self._max_chars = max_chars

    def __call__(self, value: Any, context: Context) -> Any:
        """The value with its texts redacted; names of fields stay. Raises `HandlerError` for more
        than `max_chars`.
        """
        if sum(len(text) for _, text in _texts(value)) > self._max_chars:
            raise HandlerError(f"the answer has more than {self._max_chars} characters to redact")
        return self._redacted(value)

    def text(self, text: str) -> str:
        """A whole text, redacted."""
        scanner = self._scanner()
        return self._joined(scanner.feed(text) + scanner.finish())

    def stream(self, values: Any, context: Context) -> Any:
        """Redact a sync or async iterator.

        Its values are pieces of one text, as strings or in the `text_field` of objects; any other
        value is redacted by itself, after the held text.
        """
        return self._astream(values) if isinstance(values, AsyncIterator) else self._stream(values)

    def _stream(self, values: Iterator[Any]) -> Iterator[Any]:
        stream = _Stream(self, self._scanner(), self._text_field)
        for value in values:
            yield from stream.take(value)
        yield from stream.end()

    async def _astream(self, values: AsyncIterator[Any]) -> AsyncIterator[Any]:
        stream = _Stream(self, self._scanner(), self._text_field)
        async for value in values:
            for result in stream.take(value):
                yield result
        for result in stream.end():
            yield result

    def _scanner(self) -> Scanner:
        return Scanner(self._finders, self._max_match_chars)

    def _redacted(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, dict):
            return {key: self._redacted(item) for key, item in value.items()}
        return [self._redacted(item) for item in value] if isinstance(value, list | tuple) else value

    def _joined(self, parts: Sequence[tuple[str, bool]]) -> str:
        return "".join(self._replacement if found else text for text, found in parts)


class _Stream:
    """One stream being redacted. Held text is returned in the shape of the last piece."""

    def __init__(self, redact: Redact, scanner: Scanner, text_field: str) -> None:
        self._redact = redact
        self._scanner = scanner
        self._text_field = text_field
        self._as_objects = False

    def take(self, value: Any) -> Iterator[Any]:
        piece = value.get(self._text_field) if isinstance(value, dict) else value
        if not isinstance(piece, str):
            yield from self.end()
            yield self._redact._redacted(value)
            return
        self._as_objects = isinstance(value, dict)
        text = self._redact._joined(self._scanner.feed(piece))
        # Its other fields are returned with it, even without text.
        if self._as_objects and len(value) > 1:
            rest = {key: item for key, item in value.items() if key != self._text_field}
            yield {**self._redact._redacted(rest), self._text_field: text}
        elif text:
            yield self._shaped(text)

    def end(self) -> Iterator[Any]:
        """The held text. The next piece begins another text."""
        text = self._redact._joined(self._scanner.finish())
        self._scanner = self._redact._scanner()
        if text:
            yield self._shaped(text)

    def _shaped(self, text: str) -> Any:
        return {self._text_field: text} if self._as_objects else text


def _searching(pattern: Pattern) -> Callable[[str], bool]:
    compiled = re.compile(pattern)
    return lambda text: compiled.search(text) is not None


def _texts(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """All strings in a JSON value, with their paths. Raises `RequestError` for nesting deeper than
    `MAX_DEPTH`.
    """
    if depth > MAX_DEPTH:
        raise RequestError(f"the value is nested more than {MAX_DEPTH} deep", param=path[:100])
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            inner = f"{path}.{key}" if path else str(key)
            yield inner[:100], str(key)
            yield from _texts(item, inner[:100], depth + 1)
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from _texts(item, f"{path}[{index}]"[:100], depth + 1)
