"""What stands in `prompt` and `input`: one text, one list of tokens, or several of either, sorted out and
bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

from ...runtime.errors import RequestError
from .schemas import Prompt


def split_prompt(prompt: Prompt, *, param: str, max_prompts: int) -> list[str | list[int]]:
    """The single prompts, each a text or its tokens. Raises `RequestError` for an empty, mixed or too long
    list.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError(f"{param} is empty", param=param)
    if all(isinstance(item, int) for item in prompt):
        return [cast(list[int], prompt)]
    if len(prompt) > max_prompts:
        raise RequestError(
            f"{param} has {len(prompt)} items, but may have {max_prompts}",
            param=param,
            hint="Send several requests.",
        )
    if all(isinstance(item, str) for item in prompt) or all(isinstance(item, list) for item in prompt):
        return cast(list[str | list[int]], prompt)
    raise RequestError(f"{param} mixes texts and tokens", param=param)


def tokens_of(
    prompt: str | Sequence[int], encode: Callable[[str], Sequence[int]], *, param: str
) -> tuple[int, ...]:
    """A prompt's tokens; whether the model has those that were given is the engine's to say. Raises
    `RequestError` for none.
    """
    tokens = tuple(encode(prompt)) if isinstance(prompt, str) else tuple(prompt)
    if not tokens:
        raise RequestError(f"{param} is empty", param=param)
    return tokens
