"""A driver of a decoder outside the engine: a few sequences, each in a fixed range of KV storage;
and a text that the decoder makes itself, for calibration without data.

No scheduling, sharing or freeing: the number of sequences and their maximum length are fixed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from ..kv.storage import KVKind
from ..models.decoder import Decoder
from ..step.batch import SequenceSpan, StepBatch

_BLOCK_TOKENS = 16
_AT_ONCE = 16
_WINDOW_TOKENS = 256
_SEED = 0  # the same model gives the same text


class Sequences:
    """`count` sequences, empty at first, of up to `max_tokens` each. Memory: their keys and values."""

    def __init__(self, decoder: Decoder, count: int, max_tokens: int, kv: KVKind = KVKind.MODEL) -> None:
        self._decoder = decoder
        self._blocks_each = -(-max_tokens // _BLOCK_TOKENS)
        self._kv = decoder.new_kv(count * self._blocks_each, _BLOCK_TOKENS, kind=kv)
        self._lengths = [0] * count

    def feed(self, new: Mapping[int, Sequence[int]], *, num_logits: int) -> npt.NDArray[np.float32]:
        """Append tokens to some sequences, by number, in one forward pass.

        Returns the logits of the last `num_logits` tokens of each, (len(new) * num_logits, vocab_size) fp32. Each
        gets at least that many tokens.
        """
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        rows: list[int] = []
        spans: list[SequenceSpan] = []
        for number, added in new.items():
            first_block, begin = number * self._blocks_each, self._lengths[number]
            end = begin + len(added)
            blocks = tuple(range(first_block, first_block - (-end // _BLOCK_TOKENS)))
            spans.append(SequenceSpan(len(tokens), len(added), end, blocks))
            tokens += added
            positions += range(begin, end)
            slots += range(first_block * _BLOCK_TOKENS + begin, first_block * _BLOCK_TOKENS + end)
            rows += range(len(tokens) - num_logits, len(tokens))
            self._lengths[number] = end
        split = np.array([tokens, positions, slots], dtype=np.int64)
        batch = StepBatch(split[0], split[1], split[2], tuple(spans), np.array(rows, dtype=np.int64))
        logits: npt.NDArray[np.float32] = self._decoder.forward(batch, self._kv)
        return logits

    def clear(self) -> None:
        """Make all sequences empty again."""
        self._lengths = [0] * len(self._lengths)


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
