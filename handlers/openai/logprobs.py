"""Log-probabilities in the two shapes of OpenAI's API, and single tokens as bytes and text.

A decoder shows a token in its place: it drops the space before the first word, and it cannot show a part of a
character. The vocabulary's own spelling of the token gives the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from ...runtime.step.requests import PromptLogprobs, TokenLogprob
from ...runtime.text.pieces import byte_alphabet
from .responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    PromptLogprob,
    PromptPlaces,
    TopLogprob,
)

if TYPE_CHECKING:
    from ...runtime.text.tokenizer import TextTokenizer

LOWEST = -9999.0  # for a token that cannot come: JSON has no infinity, and OpenAI says it so

TokenBytes = Callable[[int], bytes]  # one token alone


def chat_logprobs(
    entries: Sequence[TokenLogprob], bytes_of: TokenBytes, *, names_ids: bool = False
) -> ChatLogprobs:
    """With `names_ids` tokens are named by their ids, as vLLM does."""

    def shown(token: int, logprob: float) -> tuple[str, float, list[int]]:
        data = bytes_of(token)
        return _id_name(token) if names_ids else _text(data), _finite(logprob), list(data)

    return ChatLogprobs(
        [
            ChatLogprob(
                *shown(entry.token, entry.logprob),
                top_logprobs=[TopLogprob(*shown(token, logprob)) for token, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    entries: Sequence[TokenLogprob],
    bytes_of: TokenBytes,
    *,
    start: int,
    first_token: int | None = None,
    names_ids: bool = False,
) -> CompletionLogprobs:
    """`start` is where the first of these tokens' text begins, in characters. `first_token` is that of an echoed
    prompt, which stands before `entries`. With `names_ids` tokens are named by their ids, as vLLM does.
    """
    tokens = [entry.token for entry in entries]
    values: list[float | None] = [_finite(entry.logprob) for entry in entries]
    top: list[dict[str, float] | None] = [
        {
            _id_name(token) if names_ids else _text(bytes_of(token)): _finite(logprob)
            for token, logprob in _with_chosen(entry)
        }
        for entry in entries
    ]
    if first_token is not None:
        tokens, values, top = [first_token, *tokens], [None, *values], [None, *top]
    texts = [_text(bytes_of(token)) for token in tokens]
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    names = list(map(_id_name, tokens)) if names_ids else texts
    return CompletionLogprobs(text_offset=offsets, token_logprobs=values, tokens=names, top_logprobs=top)


def prompt_places(logprobs: PromptLogprobs, bytes_of: TokenBytes, *, num_top: int) -> PromptPlaces:
    """vLLM's `prompt_logprobs`: each place's own token, and the `num_top` best in it, by their ids."""
    places: PromptPlaces = [None]
    for entry, rank in zip(logprobs, logprobs.ranks.tolist(), strict=True):
        place = {
            token: PromptLogprob(_finite(logprob), number, _text(bytes_of(token)))
            for number, (token, logprob) in enumerate(entry.top[:num_top], 1)
        }
        place[entry.token] = PromptLogprob(_finite(entry.logprob), rank, _text(bytes_of(entry.token)))
        places.append(place)
    return places


def _with_chosen(entry: TokenLogprob) -> tuple[tuple[int, float], ...]:
    return (*entry.top, (entry.token, entry.logprob))


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)


WORD_START = "▁"  # SentencePiece's sign for a space
REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")  # byte fallback


def token_bytes(tokenizer: TextTokenizer, token: int) -> bytes:
    """The bytes that the token adds to a text, UTF-8; of a token that is a part of a character, that part. b'' for none
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
