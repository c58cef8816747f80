"""One sequence inside the engine: its tokens, its place in the KV pool, and what each new token means for its
text.

Invariants: `num_computed` < len(tokens). A preempted sequence has nothing computed and no blocks, and keeps its tokens,
so computing them again loses nothing. What the draft made lies in a lane of its own, whose tokens may go beyond.
Nothing is known here of tensors, scheduling or threads.
"""

from __future__ import annotations

import copy
import secrets
from dataclasses import dataclass

from ..kv.blocks import Epoch
from ..kv.prefixes import chain_hash, seed_hash
from ..kv.spill.fetch import Fetch
from ..text.detokenizer import Detokenizer, DetokenizerSource
from ..text.stop import StopStrings
from .generation import Generation
from .requests import (
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Priority,
    SamplingParams,
    TokenLogprob,
)


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


class Lane:
    """A sequence's keys and values of one epoch: those of its first `num_computed` tokens lie in `blocks`, in order.

    While it is lent blocks without having a place (`lending.py`), the last of these tokens may lie in somebody else's
    block, the `source`. They are copied when the lane gets its next block.
    """

    __slots__ = ("blocks", "epoch", "num_computed", "sampling", "source", "tokens")

    def __init__(self, epoch: Epoch, tokens: list[int], sampling: SamplingState) -> None:
        """The tokens and the state are not copied."""
        self.epoch = epoch
        self.tokens = tokens  # what is to be computed
        self.sampling = sampling  # for the token after these
        self.blocks: tuple[int, ...] = ()
        self.source: int | None = None
        self.num_computed = 0

    @property
    def num_missing(self) -> int:
        """Known tokens that are not computed."""
        return len(self.tokens) - self.num_computed


class Sequence:
    """Mutable; only the engine's thread writes to it once it is running."""

    __slots__ = (
        "_detokenizer",
        "_hashes",
        "_stop_strings",
        "draft",
        "end_tokens",
        "exact",
        "fetch",
        "generation",
        "is_batch",
        "max_new_tokens",
        "num_prompt_tokens",
        "num_remembered",
        "priority",
        "queue_name",
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
        self.queue_name = request.queue_name
        self.priority = request.priority
        self.is_batch = request.priority is Priority.BATCH
        self.end_tokens = (
            request.stop_token_ids if request.ignore_eos else request.stop_token_ids | eos_token_ids
        )
        self.sampling = SamplingState(request)
        self.exact = Lane(Epoch.EXACT, self.tokens, self.sampling)
        self.draft: Lane | None = None  # while the weights arrive
        self.num_remembered = 0  # full blocks that others can find
        self.fetch: Fetch | None = None  # of its blocks that are no longer in the pool, since it waits
        self._hashes: list[bytes] = []  # of full blocks, the seed's before them
        self._detokenizer = Detokenizer(source, request.prompt_tokens)
        self._stop_strings = StopStrings(request.stop)

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (self.exact,) if self.draft is None else (self.exact, self.draft)

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.exact.blocks

    @property
    def num_computed(self) -> int:
        return self.exact.num_computed

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def num_blocks(self) -> int:
        return len(self.exact.blocks)

    @property
    def waits_for_blocks(self) -> bool:
        """Whether some are on their way back to the pool for it."""
        return self.fetch is not None and not self.fetch.is_done

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
        """Preempts: gives up the blocks of all lanes, which are the caller's to release, and keeps the tokens."""
        blocks = tuple(block for lane in self.lanes for block in lane.blocks)
        if self.exact.source is not None:
            blocks = (*blocks, self.exact.source)
        self.exact.blocks, self.exact.source, self.exact.num_computed, self.draft = (), None, 0, None
        self.num_remembered = 0
        return blocks

    def chain(self, num_blocks: int, block_size: int, seed: bytes) -> list[bytes]:
        """What the first `num_blocks` blocks of its tokens are known by, behind what the first one follows: so `[n]` is
        what number n follows. All of these are full. The seed and the size must always be the same.
        """
        hashes = self._hashes
        if not hashes:
            hashes.append(seed_hash(seed, self.generation.request.cache_salt.encode()))
        for number in range(len(hashes) - 1, num_blocks):
            tokens = self.tokens[number * block_size : (number + 1) * block_size]
            hashes.append(chain_hash(hashes[number], tokens))
        return hashes[: num_blocks + 1]

    def _event(self, choice: Choice, text: str, finish: FinishReason | None) -> GenerationEvent:
        logprobs = () if choice.logprob is None else (choice.logprob,)
        return GenerationEvent(text, (choice.token,), logprobs, finish)
