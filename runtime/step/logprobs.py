"""Log probabilities under the model's own distribution, of chosen tokens and of prompts.

A prompt's are reduced row by row as chunks of logits arrive, so that the logits of a whole prompt
are never held. This module knows nothing of sequences, blocks or text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .requests import PromptLogprobs, TokenLogprob

MAX_LOGITS_BYTES = 32 << 20  # of a prompt's logits held at once
# Of a vocabulary's numbers: intermediate arrays of all of them would be new pages in each step, whose first touch
# costs ten times what is computed in them.
NUM_AT_ONCE = 8_192

Floats = npt.NDArray[np.float32]


def log_softmax(scores: Floats) -> Floats:
    """(vocab,) fp32 natural logarithms, computed in 64 bits; NaN if no score is finite."""
    best = scores.max()
    total = math.log(_sum_of_powers(scores, best))
    logprobs = np.empty(scores.size, np.float32)
    for first in range(0, scores.size, NUM_AT_ONCE):
        wide = scores[first : first + NUM_AT_ONCE].astype(np.float64)
        logprobs[first : first + NUM_AT_ONCE] = wide - best - total
    return logprobs


def _sum_of_powers(scores: Floats, best: np.float32) -> float:
    """The sum of exp(score - best), by halves as numpy's `sum` has them."""
    if scores.size <= NUM_AT_ONCE:
        return float(np.exp(scores.astype(np.float64) - best).sum())
    half = scores.size // 16 * 8
    return _sum_of_powers(scores[:half], best) + _sum_of_powers(scores[half:], best)


def best(logprobs: Floats, count: int) -> npt.NDArray[np.int64]:
    """The tokens of the `count` highest values, best first; ties go to the lowest id."""
    count = min(count, logprobs.size)
    if not count:
        return np.empty(0, np.int64)
    able = np.flatnonzero(logprobs >= nth_highest(logprobs, count))
    return able[np.argsort(-logprobs[able], kind="stable")[:count]]


def nth_highest(values: Floats, n: int) -> np.float32:
    """The `n`-th highest of (N,) values, `n` from 1 to N, NaN counting as the highest."""
    parts = (values[first : first + NUM_AT_ONCE] for first in range(0, values.size, NUM_AT_ONCE))
    highest = [part if part.size <= n else np.partition(part, -n)[-n:] for part in parts]
    nth: np.float32 = np.partition(np.concatenate(highest), -n)[-n]
    return nth


def token_logprob(scores: Floats, token: int, num_top: int) -> TokenLogprob:
    """The log probabilities of a token and of the `num_top` best possible ones, from (vocab,)
    scores.
    """
    logprobs = log_softmax(scores)
    tokens = best(logprobs, num_top)
    pairs = zip(tokens.tolist(), logprobs[tokens].tolist(), strict=True)
    return TokenLogprob(
        token, logprobs.item(token), tuple((other, value) for other, value in pairs if value > -math.inf)
    )


class PromptScores:
    """The log probabilities of a prompt, as they accumulate.

    Rows may arrive in any order, and repeatedly: a preempted sequence is computed again from its
    beginning.
    """

    def __init__(self, prompt_tokens: Sequence[int], num_top: int) -> None:
        self.num_rows = len(prompt_tokens) - 1  # the logits after the last token are the answer's
        self._targets = prompt_tokens[1:]
        self._num_top = num_top
        self._num_done = 0
        # Allocated with the first rows, because a prompt may wait for a long time.
        self._result: PromptLogprobs | None = None

    @property
    def is_complete(self) -> bool:
        return self._num_done >= self.num_rows

    def add(self, position: int, logits: Any) -> None:
        """Add logits (R, vocab) fp32 of the prompt's tokens from `position` on, on any device. Does
        not change them.
        """
        result = self.result()
        host: Floats = logits if isinstance(logits, np.ndarray) else logits.cpu().numpy()
        for row, scores in enumerate(host, position):
            logprobs = np.nan_to_num(log_softmax(scores), copy=False, nan=-math.inf)
            token = self._targets[row]
            tokens = best(logprobs, result.top_tokens.shape[1])
            result.logprobs[row] = logprobs[token]
            result.ranks[row] = 1 + np.count_nonzero(scores > scores[token])
            result.top_tokens[row, : len(tokens)] = tokens
            result.top_logprobs[row, : len(tokens)] = logprobs[tokens]
        self._num_done = max(self._num_done, position + len(host))

    def result(self) -> PromptLogprobs:
        """The result. Requires `is_complete`."""
        if self._result is None:
            num, top = self.num_rows, self._num_top
            self._result = PromptLogprobs(
                np.array(self._targets, np.int32),
                np.zeros(num, np.float32),
                np.zeros(num, np.int32),
                np.zeros((num, top), np.int32),
                np.full((num, top), -math.inf, np.float32),
            )
        return self._result


def rows_at_once(vocab_size: int) -> int:
    """The number of rows whose logits fit `MAX_LOGITS_BYTES`, at least one."""
    return max(1, MAX_LOGITS_BYTES // (4 * vocab_size))
