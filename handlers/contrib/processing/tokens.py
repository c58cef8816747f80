"""Measuring and cutting of texts in the model's own tokens.

Cuts are between characters, at the edges of tokens. Because the same characters may become other
tokens without the text after them, the result is counted again: it never has more tokens than
allowed. This module knows nothing of sentences or chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ....runtime.errors import RequestError
from ....runtime.text.tokenizer import MAX_TEXT_CHARS

# Of the first window of a text: more than most tokens have, so that one window is enough.
CHARS_PER_TOKEN = 6
# Before the end of a window, where tokens may differ from those of the whole text.
EDGE_CHARS = 128

Offsets = Callable[[str], list[tuple[int, int]]]


class Tokens(Protocol):
    """The part of `context.model`, or of a test's tokenizer, that is needed here."""

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def token_offsets(self, text: str) -> list[tuple[int, int]]: ...


def count_tokens(model: Tokens, text: str, *, add_special_tokens: bool = True) -> int:
    """The number of the text's tokens for this model, by default with the special tokens around a
    prompt.
    """
    return len(model.tokenize(text, add_special_tokens=add_special_tokens))


async def acount_tokens(model: Tokens, text: str, *, add_special_tokens: bool = True) -> int:
    """The async form of `count_tokens`."""
    return await asyncio.to_thread(count_tokens, model, text, add_special_tokens=add_special_tokens)


def truncate(model: Tokens, text: str, max_tokens: int, *, add_special_tokens: bool = True) -> str:
    """The longest beginning of the text, up to the edge of a token, that has at most `max_tokens`.

    By default these include the special tokens around a prompt, so that the result can be embedded
    or continued directly. The text may be of any length. Raises `RequestError` if not even the
    special tokens fit.
    """
    budget = content_budget(model, max_tokens) if add_special_tokens else max_tokens
    return text[: end_within(model.token_offsets, text, budget)]


async def atruncate(model: Tokens, text: str, max_tokens: int, *, add_special_tokens: bool = True) -> str:
    """The async form of `truncate`."""
    return await asyncio.to_thread(truncate, model, text, max_tokens, add_special_tokens=add_special_tokens)


def content_budget(model: Tokens, max_tokens: int) -> int:
    """The tokens of `max_tokens` left after the special ones around a prompt. Raises `RequestError`
    if none are left.
    """
    num_special = len(model.tokenize("")) - len(model.tokenize("", add_special_tokens=False))
    if max_tokens <= num_special:
        raise RequestError(
            f"max_tokens is {max_tokens}, but the model puts {num_special} tokens around each text",
            param="max_tokens",
        )
    return max_tokens - num_special


def end_within(offsets: Offsets, text: str, budget: int) -> int:
    """The largest number of leading characters that have at most `budget` tokens."""
    window_chars = first_window_chars(budget)
    while True:
        window = text[:window_chars]
        spans = offsets(window)
        if len(window) == len(text) or is_enough(spans, budget, window_chars):
            return end_of_prefix(offsets, window, spans, budget)
        window_chars = min(MAX_TEXT_CHARS, 2 * window_chars)


def first_window_chars(budget: int) -> int:
    """The size of the first window of a text for finding `budget` tokens."""
    return min(MAX_TEXT_CHARS, max(0, budget) * CHARS_PER_TOKEN + 2 * EDGE_CHARS)


def is_enough(spans: list[tuple[int, int]], budget: int, window_chars: int) -> bool:
    """True if `budget` of the window's tokens are clear of its end, or no larger window is
    possible.
    """
    settled = len(spans) > budget and spans[max(0, budget)][0] + EDGE_CHARS <= window_chars
    return settled or window_chars == MAX_TEXT_CHARS


def end_of_prefix(offsets: Offsets, text: str, spans: list[tuple[int, int]], budget: int) -> int:
    """`end_within` for a text whose tokens' `spans` are known. 0 if its first character has more
    tokens.
    """
    num_tokens = budget
    while len(spans) > num_tokens > 0:
        start = start_of_token(spans, num_tokens)
        excess = 1
        for end in (
            start,
            spans[num_tokens - 1][1],
            # With and without the spaces that some tokenizers assign to no token.
        ):
            if 0 < end <= start and (excess := len(offsets(text[:end])) - budget) <= 0:
                return end
        num_tokens -= max(1, excess)
    return len(text) if len(spans) <= budget else 0


def start_of_token(spans: list[tuple[int, int]], index: int) -> int:
    """The beginning of token `index`: the text before it has no more than `index` tokens.

    Tokens without characters, which some tokenizers insert, count as being at the token before
    them.
    """
    while index > 0 and spans[index][1] <= spans[index][0]:
        index -= 1
    return spans[index][0] if index > 0 else 0
