"""From logits to the next token, sequence by sequence.

Order, as in transformers: logit bias; repetition penalty (prompt and output), presence and frequency penalty
(output); temperature; top-k (values equal to the k-th are kept); top-p of what is left, renormalised (the
smallest set of best tokens that reaches p, at least one); min-p (against the best token's probability).
Log-probabilities are taken before the temperature.

A draw is a race: each token's probability is divided by an exponential number of its own, and the largest quotient
wins, which is that token with exactly its probability. The numbers are made from the sequence's seed and the index of
the token to be drawn. So there is no generator whose state could be lost or shared: what a sequence draws depends
neither on its company in the batch, nor on having been preempted. And two models that nearly agree nearly always draw
the same, which is what lets a draft be confirmed (docs/decisions/0015). On a CUDA device `cuda/sampling.py` says the
same, with other numbers (0019). Rows are never mixed; nothing is known here of text or scheduling.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from ..errors import ModelError
from .requests import TokenLogprob
from .sequence import Choice, SamplingState

NUM_BUCKETS = 1_024
MAX_BUCKET_DEPTH = 30.0  # of scores below the best; all tokens beyond together have next to no probability
TINY = 1e-30  # so that equal scores, all of depth 0, can be divided by the largest depth


def choose_tokens(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Choice | ModelError]:
    """The next token for each row of `logits` (R, vocab) float32, which is left as it is. Changes no state.

    A row without any finite maximum (a broken model, an overflow) gives an error in place of a choice.
    """
    if all(state.is_plain_greedy for state in states):
        return [Choice(token) if math.isfinite(score) else not_finite() for score, token in _best(logits)]
    return [_choose(row, state) for row, state in zip(logits.unbind(0), states, strict=True)]


def exponentials(seed: int, index: int, num: int) -> npt.NDArray[np.float64]:
    """(num,) float64 from the exponential distribution, the same for the same `seed`, which fits 64 bits, signed, and
    `index`. In 64 bits because in 32 some of so many would be 0, and win any race.
    """
    return np.random.Generator(np.random.SFC64([seed % (1 << 64), index])).standard_exponential(num)


def _choose(logits: torch.Tensor, state: SamplingState) -> Choice | ModelError:
    scores = _adjust(logits, state)  # (vocab,)
    ((score, token),) = _best(scores.unsqueeze(0))
    if not math.isfinite(score):
        return not_finite()
    if state.params.temperature != 0:
        token = _draw(scores - score, state)
    if state.num_top_logprobs is None:
        return Choice(token)
    return Choice(token, _logprob(scores, token, state.num_top_logprobs))


def _best(scores: torch.Tensor) -> list[tuple[float, int]]:
    """The highest score of each row of (R, vocab), NaN counting as the highest, and its token."""
    if scores.is_cpu:
        array = scores.numpy()  # numpy's argmax takes a ninth of the time of torch's on the CPU
        return [(array.item(row, token), token) for row, token in enumerate(array.argmax(axis=-1).tolist())]
    values, tokens = scores.max(dim=-1)
    return list(zip(values.tolist(), tokens.tolist(), strict=True))


def _adjust(logits: torch.Tensor, state: SamplingState) -> torch.Tensor:
    """Bias and penalties. A new tensor, unless there is nothing to do."""
    params = state.params
    scores = logits.clone() if params.logit_bias or state.output_counts or state.seen else logits
    if params.logit_bias:
        tokens, values = zip(*params.logit_bias, strict=True)
        scores.index_add_(0, scores.new_tensor(tokens, dtype=torch.int64), scores.new_tensor(values))
    if params.repetition_penalty != 1.0:
        seen = scores.new_tensor(list(state.seen), dtype=torch.int64)
        old = scores[seen]
        penalty = params.repetition_penalty
        scores[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if (params.presence_penalty or params.frequency_penalty) and state.output_counts:
        tokens_out = scores.new_tensor(list(state.output_counts), dtype=torch.int64)
        counts = scores.new_tensor(list(state.output_counts.values()))
        scores[tokens_out] -= params.presence_penalty + params.frequency_penalty * counts
    return scores


def _draw(relative_scores: torch.Tensor, state: SamplingState) -> int:
    """Draws from (vocab,) scores whose maximum is 0, so that no temperature can overflow them."""
    params = state.params
    scores = relative_scores / params.temperature
    kept: torch.Tensor | None = None  # (K,) int64, ascending; None: all tokens
    if 0 < params.top_k < scores.numel():
        kept = _where(scores >= scores.topk(params.top_k).values[-1])
        scores = scores[kept]
    if params.top_p < 1.0:
        best = _where(_reaches_mass(scores, params.top_p))
        kept, scores = best if kept is None else kept[best], scores[best]
    if params.min_p > 0.0:
        likely = _where(scores >= math.log(params.min_p))  # the best has score 0
        kept, scores = likely if kept is None else kept[likely], scores[likely]
    numbers = exponentials(state.seed, state.num_outputs, relative_scores.numel())
    noise = torch.from_numpy(numbers)
    if kept is not None:
        noise = noise[kept]
    index = int((scores.double().exp() / noise.to(scores.device)).argmax())
    return index if kept is None else int(kept[index])


def _reaches_mass(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which are the fewest best tokens that together have `top_p` of the probability, at least one; bool.

    `scores` (N,) have the maximum 0. They are put into buckets by score, and only the bucket in which `top_p`
    is reached is sorted: sorting a whole vocabulary costs ten times as much.
    """
    depth = scores.neg().clamp_(max=MAX_BUCKET_DEPTH)
    buckets = (depth * (NUM_BUCKETS / (depth.max() + TINY))).long()
    mass = torch.bincount(buckets, weights=scores.exp().double()).cumsum(0)
    wanted = top_p * mass[-1]
    last = int(torch.searchsorted(mass, wanted))
    mass_before = mass[last - 1] if last else 0.0
    inside = _where(buckets == last)
    ordered, order = scores[inside].sort(descending=True, stable=True)
    reached = mass_before + ordered.exp().cumsum(0, dtype=torch.float64) >= wanted
    num_inside = int(reached.logical_not().sum()) + 1  # all before the one that reaches it, and that one
    keep = buckets < last
    keep[inside[order[:num_inside]]] = True
    return keep


def _where(mask: torch.Tensor) -> torch.Tensor:
    """(N,) bool → indices, int64, ascending."""
    return mask.nonzero().squeeze(1)


def _logprob(scores: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    logprobs = torch.log_softmax(scores, dim=0)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, tokens = logprobs.topk(min(num_top, logprobs.numel()))
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        top = tuple((other, value) for other, value in pairs if value > -math.inf)
    return TokenLogprob(token, logprobs[token].item(), top)


def not_finite() -> ModelError:
    """In place of a choice."""
    return ModelError(
        "the model's logits are not finite numbers",
        hint="The weights may be damaged, or overflow in their dtype: `teneral verify` checks the artifact.",
    )
