"""Calls that wait for a result, and the queue whose thread computes them.

A call is claimed once, under its queue's lock, and resolved by the thread that claimed it, without
the lock.
"""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any, Generic, Protocol, TypeVar

from ...loader.errors import TeneralError
from ..errors import CancelledError, shutting_down


class Call(Protocol):
    future: Future[Any]
    # True: its owner can no longer cancel it; False: it was cancelled before.
    claimed: bool | None


def claim(call: Call) -> bool:
    """Claim a call for resolving, so that its owner can no longer cancel it. Returns False if it
    was cancelled.

    Call it under the lock: a future may be claimed only once.
    """
    if call.claimed is None:
        call.claimed = call.future.set_running_or_notify_cancel()
    return call.claimed


def fail(calls: Iterable[Call], error: TeneralError) -> None:
    """Resolve claimed calls with this error."""
    for call in calls:
        call.future.set_exception(error)


AnyCall = TypeVar("AnyCall", bound=Call)


class CallQueue(ABC, Generic[AnyCall]):
    """The lifecycle of a queue: its thread, new calls, cancelled calls, drain and abort.

    A subclass chooses the calls that are computed together, in `_work`. Calls before `start` wait
    for it. Thread-safe.
    """

    def __init__(self, thread_name: str) -> None:
        # Daemon: what waits for weights cannot be interrupted, and must not keep the process.
        self._thread = threading.Thread(target=self._work, name=thread_name, daemon=True)
        self._lock = threading.Lock()  # guards all fields below
        self._changed = threading.Condition(self._lock)  # a call has ended
        self._work_came = threading.Condition(self._lock)  # for the queue's thread
        self._calls: dict[AnyCall, None] = {}  # unfinished, in the order of arrival
        self._refusal: TeneralError | None = None  # why new calls are refused
        self._is_stopping = False

    def start(self) -> None:
        """Start the thread, once. It sleeps while idle."""
        self._thread.start()

    def give_up(self, future: Future[Any]) -> None:
        """Abandon this call: what remains of it is not computed. Idempotent."""
        if future.done() or future.cancel():
            return  # it has freed its place
        with self._lock:
            calls = [call for call in self._calls if call.future is future]
        fail(self._take_out(calls), CancelledError("the call was given up"))

    def drain(self, timeout_s: float) -> bool:
        """Refuse new calls, wait for the others, then stop.

        Returns True if all ended by themselves; the rest gets a DrainingError. Does not wait for
        the thread: `stop` does.
        """
        with self._lock:
            self._refusal = self._refusal or shutting_down()
            finished = self._changed.wait_for(self._all_ended, timeout_s)
        self.abort(shutting_down())
        return finished

    def abort(self, failure: TeneralError) -> None:
        """End every call now with this error, which later calls get, too. Does not wait."""
        with self._lock:
            self._refusal = self._refusal or failure
            self._is_stopping = True
            calls = self._taken_out(list(self._calls))
            self._interrupt(failure)
            self._work_came.notify_all()
        fail(calls, failure)

    def _add(self, call: AnyCall) -> None:
        """Queue a call. Raises CapacityError, or the error for which calls are refused."""
        with self._lock:
            self._require_open()
            self._require_room()
            self._calls[call] = None
            self._enqueue(call)
        # A cancelled call frees its place at once.
        call.future.add_done_callback(lambda _: self._take_out([call]))

    def _take_out(self, calls: Iterable[AnyCall]) -> list[AnyCall]:
        """The calls that were still queued and not cancelled: the caller must resolve them."""
        with self._lock:
            return self._taken_out(calls)

    # under the lock

    def _taken_out(self, calls: Iterable[AnyCall]) -> list[AnyCall]:
        present = [call for call in calls if call in self._calls]
        for call in present:
            del self._calls[call]
            self._dequeue(call)
        self._changed.notify_all()
        return [call for call in present if claim(call)]

    def _require_open(self) -> None:
        if self._refusal is not None:
            # Without the previous traceback, to which each raise would add.
            raise self._refusal.with_traceback(None)

    def _all_ended(self) -> bool:
        return not self._calls

    def _interrupt(self, reason: TeneralError) -> None:
        """End what is being computed, where that is possible."""

    @abstractmethod
    def _require_room(self) -> None:
        """Raise CapacityError if the queue is full."""

    @abstractmethod
    def _enqueue(self, call: AnyCall) -> None: ...

    @abstractmethod
    def _dequeue(self, call: AnyCall) -> None:
        """Remove what is left of the call, if anything."""

    # the queue's thread

    @abstractmethod
    def _work(self) -> None:
        """Compute calls until `_is_stopping`."""
