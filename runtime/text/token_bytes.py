"""The maximum number of bytes of a text for one token: a bound for refusing a text that cannot fit
a context before it is tokenised.

It exists only if no text is dropped, joined or shortened on its way to the vocabulary: for BPE over
bytes (Llama 3, Qwen, GPT-2), and over characters with a token for each byte (Llama 2, Mistral).
WordPiece makes one unknown token of a word of any length, and some tokenizers strip or join spaces:
for these there is no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .pieces import byte_alphabet

# In all of Unicode, NFC shortens a text at most by a factor of 3.5 (a decomposed U+0390 in its
# longest spellings).
NFC_FACTOR = 4
MAX_BYTES_PER_CHAR = 4  # in UTF-8
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_KEEPING_NORMALIZERS = frozenset(("NFC", "Prepend", "Replace"))
_KEEPING_SPLITS = frozenset(("ByteLevel", "Split", "Digits", "Metaspace"))


def max_token_bytes(
    file: Mapping[str, Any], longest_chars: int, has_pieces: Callable[[tuple[str, ...]], bool]
) -> int | None:
    """The bound for a tokenizer.json, whose pieces may be left out of `file`; None: there is no
    bound.

    `longest_chars` is the length of the longest piece, and `has_pieces` tells whether the
    vocabulary has them all.
    """
    try:
        return _bound(file, longest_chars, has_pieces)
    except (KeyError, TypeError, AttributeError, ValueError):
        return None  # a structure that is not known here


def _bound(
    file: Mapping[str, Any], longest_chars: int, has_pieces: Callable[[tuple[str, ...]], bool]
) -> int | None:
    model = file["model"]
    added = file.get("added_tokens") or []
    normalizers = list(_flat(file.get("normalizer"), "normalizers"))
    splits = list(_flat(file.get("pre_tokenizer"), "pretokenizers"))
    if model.get("type", "BPE") != "BPE" or not all(map(_keeps_text, normalizers)):
        return None
    if not all(map(_keeps_bytes, splits)) or any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    if any(split["type"] == "ByteLevel" for split in splits):
        all_bytes, bytes_per_char = tuple(map(chr, byte_alphabet())), 1
    else:
        all_bytes, bytes_per_char = BYTE_PIECES, MAX_BYTES_PER_CHAR
        if not model.get("byte_fallback"):
            return None
    if not has_pieces(all_bytes):
        return None
    longest = max([longest_chars * bytes_per_char, *(len(token["content"].encode()) for token in added)])
    composes = any(normalizer["type"] == "NFC" for normalizer in normalizers)
    return longest * (NFC_FACTOR if composes else 1)


def _flat(step: Mapping[str, Any] | None, key: str) -> Iterator[Mapping[str, Any]]:
    """The single steps of a possibly nested sequence."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step[key]:
        yield from _flat(inner, key)


def _keeps_text(normalizer: Mapping[str, Any]) -> bool:
    """True if it never shortens a text, NFC aside."""
    if normalizer["type"] == "Replace":
        pattern = normalizer["pattern"].get("String")
        return isinstance(pattern, str) and len(pattern.encode()) <= len(normalizer["content"].encode())
    return normalizer["type"] in _KEEPING_NORMALIZERS


def _keeps_bytes(split: Mapping[str, Any]) -> bool:
    return split["type"] in _KEEPING_SPLITS and split.get("behavior") != "Removed"
