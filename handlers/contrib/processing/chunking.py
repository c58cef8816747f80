"""Chunking: long texts in pieces that fit a model, cut by its tokens at the edges of paragraphs and sentences.

Invariants: every chunk is an unchanged range of the text and has at most `max_tokens`; the first begins at the text's
beginning, the last ends at its end, and each begins no later than the previous one ends, and later than that began.
Chunks depend on the text alone, not on the pieces in which it arrived. The memory is a chunk and a bounded lookahead.

Cuts are between characters, at the edges of the model's tokens. Because the same characters may become other tokens
without the text after them, the result is counted again: it never has more tokens than allowed. This module does not
know the use of the chunks.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

from ....runtime.errors import RequestError
from ....runtime.text.tokenizer import MAX_TEXT_CHARS

# Of the first window of a text: more than most tokens have, so that one window is enough.
CHARS_PER_TOKEN = 6
# Before the end of a window, where tokens may differ from those of the whole text.
EDGE_CHARS = 128

Offsets = Callable[[str], list[tuple[int, int]]]
# Read at a time: cutting little from much would copy much each time.
MAX_PIECE_CHARS = 1 << 16

# Places to cut, best first: after empty lines, lines, sentences, clauses, words.
_EDGES = tuple(
    re.compile(pattern)
    for pattern in (
        r"\n[ \t]*\n\s*",
        r"\n\s*",
        r"[.!?…][\"'”’)\]]*\s+|[。！？][”’」』）]*",
        r"[,;:—–][\"'”’)\]]*\s+|[、，；：]",
        r"\s+",
    )
)
# Share of a chunk's room that a good edge must leave used; otherwise the next kind of edge is taken.
_LEAST_SHARE = 0.5


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


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk. `text` is the characters [start, end) of the whole text."""

    text: str
    start: int
    end: int
    num_tokens: int  # without special tokens

    @property
    def num_chars(self) -> int:
        return self.end - self.start


class Chunker:
    """Takes a text incrementally, and returns chunks as soon as they are final. For one text; not
    thread-safe.
    """

    def __init__(self, model: Tokens, *, max_tokens: int, overlap_tokens: int = 0) -> None:
        """`max_tokens` include the special tokens that the model puts around a text. Each chunk
        repeats up to `overlap_tokens` of the end of the previous one. Raises `RequestError` for
        invalid sizes.
        """
        self._offsets = model.token_offsets
        self._budget = content_budget(model, max_tokens)
        if not 0 <= overlap_tokens <= self._budget // 2:
            raise RequestError(
                f"overlap_tokens is {overlap_tokens}, but must be from 0 to {self._budget // 2}, half of a chunk",
                param="overlap_tokens",
            )
        self._overlap = overlap_tokens
        # The text with which no chunk has begun yet, and the overlap.
        self._held = ""
        self._start = 0  # position of that in the text
        # End of the chunks returned so far.
        self._covered = 0

    def feed(self, piece: str) -> Iterator[Chunk]:
        """Add a piece of text. Yields the chunks that it completes; read them all."""
        for start in range(0, len(piece), MAX_PIECE_CHARS):
            self._held += piece[start : start + MAX_PIECE_CHARS]
            yield from self._take(at_end=False)

    def finish(self) -> Iterator[Chunk]:
        """End the text. Yields the rest of its chunks."""
        return self._take(at_end=True)

    def _take(self, *, at_end: bool) -> Iterator[Chunk]:
        while (spans := self._window_spans(at_end=at_end)) is not None:
            cut = self._cut(spans, at_end=at_end)
            if cut is None:
                self._advance(self._covered)  # the overlap leaves no room for other text
                continue
            text, own = cut
            chunk = Chunk(text, self._start, self._start + len(text), len(own))
            self._covered = chunk.end
            self._advance(chunk.end - self._overlap_chars(text, own))
            yield chunk

    def _advance(self, start: int) -> None:
        self._held = self._held[start - self._start :]
        self._start = start

    def _window_spans(self, *, at_end: bool) -> list[tuple[int, int]] | None:
        """The tokens from which the next chunk is cut, enough to fill it; all at the end of the
        text.

        None: more text is needed, or none is left. The window's sizes depend only on its content,
        so that the chunks do not depend on the pieces.
        """
        window_chars = first_window_chars(self._budget)
        while self._start + len(self._held) > self._covered:
            is_whole = at_end and len(self._held) <= window_chars
            if not is_whole and len(self._held) < window_chars:
                return None
            spans = self._offsets(self._held[:window_chars])
            if is_whole or is_enough(spans, self._budget, window_chars):
                return spans
            window_chars = min(MAX_TEXT_CHARS, 2 * window_chars)
        return None

    def _cut(self, spans: list[tuple[int, int]], *, at_end: bool) -> tuple[str, list[tuple[int, int]]] | None:
        """The next chunk's text and its own tokens, given those of its window. None: it cannot
        reach beyond the overlap.

        Raises `RequestError` if it cannot hold a character.
        """
        done = self._covered - self._start  # the overlap: a chunk must reach beyond it
        is_full = len(spans) > self._budget
        end = start_of_token(spans, self._budget) if is_full else min(len(self._held), MAX_TEXT_CHARS)
        if not (at_end and end == len(self._held)) and end > done:
            end = _best_edge(self._held[:end], max(done + 1, int(end * _LEAST_SHARE)))
        while end > done:
            own = self._offsets(self._held[:end])
            if len(own) <= self._budget:
                return self._held[:end], own
            # The edge is inside a token: the characters before it may be more tokens than before.
            end = min(end - 1, start_of_token(own, self._budget))
        if not done:
            raise RequestError(
                f"one character of the text, {self._start} from its beginning, has more than {self._budget} tokens",
                param="max_tokens",
                hint="Allow more tokens a chunk.",
            )
        return None

    def _overlap_chars(self, text: str, spans: list[tuple[int, int]]) -> int:
        """The number of characters of a chunk's end that the next one repeats: at most those of
        `overlap` tokens.

        Starts at the edge of a sentence or word if there is one that keeps at least half of them.
        """
        if not self._overlap or len(spans) <= self._overlap:
            return 0
        tail = text[max(1, start_of_token(spans, len(spans) - self._overlap)) :]
        found = (match.end() for edge in _EDGES[2:] if (match := edge.search(tail)))
        tail = tail[next((end for end in found if end <= len(tail) // 2), 0) :]
        while len(self._offsets(tail)) > self._overlap:
            # Its first character has several tokens, or has them now that it is alone.
            tail = tail[1:]
        return len(tail)


def chunks(
    model: Tokens, text: str | Iterable[str], *, max_tokens: int, overlap_tokens: int = 0
) -> Iterator[Chunk]:
    """The text's chunks, in order. `text` may come in pieces, which are read only as far as the
    next chunk needs.

    An empty text has none. Raises the errors of `Chunker`, and `RequestError` for a character of
    more than `max_tokens`.
    """
    chunker = Chunker(model, max_tokens=max_tokens, overlap_tokens=overlap_tokens)
    for piece in [text] if isinstance(text, str) else text:
        yield from chunker.feed(piece)
    yield from chunker.finish()


async def achunks(
    model: Tokens, text: str | Iterable[str] | AsyncIterable[str], *, max_tokens: int, overlap_tokens: int = 0
) -> AsyncIterator[Chunk]:
    """The chunks of a text, for async handlers; the text may come from an async iterator, too."""
    chunker = await asyncio.to_thread(Chunker, model, max_tokens=max_tokens, overlap_tokens=overlap_tokens)
    async for piece in _apieces(text):
        for chunk in await asyncio.to_thread(_all, chunker.feed, piece):
            yield chunk
    for chunk in await asyncio.to_thread(_all, chunker.finish):
        yield chunk


async def _apieces(text: str | Iterable[str] | AsyncIterable[str]) -> AsyncIterator[str]:
    """Pieces small enough that few chunks are made ahead of their reader."""
    if isinstance(text, AsyncIterable):
        async for piece in text:
            yield piece
        return
    for piece in [text] if isinstance(text, str) else text:
        for start in range(0, len(piece), MAX_PIECE_CHARS):
            yield piece[start : start + MAX_PIECE_CHARS]


def _all(give: Callable[..., Iterator[Chunk]], *arguments: str) -> list[Chunk]:
    return list(give(*arguments))


def _best_edge(text: str, least: int) -> int:
    """The cut of a text that continues: the last edge of the best kind after `least`."""
    for edge in _EDGES:
        last = 0
        for match in edge.finditer(text, max(0, least - 1)):
            if least <= match.end():
                last = match.end()
        if last:
            return last
    return len(text)
