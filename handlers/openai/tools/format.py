"""Formats of calls, each of a family of models, and reading the calls in a block of one.

A block is one or more calls that belong together, from its opening on. Text that only looks like
one is not a call: `NotACallError` says so, and the text stays text. A block is read in two ways:
`read` gives its calls once all of it is there and sound, and `partial` those parts of them that are
certain before, for streams. A model's text arrives in pieces, so the end of a JSON value in it is
found piece by piece.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field

from ....runtime.errors import RequestError
from ...http.json_bodies import check_shape
from .functions import Property

# Of arguments. Decoders' own limits depend on the Python: 3.13's reads thousands of levels.
MAX_DEPTH = 200
_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')
SPACES = " \t\r\n"
# Keys with which an object that is a call may begin. Any other tells at once that it is none.
_FIRST_KEYS = frozenset({"name", "arguments", "parameters", "type", "function", "id"})
_FIRST_KEY = re.compile(r'[\[\s]*\{\s*"([^"\\]*)"\s*:\s*')
_FIRST_NAME = re.compile(r'"((?:[^"\\]|\\.)*)"')
# What is before the arguments of a call whose name comes first, as almost all models write it.
_HEAD = (
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]{1,128})"\s*,\s*'
    r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
)
_FIRST_HEAD = re.compile(_HEAD)
_NEXT_HEAD = re.compile(r"\s*\}\s*," + _HEAD)


Functions = Mapping[str, Mapping[str, Any]]
"""The functions that may be called: names, and the schemas of their parameters as the request has them."""


class JsonScanner:
    """Finds the end of one JSON object or array. Looks at each character once, and checks no syntax."""

    __slots__ = ("_depth", "_is_escaped", "_is_string")

    def __init__(self) -> None:
        self._depth = 0
        self._is_string = False
        self._is_escaped = False

    def feed(self, text: str, start: int = 0) -> int | None:
        """The index behind the value's last character, in this piece of text from `start` on; None: not there yet.

        The first character of all must be the value's bracket.
        """
        position = start
        while position < len(text):
            if self._is_escaped:
                self._is_escaped = False
                position += 1
                continue
            found = (_IN_STRING if self._is_string else _STRUCTURE).search(text, position)
            if found is None:
                return None
            position = found.end()
            character = found[0]
            if character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._is_string = not self._is_string
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return position
        return None


class NotACallError(Exception):
    """The text is no call of this format. Never leaves the package."""


class ParsedCall(Struct, frozen=True):
    name: str
    arguments: str  # a JSON object


class CallShape(Struct, frozen=True):
    """The exact text around a call's name and arguments, as grammars have it: calls are
    `first`, then each `before_name` NAME `before_arguments` OBJECT `after_arguments`, with `separator` between them,
    then `last`.
    """

    before_name: str
    before_arguments: str
    after_arguments: str
    separator: str
    first: str = ""
    last: str = ""


class ToolBlock:
    """One block, whose text comes in pieces."""

    def read(self, text: str, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        """The calls of the block with which `text` begins, and the index behind them; None: more text is needed.

        Called with more of the same text each time; `is_final` says that no more will come. Raises `NotACallError`.
        """
        raise NotImplementedError

    def partial(self, text: str) -> tuple[list[ParsedCall], int]:
        """The calls whose names are certain, each with as much of its arguments as is, and the index behind the text
        that they were made of.

        Called before `read`, with the same text. Each time the arguments continue those of the time before.
        """
        return [], 0


class SteppedBlock(ToolBlock):
    """A block whose arguments are not JSON: read a step at a time, and written as JSON meanwhile."""

    def __init__(self, opener: str, functions: Functions) -> None:
        self._opener, self._functions = opener, functions
        self._index = len(opener)  # of what comes next in the text
        self._names: list[str] = []
        self._arguments: list[str] = []  # of each call, as far as they are certain
        self._keys: set[str] = set()  # of the call that is open

    def _calls(self) -> list[ParsedCall]:
        return [ParsedCall(*each) for each in zip(self._names, self._arguments, strict=True)]

    def _skip_spaces(self, text: str) -> None:
        while self._index < len(text) and text[self._index] in SPACES:
            self._index += 1

    def _begin(self, name: str) -> None:
        """Begin a call of this function. Raises `NotACallError`."""
        if name not in self._functions:
            raise NotACallError
        self._names.append(name)
        self._arguments.append("{")
        self._keys = set()

    def _before_value(self, key: str) -> str:
        """The JSON between the arguments so far and this key's value."""
        return f"{', ' if self._keys else ''}{json.dumps(key, ensure_ascii=False)}: "


def call_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolFormat(Struct, frozen=True):
    """One way to write calls."""

    name: str  # as `--tool-parser` has it
    shape: CallShape
    openers: tuple[str, ...]  # texts that open a block, wherever they stand
    is_bare: bool  # whether an answer may also begin with a call, without an opener
    block: Callable[[str, Functions], ToolBlock]  # from the opener ('': bare)
    arguments_key: str = "arguments"  # of a call's object
    # Rules for arguments that are not one JSON object: of this name, of these properties (None: any)
    argument_rules: Callable[[str, Sequence[Property] | None], list[str]] | None = None
    markers: tuple[str, ...] = ()  # of the shape's and the block's text, what may be special tokens
    separators: str = SPACES  # characters between two bare calls
    new_id: Callable[[], str] = field(default=call_id)
    # The id of a call that the conversation has, as the family's template takes it
    given_id: Callable[[str], str] = field(default=lambda given: given)
    # The conversation with ids as the family's template takes them, where they depend on more than the id
    given_ids: Callable[[Sequence[Mapping[str, Any]]], list[dict[str, Any]]] | None = None


class _Head(Struct):
    """A call that has begun: its name, and where its arguments are."""

    name: str
    start: int
    num_scanned: int
    end: int | None = None


class JsonBlock(ToolBlock):
    """An object, or a list of objects, between an opener and a closer."""

    def __init__(
        self, opener: str, closer: str, names: Collection[str], *, needs_closer: bool = True
    ) -> None:
        """Without `needs_closer` text may follow where the closer is missing."""
        self._opener, self._closer, self._names = opener, closer, names
        self._needs_closer = needs_closer
        # For `partial`
        self._heads: list[_Head] = []
        self._head_scanner = JsonScanner()
        self._scanner = JsonScanner()
        self._num_scanned = 0
        self._end: int | None = None
        self._calls: list[ParsedCall] = []

    def read(self, text: str, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        start = _skip_spaces(text, len(self._opener))
        if start == len(text):
            _need_more(is_final=is_final)
            return None
        if text[start] not in "{[":
            raise NotACallError
        if self._end is None:
            self._check_beginning(text, start)
            self._end = self._scanner.feed(text, max(start, self._num_scanned))
            self._num_scanned = len(text)
            if self._end is None:
                _need_more(is_final=is_final)
                return None
            self._calls = self._decoded(text, text[start : self._end])
        return self._closed(text, self._end, is_final=is_final)

    def partial(self, text: str) -> tuple[list[ParsedCall], int]:
        start = _skip_spaces(text, len(self._opener))
        is_list = text.startswith("[", start)
        while True:
            if self._heads and self._heads[-1].end is None:
                head = self._heads[-1]
                head.end = self._head_scanner.feed(text, head.num_scanned)
                head.num_scanned = len(text)
                if head.end is None:
                    break
            else:
                found = (
                    (_NEXT_HEAD.match(text, self._heads[-1].end or 0) if is_list else None)
                    if self._heads
                    else _FIRST_HEAD.match(text, start + is_list)
                )
                if found is None or found[1] not in self._names:
                    break
                self._heads.append(_Head(found[1], found.end(), found.end()))
                self._head_scanner = JsonScanner()
        end = len(text) if not self._heads or self._heads[-1].end is None else self._heads[-1].end
        return [ParsedCall(head.name, text[head.start : head.end]) for head in self._heads], end

    def _decoded(self, text: str, block: str) -> list[ParsedCall]:
        """The block's calls; as they were written where `partial` gave them already."""
        try:
            return calls_of(block, self._names, may_omit=bool(self._opener))
        except NotACallError:
            if not self._heads or self._heads[-1].end is None:
                raise
            return [ParsedCall(head.name, text[head.start : head.end]) for head in self._heads]

    def _check_beginning(self, text: str, start: int) -> None:
        """Finds out early that an object is no call, so that an answer in JSON is not held back."""
        key = _FIRST_KEY.match(text, start)
        if key is None:
            return
        if key[1] not in _FIRST_KEYS:
            raise NotACallError
        if key[1] == "name" and (name := _FIRST_NAME.match(text, key.end())) and name[1] not in self._names:
            raise NotACallError

    def _closed(self, text: str, end: int, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        """The calls, once the closer is there. Where the next block opens, or the answer ends, it may be missing."""
        if not self._closer:
            return self._calls, end
        start = _skip_spaces(text, end)
        if text.startswith(self._closer, start):
            return self._calls, start + len(self._closer)
        if text.startswith(self._opener, start):
            return self._calls, end
        rest = text[start : start + len(self._opener) + len(self._closer)]
        may_close, may_open = self._closer.startswith(rest), self._opener.startswith(rest)
        if not may_close and not may_open:
            if not self._needs_closer:
                return self._calls, end
            raise NotACallError
        if not is_final:
            return None
        return self._calls, len(text) if may_close else end


def calls_of(text: str, names: Collection[str], *, may_omit: bool) -> list[ParsedCall]:
    """The calls in an object or a list of objects. Raises `NotACallError` unless all of it is calls of known
    functions. `may_omit` allows those without arguments.
    """
    try:
        value = msgspec.json.decode(text, type=list[_Written] | _Written)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        raise NotACallError from None
    written = value if isinstance(value, list) else [value]
    if not written:
        raise NotACallError
    return [_call(each, names, may_omit=may_omit) for each in written]


def object_text(data: bytes) -> str:
    """Arguments as the text of a JSON object, which some models write as a text of JSON. Raises `NotACallError`."""
    data = data.strip()
    try:
        if data.startswith(b'"'):
            data = msgspec.json.decode(data, type=str).encode().strip() or b"{}"
        if data == b"null":
            return "{}"
        check_shape(data, max_depth=MAX_DEPTH)
        msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, RequestError, UnicodeEncodeError):
        raise NotACallError from None
    return data.decode()


def is_json(text: str) -> bool:
    """True if the text is one JSON value. Numbers may be larger than a double."""
    try:
        check_shape(text.encode("utf-8", "surrogatepass"), max_depth=MAX_DEPTH)
        json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError, RequestError):
        return False
    return True


def _no_constant(name: str) -> None:
    raise ValueError(name)  # NaN and Infinity, which Python reads but JSON does not have


_NONE = msgspec.Raw()


class _Written(msgspec.Struct):
    """A call as models write it."""

    name: str | None = None
    arguments: msgspec.Raw = _NONE
    parameters: msgspec.Raw = _NONE
    function: msgspec.Raw = _NONE


def _call(written: _Written, names: Collection[str], *, may_omit: bool) -> ParsedCall:
    name = written.name
    arguments = bytes(written.arguments) or bytes(written.parameters)
    if function := bytes(written.function):
        try:
            nested = msgspec.json.decode(function, type=str | _Written)
        except (msgspec.DecodeError, RecursionError):
            raise NotACallError from None
        if isinstance(nested, _Written):  # as OpenAI's API writes calls
            return _call(msgspec.structs.replace(nested, function=_NONE), names, may_omit=may_omit)
        name = name or nested
    if name is None or name not in names or not (arguments or may_omit):
        raise NotACallError
    return ParsedCall(name, object_text(arguments) if arguments else "{}")


def _skip_spaces(text: str, start: int) -> int:
    while start < len(text) and text[start] in SPACES:
        start += 1
    return start


def _need_more(*, is_final: bool) -> None:
    """Raises `NotACallError` where no more will come."""
    if is_final:
        raise NotACallError
