"""JSON inside a model's text: where a value ends, in text that comes in pieces."""

from __future__ import annotations

import re

_STRUCTURE = re.compile(r'["{}\[\]]')
_IN_STRING = re.compile(r'["\\]')


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
