"""The arguments of a conversation's tool calls as objects, whatever text they are.

An answer that `max_tokens` cut ends inside its arguments, and the client sends them back as they
came, with the tool's error. Chat templates need an object: some iterate over its items.
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from ....runtime.errors import RequestError
from ...http.json_bodies import check_shape

MAX_ITEMS = 1 << 16  # values in one call's arguments
MAX_DEPTH = 64
# The key of text that is neither an object nor the beginning of one: the one that Anthropic's
# documentation advises for arguments that are not JSON.
INVALID_JSON = "INVALID_JSON"

_STRUCTURE = re.compile(r'["{}\[\],]')
_STRING = re.compile(r'(?:[^"\\]++|\\.)*+', re.DOTALL)
_CLOSERS = {"{": "}", "[": "]"}
# A member or an item that breaks off: its name, a part of that, or a part of its value.
_BROKEN_OFF = re.compile(
    r',?\s*(?:"(?:[^"\\]++|\\.)*+\\?(?:"\s*(?::\s*)?)?)?'
    r"(?:-?[0-9][0-9.eE+-]*|-|t(?:ru?)?|f(?:al?|als)?|nu?l?)?\Z",
    re.DOTALL,
)
_MAX_ESCAPE_CHARS = 11  # of an escape that breaks off: a character beyond U+FFFF has 12


def arguments_object(text: str) -> dict[str, Any]:
    """The object that `text` is; the beginning of one, closed where it breaks off; or, of any other
    text, an object with the text itself as `INVALID_JSON`.

    Takes up to half a second for a million brackets.
    """
    text = text.strip()
    if text in ("", "null"):
        return {}
    try:
        check_shape(text.encode(), max_depth=MAX_DEPTH, max_items=MAX_ITEMS)
    except RequestError:
        return {INVALID_JSON: text}
    for candidate in (text, *_closed(text)):
        try:
            return msgspec.json.decode(candidate, type=dict[str, Any])
        except msgspec.DecodeError:
            pass
    return {INVALID_JSON: text}


def _closed(text: str) -> list[str]:
    """Texts of which the first that is JSON is the object that `text` begins: with its last value
    closed, or without it.
    """
    if not text.startswith("{"):
        return []
    closers: list[str] = []
    complete = (0, "")  # the last place behind which nothing but closers is missing, and these
    position = 0
    while (found := _STRUCTURE.search(text, position)) is not None:
        position = found.end()
        character = found[0]
        if character == '"':
            string = _STRING.match(text, position)
            assert string is not None
            if not text.startswith('"', string.end()):
                ends = range(len(text), max(position, len(text) - _MAX_ESCAPE_CHARS) - 1, -1)
                with_string = [f'{text[:end]}"{_joined(closers)}' for end in ends]
                return [*with_string, *_without_last(text, *complete)]
            position = string.end() + 1
            continue
        if character in _CLOSERS:
            closers.append(_CLOSERS[character])
        elif character != "," and (closers.pop() != character or not closers):
            return []  # no beginning of an object
        complete = (found.start() if character == "," else position, _joined(closers))
    return [text + _joined(closers), *_without_last(text, *complete)]


def _joined(closers: list[str]) -> str:
    return "".join(reversed(closers))


def _without_last(text: str, end: int, closers: str) -> list[str]:
    """The text up to `end`, closed; none where something else than a broken-off value follows."""
    return [text[:end] + closers] if _BROKEN_OFF.match(text, end) else []
