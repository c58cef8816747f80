"""Reports from the process that loads to the one that it loads for."""

from __future__ import annotations

import pickle
import threading
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from io import BufferedRWPair

    from ..device.sink import SentImage
    from ..errors import TeneralError
    from ..format.manifest import Manifest
    from ..timeline import Span, Timeline
    from .accounting import LoadProgress, LoadStatistics
    from .gates import Gate


class Report(NamedTuple):
    """One report of many: all that is new since the last one."""

    progress: LoadProgress | None = None
    gates: tuple[Gate, ...] = ()
    parts: tuple[int, ...] = ()  # that were asked for, and are there
    has_all_pages: bool = False  # of the weights' memory
    spans: tuple[Span, ...] = ()
    manifest: Manifest | None = None  # in the first report that has one, before any gate
    statistics: LoadStatistics | None = None  # once the load has ended, and in the last report
    error: TeneralError | None = None  # in the last report, when the load failed
    # With the manifest, where the weights are another device's: of the ring in the memory file.
    ring_bytes: int = 0
    image: SentImage | None = None  # that lies in the ring


class GiveBack(NamedTuple):
    """A message the other way: the device is done with the image at that place of the ring, or found a stored one
    `wrong`, which is the sender's then.
    """

    offset_bytes: int
    wrong: bool = False


class Reporter:
    """Writes reports, each with the timeline's spans that are new. Thread-safe."""

    def __init__(self, stream: BufferedRWPair, timeline: Timeline) -> None:
        self._stream = stream
        self.timeline = timeline
        self._num_spans = 0
        self._lock = threading.Lock()

    def send(
        self,
        *,
        progress: LoadProgress | None = None,
        gates: tuple[Gate, ...] = (),
        parts: tuple[int, ...] = (),
        has_all_pages: bool = False,
        manifest: Manifest | None = None,
        statistics: LoadStatistics | None = None,
        error: TeneralError | None = None,
        ring_bytes: int = 0,
        image: SentImage | None = None,
    ) -> None:
        """Raises `OSError` when the receiver is gone."""
        with self._lock:
            spans = tuple(self.timeline.spans()[self._num_spans :])
            self._num_spans += len(spans)
            report = Report(
                progress, gates, parts, has_all_pages, spans, manifest, statistics, error, ring_bytes, image
            )
            pickle.dump(report, self._stream)
            self._stream.flush()
