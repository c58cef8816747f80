"""The first step of a start: the manifest is requested and the load started, in a thread of their own, before an
instance's other modules are imported.

Imports what the first request needs, and nothing of the engine.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING

from ...loader.artifact import open_model
from ...loader.pin import split_pin
from ...loader.sources.base import Remote
from .loading import load_here

if TYPE_CHECKING:
    from ...loader.load.resident import ResidentBase
    from ...loader.sources.base import Source
    from ...loader.timeline import Timeline
    from ..config import ServeConfig
    from .helpers import LaunchedHelpers
    from .loading import StartedLoad

# Needed between a remote manifest and the first ranges.
AHEAD = ("blake3", "...loader.format.manifest_json", "...loader.load.prefetch")


class Opening:
    """A model's source, and its load once the manifest is there. The instance that takes it closes both."""

    def __init__(
        self,
        config: ServeConfig,
        timeline: Timeline,
        *,
        source: Source | None = None,
        launched: LaunchedHelpers | None = None,
        base: ResidentBase | None = None,
        full_speed: threading.Event | None = None,
    ) -> None:
        """Start the thread; return at once. The load uses the memory of `launched`, if it has some;
        the others are as `Startup` has them. Raises nothing: `take` does.
        """
        self.full_speed = full_speed or threading.Event()
        self.source = source
        self._config = config
        self._timeline = timeline
        self._memory = (launched and launched.reserve, launched and launched.shared, base)
        self._ended = threading.Event()
        self._started: StartedLoad | None = None
        self._error: BaseException | None = None
        self._address, self._digest = split_pin(config.model)
        try:
            if self.source is None:
                self.source = open_model(self._address, config.source_options, timeline=timeline)
        except Exception as error:  # noqa: BLE001 - raised by `take`
            self._error = error
            self._ended.set()
            return
        threading.Thread(target=self._run, args=(self.source,), name="teneral-manifest", daemon=True).start()

    def import_ahead(self) -> None:
        """Import what the first ranges of a store need, while the manifest is on its way."""
        if isinstance(self.source, Remote):
            for name in AHEAD:
                import_module(name, __package__)

    def take(self) -> StartedLoad:
        """The load, which is the caller's from now on. Blocks until the manifest was read; raises the
        errors of `load_here`, and `UsageError` for an unusable address.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error
        started, self._started = self._started, None  # holds none of its memory any more
        assert started is not None
        return started

    def _run(self, source: Source) -> None:
        reserve, shared, base = self._memory
        self._memory = (None, None, None)
        try:
            self._started = load_here(
                source,
                self._digest,
                self._config,
                self._timeline,
                reserve=reserve,
                base=base,
                full_speed=self.full_speed,
                shared=shared,
            )
            if shared is not None and self._started.shared is None:
                shared.close()  # else its memory would stay as long as this process does
        except BaseException as error:  # noqa: BLE001 - raised by `take`
            self._error = error
        self._ended.set()
