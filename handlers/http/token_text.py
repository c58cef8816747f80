"""One token alone, as bytes and as text, for log-probabilities.

A decoder shows a token in its place: it drops the space before the first word, and a part of a character it
cannot show at all. The vocabulary's own spelling of the token says the rest. It does not know what the tokens
are for.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

from ...runtime.text.pieces import byte_alphabet

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

WORD_START = "▁"  # SentencePiece's sign for a space
REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # byte fallback


def token_bytes(tokenizer: TextTokenizer, token: int) -> bytes:
    """What the token adds to a text, UTF-8; of a token that is a part of a character, that part. b'' for none
    such.
    """
    piece = tokenizer.id_to_piece(token)
    if piece is None:
        return b""
    if byte := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(byte[1], 16)])
    text = tokenizer.decode([token], skip_special_tokens=False)
    if REPLACEMENT in text and all(char in _byte_alphabet() for char in piece):
        return bytes(_byte_alphabet()[char] for char in piece)
    if piece.startswith(WORD_START) and not text.startswith(" "):
        text = f" {text}"
    return text.encode()


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    return {chr(code): byte for code, byte in byte_alphabet().items()}
