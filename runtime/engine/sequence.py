"""One sequence inside the engine: its tokens, its place in the KV pool, and what each new token means for its
text.

Invariants: `num_computed` < len(tokens); keys and values of the first `num_computed` tokens lie in `blocks`,
in order. A preempted sequence has none of either and keeps its tokens, so computing them again loses nothing.
Nothing is known here of tensors, scheduling or threads.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from ..text.detokenizer import Detokenizer, DetokenizerSource
from ..text.stop import StopStrings
from .generation import Generation
from .requests import FinishReason, GenerationEvent, GenerationRequest, SamplingParams, TokenLogprob


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


class Sequence:
    """Mutable; only the engine's thread writes to it once it is running."""

    __slots__ = (
        "_detokenizer",
        "_stop_strings",
        "blocks",
        "end_tokens",
        "generation",
        "max_new_tokens",
        "num_computed",
        "num_prompt_tokens",
        "sampling",
        "tokens",
    )

    def __init__(
        self,
        generation: Generation,
        source: DetokenizerSource,
        *,
        eos_token_ids: frozenset[int],
        max_new_tokens: int,
    ) -> None:
        request = generation.request
        self.generation = generation
        self.tokens: list[int] = list(request.prompt_tokens)  # prompt and output
        self.num_prompt_tokens = len(self.tokens)
        self.max_new_tokens = max_new_tokens
        self.end_tokens = (
            request.stop_token_ids if request.ignore_eos else request.stop_token_ids | eos_token_ids
        )
        self.num_computed = 0
        self.blocks: tuple[int, ...] = ()
        self.sampling = SamplingState(request)
        self._detokenizer = Detokenizer(source, request.prompt_tokens)
        self._stop_strings = StopStrings(request.stop)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_blocks(self) -> int:
        return len(self.blocks)

    def accept(self, choice: Choice) -> GenerationEvent:
        """Appends the token and gives the event that tells of it, the last one if the sequence ends with it.

        A token that ends the sequence is counted among its tokens and has no text.
        """
        token = choice.token
        self.tokens.append(token)
        self.sampling.add(token)
        text, finish = "", None
        if token in self.end_tokens:
            finish = FinishReason.STOP
        else:
            text, stopped = self._stop_strings.push(self._detokenizer.push(token))
            if stopped:
                return self._event(choice, text, FinishReason.STOP)
            if self.sampling.num_outputs >= self.max_new_tokens:
                finish = FinishReason.LENGTH
        if finish is not None:
            text += self._stop_strings.flush()
        return self._event(choice, text, finish)

    def forget_computed(self) -> tuple[int, ...]:
        """Preempts: gives up the blocks, which are the caller's to release, and keeps the tokens."""
        blocks, self.blocks, self.num_computed = self.blocks, (), 0
        return blocks

    def _event(self, choice: Choice, text: str, finish: FinishReason | None) -> GenerationEvent:
        logprobs = () if choice.logprob is None else (choice.logprob,)
        return GenerationEvent(text, (choice.token,), logprobs, finish)
