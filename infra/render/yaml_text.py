"""YAML text of plain documents: mappings with text keys, lists, texts, numbers, booleans and null.

The text depends on the value alone: keys stay in their order, nothing is wrapped, every text that any YAML
version could read as something else is quoted. It is a writer only, and of this subset only: no anchors, no tags,
no flow collections but the empty ones. PyYAML reads back the same value (a property test says so), but it is no
dependency: it would be one for this alone, and it decides for itself how long lines are folded.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

MAX_KEY_CHARACTERS = 1000  # a simple key has at most 1,024, quotes and escapes included
_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
_LITERAL = re.compile(r"[ -~\n]*")  # printable ASCII and line ends
# Words that YAML 1.1 or 1.2 reads as something else than a text, in any case of their letters.
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})
_SHORT_ESCAPES = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}


def yaml_text(documents: Iterable[Any]) -> str:
    """The documents as one YAML stream, each after the first behind `---`. Raises TypeError or ValueError for
    values that are outside the subset.
    """
    return "---\n".join("".join(_lines(document, 0)) for document in documents)


def _lines(value: Any, indent: int) -> Iterator[str]:
    """The value as whole lines, at `indent` columns."""
    pad = " " * indent
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _entry(f"{pad}{_key(key)}:", item, indent)
    elif _is_list(value) and value:
        for item in value:
            yield from _item(item, indent)
    else:
        yield f"{pad}{_scalar(value, indent)}\n"


def _entry(head: str, value: Any, indent: int) -> Iterator[str]:
    """One key's lines. A list starts in the column of its key, as Kubernetes' own documents have it."""
    if isinstance(value, Mapping) and value:
        yield f"{head}\n"
        yield from _lines(value, indent + 2)
    elif _is_list(value) and value:
        yield f"{head}\n"
        yield from _lines(value, indent)
    else:
        yield f"{head} {_scalar(value, indent)}\n"


def _item(value: Any, indent: int) -> Iterator[str]:
    """One list item's lines: the first begins with its dash."""
    pad = " " * indent
    if (isinstance(value, Mapping) or _is_list(value)) and value:
        first, *others = _lines(value, indent + 2)
        yield f"{pad}- {first[indent + 2 :]}"
        yield from others
    else:
        yield f"{pad}- {_scalar(value, indent)}\n"


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _key(key: Any) -> str:
    if not isinstance(key, str):
        raise TypeError(f"a key is a text, not {type(key).__name__}")
    written = key if _is_plain(key) else _quoted(key)
    if len(written) > MAX_KEY_CHARACTERS:
        raise ValueError(f"a key has at most {MAX_KEY_CHARACTERS} characters; this one has {len(written)}")
    return written


def _scalar(value: Any, indent: int) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return _number(value)
    if isinstance(value, str):
        return _text(value, indent)
    if isinstance(value, Mapping):
        return "{}"
    if _is_list(value):
        return "[]"
    raise TypeError(f"YAML is written of plain values, not of {type(value).__name__}")


def _number(value: float) -> str:
    if not math.isfinite(value):
        raise ValueError("a number is finite")
    text = repr(float(value))
    if "e" in text:  # YAML 1.1 reads 1e+16 as a text: its exponents need a point before them
        mantissa, _, exponent = text.partition("e")
        sign = "" if exponent.startswith("-") else "+"
        text = f"{mantissa if '.' in mantissa else mantissa + '.0'}e{sign}{exponent.lstrip('+')}"
    return text


def _text(text: str, indent: int) -> str:
    if _is_plain(text):
        return text
    if "\n" in text and _LITERAL.fullmatch(text):
        body = text.removesuffix("\n")
        if body and not body.startswith((" ", "\n")) and not body.endswith("\n"):
            pad = " " * (indent + 2)
            lines = "".join(f"\n{pad}{line}" if line else "\n" for line in body.split("\n"))
            return f"|{'' if text.endswith(chr(10)) else '-'}{lines}"
    return _quoted(text)


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None and text.lower() not in _RESERVED


def _quoted(text: str) -> str:
    return '"' + "".join(map(_escaped, text)) + '"'


def _escaped(character: str) -> str:
    if character in _SHORT_ESCAPES:
        return _SHORT_ESCAPES[character]
    code = ord(character)
    if 0xD800 <= code <= 0xDFFF:
        raise ValueError("a text has no halves of surrogate pairs")
    if " " <= character <= "~" or (code >= 0xA1 and character.isprintable()):
        return character
    return f"\\x{code:02X}" if code < 0x100 else f"\\u{code:04X}" if code < 0x10000 else f"\\U{code:08X}"
