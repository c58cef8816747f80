"""Arrays whose items must differ, which a grammar cannot express: a position in the answer's JSON, and the tokens that
would repeat an item.

For compact JSON and items that have one text each, so that equal items have equal texts (`has_one_text` in
`json_schema/values.py`). Where a schema's alternatives leave open which of them an array follows, its items differ if
any asks for it.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from . import MARK

# Several items in one token.
_SEVERAL = re.compile(rb',(?:".*"|.*[,\]}]|.*true|.*false|.*null)', re.DOTALL)
_NEGATIVE_ZERO = b"-0"  # equal to 0


class RepeatedItemError(Exception):
    """An item that the array has already. Never leaves the package."""


class _Frame(Struct, frozen=True):
    """An open array or object."""

    is_array: bool
    schemas: tuple[Mapping[str, Any], ...]  # that it may follow
    is_unique: bool = False
    seen: frozenset[bytes] = frozenset()  # texts of items
    start: int | None = None  # of the open item in the position's text
    index: int = 0  # of the next item
    key: str | None = None  # of the property whose value comes


class Position(Struct, frozen=True):
    """A position in an answer. Immutable."""

    frames: tuple[_Frame, ...] = ()
    text: bytes = b""  # since the outermost array whose items differ began
    is_string: bool = False
    is_escaped: bool = False
    is_scalar: bool = False  # a number or a literal
    key: bytes | None = None  # of the property name that is open


class UniqueItems:
    """The arrays of one schema whose items must differ. Thread-safe."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """`schema` is rewritten: its references lead to `$defs`."""
        self._root = schema
        self._definitions: Mapping[str, Any] = schema.get("$defs", {})

    def advance(self, position: Position, data: bytes) -> Position:
        """The position behind this much more of the answer. Raises `RepeatedItemError`."""
        walk = _Walk(self, position)
        for byte in data:
            walk.step(byte)
        return walk.position()

    def expanded(self, schemas: Iterable[Any]) -> tuple[Mapping[str, Any], ...]:
        """The schemas with all that may apply to the same value."""
        found: dict[int, Mapping[str, Any]] = {}
        pending = list(schemas)
        while pending:
            schema = pending.pop()
            if not isinstance(schema, Mapping) or id(schema) in found:
                continue
            found[id(schema)] = schema
            pending += [*schema.get("allOf", ()), *schema.get("anyOf", ())]
            if isinstance(target := schema.get("$ref"), str):
                name = target.removeprefix("#/$defs/").replace("%20", " ")
                pending.append(self._definitions.get(name))
        return tuple(found.values())

    def children(self, frames: Sequence[_Frame]) -> tuple[Mapping[str, Any], ...]:
        """The schemas that the next value in the innermost frame may follow."""
        if not frames:
            return self.expanded([self._root])
        top = frames[-1]
        found: list[Any] = []
        for schema in top.schemas:
            if top.is_array:
                prefix = schema.get("prefixItems", ())
                found.append(prefix[top.index] if top.index < len(prefix) else schema.get("items"))
            else:
                properties = schema.get("properties", {})
                found.append(properties.get(top.key, schema.get("additionalProperties")))
                found += schema.get("patternProperties", {}).values()
        return self.expanded(found)


class _Walk:
    """A position as it changes, byte by byte."""

    def __init__(self, rules: UniqueItems, position: Position) -> None:
        self._rules = rules
        self._frames = list(position.frames)
        self._text = bytearray(position.text)
        self._is_string, self._is_escaped = position.is_string, position.is_escaped
        self._is_scalar = position.is_scalar
        self._key = None if position.key is None else bytearray(position.key)
        self._num_unique = sum(frame.is_unique for frame in self._frames)

    def position(self) -> Position:
        key = None if self._key is None else bytes(self._key)
        return Position(
            tuple(self._frames), bytes(self._text), self._is_string, self._is_escaped, self._is_scalar, key
        )

    def step(self, byte: int) -> None:
        if self._is_string:
            self._in_string(byte)
            return
        character = chr(byte)
        if self._is_scalar and character in ",]}":
            self._is_scalar = False
            self._end_value()
        top = self._frames[-1] if self._frames else None
        if character == '"':
            if top is not None and not top.is_array and top.key is None:
                self._key = bytearray()
            else:
                self._begin_value()
            self._is_string = True
        elif character in "[{":
            schemas = self._begin_value()
            is_unique = character == "[" and any(schema.get(MARK) is True for schema in schemas)
            self._append(byte)
            self._frames.append(_Frame(character == "[", schemas, is_unique))
            self._num_unique += is_unique
            return
        elif character in "]}" and top is not None:
            self._append(byte)
            self._frames.pop()
            self._num_unique -= top.is_unique
            self._end_value()
            if not self._num_unique:
                self._text.clear()
            return
        elif character == "," and top is not None:
            self._frames[-1] = replace(top, index=top.index + 1, key=None)
        elif character != ":" and not self._is_scalar:
            self._begin_value()
            self._is_scalar = True
        self._append(byte)

    def _in_string(self, byte: int) -> None:
        self._append(byte)
        if self._is_escaped:
            if self._num_unique and byte == ord("u"):
                raise RepeatedItemError  # the same character may have another text
            self._is_escaped = False
        elif byte == ord("\\"):
            self._is_escaped = True
        elif byte == ord('"'):
            self._is_string = False
            if self._key is None:
                self._end_value()
            else:
                name = json.loads(b'"' + bytes(self._key) + b'"')
                self._frames[-1] = replace(self._frames[-1], key=name)
                self._key = None
            return
        if self._key is not None:
            self._key.append(byte)

    def _append(self, byte: int) -> None:
        if self._num_unique:
            self._text.append(byte)

    def _begin_value(self) -> tuple[Mapping[str, Any], ...]:
        schemas = self._rules.children(self._frames)
        if self._frames and self._frames[-1].is_unique:
            self._frames[-1] = replace(self._frames[-1], start=len(self._text))
        return schemas

    def _end_value(self) -> None:
        if not self._frames or not self._frames[-1].is_unique:
            return
        top = self._frames[-1]
        item = bytes(self._text[top.start :])
        if item in top.seen or item == _NEGATIVE_ZERO:
            raise RepeatedItemError
        self._frames[-1] = replace(top, seen=top.seen | {item}, start=None)


class TokenTexts:
    """The texts of a vocabulary's tokens, and those that begin with a text. Thread-safe."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        """`texts` are those of all tokens, b"" of special ones."""
        self.texts = texts
        self._by_text = {text: token for token, text in enumerate(texts)}
        self._longest = max(map(len, texts), default=0)
        self._order = sorted(range(len(texts)), key=texts.__getitem__)
        self._sorted = [texts[token] for token in self._order]
        self._several = [token for token, text in enumerate(texts) if _SEVERAL.search(text)]
        self._escapes = [token for token, text in enumerate(texts) if b"\\u" in text]

    def beginning_with(self, prefix: bytes) -> list[int]:
        start = bisect.bisect_left(self._sorted, prefix)
        end = start
        while end < len(self._sorted) and self._sorted[end].startswith(prefix):
            end += 1
        return self._order[start:end]

    def may_repeat(self, position: Position) -> set[int]:
        """Tokens of which some might complete an item that its array has already. Includes all that do."""
        found: set[int] = set()
        if any(frame.is_unique for frame in position.frames):
            found.update(self._several, self._escapes)
            if position.is_escaped:
                found.update(self.beginning_with(b"u"))
            for prefix in _prefixes(position):
                found.update(self.beginning_with(prefix))
        return found

    def towards_known(self, position: Position) -> list[int]:
        """Tokens that continue the answer like an item that its array has already, and that do not end it."""
        found: dict[int, None] = {}
        for prefix in _prefixes(position):
            for length in range(1, min(len(prefix), self._longest) + 1):
                if (token := self._by_text.get(prefix[:length])) is not None:
                    found[token] = None
        return list(found)


def _prefixes(position: Position) -> Iterator[bytes]:
    """Texts with which a token begins that completes a known item."""
    for frame in position.frames:
        if not frame.is_unique:
            continue
        begun = b"" if frame.start is None else position.text[frame.start :]
        for item in (*frame.seen, _NEGATIVE_ZERO):
            if frame.start is None:
                yield item
                yield b"," + item
            elif item.startswith(begun):
                rest = item[len(begun) :]
                yield from (rest,) if rest else (b",", b"]")
