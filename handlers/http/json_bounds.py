"""The shape of a JSON text, bounded before it is decoded: how deep it is nested, and how many values it has.

A few bytes of JSON can become many of memory ('{},' is 3, and a dict 64), and a nesting that is deep enough takes a
decoder's, or a handler's, stack. So the text is looked at first, by a handful of passes in C over its bytes; 8 MiB take
some milliseconds. It need not be JSON: whatever a decoder would read of it before it finds out is within the bounds,
too.

Not bounded here, but by the decoder, in time linear in the text: numbers (an integer has up to 4,300 digits, and a
float is finite; NaN is no JSON) and texts (which are UTF-8, without half of a surrogate pair). Of two equal keys the
last one counts.
"""

from __future__ import annotations

from ...runtime.errors import RequestError

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
