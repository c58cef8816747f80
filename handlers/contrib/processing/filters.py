"""Safety filters: requests that are refused before the model sees them, stretches of answers that are taken out.

What is looked for is the developer's own: regular expressions, or functions. No lists of words come with Teneral.
Texts are bounded before anything is matched; a pattern's own running time is its author's to bound, as Python's `re`
has no limit. Nothing is known here of models or of platforms.
"""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from typing import Any

from ....loader.errors import UsageError
from ....runtime.errors import HandlerError, RefusedError, RequestError
from ...function.context import Context
from .matching import MAX_HELD_CHARS, Finder, Scanner, Span

MAX_CHARS = 1 << 20  # of all texts of one event or value together
MAX_DEPTH = 64  # of lists and objects in one another

Pattern = str | re.Pattern[str]


class Refuse:
    """A `pre` function: raises `RefusedError` for an event in which a text matches; a client sees a 400 with `code`."""

    def __init__(
        self,
        *checks: Pattern | Callable[[str], bool],
        message: str = "this request is not served here",
        code: str = "content_refused",
        max_chars: int = MAX_CHARS,
    ) -> None:
        """A check is a regular expression, or a function that is true of what must not pass. All strings within the
        event are checked, names of fields as well, each by itself. An event with more than `max_chars` is refused.
        """
        if not checks:
            raise UsageError("Refuse needs something to look for", key="checks")
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
    """Replaces what is found. `Redact(…)` is a `post` function for whole values, its `stream` a `post_stream` for texts
    in pieces, held back as far as needed: together they become what the whole text would have become.
    """

    def __init__(
        self,
        *finders: Pattern | Callable[[str], Iterable[Span]],
        replacement: str = "[redacted]",
        max_match_chars: int = 256,
        text_field: str = "text",
        max_chars: int = MAX_CHARS,
    ) -> None:
        """A finder is a regular expression, or a function that gives (start, end) of what it finds, and decides that by
        no more than `max_match_chars` around. Longer matches of expressions are found in whole texts, and in streams
        as far as 65,536 characters. `text_field` is where objects in a stream have their piece of text; strings
        elsewhere in a value are texts of their own.
        """
        if not finders or not 0 < max_match_chars <= MAX_HELD_CHARS:
            raise UsageError(
                f"Redact needs something to look for, and max_match_chars from 1 to {MAX_HELD_CHARS}",
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
        """The value with its texts redacted; names of fields stay. Raises `HandlerError` for one beyond `max_chars`."""
        if sum(len(text) for _, text in _texts(value)) > self._max_chars:
            raise HandlerError(f"the answer has more than {self._max_chars} characters to look through")
        return self._redacted(value)

    def text(self, text: str) -> str:
        """A whole text, redacted."""
        scanner = self._scanner()
        return self._joined(scanner.feed(text) + scanner.finish())

    def stream(self, values: Any, context: Context) -> Any:
        """Of an iterator, or an async one, the same with what is found replaced. Values are pieces of one text, alone
        or as the `text_field` of an object; any other value is redacted by itself, after what was held.
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
    """One stream on its way through. What was held is given in the shape of the last piece."""

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
        if self._as_objects and len(value) > 1:  # what else it says goes with it, even when no text does
            rest = {key: item for key, item in value.items() if key != self._text_field}
            yield {**self._redact._redacted(rest), self._text_field: text}
        elif text:
            yield self._shaped(text)

    def end(self) -> Iterator[Any]:
        """What was held. The next piece begins another text."""
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
    """All strings within a JSON value, with where they stand. Raises `RequestError` for one that is nested deeper
    than `MAX_DEPTH`.
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
