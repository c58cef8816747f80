"""The engine's spans on the timeline: its first forward passes, and the waits, starts and ends of
its first requests.

The timeline shows the beginning of an instance's life, so both are bounded in number. Without a
timeline nothing is recorded. Thread-safe.
"""

from __future__ import annotations

import threading
import time

from ...loader.timeline import Timeline
from ..step.backend import EXPERT_WAIT, OnLayer
from ..step.batch import StepBatch
from ..step.requests import FinishReason
from .generation import Generation

NUM_STEPS = 8
NUM_DRAFT_STEPS = 200
NUM_REQUESTS = 1_000


class EngineTimeline:
    """Spans in lane "execute" (layers of the first pass, then passes), in lane "experts" (the first passes' waits for
    experts) and in lane "request".
    """

    def __init__(self, timeline: Timeline | None) -> None:
        self._timeline = timeline
        self._num_requests = 0
        self._num_drafts = 0
        self._has_followed = False
        self._lock = threading.Lock()

    def on_layer(self, step: int) -> OnLayer | None:
        """The callback for each layer of this step, the first being 0; None: not needed."""
        if step >= NUM_STEPS:
            return None
        return self._on_layer("execute", only_waits=step > 0)

    def _on_layer(self, lane: str, *, only_waits: bool = False) -> OnLayer | None:
        timeline = self._timeline
        if timeline is None:
            return None

        def write(index: int, name: str, start_s: float, end_s: float) -> None:
            origin_s = timeline.started_at
            if name == EXPERT_WAIT:
                timeline.add("experts", f"layers.{index}", start_s - origin_s, end_s - origin_s, layer=index)
            elif not only_waits:
                timeline.add(lane, name, start_s - origin_s, end_s - origin_s, layer=index)

        return write

    def add_step(self, step: int, batch: StepBatch, start_s: float, end_s: float) -> None:
        if step < NUM_STEPS:
            self._add(
                "execute",
                f"step {step}",
                start_s,
                end_s,
                tokens=len(batch.tokens),
                sequences=len(batch.spans),
            )

    def on_exact_layer(self) -> OnLayer | None:
        """The callback for the first pass that follows the weights as they become exact."""
        self._has_followed, is_first = True, not self._has_followed
        return self._on_layer("execute") if is_first else None

    def on_draft_layer(self) -> OnLayer | None:
        """The callback for the first pass over the draft, and the abandoned ones before it."""
        return self._on_layer("draft") if self._num_drafts == 0 else None

    def add_draft(self, batch: StepBatch, start_s: float, end_s: float) -> None:
        """Record a finished pass over the draft."""
        number, self._num_drafts = self._num_drafts, self._num_drafts + 1
        if number < NUM_DRAFT_STEPS:
            tokens, sequences = len(batch.tokens), len(batch.spans)
            self._add("draft", f"draft step {number}", start_s, end_s, tokens=tokens, sequences=sequences)

    def add_outcome(self, **figures: object) -> None:
        """Record the result of drafting ahead, with the loader's prediction."""
        now_s = time.monotonic()
        self._add("draft", "exact from here on", now_s, now_s, **figures)

    def add_forced(self, generation: Generation, num_tokens: int) -> None:
        """Record a sequence that began with tokens forced by its grammar."""
        first_s = generation.timings.first_token_s
        with self._lock:
            if self._timeline is None or first_s is None or self._num_requests >= NUM_REQUESTS:
                return
        request_id = generation.request.request_id
        self._add("request", "forced tokens", first_s, first_s, request=request_id, tokens=num_tokens)

    def add_request(self, generation: Generation, reason: FinishReason) -> None:
        """Record the spans of an ended sequence: queued, prefill (until its first token), decode."""
        with self._lock:
            if self._timeline is None or self._num_requests >= NUM_REQUESTS:
                return
            self._num_requests += 1
        timings = generation.timings
        moments = [
            ("queued", timings.queued_s),
            ("prefill", timings.started_s),
            ("decode", timings.first_computed_s),
        ]
        reached = [(name, start_s) for name, start_s in moments if start_s is not None]
        ends_s = [start_s for _, start_s in reached[1:]] + [timings.finished_s or reached[-1][1]]
        request_id = generation.request.request_id
        for (name, start_s), end_s in zip(reached, ends_s, strict=True):
            self._add("request", name, start_s, end_s, request=request_id)
        if timings.first_token_s is not None:
            self._add(
                "request", "first token", timings.first_token_s, timings.first_token_s, request=request_id
            )
        proposals: dict[str, int] = {}
        if generation.num_accepted or generation.num_rejected:
            proposals = {"accepted": generation.num_accepted, "rejected": generation.num_rejected}
        self._add(
            "request",
            "last token",
            ends_s[-1],
            ends_s[-1],
            request=request_id,
            finish=str(reason),
            **proposals,
        )

    def _add(self, lane: str, name: str, start_s: float, end_s: float, **attributes: object) -> None:
        if self._timeline is not None:
            origin_s = self._timeline.started_at
            self._timeline.add(lane, name, start_s - origin_s, end_s - origin_s, **attributes)
