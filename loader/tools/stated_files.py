"""Files whose store states their SHA-256, such as the Hub's, read front to back and compared with it.

`verify` reads each such file once. `pack` reads ranges in another order, some of them twice, and holds
none of them; so `RecordedReads` takes note of a digest of each range, and at the end the files are read
once more: every range must be what it was, and every file what its store states. It does not know what
the ranges were read for.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from typing import NamedTuple

from blake3 import blake3

from ..errors import IntegrityError
from ..format.manifest import Blob, Manifest
from ..sources.base import Converted, Mappable, ObjectInfo, Remote, Source
from ..sources.hub.cache import CachedModel
from .part_reader import default_threads, map_in_order

RANGE_BYTES = 2 << 20
_MAX_THREADS = 8  # each of which may have four ranges ahead


class StoredFile(NamedTuple):
    """A file as its store has it."""

    source: Source
    info: ObjectInfo  # with a SHA-256


class EarlierRead(NamedTuple):
    """Bytes [begin, end) as they were read before, and their BLAKE3."""

    begin: int
    end: int
    digest: bytes


def stated_files(source: Source, manifest: Manifest) -> tuple[StoredFile, ...]:
    """The files that hold a model's plain weights, where their store states the digests of all of them."""
    if isinstance(source, Converted):
        files = [_with_digest(*source.stored_file())]
    elif manifest.digest is None:
        files = [_with_digest(source, _info(blob)) for blob in manifest.blobs]
    else:
        return ()  # an artifact has digests of its own
    return tuple(files) if all(file.info.sha256 is not None for file in files) else ()


def _info(blob: Blob) -> ObjectInfo:
    sha256 = None if blob.stated is None else blob.stated.sha256
    return ObjectInfo(blob.name, blob.size_bytes, blob.version or "", sha256=sha256)


def _with_digest(source: Source, info: ObjectInfo) -> StoredFile:
    if isinstance(source, CachedModel):
        info = info._replace(sha256=source.stated_sha256(info.name))
    return StoredFile(source, info)


def compare_file(
    file: StoredFile,
    *,
    reads: Iterable[EarlierRead] = (),
    threads: int | None = None,
    done: Callable[[int], None] = lambda num_bytes: None,
) -> None:
    """Read the whole file in order, and compare it with the digest that its store states, and with earlier
    `reads` of it. `done` is called with the number of each range's bytes. Blocks; memory: 64 MiB.

    Raises `IntegrityError` where one differs, and the source's errors.
    """
    source, info = file
    digest, ahead = hashlib.sha256(), _ComparedReads(reads)

    def read(begin: int) -> memoryview:
        buffer = memoryview(bytearray(min(RANGE_BYTES, info.size_bytes - begin)))
        source.read_into(info.name, begin, buffer, version=info.version or None)
        return buffer

    threads = min(threads or default_threads(), _MAX_THREADS)
    begins = range(0, info.size_bytes, RANGE_BYTES)
    is_same = True
    with closing(map_in_order(read, begins, threads)) as ranges:
        for begin, data in zip(begins, ranges, strict=True):
            digest.update(data)
            is_same = ahead.update(begin, data) and is_same
            done(len(data))
    check_digest(source.url, info, digest.digest(), is_same=is_same)


def check_digest(source_url: str, info: ObjectInfo, got: bytes, *, is_same: bool = True) -> None:
    """Raise `IntegrityError` where `got` is not the SHA-256 that the store states, or where the file is not the
    same in two reads. A store that states none is right.
    """
    if is_same and info.sha256 in (None, got):
        return
    where, expected = f"{info.name} in {source_url}", "" if info.sha256 is None else info.sha256.hex()
    reason = f"its SHA-256 is {got.hex()}, and its store states {expected}"
    raise IntegrityError(
        f"{where} is damaged: {reason if is_same else 'it differs in two reads'}",
        where=where,
        expected=expected,
        got=got.hex(),
        hint="Start again. If that does not help, a proxy or a mirror changes the file.",
    )


class _ComparedReads:
    """Earlier reads of a file, whose bytes come by once more in order."""

    def __init__(self, reads: Iterable[EarlierRead]) -> None:
        self._waiting = sorted(set(reads), reverse=True)
        self._open: list[tuple[EarlierRead, blake3]] = []

    def update(self, begin: int, data: memoryview) -> bool:
        """False if one of those that end here was another."""
        end = begin + len(data)
        while self._waiting and self._waiting[-1].begin < end:
            self._open.append((self._waiting.pop(), blake3()))
        for read, digest in self._open:
            digest.update(data[max(0, read.begin - begin) : read.end - begin])
        ended = [(read, digest) for read, digest in self._open if read.end <= end]
        self._open = [(read, digest) for read, digest in self._open if read.end > end]
        return all(digest.digest() == read.digest for read, digest in ended)


class RecordedReads:
    """The ranges that were read of files whose store states a digest. Thread-safe."""

    def __init__(self) -> None:
        self._source: Source | None = None
        self._lock = threading.Lock()
        self.infos: dict[str, ObjectInfo] = {}  # of those files
        self._reads: dict[str, set[EarlierRead]] = {}

    def around(self, source: Source) -> Source:
        """The source, with its reads recorded; itself where it is on this machine."""
        if isinstance(source, Mappable) or not isinstance(source, Remote):
            return source
        self._source = source
        return _RecordingSource(source, self)

    @property
    def total_bytes(self) -> int:
        """Of the files that `compare` will read."""
        return sum(self.infos[name].size_bytes for name in self._reads)

    def add(self, name: str, begin: int, data: memoryview) -> None:
        if name in self.infos:
            read = EarlierRead(begin, begin + len(data), blake3(data).digest())
            with self._lock:
                self._reads.setdefault(name, set()).add(read)

    def compare(self, threads: int, done: Callable[[int], None]) -> None:
        """Read all files again, of which ranges were read. Raises as `compare_file`."""
        for name, reads in self._reads.items():
            assert self._source is not None
            file = StoredFile(self._source, self.infos[name])
            compare_file(file, reads=reads, threads=threads, done=done)


class _RecordingSource:
    """A `Source` that has the ranges noted that are read of it. Whole small files are the source's to check."""

    def __init__(self, source: Source, reads: RecordedReads) -> None:
        self._source, self._reads = source, reads
        self.read, self.close = source.read, source.close
        assert isinstance(source, Remote)
        self.quiesce = source.quiesce

    @property
    def url(self) -> str:
        return self._source.url

    def stat(self, name: str) -> ObjectInfo:
        return self._noted(self._source.stat(name))

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        return map(self._noted, self._source.list(prefix))

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        found = self._source.read_into(name, start, buffer, version=version)
        self._reads.add(name, start, buffer)
        return found

    def _noted(self, info: ObjectInfo) -> ObjectInfo:
        if info.sha256 is not None:
            self._reads.infos[info.name] = info
        return info
