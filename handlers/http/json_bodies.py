"""JSON bodies: bounds before decoding, decoding into values, and encoding.

A few bytes of JSON can become many of memory ('{},' is 3, and a dict 64), and deep nesting exhausts
a decoder's, or a handler's, stack. So the text is checked first, by a handful of passes in C over
its bytes; 8 MiB take some milliseconds. It need not be valid JSON: the part that a decoder reads
before it finds an error is within the bounds, too.

The decoder bounds the rest, in time linear in the text: numbers (an integer has up to 4,300 digits,
and a float is finite; NaN is not JSON) and texts (which are UTF-8, without lone surrogates). In a
body of a known type (up to 1 MiB) an object with two equal keys is refused: a gateway may have read
the other one. Of larger bodies, and of events for functions, the last one counts. Null is the default of
every field, of those that are unknown, too.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

from ...runtime.errors import RequestError

# Of an error: it may quote the client's text.
MAX_MESSAGE_CHARS = 300
MAX_JSON_DEPTH = 64
MAX_JSON_ITEMS = 1 << 19  # values in all arrays and objects; the tokens of a request are fewer
ITEM_BYTES = 64  # the usual memory of a small value

MAX_CHECKED_BYTES = 1 << 20
MAX_OBJECT_KINDS = 4  # with unknown fields that are null
_NOT_MEMBER = bytes(set(range(256)) - set(b'":'))
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},'))
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")


def memory_bytes(data: bytes | bytearray) -> int:
    """An estimate of the memory of a body and its values together: it counts commas in texts as
    values.
    """
    num_items = data.count(b",") + data.count(b"[") + data.count(b"{")
    return len(data) + ITEM_BYTES * min(num_items, MAX_JSON_ITEMS)


def check_shape(
    data: bytes | bytearray, *, max_depth: int = MAX_JSON_DEPTH, max_items: int = MAX_JSON_ITEMS
) -> None:
    """Raise `RequestError` if the text is nested deeper, or has more values. Holds a copy of it
    meanwhile.
    """
    num_open = data.count(b"[") + data.count(b"{")
    if num_open <= max_depth and num_open + data.count(b",") <= max_items:
        # Even if all of these were structure, none of them text.
        return
    structure = _structure(data, max_items)
    if structure.count(b",") + structure.count(b"[") + structure.count(b"{") > max_items:
        raise _too_many(max_items)
    if not _is_within(structure, max_depth):
        raise RequestError(f"the body's JSON is nested deeper than {max_depth} levels")


def _structure(data: bytes | bytearray, max_items: int) -> bytes | bytearray:
    """The text's brackets, braces and commas, without those in strings."""
    if b"\\" in data:
        # Pairs first, from the left: a remaining backslash is not escaped itself, and escapes the
        # next character.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(None, _NOT_STRUCTURE)
    # An empty string, or two without structure between them: either way the structure outside
    # strings stays the same.
    marks = marks.replace(b'""', b"")
    if marks.count(b'"') > 2 * max_items + 2:  # before they become as many objects
        raise _too_many(max_items)
    return b"".join(marks.split(b'"')[::2])


def _is_within(structure: bytes | bytearray, max_depth: int) -> bool:
    """True if it is nested no deeper: removing its innermost pairs `max_depth` times leaves nothing
    open.
    """
    brackets = structure.translate(_AS_ARRAYS, b",")
    for depth in range(max_depth + 1):
        if brackets.count(b"[") + depth <= max_depth:
            return True
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            # The open ones have no end, and exceed the limit.
            return False
        brackets = inner
    return False


def _too_many(max_items: int) -> RequestError:
    return RequestError(
        f"the body's JSON has more than {max_items} values", hint="Send it in several requests."
    )


T = TypeVar("T")


class JsonDecoder(Generic[T]):
    """Decoder from JSON to a value of one of the types above, or to any JSON value for `Any`."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)
        self._has_fields = isinstance(kind, type) and issubclass(kind, msgspec.Struct)

    def decode(self, data: bytes | bytearray) -> T:
        """Decode a body. Raises `RequestError`, naming the field, or the place of a syntax error. A
        body that is too deep or has too many values is not decoded.
        """
        check_shape(data)
        try:
            if self._has_fields:
                check_keys(data)
            for _ in range(MAX_OBJECT_KINDS):
                try:
                    return self._decoder.decode(data)
                except msgspec.ValidationError as error:
                    if (changed := _without_nulls(data, str(error))) is None:
                        raise
                    data = changed
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise invalid_field(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not JSON: {error}") from None


def check_keys(data: bytes | bytearray) -> None:
    """Raise `RequestError` for an object that has a key twice, and `DecodeError` for what is not JSON. Takes as long as
    reading the body twice; bodies beyond `MAX_CHECKED_BYTES` are not checked.
    """
    if len(data) > MAX_CHECKED_BYTES:
        return
    if _num_members(data) == _num_members(msgspec.json.encode(msgspec.json.decode(data))):
        return
    import json  # lazy: for an error alone

    repeated: list[str] = []

    def note(pairs: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        repeated.extend(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]

    json.loads(bytes(data), object_pairs_hook=note)
    name = repeated[0][:100] if repeated else ""
    raise RequestError(f"an object of the body has the key {name!r} twice", param=name)


def _num_members(data: bytes | bytearray) -> int:
    """The members of all objects: colons outside of strings."""
    if b"\\" in data:
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(None, _NOT_MEMBER)
    return sum(each.count(b":") for each in marks.replace(b'""', b"").split(b'"')[::2])


def _without_nulls(data: bytes | bytearray, error: str) -> bytes | None:
    """The body without nulls in objects like the one that has an unknown field; None if the error is another, or that
    field is not null.
    """
    place = _PLACE.match(error)
    found = _UNKNOWN.match(place[1] if place else error)
    if found is None:
        return None
    body = msgspec.json.decode(data)
    objects = [body]
    for name in _STEPS.findall(place[2] if place else ""):
        if name.startswith("["):
            objects = [item for each in objects if isinstance(each, list) for item in each]
        else:
            objects = [each[name] for each in objects if isinstance(each, dict) and name in each]
    num_nulls = 0
    for each in objects:
        if isinstance(each, dict):
            for name in [name for name, value in each.items() if value is None]:
                del each[name]
                num_nulls += name == found[1]
    return msgspec.json.encode(body) if num_nulls else None


_PLACE = re.compile(r"^(.*) - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_UNKNOWN = re.compile(r"^Object contains unknown field `([^`]+)`$")
_STEPS = re.compile(r"\[[^\]]*\]|[^.\[\]]+")
_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `([^`]+)`$")


def invalid_field(error: msgspec.ValidationError) -> RequestError:
    """The error in the caller's terms, with `param` such as 'messages[0].role'."""
    text = str(error)
    place = _PLACE.match(text)
    problem, param = (place[1], place[2]) if place else (text, "")
    if field := _FIELD.match(problem):
        param = f"{param}.{field[1]}".lstrip(".")
    problem = problem[:MAX_MESSAGE_CHARS].replace("`", "'")
    return RequestError(f"{param or 'the body'} is invalid: {problem[:1].lower()}{problem[1:]}", param=param)


def encode(value: Any) -> bytes:
    """JSON on one line. NaN and infinities become null: callers must keep them out."""
    return msgspec.json.encode(value)
