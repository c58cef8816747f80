"""Bounds of what a client sends as a grammar: sizes of texts, and the symbols that counts expand to.

Checked before any work. Beyond a bound it is a `RequestError` that names the request's field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import RequestError

MAX_SCHEMA_BYTES = 64 << 10
MAX_REWRITTEN_BYTES = 256 << 10  # of a schema in the keywords that the library has
MAX_EXPRESSION_CHARS = 4 << 10  # of a regular expression
MAX_GRAMMAR_CHARS = 16 << 10
MAX_CHOICES = 1 << 10
MAX_CHOICES_CHARS = 64 << 10
MAX_WHITESPACE_CHARS = 128
MAX_COMPOSED_CHARS = 256 << 10  # of a grammar composed of several schemas
# Total symbols of nested and consecutive counts such as (a{20}){30}.
MAX_REPETITION = 5_000


def check_text(text: object, limit: int, what: str, param: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{param} must be text", param=param)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{param} contains a lone surrogate", param=param) from None
    if size > limit or "\0" in text:
        raise RequestError(
            f"{param} is invalid: {what} may have {limit} bytes and no zero byte; this has {size}",
            param=param,
        )


def check_patterns(schema: Any, param: str) -> None:
    """Check the expressions anywhere in a schema."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            if isinstance(pattern := value.get("pattern"), str):
                check_repetition(pattern, param)
            for key in (
                properties if isinstance(properties := value.get("patternProperties"), Mapping) else ()
            ):
                check_repetition(str(key), param)
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value


def check_repetition(expression: str, param: str) -> None:
    """Raise `RequestError` if counted repetitions expand to too many symbols.

    Each state of an automaton costs memory and time, and a few characters can request millions.
    """
    # Of the open groups, the whole expression first.
    sizes = [0]
    # The size of the symbol or group that a count would repeat.
    last = 0
    position = 0
    while position < len(expression):
        character = expression[position]
        if character == "(":
            sizes.append(0)
            last = 0
        elif character == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif character == "[":
            position = _end_of_class(expression, position)
            last = 1
            sizes[-1] += 1
        elif character == "{" and (count := _count_at(expression, position)) is not None:
            times, position = count
            sizes[-1] += last * max(0, times - 1)
            last *= max(1, times)
        elif character not in "*+?|^$":
            position += character == "\\"
            last = 1
            sizes[-1] += 1
        if sum(sizes) > MAX_REPETITION:
            raise _too_much(param)
        position += 1


def check_counts(grammar: str, param: str) -> None:
    """Check a grammar likewise: all of its counts together, because rules may repeat one another."""
    total = 1
    position = grammar.find("{")
    while position >= 0:
        if (count := _count_at(grammar, position)) is not None:
            total *= max(1, count[0])
            if total > MAX_REPETITION:
                raise _too_much(param)
        position = grammar.find("{", position + 1)


def _count_at(text: str, position: int) -> tuple[int, int] | None:
    """The maximum of `{n}`, `{n,}` or `{n,m}` at this position, and its end; None without one."""
    end = text.find("}", position, position + 32)
    counts = [part.strip() for part in text[position + 1 : end].split(",")] if end > 0 else []
    if (
        not 0 < len(counts) <= 2
        or not all(part.isdecimal() or not part for part in counts)
        or not any(counts)
    ):
        return None
    return max(int(part) for part in counts if part), end


def _end_of_class(expression: str, position: int) -> int:
    """The position of the bracket that closes the class that begins here."""
    start = position + 1 + (expression[position + 1 : position + 2] == "^")
    end = start + (expression[start : start + 1] == "]")
    while end < len(expression) and expression[end] != "]":
        end += 2 if expression[end] == "\\" else 1
    return end


def _too_much(param: str) -> RequestError:
    return RequestError(
        f"{param} is too complex: its repetitions expand to more than {MAX_REPETITION} symbols",
        param=param,
        hint="Use * or + for long texts, or maxLength for strings of a schema.",
    )
