"""The adapters of requests, held from their submission to their last event, even while they are
loading.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from ...loader.errors import TeneralError
from ..errors import AdapterNotFoundError
from .sequence import AdapterLike, Sequence, error_event
from .speculation import PassLike

WAIT_S = 0.01  # for a layer, between two looks at new and ended requests


class HeldAdapter(AdapterLike, Protocol):
    """An adapter held by a request: `LoadedAdapter` of `adapters/registry.py`."""

    @property
    def failure(self) -> TeneralError | None: ...

    def when_changed(self, callback: Callable[[], None]) -> None: ...


class AdapterSource(Protocol):
    """The part of `AdapterRegistry` of `adapters/registry.py` that is needed here."""

    def acquire(self, name: str) -> Any: ...

    def release(self, adapter: Any) -> None: ...


class RequestAdapters:
    """The adapters of an engine's requests. Thread-safe."""

    def __init__(self, source: AdapterSource | None, changed: threading.Condition) -> None:
        """`changed` is notified when an adapter that a sequence may wait for is loaded."""
        self._source = source
        self._changed = changed

    def acquire(self, name: str) -> HeldAdapter | None:
        """Acquire an adapter; None for '', the base model. Does not block. Raises
        `AdapterNotFoundError`.
        """
        if not name:
            return None
        if self._source is None:
            raise AdapterNotFoundError("this server has no adapters", param="model")
        held: HeldAdapter = self._source.acquire(name)
        return held

    def release(self, adapter: HeldAdapter | None) -> None:
        if adapter is not None and self._source is not None:
            self._source.release(adapter)

    def follow(self, adapter: HeldAdapter | None, sequence: Sequence) -> None:
        """End the sequence if its adapter's load fails, and have it wait no more once it is loaded."""
        if adapter is not None and sequence.waits_for_adapter:
            adapter.when_changed(partial(self._note, adapter, sequence))
            self._note(adapter, sequence)  # its layers may have begun to come before

    def _note(self, adapter: HeldAdapter, sequence: Sequence) -> None:
        if adapter.failure is not None:
            sequence.generation.emit(error_event(adapter.failure))
        with self._changed:
            sequence.waits_for_adapter = not adapter.is_complete
            self._changed.notify_all()


class OvertakenError(Exception):
    """A pass that followed an adapter was given up for another sequence. What it did is done again."""


def followed(under_way: PassLike, is_overtaken: Callable[[], bool]) -> Any:
    """The logits of a pass, taken through the layers as they come. Raises `OvertakenError` when `is_overtaken` while it
    waits for one, and what the model raises.
    """
    while not under_way.is_done:
        while not under_way.can_advance(WAIT_S):
            if is_overtaken():
                raise OvertakenError
        under_way.advance()
    return under_way.logits
