"""Groups that are in memory only while they are used: fetched when they are asked for, and given back when others need
their memory.

    want(groups) → queue → threads: evict → fetch → verify → decode → wait(groups) returns

Invariants: a group is filled only with values whose every stored byte was verified. The groups that were wanted last
are neither evicted nor refilled. Slabs stay at their addresses; an evicted one keeps no pages. A failure concerns the
groups that were asked for: the next `want` tries again. It does not know what a group is for.
"""

from __future__ import annotations

import copy
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from blake3 import blake3

from ..errors import PartsUnavailableError, TeneralError, UsageError
from ..format.layout import layer_of
from ..format.manifest import Manifest, Part
from ..memory.limits import MIB
from ..sources.base import Source
from ..timeline import Timeline
from .accounting import Phase, add_part_span, in_part, wrong_digest
from .fetch import BlobVersions
from .plan import expert_groups, writing_order

if TYPE_CHECKING:
    from ..cache.part_cache import PartCache
    from ..format.codec import Scratch

MAX_THREADS = 8
BUFFER_BYTES = 96 * MIB  # of all threads together, if that is enough for two
MAX_SPANS = 4_000  # of parts on the timeline: an instance may fetch for days


class Paging(NamedTuple):
    """The groups that come and go, and the most memory for all weights."""

    groups: frozenset[int]
    weights_bytes: int
    budget_bytes: int  # of that, for those groups
    part_bytes: int  # as it is stored, the largest of their parts

    @property
    def num_threads(self) -> int:
        """How many groups are fetched at the same time, each with memory for one part."""
        return max(2, min(MAX_THREADS, BUFFER_BYTES // max(1, self.part_bytes)))

    @property
    def buffer_bytes(self) -> int:
        """Memory for parts on their way, besides the weights."""
        return self.num_threads * self.part_bytes


def plan_paging(manifest: Manifest, weights_bytes: int) -> Paging | None:
    """How a mixture lives in this much memory; None if all of it fits.

    Raises `UsageError` if it cannot: nothing can be left out, or a step may need more at once.
    """
    if manifest.weight_bytes <= weights_bytes:
        return None
    groups = expert_groups(manifest)
    if not groups:
        raise UsageError(
            f"weights_bytes is {_mib(weights_bytes)}, but the weights take {_mib(manifest.weight_bytes)}, and there "
            "are no experts in groups of their own that could be left out",
            key="weights_bytes",
            hint="Leave it out; or pack the model again, if it is a mixture of experts (docs/experts.md).",
        )
    need = step_need(manifest)
    assert need is not None
    if weights_bytes < need.least_bytes:
        raise UsageError(
            f"weights_bytes is {_mib(weights_bytes)}, but a step needs {_mib(need.least_bytes)}: "
            f"{_mib(need.resident_bytes)} for what every token goes through, and {_mib(need.layer_bytes)} for the "
            f"experts of {need.layer}, all of which its tokens may choose",
            key="weights_bytes",
            hint=f"Give at least {need.least_bytes}; the whole model takes {manifest.weight_bytes}.",
        )
    part_bytes = max(part.size_bytes for part in manifest.parts if part.group in groups)
    return Paging(groups, weights_bytes, weights_bytes - need.resident_bytes, part_bytes)


class StepNeed(NamedTuple):
    """The memory for weights that one step of a mixture may need at once."""

    resident_bytes: int  # for what every token goes through
    layer: str  # the one with the largest experts
    layer_bytes: int  # for all of these

    @property
    def least_bytes(self) -> int:
        return self.resident_bytes + self.layer_bytes


def step_need(manifest: Manifest) -> StepNeed | None:
    """None for a model without experts in groups of their own."""
    groups = expert_groups(manifest)
    layers: Counter[str] = Counter()
    for index in groups:
        group = manifest.groups[index]
        layers[layer_of(group.name) or ""] += group.slab_bytes
    if not layers:
        return None
    largest = max(layers, key=lambda layer: layers[layer])
    resident_bytes = sum(group.slab_bytes for group in manifest.groups if group.index not in groups)
    return StepNeed(resident_bytes, largest, layers[largest])


def _mib(size_bytes: int) -> str:
    return f"{size_bytes / MIB:,.1f} MiB"


class Residency:
    """The groups that have memory, those used longest ago first. Decides, and does nothing. Not thread-safe."""

    def __init__(self, sizes_bytes: Mapping[int, int], budget_bytes: int) -> None:
        self._sizes_bytes = sizes_bytes
        self._budget_bytes = budget_bytes
        self._groups: dict[int, None] = {}  # in this order
        self.used_bytes = 0

    def __contains__(self, group: int) -> bool:
        return group in self._groups

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def groups(self) -> tuple[int, ...]:
        return tuple(self._groups)

    def use(self, groups: Iterable[int]) -> None:
        """These are used now, as far as they have memory."""
        for group in groups:
            if group in self._groups:
                del self._groups[group]
                self._groups[group] = None

    def victims(self, group: int, kept: Collection[int]) -> list[int] | None:
        """The groups that make way for this one, those used longest ago; none of `kept`. None if that is not enough."""
        missing_bytes = self.used_bytes + self._sizes_bytes[group] - self._budget_bytes
        found: list[int] = []
        for each in self._groups:
            if missing_bytes <= 0:
                break
            if each not in kept:
                found.append(each)
                missing_bytes -= self._sizes_bytes[each]
        return found if missing_bytes <= 0 else None

    def admit(self, group: int) -> None:
        assert group not in self._groups
        self._groups[group] = None
        self.used_bytes += self._sizes_bytes[group]

    def evict(self, group: int) -> None:
        del self._groups[group]
        self.used_bytes -= self._sizes_bytes[group]


class PagerStatistics(NamedTuple):
    """Counts of groups, and bytes as they are stored, unless stated otherwise; since the start."""

    budget_bytes: int  # in memory
    resident_bytes: int  # in memory
    resident: int
    hits_total: int  # groups that were asked for and there
    misses_total: int
    evictions_total: int
    failures_total: int
    fetched_bytes_total: int
    refetched_bytes_total: int  # of groups that had been there before
    wait_seconds_total: float  # of callers of `wait`


class Pager:
    """Fetches groups into their slabs on demand. All methods may be called from any thread."""

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        slabs: Sequence[memoryview],
        paging: Paging,
        *,
        discard: Callable[[int], None],
        versions: BlobVersions,
        timeline: Timeline,
        cache: PartCache | None = None,
    ) -> None:
        """`discard` returns the pages of a group's slab to the system."""
        self._source = source
        self._manifest = manifest
        self._slabs = slabs
        self._discard = discard
        self._versions = versions
        self._timeline = timeline
        self._cache = cache
        self._paging = paging
        self._parts: dict[int, list[Part]] = {group: [] for group in paging.groups}
        for part in sorted(manifest.parts, key=writing_order):
            if part.group in self._parts:
                self._parts[part.group].append(part)
        sizes = {group: manifest.groups[group].slab_bytes for group in paging.groups}
        self._residency = Residency(sizes, paging.budget_bytes)
        self._changed = threading.Condition()
        self._wanted: frozenset[int] = frozenset()
        self._queue: deque[int] = deque()  # wanted, without memory
        self._filling: set[int] = set()
        self._filled: set[int] = set()
        self._known: set[int] = set()  # that were filled before
        self._errors: dict[int, TeneralError] = {}
        self._stopped: TeneralError | None = None
        self._num_spans = 0
        self._hits = self._misses = self._evictions = self._failures = 0
        self._fetched_bytes = self._refetched_bytes = 0
        self._wait_s = 0.0
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Start the threads, which sleep until something is wanted."""
        self._threads = [
            threading.Thread(target=self._run, name=f"teneral-experts-{number}", daemon=True)
            for number in range(self._paging.num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def want(self, groups: Collection[int]) -> None:
        """Have these groups in memory until the next call; fetch those that are not there. Returns at once."""
        wanted = frozenset(groups)
        with self._changed:
            if wanted == self._wanted and not self._errors:
                return
            self._wanted = wanted
            self._errors.clear()
            ordered = sorted(wanted)
            self._residency.use(ordered)
            self._queue = deque(group for group in ordered if group not in self._residency)
            num_missing = len(wanted - self._filled)
            self._misses += num_missing
            self._hits += len(wanted) - num_missing
            self._changed.notify_all()

    def wait(self, groups: Collection[int], timeout_s: float | None = None) -> bool:
        """Block until these groups, the wanted ones, are filled; False after `timeout_s`. Raises
        `PartsUnavailableError` if one of them could not be read or was wrong, and the error of `stop`.
        """
        begun_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._is_decided(groups), timeout_s)
            self._wait_s += time.monotonic() - begun_s
            if self._filled.issuperset(groups):
                return True
            error = self._stopped or next(
                (self._errors[each] for each in groups if each in self._errors), None
            )
            if error is not None:
                raise copy.copy(error) from error.__cause__
            return False

    def statistics(self) -> PagerStatistics:
        with self._changed:
            return PagerStatistics(
                self._paging.budget_bytes,
                self._residency.used_bytes,
                len(self._residency),
                self._hits,
                self._misses,
                self._evictions,
                self._failures,
                self._fetched_bytes,
                self._refetched_bytes,
                self._wait_s,
            )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if the books do not agree."""
        with self._changed:
            if set(self._residency.groups) != self._filled | self._filling or self._filled & self._filling:
                raise RuntimeError("groups have memory that are neither filled nor being filled, or both")
            if self._residency.used_bytes > self._paging.budget_bytes:
                raise RuntimeError("groups have more memory than there is")

    def stop(self, error: TeneralError) -> None:
        """Fetch nothing more; those who wait get this error."""
        with self._changed:
            self._stopped = self._stopped or error
            self._changed.notify_all()

    @property
    def is_busy(self) -> bool:
        """True if something is being fetched."""
        with self._changed:
            return bool(self._filling)

    def join(self) -> None:
        """Wait, after `stop`, until the threads have ended."""
        for thread in self._threads:
            thread.join()

    def _is_decided(self, groups: Collection[int]) -> bool:
        is_failed = self._stopped is not None or not self._errors.keys().isdisjoint(groups)
        return is_failed or self._filled.issuperset(groups)

    # ---- the threads ----

    def _run(self) -> None:
        from ..format.codec import Scratch

        buffer, scratch = memoryview(bytearray(self._paging.part_bytes)), Scratch()
        while (group := self._next()) is not None:
            failure: TeneralError | None = None
            try:
                for part in self._parts[group]:
                    self._fill(part, buffer[: part.size_bytes], scratch)
            except TeneralError as error:
                failure = error
            except Exception as error:  # noqa: BLE001 - a defect fails the pass like any other error
                failure = in_part(error, self._manifest, self._parts[group][0], self._source.url)
                failure.__cause__ = error
            self._settle(group, failure)

    def _next(self) -> int | None:
        """The next group to fill, which has its memory now. Blocks; None at the end."""
        with self._changed:
            while self._stopped is None:
                if self._queue:
                    group = self._queue[0]
                    victims = self._residency.victims(group, self._wanted | self._filling)
                    if victims is not None:
                        self._queue.popleft()
                        for each in victims:
                            self._give_back(each)
                        self._evictions += len(victims)
                        self._residency.admit(group)
                        self._filling.add(group)
                        return group
                self._changed.wait()
            return None

    def _give_back(self, group: int) -> None:
        self._filled.discard(group)
        self._residency.evict(group)
        self._discard(group)

    def _settle(self, group: int, failure: TeneralError | None) -> None:
        size_bytes = sum(part.size_bytes for part in self._parts[group])
        with self._changed:
            self._filling.remove(group)
            if failure is None:
                self._filled.add(group)
                self._fetched_bytes += size_bytes
                self._refetched_bytes += size_bytes if group in self._known else 0
                self._known.add(group)
            else:
                self._failures += 1
                self._give_back(group)
                if group in self._wanted:
                    self._errors[group] = PartsUnavailableError(failure.message, hint=failure.hint)
                    self._errors[group].__cause__ = failure
            self._changed.notify_all()

    def _fill(self, part: Part, stored: memoryview, scratch: Scratch) -> None:
        """Read a part, verify it, and decode it into its slab; a wrong one is read once more."""
        from ..format.codec import decode_planes

        attempts = 0
        while not self._is_right(part, stored):
            attempts += 1
            if attempts == 2:
                raise wrong_digest(self._manifest, part, self._source.url, blake3(stored).digest())
        begun_at_s = time.monotonic()
        try:
            for segment in part.segments:
                tensor = self._manifest.tensors[segment.tensor]
                begin = tensor.offset_bytes + segment.start * tensor.element_bytes
                place = self._slabs[tensor.group][begin : begin + segment.count * tensor.element_bytes]
                decode_planes(tensor, segment, part.tier, stored, place, scratch)
        except Exception as error:
            raise in_part(error, self._manifest, part, self._source.url) from error
        self._span(Phase.DECODE, part, begun_at_s)
        if self._cache is not None and part.digest is not None:
            self._cache.offer(part.digest, stored)

    def _is_right(self, part: Part, stored: memoryview) -> bool:
        """Read a part from the node's cache or the store; whether its digest is right. What the disk has spoilt is read
        again here.
        """
        begun_at_s = time.monotonic()
        digest, cache = part.digest, self._cache
        if digest is not None and cache is not None and cache.read_into(digest, 0, stored):
            if blake3(stored).digest() == digest:
                self._span(Phase.FETCH, part, begun_at_s)
                return True
            cache.reject(digest)
        try:
            name = self._manifest.blobs[part.blob].name
            wanted = self._versions.of(part.blob)
            version = self._source.read_into(name, part.offset_bytes, stored, version=wanted)
            self._versions.check(part.blob, version)
        except Exception as error:
            raise in_part(error, self._manifest, part, self._source.url) from error
        self._span(Phase.FETCH, part, begun_at_s)
        return digest is None or blake3(stored).digest() == digest

    def _span(self, phase: Phase, part: Part, begun_at_s: float) -> None:
        if self._num_spans < MAX_SPANS:
            self._num_spans += 1
            ended_at_s = time.monotonic()
            add_part_span(
                self._timeline, phase, self._manifest, part, begun_at_s=begun_at_s, ended_at_s=ended_at_s
            )
