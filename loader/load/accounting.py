"""Counters of a load, its names for parts in messages and on the timeline, and errors that name
their part.

Adding and reading are cheap and safe from any thread. Nothing here knows sources or sockets.
"""

from __future__ import annotations

import enum
import math
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from ..errors import FormatError, IntegrityError, TeneralError
from ..format.manifest import Manifest, Part, Tier
from ..timeline import Timeline
from .options import Order

if TYPE_CHECKING:
    from ..cache.writer import CacheStatistics
    from .link import LinkStatistics


class LoadState(enum.StrEnum):
    IDLE = "idle"  # not started
    LOADING = "loading"
    EXACT = "exact"  # every group holds its exact values
    FAILED = "failed"
    CANCELLED = "cancelled"


class Phase(enum.StrEnum):
    FETCH = "fetch"
    VERIFY = "verify"
    DECODE = "decode"


class LoadProgress(NamedTuple):
    """The progress of a load. `fetched_bytes` counts every stored byte once, however often it was read."""

    state: LoadState
    stored_bytes_total: int
    fetched_bytes: int
    parts_decoded: int
    num_parts: int
    groups_ready_draft: int
    groups_exact: int
    num_groups: int
    order: Order = Order.EXACT  # AUTO while nothing is decided
    rate_bytes_per_s: float = 0.0  # of all that came from the store; 0: unknown
    # Files that are still to be compared with the digests that their store states.
    unchecked_files: int = 0

    @property
    def left_s(self) -> float:
        """How long what has not arrived will take, as the link has been so far; infinity while that
        is unknown.
        """
        left_bytes = self.stored_bytes_total - self.fetched_bytes
        if self.state is LoadState.EXACT:
            return 0.0
        return left_bytes / self.rate_bytes_per_s if self.rate_bytes_per_s else math.inf


class PhaseStatistics(NamedTuple):
    """Stored bytes that went through it; `busy_s` and `cpu_s` are sums over threads."""

    size_bytes: int
    busy_s: float
    cpu_s: float


class LoadStatistics(NamedTuple):
    """The cost of a load. Sizes in bytes, times in seconds."""

    elapsed_s: float  # from start to the end, or to now
    weight_bytes: int
    stored_bytes: int
    unverified_bytes: int  # used unverified: plain safetensors carry no digests
    direct_bytes: int  # read straight into their slab
    num_reads: int
    num_refetched_parts: int  # had a wrong digest the first time
    staging_capacity_bytes: int
    staging_peak_bytes: int
    staging_wait_s: float  # summed over fetch threads; above zero, decoding limits the load
    link: LinkStatistics
    fetch: PhaseStatistics  # more bytes than stored when parts were fetched again
    verify: PhaseStatistics
    decode: PhaseStatistics
    cache: CacheStatistics | None  # None: there is none


class Meter:
    """Adds up what the threads of one load report."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._phases = {phase: PhaseStatistics(0, 0.0, 0.0) for phase in Phase}
        self.num_reads = 0
        self.num_refetched_parts = 0
        self.refetched_bytes = 0
        self.parts_decoded = 0
        self.unverified_bytes = 0
        self.direct_bytes = 0

    @contextmanager
    def measure(self, phase: Phase, size_bytes: int) -> Iterator[None]:
        """Time a block that this thread runs; it counts only when it does not raise."""
        start_s, start_cpu_s = time.monotonic(), time.thread_time()
        yield
        busy_s, cpu_s = time.monotonic() - start_s, time.thread_time() - start_cpu_s
        with self._lock:
            sofar = self._phases[phase]
            self._phases[phase] = PhaseStatistics(
                sofar.size_bytes + size_bytes, sofar.busy_s + busy_s, sofar.cpu_s + cpu_s
            )
            self.num_reads += phase is Phase.FETCH

    def refetched(self, size_bytes: int) -> None:
        with self._lock:
            self.num_refetched_parts += 1
            self.refetched_bytes += size_bytes

    def settled(self, size_bytes: int, *, verified: bool, direct: bool) -> None:
        with self._lock:
            self.parts_decoded += 1
            self.unverified_bytes += 0 if verified else size_bytes
            self.direct_bytes += size_bytes if direct else 0

    def checked(self, size_bytes: int) -> None:
        """Count the bytes of a settled file as verified: its digest is the one that its store states."""
        with self._lock:
            self.unverified_bytes -= size_bytes

    def phase(self, phase: Phase) -> PhaseStatistics:
        return self._phases[phase]

    def counts(self) -> dict[str, Any]:
        """The fields of `LoadStatistics` that are counted here."""
        return {
            "unverified_bytes": self.unverified_bytes,
            "direct_bytes": self.direct_bytes,
            "num_reads": self.num_reads,
            "num_refetched_parts": self.num_refetched_parts,
            **{str(phase): self._phases[phase] for phase in Phase},
        }

    @property
    def fetched_bytes(self) -> int:
        """Stored bytes that have arrived, each counted once."""
        with self._lock:
            return self._phases[Phase.FETCH].size_bytes - self.refetched_bytes


def describe_part(manifest: Manifest, part: Part) -> str:
    """Like "part 7 (layers.3 draft, bytes [0, 4096) of blobs/draft-000.bin)"."""
    begin, end = part.offset_bytes, part.offset_bytes + part.size_bytes
    blob = manifest.blobs[part.blob].name
    return f"part {part.index} ({_tiered(manifest, part)}, bytes [{begin}, {end}) of {blob})"


def add_part_span(
    timeline: Timeline,
    phase: Phase,
    manifest: Manifest,
    part: Part,
    *,
    begun_at_s: float,
    ended_at_s: float,
    **attributes: object,
) -> None:
    """Write down when a part was in `phase`. The times are on `time.monotonic()`'s clock."""
    timeline.add(
        phase,
        _tiered(manifest, part),
        begun_at_s - timeline.started_at,
        ended_at_s - timeline.started_at,
        group=manifest.groups[part.group].name,
        tier=part.tier.name.lower(),
        part=part.index,
        bytes=part.size_bytes,
        **attributes,
    )


def mark_ready(timeline: Timeline, manifest: Manifest, gates: Iterable[tuple[int, Tier]]) -> None:
    """Write down that these gates have opened, now."""
    for group, tier in gates:
        name = manifest.groups[group].name
        reached = "exact" if tier is Tier.REFINE else tier.name.lower()
        timeline.mark("ready", f"{name} {reached}", group=name, tier=reached)


def _tiered(manifest: Manifest, part: Part) -> str:
    return f"{manifest.groups[part.group].name} {part.tier.name.lower()}"


def in_part(
    error: Exception, manifest: Manifest, part: Part, source_url: str, *, num_parts: int = 1
) -> TeneralError:
    """The same error, naming the part and the source; an unforeseen one becomes a `TeneralError`.

    With `num_parts`, it came while that many were read together, of which the part is the first. To
    be raised `from` the error given.
    """
    what = describe_part(manifest, part)
    if num_parts > 1:
        what += f", or one of the {num_parts - 1} behind it,"
    where = f"{what} in {source_url}"
    if not isinstance(error, TeneralError):
        return TeneralError(
            f"{where} could not be loaded: {type(error).__name__}: {error}",
            hint="This is a defect of the loader or of its source; please report it.",
        )
    import copy  # only on the way to an error

    named = copy.copy(error)
    named.message = f"{where} could not be loaded: {error.message}"
    named.args = (named.message,)
    if isinstance(named, FormatError):
        named.where = where
    return named


def wrong_digest(manifest: Manifest, part: Part, source_url: str, got: bytes) -> IntegrityError:
    """For a part whose bytes differed from its digest twice."""
    where = f"{describe_part(manifest, part)} in {source_url}"
    return IntegrityError(
        f"{where} has a wrong digest, also when fetched again; none of it was used",
        where=where,
        expected=(part.digest or b"").hex(),
        got=got.hex(),
        hint="The artifact is damaged. `teneral verify` names every bad part; pack the model again.",
    )
