"""Log-probabilities in the two shapes that OpenAI's API gives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ...runtime.step.requests import TokenLogprob
from .responses import ChatLogprob, ChatLogprobs, CompletionLogprobs, TopLogprob

LOWEST = -9999.0  # for a token that cannot come: JSON has no infinity, and OpenAI says it so

TokenBytes = Callable[[int], bytes]  # one token alone


def chat_logprobs(entries: Sequence[TokenLogprob], bytes_of: TokenBytes) -> ChatLogprobs:
    return ChatLogprobs(
        [
            ChatLogprob(
                *_shown(bytes_of(entry.token), entry.logprob),
                top_logprobs=[TopLogprob(*_shown(bytes_of(token), logprob)) for token, logprob in entry.top],
            )
            for entry in entries
        ]
    )


def completion_logprobs(
    entries: Sequence[TokenLogprob], bytes_of: TokenBytes, *, start: int
) -> CompletionLogprobs:
    """`start` is where the first of these tokens' text begins, in characters."""
    texts = [_text(bytes_of(entry.token)) for entry in entries]
    offsets = []
    for text in texts:
        offsets.append(start)
        start += len(text)
    return CompletionLogprobs(
        text_offset=offsets,
        token_logprobs=[_finite(entry.logprob) for entry in entries],
        tokens=texts,
        top_logprobs=[
            {_text(bytes_of(token)): _finite(logprob) for token, logprob in _with_chosen(entry)}
            for entry in entries
        ],
    )


def _with_chosen(entry: TokenLogprob) -> tuple[tuple[int, float], ...]:
    return (*entry.top, (entry.token, entry.logprob))


def _shown(data: bytes, logprob: float) -> tuple[str, float, list[int]]:
    return _text(data), _finite(logprob), list(data)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
