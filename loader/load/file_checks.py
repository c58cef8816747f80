"""Checks of whole plain files against the SHA-256 that their store states, behind a load.

    head, read again ─┐
    parts, as their   ├─► SHA-256, front to back ─► equal: the file is settled; else the load fails
    groups arrive ────┘

SHA-256 has one order, that of the file, and a load another, that of the forward pass. So the bytes are
taken from the slabs, once they are there; a file whose first tensor arrives last is hashed at the end.
To begin earlier, such a tensor (tied embeddings, which the head needs last) would have to come before
the layers, and the first answer with it; SHA-256 does not begin in the middle.
A source that makes weights of another file makes that file's bytes of them again (`Converted`).
Gates do not wait for it: the load is exact only when all files were compared. Its threads yield to
those that compute. Parts that are decoded, or lie elsewhere than in this process's memory, are not
checked here. It does not know which stores state digests.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import IntegrityError
from ..format.manifest import Manifest, StatedDigest
from ..process.cpu import available_cores
from ..sources.base import Converted
from .accounting import Phase

if TYPE_CHECKING:
    from ..timeline import Timeline
    from .accounting import Meter
    from .base import HostLoad
    from .parts import Parts
    from .targets.base import Target

HEAD_BYTES = 1 << 20  # read at once, of what is in front of the tensors
NICENESS = 5
MAX_THREADS = 4


class FileChecks:
    """The checks of one load's files. `run` is the body of its threads, each of which takes a file."""

    def __init__(
        self,
        load: HostLoad,
        parts: Parts,
        target: Target,
        settle: Callable[[], None],
        meter: Meter,
        timeline: Timeline,
    ) -> None:
        """The `load` waits for the `parts` in the `target`. `settle` counts a file as compared."""
        self._load, self._parts, self._target, self._settle = load, parts, target, settle
        self._meter, self._timeline = meter, timeline
        files = parts.manifest.stated_blobs
        self._left = iter(files)
        self._lock = threading.Lock()
        self.num_threads = max(1, min(len(files), available_cores() // 2, MAX_THREADS))

    def run(self) -> None:
        """Check files until none is left. Raises `IntegrityError` for one that differs, and the errors
        of the load and the source.
        """
        with suppress(OSError, AttributeError):  # where a thread has a priority of its own: Linux
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
        while (blob := self._next()) is not None:
            self._check(blob)

    def _next(self) -> int | None:
        with self._lock:
            return next(self._left, None)

    def _check(self, number: int) -> None:
        stated = self._parts.manifest.blobs[number].stated
        assert stated is not None
        values = _LoadedBytes(self._load, self._target, self._parts.manifest, number)
        values.wait_first()  # at the start of a load its own reads come first
        digest, pieces = self._content(number, stated, values)
        begun_at_s = time.monotonic()
        for piece in pieces:
            with self._meter.measure(Phase.VERIFY, len(piece)):
                digest.update(piece)
        is_right = digest.digest() == stated.sha256
        origin_s, ended_at_s = self._timeline.started_at, time.monotonic()
        name = self._parts.manifest.blobs[number].name
        self._timeline.add(Phase.VERIFY, name, begun_at_s - origin_s, ended_at_s - origin_s, right=is_right)
        if not is_right:
            expected, got = stated.sha256.hex(), digest.hexdigest()
            raise self._damaged(
                number, f"its SHA-256 is {got}, and its store states {expected}", expected, got
            )
        self._meter.checked(values.size_bytes)
        self._settle()

    def _content(
        self, number: int, stated: StatedDigest, values: _LoadedBytes
    ) -> tuple[hashlib._Hash, Iterator[memoryview]]:
        """The file's SHA-256 as far as its head, and the bytes behind it."""
        if isinstance(self._parts.source, Converted):
            return self._parts.source.original(values.between)
        digest = hashlib.sha256()
        for begin in range(0, stated.head_bytes, HEAD_BYTES):
            piece = bytearray(min(HEAD_BYTES, stated.head_bytes - begin))
            self._parts.read_range(number, begin, memoryview(piece))
            digest.update(piece)
        # The tensors' places were read from another answer than this one.
        if digest.digest() != stated.head_sha256:
            expected, got = stated.head_sha256.hex(), digest.hexdigest()
            raise self._damaged(number, "its header differs in two reads", expected, got)
        return digest, values.between(stated.head_bytes, self._parts.manifest.blobs[number].size_bytes)

    def _damaged(self, number: int, reason: str, expected: str, got: str) -> IntegrityError:
        where = f"{self._parts.manifest.blobs[number].name} in {self._parts.source_url}"
        if isinstance(self._parts.source, Converted):
            where = self._parts.source_url
        return IntegrityError(
            f"{where} is damaged: {reason}",
            where=where,
            expected=expected,
            got=got,
            hint="Start again. If that does not help, a proxy or a mirror changes the file.",
        )


class _LoadedBytes:
    """The bytes of one blob, in its own order, as a load has them."""

    def __init__(self, load: HostLoad, target: Target, manifest: Manifest, blob: int) -> None:
        self._load, self._target = load, target
        parts = (part for part in manifest.parts if part.blob == blob)
        # Safetensors have no gaps, so these and the head are the whole file.
        self._parts = sorted(parts, key=lambda part: part.offset_bytes)
        self.size_bytes = sum(part.size_bytes for part in self._parts)

    def wait_first(self) -> None:
        if self._parts:
            self._load.wait(self._parts[0].group)

    def between(self, begin: int, end: int) -> Iterator[memoryview]:
        """Bytes [begin, end) of the file, each stretch once it has arrived. Raises the load's errors."""
        first = bisect_right(self._parts, begin, key=lambda part: part.offset_bytes) - 1
        for part in self._parts[max(0, first) :]:
            if part.offset_bytes >= end:
                return
            self._load.wait(part.group)
            if (failure := self._load.failure) is not None:  # gates that have opened stay open
                raise failure
            position = part.offset_bytes
            for segment in part.segments:
                values = self._target.place(segment)
                yield values[max(0, begin - position) : max(0, end - position)]
                position += len(values)
