"""One sequence in the engine: its tokens, its blocks of the KV pool, its text, and the event that a
chosen token, or an error, becomes.

Invariants: `num_computed` < len(tokens). A preempted sequence has nothing computed and no blocks,
and keeps its tokens, so computing them again loses nothing. The draft has a lane of its own, whose
tokens may extend further. This module knows nothing of tensors, scheduling or threads.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import Struct

from ...loader.errors import TeneralError
from ..errors import GrammarError, as_teneral_error
from ..kv.prefixes import chain_hash, seed_hash
from ..step.batch import Epoch, StateSave
from ..step.logprobs import PromptScores
from ..step.requests import FinishReason, GenerationEvent, Priority
from ..step.state import Choice, Chosen, SamplingState
from ..text.detokenizer import Detokenizer, DetokenizerSource, StopStrings
from .generation import Generation

if TYPE_CHECKING:
    from ..kv.spill.policy import Fetch
    from ..step.images import PromptImage

logger = logging.getLogger(__name__)


class AdapterLike(Protocol):
    """An adapter that a sequence holds, loaded or loading."""

    @property
    def digest(self) -> bytes | None:
        """The digest of its content; None until it is loaded completely."""

    @property
    def has_begun(self) -> bool:
        """True if its layers are on their way, so that a forward pass may follow them."""

    @property
    def is_complete(self) -> bool:
        """True if it is loaded completely."""


class Lane:
    """A sequence's keys and values of one epoch: those of its first `num_computed` tokens are in
    `blocks`, in order.

    While it holds cached blocks without being admitted (`block_manager.py`), the last of these tokens may
    be in another sequence's block, the `source`. They are copied when the lane gets its next block. Likewise the
    recurrent state, of models that have one, is copied from `state_source`.
    """

    __slots__ = (
        "adapter",
        "blocks",
        "epoch",
        "images",
        "num_computed",
        "sampling",
        "saves",
        "source",
        "state",
        "state_source",
        "tokens",
    )

    def __init__(
        self,
        epoch: Epoch,
        tokens: list[int],
        sampling: SamplingState,
        adapter: AdapterLike | None = None,
        images: tuple[PromptImage, ...] = (),
    ) -> None:
        """The tokens and the state are not copied."""
        self.epoch = epoch
        self.adapter = adapter
        self.images = images  # of the prompt
        self.tokens = tokens  # to compute
        self.sampling = sampling  # of the token after these
        self.blocks: tuple[int, ...] = ()
        self.source: int | None = None
        self.state: int | None = None
        self.state_source: int | None = None
        self.saves: tuple[StateSave, ...] = ()  # of the state, in the step that is computed
        self.num_computed = 0

    @property
    def num_missing(self) -> int:
        """The number of known tokens that are not computed."""
        return len(self.tokens) - self.num_computed

    def uncut(self, first: int, end: int) -> int:
        """The end of a step's tokens [first, end), moved so that it cuts no image that is computed as a whole."""
        if not self.images:
            return end
        from ..step.images import uncut  # of few requests

        return uncut(self.images, first, end)


class Sequence:
    """Mutable; only the engine's thread writes to it once it is running."""

    __slots__ = (
        "_detokenizer",
        "_hashes",
        "_prompt_keys",
        "_stop_strings",
        "_text_decides",
        "adapter",
        "branch",
        "draft",
        "end_tokens",
        "exact",
        "fetch",
        "generation",
        "is_batch",
        "latest_save",
        "look_ahead",
        "max_new_tokens",
        "num_given_tokens",
        "num_prompt_tokens",
        "num_remembered",
        "priority",
        "queue_name",
        "sampling",
        "scores",
        "stopped_by",
        "tokens",
        "waits_for_adapter",
    )

    def __init__(
        self,
        generation: Generation,
        source: DetokenizerSource,
        *,
        eos_token_ids: frozenset[int],
        max_new_tokens: int,
        adapter: AdapterLike | None = None,
    ) -> None:
        request = generation.request
        self.adapter = adapter
        # Until its adapter is loaded it takes part in no step with others. Changed under the engine's lock.
        self.waits_for_adapter = adapter is not None and not adapter.is_complete
        self.generation = generation
        self.tokens: list[int] = list(request.prompt_tokens)  # prompt and output
        self.num_prompt_tokens = len(self.tokens)
        # With the tokens that the grammar forces after the prompt.
        self.num_given_tokens = self.num_prompt_tokens
        self.max_new_tokens = max_new_tokens
        self.queue_name = request.queue_name
        self.priority = request.priority
        self.is_batch = request.priority is Priority.BATCH
        self.end_tokens = (
            request.stop_token_ids if request.ignore_eos else request.stop_token_ids | eos_token_ids
        )
        self.sampling = SamplingState(request, self.end_tokens)
        num_logprobs = request.num_prompt_logprobs
        # Of the prompt, until the first event delivers them.
        self.scores = None if num_logprobs is None else PromptScores(request.prompt_tokens, num_logprobs)
        self.exact = Lane(Epoch.EXACT, self.tokens, self.sampling, adapter, request.images)
        self.draft: Lane | None = None  # while the weights arrive
        self.num_remembered = 0  # full blocks available to others
        # Of recurrent states (`kv/states.py`): tokens after which others' cached blocks have none, and the copy that a
        # later one takes the place of.
        self.branch = 0
        self.latest_save: bytes | None = None
        # The engine's own, from its first proposals on.
        self.look_ahead: Any = None
        # Of its spilled blocks, while it waits.
        self.fetch: Fetch | None = None
        # Of full blocks, after the seed's.
        self._hashes: list[bytes] = []
        # Of a prompt with images; others are their own keys.
        self._prompt_keys: list[int] | None = None
        if request.images:
            from ..step.images import prompt_keys

            self._prompt_keys = prompt_keys(self.tokens, request.images)
        self._detokenizer = Detokenizer(
            source, request.prompt_tokens, skips_special_tokens=request.skips_special_tokens
        )
        # The request's stop string or token that ended it.
        self.stopped_by: str | int | None = None
        self._stop_strings = StopStrings(request.stop, included=request.includes_stop)
        self._text_decides = bool(request.stop) or request.grammar is not None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        return (self.exact,) if self.draft is None else (self.exact, self.draft)

    @property
    def num_reusable(self) -> int:
        """How many of its first tokens need not be computed where they are cached: all but the last one. While log
        probabilities of the prompt are missing, none; of a sound whose attention is kept, its places.
        """
        if self.scores is not None and not self.scores.is_complete:
            return 0
        kept = [image.attention.num_places for image in self.exact.images if image.attention is not None]
        return min([self.num_tokens - 1, *kept])

    @property
    def blocks(self) -> tuple[int, ...]:
        return self.exact.blocks

    @property
    def num_computed(self) -> int:
        return self.exact.num_computed

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def uncut(self, end: int) -> int:
        return self.exact.uncut(self.exact.num_computed, end)

    @property
    def num_blocks(self) -> int:
        return len(self.exact.blocks)

    @property
    def waits_for_blocks(self) -> bool:
        """True if some of its blocks are being fetched."""
        return self.fetch is not None and not self.fetch.is_done

    @property
    def waits_for_images(self) -> bool:
        """True if some of its images are not encoded yet: until then it takes part in no step. Changes under the
        engine's lock.
        """
        return any(image.rows is None for image in self.exact.images)

    @property
    def can_take(self) -> bool:
        """True if its next token can be taken now and become an event later: no stop string, grammar
        or log probabilities of the prompt belong to it.
        """
        return not self._text_decides and self.scores is None

    def begin(self) -> GenerationEvent | None:
        """The event of the tokens that the grammar forces at the beginning, which need no weights;
        None without any. Called once, before anything is computed. Raises `GrammarError`.
        """
        begun = len(self.tokens)
        text, finish = self._append_forced()
        self.num_given_tokens = len(self.tokens)
        tokens = tuple(self.tokens[begun:])
        return GenerationEvent(text, tokens, (), finish, stopped_by=self.stopped_by) if tokens else None

    def accept(self, choice: Choice) -> GenerationEvent:
        """Append the token, and those that the grammar then forces. Returns their event, the last
        one if they end the sequence.

        A token that ends the sequence is counted among its tokens and has no text. A sequence with
        max_tokens 0, computed for its prompt's log probabilities, takes none.
        """
        prompt_logprobs = None
        if self.scores is not None:
            assert self.scores.is_complete, "an answer before its prompt was computed"
            prompt_logprobs, self.scores = self.scores.result(), None
        if not self.max_new_tokens:
            return GenerationEvent("", (), finish_reason=FinishReason.LENGTH, prompt_logprobs=prompt_logprobs)
        begun = len(self.tokens)
        text, finish = self._append(choice.token)
        if finish is None:
            more, finish = self._append_forced()
            text += more
        logprobs = () if choice.logprob is None else (choice.logprob,)
        tokens = tuple(self.tokens[begun:])
        return GenerationEvent(
            text, tokens, logprobs, finish, prompt_logprobs=prompt_logprobs, stopped_by=self.stopped_by
        )

    def event_of(self, choice: Choice, finish: FinishReason | None) -> GenerationEvent:
        """The event of a token that `take` appended, with its finish reason, for a sequence that
        `can_take` it. Touches nothing that scheduling and computing use.
        """
        text, finish = self._text_of(choice.token, finish)
        logprobs = () if choice.logprob is None else (choice.logprob,)
        return GenerationEvent(text, (choice.token,), logprobs, finish, stopped_by=self.stopped_by)

    def _append_forced(self) -> tuple[str, FinishReason | None]:
        """Append the tokens that the grammar forces now. Returns their text, and the finish reason
        if they end the sequence.
        """
        texts: list[str] = []
        for token in self.sampling.forced():
            text, finish = self._append(token)
            texts.append(text)
            if finish is not None:
                return "".join(texts), finish
        return "".join(texts), None

    def _append(self, token: int) -> tuple[str, FinishReason | None]:
        """Append a token. Returns its text, and the finish reason if it ends the sequence."""
        return self._text_of(token, self.take(token))

    def take(self, token: int) -> FinishReason | None:
        """Append a token, without its text. Returns the finish reason if it ends the sequence,
        whatever its text is. `event_of` or `_text_of` must follow before the next one.
        """
        self.tokens.append(token)
        self.sampling.add(token)
        if token in self.end_tokens:
            return FinishReason.STOP
        if self.sampling.grammar is not None and self.sampling.grammar.is_finished:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.sampling.num_outputs >= self.max_new_tokens else None

    def _text_of(self, token: int, finish: FinishReason | None) -> tuple[str, FinishReason | None]:
        """The text of the last token, for which `take` returned `finish`, and the finish reason
        with the stop strings.
        """
        request = self.generation.request
        if token in self.end_tokens:
            self.stopped_by = token if token in request.stop_token_ids else None
            text = self._stop_strings.flush() + self._detokenizer.push(token) if request.includes_stop else ""
        else:
            shown = request.shown_tokens.get(token)
            shown = self._detokenizer.push(token) if shown is None else shown
            counts = self.sampling.num_outputs > request.min_tokens
            text, stopped = self._stop_strings.push(shown, counts=counts)
            if stopped:
                self.stopped_by = self._stop_strings.found
                return text, FinishReason.STOP
        return (text if finish is None else text + self._stop_strings.flush()), finish

    def forget_computed(self) -> tuple[int, ...]:
        """Preempt: gives up the blocks of all lanes, which the caller must release, and keeps the
        tokens.
        """
        blocks = tuple(block for lane in self.lanes for block in lane.blocks)
        if self.exact.source is not None:
            blocks = (*blocks, self.exact.source)
        self.exact.blocks, self.exact.source, self.exact.num_computed, self.draft = (), None, 0, None
        self.num_remembered = 0
        return blocks

    def keys(self, first: int, end: int) -> list[int]:
        """The tokens [first, end) as caches of prefixes tell them apart: those of images by the images' digests."""
        own = self._prompt_keys
        if own is None or first >= len(own):
            return self.tokens[first:end]
        return own[first:end] + self.tokens[len(own) : end]

    def chain(self, num_blocks: int, block_size: int, seed: bytes) -> list[bytes]:
        """The hashes of the first `num_blocks` blocks of its tokens, after the first one's
        predecessor: so `[n]` is the predecessor of number n. All of these are full. The seed and
        the size must always be the same.
        """
        hashes = self._hashes
        if not hashes:
            salt = self.generation.request.cache_salt.encode()
            if self.adapter is not None:
                assert self.adapter.digest is not None, "blocks of an adapter that is not there"
                seed = seed_hash(seed, b"adapter", self.adapter.digest)
            hashes.append(seed_hash(seed, salt))
        for number in range(len(hashes) - 1, num_blocks):
            keys = self.keys(number * block_size, (number + 1) * block_size)
            hashes.append(chain_hash(hashes[number], keys))
        return hashes[: num_blocks + 1]


def accept(sequence: Sequence, choice: Chosen) -> GenerationEvent:
    """Append the token to the sequence, and the tokens that its grammar then forces.

    An error instead of a token, or in its text, ends only that sequence.
    """
    if not isinstance(choice, Choice):
        return error_event(choice)
    return _or_error(sequence, lambda: sequence.accept(choice))


class Taken(Struct, frozen=True):
    """A token that a sequence has taken (`Sequence.take`), and that is not an event yet."""

    sequence: Sequence
    choice: Choice
    finish_reason: FinishReason | None

    def event(self) -> GenerationEvent:
        """The event of the token; that of an error if its text fails."""
        sequence = self.sequence
        return _or_error(sequence, lambda: sequence.event_of(self.choice, self.finish_reason))


def _or_error(sequence: Sequence, make: Callable[[], GenerationEvent]) -> GenerationEvent:
    """The event that `make` returns, or that of the error that it raises."""
    try:
        return make()
    except GrammarError as error:
        return error_event(error)
    except Exception as error:  # an error of the tokenizer's decoder must not end the other sequences
        logger.exception("request %s: detokenising failed", sequence.generation.request.request_id)
        return error_event(as_teneral_error(error))


def error_event(error: TeneralError) -> GenerationEvent:
    """The last event of a failed sequence."""
    return GenerationEvent("", (), finish_reason=FinishReason.ERROR, error=error)
