"""Calls in Python's notation, as Llama 4 and Llama 3.2 write them: `[name(key=value), …]`, bare or between
`<|python_start|>` and `<|python_end|>`.

Nothing is executed: values are literals, of Python or JSON.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from typing import Any

from ....runtime.errors import RequestError
from ....runtime.grammar.spec import GrammarSpec
from .format import SPACES, CallShape, Functions, NotACallError, ParsedCall, SteppedBlock, ToolFormat, is_json
from .functions import Property

OPENER, CLOSER = "<|python_start|>", "<|python_end|>"
MAX_VALUE_CHARS = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_STRUCTURE = re.compile(r"[\"'\[\](){},]")


class PythonBlock(SteppedBlock):
    """A list of calls."""

    def __init__(self, opener: str, functions: Functions) -> None:
        super().__init__(opener, functions)
        self._expects = "list"  # list, call, key, value, argument, next or end
        self._value = _LiteralScanner()

    def read(self, text: str, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        self._advance(text)
        if self._expects == "end":
            return self._closed(text, is_final=is_final)
        if is_final:
            raise NotACallError
        return None

    def partial(self, text: str) -> tuple[list[ParsedCall], int]:
        try:
            self._advance(text)
        except NotACallError:
            return self._calls(), self._index
        return self._calls(), self._index if self._expects in ("next", "end") else len(text)

    def _advance(self, text: str) -> None:
        """Read as far as the text goes. Raises `NotACallError`."""
        while self._expects != "end":
            if self._expects != "value":
                self._skip_spaces(text)
            if self._index == len(text) or not self._step(text):
                return

    def _step(self, text: str) -> bool:
        """Read one thing; False: more text is needed."""
        character = text[self._index]
        match self._expects:
            case "list":
                self._take(character, {"[": "call"})
            case "call":
                return self._begin_call(text)
            case "key" if character == ")":
                self._end_call()
            case "key":
                return self._begin_argument(text)
            case "value":
                end = self._value.feed(text, self._index)
                if end is None:
                    if len(text) - self._index > MAX_VALUE_CHARS:
                        raise NotACallError
                    return False
                self._arguments[-1] += literal_as_json(text[self._index : end])
                self._index, self._expects = end, "argument"
            case "argument" if character == ")":
                self._end_call()
            case "argument":
                self._take(character, {",": "key"})
            case _:
                self._take(character, {",": "call", "]": "end"})
        return True

    def _take(self, character: str, expected: dict[str, str]) -> None:
        if character not in expected:
            raise NotACallError
        self._index += 1
        self._expects = expected[character]

    def _begin_call(self, text: str) -> bool:
        found = self._word(text, _NAME, "(")
        if found is None:
            return False
        self._begin(found)
        self._expects = "key"
        return True

    def _begin_argument(self, text: str) -> bool:
        key = self._word(text, _KEY, "=")
        if key is None:
            return False
        if key in self._keys:
            raise NotACallError
        self._arguments[-1] += self._before_value(key)
        self._keys.add(key)
        self._value = _LiteralScanner()
        self._expects = "value"
        return True

    def _word(self, text: str, pattern: re.Pattern[str], behind: str) -> str | None:
        """The word before this character; None: more text is needed. Raises `NotACallError` for anything else."""
        found = pattern.match(text, self._index)
        if found is None:
            raise NotACallError
        end = found.end()
        while end < len(text) and text[end] in SPACES:
            end += 1
        if end == len(text):
            return None
        if text[end] != behind:
            raise NotACallError
        self._index = end + 1
        return found[0]

    def _end_call(self) -> None:
        self._arguments[-1] += "}"
        self._index += 1
        self._expects = "next"

    def _closed(self, text: str, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        """The calls, once it is known whether the closer follows."""
        if not self._opener:
            return self._calls(), self._index
        rest = text[self._index :].lstrip(SPACES)
        if rest.startswith(CLOSER):
            return self._calls(), len(text) - len(rest) + len(CLOSER)
        if CLOSER.startswith(rest) and not is_final:
            return None
        return self._calls(), self._index


class _LiteralScanner:
    """Finds the end of an argument's value: a comma or a bracket outside of strings and brackets of its own."""

    def __init__(self) -> None:
        self._position = -1
        self._depth = 0
        self._quote = ""  # of the string that is open: one or three characters

    def feed(self, text: str, start: int) -> int | None:
        """The index behind the value that begins at `start`; None: it is not there yet."""
        if self._position < 0:
            self._position = start
        while self._position < len(text):
            if self._quote:
                if not self._string(text):
                    return None
                continue
            found = _STRUCTURE.search(text, self._position)
            if found is None:
                self._position = len(text)
                return None
            character = found[0]
            self._position = found.start()
            if character in "\"'":
                if text.startswith(character * 2, self._position) and self._position + 2 == len(text):
                    return None  # an empty string, or the first two of three quotes
                if self._position + 1 == len(text):
                    return None
                is_long = text.startswith(character * 3, self._position)
                self._quote = character * (3 if is_long else 1)
                self._position += len(self._quote)
            elif character in "[({":
                self._depth += 1
                self._position += 1
            elif not self._depth and character in ",)":
                return self._position
            else:
                self._depth -= character in "])}"
                if self._depth < 0:
                    raise NotACallError
                self._position += 1
        return None

    def _string(self, text: str) -> bool:
        """Go behind the open string, or as far as it goes; False: more text is needed."""
        while self._position < len(text):
            if text[self._position] == "\\":
                if self._position + 1 == len(text):
                    return False
                self._position += 2
            elif text.startswith(self._quote, self._position):
                self._position += len(self._quote)
                self._quote = ""
                return True
            elif self._quote.startswith(text[self._position :]):
                return False  # some of three quotes
            else:
                self._position += 1
        return False


def literal_as_json(text: str) -> str:
    """A literal of JSON or Python as JSON. Raises `NotACallError`."""
    text = text.strip()
    if is_json(text):
        return text
    try:
        value: Any = ast.literal_eval(text)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
        # Two escapes of a pair are one character.
        return written.encode("utf-16", "surrogatepass").decode("utf-16")
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        raise NotACallError from None


def argument_rules(rule: str, properties: Sequence[Property] | None) -> list[str]:
    """Keyword arguments in the order of the schema, their values in JSON."""
    if properties is None:
        key, value = f"{rule.upper()}_KEY", f"{rule}_value"
        one = f'{key} "=" {value}'
        anything = GrammarSpec.json_schema(True).embedded_schema()
        return [
            f'{rule}: ({one} (", " {one})*)?',
            f"{key}: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/",
            f"{value}: {anything}",
        ]
    rules: list[str] = []
    # What may follow where an argument came before, and where none did, from the last argument to the first.
    after, start = '""', '""'
    for number, each in reversed(list(enumerate(properties))):
        if not _KEY.fullmatch(each.name):
            raise RequestError(
                f"tools have a parameter {each.name[:50]!r}, which is no identifier of Python", param="tools"
            )
        schema = GrammarSpec.json_schema(each.schema, param="tools", closes=False).embedded_schema()
        rules.append(f"{rule}_{number}: {json.dumps(each.name + '=')} {rule}_{number}_value")
        rules.append(f"{rule}_{number}_value: {schema}")
        one = f"{rule}_{number}"
        skipped_after, skipped_start = ("", "") if each.is_required else (f" | {after}", f" | {start}")
        rules.append(f'{rule}_after_{number}: ", " {one} {after}{skipped_after}')
        rules.append(f"{rule}_from_{number}: {one} {after}{skipped_start}")
        after, start = f"{rule}_after_{number}", f"{rule}_from_{number}"
    return [f"{rule}: {start}", *rules]


PYTHONIC = ToolFormat(
    name="pythonic",
    shape=CallShape(
        before_name="", before_arguments="(", after_arguments=")", separator=", ", first="[", last="]"
    ),
    openers=(OPENER,),
    is_bare=True,
    block=PythonBlock,
    argument_rules=argument_rules,
    markers=(OPENER, CLOSER),
)
