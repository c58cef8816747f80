"""Threads that run one call after another, so that a short function need not wait for a thread to be started.

A call gets a thread of its own, however many there are: one that is idle, or a new one. Idle ones end after a while.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

IDLE_S = 30.0
MAX_IDLE = 32

Call = Callable[[], object]


class CallThreads:
    """Thread-safe. Daemons: a function that never returns does not keep the process alive."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._idle: list[
            queue.SimpleQueue[Call | None]
        ] = []  # of each idle thread, its next call; the last one first
        self._lock = threading.Lock()
        self._closed = False

    def run(self, call: Call) -> None:
        """Have it called; returns at once. It must not raise."""
        with self._lock:
            calls = self._idle.pop() if self._idle else None
        if calls is None:
            calls = queue.SimpleQueue()
            threading.Thread(target=self._work, args=(calls,), name=self._name, daemon=True).start()
        calls.put(call)

    def close(self) -> None:
        """End the idle threads, and each of the others when it is done. Idempotent."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for calls in idle:
            calls.put(None)

    def _work(self, calls: queue.SimpleQueue[Call | None]) -> None:
        while True:
            try:
                call = calls.get(timeout=IDLE_S)
            except queue.Empty:
                with self._lock:
                    if calls not in self._idle:
                        continue  # somebody has just taken it, and is about to give it a call
                    self._idle.remove(calls)
                return
            if call is None:
                return
            call()
            del call  # what it holds must not wait for the next one
            with self._lock:
                if self._closed or len(self._idle) >= MAX_IDLE:
                    return
                self._idle.append(calls)
