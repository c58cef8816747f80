"""What stands in `prompt` and `input`: one text, one list of tokens, or several of either, sorted out and bounded."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from ...runtime.errors import RequestError
from .schemas import Prompt


def split_prompt(prompt: Prompt, *, param: str, max_prompts: int) -> list[str] | list[list[int]]:
    """The single prompts, each a text or its tokens. Raises `RequestError` for an empty, mixed or too long list."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{param} is empty", param=param)
    if all(isinstance(item, int) for item in prompt):
        return [cast(list[int], prompt)]
    if len(prompt) > max_prompts:
        raise RequestError(
            f"{param} has {len(prompt)} items, but may have {max_prompts}", param=param, hint="Send several requests."
        )
    if all(isinstance(item, str) for item in prompt):
        return cast(list[str], prompt)
    if all(isinstance(item, list) for item in prompt):
        return cast(list[list[int]], prompt)
    raise RequestError(f"{param} mixes texts and tokens", param=param)


def tokens_of(
    prompt: str | Sequence[int], encode: Callable[[str], Sequence[int]], *, vocab_size: int, param: str
) -> tuple[int, ...]:
    """A prompt's tokens. Raises `RequestError` for none at all, or for one that the model does not have."""
    if isinstance(prompt, str):
        tokens = tuple(encode(prompt))
    else:
        tokens = tuple(prompt)
        for token in tokens:
            if not 0 <= token < vocab_size:
                raise RequestError(f"{param} has token {token}, but tokens go from 0 to {vocab_size - 1}", param=param)
    if not tokens:
        raise RequestError(f"{param} is empty", param=param)
    return tokens
