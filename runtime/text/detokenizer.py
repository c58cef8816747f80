"""Tokens of one sequence → text, as they come, never half a character.

A token has no text of its own: a character may be spread over several byte tokens, a leading space may depend
on what stands before, and pieces may join. So a short window of tokens is decoded and compared with the text
that was given out for it before. While the text of the window ends in U+FFFD its last character is taken to
be incomplete and is held back, within a bound. The decoder itself decides what special tokens look like
(nothing, as a rule).

Works for byte-level BPE, byte-fallback (SentencePiece-like) and WordPiece decoders; each costs two decodes of
about two tokens a token. What a sequence ends with of an incomplete character is not given out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

REPLACEMENT = "\ufffd"
CONTEXT_TOKENS = 8  # of the prompt: some are special and have no text, one with text is enough
MAX_BYTES_PER_CHARACTER = 4  # so that many tokens without progress were not one character
MAX_OPEN_TOKENS = 32  # each may end one character and begin the next; the window must not grow for ever


class DetokenizerSource(Protocol):
    """What is needed of a tokenizer."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        """Text of these tokens together; bytes that are no UTF-8 come as U+FFFD. Special tokens have none unless asked
        for.
        """


class Detokenizer:
    """Continues the text of `prompt_tokens`, whose own text is not given out."""

    def __init__(
        self, source: DetokenizerSource, prompt_tokens: Sequence[int], *, skips_special_tokens: bool = True
    ) -> None:
        self._decode: Callable[[list[int]], str] = (
            source.decode if skips_special_tokens else partial(source.decode, skip_special_tokens=False)
        )
        self._window: list[int] = []
        self._num_settled = 0  # tokens of the window before which no character was open
        self._given = ""  # of the window's text
        self._num_settled_chars = 0  # of `_given`, those of the settled tokens
        self._num_without_progress = 0
        self._settle(list(prompt_tokens[-CONTEXT_TOKENS:]))

    def push(self, token: int) -> str:
        """The characters that this token completes; '' while there are none."""
        self._window.append(token)
        text = self._decode(self._window)
        is_open = text.endswith(REPLACEMENT)
        if not is_open:
            certain = text
        elif self._num_without_progress < MAX_BYTES_PER_CHARACTER - 1:
            certain = text.rstrip(REPLACEMENT)
        else:
            certain = text[:-1]  # so many tokens are not one character: at most the last one is still open
        delta = self._new_part(certain, is_open=is_open)
        if is_open:
            self._given += delta
            self._num_without_progress = 0 if delta else self._num_without_progress + 1
            if len(self._window) - self._num_settled > MAX_OPEN_TOKENS:
                self._shorten_open_window(len(text) - len(certain))
        elif not delta and len(self._window) == self._num_settled + 1:
            self._window.pop()  # a token without text is no context for the next
        else:
            self._settle(self._window[self._num_settled :])
        return delta

    def _new_part(self, certain: str, *, is_open: bool) -> str:
        if certain.startswith(self._given):
            return certain[len(self._given) :]
        if is_open:
            return ""  # byte fallback shows a run of byte tokens as U+FFFD until all of it is sound
        # The decoder now shows otherwise what was given out already. That stays; the new tokens stand alone.
        alone = self._decode(self._window[self._num_settled :])
        return alone.removeprefix(self._given[self._num_settled_chars :])

    def _settle(self, window: list[int]) -> None:
        """Goes on with these tokens as the context, all of whose text has been given out."""
        self._window = window
        self._num_settled = len(window)
        self._given = self._decode(window) if window else ""
        self._num_settled_chars = len(self._given)
        self._num_without_progress = 0

    def _shorten_open_window(self, num_open_chars: int) -> None:
        """Forgets old tokens although a character has been open ever since (byte-level BPE only)."""
        self._window = self._window[-CONTEXT_TOKENS:]
        self._given = self._decode(self._window)[:-num_open_chars]
        self._num_settled = self._num_settled_chars = 0
