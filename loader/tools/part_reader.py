"""Parts one at a time, whole and verified, in many threads: what `verify` and `unpack` have in common.

`load/parts.py` reads and checks them. Every thread has buffers of its own, so memory is bounded by the largest part and
the largest segment a thread.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from ..format.fill import Scratch, decode_planes
from ..format.manifest import Manifest, Part, Segment
from ..load.parts import Parts
from ..process.cpu import available_cores
from ..sources.base import Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

Item = TypeVar("Item")
Result = TypeVar("Result")

MIN_THREADS = 4  # several connections are faster than one, also on a small machine
MAX_THREADS = 16


class PartReader:
    """Thread-safe. A buffer that a method returns is its thread's own until it calls that method
    again.
    """

    def __init__(self, source: Source, manifest: Manifest) -> None:
        self._parts = Parts(source, manifest)
        self._manifest = manifest
        self._max_part_bytes = max((part.size_bytes for part in manifest.parts), default=0)
        segments = (segment for part in manifest.parts for segment in part.segments)
        self._max_segment_bytes = max(map(self.segment_bytes, segments), default=0)
        self._own = threading.local()

    def read(self, part: Part) -> memoryview:
        """The part's verified bytes. Raises as `Parts.read` does."""
        stored = self._buffer("stored", self._max_part_bytes)[: part.size_bytes].data
        self._parts.read(part, stored, ends_with_outage=True)
        return stored

    def decode(self, part: Part, segment: Segment, stored: memoryview, out: Bytes) -> None:
        """Put what the part says about a segment into `out`; of later tiers, over those before."""
        if not hasattr(self._own, "scratch"):
            self._own.scratch = Scratch()
        tensor = self._manifest.tensors[segment.tensor]
        decode_planes(tensor, segment, part.tier, stored, out, self._own.scratch)

    def decode_alone(self, part: Part, segment: Segment, stored: memoryview) -> None:
        """Decode a segment whose values are not wanted, only to see that it can be. Of a later tier
        of a sparse tensor, as if its values were the first elements.
        """
        out = self.workspace(segment)
        tensor = self._manifest.tensors[segment.tensor]
        if tensor.encoding.is_sparse and part.tier is not tensor.encoding.tiers[0]:
            assert segment.values is not None
            out[:] = 0
            out[: segment.values * tensor.element_bytes] = 0x3F
        self.decode(part, segment, stored, out)

    def workspace(self, segment: Segment) -> Bytes:
        """Memory for the segment's decoded bytes, with undefined content."""
        return self._buffer("decoded", self._max_segment_bytes)[: self.segment_bytes(segment)]

    def segment_bytes(self, segment: Segment) -> int:
        return segment.count * self._manifest.tensors[segment.tensor].element_bytes

    def _buffer(self, name: str, size_bytes: int) -> Bytes:
        if not hasattr(self._own, name):
            setattr(self._own, name, np.empty(size_bytes, np.uint8))
        buffer: Bytes = getattr(self._own, name)
        return buffer


def map_in_order(
    function: Callable[[Item], Result], items: Sequence[Item], threads: int | None
) -> Generator[Result, None, None]:
    """Results in the order of `items`, which threads work on. Raises what the earliest failing one
    raised.

    Items are begun in order too. Closing the iterator gives up those not begun, and waits for the
    others.
    """
    threads = threads or default_threads()
    waiting = deque(items)
    # Bounded, because an artifact may have very many parts.
    pending: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads, thread_name_prefix="teneral-part") as pool:
        try:
            while waiting or pending:
                while waiting and len(pending) < 4 * threads:
                    pending.append(pool.submit(function, waiting.popleft()))
                yield pending.popleft().result()
        finally:
            # From the last one: a part that runs may wait for earlier ones, so these must not be given up before it.
            for future in reversed(pending):
                future.cancel()


def default_threads() -> int:
    return min(MAX_THREADS, max(MIN_THREADS, available_cores()))
