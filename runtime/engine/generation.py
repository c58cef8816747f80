"""The caller's handle on one sequence: its events in order, its result, its cancellation.

Invariant: exactly one event has a finish reason, and it is the last, no matter what ends the
sequence first (the engine, the caller, or a shutdown). Events may be added from any thread.
`on_event` is never called concurrently, nor while a lock is held, so it may call anything, this
handle included. This module knows nothing of the model or of scheduling.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator

from msgspec import Struct

from ..errors import ModelError
from ..step.requests import FinishReason, GenerationEvent, GenerationRequest, PromptLogprobs, TokenLogprob

logger = logging.getLogger(__name__)

OnEvent = Callable[[GenerationEvent], None]


class RequestTimings(Struct, frozen=True):
    """Times on `time.monotonic()`'s clock; None: not yet."""

    queued_s: float
    started_s: float | None = None  # first taken into a step
    first_token_s: float | None = None
    # Of the first token that a grammar did not force at the beginning.
    first_computed_s: float | None = None
    finished_s: float | None = None


class GenerationResult(Struct, frozen=True):
    """All events of one sequence, combined."""

    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason
    timings: RequestTimings
    num_drafted: int = 0  # as in `GenerationEvent`
    num_accepted: int = 0
    num_rejected: int = 0
    prompt_logprobs: PromptLogprobs | None = None


class Generation:
    """A sequence in progress, made by `Engine.submit`. Iterate over it, call `result`, or pass an
    `on_event`; all may be combined.
    """

    def __init__(
        self,
        request: GenerationRequest,
        on_event: OnEvent | None = None,
        *,
        on_end: Callable[[Generation, FinishReason], None] | None = None,
    ) -> None:
        """`on_end` is called once, by the thread that ends the sequence, before its last event is seen."""
        self.request = request
        self._on_event = on_event
        self._on_end = on_end
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)  # notified of each event
        # Notified of the last one, so that `result` does not wake for each.
        self._finished = threading.Condition(self._lock)
        self._events: list[GenerationEvent] = []
        self._num_delivered = 0  # events passed to `on_event`
        self._is_delivering = False
        self._ended = False
        # Prompt tokens found in the KV pool, once it has started.
        self.num_cached_tokens = 0
        # As in `GenerationEvent`, of all events so far.
        self.num_accepted = self.num_rejected = 0
        self._queued_s = time.monotonic()
        self._started_s: float | None = None
        self._first_token_s: float | None = None
        self._first_computed_s: float | None = None
        self._finished_s: float | None = None

    @property
    def ended(self) -> bool:
        return self._ended

    @property
    def finish_reason(self) -> FinishReason | None:
        """The finish reason; None while the sequence is running."""
        with self._changed:
            return self._events[-1].finish_reason if self._events else None

    @property
    def timings(self) -> RequestTimings:
        return RequestTimings(
            self._queued_s,
            self._started_s,
            self._first_token_s,
            self._first_computed_s,
            self._finished_s,
        )

    def cancel(self) -> None:
        """End the sequence now, from any thread; no effect after its end. Its blocks of the KV pool
        are freed after the current step.
        """
        self.emit(GenerationEvent("", (), finish_reason=FinishReason.CANCELLED))

    def events(self, timeout_s: float | None = None) -> Iterator[GenerationEvent]:
        """All events from the first to the last, waiting for future ones. May be called more than
        once.

        Raises TimeoutError if none arrives within `timeout_s`.
        """
        index = 0
        while True:
            event = self._wait_for(index, timeout_s)
            yield event
            if event.finish_reason is not None:
                return
            index += 1

    def __iter__(self) -> Iterator[GenerationEvent]:
        return self.events()

    def result(self, timeout_s: float | None = None) -> GenerationResult:
        """Wait for the end and return the result, partial for a cancelled sequence; raises the
        error of a failed one. Raises TimeoutError after `timeout_s` in total.
        """
        with self._changed:
            if not self._finished.wait_for(lambda: self.finish_reason is not None, timeout_s):
                raise TimeoutError(f"request {self.request.request_id} has not ended within {timeout_s:g} s")
            events = list(self._events)
        last = events[-1]
        if last.finish_reason is None or last.finish_reason is FinishReason.ERROR:
            raise last.error or ModelError("the sequence failed without a reason")
        return GenerationResult(
            text="".join(event.text for event in events),
            tokens=tuple(token for event in events for token in event.tokens),
            logprobs=tuple(logprob for event in events for logprob in event.logprobs),
            finish_reason=last.finish_reason,
            timings=self.timings,
            num_drafted=sum(event.num_drafted for event in events),
            num_accepted=self.num_accepted,
            num_rejected=self.num_rejected,
            prompt_logprobs=next(
                (event.prompt_logprobs for event in events if event.prompt_logprobs is not None), None
            ),
        )

    def mark_started(self, *, num_cached_tokens: int = 0) -> bool:
        """For the engine: record that the sequence takes part in a step, with that many cached
        tokens. True only the first time.
        """
        if self._started_s is not None:
            return False
        self._started_s = time.monotonic()
        self.num_cached_tokens = num_cached_tokens
        return True

    def begin(self, event: GenerationEvent) -> None:
        """For the engine, before any other thread has this handle: add its first event, which does
        not end it. `deliver` or the next event delivers it.
        """
        self._first_token_s = time.monotonic()
        with self._lock:
            self._append(event)

    def deliver(self) -> None:
        """For the engine: deliver the event of `begin`."""
        self._deliver()

    def emit(self, event: GenerationEvent) -> bool:
        """For the engine: add an event. Returns False, without effect, if the sequence has ended."""
        now_s = time.monotonic()
        with self._lock:
            if self._ended:
                return False
            self.num_accepted += event.num_accepted
            self.num_rejected += event.num_rejected
            if event.tokens and self._first_computed_s is None:
                self._first_computed_s = now_s
                self._first_token_s = self._first_token_s or now_s
            if event.finish_reason is None:
                self._append(event)
            else:
                self._finished_s = now_s
                # From here on no other thread adds an event.
                self._ended = True
        if event.finish_reason is not None:
            on_end, self._on_end = self._on_end, None  # it keeps the request's adapter in memory
            if on_end is not None:
                on_end(self, event.finish_reason)
            with self._lock:
                self._append(event)
        self._deliver()
        return True

    def _append(self, event: GenerationEvent) -> None:
        """Add an event. Under the lock."""
        self._events.append(event)
        self._changed.notify_all()
        if event.finish_reason is not None:
            self._finished.notify_all()

    def _deliver(self) -> None:
        """Call `on_event` with undelivered events, unless another thread is doing so, which then
        delivers them next.
        """
        if self._on_event is None:
            return
        is_mine = False
        while True:
            with self._lock:
                if self._is_delivering and not is_mine:
                    return
                is_mine = self._is_delivering = self._num_delivered < len(self._events)
                if not is_mine:
                    return
                event = self._events[self._num_delivered]
                self._num_delivered += 1
            try:
                self._on_event(event)
            except Exception:  # the caller's code must not end the thread that serves all sequences
                logger.exception("request %s: on_event raised; cancelled", self.request.request_id)
                self.cancel()

    def _wait_for(self, index: int, timeout_s: float | None) -> GenerationEvent:
        with self._changed:
            if not self._changed.wait_for(lambda: len(self._events) > index, timeout_s):
                raise TimeoutError(f"request {self.request.request_id}: no event within {timeout_s:g} s")
            return self._events[index]
