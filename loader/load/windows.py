"""Successive loads of a model's groups in bounded memory, for callers that consume each group.

The groups are cut into windows, runs of consecutive groups, each a load of its own (`load.py`).
While the caller takes one window, the next is read. Invariant: groups come in forward order, and
verified.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Self

from ..format.manifest import Manifest
from ..sources.base import Source
from ..timeline import Timeline
from .load import WeightLoad
from .options import MIB, LoadOptions
from .parts import BlobVersions

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

DEFAULT_WINDOW_BYTES = 512 * MIB  # seconds of a fast link: starting anew costs little in comparison


class SuccessiveStatistics(NamedTuple):
    """The cost of the windows read so far, in bytes and seconds."""

    elapsed_s: float  # since the first window was begun
    weight_bytes: int
    stored_bytes: int
    unverified_bytes: int  # of these: without digests
    cached_bytes: int  # of these: they came from this node's cache
    num_windows: int
    troubles: tuple[str, ...]  # of the node's cache, for people


def cut_windows(manifest: Manifest, groups: Sequence[int], max_bytes: int) -> list[tuple[int, ...]]:
    """Consecutive groups in runs that take at most `max_bytes` of memory, or have one group
    that takes more.
    """
    windows: list[list[int]] = []
    room_bytes = 0
    for group in groups:
        size_bytes = manifest.groups[group].slab_bytes
        if not windows or size_bytes > room_bytes:
            windows.append([])
            room_bytes = max_bytes
        windows[-1].append(group)
        room_bytes -= size_bytes
    return [tuple(window) for window in windows]


class SuccessiveLoad:
    """Reads `groups`, numbers in forward order (all by default), window by window. For one thread.

    The source stays the caller's to close.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        *,
        groups: Sequence[int] | None = None,
        window_bytes: int = DEFAULT_WINDOW_BYTES,
        options: LoadOptions | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        self._source = source
        self._manifest = manifest
        self._options = options or LoadOptions()
        self._timeline = timeline or Timeline()
        self._versions = BlobVersions(manifest, source.url)
        chosen = range(len(manifest.groups)) if groups is None else groups
        self._waiting = cut_windows(manifest, chosen, window_bytes)
        self._windows: list[_Window] = []  # being read or taken: two at most
        self._done = SuccessiveStatistics(0.0, 0, 0, 0, 0, 0, ())
        self._begun_s: float | None = None

    def start(self) -> None:
        """Begin to read the first window ahead. Raises `InsufficientMemoryError`."""
        if not self._windows:
            self._begin_window()

    def slabs(self) -> Iterator[tuple[int, npt.NDArray[np.uint8]]]:
        """Each group's number and memory, (slab_bytes,), whose values are exact; tensors lie in it
        by their offsets.

        The memory is the window's, and freed with the last view of it. So memory is taken for two
        windows, and for what the caller still holds of earlier ones. Blocks until the group is
        there. Raises the load's error, naming the part; `InsufficientMemoryError`, and the source's
        errors.
        """
        self.start()
        while self._windows:
            window = self._windows[0]
            for group in window.groups:
                # What is on its way of this window is little by now, and the link must not idle
                # between two.
                if len(self._windows) == 1 and (window.is_there() or group == window.groups[-1]):
                    self._begin_window()
                window.load.wait(group)
                yield group, window.load.slab(group)
            self._end_window()

    def statistics(self) -> SuccessiveStatistics:
        """The statistics of the windows taken so far. `elapsed_s` runs until now."""
        elapsed_s = 0.0 if self._begun_s is None else time.monotonic() - self._begun_s
        return self._done._replace(elapsed_s=elapsed_s)

    def close(self) -> None:
        """Stop reading. Idempotent. Memory that the caller holds stays valid."""
        for window in self._windows:
            window.load.close()
        self._windows.clear()
        self._waiting.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin_window(self) -> None:
        if not self._waiting:
            return
        now_s = time.monotonic()
        self._begun_s = self._begun_s or now_s
        groups = self._waiting.pop(0)
        # A timeline of its own, because to it every group that is not its business looks ready.
        load = WeightLoad(
            self._source,
            self._manifest,
            groups=frozenset(groups),
            options=self._options,
            timeline=Timeline(),
            versions=self._versions,
        )
        self._windows.append(_Window(groups, load, now_s))
        load.start()

    def _end_window(self) -> None:
        window = self._windows.pop(0)
        window.load.wait_checks()
        window.load.join()  # all is there: its threads are ending
        window.load.close()
        statistics, done, cache = window.load.statistics(), self._done, window.load.statistics().cache
        weight_bytes = sum(self._manifest.groups[group].slab_bytes for group in window.groups)
        self._done = done._replace(
            weight_bytes=done.weight_bytes + weight_bytes,
            stored_bytes=done.stored_bytes + statistics.stored_bytes,
            unverified_bytes=done.unverified_bytes + statistics.unverified_bytes,
            cached_bytes=done.cached_bytes + (cache.read_bytes if cache is not None else 0),
            num_windows=done.num_windows + 1,
            troubles=tuple(dict.fromkeys(done.troubles + (cache.troubles if cache is not None else ()))),
        )
        names = self._manifest.groups
        begun_s = window.begun_s - self._timeline.started_at
        self._timeline.add(
            "fetch",
            f"{names[window.groups[0]].name} … {names[window.groups[-1]].name}",
            begun_s,
            begun_s + statistics.elapsed_s,
            stored_bytes=statistics.stored_bytes,
            weight_bytes=weight_bytes,
        )


class _Window(NamedTuple):
    groups: tuple[int, ...]
    load: WeightLoad
    begun_s: float

    def is_there(self) -> bool:
        return all(self.load.is_ready(group) for group in self.groups)
