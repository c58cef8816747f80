"""Checks of whole plain files against the SHA-256 that their store states, behind a load.

    head, read again ─┐
    parts, as their   ├─► SHA-256, front to back ─► equal: the file is settled; else the load fails
    groups arrive ────┘

SHA-256 has one order, that of the file, and a load another, that of the forward pass. So the bytes are
taken from the slabs, once they are there; a file whose first tensor arrives last is hashed at the end.
Gates do not wait for it: the load is exact only when all files were compared. Its threads yield to
those that compute. Values that are decoded, or lie elsewhere than in this process's memory, are not
checked here. It does not know which stores state digests.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING

from ..errors import IntegrityError
from ..format.manifest import Manifest, Part
from ..process.cpu import available_cores
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
        blob = self._parts.manifest.blobs[number]
        stated = blob.stated
        assert stated is not None
        parts = _parts_of(self._parts.manifest, number)
        if parts:
            self._load.wait(parts[0].group)  # at the start of a load its own reads come first
        digest, num_bytes = hashlib.sha256(), 0
        for piece in self._head(number, stated.head_bytes):
            digest.update(piece)
        # The tensors' places were read from another answer than this one.
        is_same = digest.digest() == stated.head_sha256
        begun_at_s: float | None = None
        for part in parts:
            self._load.wait(part.group)
            if self._load.failure is not None:  # gates that have opened stay open
                return
            begun_at_s = begun_at_s or time.monotonic()
            with self._meter.measure(Phase.VERIFY, part.size_bytes):
                for segment in part.segments:
                    digest.update(self._target.place(segment))
            num_bytes += part.size_bytes
        is_right = is_same and digest.digest() == stated.sha256
        if begun_at_s is not None:
            origin_s = self._timeline.started_at
            self._timeline.add(
                Phase.VERIFY, blob.name, begun_at_s - origin_s, time.monotonic() - origin_s, right=is_right
            )
        if not is_right:
            where = f"{blob.name} in {self._parts.source_url}"
            expected, got = stated.sha256.hex(), digest.hexdigest()
            reason = f"its SHA-256 is {got}, and its store states {expected}"
            raise IntegrityError(
                f"{where} is damaged: {reason if is_same else 'its header differs in two reads'}",
                where=where,
                expected=expected,
                got=got,
                hint="Start again. If that does not help, a proxy or a mirror changes the file.",
            )
        self._meter.checked(num_bytes)
        self._settle()

    def _head(self, number: int, size_bytes: int) -> Iterator[bytes]:
        for begin in range(0, size_bytes, HEAD_BYTES):
            piece = bytearray(min(HEAD_BYTES, size_bytes - begin))
            self._parts.read_range(number, begin, memoryview(piece))
            yield bytes(piece)


def _parts_of(manifest: Manifest, blob: int) -> list[Part]:
    """In file order. Safetensors have no gaps, so these and the head are the whole file."""
    return sorted((part for part in manifest.parts if part.blob == blob), key=lambda part: part.offset_bytes)
