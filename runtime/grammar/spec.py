"""The grammar of an answer as a value, independent of the API that requested it.

Every route and spelling (`response_format`, `structured_outputs`, `guided_json`, `regex`, tools, …)
is converted to a `GrammarSpec`. Its bounds are checked when it is made, before any work: the sizes
of texts, and the symbols that counts expand to. Beyond a bound it is a `RequestError` that names
the request's field. It does not depend on tokens: `compiler.py` combines it with a vocabulary.
"""

from __future__ import annotations

import enum
import functools
import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct

from ..errors import GrammarError, RequestError
from .json_schema import MARK

MAX_SCHEMA_BYTES = 64 << 10
MAX_REWRITTEN_BYTES = 256 << 10  # of a schema in the keywords that the library has
MAX_REWRITTEN = 32  # rewritten schemas kept for later requests
MAX_SCHEMAS_S = 2.0  # of CPU time for all schemas of one request
MAX_EXPRESSION_CHARS = 4 << 10  # of a regular expression
MAX_GRAMMAR_CHARS = 16 << 10
MAX_CHOICES = 1 << 10
MAX_CHOICES_CHARS = 64 << 10
MAX_WHITESPACE_CHARS = 128
MAX_COMPOSED_CHARS = 256 << 10  # of a grammar composed of several schemas
# Total symbols of nested and consecutive counts such as (a{20}){30}.
MAX_REPETITION = 5_000
# A whitespace pattern: no whitespace between the tokens of JSON.
COMPACT = ""
# Bounded, because a model could otherwise continue with spaces forever.
FREE_WHITESPACE = r"[ \n\t]{0,16}"


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


class SchemaTime:
    """The CPU time that the schemas of one request's tools take together, on one thread."""

    def __init__(self) -> None:
        self._start_s = time.thread_time()

    def check(self) -> None:
        """Raise `RequestError` beyond the bound. Call it before each schema."""
        if time.thread_time() - self._start_s > MAX_SCHEMAS_S:
            raise RequestError(
                f"tools is too complex: its schemas take more than {MAX_SCHEMAS_S:g} s",
                param="tools",
                hint="Send fewer functions, or simpler schemas.",
            )


def _too_much(param: str) -> RequestError:
    return RequestError(
        f"{param} is too complex: its repetitions expand to more than {MAX_REPETITION} symbols",
        param=param,
        hint="Use * or + for long texts, or maxLength for strings of a schema.",
    )


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    GBNF = "gbnf"


class GrammarSpec(Struct, frozen=True):
    """A grammar to compile. Hashable: equal values are compiled once. Make it with one of the class
    methods.
    """

    kind: GrammarKind
    text: str  # the schema as JSON, the expression, the choices as a JSON list, or the grammar
    whitespace: str = COMPACT  # between the tokens of JSON: an expression
    param: str = ""  # the field that requested it, for error messages
    # Texts that may be one special token: see `composed`.
    markers: tuple[str, ...] = ()
    # An embedded grammar, which the text refers to as @answer.
    answer: GrammarSpec | None = None

    @classmethod
    def json_schema(
        cls,
        schema: Mapping[str, Any] | bool | str,
        *,
        param: str = "",
        whitespace: str = COMPACT,
        closes: bool = True,
    ) -> GrammarSpec:
        """A JSON value of this schema, given as a mapping or as JSON. Objects that list their properties have no
        others unless the schema says so; `closes` false allows all that the schema allows. Raises `RequestError`.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{param} is not JSON: {error}", param=param) from None
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping | bool):
            raise RequestError(f"{param} must be a JSON schema: an object", param=param)
        try:
            given = _json(schema)
            check_text(given, MAX_SCHEMA_BYTES, "a JSON schema", param)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{param} is not JSON: {error}", param=param) from None
        check_patterns(schema, param)
        text = _rewritten(given, param, closes=closes)
        check_text(whitespace, MAX_WHITESPACE_CHARS, "a whitespace pattern", param)
        check_repetition(whitespace, param)
        if whitespace != COMPACT and MARK in text:
            raise GrammarError(f"{param} has uniqueItems, which need JSON without whitespace", param=param)
        return cls(GrammarKind.JSON_SCHEMA, text, whitespace, param)

    @classmethod
    def json_object(cls, *, param: str = "") -> GrammarSpec:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, param=param, whitespace=FREE_WHITESPACE)

    @classmethod
    def regex(cls, expression: str, *, param: str = "") -> GrammarSpec:
        """A text that matches this expression as a whole. Raises `RequestError`."""
        check_text(expression, MAX_EXPRESSION_CHARS, "a regular expression", param)
        check_repetition(expression, param)
        return cls(GrammarKind.REGEX, expression, param=param)

    @classmethod
    def choice(cls, texts: Sequence[str], *, param: str = "") -> GrammarSpec:
        """One of these texts. Raises `RequestError`."""
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"{param} must be a list of texts that are not empty", param=param)
        if not 0 < len(texts) <= MAX_CHOICES:
            raise RequestError(f"{param} must have 1 to {MAX_CHOICES} choices", param=param)
        text = json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False)
        check_text(text, MAX_CHOICES_CHARS, "a list of choices", param)
        return cls(GrammarKind.CHOICE, text, param=param)

    @classmethod
    def grammar(cls, grammar: str, *, param: str = "") -> GrammarSpec:
        """A context-free grammar, in GBNF (`root ::= …`) or in Lark's notation (`start: …`). Raises `RequestError`."""
        check_text(grammar, MAX_GRAMMAR_CHARS, "a grammar", param)
        check_counts(grammar, param)
        kind = GrammarKind.GBNF if "::=" in grammar else GrammarKind.LARK
        return cls(kind, grammar, param=param)

    @classmethod
    def composed(
        cls, lark: str, *, markers: Sequence[str] = (), answer: GrammarSpec | None = None, param: str = ""
    ) -> GrammarSpec:
        """A grammar made by this server, in Lark's notation, from checked parts.

        Its rules may refer to `marker_N`, which is `markers[N]`: the special token of that text if
        the vocabulary has one, else its characters; to `until_N`, which is any text up to and
        including that marker; and to `@answer`. Special tokens never occur in other text. Raises
        `RequestError` for one that is too long.
        """
        if len(lark) > MAX_COMPOSED_CHARS:
            raise RequestError(
                f"{param} make a grammar of {len(lark)} characters, more than {MAX_COMPOSED_CHARS}",
                param=param,
                hint="Send fewer functions, or smaller schemas.",
            )
        return cls(GrammarKind.LARK, lark, param=param, markers=tuple(markers), answer=answer)

    def embedded_schema(self) -> str:
        """A JSON schema as a part of a composed grammar. Raises `GrammarError` for `uniqueItems` that only a whole
        answer can have.
        """
        if MARK in self.text:
            raise GrammarError(
                f"{self.param} has uniqueItems of any items, which calls cannot have; use an enum",
                param=self.param,
            )
        schema = json.loads(self.text)
        if not isinstance(schema, dict):
            schema = {"allOf": [schema]}
        compact: dict[str, Any] = {"whitespace_flexible": False}
        whitespace = compact if self.whitespace == COMPACT else {"whitespace_pattern": self.whitespace}
        return "%json " + json.dumps({**schema, "x-guidance": whitespace}, ensure_ascii=False)


@functools.lru_cache(maxsize=MAX_REWRITTEN)
def _rewritten(given: str, param: str, *, closes: bool) -> str:
    """The schema in the keywords that the library has, as JSON. Raises `RequestError`."""
    from .json_schema.algebra import SchemaError  # only requests with a schema need them
    from .json_schema.rewrite import enforceable

    try:
        text = _json(enforceable(json.loads(given), closes=closes))
    except SchemaError as error:
        raise GrammarError(
            f"{param or 'the schema'} is not supported: {error}",
            param=param,
            hint="docs/structured.md lists the supported keywords.",
        ) from None
    except RecursionError:
        raise GrammarError(f"{param or 'the schema'} is nested too deeply", param=param) from None
    check_text(text, MAX_REWRITTEN_BYTES, "a JSON schema, its alternatives multiplied out,", param)
    return text


def _json(schema: Any) -> str:
    return json.dumps(schema, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
