"""The bytes of tokens: decoding by a table of them, for the decoders that allow it, and the maximum
number of a text's bytes for one token.

The output of two kinds of decoders depends on nothing but the neighbouring bytes: byte-level BPE's
(Llama 3, Qwen, GPT-2), and SentencePiece's as Hugging Face writes it (Llama 2, Mistral, Gemma). For
these a table decodes exactly like the `tokenizers` library, in a process that never loads it. For
all others there is no table.

The maximum refuses a text that cannot fit a context before it is tokenised. It exists only if no
text is dropped, joined or shortened on its way to the vocabulary: for BPE over bytes, and over
characters with a token for each byte. WordPiece makes one unknown token of a word of any length,
and some tokenizers strip or join spaces: for these there is no bound.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, groupby
from typing import Any, NamedTuple

REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")
# In all of Unicode, NFC shortens a text at most by a factor of 3.5 (a decomposed U+0390 in its
# longest spellings).
NFC_FACTOR = 4
MAX_BYTES_PER_CHAR = 4  # in UTF-8
BYTE_PIECES = tuple(f"<0x{byte:02X}>" for byte in range(256))
_KEEPING_NORMALIZERS = frozenset(("NFC", "Prepend", "Replace"))
_KEEPING_SPLITS = frozenset(("ByteLevel", "Split", "Digits", "Metaspace"))


class PieceTable(NamedTuple):
    """A decoding table. `byte_tokens` are single bytes of characters that have no piece.

    The tokens' bytes are one text: objects of their own would take 7 MB for 152,000 tokens.
    """

    data: bytes  # of all tokens, one after another
    bounds: array[int]  # (num_tokens + 1,) uint32: a token's are data[bounds[token] : bounds[token + 1]]
    special: frozenset[int]
    byte_tokens: frozenset[int]
    # The tokenizer adds that number of spaces at the start.
    strip_spaces: int

    @classmethod
    def of(
        cls,
        pieces: Sequence[bytes],
        special: frozenset[int],
        byte_tokens: frozenset[int] = frozenset(),
        strip_spaces: int = 0,
    ) -> PieceTable:
        """The table of `pieces[token]`, the token's bytes."""
        bounds = array("I", accumulate(map(len, pieces), initial=0))
        return cls(b"".join(pieces), bounds, special, byte_tokens, strip_spaces)

    def decode(self, tokens: Sequence[int], *, skip_special_tokens: bool) -> str:
        """Decode like `Backend.decode`."""
        num_tokens, special = len(self.bounds) - 1, self.special
        known = [token for token in tokens if 0 <= token < num_tokens]
        if skip_special_tokens:
            known = [token for token in known if token not in special]
        text = (
            "".join(self._runs(known)) if self.byte_tokens else self._joined(known).decode("utf-8", "replace")
        )
        for _ in range(self.strip_spaces):
            text = text.removeprefix(" ")
        return text

    def _joined(self, tokens: Iterable[int]) -> bytes:
        data, bounds = self.data, self.bounds
        return b"".join([data[bounds[token] : bounds[token + 1]] for token in tokens])

    def _runs(self, tokens: list[int]) -> Iterator[str]:
        """Decode runs of byte tokens: each is one text, or a replacement character for each byte."""
        for is_bytes, run in groupby(tokens, self.byte_tokens.__contains__):
            data = self._joined(run)
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
        return PieceTable.of(pieces, special)
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
    return PieceTable.of(pieces, special, frozenset(byte_tokens), strip_spaces)


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
