"""Decoding of tokens by a table of their bytes, for the decoders that allow it.

The output of two kinds of decoders depends on nothing but the neighbouring bytes: byte-level BPE's
(Llama 3, Qwen, GPT-2), and SentencePiece's as Hugging Face writes it (Llama 2, Mistral, Gemma). For
these a table decodes exactly like the `tokenizers` library, in a process that never loads it. For
all others there is no table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True, slots=True)
class PieceTable:
    """A decoding table. `pieces[token]` are the token's bytes; `byte_tokens` are single bytes of
    characters that have no piece.
    """

    pieces: list[bytes]
    special: frozenset[int]
    byte_tokens: frozenset[int]
    # The tokenizer adds that number of spaces at the start.
    strip_spaces: int

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode like `Backend.decode`."""
        pieces, special = self.pieces, self.special
        known = [token for token in tokens if 0 <= token < len(pieces)]
        if skip_special_tokens:
            known = [token for token in known if token not in special]
        if self.byte_tokens:
            text = "".join(self._runs(known))
        else:
            text = b"".join([pieces[token] for token in known]).decode("utf-8", "replace")
        for _ in range(self.strip_spaces):
            text = text.removeprefix(" ")
        return text

    def _runs(self, tokens: list[int]) -> Iterator[str]:
        """Decode runs of byte tokens: each is one text, or a replacement character for each byte."""
        for is_bytes, run in groupby(tokens, self.byte_tokens.__contains__):
            data = b"".join([self.pieces[token] for token in run])
            if not is_bytes:
                yield data.decode("utf-8")
                continue
            try:
                yield data.decode("utf-8")
            except UnicodeDecodeError:
                yield REPLACEMENT * len(data)


def make_piece_table(
    decoder: Any, vocabulary: Mapping[str, int], special: frozenset[int]
) -> PieceTable | None:
    """Make the table from tokenizer.json's decoder and the vocabulary with its added tokens; None
    for other kinds of decoders.
    """
    if not vocabulary or not isinstance(decoder, dict):
        return None
    pieces = [b""] * (max(vocabulary.values()) + 1)
    if decoder.get("type") == "ByteLevel":
        alphabet = _byte_translation()
        for piece, token in vocabulary.items():
            pieces[token] = _byte_level(piece, alphabet)
        return PieceTable(pieces, special, frozenset(), 0)
    strip_spaces = _sentencepiece_strip(decoder)
    if strip_spaces is None:
        return None
    byte_tokens = set()
    for piece, token in vocabulary.items():
        if found := _BYTE_PIECE.fullmatch(piece):
            pieces[token] = bytes([int(found[1], 16)])
            byte_tokens.add(token)
        else:
            pieces[token] = piece.replace("▁", " ").encode()
    return PieceTable(pieces, special, frozenset(byte_tokens), strip_spaces)


def byte_alphabet() -> dict[int, int]:
    """The characters that byte-level vocabularies use for bytes.

    Visible characters of Latin-1 stand for themselves, the characters from U+0100 on for the other
    bytes, in order.
    """
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {byte: byte for byte in visible} | {0x100 + rank: byte for rank, byte in enumerate(hidden)}


def _byte_translation() -> dict[int, int]:
    """The table for `str.translate`: a byte's character → the byte; others of the first 256 → a
    number that is not a byte.
    """
    return dict.fromkeys(range(256), 0xFFFF) | byte_alphabet()


def _byte_level(piece: str, translation: dict[int, int]) -> bytes:
    """The bytes of a piece. An added token is its own text, unless all of its characters could be
    bytes.
    """
    try:
        return piece.translate(translation).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def _sentencepiece_strip(decoder: Mapping[str, Any]) -> int | None:
    """The number of leading spaces that a SentencePiece-like decoder strips; None for other
    decoders.
    """
    if decoder.get("type") != "Sequence" or not isinstance(decoder.get("decoders"), list):
        return None
    steps = [step if isinstance(step, dict) else {} for step in decoder["decoders"]]
    head = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if steps[:3] != head:
        return None
    match steps[3:]:
        case []:
            return 0
        case [{"type": "Strip", "content": " ", "start": int(start), "stop": 0}] if 0 <= start <= 8:
            return start
    return None
