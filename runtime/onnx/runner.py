"""The calls of an ONNX model: queued, batched, run by one thread, first on segments and then on the whole session.

A call's inputs are checked against the model's before it is queued. Calls that wait share a run where the model has a
batch dimension and their other sizes agree; a call that is alone never waits for others. Once all weights are exact, a
thread makes the whole, prepacked session and exchanges it between two runs; then the segments' sessions and the load's
memory are given back. Invariant: a call is resolved by the thread that takes it out of the queue,
and never with a lock held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ...loader.errors import TeneralError
from ...loader.memory.limits import MIB, available_bytes
from ..errors import WEIGHTS_LOST, CancelledError, CapacityError, DrainingError, ModelError, RequestError
from .sessions import Run
from .spec import NUMPY_TYPES, OnnxSpec, Value

if TYPE_CHECKING:
    Array = np.ndarray[Any, Any]
    Arrays = dict[str, Array]

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 1.0  # of the whole session's thread, for a moment between two runs
SPARE_BYTES = 128 * MIB  # that must be left while the whole session is made


class Executable(Protocol):
    """`SegmentedModel` or `WholeModel`."""

    name: str

    def run(self, inputs: Mapping[str, Array], run: Run) -> Arrays: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class OnnxStatistics:
    """A moment's view; totals count from the start."""

    queued: int  # calls that have not ended
    runs_total: int
    calls_total: int
    rows_total: int  # along the batch dimension; a call without one counts as one
    run_s_total: float
    is_whole: bool  # the prepacked session computes


@dataclass(slots=True, eq=False)
class _Call:
    inputs: Arrays
    rows: int | None  # along the batch dimension; None: it shares no run
    key: tuple[Any, ...]  # calls with equal keys can share a run
    future: Future[Arrays] = field(default_factory=Future)
    claimed: bool | None = None  # True: its owner can cancel it no more; False: it was cancelled before


class OnnxRunner:
    """`start` it once and `stop` it at the end. Thread-safe."""

    def __init__(
        self,
        spec: OnnxSpec,
        model: Executable,
        *,
        labels: tuple[str, ...] = (),
        max_queued: int = 256,
        max_batch: int = 8,
    ) -> None:
        """`max_queued` calls may wait while others run; a run has up to `max_batch` rows, or one call."""
        self.spec = spec
        self.labels = labels
        self._model = model
        self._max_queued = max_queued
        self._max_batch = max_batch if spec.batch_axis is not None else 1
        self._thread: threading.Thread | None = None
        self._changed = threading.Condition()  # guards all that follows
        self._calls: dict[_Call, None] = {}  # in the order in which they came, those that run included
        self._waiting: deque[_Call] = deque()
        self._running: list[_Call] = []
        self._run: Run | None = None
        self._refusal: TeneralError | None = None  # why nothing new is taken
        self._is_stopping = False
        self._num_runs = self._num_calls = self._num_rows = 0
        self._run_s = 0.0

    # for any thread

    def start(self) -> None:
        """Starts the thread, which sleeps while there is nothing to do."""
        with self._changed:
            if self._thread is not None or self._is_stopping:
                raise RuntimeError("a runner can be started once, before it is stopped")
            # Daemon: a run cannot always be interrupted, and must not keep the process.
            self._thread = threading.Thread(target=self._work, name="teneral-onnx", daemon=True)
            self._thread.start()

    def submit(self, inputs: Mapping[str, Any]) -> Future[Arrays]:
        """Resolves to all outputs by name, the caller's own. `inputs` are arrays, or what numpy makes one of; they must
        not change until then. Raises `RequestError` naming the input that does not fit, `CapacityError`,
        `DrainingError`, or the error that cost the model its weights. Then nothing was begun.
        """
        arrays = {value.name: _as_input(value, inputs) for value in self.spec.inputs}
        if unknown := [name for name in inputs if name not in arrays]:
            raise RequestError(
                f"the model has no input {str(unknown[0])[:100]!r}",
                param=str(unknown[0])[:100],
                hint=f"It has {', '.join(value.name for value in self.spec.inputs)[:500]}.",
            )
        call = _Call(arrays, *self._sharing(arrays))
        with self._changed:
            if self._refusal is not None:
                raise self._refusal.with_traceback(
                    None
                )  # without that of the last time, to which each raise adds
            if len(self._waiting) >= self._max_queued:
                raise CapacityError(
                    f"{len(self._waiting)} calls are waiting: that is all that this instance takes",
                    hint="Try again later, or run more instances.",
                )
            self._calls[call] = None
            self._waiting.append(call)
            self._changed.notify_all()
        call.future.add_done_callback(
            lambda _: self._take_out([call])
        )  # a cancelled call gives its place back
        return call.future

    def give_up(self, future: Future[Arrays]) -> None:
        """The call has no caller any more: it never begins, or its run ends at the next node if it has no other.
        Idempotent.
        """
        if future.cancel():
            return
        with self._changed:
            calls = [call for call in self._calls if call.future is future]
        _fail(self._take_out(calls), CancelledError("the call was given up"))
        with self._changed:
            if self._run is not None and not any(call in self._calls for call in self._running):
                self._run.cancel()

    def exchange(self, make: Callable[[], Executable], weight_bytes: int) -> bool:
        """Make the whole session, in this thread, and run everything by it from then on. False: there is no memory
        for it, or the runner stops; the segments stay. Raises what `make` does. Blocks until no run uses the segments.
        """
        left = available_bytes()
        if left is not None and left < weight_bytes + weight_bytes // 4 + SPARE_BYTES:
            logger.warning(
                "the model stays in segments: its whole session needs %d MiB more for a while, and %d are left",
                (weight_bytes + weight_bytes // 4 + SPARE_BYTES) // MIB,
                left // MIB,
            )
            return False
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._is_stopping, IDLE_WAIT_S)
            if self._is_stopping:
                return False
        whole = make()
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._is_stopping)
            before, self._model = self._model, whole
        before.close()
        return not self._is_stopping

    def drain(self, timeout_s: float) -> bool:
        """Takes nothing new, waits for what was taken, then stops. True when all of it ended by itself."""
        with self._changed:
            self._refusal = self._refusal or _shutting_down()
            finished = self._changed.wait_for(lambda: not self._calls, timeout_s)
        self._shut_down(_shutting_down())
        return finished

    def abort(self, failure: TeneralError) -> None:
        """Ends every call now, with this error, which is also what later ones get. Waits for nothing."""
        self._shut_down(failure)

    def stop(self, timeout_s: float = 1.0) -> bool:
        """Ends every call now, and the thread after its node. False when the thread goes on after `timeout_s`."""
        self._shut_down(_shutting_down())
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        ended = self._thread is None or not self._thread.is_alive()
        if ended:
            self._model.close()
        return ended

    def statistics(self) -> OnnxStatistics:
        with self._changed:
            return OnnxStatistics(
                queued=len(self._calls),
                runs_total=self._num_runs,
                calls_total=self._num_calls,
                rows_total=self._num_rows,
                run_s_total=self._run_s,
                is_whole=self._model.name == "whole",
            )

    def _sharing(self, arrays: Arrays) -> tuple[int | None, tuple[Any, ...]]:
        """The call's rows, and what those that can share its run have in common."""
        if self._max_batch == 1:
            return None, ()
        sizes = {array.shape[0] for array in arrays.values()}
        if len(sizes) != 1 or not 0 < (rows := sizes.pop()) < self._max_batch:
            return None, ()
        return rows, tuple(array.shape[1:] for array in arrays.values())

    def _shut_down(self, reason: TeneralError) -> None:
        with self._changed:
            self._refusal = self._refusal or reason
            self._is_stopping = True
            calls = self._take_out(list(self._calls))
            if self._run is not None:
                self._run.cancel()
        _fail(calls, reason)

    # the runner's thread

    def _work(self) -> None:
        while (taken := self._next()) is not None:
            calls, model, run = taken
            begin_s = time.monotonic()
            try:
                outcomes = self._outputs(calls, model, run)
            except Exception as error:  # noqa: BLE001 - of the model, its weights, or memory
                self._end_run(time.monotonic() - begin_s, calls)
                self._fail_run(error, calls)
            else:
                self._end_run(time.monotonic() - begin_s, calls)
                for call, outcome in zip(calls, outcomes, strict=True):
                    if self._take_out([call]):
                        call.future.set_result(outcome)

    def _next(self) -> tuple[list[_Call], Executable, Run] | None:
        """Sleeps until there are calls, and takes the oldest with all that can share its run. None: the end."""
        with self._changed:
            while True:
                if self._is_stopping:
                    return None
                while self._waiting and not _claim(self._waiting[0]):
                    self._waiting.popleft()
                if self._waiting:
                    break
                self._changed.wait()
            first = self._waiting.popleft()
            calls, rows = [first], first.rows or 0
            if first.rows is not None:
                for call in list(self._waiting):
                    fits = (
                        call.rows is not None
                        and call.key == first.key
                        and rows + call.rows <= self._max_batch
                    )
                    if fits and _claim(call):
                        self._waiting.remove(call)
                        calls.append(call)
                        rows += call.rows or 0
            self._running, self._run = calls, Run()
            return calls, self._model, self._run

    def _outputs(self, calls: list[_Call], model: Executable, run: Run) -> list[Arrays]:
        if len(calls) == 1:
            return [model.run(calls[0].inputs, run)]
        rows = [call.rows or 0 for call in calls]
        joined = {name: np.concatenate([call.inputs[name] for call in calls]) for name in calls[0].inputs}
        outputs = model.run(joined, run)
        if any(array.ndim == 0 or array.shape[0] != sum(rows) for array in outputs.values()):
            logger.warning(
                "the model's outputs do not have its batch dimension: calls share no runs any more"
            )
            self._max_batch = 1
            return [model.run(call.inputs, run) for call in calls]
        ends = np.cumsum(rows)[:-1]
        split = {name: np.split(array, ends) for name, array in outputs.items()}
        # Copies: a view would keep the outputs of all callers.
        return [{name: pieces[index].copy() for name, pieces in split.items()} for index in range(len(calls))]

    def _end_run(self, seconds: float, calls: list[_Call]) -> None:
        with self._changed:
            self._running, self._run = [], None
            self._num_runs += 1
            self._num_calls += len(calls)
            self._num_rows += sum(call.rows or 1 for call in calls)
            self._run_s += seconds
            self._changed.notify_all()

    def _fail_run(self, error: Exception, calls: list[_Call]) -> None:
        if isinstance(error, TeneralError):
            failure = error
        else:
            failure = ModelError(f"the model failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
        with self._changed:
            if isinstance(failure, WEIGHTS_LOST):
                self._refusal = self._refusal or failure
                calls = list(self._calls)
            elif len(calls) > 1 and not self._is_stopping:
                for call in reversed(calls):  # alone, so that no caller's input fails another's call
                    if call in self._calls:
                        call.rows = None
                        self._waiting.appendleft(call)
                self._changed.notify_all()
                return
        if not isinstance(failure, CancelledError | RequestError):
            logger.error("a run failed: %s", error, exc_info=error)
        _fail(self._take_out(calls), failure)

    def _take_out(self, calls: list[_Call]) -> list[_Call]:
        """Those of the calls that were not resolved yet and not cancelled: they are the taker's to resolve."""
        with self._changed:
            present = [call for call in calls if call in self._calls]
            for call in present:
                del self._calls[call]
                if call in self._waiting:
                    self._waiting.remove(call)
            self._changed.notify_all()
            return [call for call in present if _claim(call)]


def _as_input(value: Value, inputs: Mapping[str, Any]) -> Array:
    """The input as an array of the model's type. Raises `RequestError` for one that does not fit."""
    name = value.name
    if name not in inputs:
        raise RequestError(f"the input {name!r} is missing", param=name)
    wanted = np.dtype(NUMPY_TYPES[value.type])
    given = inputs[name]
    try:
        array = np.asarray(given)
    except ValueError:
        raise RequestError(f"the input {name!r} is not evenly nested", param=name) from None
    if array.dtype != wanted:
        array = _converted(name, array, wanted, exact=isinstance(given, np.ndarray))
    shape = value.shape
    if shape is not None:
        fits = len(shape) == array.ndim and all(
            not isinstance(size, int) or size == have for size, have in zip(shape, array.shape, strict=True)
        )
        if not fits:
            shown = ", ".join("?" if size is None else str(size) for size in shape)
            raise RequestError(
                f"the input {name!r} has the shape {list(array.shape)}, but the model takes [{shown}]",
                param=name,
            )
    return np.ascontiguousarray(array)


def _converted(name: str, array: Array, wanted: np.dtype[Any], *, exact: bool) -> Array:
    """Python's numbers as the model's type, where it holds them; of arrays only what loses nothing."""
    detail = f"the input {name!r} is {array.dtype}, but the model takes {wanted}"
    if wanted.kind == "O":
        if array.dtype.kind not in "UO" or not all(isinstance(item, str) for item in array.flat):
            raise RequestError(detail, param=name)
        return array.astype(object)
    if array.size == 0 and not exact:
        return array.astype(wanted)
    if array.dtype.kind not in "biuf" or (wanted.kind == "b") != (array.dtype.kind == "b"):
        raise RequestError(detail, param=name)
    if exact and not np.can_cast(array.dtype, wanted, "safe"):
        raise RequestError(detail, param=name, hint=f"Convert it: array.astype({wanted.name!r}).")
    if wanted.kind in "iu":
        limits = np.iinfo(wanted)
        if array.dtype.kind == "f" or array.min() < limits.min or array.max() > limits.max:
            raise RequestError(f"{detail}, from {limits.min} to {limits.max}", param=name)
    with np.errstate(over="ignore"):
        made = array.astype(wanted)
    if wanted.kind == "f" and not np.isfinite(made).all() and np.isfinite(array).all():
        raise RequestError(f"a number in the input {name!r} is too large for {wanted}", param=name)
    return made


def _claim(call: _Call) -> bool:
    """True where the call is to be resolved, which its owner can then prevent no more. Call it under the lock."""
    if call.claimed is None:
        call.claimed = call.future.set_running_or_notify_cancel()
    return call.claimed


def _fail(calls: list[_Call], error: TeneralError) -> None:
    for call in calls:
        call.future.set_exception(error)


def _shutting_down() -> DrainingError:
    return DrainingError("the instance is shutting down", hint="Ask another instance.")
