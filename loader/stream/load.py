"""One load of one model: bytes from a source become verified values in memory, group by group.

    source → fetch threads → staging → decode threads → slabs → gates
             (fetch.py)    (staging.py)  (decode.py)  (arena.py)  (readiness.py)
             └──── what comes next: plan.py, handed out by work.py ────┘

Invariant: a gate opens only over values whose every stored byte was verified. The slabs stand at their final
addresses from construction on, so that tensors over them can be made first and filled later. It does not know
models, torch or groups' meaning.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ..errors import LoadCancelledError, LoadError, TeneralError
from ..format.manifest import Manifest, Tier, align
from ..host import available_cores
from ..memory import available_bytes, check_fits
from ..sources.base import Source
from ..timeline import Timeline
from .arena import Arena, as_array
from .decode import Decoder
from .fetch import Fetcher
from .options import LoadOptions
from .plan import Plan, Step, plan_load
from .progress import LoadProgress, LoadState, LoadStatistics, Meter, Phase
from .readiness import Gate, Readiness
from .staging import ALIGNMENT_BYTES, Staging
from .work import WorkQueue

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# Arrays that numpy has a dtype for. bfloat16 shows as its bit patterns; everything else as bytes.
NUMPY_DTYPES: dict[str, str] = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "BF16": "<u2",
}  # fmt: skip


class WeightLoad:
    """Loads a manifest's weights. All methods may be called from any thread.

    The slabs belong to whoever looks at them: neither `close` nor dropping the load frees memory that a view
    still shows. The source stays the caller's to close, after the load has ended; only a load that is
    cancelled while reads are on their way closes it itself, since nothing else makes them return.
    """

    def __init__(
        self,
        source: Source,
        manifest: Manifest,
        *,
        options: LoadOptions | None = None,
        timeline: Timeline | None = None,
        shared_fd: int | None = None,
    ) -> None:
        """Reserve the memory, in the memory file `shared_fd` if there is one; nothing is read yet.

        Raises `InsufficientMemoryError` when it would not fit.
        """
        self.manifest = manifest
        self._source = source
        self._options = options or LoadOptions()
        self._timeline = timeline or Timeline()
        self._plan = plan_load(
            manifest,
            self._options.order,
            range_bytes=self._options.range_bytes,
            connections=self._options.connections,
        )
        self._stored_bytes = self._plan.stored_bytes
        self._staging_bytes = _staging_bytes(self._plan, self._options.staging_bytes)
        available = self._options.available_bytes
        check_fits(
            manifest.weight_bytes + self._staging_bytes,
            available_bytes() if available is None else available,
            what=f"loading the model from {source.url}",
        )
        self._arena = Arena([group.slab_bytes for group in manifest.groups], shared_fd=shared_fd)
        self._staging = Staging(self._staging_bytes)
        self._work = WorkQueue(self._plan, self._staging, self._arena.slabs)
        self._meter = Meter()
        self._readiness = Readiness(
            len(manifest.groups), [(step.part.group, step.part.tier) for step in self._plan.steps]
        )
        self._threads: list[threading.Thread] = []
        self._lifecycle = threading.Lock()  # guards starting against cancelling
        self._started_at_s: float | None = None
        self._ended_at_s: float | None = None

    def start(self) -> None:
        """Begin to read; return at once. A cancelled load stays so. Raises `RuntimeError` the second time."""
        with self._lifecycle:
            if self._started_at_s is not None:
                raise RuntimeError("a load can be started once")
            self._started_at_s = time.monotonic()
            if self._readiness.error is not None:
                return
            self._mark_ready(
                (group.index, tier)
                for group in self.manifest.groups
                for tier in Tier
                if self._readiness.is_open(group.index, tier)
            )
            if not self._plan.steps:
                self._end()
                return
            self._threads = self._make_threads()
            for thread in self._threads:
                thread.start()

    def wait(self, group: int, tier: Tier = Tier.REFINE, timeout_s: float | None = None) -> None:
        """Return when the group holds that tier's values (`REFINE`: exact ones), at once if it does already.

        Raises the load's error, `LoadCancelledError`, or `TimeoutError` after `timeout_s`.
        """
        self._readiness.wait(group, tier, timeout_s)

    def is_ready(self, group: int, tier: Tier = Tier.REFINE) -> bool:
        return self._readiness.is_open(group, tier)

    def slab(self, group: int) -> npt.NDArray[np.uint8]:
        """The group's memory: (slab_bytes,), writable, never moved. Undefined content until `wait`."""
        return as_array(self._arena.slabs[group])

    def array(self, name: str) -> npt.NDArray[np.generic]:
        """A tensor in its shape, as a view of its slab. Raises `KeyError` for an unknown name.

        bfloat16 comes as uint16 bit patterns. Dtypes that numpy lacks come as uint8: 8-bit ones in their
        shape, packed ones flat.
        """
        tensor = self.manifest.by_name[name]
        data = self.slab(tensor.group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        array = data.view(NUMPY_DTYPES.get(tensor.dtype, "u1"))
        return array.reshape(tensor.shape) if array.size == math.prod(tensor.shape) else array

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
        )

    def statistics(self) -> LoadStatistics:
        """What the load has cost so far."""
        started, ended = self._started_at_s, self._ended_at_s
        return LoadStatistics(
            elapsed_s=0.0 if started is None else (ended or time.monotonic()) - started,
            weight_bytes=self.manifest.weight_bytes,
            stored_bytes=self._stored_bytes,
            unverified_bytes=self._meter.unverified_bytes,
            direct_bytes=self._meter.direct_bytes,
            num_reads=self._meter.num_reads,
            num_refetched_parts=self._meter.num_refetched_parts,
            staging_capacity_bytes=self._staging_bytes,
            staging_peak_bytes=self._staging.peak_bytes,
            staging_wait_s=self._work.memory_wait_s,
            fetch=self._meter.phase(Phase.FETCH),
            verify=self._meter.phase(Phase.VERIFY),
            decode=self._meter.phase(Phase.DECODE),
        )

    def check_integrity(self) -> None:
        """Raise `RuntimeError` when the load's own books do not agree."""
        self._work.check_integrity()

    def cancel(self) -> None:
        """Stop: closed gates raise `LoadCancelledError`, reads are given up. Nothing after the end."""
        with self._lifecycle:
            if self._fail(LoadCancelledError("the load was cancelled")) and self._threads:
                self._source.close()

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait until all threads have ended, however; False when they have not after `timeout_s`."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(None if timeout_s is None else max(0.0, deadline_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def close(self) -> None:
        """Cancel if it is still under way, and wait for the threads. Idempotent. The weights stay."""
        self.cancel()
        if any(thread.is_alive() for thread in self._threads):
            self._source.close()  # it failed, and reads that have not noticed would go on until they time out
        self.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_threads(self) -> list[threading.Thread]:
        fetcher = Fetcher(
            self._source,
            self.manifest,
            self._plan,
            self._work,
            meter=self._meter,
            timeline=self._timeline,
            settle=self._settle,
        )
        decoder = Decoder(
            self.manifest,
            self._arena.slabs,
            self._work,
            source_url=self._source.url,
            meter=self._meter,
            timeline=self._timeline,
            settle=self._settle,
        )
        num_fetchers = min(self._options.connections, sum(map(len, self._plan.reads)))
        num_decoders = min(self._options.decode_threads or available_cores(), len(self._plan.steps))
        bodies: list[tuple[str, Callable[[], None]]] = [
            *((f"teneral-fetch-{number}", fetcher.run) for number in range(num_fetchers)),
            *((f"teneral-decode-{number}", decoder.run) for number in range(num_decoders)),
            ("teneral-prefault", lambda: self._arena.prefault(lambda: self._ended_at_s is not None)),
        ]
        # Daemons: a process that wants to exit must not wait for a model that nobody needs any more.
        return [
            threading.Thread(target=self._guard, args=(body,), name=name, daemon=True)
            for name, body in bodies
        ]

    def _guard(self, body: Callable[[], None]) -> None:
        try:
            body()
        except TeneralError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - unless the load ends, all who wait for it wait for ever
            failure = LoadError(f"the load stopped on a defect: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._fail(failure)

    def _settle(self, step: Step) -> None:
        """The step's values are in its slab: return its memory, count it, open the gates it completes."""
        part = step.part
        self._work.finish_step(step)
        self._meter.settled(
            part.size_bytes, verified=part.digest is not None, direct=step.slab_offset_bytes is not None
        )
        gates, all_settled = self._readiness.settle(part.group, part.tier)
        self._mark_ready(gates)
        if all_settled:
            self._end()
        self._readiness.open(gates)

    def _mark_ready(self, gates: Iterable[Gate]) -> None:
        for group, tier in gates:
            name = self.manifest.groups[group].name
            reached = "exact" if tier is Tier.REFINE else "draft"
            self._timeline.mark("ready", f"{name} {reached}", group=name, tier=reached)

    def _fail(self, error: TeneralError) -> bool:
        """End the load with an error; False when it has ended already."""
        if not self._readiness.fail(error):
            return False
        self._work.stop()
        if self._started_at_s is not None:
            self._end()
        return True

    def _end(self) -> None:
        self._ended_at_s = time.monotonic()
        self._timeline.add(
            "fetch",
            "load",
            (self._started_at_s or self._ended_at_s) - self._timeline.started_at,
            self._ended_at_s - self._timeline.started_at,
            state=str(self._state()),
            stored_bytes=self._stored_bytes,
            weight_bytes=self.manifest.weight_bytes,
        )

    def _state(self) -> LoadState:
        if self._readiness.error is not None:
            cancelled = isinstance(self._readiness.error, LoadCancelledError)
            return LoadState.CANCELLED if cancelled else LoadState.FAILED
        if self._ended_at_s is not None:
            return LoadState.EXACT
        return LoadState.IDLE if self._started_at_s is None else LoadState.LOADING


def _staging_bytes(plan: Plan, wanted_bytes: int) -> int:
    """What was asked for, but enough for the largest part, and no more than all parts take together."""
    sizes = [
        align(step.part.size_bytes, ALIGNMENT_BYTES) for step in plan.steps if step.slab_offset_bytes is None
    ]
    return min(max(wanted_bytes, max(sizes, default=0)), sum(sizes))
