"""A load without copies: plain safetensors of a local folder, used where they lie in the system's
page cache.

Each file is mapped, and the slab of a group is its stretch of the mapping. Threads have the kernel
read the stretches, in the order in which a forward pass needs them, and open the gates: a model of
1 GB that the node has in its cache is there after 20 ms, in no memory of this process's own. Plain
safetensors carry no digests, so nothing is verified; a file that changes during the load fails it.
After the load a file that is overwritten in place changes the weights, and one that is cut off
kills the process, as with every program that maps its files: models are replaced by renaming, or
served with `mmap = false` (docs/decisions/0029).
"""

from __future__ import annotations

import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Collection
from typing import Any, NamedTuple

from ..errors import LoadCancelledError, TeneralError, UnavailableError
from ..format.manifest import Manifest, Part
from ..memory.arena import MADV_POPULATE_READ, adviser
from ..memory.limits import MIB, check_fits, taken_bytes
from ..sources.base import Mappable
from ..timeline import Timeline
from .accounting import Phase, add_part_span, in_part
from .options import LoadOptions, Order
from .plan import Step, plan_load
from .threaded import InPlaceLoad

NUM_THREADS = 4  # a disk has several requests at a time then; from the cache one of them would do


class NotInPlaceError(ValueError):
    """Slabs of a manifest that are not stretches of its files: they cannot be mapped."""


class _Stretch(NamedTuple):
    """The start of a group's slab in a file."""

    blob: int
    begin_bytes: int


class MappedLoad(InPlaceLoad):
    """Loads a manifest whose slabs are stretches of its files. All methods may be called from any
    thread.

    The slabs are views of private mappings, which live as long as any view does. The source stays
    the caller's.
    """

    def __init__(
        self,
        source: Mappable,
        manifest: Manifest,
        *,
        options: LoadOptions | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Map the files. Nothing is read yet.

        Raises `InsufficientMemoryError` where the weights would not stay in memory,
        `UnavailableError` for a file that cannot be mapped, `ChangedError` for one that is not of
        the manifest's version, and `NotInPlaceError` for a manifest of other slabs than
        `checkpoint.manifest_in_place` makes.
        """
        options = options or LoadOptions()
        plan = plan_load(manifest, Order.EXACT, on_demand=options.on_demand)
        stretches = _stretches(plan.steps)
        if stretches is None:
            raise NotInPlaceError("these slabs are not stretches of the files")
        super().__init__(manifest, plan, options, timeline)
        self._num_threads = NUM_THREADS
        self._source = source
        self._check_memory()
        self._blobs = [source.map(blob.name, version=blob.version) for blob in manifest.blobs]
        self._advisers = [adviser(memory) for memory in self._blobs]
        self._slabs = []
        for group in manifest.groups:
            blob, begin = stretches.get(group.index, _Stretch(0, 0))
            self._slabs.append(self._blobs[blob][begin : begin + group.slab_bytes])
        self._can_populate = all(
            advise(0, mmap.PAGESIZE, MADV_POPULATE_READ) for advise in self._advisers
        )  # Linux 5.14
        self._todo = deque(plan.steps)

    def want_parts(self, numbers: Collection[int]) -> None:
        """As `WeightLoad.want_parts`."""
        with self._lifecycle:
            wanted = [step for step in self._todo if step.part.index in numbers]
            for step in reversed(wanted):
                self._todo.remove(step)
                self._todo.appendleft(step)

    def cancel(self) -> None:
        """Stop: closed gates raise `LoadCancelledError`. Nothing after the end."""
        self._fail(LoadCancelledError("the load was cancelled"))

    def _check_memory(self) -> None:
        """Pages of files are given back by a system that is short of memory, and read again for
        each token: that is a model that does not fit.
        """
        options, weight_bytes = self._options, self.manifest.weight_bytes
        serving_bytes = max(0, options.serving_bytes - taken_bytes(os.getpid()))
        check_fits(
            weight_bytes + options.reserved_bytes + serving_bytes,
            self._available(),
            what=f"loading the model from {self._source.url}",
            made_of=f"weights {weight_bytes / MIB:,.0f}, keys and values at least {options.reserved_bytes / MIB:,.0f}, "
            f"the server's processes another {serving_bytes / MIB:,.0f}",
        )

    def _make_threads(self) -> list[threading.Thread]:
        num_threads = min(NUM_THREADS, len(self._todo))
        return [self._make_thread(f"teneral-map-{number}", self._run) for number in range(num_threads)]

    def _run(self) -> None:
        """The body of a thread."""
        while (step := self._next()) is not None:
            self._take(step)

    def _next(self) -> Step | None:
        with self._lifecycle:
            return self._todo.popleft() if self._todo and self._readiness.error is None else None

    def _take(self, step: Step) -> None:
        part = step.part
        begun_at_s = time.monotonic()
        try:
            with self._meter.measure(Phase.FETCH, part.size_bytes):
                self._read(part)
        except TeneralError as error:
            raise in_part(error, self.manifest, part, self._source.url) from error
        add_part_span(
            self._timeline,
            Phase.FETCH,
            self.manifest,
            part,
            begun_at_s=begun_at_s,
            ended_at_s=time.monotonic(),
        )
        self._meter.settled(part.size_bytes, verified=False, direct=True)
        self._open_gates(part)

    def _read(self, part: Part) -> None:
        """Have the part's pages in memory and in this process's tables. Without the GIL."""
        blob = self.manifest.blobs[part.blob]
        if self._can_populate:
            begin = part.offset_bytes - part.offset_bytes % mmap.PAGESIZE
            size_bytes = part.offset_bytes + part.size_bytes - begin
            advise = self._advisers[part.blob]
            # All at once, where it is not in the cache.
            advise(begin, size_bytes, mmap.MADV_WILLNEED)
            if not advise(begin, size_bytes, MADV_POPULATE_READ):
                self._source.check_version(blob.name, blob.version)  # it was cut off, most likely
                raise UnavailableError(f"{blob.name} in {self._source.url} cannot be read")
        self._source.check_version(blob.name, blob.version)

    def _stop(self) -> None:
        """Threads look for an error before each part."""

    def _figures(self) -> dict[str, Any]:
        return {"mapped": True}


def _stretches(steps: Collection[Step]) -> dict[int, _Stretch] | None:
    """By group; None where some slab is not as its file has it."""
    found: dict[int, _Stretch] = {}
    for step in steps:
        if step.slab_offset_bytes is None:
            return None
        stretch = _Stretch(step.part.blob, step.part.offset_bytes - step.slab_offset_bytes)
        if found.setdefault(step.part.group, stretch) != stretch:
            return None
    return found
