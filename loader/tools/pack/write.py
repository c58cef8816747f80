"""Encoded parts, the blobs that they are written to, and the publication of a finished artifact.

An encoding job is the stretches of one part. It becomes one part of each tier that any of them has.
Jobs run in worker threads; nearly all of their time is spent without the GIL.

Everything lies under `blobs/<generation>/`, a name that no other packing uses, so that nothing of
an artifact that is there already is touched and everything can be removed again. The manifest makes
it visible in one step: it is put on the condition that the destination is as it was found.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from ...errors import (
    AlreadyExistsError,
    FormatError,
    LoadCancelledError,
    NotFoundError,
    SourceError,
    TeneralError,
)
from ...format.codec import encode_differences, encode_segment, encoding_room_bytes, num_values
from ...format.encoding import Encoding
from ...format.layout import Stretch
from ...format.limits import MANIFEST_NAME, MAX_MANIFEST_BYTES
from ...format.manifest import PLANE_ALIGNMENT_BYTES, Blob, Codec, File, Plane, Segment, Tier, align
from ...format.manifest_json import blob_folder
from ...sources.base import ObjectInfo, ObjectWriter, Source, Store
from .content import BaseReader, ContentReader

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_PADDING = bytes(PLANE_ALIGNMENT_BYTES)


@dataclass(frozen=True, slots=True)
class EncodedPart:
    """A part's content in pieces that follow one another. They may be views of the job's buffer."""

    tier: Tier
    group: int
    segments: tuple[Segment, ...]
    pieces: tuple[bytes | memoryview, ...]
    size_bytes: int
    digest: bytes


class PartEncoder:
    """Reads and encodes the jobs of one checkpoint. Thread-safe."""

    def __init__(self, content: ContentReader, base: BaseReader | None = None) -> None:
        """`base` has the base's values of tensors that are stored as differences."""
        self._content = content
        self._base = base
        self._is_stopped = threading.Event()

    def stop(self) -> None:
        """Make jobs in work end with `LoadCancelledError` at their next tensor."""
        self._is_stopped.set()
        self._content.stop()

    def encode(self, stretches: Sequence[Stretch], buffer: Bytes) -> list[EncodedPart]:
        """The job's parts, one a tier, in the tiers' order.

        `buffer` takes the tensors' bytes and the planes of floats (`buffer_bytes(stretches)`), and must
        stay untouched while the result is used. Other planes take memory besides: three times the
        largest tensor's stretch, and the parts themselves.
        """
        builders = [_PartBuilder(tier) for tier in Tier]
        position = 0
        room = buffer[_content_bytes(stretches) :]
        for stretch in stretches:
            if self._is_stopped.is_set():
                raise LoadCancelledError("packing was stopped")
            tensor = stretch.tensor
            data = buffer[position : position + stretch.size_bytes]
            position += align(stretch.size_bytes)
            self._content.read(stretch, data)
            if tensor.encoding is Encoding.DELTA:
                assert self._base is not None
                planes = encode_differences(tensor.dtype, data, self._base.read(stretch))
            else:
                planes = encode_segment(tensor.dtype, tensor.encoding, data, room)
                room = room[encoding_room_bytes(tensor.encoding, stretch.count) :]
            values = num_values(tensor.encoding, data)
            for tier, coded in planes.items():
                builders[tier].add(stretch, coded, values)
        group = stretches[0].tensor.group
        return [builder.build(group) for builder in builders if builder.segments]


def buffer_bytes(stretches: Sequence[Stretch]) -> int:
    """The buffer that `PartEncoder.encode` needs: every tensor's stretch starts aligned in it, and
    the room for planes follows.
    """
    room = sum(encoding_room_bytes(stretch.tensor.encoding, stretch.count) for stretch in stretches)
    return _content_bytes(stretches) + room


def _content_bytes(stretches: Sequence[Stretch]) -> int:
    return sum(align(stretch.size_bytes) for stretch in stretches)


class _PartBuilder:
    """Lays the planes of one part one behind another, each at a multiple of 8 bytes."""

    def __init__(self, tier: Tier) -> None:
        self.tier = tier
        self.segments: list[Segment] = []
        self._pieces: list[bytes | memoryview] = []
        self._size_bytes = 0
        self._digest = blake3()

    def add(
        self, stretch: Stretch, coded: Sequence[tuple[Codec, bytes | memoryview]], values: int | None
    ) -> None:
        planes: list[Plane] = []
        for codec, content in coded:
            size_bytes = memoryview(content).nbytes
            planes.append(Plane(codec, self._size_bytes, size_bytes))
            self._append(content, size_bytes)
            if padding_bytes := -self._size_bytes % PLANE_ALIGNMENT_BYTES:
                self._append(_PADDING[:padding_bytes], padding_bytes)
        self.segments.append(
            Segment(stretch.tensor.index, stretch.start, stretch.count, tuple(planes), values)
        )

    def build(self, group: int) -> EncodedPart:
        return EncodedPart(
            tier=self.tier,
            group=group,
            segments=tuple(self.segments),
            pieces=tuple(self._pieces),
            size_bytes=self._size_bytes,
            digest=self._digest.digest(),
        )

    def _append(self, content: bytes | memoryview, size_bytes: int) -> None:
        self._pieces.append(content)
        self._digest.update(content)
        self._size_bytes += size_bytes


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
        # Name and size; the sizes of open ones are not known yet.
        self._blobs: list[tuple[str, int]] = []

    def append(self, tier: Tier, pieces: Iterable[bytes | memoryview], size_bytes: int) -> tuple[int, int]:
        """Store a part. Returns its blob's number and its offset. The pieces may be reused
        afterwards.
        """
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
        """Remove all that was written. A note on `reason` names what could not be removed."""
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


def find_replaced(store: Store, *, force: bool) -> ObjectInfo | None:
    """The manifest in the destination, None when that is free. Raises `AlreadyExistsError` without
    `force`, and `NotFoundError` for a bucket that does not exist.
    """
    try:
        info = store.stat(MANIFEST_NAME)
        if not force:
            raise AlreadyExistsError(
                f"there is an artifact at {store.url} already",
                source=store.url,
                name=MANIFEST_NAME,
                hint="Give another place, or replace it with --force.",
            )
    except NotFoundError as error:
        if error.is_bucket:
            raise
        return None
    return info


def publish(store: Store, writer: BlobWriter, data: bytes, replaced: ObjectInfo | None) -> None:
    """Put the manifest, which makes the artifact exist. On failure nothing of it is left."""
    try:
        if replaced is None:
            store.put(MANIFEST_NAME, data, if_absent=True)
        else:
            store.put(MANIFEST_NAME, data, if_version=replaced.version)
    except BaseException as error:
        # The store may have taken it although its answer was lost: then a retry finds our own
        # manifest in the way, and removing the blobs would leave an artifact without content.
        if _is_published(store, data, error):
            if isinstance(error, SourceError):
                return
            raise
        writer.discard(error)
        if isinstance(error, AlreadyExistsError):
            raise AlreadyExistsError(
                f"another writer put an artifact at {store.url} while this one was packed",
                source=store.url,
                name=MANIFEST_NAME,
                hint="Nothing of theirs was changed. Look at it, or replace it with --force.",
            ) from error
        raise


def _is_published(store: Store, data: bytes, error: BaseException) -> bool:
    """True if our manifest is there. Where that is unknown, raises `error` and leaves the blobs
    alone.
    """
    try:
        return store.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)[0] == data
    except (NotFoundError, FormatError):
        return False
    except SourceError:
        error.add_note(f"It is unknown whether {MANIFEST_NAME} was written, so the blobs were not removed.")
        raise error from None
