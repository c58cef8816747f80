"""What the choice of a sequence's next token depends on beside its logits, and the choice."""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass

from .requests import GenerationRequest, SamplingParams, TokenLogprob


class SamplingState:
    """What the choice of a sequence's next token depends on, beside its logits."""

    __slots__ = (
        "is_plain_greedy",
        "num_outputs",
        "num_top_logprobs",
        "output_counts",
        "params",
        "seed",
        "seen",
    )

    def __init__(self, request: GenerationRequest) -> None:
        params = request.sampling
        self.params: SamplingParams = params
        self.num_top_logprobs = request.num_top_logprobs
        self.seed = secrets.randbits(63) if params.seed is None else params.seed
        self.num_outputs = 0
        self.output_counts: dict[int, int] = {}  # of the tokens generated so far
        # Tokens of prompt and output; only the repetition penalty asks for them, and a prompt may be long.
        self.seen: dict[int, None] = (
            dict.fromkeys(request.prompt_tokens) if params.repetition_penalty != 1.0 else {}
        )
        self.is_plain_greedy = (
            params.temperature == 0
            and not params.logit_bias
            and params.repetition_penalty == 1.0
            and params.presence_penalty == params.frequency_penalty == 0
            and request.num_top_logprobs is None
        )

    def for_draft(self) -> SamplingState:
        """The same choices from the same logits, so far; nobody asks for the draft's logprobs."""
        other = copy.copy(self)
        other.num_top_logprobs = None
        other.output_counts, other.seen = dict(self.output_counts), dict(self.seen)
        return other

    def add(self, token: int) -> None:
        self.num_outputs += 1
        self.output_counts[token] = self.output_counts.get(token, 0) + 1
        if self.params.repetition_penalty != 1.0:
            self.seen[token] = None


@dataclass(frozen=True, slots=True)
class Choice:
    """A token that was chosen for a sequence."""

    token: int
    logprob: TokenLogprob | None = None
