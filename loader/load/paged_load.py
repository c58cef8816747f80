"""A load of a mixture of experts into less memory than it takes: experts come and go, everything else stays."""

from __future__ import annotations

import threading
from collections.abc import Collection
from typing import TYPE_CHECKING

from ..errors import LoadCancelledError, TeneralError
from .accounting import LoadProgress
from .load import WeightLoad, open_cache
from .options import Order
from .pager import MAX_SPANS, Pager, PagerStatistics, Paging
from .parts import Parts

if TYPE_CHECKING:
    from ..format.manifest import Manifest
    from ..sources.base import Source
    from ..timeline import Timeline
    from .options import LoadOptions
    from .prefetch import Prefetch


class PagedLoad(WeightLoad):
    """A `WeightLoad` whose pages are read by `want_pages` and `wait_pages` alone: the gates of `paged_groups`, which
    have some, never open.

    It has ended when all else is there; until it is closed, it goes on to read the source.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        paging: Paging,
        *,
        options: LoadOptions,
        timeline: Timeline | None = None,
        prefetch: Prefetch | None = None,
        full_speed: threading.Event | None = None,
    ) -> None:
        """Take the memory. Nothing is read yet. Raises `InsufficientMemoryError`."""
        options = options._replace(order=Order.EXACT)
        super().__init__(
            source,
            manifest,
            options=options,
            timeline=timeline,
            prefetch=prefetch,
            paging=paging,
            full_speed=full_speed,
        )
        self.paged_groups = paging.groups
        self._pages = paging.pages
        self._pager_cache = open_cache(options, manifest)
        parts = Parts(
            source,
            manifest,
            versions=self._versions,
            cache=self._pager_cache,
            timeline=self._timeline,
            max_spans=MAX_SPANS,
        )
        self._pager = Pager(parts, paging, place=self._place, discard=self._arena.discard_range)

    def start(self) -> None:
        super().start()
        self._pager.start()

    def pages_of(self, group: int) -> tuple[int, ...]:
        """The numbers of a group's pages: its own, or each expert's where it holds all of a layer."""
        return tuple(number for number, page in self._pages.items() if page.group == group)

    def want_pages(self, pages: Collection[int]) -> None:
        """Have these pages in memory until the next call, and what they share with others. Returns at once."""
        self._pager.want(pages)
        if shared := self._shared(pages):
            self.want_parts(shared)

    def wait_pages(self, pages: Collection[int], timeout_s: float | None = None) -> bool:
        """Block until these pages, which are wanted, hold their exact values; False after `timeout_s`.

        Raises `PartsUnavailableError` for what could not be read, or was wrong, and the load's error.
        """
        if shared := self._shared(pages):
            try:
                self.wait_parts(shared, timeout_s)
            except TimeoutError:
                return False
        return self._pager.wait(pages, timeout_s)

    def paging_statistics(self) -> PagerStatistics:
        return self._pager.statistics()

    def progress(self) -> LoadProgress:
        """As `WeightLoad.progress`, of the groups that stay."""
        progress = super().progress()
        return progress._replace(num_groups=progress.num_groups - len(self.paged_groups))

    def check_integrity(self) -> None:
        super().check_integrity()
        self._pager.check_integrity()

    def cancel(self) -> None:
        """As `WeightLoad.cancel`; after the end, threads that wait for groups are woken, too."""
        super().cancel()
        self._pager.stop(LoadCancelledError("the load was cancelled"))

    def close(self) -> None:
        super().close()
        if self._pager.is_busy:
            # A read that has not noticed would go on until it times out.
            self._source.close()
        self._pager.join()
        if self._pager_cache is not None:
            self._pager_cache.finish()

    def join_cache(self, timeout_s: float | None = None) -> bool:
        """As `WeightLoad.join_cache`, after `close`, for the experts' cache, too; each has `timeout_s`."""
        return super().join_cache(timeout_s) and (
            self._pager_cache is None or self._pager_cache.join(timeout_s)
        )

    def _shared(self, pages: Collection[int]) -> set[int]:
        return set().union(*(self._pages[page].shared for page in pages))

    def _fail(self, error: TeneralError) -> bool:
        self._pager.stop(error)
        return super()._fail(error)

    def _prefault(self) -> None:
        """Pages are taken as they are written: most of them are given back."""
