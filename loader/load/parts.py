"""Parts of an artifact: read, verified and decoded. All readers of weights do it here: loads,
experts, `verify`, `unpack`.

    range of a blob → memory of the caller's → digest → elements in a slab
      read_range                                 is_right   fill

Invariants: all that is read of a blob is of one version. No byte of a part that has a digest is
decoded before the digest of the whole part was found right. A part that is wrong is fetched once
more, since bits flip on the way, too; what a node's cache has spoilt does not count against the
store.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from blake3 import blake3

from ..errors import UnavailableError
from ..format.manifest import Manifest, Part, Segment
from ..sources import base
from ..timeline import Timeline
from .accounting import Meter, Phase, add_part_span, in_part, wrong_digest

if TYPE_CHECKING:
    from ..cache.part_cache import PartCache
    from ..format.fill import Scratch
    from .options import LoadOptions
    from .prefetch import Prefetch
    from .resident import ResidentBase

    Place = Callable[[Segment], memoryview]


class RangeSource(Protocol):
    """The part of `sources.base.Source` that a load needs."""

    @property
    def url(self) -> str: ...

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None: ...

    def close(self) -> None: ...


class BlobVersions:
    """The version of each blob, by the manifest or else by the first answer. For all readers of an
    artifact; thread-safe.
    """

    def __init__(self, manifest: Manifest, source_url: str) -> None:
        self._manifest = manifest
        self._source_url = source_url
        self._versions = {
            number: blob.version for number, blob in enumerate(manifest.blobs) if blob.version is not None
        }

    def of(self, blob: int) -> str | None:
        """The version to request; None before the first answer."""
        return self._versions.get(blob)

    def check(self, blob: int, version: str | None) -> None:
        """Note the version of an answer; None: it was not checked. Raises `ChangedError` when
        others were of another.

        Threads that ask before any was answered cannot ask for a version. They find out here,
        before what they have read counts.
        """
        if version is None:
            return
        first = self._versions.setdefault(blob, version)  # atomic: one of them is the first
        if version != first:
            name = self._manifest.blobs[blob].name
            raise base.changed(self._source_url, name, f"version {first} was expected, {version} is there")


class Parts:
    """Reads, verifies and decodes the parts of one manifest. Thread-safe; memory is the callers'."""

    def __init__(
        self,
        source: RangeSource,
        manifest: Manifest,
        *,
        versions: BlobVersions | None = None,
        cache: PartCache | None = None,
        prefetch: Prefetch | None = None,
        meter: Meter | None = None,
        timeline: Timeline | None = None,
        max_spans: int | None = None,
    ) -> None:
        """`prefetch` holds what was requested before the manifest was read. The `meter` and the
        `timeline`, with at most `max_spans` more spans, take note of parts that are verified and
        decoded.
        """
        self.manifest = manifest
        self.source_url = source.url
        self.source = source
        self._versions = versions or BlobVersions(manifest, source.url)
        self._cache = cache
        self._prefetch = prefetch
        self._meter = meter or Meter()
        self._timeline = timeline
        self._spans_left = max_spans
        self._suspect: set[int] = set()  # parts whose digest was wrong once
        self._outage: UnavailableError | None = None

    def read_range(self, blob: int, start: int, memory: memoryview) -> bool:
        """Fill the memory with bytes of this blob from `start` on, in one request; retries within
        it are the source's. Whether nothing of that had been prefetched. Raises the source's
        errors, and `ChangedError` when it is not of the version that others were of.
        """
        name, rest = self.manifest.blobs[blob].name, memory
        while (
            rest
            and self._prefetch is not None
            and (taken := self._prefetch.take(name, start, rest)) is not None
        ):
            self._versions.check(blob, taken.version)
            start, rest = start + taken.num_bytes, rest[taken.num_bytes :]
        if rest:
            version = self.source.read_into(name, start, rest, version=self._versions.of(blob))
            self._versions.check(blob, version)
        return len(rest) == len(memory)

    def read_cached(self, part: Part, start: int, memory: memoryview) -> bool:
        """True if the node's cache has filled the memory with the part's bytes from `start` on.
        They are not verified.
        """
        return (
            self._cache is not None
            and part.digest is not None
            and self._cache.read_into(part.digest, start, memory)
        )

    def is_right(self, part: Part, stored: memoryview) -> bool:
        """True if these are the part's bytes; False: to be fetched again. Raises `IntegrityError` when they were wrong
        before. A part without a digest was never packed: there is nothing to compare with.
        """
        if part.digest is None:
            return True
        begun_at_s = time.monotonic()
        with self._meter.measure(Phase.VERIFY, part.size_bytes):
            got = blake3(stored).digest()
        right = got == part.digest
        self._add_span(Phase.VERIFY, part, begun_at_s, right=right)
        if right:
            return True
        if self._cache is None or not self._cache.reject(part.digest):
            if part.index in self._suspect:
                raise wrong_digest(self.manifest, part, self.source_url, got)
            self._suspect.add(part.index)
        self._meter.refetched(part.size_bytes)
        return False

    def read(self, part: Part, stored: memoryview, *, ends_with_outage: bool = False) -> None:
        """Fill `stored`, all of the part's bytes, from the cache or the store, verified. Raises `IntegrityError` when
        they are wrong twice, and as `read_range` does, naming the part.

        With `ends_with_outage`, no part is asked for once the store did not answer for one of them: an outage is waited
        for once.
        """
        self._suspect.discard(part.index)
        while True:
            begun_at_s = time.monotonic()
            if not self.read_cached(part, 0, stored):
                if ends_with_outage and self._outage is not None:
                    raise self._outage
                try:
                    self.read_range(part.blob, part.offset_bytes, stored)
                except Exception as error:
                    named = in_part(error, self.manifest, part, self.source_url)
                    if isinstance(named, UnavailableError):
                        self._outage = named
                    raise named from error
            self._add_span(Phase.FETCH, part, begun_at_s)
            if self.is_right(part, stored):
                return

    def fill(
        self,
        part: Part,
        stored: memoryview,
        place: Place,
        scratch: Scratch,
        *,
        resident: ResidentBase | None = None,
    ) -> None:
        """Decode the part's verified bytes into its segments' own memory, which `place` gives. Differences are added to
        the `resident` base's values, where there is one. Raises `IntegrityError`, naming the part.
        """
        self.deliver(part, stored, lambda part, stored: self._fill(part, stored, place, scratch, resident))

    def deliver(self, part: Part, stored: memoryview, decode: Callable[[Part, memoryview], None]) -> None:
        """Have the part's verified bytes decoded by a function of the caller's. Raises as it does, naming the part."""
        begun_at_s = time.monotonic()
        try:
            with self._meter.measure(Phase.DECODE, part.size_bytes):
                decode(part, stored)
        except Exception as error:
            raise in_part(error, self.manifest, part, self.source_url) from error
        self._add_span(Phase.DECODE, part, begun_at_s)

    def keep(self, part: Part, stored: memoryview) -> None:
        """Offer the part's verified bytes to the node's cache, which copies what it takes."""
        if self._cache is not None and part.digest is not None:
            self._cache.offer(part.digest, stored)

    def _fill(
        self, part: Part, stored: memoryview, place: Place, scratch: Scratch, resident: ResidentBase | None
    ) -> None:
        # numpy is imported by the first thread that decodes: the first ranges are on their way by then.
        import numpy as np

        from ..format.fill import SegmentMemory, fill_part

        stretches = []
        for segment in part.segments:
            tensor = self.manifest.tensors[segment.tensor]
            out = place(segment)
            if not segment.planes:
                assert resident is not None
                resident.copy(tensor, segment, out)
                continue
            is_added = resident is not None and segment.is_delta
            values = resident.values(tensor, segment) if resident is not None and is_added else None
            stretches.append(SegmentMemory(tensor, segment, np.frombuffer(out, np.uint8), values))
        fill_part(stretches, part.tier, stored, scratch)

    def _add_span(self, phase: Phase, part: Part, begun_at_s: float, **attributes: object) -> None:
        if self._timeline is None or self._spans_left == 0:
            return
        if self._spans_left is not None:
            self._spans_left -= 1
        add_part_span(
            self._timeline,
            phase,
            self.manifest,
            part,
            begun_at_s=begun_at_s,
            ended_at_s=time.monotonic(),
            **attributes,
        )


def open_cache(options: LoadOptions, manifest: Manifest) -> PartCache | None:
    """The node's cache, if the options name one; turned off for weights without digests."""
    if options.cache_dir is None:
        return None
    from ..cache.part_cache import PartCache  # most loads have none

    cache = PartCache(options.cache_dir, budget_bytes=options.cache_bytes)
    if any(part.digest is None and part.size_bytes for part in manifest.parts):
        cache.turn_off(
            "plain safetensors are not cached, as nothing says what their bytes should be: pack the model"
        )
    return cache
