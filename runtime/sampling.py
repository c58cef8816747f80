"""From logits to the next token, sequence by sequence.

Order, as in transformers: logit bias; repetition penalty (prompt and output), presence and frequency penalty
(output); temperature; top-k (values equal to the k-th are kept); top-p of what is left, renormalised (the
smallest set of best tokens that reaches p, at least one); min-p (against the best token's probability).
Log-probabilities are taken before the temperature.

One token takes one uniform number, a hash of the sequence's seed and the index of the token. So there is no
generator whose state could be lost or shared: what a sequence draws depends neither on its company in the
batch, nor on having been preempted, nor on the device. Rows are never mixed; nothing is known here of text or
scheduling.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence

import torch

from .errors import ModelError
from .requests import TokenLogprob
from .sequence import Choice, SamplingState

FIRST_TOP_P_CANDIDATES = 256  # usually enough to reach p; sorting a whole vocabulary costs 10 ms


def choose_tokens(logits: torch.Tensor, states: Sequence[SamplingState]) -> list[Choice | ModelError]:
    """The next token for each row of `logits` (R, vocab) float32, which is left as it is. Changes no state.

    A row without any finite maximum (a broken model, an overflow) gives an error in place of a choice.
    """
    if all(state.is_plain_greedy for state in states):
        values, tokens = logits.max(dim=-1)  # one pass for all rows
        best = zip(values.tolist(), tokens.tolist(), strict=True)
        return [Choice(token) if math.isfinite(value) else _not_finite() for value, token in best]
    return [_choose(row, state) for row, state in zip(logits.unbind(0), states, strict=True)]


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) with 53 random bits. `seed` fits 64 bits, signed."""
    digest = hashlib.blake2b(struct.pack("<qQ", seed, index), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def _choose(logits: torch.Tensor, state: SamplingState) -> Choice | ModelError:
    scores = _adjust(logits, state)  # (vocab,)
    value, index = scores.max(dim=0)
    if not math.isfinite(value.item()):
        return _not_finite()
    token = int(index) if state.params.temperature == 0 else _draw(scores - value, state)
    if state.num_top_logprobs is None:
        return Choice(token)
    return Choice(token, _logprob(scores, token, state.num_top_logprobs))


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
    kept = _kept_tokens(scores, params.top_k, params.top_p, params.min_p)
    if kept is not None:
        scores = scores[kept]
    cumulative = scores.exp().cumsum(0, dtype=torch.float64)
    target = uniform(state.seed, state.num_outputs) * cumulative[-1]
    # The first whose sum exceeds the target: a token of probability 0 never is. Rounding may put the target
    # at the end.
    index = min(int(torch.searchsorted(cumulative, target, right=True)), scores.numel() - 1)
    return index if kept is None else int(kept[index])


def _kept_tokens(scores: torch.Tensor, top_k: int, top_p: float, min_p: float) -> torch.Tensor | None:
    """The tokens that the filters leave, ascending, int64; None: all of them."""
    keep: torch.Tensor | None = None
    if 0 < top_k < scores.numel():
        keep = scores >= scores.topk(top_k).values[-1]
    if top_p < 1.0:
        kept = _reach_mass(scores if keep is None else scores.masked_fill(~keep, -math.inf), top_p)
        keep = torch.zeros_like(scores, dtype=torch.bool)
        keep[kept] = True
    if min_p > 0.0:
        likely = scores >= math.log(min_p)  # the best has score 0
        keep = likely if keep is None else keep & likely
    return None if keep is None else keep.nonzero().squeeze(1)


def _reach_mass(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """The fewest best tokens that together have `top_p` of the probability, at least one; int64, best first.
    """
    wanted = top_p * scores.exp().sum(dtype=torch.float64)
    num_candidates = min(FIRST_TOP_P_CANDIDATES, scores.numel())
    while True:
        best, tokens = scores.topk(num_candidates)
        cumulative = best.exp().cumsum(0, dtype=torch.float64)
        if num_candidates == scores.numel() or bool(cumulative[-1] >= wanted):
            num_kept = int((cumulative < wanted).sum()) + 1  # all before which p was not yet reached
            return tokens[:num_kept]
        num_candidates = min(num_candidates * 16, scores.numel())


def _logprob(scores: torch.Tensor, token: int, num_top: int) -> TokenLogprob:
    logprobs = torch.log_softmax(scores, dim=0)
    top: tuple[tuple[int, float], ...] = ()
    if num_top:
        values, tokens = logprobs.topk(min(num_top, logprobs.numel()))
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        top = tuple((other, value) for other, value in pairs if value > -math.inf)
    return TokenLogprob(token, logprobs[token].item(), top)


def _not_finite() -> ModelError:
    return ModelError(
        "the model's logits are not finite numbers",
        hint="The weights may be damaged, or overflow in their dtype: `teneral verify` checks the artifact.",
    )
