"""Reads parts one at a time, checks them, and decodes their segments: what `verify` and `unpack`
have in common.

Invariant: content is handed out only after the part's digest was found right. A part that differs
is read a second time, since bits flip on the way, too; once the store has failed for one part, no
other is asked for, so that an outage is waited for once. Every thread has
buffers of its own, so memory is bounded by the largest part and the largest segment a thread. Loads
for serving go through `load.py` instead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from blake3 import blake3

from ..errors import IntegrityError, UnavailableError
from ..format.codec import Scratch, decode_planes
from ..format.manifest import Manifest, Part, Segment
from ..load.accounting import describe_part
from ..load.fetch import BlobVersions
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
        self._source = source
        self._manifest = manifest
        self._versions = BlobVersions(manifest, source.url)
        self._max_part_bytes = max((part.size_bytes for part in manifest.parts), default=0)
        segments = (segment for part in manifest.parts for segment in part.segments)
        self._max_segment_bytes = max(map(self.segment_bytes, segments), default=0)
        self._own = threading.local()
        self._failure: UnavailableError | None = None  # the store's

    def read(self, part: Part) -> memoryview:
        """The part's verified bytes. Raises `IntegrityError` when they are wrong twice, `ChangedError`
        when it is of another version than parts before it, and the source's errors.
        """
        stored = self._buffer("stored", self._max_part_bytes)[: part.size_bytes].data
        got = self._read(part, stored)
        if got != part.digest:
            got = self._read(part, stored)
        if got != part.digest:
            assert part.digest is not None
            where = describe_part(self._manifest, part)
            raise IntegrityError(
                f"{where} has a wrong digest",
                where=where,
                expected=part.digest.hex(),
                got=got.hex() if got is not None else "",
                hint="Restore the object, or pack the model again.",
            )
        return stored

    def _read(self, part: Part, stored: memoryview) -> bytes | None:
        """Fill `stored`; the digest of what came, None for a part without one."""
        if self._failure is not None:
            raise self._failure
        name = self._manifest.blobs[part.blob].name
        expected = self._versions.of(part.blob)
        try:
            version = self._source.read_into(name, part.offset_bytes, stored, version=expected)
        except UnavailableError as error:
            self._failure = error
            raise
        self._versions.check(part.blob, version)
        return None if part.digest is None else blake3(stored).digest()

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
