"""A text of a decoder's own: samples of what it would say, for calibration without data."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..models.decoder import Decoder
from .sequences import Sequences

_AT_ONCE = 16
_WINDOW_TOKENS = 256
_SEED = 0  # the same model gives the same text


def sample_windows(decoder: Decoder, first_tokens: Sequence[int], num_tokens: int) -> list[list[int]]:
    """At least `num_tokens` tokens, in independent windows of up to 256: each begins with
    `first_tokens`, or without any with a random token, and goes on at temperature 1.
    """
    rng = np.random.default_rng(_SEED)
    window_tokens = min(_WINDOW_TOKENS, decoder.config.max_context, -(-num_tokens // _AT_ONCE))
    vocab_size = decoder.config.vocab_size
    windows: list[list[int]] = []
    while len(windows) * window_tokens < num_tokens:
        run = Sequences(decoder, _AT_ONCE, window_tokens)
        some = [list(first_tokens) or [int(rng.integers(vocab_size))] for _ in range(_AT_ONCE)]
        new = dict(enumerate(some))
        while len(some[0]) < window_tokens:
            logits = run.feed(new, num_logits=1)
            new = {number: [_drawn(row, float(rng.random()))] for number, row in enumerate(logits)}
            for number, tokens in new.items():
                some[number] += tokens
        windows += some
    return windows


def _drawn(logits: npt.NDArray[np.float32], share: float) -> int:
    """The token at which the sum of the probabilities exceeds `share`, in [0, 1)."""
    sums = np.exp(logits - logits.max()).cumsum(dtype=np.float64)
    return min(int(np.searchsorted(sums, share * sums[-1], side="right")), len(sums) - 1)
