"""The calls of an ONNX model: queued, batched, one run at a time, first on segments, then on the
whole session.

A call's inputs are checked against the model's before it is queued. Waiting calls share a run where
the model has a batch dimension and their other sizes agree; a single call never waits for others.
Queued calls run in the runner's thread. A blocking call (`run`) that is alone runs in its caller's,
since a change of threads costs more than everything else that is added to ONNX Runtime here. Once
all weights are exact, a thread makes the whole, prepacked session, which all later runs use; then
the segments' sessions and the load's memory are freed.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from msgspec import Struct, field

from ...loader.errors import TeneralError
from ...loader.memory.limits import MIB, available_bytes
from ..errors import (
    WEIGHTS_LOST,
    CancelledError,
    CapacityError,
    RequestError,
    as_teneral_error,
    shutting_down,
)
from ..step.calls import CallQueue, claim, fail
from .inputs import as_input
from .sessions import Run
from .spec import OnnxSpec

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
    Arrays = dict[str, Array]

logger = logging.getLogger(__name__)

# Before the whole session is made: for the first run, whose answer it would delay, and then for a
# moment between two runs.
FIRST_WAIT_S = 2.0
IDLE_WAIT_S = 1.0
SPARE_BYTES = 128 * MIB  # remains free while the whole session is made


class Executable(Protocol):
    """`SegmentedModel` or `WholeModel`."""

    name: str

    def run(self, inputs: Mapping[str, Array], run: Run) -> Arrays: ...

    def close(self) -> None: ...


class CallLifetime(Protocol):
    """A blocking caller's deadline and cancellation: `handlers.function.lifetime.Lifetime`."""

    deadline: float | None  # on `time.monotonic()`'s clock

    def on_cancel(self, callback: Callable[[], None]) -> Callable[[], None]: ...

    def check(self) -> None: ...

    def wait(self, future: Future[Arrays]) -> Arrays: ...


class OnnxStatistics(Struct, frozen=True):
    """A snapshot of the counts; totals count from the start."""

    queued: int  # unfinished calls
    runs_total: int
    calls_total: int
    rows_total: int  # along the batch dimension; a call without one counts as one
    run_s_total: float
    is_whole: bool  # the prepacked session computes


class _QueuedInputs(Struct, eq=False):
    inputs: Arrays
    rows: int | None  # along the batch dimension; None: it shares no run
    key: tuple[Any, ...]  # calls with equal keys can share a run
    future: Future[Arrays] = field(default_factory=Future)
    # True: its owner can no longer cancel it; False: it was cancelled before.
    claimed: bool | None = None


class _Current(NamedTuple):
    """The current run: of queued calls, or without any, in its caller's thread."""

    calls: list[_QueuedInputs]
    model: Executable
    run: Run
    num_rows: int


class OnnxRunner(CallQueue[_QueuedInputs]):
    """The runner. `start` it once and `stop` it at the end."""

    def __init__(
        self,
        spec: OnnxSpec,
        model: Executable,
        *,
        labels: tuple[str, ...] = (),
        max_queued: int = 256,
        max_batch: int = 8,
    ) -> None:
        """`max_queued` calls may wait while others run; a run has up to `max_batch` rows, or one
        call.
        """
        super().__init__("teneral-onnx")
        self.spec = spec
        self.labels = labels
        self._model = model
        self._max_queued = max_queued
        self._max_batch = max_batch if spec.batch_axis is not None else 1
        # Guarded by the lock, like the fields of the base:
        self._waiting: deque[_QueuedInputs] = deque()
        self._current: _Current | None = None
        self._num_runs = self._num_calls = self._num_rows = 0
        self._run_s = 0.0

    # for any thread

    def submit(self, inputs: Mapping[str, Any]) -> Future[Arrays]:
        """Queue a call: resolves to all outputs by name, the caller's own.

        `inputs` are arrays, or values of which numpy makes one; they must not change until then.
        Raises RequestError naming the input that does not fit, CapacityError, DrainingError, or the
        error that cost the model its weights. Nothing was started then.
        """
        return self._submit(self._arrays(inputs))

    def run(self, inputs: Mapping[str, Any], lifetime: CallLifetime) -> Arrays:
        """The result of `submit`, blocking: in this thread if nothing else runs or waits.

        Raises CancelledError at the end of the lifetime. In this thread, a deadline counts while
        weights are awaited, and otherwise when something cancels the lifetime.
        """
        arrays, run = self._arrays(inputs), Run(lifetime.deadline)
        rows, _ = self._sharing(arrays)
        with self._lock:
            is_here = self._current is None and not self._waiting
            if is_here:
                self._require_open()
                model = self._model
                self._current = current = _Current([], model, run, rows or 1)
        if not is_here:
            outputs = self._submit(arrays)
            try:
                return lifetime.wait(outputs)
            finally:
                self.give_up(outputs)  # no effect once it is done
        begin_s = time.monotonic()
        forget = lifetime.on_cancel(run.cancel)
        try:
            return model.run(arrays, run)
        except Exception as error:
            if isinstance(error, CancelledError):
                lifetime.check()  # for the reason
            failure = self._failure(error)
            if failure is error:
                raise
            raise failure from error
        finally:
            forget()
            self._end_run(current, time.monotonic() - begin_s)

    def give_up(self, future: Future[Arrays]) -> None:
        """Abandon this call: it never starts, or its run ends at the next node if that has no other
        calls. Idempotent.
        """
        super().give_up(future)
        with self._lock:
            current = self._current
            if (
                current is not None
                and current.calls
                and not any(call in self._calls for call in current.calls)
            ):
                current.run.cancel()

    def exchange(self, make: Callable[[], Executable], weight_bytes: int) -> bool:
        """Make the whole session, in this thread, and have all later runs use it. Blocks until no
        run uses the segments.

        Returns False, and the segments stay, if there is no memory for it or the runner stops.
        Raises the errors of `make`.
        """
        left = available_bytes()
        if left is not None and left < weight_bytes + weight_bytes // 4 + SPARE_BYTES:
            logger.warning(
                "the model stays in segments: its whole session needs %d MiB more for a while, and %d are left",
                (weight_bytes + weight_bytes // 4 + SPARE_BYTES) // MIB,
                left // MIB,
            )
            return False
        with self._lock:
            self._changed.wait_for(lambda: self._num_runs > 0 or self._is_stopping, FIRST_WAIT_S)
            self._changed.wait_for(lambda: self._current is None or self._is_stopping, IDLE_WAIT_S)
            if self._is_stopping:
                return False
        whole = make()
        with self._lock:
            # At once: under load there is no moment without a run.
            before, self._model = self._model, whole
            self._changed.wait_for(lambda: self._current is None or self._current.model is not before)
        before.close()
        return not self._is_stopping

    def stop(self, timeout_s: float = 1.0) -> bool:
        """End every call now (DrainingError), and a run after its node. Returns False if a run has
        not ended after `timeout_s`.
        """
        self.abort(shutting_down())
        with self._lock:
            ended = self._changed.wait_for(lambda: self._current is None, timeout_s)
        if ended:
            self._model.close()
        return ended

    def statistics(self) -> OnnxStatistics:
        with self._lock:
            return OnnxStatistics(
                queued=len(self._calls) + (self._current is not None and not self._current.calls),
                runs_total=self._num_runs,
                calls_total=self._num_calls,
                rows_total=self._num_rows,
                run_s_total=self._run_s,
                is_whole=self._model.name == "whole",
            )

    def _sharing(self, arrays: Arrays) -> tuple[int | None, tuple[Any, ...]]:
        """The call's rows, and the sizes that the calls of a run have in common."""
        if self._max_batch == 1:
            return None, ()
        sizes = {array.shape[0] for array in arrays.values()}
        if len(sizes) != 1 or not 0 < (rows := sizes.pop()) < self._max_batch:
            return None, ()
        return rows, tuple(array.shape[1:] for array in arrays.values())

    def _arrays(self, inputs: Mapping[str, Any]) -> Arrays:
        """Raises `RequestError`."""
        arrays = {value.name: as_input(value, inputs) for value in self.spec.inputs}
        if unknown := [name for name in inputs if name not in arrays]:
            raise RequestError(
                f"the model has no input {str(unknown[0])[:100]!r}",
                param=str(unknown[0])[:100],
                hint=f"It has {', '.join(value.name for value in self.spec.inputs)[:500]}.",
            )
        return arrays

    def _submit(self, arrays: Arrays) -> Future[Arrays]:
        call = _QueuedInputs(arrays, *self._sharing(arrays))
        self._add(call)
        return call.future

    # under the lock

    def _require_room(self) -> None:
        # Between two runs, the next call still waits.
        if len(self._waiting) >= self._max_queued + (self._current is None):
            raise CapacityError(
                f"{len(self._waiting)} calls are waiting, which is the limit of this instance",
                hint="Try again later, or run more instances.",
            )

    def _enqueue(self, call: _QueuedInputs) -> None:
        self._waiting.append(call)
        if self._current is None:  # else the end of that wakes the thread
            self._work_came.notify()

    def _dequeue(self, call: _QueuedInputs) -> None:
        if call in self._waiting:
            self._waiting.remove(call)

    def _all_ended(self) -> bool:
        return not self._calls and self._current is None

    def _interrupt(self, reason: TeneralError) -> None:
        if self._current is not None:
            self._current.run.cancel(reason)

    # the runner's thread

    def _work(self) -> None:
        while (current := self._next()) is not None:
            calls, begin_s = current.calls, time.monotonic()
            try:
                outcomes = self._outputs(calls, current.model, current.run)
            except Exception as error:  # noqa: BLE001 - of the model, its weights, or memory
                self._end_run(current, time.monotonic() - begin_s)
                self._fail_run(error, calls)
            else:
                self._end_run(current, time.monotonic() - begin_s)
                for call, outcome in zip(calls, outcomes, strict=True):
                    if self._take_out([call]):
                        call.future.set_result(outcome)

    def _next(self) -> _Current | None:
        """Wait for calls, and take the oldest with all that can share its run. None: the runner
        stops.
        """
        with self._lock:
            while True:
                if self._is_stopping:
                    return None
                if self._current is None:
                    while self._waiting and not claim(self._waiting[0]):
                        self._waiting.popleft()
                    if self._waiting:
                        break
                self._work_came.wait()
            first = self._waiting.popleft()
            calls, rows = [first], first.rows or 0
            if first.rows is not None:
                for call in list(self._waiting):
                    fits = (
                        call.rows is not None
                        and call.key == first.key
                        and rows + call.rows <= self._max_batch
                    )
                    if fits and claim(call):
                        self._waiting.remove(call)
                        calls.append(call)
                        rows += call.rows or 0
            self._current = _Current(calls, self._model, Run(), sum(call.rows or 1 for call in calls))
            return self._current

    def _outputs(self, calls: list[_QueuedInputs], model: Executable, run: Run) -> list[Arrays]:
        if len(calls) == 1:
            return [model.run(calls[0].inputs, run)]
        rows = [call.rows or 0 for call in calls]
        joined = {name: np.concatenate([call.inputs[name] for call in calls]) for name in calls[0].inputs}
        outputs = model.run(joined, run)
        if any(array.ndim == 0 or array.shape[0] != sum(rows) for array in outputs.values()):
            logger.warning("the model's outputs do not have its batch dimension: calls no longer share runs")
            self._max_batch = 1
            return [model.run(call.inputs, run) for call in calls]
        ends = np.cumsum(rows)[:-1]
        split = {name: np.split(array, ends) for name, array in outputs.items()}
        # Copies: a view would keep the outputs of all callers.
        return [{name: pieces[index].copy() for name, pieces in split.items()} for index in range(len(calls))]

    def _end_run(self, current: _Current, seconds: float) -> None:
        with self._lock:
            self._current = None
            self._num_runs += 1
            self._num_calls += len(current.calls) or 1
            self._num_rows += current.num_rows
            self._run_s += seconds
            if self._waiting:
                self._work_came.notify()
            self._changed.notify_all()

    def _failure(self, error: Exception) -> TeneralError:
        """The error for the callers of a run. Ends the runner if the model has lost its weights."""
        failure = as_teneral_error(error)
        if not isinstance(failure, CancelledError | RequestError) and not self._is_stopping:
            logger.error("a run failed: %s", error, exc_info=error)
        if isinstance(failure, WEIGHTS_LOST):
            self.abort(failure)
        return failure

    def _fail_run(self, error: Exception, calls: list[_QueuedInputs]) -> None:
        if len(calls) > 1 and not isinstance(error, WEIGHTS_LOST):
            with self._lock:
                if not self._is_stopping:
                    for call in reversed(calls):  # alone, so that no caller's input fails another's call
                        if call in self._calls:
                            call.rows = None
                            self._waiting.appendleft(call)
                    return
        failure = self._failure(error)
        fail(self._take_out(calls), failure)
