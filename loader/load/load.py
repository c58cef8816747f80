"""One load of one model: bytes from a source become verified values in a target, group by group.

    source → fetch threads → staging → decode threads → target → gates
              (workers.py)  (staging.py)  (workers.py) (targets/)  (gates.py)
             └──── what comes next: plan.py, handed out by queue.py ────┘

Invariant: a gate opens only over values whose every stored byte was verified. The slabs stand at
their final addresses from construction on, so that tensors over them can be made first and filled
later. It does not know models, torch or groups' meaning.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Literal, Self

from ..errors import LoadCancelledError, LoadError, TeneralError
from ..format.manifest import NUMPY_DTYPES, Manifest, Tier
from ..memory.arena import as_array
from ..memory.staging import Staging
from ..process.cpu import available_cores
from ..timeline import Timeline
from .accounting import LoadProgress, LoadState, LoadStatistics, Meter, mark_ready
from .gates import Gate, Readiness
from .link import MIN_RANGE_BYTES, LinkTuner
from .options import LoadOptions, Order
from .parts import BlobVersions, Parts, RangeSource, open_cache
from .plan import Plan, Step, plan_load
from .policy import OrderChoice
from .queue import WorkQueue
from .room import check_room
from .targets.base import HostTarget, Target
from .workers import Fetcher, Pacing, PartDecoder

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..cache.part_cache import PartCache
    from .experts import Pager
    from .pages import Paging
    from .prefetch import Prefetch
    from .resident import ResidentBase

# With more, a load onto a device leaves two of them to its server, which imports torch and places meanwhile.
MIN_CORES_TO_SPARE = 4
COLLAPSE_DELAY_S = 2.0  # after the end: the first answers need the cores


class WeightLoad:
    """A load in threads of this process (`base.HostLoad`).

    The slabs live as long as their views: neither `close` nor dropping the load frees memory that a
    view still shows. The source stays the caller's to close, after the load has ended; only a load
    that is cancelled while reads are on their way closes it itself, since nothing else makes them
    return.
    """

    place: Literal["host"] = "host"

    def __init__(
        self,
        source: RangeSource,
        manifest: Manifest,
        *,
        target: Target | None = None,
        options: LoadOptions | None = None,
        timeline: Timeline | None = None,
        prefetch: Prefetch | None = None,
        versions: BlobVersions | None = None,
        base: ResidentBase | None = None,
        paging: Paging | None = None,
        groups: frozenset[int] | None = None,
        full_speed: threading.Event | None = None,
    ) -> None:
        """Take the target's memory, by default this process's. Nothing is read yet.

        With `base`, the manifest is one that it has joined. The pages of `paging` are read by `experts` alone, and of
        `groups`, where they are given, these alone. What was read ahead, in `prefetch`, is not read again. Loads that
        share `versions` read the same version of each blob. Until `full_speed` is set, decoding leaves two cores alone.
        Raises `InsufficientMemoryError` when it would not fit, and the target's errors.
        """
        self.manifest = manifest
        self._options = options = options or LoadOptions()
        self._timeline = timeline or Timeline()
        self._source = source
        self._target = target = target or HostTarget(manifest, base=base, paging=paging, groups=groups)
        self._base, self._full_speed, self._prefetch = base, full_speed, prefetch
        self._versions = versions or BlobVersions(manifest, source.url)
        absent = frozenset[int]() if paging is None else paging.parts
        if groups is not None:
            absent = frozenset(part.index for part in manifest.parts if part.group not in groups)
        self.paged_groups: frozenset[int] = frozenset() if paging is None else paging.groups
        self._plan = plan = (
            Plan(())
            if target.is_full
            else plan_load(
                manifest, options.order, on_demand=options.on_demand, direct=target.is_direct, without=absent
            )
        )
        self._stored_bytes = plan.stored_bytes
        self._meter = Meter()
        # Where the base drafts, no tier but the exact one is usable: its gates open for all of them.
        tiers = [(part.group, part.tier if base is None else Tier.REFINE) for part in manifest.parts]
        may_check = options.verify_files and target.has_places and not absent
        num_checks = len(manifest.stated_blobs) if may_check else 0
        self._readiness = Readiness(
            len(manifest.groups), tiers, absent=absent, is_full=target.is_full, num_checks=num_checks
        )
        limits = check_room(target, plan, options, num_decoders=self._num_decoders, source_url=source.url)
        self._staging_bytes = limits.buffer_bytes
        self.reserved_bytes = target.reserved_bytes
        target.take_memory()
        self._staging = Staging(self._staging_bytes, memory=target.staging)
        self._work = WorkQueue(plan, self._staging, target.slabs, LinkTuner(limits), target.room_bytes)
        self._cache = open_cache(options, manifest)
        self._order = OrderChoice(options, manifest, self._work, self._meter, self._timeline)
        self._steps = {step.part.index: step.number for step in plan.steps}
        self.experts: Pager | None = None if paging is None else self._make_experts(paging)
        self._threads: list[threading.Thread] = []
        self._num_fetchers = 0
        self._lifecycle = threading.Lock()  # guards starting against cancelling
        self._started_at_s: float | None = None
        self._ended_at_s: float | None = None
        self._closed = threading.Event()

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
            self._threads = self._make_threads()
            for thread in self._threads:
                thread.start()
        if self.experts is not None:
            self.experts.start()

    # ---- gates ----

    def wait(self, group: int, tier: Tier = Tier.REFINE, timeout_s: float | None = None) -> None:
        self._readiness.wait(group, tier, timeout_s)

    def is_ready(self, group: int, tier: Tier = Tier.REFINE) -> bool:
        return self._readiness.is_open(group, tier)

    def wait_parts(
        self, numbers: Collection[int], timeout_s: float | None = None, *, asks: bool = True
    ) -> None:
        if not self._readiness.are_there(numbers):
            if asks:
                self.want_parts(numbers)
            self._readiness.wait_parts(numbers, timeout_s)

    def wait_checks(self, timeout_s: float | None = None) -> None:
        self._readiness.wait_checks(timeout_s)

    def want_parts(self, numbers: Collection[int]) -> None:
        """`wait_for_change` tells when one of them is there."""
        self._work.promote(self._steps[number] for number in numbers if number in self._steps)
        self._readiness.watch(numbers)

    def wanted_parts(self) -> frozenset[int]:
        """Those that `want_parts` asked for and that are there."""
        return self._readiness.watched()

    def wait_for_change(self, seen: int, timeout_s: float) -> int:
        """Return once a gate has opened, a wanted part is there, or the load has failed since `seen`, the
        number that this gave last, or after `timeout_s`.
        """
        return self._readiness.wait_for_change(seen, timeout_s)

    @property
    def failure(self) -> TeneralError | None:
        return self._readiness.error

    # ---- values ----

    @property
    def has_all_pages(self) -> bool:
        """True if the system has given all of the weights' memory: mapping it elsewhere is cheap."""
        return self._target.has_all_pages

    def slab(self, group: int) -> npt.NDArray[np.uint8]:
        return as_array(self._target.slabs[group])

    def discard(self) -> None:
        self._target.discard()

    def array(self, name: str) -> npt.NDArray[np.generic]:
        """A tensor in its shape, as a view of its slab. Raises `KeyError` for an unknown name.

        bfloat16 comes as uint16 bit patterns. Dtypes that numpy lacks come as uint8: 8-bit ones in
        their shape, packed ones flat.
        """
        tensor = self.manifest.by_name[name]
        data = self.slab(tensor.group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        array = data.view(NUMPY_DTYPES.get(tensor.dtype, "u1"))
        return array.reshape(tensor.shape) if array.size == math.prod(tensor.shape) else array

    def reading(self, group: int) -> AbstractContextManager[None]:
        return self._target.reading(group)

    @property
    def refine_wait_s(self) -> float:
        return self._target.refine_wait_s

    # ---- the course of the load ----

    @property
    def order(self) -> Order:
        self._choose_order()
        return self._order.value

    def reorder(self, order: Order) -> None:
        self._order.settle(order)

    def left_s(self) -> float:
        return self.progress().left_s

    def progress(self) -> LoadProgress:
        return LoadProgress(
            state=self._state(),
            stored_bytes_total=self._stored_bytes,
            fetched_bytes=self._meter.fetched_bytes,
            parts_decoded=self._meter.parts_decoded,
            num_parts=len(self._plan.steps),
            groups_ready_draft=self._readiness.num_open(Tier.DRAFT),
            groups_exact=self._readiness.num_open(Tier.REFINE),
            num_groups=len(self.manifest.groups) - len(self.paged_groups),
            order=self.order,
            rate_bytes_per_s=self._work.rate_bytes_per_s,
            unchecked_files=self._readiness.num_checks,
        )

    def statistics(self) -> LoadStatistics:
        elapsed_s = 0.0
        if self._started_at_s is not None:
            elapsed_s = (self._ended_at_s or time.monotonic()) - self._started_at_s
        return LoadStatistics(
            elapsed_s=elapsed_s,
            weight_bytes=self.manifest.weight_bytes,
            stored_bytes=self._stored_bytes,
            staging_capacity_bytes=self._staging_bytes,
            staging_peak_bytes=self._staging.peak_bytes,
            staging_wait_s=self._work.memory_wait_s,
            link=self._work.link_statistics(),
            cache=None if self._cache is None else self._cache.statistics(),
            **self._meter.counts(),
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the load's own books do not agree."""
        self._work.check_integrity()
        if self.experts is not None:
            self.experts.check_integrity()

    def cancel(self) -> None:
        error = LoadCancelledError("the load was cancelled")
        with self._lifecycle:
            if self._fail(error) and self._threads:
                self._source.close()
        if self.experts is not None:  # after the end, too
            self.experts.stop(error)

    def join(self, timeout_s: float | None = None) -> bool:
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        while alive := [thread for thread in self._threads if thread.is_alive()]:
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                return False
            alive[0].join(None if timeout_s is None else left_s)
        return True

    def join_cache(self, timeout_s: float | None = None) -> bool:
        """Wait until the node's cache holds what it takes; False after `timeout_s`. For a process that is about to end:
        after the load's end, or where there are experts, after `close`.
        """
        caches = [self._cache, None if self.experts is None else self.experts.cache]
        return all(cache is None or cache.join(timeout_s) for cache in caches)

    def close(self) -> None:
        self._closed.set()
        self.cancel()
        is_paging = self.experts is not None and self.experts.is_busy
        if is_paging or (self._readiness.error is not None and not self.join(0)):
            # It failed, and reads that have not noticed would go on until they time out.
            self._source.close()
        self.join()
        if self.experts is not None:
            self.experts.close()
        self._target.close()
        vars(self).pop("_fetch", None)  # refers to the load, whose memory would wait for the collector

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- threads ----

    @property
    def _num_decoders(self) -> int:
        cores = available_cores()
        if not self._target.is_used_here and cores > MIN_CORES_TO_SPARE:
            cores -= 2
        return self._options.decode_threads or cores

    def _make_experts(self, paging: Paging) -> Pager:
        from .experts import MAX_SPANS, Pager  # few servers have less memory than their model takes

        assert isinstance(self._target, HostTarget)
        cache = open_cache(self._options, self.manifest)
        parts = self._make_parts(cache, max_spans=MAX_SPANS)
        return Pager(
            parts, paging, self._target, want_parts=self.want_parts, wait_parts=self.wait_parts, cache=cache
        )

    def _make_parts(self, cache: PartCache | None, **named: Any) -> Parts:
        return Parts(
            self._source,
            self.manifest,
            versions=self._versions,
            cache=cache,
            timeline=self._timeline,
            **named,
        )

    def _make_threads(self) -> list[threading.Thread]:
        threads: list[threading.Thread] = []
        # Cores that neither the server's own start nor its tokenizer's needs.
        num_spare = available_cores() - 2
        enough_bytes = min(self._stored_bytes // 4, self._staging_bytes // 2)
        pacing = Pacing(
            self._full_speed,
            drafts_on_base=self._base is not None,
            has_enough=lambda: self._meter.fetched_bytes >= enough_bytes,
            is_over=self._is_over,
        )
        if self._plan.steps:
            parts = self._make_parts(self._cache, prefetch=self._prefetch, meter=self._meter)
            self._fetch = Fetcher(
                parts,
                self._plan,
                self._work,
                meter=self._meter,
                timeline=self._timeline,
                settle=self._settle,
                between=self._between_reads,
            ).run
            decoder = PartDecoder(parts, self._work, self._target, settle=self._settle, fail=self._fail)
            self._target.attach(decoder)
            num_ranges = max(len(self._plan.steps), -(-self._stored_bytes // MIN_RANGE_BYTES))
            self._num_fetchers = min(self._work.connections, num_ranges)
            threads += self._make_several("fetch", [self._fetch] * self._num_fetchers)
            num_staged = sum(step.slab_offset_bytes is None for step in self._plan.steps)
            num_decoders = min(self._num_decoders, num_staged)
            paced = [pacing.paced(decoder.run, is_spare=each < num_spare) for each in range(num_decoders)]
            threads += self._make_several("decode", paced)
            if self._readiness.num_checks:
                from .file_checks import FileChecks  # few stores state digests

                checks = FileChecks(
                    self, parts, self._target, self._settle_check, self._meter, self._timeline
                )
                threads += self._make_several("check", [checks.run] * checks.num_threads)
        prefault = pacing.paced(lambda: self._target.prefault(self._is_over), is_spare=num_spare > 0)
        threads.append(self._make_thread("teneral-prefault", prefault))
        return threads

    def _make_several(self, name: str, bodies: Iterable[Callable[[], None]]) -> list[threading.Thread]:
        return [self._make_thread(f"teneral-{name}-{each}", body) for each, body in enumerate(bodies)]

    def _make_thread(self, name: str, body: Callable[[], None]) -> threading.Thread:
        # Daemons: a process that wants to exit must not wait for a model that nothing needs.
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

    def _is_over(self) -> bool:
        """True if its threads have nothing to do any more. A full target's enters pages after the end."""
        return self._closed.is_set() if self._target.is_full else self._ended_at_s is not None

    def _between_reads(self) -> None:
        self._add_fetchers()
        self._choose_order()

    def _choose_order(self) -> None:
        if self._started_at_s is not None and self._order.value is Order.AUTO:
            self._order.choose(time.monotonic() - self._started_at_s, self._cache)

    def _add_fetchers(self) -> None:
        """Start the fetchers that should read by now. Surplus threads idle."""
        if self._num_fetchers >= self._work.connections:
            return
        with self._lifecycle:
            first, self._num_fetchers = self._num_fetchers, max(self._num_fetchers, self._work.connections)
            with suppress(RuntimeError):  # the system has no more threads: those that there are go on
                for number in range(first, self._num_fetchers):
                    thread = self._make_thread(f"teneral-fetch-{number}", self._fetch)
                    thread.start()
                    self._threads.append(thread)

    # ---- the end of a part, and of the load ----

    def _settle(self, step: Step) -> None:
        """The step's values are in the target: return its memory, count it, open the gates it
        completes.
        """
        part = step.part
        self._work.finish_step(step)
        self._meter.settled(
            part.size_bytes, verified=part.digest is not None, direct=step.slab_offset_bytes is not None
        )
        gates, all_settled = self._readiness.settle(part.index)
        self._mark_ready(gates)
        if all_settled:
            self._end()
        self._readiness.open(gates, (part.index,))

    def _settle_check(self) -> None:
        if self._readiness.settle_check():
            self._end()

    def _mark_ready(self, gates: Iterable[Gate]) -> None:
        if self._target.marks_gates:
            mark_ready(self._timeline, self.manifest, gates)

    def _fail(self, error: TeneralError) -> bool:
        """End the load with an error; False when it has ended already."""
        if self.experts is not None:
            self.experts.stop(error)
        if not self._readiness.fail(error):
            return False
        self._work.stop()
        self._target.stop()
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
            stored_bytes=self._stored_bytes,
            link=self._work.link_statistics()._asdict(),
            **self._target.figures(),
        )
        if self._cache is not None:
            self._cache.finish()
        if self._readiness.error is None and self._target.can_collapse:
            with suppress(RuntimeError):  # the system has no more threads: small pages stay
                threading.Thread(target=self._collapse, name="teneral-huge-pages", daemon=True).start()

    def _collapse(self) -> None:
        """The weights' small pages become huge ones, once the first answers are on their way."""
        if not self._closed.wait(COLLAPSE_DELAY_S):
            self._target.collapse(self._closed.is_set)

    def _state(self) -> LoadState:
        if self._readiness.error is not None:
            cancelled = isinstance(self._readiness.error, LoadCancelledError)
            return LoadState.CANCELLED if cancelled else LoadState.FAILED
        if self._ended_at_s is not None:
            return LoadState.EXACT
        return LoadState.IDLE if self._started_at_s is None else LoadState.LOADING
