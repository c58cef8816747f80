"""The embedder: batches the texts of concurrent callers, and runs the encoder in one thread.

A batch has texts of similar length, of any calls, the oldest among them (`text_queue.py`). It takes
the waiting texts, and more accumulate while the previous one runs; only if all waiting callers have
just arrived, and the previous batch had more callers, are these given a moment to return. A single
caller never waits. Invariant: a call is resolved by the thread that removes it from the queue, and
never with a lock held. This module knows nothing of text or tokenizers.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
from msgspec import Struct

from ...loader.timeline import Timeline
from ..errors import (
    WEIGHTS_LOST,
    CapacityError,
    ContextLengthError,
    ModelError,
    RequestError,
    as_teneral_error,
    shutting_down,
)
from ..models.score_functions import ScoreFunctions
from ..step.calls import CallQueue, claim, fail
from .text_queue import TextQueue

logger = logging.getLogger(__name__)

# Batches on the timeline, which shows the beginning of an instance's life.
NUM_TIMED_BATCHES = 8


TypeLists = Sequence[Sequence[int] | None]
"""A type for each token of a pair of texts; None for a single text."""


class EncoderLimits(Protocol):
    """The bounds of a model's texts."""

    @property
    def max_tokens(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...


class EncoderLike(Protocol):
    """The part of a model that is needed here."""

    @property
    def config(self) -> EncoderLimits: ...

    def embed(self, token_lists: Sequence[Sequence[int]], type_lists: TypeLists | None = None) -> np.ndarray:
        """(N, dim) float32, in the order of the texts. May wait for weights."""


class EmbedderStatistics(Struct, frozen=True):
    """A snapshot of the counts; totals count from the start."""

    queued: int  # unfinished calls
    batches_total: int
    texts_total: int
    tokens_total: int  # without padding
    embed_s_total: float


class _QueuedTexts(Struct, eq=False):
    token_lists: list[list[int]]
    future: Future[np.ndarray]
    came_s: float  # on time.monotonic()'s clock
    num_missing: int  # texts without their embedding
    type_lists: list[list[int] | None] | None = None
    # True: its owner can no longer cancel it; False: it was cancelled before.
    claimed: bool | None = None
    # (N, dim) float32, once the first batch gives dim.
    embeddings: np.ndarray | None = None


class Embedder(CallQueue[_QueuedTexts]):
    """The embedder. `start` it once and `stop` it at the end."""

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
        """`max_queued` calls may wait in addition to the running one. A batch has up to
        `max_batch_tokens`, padding included, or a single text. No call older than `max_delay_s`
        waits for others.
        """
        super().__init__("teneral-embedder")
        self._model = model
        self.max_tokens = model.config.max_tokens
        # Of a classifier, whose rows are scores; embedding models have none.
        self.labels: tuple[str, ...] = getattr(model.config, "labels", ())
        self.score_functions = score_functions or ScoreFunctions()
        self._max_queued = max_queued
        self._max_batch_tokens = max_batch_tokens
        self._max_delay_s = max_delay_s
        self._timeline = timeline
        # Guarded by the lock, like the fields of the base:
        self._texts: TextQueue[_QueuedTexts] = TextQueue()  # of the calls, not taken yet
        # The number of calls when the last batch was taken.
        self._num_callers = 0
        self._batch_end_s = -math.inf
        self._num_batches = 0
        self._num_texts = 0
        self._num_tokens = 0
        self._embed_s = 0.0

    # -- for any thread --------------------------------------------------------------------------------------

    def embed(self, token_lists: Sequence[Sequence[int]]) -> Future[np.ndarray]:
        """Embed texts: resolves to a new array (N, dim) float32, one row for each text, or to the
        model's error.

        Tokens include the special ones. The future can be cancelled until one of its texts is
        computed. Raises RequestError (nothing to embed, an unknown token), ContextLengthError,
        CapacityError, DrainingError, ModelError for a classifier, or the error that cost the
        embedder its weights. Nothing was started then.
        """
        if self.labels:
            raise ModelError(
                "the model classifies texts and makes no embeddings",
                hint="Use /v1/classify, call context.model.classify in a handler, or serve a model that embeds.",
            )
        return self._submit(token_lists)

    def classify(
        self, token_lists: Sequence[Sequence[int]], type_lists: TypeLists | None = None
    ) -> Future[np.ndarray]:
        """Classify texts, like `embed`: (N, len(labels)) float32 logits. Raises ModelError for
        other models.

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
        call = _QueuedTexts(texts, Future(), time.monotonic(), len(texts))
        if type_lists is not None and any(map(any, filter(None, type_lists))):
            call.type_lists = [None if types is None else list(types) for types in type_lists]
        self._add(call)
        return call.future

    def require_room(self) -> None:
        """Raise CapacityError if a call would be refused now."""
        with self._lock:
            self._require_room()

    def stop(self, timeout_s: float = 1.0) -> bool:
        """End every call now (DrainingError), and the thread after its batch.

        Returns False if the thread is still running after `timeout_s`, as while its batch waits for
        weights: cancel their load first.
        """
        self.abort(shutting_down())
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def statistics(self) -> EmbedderStatistics:
        with self._lock:
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
                f"{len(self._calls)} calls are running or waiting, which is the limit of this instance",
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
                    f"input {position} has {len(tokens)} tokens, more than the model's {limits.max_tokens}",
                    param="input",
                    hint="Shorten it, or split it and embed the parts.",
                )
            if not 0 <= min(tokens) <= max(tokens) < limits.vocab_size:
                raise RequestError(
                    f"input {position} has a token that is not one of the model's, 0 to {limits.vocab_size - 1}",
                    param="input",
                )

    def _enqueue(self, call: _QueuedTexts) -> None:
        self._texts.add(call, [len(tokens) for tokens in call.token_lists])
        self._work_came.notify()

    def _dequeue(self, call: _QueuedTexts) -> None:
        self._texts.discard(call)

    # -- the embedder's thread -------------------------------------------------------------------------------

    def _work(self) -> None:
        while (batch := self._next_batch()) is not None:
            try:
                self._embed_batch(batch)
            except Exception as error:  # noqa: BLE001 - of the model's code, its weights, or memory
                self._fail_batch(error, batch)

    def _next_batch(self) -> list[tuple[_QueuedTexts, int]] | None:
        """Wait for texts and take some as (call, index). None: the embedder stops."""
        with self._lock:
            while True:
                if self._is_stopping:
                    return None
                delay_s = self._delay_s()
                if delay_s > 0:
                    self._work_came.wait(delay_s)
                    continue
                num_callers = len(self._calls)
                batch = [text for text in self._texts.take(self._max_batch_tokens) if claim(text[0])]
                if batch:
                    self._num_callers = num_callers
                    return batch
                if not self._texts:
                    self._work_came.wait()

    def _delay_s(self) -> float:
        """The remaining time for the callers of the last batch to return; 0 or less: a batch is
        taken now.

        Positive if all waiting calls came within `max_delay_s` of its end. The first of them alone
        would cost almost as much as all together.
        """
        if not self._texts or len(self._calls) >= self._num_callers:
            return 0.0
        oldest = next(iter(self._calls))
        if not 0 <= oldest.came_s - self._batch_end_s <= self._max_delay_s:
            return 0.0
        return oldest.came_s + self._max_delay_s - time.monotonic()

    def _embed_batch(self, batch: list[tuple[_QueuedTexts, int]]) -> None:
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
        with self._lock:
            self._batch_end_s = end_s
            self._num_batches += 1
            self._num_texts += len(texts)
            self._num_tokens += num_tokens
            self._embed_s += end_s - start_s

    def _fail_batch(self, error: Exception, batch: list[tuple[_QueuedTexts, int]]) -> None:
        """End the calls of a failed batch; all calls, now and later, if weights are lost."""
        logger.error("a batch failed: %s", error, exc_info=error)
        failure = as_teneral_error(error)
        if isinstance(failure, WEIGHTS_LOST):
            self.abort(failure)
        else:
            fail(self._take_out(dict.fromkeys(call for call, _ in batch)), failure)
