"""The count of an instance's start, by its kind and outcome: once, when it can answer or has failed."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ...runtime.instance import Instance
    from ...runtime.metrics import Metrics

STANDBY_MARK = "taken over by a standby"


def count_start(metrics: Metrics, instance: Instance, is_first: bool) -> None:
    """Count this instance's start when it ends. `is_first`: the process began with it, else it is a reload.

    Seconds are those since the process that was asked to serve began, or since the reload did. An instance that is
    closed while it loads counts as neither.
    """
    done = threading.Lock()  # taken by the first of its futures that says how the start ended

    def ended(outcome: str) -> None:
        if done.acquire(blocking=False):
            metrics.start_ended(_kind(instance, is_first), outcome, instance.timeline.now_s())

    def can_answer(future: Future[Any]) -> None:
        if future.exception() is None:
            ended("ok")

    instance.engine.add_done_callback(can_answer)
    instance.embedder.add_done_callback(can_answer)
    instance.ended.add_done_callback(lambda future: ended("failed") if future.result() is not None else None)


def _kind(instance: Instance, is_first: bool) -> str:
    if not is_first:
        return "reload"
    spans = instance.timeline.snapshot()["spans"]
    return "standby" if any(span["name"] == STANDBY_MARK for span in spans) else "cold"
