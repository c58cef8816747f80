"""The rules by which a window's text is accepted: a poor one is generated again at a higher temperature, and one of
silence is dropped. As OpenAI's Whisper has them; transformers' `generate_with_fallback` differs in that it compresses
tokens, not text.
"""

from __future__ import annotations

import zlib

from msgspec import Struct

TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # of a window, in turn
# Texts of hotter ones are no prompt of the next window.
MAX_PROMPT_TEMPERATURE = 0.5


class Thresholds(Struct, frozen=True):
    """None: that number decides nothing."""

    logprob: float | None = -1.0  # the least mean of a text's tokens
    compression_ratio: float | None = 2.4  # the highest: more is repetition
    no_speech: float | None = 0.6  # the highest probability of silence, of a text below `logprob`

    def needs_silence(self, mean_logprob: float) -> bool:
        """True if the probability of silence decides about a text of this mean."""
        is_unlikely = self.logprob is None or mean_logprob < self.logprob
        return self.no_speech is not None and is_unlikely

    def is_silent(self, mean_logprob: float, no_speech_prob: float) -> bool:
        is_empty = self.no_speech is not None and no_speech_prob > self.no_speech
        return is_empty and self.needs_silence(mean_logprob)

    def is_poor(self, mean_logprob: float, compression_ratio: float) -> bool:
        repeats = self.compression_ratio is not None and compression_ratio > self.compression_ratio
        return repeats or (self.logprob is not None and mean_logprob < self.logprob)


def compression_ratio_of(text: str) -> float:
    """The size of its UTF-8 bytes relative to their zlib stream; 0 of no text."""
    data = text.encode()
    return len(data) / len(zlib.compress(data))
