"""An adapter in memory, or on its way: its layers as they arrive, and the requests that wait for them.
It knows no budget and no store.
"""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable

from ...loader.errors import TeneralError
from ..models.adapter import AdapterWeights


class LoadedAdapter:
    """An adapter in memory, or on its way. Made by the registry; an `Adapter` of `models/adapter.py`."""

    def __init__(self, name: str, address: str | None = None) -> None:
        """At `address`; None: below the registry's template."""
        self.name = name
        self.address = address
        self.created_unix_s = int(time.time())
        self.queued_s = time.monotonic()
        self.size_bytes = 0  # that the budget counts for it
        self.num_pins = 0  # requests that hold it
        self.is_listed = True  # found by its name
        self.digest: bytes | None = None  # of its content, once all of it is there
        self.failure: TeneralError | None = None
        self._weights: AdapterWeights | None = None
        self._num_layers = 0  # that are there, from the first one on
        self._changed = threading.Condition()
        self._callbacks: list[Callable[[], None]] = []

    @property
    def weights(self) -> AdapterWeights:
        assert self._weights is not None, "an adapter was used before its first layer was there"
        return self._weights

    @property
    def has_begun(self) -> bool:
        """True if its layers are on their way: a forward pass may follow them."""
        return self._weights is not None

    @property
    def is_complete(self) -> bool:
        return self.digest is not None

    def opens(self, layer: int, timeout_s: float | None) -> bool:
        if self.digest is not None:
            return True
        with self._changed:
            self._changed.wait_for(lambda: self.failure or self._num_layers > layer, timeout_s)
            if self.failure is not None:
                # A copy: its traceback has frames that refer to this adapter's arrays.
                raise copy.copy(self.failure) from self.failure.__cause__
            return self._num_layers > layer

    def when_changed(self, callback: Callable[[], None]) -> None:
        """Have it called when layers begin to come, and when all are there or the load has failed; once for each that
        has happened, from any thread.
        """
        with self._changed:
            is_over = self.is_complete or self.failure is not None
            if not is_over:
                self._callbacks.append(callback)
        if is_over:
            callback()

    # -- for the registry --------------------------------------------------------------------------------------

    def begin(self, weights: AdapterWeights) -> None:
        with self._changed:
            self._weights = weights
        self._tell(is_over=False)

    def note_layer(self, layer: int) -> None:
        with self._changed:
            self._num_layers = layer + 1
            self._changed.notify_all()

    def finish(self, digest: bytes | None, failure: TeneralError | None) -> None:
        with self._changed:
            self.digest, self.failure = digest, failure
            self._changed.notify_all()
        self._tell(is_over=True)

    def _tell(self, *, is_over: bool) -> None:
        with self._changed:
            callbacks = list(self._callbacks)
            if is_over:
                self._callbacks.clear()
        for callback in callbacks:
            callback()
