"""Texts measured and cut in the model's own tokens.

Cuts fall between characters, at the edges of tokens. Because the same characters may be other tokens once what stood
behind them is gone, what was cut is counted again: no result ever has more tokens than it may. Nothing is known
here of sentences or of chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from ....runtime.errors import RequestError
from ....runtime.text.tokenizer import MAX_TEXT_CHARS

# Of a text's beginning that is looked at first: more than most tokens have, so that once is enough.
CHARS_PER_TOKEN = 6
EDGE_CHARS = 128  # before the end of what is looked at, where tokens may be others than in the whole text

Offsets = Callable[[str], list[tuple[int, int]]]


class Tokens(Protocol):
    """What is needed of `context.model`, and of a test's tokenizer."""

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def token_offsets(self, text: str) -> list[tuple[int, int]]: ...


def count_tokens(model: Tokens, text: str, *, add_special_tokens: bool = True) -> int:
    """How many tokens the text has for this model; by default with those that stand around a prompt."""
    return len(model.tokenize(text, add_special_tokens=add_special_tokens))


async def acount_tokens(model: Tokens, text: str, *, add_special_tokens: bool = True) -> int:
    """As `count_tokens`, for async handlers."""
    return await asyncio.to_thread(count_tokens, model, text, add_special_tokens=add_special_tokens)


def truncate(model: Tokens, text: str, max_tokens: int, *, add_special_tokens: bool = True) -> str:
    """The longest beginning of the text, up to the edge of a token, that has at most `max_tokens`.

    By default these include the special tokens around a prompt, so that the result can be embedded or generated
    from as it is. The text may be of any length. Raises `RequestError` when not even the special tokens fit.
    """
    budget = content_budget(model, max_tokens) if add_special_tokens else max_tokens
    return text[: end_within(model.token_offsets, text, budget)]


async def atruncate(model: Tokens, text: str, max_tokens: int, *, add_special_tokens: bool = True) -> str:
    """As `truncate`, for async handlers."""
    return await asyncio.to_thread(truncate, model, text, max_tokens, add_special_tokens=add_special_tokens)


def content_budget(model: Tokens, max_tokens: int) -> int:
    """What `max_tokens` leave beside the special tokens around a prompt. Raises `RequestError` for nothing."""
    num_special = len(model.tokenize("")) - len(model.tokenize("", add_special_tokens=False))
    if max_tokens <= num_special:
        raise RequestError(
            f"max_tokens is {max_tokens}, but the model puts {num_special} tokens around each text",
            param="max_tokens",
        )
    return max_tokens - num_special


def end_within(offsets: Offsets, text: str, budget: int) -> int:
    """How many characters from the text's beginning have at most `budget` tokens: as many as there can be."""
    window_chars = first_window_chars(budget)
    while True:
        window = text[:window_chars]
        spans = offsets(window)
        if len(window) == len(text) or is_enough(spans, budget, window_chars):
            return end_of_prefix(offsets, window, spans, budget)
        window_chars = min(MAX_TEXT_CHARS, 2 * window_chars)


def first_window_chars(budget: int) -> int:
    """How much of a text is looked at first to find `budget` tokens."""
    return min(MAX_TEXT_CHARS, max(0, budget) * CHARS_PER_TOKEN + 2 * EDGE_CHARS)


def is_enough(spans: list[tuple[int, int]], budget: int, window_chars: int) -> bool:
    """Whether `budget` tokens, these being the window's, lie clear of its end, or no larger window can be had."""
    settled = len(spans) > budget and spans[max(0, budget)][0] + EDGE_CHARS <= window_chars
    return settled or window_chars == MAX_TEXT_CHARS


def end_of_prefix(offsets: Offsets, text: str, spans: list[tuple[int, int]], budget: int) -> int:
    """The same for a text whose tokens' `spans` are known. 0 when its first character has more tokens."""
    num_tokens = budget
    while len(spans) > num_tokens > 0:
        start = start_of_token(spans, num_tokens)
        excess = 1
        for end in (
            start,
            spans[num_tokens - 1][1],
        ):  # with the spaces that some tokenizers leave to no token, without
            if 0 < end <= start and (excess := len(offsets(text[:end])) - budget) <= 0:
                return end
        num_tokens -= max(1, excess)
    return len(text) if len(spans) <= budget else 0


def start_of_token(spans: list[tuple[int, int]], index: int) -> int:
    """Where token `index` begins: what is before it has no more than `index` tokens. Tokens that stand for no
    character, which some tokenizers put in, count as being where the one before them is.
    """
    while index > 0 and spans[index][1] <= spans[index][0]:
        index -= 1
    return spans[index][0] if index > 0 else 0
