"""JSON bodies: bounded before they are decoded, decoded into values, and written.

A few bytes of JSON can become many of memory ('{},' is 3, and a dict 64), and a nesting that is deep enough takes a
decoder's, or a handler's, stack. So the text is looked at first, by a handful of passes in C over its bytes; 8 MiB take
some milliseconds. It need not be JSON: whatever a decoder would read of it before it finds out is within the bounds,
too.

Not bounded here, but by the decoder, in time linear in the text: numbers (an integer has up to 4,300 digits, and a
float is finite; NaN is no JSON) and texts (which are UTF-8, without half of a surrogate pair). Of two equal keys the
last one counts.
"""

from __future__ import annotations

import re
from typing import Any, Generic, TypeVar

import msgspec

from ...runtime.errors import RequestError

MAX_MESSAGE_CHARS = 300  # of an error: it may quote what the client sent
MAX_JSON_DEPTH = 64
MAX_JSON_ITEMS = 1 << 19  # values in all arrays and objects; the tokens of a request are fewer
ITEM_BYTES = 64  # what a small value takes in memory, as a rule

_NOT_STRUCTURE = bytes(set(range(256)) - set(b'"[]{},'))
_AS_ARRAYS = bytes.maketrans(b"{}", b"[]")


def memory_bytes(data: bytes | bytearray) -> int:
    """What a body and the values that it has may take together. An estimate: it takes commas in texts for values."""
    num_items = data.count(b",") + data.count(b"[") + data.count(b"{")
    return len(data) + ITEM_BYTES * min(num_items, MAX_JSON_ITEMS)


def check_shape(
    data: bytes | bytearray, *, max_depth: int = MAX_JSON_DEPTH, max_items: int = MAX_JSON_ITEMS
) -> None:
    """Raises `RequestError` when the text is nested deeper, or has more values. Holds a copy of it meanwhile."""
    num_open = data.count(b"[") + data.count(b"{")
    if num_open <= max_depth and num_open + data.count(b",") <= max_items:
        return  # also if all of these were structure, none of them text
    structure = _structure(data, max_items)
    if structure.count(b",") + structure.count(b"[") + structure.count(b"{") > max_items:
        raise _too_many(max_items)
    if not _is_within(structure, max_depth):
        raise RequestError(f"the body's JSON is nested too deeply: {max_depth} levels are the most")


def _structure(data: bytes | bytearray, max_items: int) -> bytes | bytearray:
    """Its brackets, braces and commas, without those in texts."""
    if b"\\" in data:
        # Pairs first, from the left: a backslash that is left over is not escaped itself, and escapes what follows.
        data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    marks = data.translate(None, _NOT_STRUCTURE)
    # An empty text, or two with nothing between them that counts: either way what is outside of texts stays the same.
    marks = marks.replace(b'""', b"")
    if marks.count(b'"') > 2 * max_items + 2:  # before they become as many objects
        raise _too_many(max_items)
    return b"".join(marks.split(b'"')[::2])


def _is_within(structure: bytes | bytearray, max_depth: int) -> bool:
    """Whether it is nested no deeper: taking its innermost pairs away, so many times, leaves nothing open."""
    brackets = structure.translate(_AS_ARRAYS, b",")
    for depth in range(max_depth + 1):
        if brackets.count(b"[") + depth <= max_depth:
            return True
        inner = brackets.replace(b"[]", b"")
        if len(inner) == len(brackets):
            return False  # what is open has no end, and is more than may be
        brackets = inner
    return False


def _too_many(max_items: int) -> RequestError:
    return RequestError(
        f"the body's JSON has more than {max_items} values", hint="Send it in several requests."
    )


T = TypeVar("T")


class Decoder(Generic[T]):
    """JSON → a value of one of the types above, or any JSON value for `Any`."""

    def __init__(self, kind: type[T]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, data: bytes | bytearray) -> T:
        """Raises `RequestError` naming the field, or where the JSON breaks off. What is too deep or has too many values
        is not decoded at all.
        """
        check_shape(data)
        try:
            return self._decoder.decode(data)
        except msgspec.ValidationError as error:
            raise invalid_field(error) from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RequestError(f"the body is not JSON: {error}") from None


_PLACE = re.compile(r"^(.*) - at (?:`key` in )?`\$\.?(.*)`$", re.DOTALL)
_FIELD = re.compile(r"^Object (?:missing required|contains unknown) field `([^`]+)`$")


def invalid_field(error: msgspec.ValidationError) -> RequestError:
    """The error in a caller's terms, with `param` such as 'messages[0].role'."""
    text = str(error)
    place = _PLACE.match(text)
    problem, param = (place[1], place[2]) if place else (text, "")
    if field := _FIELD.match(problem):
        param = f"{param}.{field[1]}".lstrip(".")
    problem = problem[:MAX_MESSAGE_CHARS].replace("`", "'")
    return RequestError(
        f"{param or 'the body'} is not valid: {problem[:1].lower()}{problem[1:]}", param=param
    )


def encode(value: Any) -> bytes:
    """JSON on one line. Not-a-number and infinities become null: keep them out."""
    return msgspec.json.encode(value)
