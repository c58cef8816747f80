"""Writes the objects of one packing: the blobs of all tiers, and copies of the small files.

Everything lies under `blobs/<generation>/`, a name that no other packing uses, so that nothing of an
artifact that is there already is touched and everything can be removed again. Nothing refers to it until a
manifest does. Knows no planes.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from blake3 import blake3

from ..errors import TeneralError
from ..format.manifest import Blob, File, Tier
from ..format.manifest_json import blob_folder
from ..sources.base import ObjectInfo, ObjectWriter, Source, Store

MAX_BLOB_BYTES = 4 * 1024**3
_COPY_BYTES = 4 * 1024 * 1024


class BlobWriter:
    """Knows every object that it began, for the case that they must go. Used by one thread."""

    def __init__(self, store: Store, *, max_blob_bytes: int = MAX_BLOB_BYTES) -> None:
        self._store = store
        self._max_blob_bytes = max_blob_bytes
        self.generation = secrets.token_hex(6)
        self._folder = blob_folder(self.generation)
        self.stored_bytes = 0
        self._open: dict[Tier, _OpenBlob] = {}
        self._names: list[str] = []  # of all objects that were begun
        self._blobs: list[tuple[str, int]] = []  # name and size; the sizes of open ones are not known yet

    def append(self, tier: Tier, pieces: Iterable[bytes | memoryview], size_bytes: int) -> tuple[int, int]:
        """Store a part. Returns its blob's number and its offset. The pieces may be reused afterwards."""
        blob = self._open.get(tier)
        if blob is not None and blob.size_bytes + size_bytes > self._max_blob_bytes:
            self._finish(tier)
            blob = None
        if blob is None:
            blob = self._open[tier] = self._begin(tier)
        offset_bytes = blob.size_bytes
        for piece in pieces:
            blob.writer.write(piece)
        blob.size_bytes += size_bytes
        self.stored_bytes += size_bytes
        return blob.number, offset_bytes

    def copy_file(self, source: Source, info: ObjectInfo) -> File:
        """Store a small file of the source; holds 4 MiB of it at a time."""
        path = f"{self._folder}files/{info.name}"
        self._names.append(path)
        digest = blake3()
        buffer = bytearray(min(info.size_bytes, _COPY_BYTES))
        with self._store.create(path) as writer, memoryview(buffer) as view:
            for start in range(0, info.size_bytes, _COPY_BYTES):
                piece = view[: min(_COPY_BYTES, info.size_bytes - start)]
                source.read_into(info.name, start, piece, version=info.version)
                digest.update(piece)
                writer.write(piece)
        self.stored_bytes += info.size_bytes
        return File(info.name, path, info.size_bytes, digest.digest())

    def put_file(self, name: str, content: bytes) -> File:
        """Store a small file of our own."""
        path = f"{self._folder}files/{name}"
        self._names.append(path)
        with self._store.create(path) as writer:
            writer.write(content)
        self.stored_bytes += len(content)
        return File(name, path, len(content), blake3(content).digest())

    def finish(self) -> tuple[Blob, ...]:
        """Commit what is open. All blobs in the order of their numbers."""
        for tier in list(self._open):
            self._finish(tier)
        return tuple(Blob(name, size_bytes) for name, size_bytes in self._blobs)

    def discard(self, reason: BaseException) -> None:
        """Remove all that was written. What cannot be removed is said in a note on `reason`."""
        for blob in self._open.values():
            try:
                blob.writer.abort()
            except TeneralError as error:
                reason.add_note(f"An unfinished upload may be left at {self._store.url}: {error}")
        self._open.clear()
        for name in self._names:
            try:
                self._store.delete(name)
            except TeneralError as error:
                reason.add_note(f"{name} could not be removed from {self._store.url}: {error}")
        self._names.clear()

    def _begin(self, tier: Tier) -> _OpenBlob:
        kind = tier.name.lower()
        serial = sum(name.startswith(f"{self._folder}{kind}-") for name, _ in self._blobs)
        name = f"{self._folder}{kind}-{serial:03}.bin"
        self._names.append(name)
        self._blobs.append((name, 0))
        return _OpenBlob(len(self._blobs) - 1, self._store.create(name))

    def _finish(self, tier: Tier) -> None:
        blob = self._open[tier]
        blob.writer.commit()
        del self._open[tier]
        self._blobs[blob.number] = (self._blobs[blob.number][0], blob.size_bytes)


class _OpenBlob:
    def __init__(self, number: int, writer: ObjectWriter) -> None:
        self.number = number
        self.writer = writer
        self.size_bytes = 0
