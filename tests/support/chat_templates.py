"""A conversation, special tokens, and templates that are closed in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from teneral.runtime.text.chat import ChatTemplate

USER = [{"role": "user", "content": "hi"}]


SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


@contextmanager
def made_templates() -> Iterator[Callable[..., ChatTemplate]]:
    """Makes templates with the limits given, and closes them at the end."""
    made: list[ChatTemplate] = []

    def make(text: str, **limits: Any) -> ChatTemplate:
        made.append(ChatTemplate({"default": text}, SPECIAL_TOKENS, **limits))
        return made[-1]

    yield make
    for one in made:
        one.close()
