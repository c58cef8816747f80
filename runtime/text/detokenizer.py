"""Incremental detokenisation of one sequence, in whole characters, and stop strings in a stream of
text.

A token has no text of its own: a character may span several byte tokens, a leading space may depend
on the previous token, and pieces may join. So a short window of tokens is decoded and compared with
the text returned for it before. While the window's text ends in U+FFFD its last character counts as
incomplete and is held back, within a bound. The decoder determines the text of special tokens
(usually none).

Works for byte-level BPE, byte-fallback (SentencePiece-like) and WordPiece decoders; each token
costs two decodes of about two tokens. An incomplete character at the end of a sequence is not
returned.

The text before a stop string is returned; the stop string only if included. A possible beginning of
one is held back until the next text decides. The result does not depend on how the text is split.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

REPLACEMENT = "\ufffd"
# Of the prompt: some are special and have no text, one with text is enough.
CONTEXT_TOKENS = 8
# A longer run of tokens without progress was not one character.
MAX_BYTES_PER_CHARACTER = 4
# Each may end one character and begin the next; the window must not grow without bound.
MAX_OPEN_TOKENS = 32


class DetokenizerSource(Protocol):
    """The part of a tokenizer that is needed here."""

    def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
        """The text of these tokens together; invalid UTF-8 becomes U+FFFD. Special tokens are
        skipped by default.
        """


class Detokenizer:
    """Continues the text of `prompt_tokens`, whose own text is not returned."""

    def __init__(
        self, source: DetokenizerSource, prompt_tokens: Sequence[int], *, skips_special_tokens: bool = True
    ) -> None:
        self._decode: Callable[[list[int]], str] = (
            source.decode if skips_special_tokens else partial(source.decode, skip_special_tokens=False)
        )
        self._window: list[int] = []
        # Leading tokens of the window after which no character was open.
        self._num_settled = 0
        self._given = ""  # of the window's text
        # Characters of `_given` from the settled tokens.
        self._num_settled_chars = 0
        self._num_without_progress = 0
        self._settle(list(prompt_tokens[-CONTEXT_TOKENS:]))

    def push(self, token: int) -> str:
        """The characters that this token completes; '' if none."""
        self._window.append(token)
        text = self._decode(self._window)
        is_open = text.endswith(REPLACEMENT)
        if not is_open:
            certain = text
        elif self._num_without_progress < MAX_BYTES_PER_CHARACTER - 1:
            certain = text.rstrip(REPLACEMENT)
        else:
            # A run of tokens this long is not one character: at most the last one is still open.
            certain = text[:-1]
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
            # Byte fallback shows a run of byte tokens as U+FFFD until all of it is valid.
            return ""
        # The decoder has changed text that was returned before. That stays; the new tokens are
        # decoded alone.
        alone = self._decode(self._window[self._num_settled :])
        return alone.removeprefix(self._given[self._num_settled_chars :])

    def _settle(self, window: list[int]) -> None:
        """Continue with these tokens as the context, after all of their text was returned."""
        self._window = window
        self._num_settled = len(window)
        self._given = self._decode(window) if window else ""
        self._num_settled_chars = len(self._given)
        self._num_without_progress = 0

    def _shorten_open_window(self, num_open_chars: int) -> None:
        """Drop old tokens although a character has been open since (byte-level BPE only)."""
        self._window = self._window[-CONTEXT_TOKENS:]
        self._given = self._decode(self._window)[:-num_open_chars]
        self._num_settled = self._num_settled_chars = 0


class StopStrings:
    """The stop strings of one sequence. Holds back less than the longest one."""

    def __init__(self, stop: Sequence[str], *, included: bool = False) -> None:
        """`included`: the stop string that ends the text is part of it."""
        self._stop = tuple(stop)
        self._included = included
        self._held = ""
        self.found: str | None = None  # the completed one

    def push(self, text: str, *, counts: bool = True) -> tuple[str, bool]:
        """Add text. Returns the text that can be returned now, and whether a stop string is
        complete, which ends the text.

        Of several stop strings the first complete one counts, as if the text came character by
        character; of those that end together, the longest. Without `counts`, this text completes
        none.
        """
        if not self._stop or not text:
            return text, False
        num_old = len(self._held)
        text = self._held + text
        if counts:
            found = [
                (start + len(stop), start)
                for stop in self._stop
                if (start := text.find(stop, max(0, num_old - len(stop) + 1))) >= 0
            ]
            if found:
                self._held = ""
                end, start = min(found)
                self.found = text[start:end]
                return text[: end if self._included else start], True
        held = max(open_length(text, stop) for stop in self._stop)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The text held back, for a sequence that ends without a stop string."""
        held, self._held = self._held, ""
        return held


def open_length(text: str, stop: str) -> int:
    """The length of the longest end of `text` with which `stop` begins."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
