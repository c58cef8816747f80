"""Sampling: from logits to the next token, sequence by sequence.

Order, as in transformers: logit bias; repetition penalty (prompt and output), presence and
frequency penalty (output); the grammar and the request's limits, which mask all other tokens;
temperature; top-k (values equal to the k-th are kept); top-p of the rest, renormalised (the
smallest set of best tokens that reaches p, at least one); min-p (relative to the best token's
probability). Log probabilities are taken before the temperature, and before the grammar and the
limits, unless a request has `masks_logprobs`.

A draw is a race: each token's probability is divided by an exponential number of its own, and the
largest quotient wins, so each token wins with exactly its probability. The numbers are derived from
the sequence's seed and the index of the token to be drawn. There is no generator whose state could
be lost or shared: a sequence's draws depend neither on the other sequences of its batch nor on
preemption. And two models that nearly agree nearly always draw the same, which lets a draft be
confirmed (docs/decisions/0015). `backends/cuda/sampling.py` does the same on a CUDA device, with
other numbers (0019). Rows are never mixed; this module knows nothing of text or scheduling.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..errors import GrammarError, ModelError
from .logprobs import NUM_AT_ONCE, nth_highest, token_logprob
from .state import Choice, Chosen, SamplingState

if TYPE_CHECKING:
    from ..grammar.matcher import MaskWords

NUM_BUCKETS = 1_024
# Of scores below the best; all tokens beyond together have next to no probability.
MAX_BUCKET_DEPTH = 30.0
# Avoids a division by 0 if all scores are equal, with depth 0.
TINY = 1e-30

Floats = npt.NDArray[np.float32]
Int64s = npt.NDArray[np.int64]


def choose_tokens(logits: Floats, states: Sequence[SamplingState]) -> list[Chosen]:
    """Choose the next token for each row of `logits` (R, vocab), which is not changed.

    Changes no state. Ties go to the lowest id. A row without a finite maximum (a broken model, an
    overflow) gives an error instead of a choice, and so does one whose grammar has exceeded its
    limits.
    """
    if all(state.is_plain_greedy for state in states):
        return [Choice(token) if math.isfinite(score) else not_finite() for score, token in _best(logits)]
    return [_choose(row, state) for row, state in zip(logits, states, strict=True)]


def exponentials(seed: int, index: int, num: int) -> Iterator[npt.NDArray[np.float64]]:
    """Draw `num` float64 from the exponential distribution, determined by `seed` (signed, 64 bits)
    and `index`, in arrays of up to `NUM_AT_ONCE`.

    64 bits, because among this many 32-bit numbers some would be 0, and win any race.
    """
    generator = np.random.Generator(np.random.SFC64([seed % (1 << 64), index]))
    for first in range(0, num, NUM_AT_ONCE):
        yield generator.standard_exponential(min(NUM_AT_ONCE, num - first))


def _choose(logits: Floats, state: SamplingState) -> Chosen:
    scores = _adjust(logits, state)  # (vocab,)
    try:
        words = state.mask(scores.size)
    except GrammarError as error:
        return error
    legal = scores if words is None else _masked(scores, words)
    if state.params.times_from is not None:
        legal = _with_likely_times(legal, state.params.times_from)
    ((score, token),) = _best(legal[None])
    if not math.isfinite(score):
        return not_finite()
    if state.params.temperature != 0:
        token = _draw(legal, score, state)
    if state.num_top_logprobs is None:
        return Choice(token)
    counted = legal if state.params.masks_logprobs else scores
    return Choice(token, token_logprob(counted, token, state.num_top_logprobs))


def _best(scores: Floats) -> list[tuple[float, int]]:
    """The highest score of each row of (R, vocab), NaN counting as the highest, and its token."""
    return [(scores.item(row, token), token) for row, token in enumerate(scores.argmax(axis=-1).tolist())]


def _adjust(logits: Floats, state: SamplingState) -> Floats:
    """The scores with bias and penalties: a new array, unless there are none."""
    params = state.params
    has_penalties = params.presence_penalty or params.frequency_penalty
    scores = logits.copy() if params.logit_bias or state.seen or has_penalties else logits
    if params.logit_bias:
        tokens, values = zip(*params.logit_bias, strict=True)
        np.add.at(scores, np.array(tokens, dtype=np.int64), np.array(values, dtype=np.float32))
    if params.repetition_penalty != 1.0:
        seen = np.array(list(state.seen), dtype=np.int64)
        old = scores[seen]
        penalty = np.float32(params.repetition_penalty)
        scores[seen] = np.where(old > 0, old / penalty, old * penalty)
    if has_penalties and state.output_counts:
        tokens_out = np.array(list(state.output_counts), dtype=np.int64)
        counts = np.array(list(state.output_counts.values()), dtype=np.float32)
        scores[tokens_out] -= (
            np.float32(params.presence_penalty) + np.float32(params.frequency_penalty) * counts
        )
    return scores


def _masked(scores: Floats, words: MaskWords) -> Floats:
    """(vocab,) scores with minus infinity for tokens that may not come next."""
    bits = np.unpackbits(words.view(np.uint8), count=scores.size, bitorder="little")
    return np.where(bits.view(np.bool_), scores, np.float32(-math.inf))


def _with_likely_times(scores: Floats, times_from: int) -> Floats:
    """(vocab,) scores, with minus infinity for all before `times_from` where those behind are likelier together than
    each of these.
    """
    times = scores[times_from:]
    best = times.max()
    if not math.isfinite(best):
        return scores
    together = best + np.log(np.exp(times - best).sum())
    if not together > scores[:times_from].max():
        return scores
    left = scores.copy()
    left[:times_from] = -math.inf
    return left


def _draw(scores: Floats, best: float, state: SamplingState) -> int:
    """Draw from (vocab,) scores whose maximum is `best`."""
    params = state.params
    scores = scores - np.float32(best)  # with the maximum 0, no temperature can overflow them
    with np.errstate(over="ignore"):  # overflows to -inf, which is probability 0
        scores /= np.float32(params.temperature)
    kept: Int64s | None = None  # (K,), ascending; None: all tokens
    if 0 < params.top_k < scores.size:
        kept = np.flatnonzero(scores >= nth_highest(scores, params.top_k))
        scores = scores[kept]
    if params.top_p < 1.0:
        able = np.flatnonzero(_reaches_mass(scores, params.top_p))
        kept, scores = able if kept is None else kept[able], scores[able]
    if params.min_p > 0.0:
        likely = np.flatnonzero(scores >= math.log(params.min_p))  # the best has score 0
        kept, scores = likely if kept is None else kept[likely], scores[likely]
    return _race(scores, kept, state)


def _race(scores: Floats, kept: Int64s | None, state: SamplingState) -> int:
    """The token of the highest exp(score) / noise, each token of the vocabulary having its own noise.

    `scores` (K,) are those of `kept`.
    """
    num = scores.size if kept is None else int(kept[-1]) + 1
    first, begin, winner, highest = 0, 0, 0, -math.inf
    for drawn in exponentials(state.seed, state.num_outputs, num):
        noise, after = drawn, first + drawn.size
        end = after
        if kept is not None:
            end = int(np.searchsorted(kept, after))
            noise = drawn[kept[begin:end] - first]
        if begin < end:
            ratios = np.exp(scores[begin:end].astype(np.float64)) / noise
            place = int(ratios.argmax())
            if ratios[place] > highest:
                winner, highest = begin + place, ratios[place]
        first, begin = after, end
    return winner if kept is None else int(kept[winner])


def _reaches_mass(scores: Floats, top_p: float) -> npt.NDArray[np.bool_]:
    """The mask (N,) of the fewest best tokens whose probability reaches `top_p`, at least one.

    `scores` (N,) have the maximum 0. They are put into buckets by score, and only the bucket in
    which `top_p` is reached is sorted: sorting a whole vocabulary costs ten times as much.
    """
    deepest = min(-float(scores.min()), MAX_BUCKET_DEPTH)
    buckets = np.empty(scores.size, np.int16)
    masses = np.zeros(NUM_BUCKETS + 1)
    for first in range(0, scores.size, NUM_AT_ONCE):
        part = scores[first : first + NUM_AT_ONCE]
        depth = np.minimum(-part, np.float32(MAX_BUCKET_DEPTH))
        own = (depth * (NUM_BUCKETS / (deepest + TINY))).astype(np.int64)
        np.add.at(masses, own, np.exp(part).astype(np.float64))
        buckets[first : first + NUM_AT_ONCE] = own
    mass = masses.cumsum()
    wanted = top_p * mass[-1]
    last = int(np.searchsorted(mass, wanted))
    mass_before = mass[last - 1] if last else 0.0
    inside = np.flatnonzero(buckets == last)
    order = np.argsort(-scores[inside], kind="stable")
    ordered = np.exp(scores[inside][order]).astype(np.float64)
    reached = mass_before + ordered.cumsum() >= wanted
    # All before the one that reaches it, and that one.
    num_inside = int(np.count_nonzero(~reached)) + 1
    keep: npt.NDArray[np.bool_] = buckets < last
    keep[inside[order[:num_inside]]] = True
    return keep


def not_finite() -> ModelError:
    """The error in place of a choice."""
    return ModelError(
        "the model's logits are not finite numbers",
        hint="The weights may be damaged, or overflow in their dtype: `teneral verify` checks the artifact.",
    )
