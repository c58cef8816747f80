"""Batches what several callers want embedded, and runs the encoder over it in one thread.

A batch has texts of similar length, of whatever calls, the oldest among them (`text_queue.py`). It begins with what is
there, and fills up while the one before runs; only when all who wait have just come, and the batch before had more
callers, are these given a moment to come back. A caller who is alone never waits. Invariant: a call is resolved by
whoever takes it out of the queue, and never with a lock held. Nothing is known here of text or tokenizers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from ...loader.errors import TeneralError
from ...loader.timeline import Timeline
from ..errors import (
    WEIGHTS_LOST,
    CancelledError,
    CapacityError,
    ContextLengthError,
    DrainingError,
    ModelError,
    RequestError,
)
from ..models.score_functions import ScoreFunctions
from .text_queue import TextQueue

logger = logging.getLogger(__name__)

NUM_TIMED_BATCHES = 8  # batches that the timeline shows: it is about the beginning of an instance's life


TypeLists = Sequence[Sequence[int] | None]
"""A type for each token of a pair of texts; None for a single text."""


class EncoderLimits(Protocol):
    """What bounds a model's texts."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


class EncoderLike(Protocol):
    """What is needed of a model."""

    @property
    def config(self) -> EncoderLimits: ...

    def embed(self, token_lists: Sequence[Sequence[int]], type_lists: TypeLists | None = None) -> np.ndarray:
        """(N, dim) float32, in the order of the texts. May wait for weights."""


@dataclass(frozen=True, slots=True)
class EmbedderStatistics:
    """A moment's view; totals count from the start."""

    queued: int  # calls that have not ended
    batches_total: int
    texts_total: int
    tokens_total: int  # without padding
    embed_s_total: float


@dataclass(slots=True, eq=False)
class _Call:
    token_lists: list[list[int]]
    future: Future[np.ndarray]
    came_s: float  # on time.monotonic()'s clock
    num_missing: int  # texts without their embedding
    type_lists: list[list[int] | None] | None = None
    claimed: bool | None = None  # True: its owner can cancel it no more; False: it was cancelled before
    embeddings: np.ndarray | None = field(default=None)  # (N, dim) float32, once the first batch tells dim


class Embedder:
    """`start` it once and `stop` it at the end. Calls that come before `start` wait for it."""

    def __init__(
        self,
        model: EncoderLike,
        *,
        max_queued: int = 256,
        max_batch_tokens: int = 8_192,
        max_delay_s: float = 0.0,
        timeline: Timeline | None = None,
        score_functions: ScoreFunctions | None = None,
    ) -> None:
        """`max_queued` calls may wait beside the one that is worked on. A batch has up to `max_batch_tokens`,
        padding included, or a single text. No call waits for others to come when it is `max_delay_s` old.
        """
        self._model = model
        self.max_tokens = model.config.max_tokens
        # Of a classifier, whose rows are scores; models that embed have none.
        self.labels: tuple[str, ...] = getattr(model.config, "labels", ())
        self.score_functions = score_functions or ScoreFunctions()
        self._max_queued = max_queued
        self._max_batch_tokens = max_batch_tokens
        self._max_delay_s = max_delay_s
        self._timeline = timeline
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards all that follows
        self._calls: dict[_Call, None] = {}  # in the order in which they came
        self._texts: TextQueue[_Call] = TextQueue()  # of these calls, not taken yet
        self._num_callers = 0  # calls that there were when the last batch was taken
        self._batch_end_s = -math.inf
        self._refusal: TeneralError | None = None  # why nothing new is taken
        self._is_stopping = False
        self._num_batches = 0
        self._num_texts = 0
        self._num_tokens = 0
        self._embed_s = 0.0

    # -- for any thread --------------------------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread, which sleeps while there is nothing to do."""
        with self._changed:
            if self._thread is not None or self._is_stopping:
                raise RuntimeError("an embedder can be started once, before it is stopped")
            # Daemon: a batch that waits for weights cannot be interrupted, and must not keep the process.
            self._thread = threading.Thread(target=self._run, name="teneral-embedder", daemon=True)
            self._thread.start()

    def embed(self, token_lists: Sequence[Sequence[int]]) -> Future[np.ndarray]:
        """Resolves to a new array (N, dim) float32, one row for each text; the model may have failed instead.

        Tokens include the special ones. The future can be cancelled while none of its texts is worked on.
        Raises RequestError (nothing to embed, an unknown token), ContextLengthError, CapacityError,
        DrainingError, ModelError for a classifier, or the error that cost the embedder its weights. Then nothing
        was begun.
        """
        if self.labels:
            raise ModelError(
                "the model classifies texts and makes no embeddings",
                hint="Ask /v1/classify, call context.model.classify in a handler, or serve a model that embeds.",
            )
        return self._submit(token_lists)

    def classify(
        self, token_lists: Sequence[Sequence[int]], type_lists: TypeLists | None = None
    ) -> Future[np.ndarray]:
        """As `embed`, of a classifier: (N, len(labels)) float32 logits. Raises ModelError for other models.

        `type_lists` are those of pairs of texts; the model refuses types that it does not have.
        """
        if not self.labels:
            raise ModelError(
                "the model makes embeddings and has no labels",
                hint="Serve a classifier (BertForSequenceClassification and the like), or compare embeddings.",
            )
        return self._submit(token_lists, type_lists)

    def _submit(
        self, token_lists: Sequence[Sequence[int]], type_lists: TypeLists | None = None
    ) -> Future[np.ndarray]:
        self._check(token_lists)
        texts = [list(tokens) for tokens in token_lists]
        call = _Call(texts, Future(), time.monotonic(), len(texts))
        if type_lists is not None and any(map(any, filter(None, type_lists))):
            call.type_lists = [None if types is None else list(types) for types in type_lists]
        with self._changed:
            if self._refusal is not None:
                # Without the traceback of the last time, to which each raise would add.
                raise self._refusal.with_traceback(None)
            self._require_room()
            self._calls[call] = None
            self._texts.add(call, [len(tokens) for tokens in texts])
            self._changed.notify_all()
        # A cancelled call gives its place back at once.
        call.future.add_done_callback(lambda _: self._take_out([call]))
        return call.future

    def require_room(self) -> None:
        """Raises CapacityError when a call would be refused now."""
        with self._changed:
            self._require_room()

    def give_up(self, future: Future[np.ndarray]) -> None:
        """Nobody waits for this call any more: what is not worked on yet of its texts never will be. Idempotent."""
        if future.cancel():
            return  # and has given its place back
        with self._changed:
            calls = [call for call in self._calls if call.future is future]
        _fail(self._take_out(calls), CancelledError("the call was given up"))

    def drain(self, timeout_s: float) -> bool:
        """Takes nothing new, waits for what was taken, then stops. True when all of it ended by itself; the
        rest gets a DrainingError. Does not wait for the thread: `stop` does.
        """
        with self._changed:
            self._refusal = self._refusal or _shutting_down()
            finished = self._changed.wait_for(lambda: not self._calls, timeout_s)
        self._shut_down(_shutting_down())
        return finished

    def abort(self, failure: TeneralError) -> None:
        """Ends every call now, with this error, which is also what whoever asks later gets. Waits for nothing."""
        self._shut_down(failure)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Ends every call now (DrainingError), and the thread after its batch. False when the thread goes on
        after `timeout_s`, as it does while its batch waits for weights: cancel their load first.
        """
        self._shut_down(_shutting_down())
        if self._thread is None:
            return True
        if self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> EmbedderStatistics:
        with self._changed:
            return EmbedderStatistics(
                queued=len(self._calls),
                batches_total=self._num_batches,
                texts_total=self._num_texts,
                tokens_total=self._num_tokens,
                embed_s_total=self._embed_s,
            )

    def _require_room(self) -> None:
        if len(self._calls) > self._max_queued:
            raise CapacityError(
                f"{len(self._calls)} calls are running or waiting: that is all that this instance takes",
                hint="Try again later, or run more instances.",
            )

    def _check(self, token_lists: Sequence[Sequence[int]]) -> None:
        if not token_lists:
            raise RequestError("there is nothing to embed", param="input")
        limits = self._model.config
        for position, tokens in enumerate(token_lists):
            if not tokens:
                raise RequestError(f"input {position} is empty", param="input")
            if len(tokens) > limits.max_tokens:
                raise ContextLengthError(
                    f"input {position} has {len(tokens)} tokens, the model takes up to {limits.max_tokens}",
                    param="input",
                    hint="Shorten it, or split it and embed the parts.",
                )
            if not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
                raise RequestError(
                    f"input {position} has a token that is not of the model's, 0 to {limits.vocab_size - 1}",
                    param="input",
                )

    def _shut_down(self, reason: TeneralError) -> None:
        with self._changed:
            self._refusal = self._refusal or reason
            self._is_stopping = True
            calls = self._take_out(list(self._calls))
        _fail(calls, reason)

    # -- the embedder's thread -------------------------------------------------------------------------------

    def _run(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                self._embed_batch(batch)
            except Exception as error:  # noqa: BLE001 - of the model's code, its weights, or memory
                self._fail_batch(error, batch)

    def _next_batch(self) -> list[tuple[_Call, int]] | None:
        """Sleeps until there are texts and takes some as (call, index). None: the embedder stops."""
        with self._changed:
            while True:
                if self._is_stopping:
                    return None
                delay_s = self._delay_s()
                if delay_s > 0:
                    self._changed.wait(delay_s)
                    continue
                num_callers = len(self._calls)
                batch = [text for text in self._texts.take(self._max_batch_tokens) if _claim(text[0])]
                if batch:
                    self._num_callers = num_callers
                    return batch
                if not self._texts:
                    self._changed.wait()

    def _delay_s(self) -> float:
        """How long the callers of the last batch are still given to come back; 0 or less: a batch is taken now.

        That is when all that wait came within `max_delay_s` of its end. The first of them alone would be hardly
        cheaper than all together.
        """
        if not self._texts or len(self._calls) >= self._num_callers:
            return 0.0
        oldest = next(iter(self._calls))
        if not 0 <= oldest.came_s - self._batch_end_s <= self._max_delay_s:
            return 0.0
        return oldest.came_s + self._max_delay_s - time.monotonic()

    def _embed_batch(self, batch: list[tuple[_Call, int]]) -> None:
        texts = [call.token_lists[index] for call, index in batch]
        start_s = time.monotonic()
        types = [None if call.type_lists is None else call.type_lists[index] for call, index in batch]
        embeddings = self._model.embed(texts, types if any(types) else None)  # (len(batch), dim) float32
        end_s = time.monotonic()
        complete = []
        for (call, index), row in zip(batch, embeddings, strict=True):
            if call.embeddings is None:
                call.embeddings = np.empty((len(call.token_lists), len(row)), dtype=np.float32)
            call.embeddings[index] = row
            call.num_missing -= 1
            if not call.num_missing:
                complete.append(call)
        self._count(texts, start_s, end_s)
        for call in self._take_out(complete):
            assert call.embeddings is not None
            call.future.set_result(call.embeddings)

    def _count(self, texts: list[list[int]], start_s: float, end_s: float) -> None:
        num_tokens = sum(len(tokens) for tokens in texts)
        if self._timeline is not None and self._num_batches < NUM_TIMED_BATCHES:
            origin_s = self._timeline.started_at
            self._timeline.add(
                "execute",
                f"batch {self._num_batches}",
                start_s - origin_s,
                end_s - origin_s,
                texts=len(texts),
                tokens=num_tokens,
            )
        with self._changed:
            self._batch_end_s = end_s
            self._num_batches += 1
            self._num_texts += len(texts)
            self._num_tokens += num_tokens
            self._embed_s += end_s - start_s

    def _fail_batch(self, error: Exception, batch: list[tuple[_Call, int]]) -> None:
        """Ends the calls of a batch that failed; all calls, now and later, if weights are lost."""
        logger.error("a batch failed: %s", error, exc_info=error)
        if isinstance(error, TeneralError):
            failure = error
        else:
            failure = ModelError(f"the model failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._changed:
            calls = list({id(call): call for call, _ in batch}.values())
            if isinstance(failure, WEIGHTS_LOST):
                self._refusal = self._refusal or failure
                calls = list(self._calls)
        _fail(self._take_out(calls), failure)

    def _take_out(self, calls: Sequence[_Call]) -> list[_Call]:
        """Those of the calls that were still in the queue and not cancelled: they are the taker's to resolve."""
        with self._changed:
            present = [call for call in calls if call in self._calls]
            for call in present:
                del self._calls[call]
                self._texts.discard(call)
            self._changed.notify_all()
            return [call for call in present if _claim(call)]


def _claim(call: _Call) -> bool:
    """Whether the call is to be resolved, which its owner can then prevent no more. Call it under the lock: a future
    may be asked only once.
    """
    if call.claimed is None:
        call.claimed = call.future.set_running_or_notify_cancel()
    return call.claimed


def _fail(calls: Sequence[_Call], error: TeneralError) -> None:
    for call in calls:
        call.future.set_exception(error)


def _shutting_down() -> DrainingError:
    return DrainingError("the instance is shutting down", hint="Ask another instance.")
