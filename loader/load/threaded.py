"""The common part of loads that run in threads of this process: gates, threads, progress, the end.

A subclass makes the threads' work. It settles parts in `_readiness`, and calls `_end` once all are
settled.
"""

from __future__ import annotations

import math
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Literal, Self

from ..errors import LoadCancelledError, LoadError, TeneralError
from ..format.manifest import Manifest, Part, Tier
from ..memory.arena import as_array
from ..memory.limits import Available, available
from ..timeline import Timeline
from .accounting import LoadProgress, LoadState, LoadStatistics, Meter, Phase, mark_ready
from .gates import Gate, Readiness
from .link import LinkStatistics
from .options import LoadOptions, Order
from .plan import Plan

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt


class ThreadedLoad(ABC):
    """All methods may be called from any thread."""

    place: Literal["host"] = "host"  # of the weights
    reserved_bytes = 0  # of their memory, that had been taken from the system when the load began
    paged_groups: frozenset[int] = frozenset()  # that are in memory only while they are used

    def __init__(
        self,
        manifest: Manifest,
        plan: Plan,
        options: LoadOptions | None,
        timeline: Timeline | None,
        *,
        only_exact: bool = False,
        absent: frozenset[int] = frozenset(),
    ) -> None:
        """With `only_exact`, no tier but the exact one is usable: its gates open for all of them.
        Parts that are `absent` are not in the plan, and the gates of their groups never open.
        """
        self.manifest = manifest
        self._plan = plan
        self._options = options or LoadOptions()
        self._timeline = timeline or Timeline()
        self._stored_bytes = plan.stored_bytes
        self._meter = Meter()
        self._readiness = Readiness(
            len(manifest.groups),
            [(part.group, Tier.REFINE if only_exact else part.tier) for part in manifest.parts],
            absent=absent,
        )
        self._threads: list[threading.Thread] = []
        self._lifecycle = threading.Lock()  # guards starting against cancelling
        self._started_at_s: float | None = None
        self._ended_at_s: float | None = None

    @abstractmethod
    def want_parts(self, numbers: Collection[int]) -> None:
        """Have these parts fetched before all others."""

    @property
    @abstractmethod
    def order(self) -> Order:
        """The tier that comes first; AUTO until that is decided."""

    @abstractmethod
    def cancel(self) -> None:
        """Stop: closed gates raise `LoadCancelledError`. Nothing after the end."""

    @abstractmethod
    def _make_threads(self) -> list[threading.Thread]:
        """The threads, not started, of a load that has something to do."""

    @abstractmethod
    def _rate_bytes_per_s(self) -> float:
        """Of what comes from the store; 0 while unknown."""

    @abstractmethod
    def _figures(self) -> dict[str, Any]:
        """Attributes of the load's span on the timeline, at its end."""

    @abstractmethod
    def _stop(self) -> None:
        """Wake threads that wait for work. Called when the load has failed or was cancelled."""

    def start(self) -> None:
        """Begin to read; return at once. A cancelled load stays so. Raises `RuntimeError` the
        second time.
        """
        with self._lifecycle:
            if self._started_at_s is not None:
                raise RuntimeError("a load can be started once")
            self._started_at_s = time.monotonic()
            if self._readiness.error is not None:
                return
            self._mark_ready(
                (group.index, tier)
                for group in self.manifest.groups
                for tier in (Tier.DRAFT, Tier.REFINE)
                if self._readiness.is_open(group.index, tier)
            )
            if not self._plan.steps:
                self._end()
                return
            self._threads = self._make_threads()
            for thread in self._threads:
                thread.start()

    def wait(self, group: int, tier: Tier = Tier.REFINE, timeout_s: float | None = None) -> None:
        """Return when the group holds that tier's values (`REFINE`: exact ones), at once if it does
        already.

        Raises the load's error, `LoadCancelledError`, or `TimeoutError` after `timeout_s`.
        """
        self._readiness.wait(group, tier, timeout_s)

    def is_ready(self, group: int, tier: Tier = Tier.REFINE) -> bool:
        """True if the group holds that tier's values."""
        return self._readiness.is_open(group, tier)

    def wait_parts(
        self, numbers: Collection[int], timeout_s: float | None = None, *, asks: bool = True
    ) -> None:
        """Return when these parts of the manifest are in their slabs, having asked for them before
        all others, unless the plan's order is to stay.

        Returns at once when they are there already. Raises as `wait` does.
        """
        if not self._readiness.are_there(numbers):
            if asks:
                self.want_parts(numbers)
            self._readiness.wait_parts(numbers, timeout_s)

    @property
    def failure(self) -> TeneralError | None:
        """The error that ended the load early, if one did."""
        return self._readiness.error

    def left_s(self) -> float:
        """How long the load will go on, as the link has been so far, seconds; infinity while that
        is unknown.
        """
        return self.progress().left_s

    def progress(self) -> LoadProgress:
        """How far the load is, now. Costs microseconds."""
        return LoadProgress(
            state=self._state(),
            stored_bytes_total=self._stored_bytes,
            fetched_bytes=self._meter.fetched_bytes,
            parts_decoded=self._meter.parts_decoded,
            num_parts=len(self._plan.steps),
            groups_ready_draft=self._readiness.num_open(Tier.DRAFT),
            groups_exact=self._readiness.num_open(Tier.REFINE),
            num_groups=len(self.manifest.groups),
            order=self.order,
            rate_bytes_per_s=self._rate_bytes_per_s(),
        )

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all threads have ended, however; False when they have not after `timeout_s`."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            alive[0].join(None if timeout_s is None else left_s)
        return True

    def close(self) -> None:
        """Cancel if it is still under way, and wait for the threads. Idempotent. The weights stay."""
        self.cancel()
        self.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _make_thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        # Daemons: a process that wants to exit must not wait for a model that is not needed any
        # more.
        return threading.Thread(target=self._guard, args=(body,), name=name, daemon=True)

    def _guard(self, body: Callable[[], None]) -> None:
        """Runs a thread's body; its error ends the load, or every waiting caller would hang."""
        try:
            body()
        except TeneralError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - a defect fails the load like any other error
            failure = LoadError(f"the load stopped on a defect: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _mark_ready(self, gates: Iterable[Gate]) -> None:
        mark_ready(self._timeline, self.manifest, gates)

    def _open_gates(self, part: Part) -> None:
        """The part's values are in its slab: open the gates that it completes."""
        gates, all_settled = self._readiness.settle(part.index)
        self._mark_ready(gates)
        if all_settled:
            self._end()
        self._readiness.open(gates, (part.index,))

    def _fail(self, error: TeneralError) -> bool:
        """End the load with an error; False when it has ended already."""
        if not self._readiness.fail(error):
            return False
        self._stop()
        if self._started_at_s is not None:
            self._end()
        return True

    def _end(self) -> None:
        """Note the end. Called once, when all is settled or the load has failed."""
        self._ended_at_s = time.monotonic()
        self._timeline.add(
            "fetch",
            "load",
            (self._started_at_s or self._ended_at_s) - self._timeline.started_at,
            self._ended_at_s - self._timeline.started_at,
            state=str(self._state()),
            weight_bytes=self.manifest.weight_bytes,
            **self._figures(),
        )

    def _available(self) -> Available | None:
        """Memory that the load may take; None where the system does not limit it."""
        given_bytes = self._options.available_bytes
        return available() if given_bytes is None else Available(given_bytes, "as the options say")

    def _statistics(self, link: LinkStatistics) -> LoadStatistics:
        """The cost so far, without staging and cache."""
        return LoadStatistics(
            elapsed_s=self._elapsed_s(),
            weight_bytes=self.manifest.weight_bytes,
            stored_bytes=self._stored_bytes,
            unverified_bytes=self._meter.unverified_bytes,
            direct_bytes=self._meter.direct_bytes,
            num_reads=self._meter.num_reads,
            num_refetched_parts=self._meter.num_refetched_parts,
            staging_capacity_bytes=0,
            staging_peak_bytes=0,
            staging_wait_s=0.0,
            link=link,
            fetch=self._meter.phase(Phase.FETCH),
            verify=self._meter.phase(Phase.VERIFY),
            decode=self._meter.phase(Phase.DECODE),
            cache=None,
        )

    def _elapsed_s(self) -> float:
        if self._started_at_s is None:
            return 0.0
        return (self._ended_at_s or time.monotonic()) - self._started_at_s

    def _state(self) -> LoadState:
        if self._readiness.error is not None:
            cancelled = isinstance(self._readiness.error, LoadCancelledError)
            return LoadState.CANCELLED if cancelled else LoadState.FAILED
        if self._ended_at_s is not None:
            return LoadState.EXACT
        return LoadState.IDLE if self._started_at_s is None else LoadState.LOADING


class InPlaceLoad(ThreadedLoad):
    """A load of weights that are used where they lie, in private mappings: there is one tier, and
    nothing to refine, to reorder or to give back. A subclass sets `_slabs` and `_num_threads`.
    """

    _slabs: list[memoryview]  # by group; views of the mappings
    _num_threads = 0  # at most

    def slab(self, group: int) -> npt.NDArray[np.uint8]:
        """The group's stretch of its mapping: (slab_bytes,), never moved. Writing changes this
        process's copy alone.
        """
        return as_array(self._slabs[group])

    def discard(self) -> None:
        """As `WeightLoad.discard`: the memory is not this process's own."""

    def reading(self, group: int) -> AbstractContextManager[None]:
        """As `WeightLoad.reading`."""
        return nullcontext()

    @property
    def refine_wait_s(self) -> float:
        """As `WeightLoad.refine_wait_s`."""
        return 0.0

    @property
    def order(self) -> Order:
        """As `WeightLoad.order`."""
        return Order.EXACT

    def reorder(self, order: Order) -> None:
        """As `WeightLoad.reorder`."""

    def statistics(self) -> LoadStatistics:
        """As `WeightLoad.statistics`. What was mapped counts as read straight into its slab."""
        rate = self._rate_bytes_per_s()
        return self._statistics(
            LinkStatistics(rate, 0.0, 0.0, len(self._threads), self._num_threads, 0, 0, 0)
        )

    def _rate_bytes_per_s(self) -> float:
        elapsed_s = self._elapsed_s()
        return self._meter.fetched_bytes / elapsed_s if elapsed_s else 0.0
