"""The opening of a remote model ahead of its instance: the manifest and the first ranges are
requested before the instance's own modules are imported.

Imports what the first request needs, and nothing of the engine.
"""

from __future__ import annotations

import threading
from importlib import import_module
from typing import TYPE_CHECKING

from ..loader.artifact import open_model
from ..loader.errors import TeneralError
from ..loader.pin import split_pin
from ..loader.sources.http.outage import show_outages
from ..loader.sources.open import scheme_of
from .loading import load_here

if TYPE_CHECKING:
    from ..loader.load.base import AnyLoad
    from ..loader.timeline import Timeline
    from .config import ServeConfig

# Needed between the manifest and the first ranges.
AHEAD = ("blake3", "..loader.format.manifest_json", "..loader.load.prefetch")


class Opening:
    """A model's source, and its load once its manifest is there. The instance that takes it closes
    both.
    """

    def __init__(self, config: ServeConfig, timeline: Timeline) -> None:
        """Request the manifest in a thread; return at once. Raises `UsageError` for an unusable
        address.
        """
        address, digest = split_pin(config.model)
        self.source = open_model(address, config.source_options)
        show_outages(self.source, timeline)
        # As `Instance.full_speed`, which it becomes.
        self.full_speed = threading.Event()
        self._ended = threading.Event()
        self._load: AnyLoad | None = None
        self._error: BaseException | None = None
        thread = threading.Thread(
            target=self._run, args=(digest, config, timeline), name="teneral-manifest", daemon=True
        )
        thread.start()

    def import_ahead(self) -> None:
        """Import what the first ranges need, while the manifest is on its way."""
        for name in AHEAD:
            import_module(name, __package__)

    def result(self) -> AnyLoad:
        """The load. Blocks until the manifest was read; raises the errors of `load_here`."""
        self._ended.wait()
        if self._error is not None:
            raise self._error
        assert self._load is not None
        return self._load

    def _run(self, digest: bytes | None, config: ServeConfig, timeline: Timeline) -> None:
        try:
            begun = load_here(self.source, digest, config, timeline, full_speed=self.full_speed)
            self._load = begun.load
        except BaseException as error:  # noqa: BLE001 - raised where the load is taken
            self._error = error
        self._ended.set()


def open_ahead(config: ServeConfig, timeline: Timeline) -> Opening | None:
    """Open a model in a store ahead; None for a local one, which no round trip delays, and for an
    address that the instance will refuse.
    """
    address, _ = split_pin(config.model)
    if scheme_of(address) in ("", "file"):
        return None
    try:
        return Opening(config, timeline)
    except TeneralError:
        return None
