"""The line of each key of a TOML text, which `tomllib` does not keep.

Reads texts that `tomllib` has accepted: it looks at statements, not at values, and never raises.
"""

from __future__ import annotations

import re
import tomllib

_PIECE = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|\n"
    r"|[^\n\"'\#\[\]{}=]+"
    r"|.",
    re.DOTALL,
)


class KeyLines:
    """Lines by path: `("models", "a", "min_warm")` → 12. An array of tables has its index in the path, from 0."""

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, ...], int] = {}
        self._arrays: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for line, statement, is_header in _statements(text):
            if is_header and statement.startswith("[["):
                table = self._inside(_split(statement[2:-2]))
                index = self._arrays.get(table, -1) + 1
                self._arrays[table] = index
                table = (*table, str(index))
                self._lines[table] = line
            elif is_header:
                table = self._inside(_split(statement[1:-1]))
                self._keep(table, line)
            else:
                self._keep((*table, *_split(statement)), line)

    def line_of(self, path: tuple[str, ...]) -> int:
        """Of the key itself, or of the nearest thing around it that is written; 0 when nothing is."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return self._lines[path[:length]]
        return 0

    def has(self, path: tuple[str, ...]) -> bool:
        """Whether this very key is written outside of an inline table."""
        return path in self._lines

    def _keep(self, path: tuple[str, ...], line: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)
        self._lines[path] = line

    def _inside(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """The path with the index of the last element of each array of tables on the way."""
        full: tuple[str, ...] = ()
        for place, name in enumerate(path):
            full = (*full, name)
            if full in self._arrays and place < len(path) - 1:
                full = (*full, str(self._arrays[full]))
        return full


def _statements(text: str) -> list[tuple[int, str, bool]]:
    """(line, header or key, whether it is a header) of each statement, in order."""
    found: list[tuple[int, str, bool]] = []
    line, depth = 1, 0
    start, current, in_value = 1, "", False
    for match in _PIECE.finditer(text):
        piece = match.group()
        if piece == "\n" and depth == 0:
            if current.strip().startswith("["):
                found.append((start, current.strip(), True))
            current, in_value = "", False
        elif in_value:
            depth += (piece in "[{") - (piece in "]}") if len(piece) == 1 else 0
        elif piece == "=" and not current.strip().startswith("["):
            found.append((start, current.strip(), False))
            current, in_value = "", True
        elif not piece.startswith("#") and piece != "\n":
            start = start if current.strip() else line
            current += piece
        line += piece.count("\n")
    if current.strip().startswith("["):
        found.append((start, current.strip(), True))
    return found


def _split(dotted: str) -> tuple[str, ...]:
    """The names of a dotted key, read as TOML reads them."""
    try:
        table = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return (dotted.strip(),)
    path: list[str] = []
    while isinstance(table, dict):
        name, table = next(iter(table.items()))
        path.append(name)
    return tuple(path)
