"""One load of one model: bytes from a source become verified values in memory, group by group.

    source → fetch threads → staging → decode threads → slabs → gates
              (workers.py)  (staging.py)  (workers.py)  (arena.py)  (gates.py)
             └──── what comes next: plan.py, handed out by queue.py ────┘

Invariant: a gate opens only over values whose every stored byte was verified. The slabs stand at
their final addresses from construction on, so that tensors over them can be made first and filled
later. It does not know models, torch or groups' meaning.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ..errors import LoadCancelledError
from ..format.manifest import Manifest, Segment, Tier
from ..memory.arena import Arena, Reserve, as_array
from ..memory.limits import MIB, check_fits, taken_bytes
from ..memory.refine_locks import RefineLocks
from ..memory.staging import DEFAULT_BYTES, Staging, staging_bytes
from ..process.cpu import available_cores
from ..sources.base import Source
from ..timeline import Timeline
from .accounting import LoadStatistics
from .gates import Gate
from .link import MIN_RANGE_BYTES, MIN_READS, LinkTuner, ReadLimits
from .options import LoadOptions, Order
from .parts import BlobVersions, Parts
from .plan import NO_REFINE_TIER, Sizes, Step, plan_load, predict
from .queue import WorkQueue
from .threaded import ThreadedLoad
from .workers import Decoder, Fetcher

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from ..cache.part_cache import PartCache
    from ..device.sink import ImageSink
    from ..format.fill import Scratch
    from .pager import Paging
    from .prefetch import Prefetch
    from .resident import ResidentBase

# With more, a load onto a device leaves two of them to its server, which imports torch and places meanwhile.
MIN_CORES_TO_SPARE = 4
HEAD_START_S = 0.15  # of a base that drafts, before its fine-tune is decoded
ENDED_POLL_S = 0.05
COLLAPSE_DELAY_S = 2.0  # after the end: the first answers need the cores
MIN_HUGE_BYTES = 64 << 20  # of weights: fewer stay in caches, or take no time
MIN_WATCHED_S, MAX_WATCHED_S = 0.2, 1.0  # of a load, before it is decided which tier comes first

# Arrays that numpy has a dtype for. bfloat16 shows as its bit patterns; everything else as bytes.
NUMPY_DTYPES: dict[str, str] = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "BF16": "<u2",
}  # fmt: skip


class WeightLoad(ThreadedLoad):
    """Loads a manifest's weights. All methods may be called from any thread.

    The slabs live as long as their views: neither `close` nor dropping the load frees memory that a
    view still shows. The source stays the caller's to close, after the load has ended; only a load
    that is cancelled while reads are on their way closes it itself, since nothing else makes them
    return.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        *,
        options: LoadOptions | None = None,
        timeline: Timeline | None = None,
        shared_fd: int | None = None,
        reserve: Reserve | None = None,
        images: ImageSink | None = None,
        prefetch: Prefetch | None = None,
        versions: BlobVersions | None = None,
        base: ResidentBase | None = None,
        paging: Paging | None = None,
        full_speed: threading.Event | None = None,
    ) -> None:
        """Take the memory, in the memory file `shared_fd` if there is one, or that of `reserve`.
        Nothing is read yet. With `base`, the manifest is one that it has joined. The pages of
        `paging` are `PagedLoad`'s. Until `full_speed` is set, where it is given, decoding leaves two
        cores to others.

        With `images`, the weights are another device's: parts are delivered there, a gate opens
        when all of its parts were, and there are no slabs here. What was read `ahead` is not read
        again. Loads that share `versions` read the same version of each blob. Raises
        `InsufficientMemoryError` when it would not fit.
        """
        options = options or LoadOptions()
        absent = frozenset[int]() if paging is None else paging.parts
        plan = plan_load(
            manifest, options.order, on_demand=options.on_demand, direct=images is None, without=absent
        )
        super().__init__(manifest, plan, options, timeline, only_exact=base is not None, absent=absent)
        self._weight_bytes = manifest.weight_bytes
        if paging is not None:
            self._weight_bytes = paging.weights_bytes + paging.buffer_bytes
        self._source = source
        self._images = images
        self._base = base
        self._full_speed = full_speed
        self._prefetch = prefetch
        self._versions = versions or BlobVersions(manifest, source.url)
        is_helper = shared_fd is not None or images is not None
        serving = taken_bytes(os.getpid(), os.getppid()) if is_helper else taken_bytes(os.getpid())
        held_bytes = 0 if reserve is None else reserve.taken_bytes
        self._serving_bytes = max(0, self._options.serving_bytes - max(0, serving - held_bytes))
        self._staging_bytes = self._check_memory(held_bytes)
        self.reserved_bytes = min(held_bytes, manifest.weight_bytes)
        slabs = [group.slab_bytes if images is None else 0 for group in manifest.groups]
        self._arena = Arena(slabs, shared_fd=shared_fd, reserve=reserve, is_sparse=paging is not None)
        self._staging = Staging(self._staging_bytes)
        staged_bytes = sum(
            step.part.size_bytes for step in self._plan.steps if step.slab_offset_bytes is None
        )
        limits = ReadLimits(
            self._options.range_bytes,
            self._options.connections,
            # What has room for all that goes through it, much or little, limits nothing.
            self._staging_bytes if self._staging_bytes < staged_bytes else max(staged_bytes, DEFAULT_BYTES),
        )
        self._work = WorkQueue(self._plan, self._staging, self._arena.slabs, LinkTuner(limits))
        self._cache = open_cache(self._options, manifest)
        self._refine_locks = RefineLocks(len(manifest.groups), shared_fd=shared_fd)
        self._order = self._options.order
        if self._order is Order.AUTO and all(part.tier is not Tier.REFINE for part in manifest.parts):
            self._order = Order.EXACT
            self._timeline.mark("process", f"{Order.EXACT}: {NO_REFINE_TIER}", why=NO_REFINE_TIER)
        self._steps = {step.part.index: step.number for step in self._plan.steps}
        self._num_fetchers = 0
        self._has_all_pages = False
        self._closed = threading.Event()

    def want_parts(self, numbers: Collection[int]) -> None:
        """Have these parts fetched before all others. `wait_for_change` tells when one of them is
        there.
        """
        self._work.promote(self._steps[number] for number in numbers)
        self._readiness.watch(numbers)

    def wanted_parts(self) -> frozenset[int]:
        """Those that `want_parts` asked for and that are there."""
        return self._readiness.watched()

    def wait_for_change(self, seen: int, timeout_s: float) -> int:
        """Return once more has happened than `seen`, the number that this gave last, or after
        `timeout_s`.

        What counts: gates that open, parts that were wanted, and the load's failure.
        """
        return self._readiness.wait_for_change(seen, timeout_s)

    @property
    def has_all_pages(self) -> bool:
        """True if the system has given all of the weights' memory: mapping it elsewhere is cheap
        then.
        """
        return self._has_all_pages

    def slab(self, group: int) -> npt.NDArray[np.uint8]:
        """The group's memory: (slab_bytes,), writable, never moved. Undefined content until `wait`."""
        return as_array(self._arena.slabs[group])

    def discard(self) -> None:
        """Return the weights' memory to the system, where all are exact and nothing reads them any more: the slabs stay
        valid, and read as zeros.
        """
        self._arena.discard()

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
        """While this is held the group's values stay as they are. For computing with values that
        are not exact yet, in one thread that does nothing to the load meanwhile; exact ones never
        change.
        """
        return self._refine_locks.reading(group)

    @property
    def refine_wait_s(self) -> float:
        """How long `reading` has waited for groups that were just being refined."""
        return self._refine_locks.waited_s

    @property
    def order(self) -> Order:
        """The tier that comes first; AUTO until that is decided."""
        self._choose_order()
        return self._order

    def reorder(self, order: Order) -> None:
        """Go on in this order, whatever was decided; not AUTO."""
        with self._lifecycle:
            self._order = order
        self._work.reorder(order)

    def statistics(self) -> LoadStatistics:
        """The cost of the load so far."""
        return self._statistics(self._work.link_statistics())._replace(
            staging_capacity_bytes=self._staging_bytes,
            staging_peak_bytes=self._staging.peak_bytes,
            staging_wait_s=self._work.memory_wait_s,
            cache=None if self._cache is None else self._cache.statistics(),
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the load's own books do not agree."""
        self._work.check_integrity()

    def cancel(self) -> None:
        """Stop: closed gates raise `LoadCancelledError`, reads are given up. Nothing after the end."""
        with self._lifecycle:
            if self._fail(LoadCancelledError("the load was cancelled")) and self._threads:
                self._source.close()

    def join_cache(self, timeout_s: float | None = None) -> bool:
        """Wait, once the load has ended, until the node's cache holds what it takes; False after
        `timeout_s`.

        Only a process that is about to end needs to wait for that.
        """
        return self._cache is None or self._cache.join(timeout_s)

    def close(self) -> None:
        """Cancel if it is still under way, and wait for the threads. Idempotent. The weights stay, in the pages that
        they have.
        """
        self._closed.set()
        self.cancel()
        if any(thread.is_alive() for thread in self._threads):
            # It failed, and reads that have not noticed would go on until they time out.
            self._source.close()
        self.join()
        self._refine_locks.close()
        # Refers to the load, whose memory would wait for the collector.
        vars(self).pop("_fetch", None)

    def _check_memory(self, weights_held_bytes: int) -> int:
        """How much staging there may be, so much memory being held for weights already. Raises
        `InsufficientMemoryError` when not even the smallest would fit.
        """
        options = self._options
        left = self._available()
        if left is not None and options.available_bytes is None:
            left = left._replace(size_bytes=left.size_bytes + weights_held_bytes)
        sizes = [step.part.size_bytes for step in self._plan.steps if step.slab_offset_bytes is None]
        what, weight_bytes, other_bytes = "weights", self._weight_bytes, options.reserved_bytes
        num_decoders = 0
        if self._images is not None:  # neither weights nor keys are here, so there is memory for speed
            what, weight_bytes, other_bytes = "images of them", self._images.ring_bytes, 0
            num_decoders = self._num_decoders
        other_bytes += self._serving_bytes
        room_bytes = None if left is None else left.size_bytes - weight_bytes - other_bytes
        size_bytes = staging_bytes(sizes, options.staging_bytes, room_bytes, num_decoders=num_decoders)
        least_bytes = staging_bytes(sizes, 0, 0)
        check_fits(
            weight_bytes + least_bytes + other_bytes,
            left,
            what=f"loading the model from {self._source.url}",
            made_of=f"{what} {weight_bytes / MIB:,.0f}, bytes on their way at least {least_bytes / MIB:,.0f}, "
            f"keys and values at least {(other_bytes - self._serving_bytes) / MIB:,.0f}, "
            f"the server's processes another {self._serving_bytes / MIB:,.0f}",
        )
        return size_bytes

    @property
    def _num_decoders(self) -> int:
        cores = available_cores()
        if self._images is not None and cores > MIN_CORES_TO_SPARE:
            cores -= 2
        return self._options.decode_threads or cores

    def _make_threads(self) -> list[threading.Thread]:
        parts = Parts(
            self._source,
            self.manifest,
            versions=self._versions,
            cache=self._cache,
            prefetch=self._prefetch,
            meter=self._meter,
            timeline=self._timeline,
        )
        fetcher = Fetcher(
            parts,
            self._plan,
            self._work,
            meter=self._meter,
            timeline=self._timeline,
            settle=self._settle,
            between=self._between_reads,
        )
        decoder = Decoder(parts, self._work, fill=partial(self._fill, parts), settle=self._settle)
        self._fetch = fetcher.run
        num_ranges = max(len(self._plan.steps), -(-self._stored_bytes // MIN_RANGE_BYTES))
        self._num_fetchers = min(self._work.connections, num_ranges)
        num_decoders = min(self._num_decoders, len(self._plan.steps))
        threads = [
            self._make_thread(f"teneral-fetch-{number}", self._fetch) for number in range(self._num_fetchers)
        ]
        # Cores that neither the server's own start nor its tokenizer's needs.
        num_spare = available_cores() - 2
        threads += [
            self._make_thread(
                f"teneral-decode-{number}",
                self._at_full_speed(self._behind_base(decoder.run), is_spare=number < num_spare),
            )
            for number in range(num_decoders)
        ]
        body = self._at_full_speed(self._behind_base(self._prefault), is_spare=num_spare > 0)
        threads.append(self._make_thread("teneral-prefault", body))
        return threads

    def _fill(self, parts: Parts, step: Step, stored: memoryview, scratch: Scratch) -> None:
        """Decode a step's verified bytes to where its values go."""
        part = step.part
        if self._images is not None:
            parts.deliver(
                part, stored, partial(self._images.deliver, link_bytes_per_s=self._work.rate_bytes_per_s)
            )
            return
        # A step without needs is the first to write there: no values are in use yet.
        with self._refine_locks.writing(part.group) if step.needs else nullcontext():
            parts.fill(part, stored, self._place, scratch, resident=self._base)

    def _place(self, segment: Segment) -> memoryview:
        """The segment's own bytes in its slab."""
        tensor = self.manifest.tensors[segment.tensor]
        begin = tensor.offset_bytes + segment.start * tensor.element_bytes
        return self._arena.slabs[tensor.group][begin : begin + segment.count * tensor.element_bytes]

    def _behind_base(self, body: Callable[[], None]) -> Callable[[], None]:
        """The body of a thread, which leaves the cores to a base that drafts at first: until so much has come that the
        rest would wait for the decoding.
        """
        if self._base is None:
            return body
        enough_bytes = min(self._stored_bytes // 4, self._staging_bytes // 2)

        def run() -> None:
            deadline_s = time.monotonic() + HEAD_START_S
            while self._meter.fetched_bytes < enough_bytes and time.monotonic() < deadline_s:
                if self._ended_at_s is not None:
                    return
                time.sleep(HEAD_START_S / 15)
            body()

        return run

    def _at_full_speed(self, body: Callable[[], None], *, is_spare: bool) -> Callable[[], None]:
        """The body of a thread, which waits for full speed unless a core is spare."""
        full_speed = self._full_speed
        if full_speed is None or is_spare:
            return body

        def run() -> None:
            while not full_speed.wait(ENDED_POLL_S):
                if self._ended_at_s is not None:
                    return
            body()

        return run

    def _prefault(self) -> None:
        self._has_all_pages = self._arena.prefault(lambda: self._ended_at_s is not None)

    def _between_reads(self) -> None:
        self._add_fetchers()
        self._choose_order()

    def _choose_order(self) -> None:
        """Decide which tier comes first, once the link has shown what it gives, or that it gives
        next to nothing.
        """
        if self._order is not Order.AUTO or self._started_at_s is None:
            return
        elapsed_s = time.monotonic() - self._started_at_s
        if elapsed_s < MIN_WATCHED_S:
            return
        # How fast the node's cache gave what it had says nothing about what it has not.
        rate = self._work.rate_bytes_per_s
        is_known = rate > 0 and self._meter.num_reads >= MIN_READS
        if not is_known and elapsed_s < MAX_WATCHED_S and not self._is_cached():
            return
        rate = rate or self._meter.fetched_bytes / elapsed_s
        if not rate:
            return  # nothing has come, so there is nothing to decide about yet
        left = self._work.left_bytes()
        prediction = predict(
            Sizes(sum(left[:-1]), left[-1], self.manifest.weight_bytes),
            rate,
            elapsed_s=elapsed_s,
            ready_s=self._options.ready_s,
            sends_drafts=self._options.sends_drafts,
            decoding_limits=self._work.memory_wait_s > elapsed_s / 2,
        )
        with self._lifecycle:
            if self._order is not Order.AUTO:
                return
            self._order = prediction.order
        if prediction.order is Order.EXACT:
            self._work.reorder(Order.EXACT)
        self._timeline.mark("process", f"{prediction.order}: {prediction.why}", **prediction._asdict())

    def _is_cached(self) -> bool:
        """True if the node's cache has all that is left."""
        cache = self._cache
        return cache is not None and all(
            part.digest is not None and cache.holds(part.digest) for part in self._work.left_parts()
        )

    def _add_fetchers(self) -> None:
        """As many as should read by now. Those that there are too many of later wait for nothing."""
        if self._num_fetchers >= self._work.connections:
            return
        with self._lifecycle:
            first, self._num_fetchers = self._num_fetchers, max(self._num_fetchers, self._work.connections)
            with suppress(RuntimeError):  # the system has no more threads: those that there are go on
                for number in range(first, self._num_fetchers):
                    thread = self._make_thread(f"teneral-fetch-{number}", self._fetch)
                    thread.start()
                    self._threads.append(thread)

    def _settle(self, step: Step) -> None:
        """The step's values are in its slab: return its memory, count it, open the gates it
        completes.
        """
        part = step.part
        self._work.finish_step(step)
        self._meter.settled(
            part.size_bytes, verified=part.digest is not None, direct=step.slab_offset_bytes is not None
        )
        self._open_gates(part)

    def _mark_ready(self, gates: Iterable[Gate]) -> None:
        if self._images is None:  # else the placement marks them
            super()._mark_ready(gates)

    def _rate_bytes_per_s(self) -> float:
        return self._work.rate_bytes_per_s

    def _stop(self) -> None:
        self._work.stop()
        if self._images is not None:
            self._images.close()

    def _end(self) -> None:
        super()._end()
        if self._cache is not None:
            self._cache.finish()
        if (
            self._readiness.error is None
            and self._arena.takes_huge_pages
            and self._arena.size_bytes >= MIN_HUGE_BYTES
        ):
            with suppress(RuntimeError):  # the system has no more threads: small pages stay
                threading.Thread(target=self._collapse, name="teneral-huge-pages", daemon=True).start()

    def _collapse(self) -> None:
        """The weights' small pages become huge ones, once the first answers are on their way."""
        if not self._closed.wait(COLLAPSE_DELAY_S):
            self._arena.collapse(self._closed.is_set)

    def _figures(self) -> dict[str, Any]:
        return {"stored_bytes": self._stored_bytes, "link": self._work.link_statistics()._asdict()}


def open_cache(options: LoadOptions, manifest: Manifest) -> PartCache | None:
    if options.cache_dir is None:
        return None
    from ..cache.part_cache import PartCache  # most loads have none

    cache = PartCache(options.cache_dir, budget_bytes=options.cache_bytes)
    if any(part.digest is None and part.size_bytes for part in manifest.parts):
        cache.turn_off(
            "plain safetensors are not cached, as nothing says what their bytes should be: pack the model"
        )
    return cache
