"""The stored parts of a snapshot: blocks' bytes ↔ parts of a blob, and verified reads.

Invariant: content is returned only after its part's digest matched and every plane decoded to
exactly its expected size. The coding is that of weights (`bytes` in `docs/format.md`): the bytes of
the elements are stored as planes, so that the plane of exponents, which are similar, is compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from ....loader.errors import FormatError, IntegrityError, NotFoundError
from ....loader.format.codec import encode_segment
from ....loader.format.fill import Scratch, decode_planes
from ....loader.format.manifest import (
    PLANE_ALIGNMENT_BYTES,
    Encoding,
    Plane,
    Segment,
    Tensor,
    Tier,
    align,
)
from ....loader.sources.base import Source
from .snapshot import (
    ELEMENT_DTYPES,
    MAX_SNAPSHOT_JSON_BYTES,
    SNAPSHOT_NAME,
    Identity,
    Snapshot,
    SnapshotPart,
    parse_snapshot,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


def open_snapshot(source: Source, *, digest: bytes | None = None) -> tuple[Snapshot, str]:
    """Read `snapshot.json`; a second time where it is refused, as bits flip on the way, too. Returns
    it and the version of the object, for a conditional replacement.

    Raises `NotFoundError` without one, `SnapshotError`, `IntegrityError` if it is not the pinned
    one, and the source's errors.
    """
    try:
        data, info = source.read(SNAPSHOT_NAME, max_bytes=MAX_SNAPSHOT_JSON_BYTES)
    except NotFoundError as error:
        hint = f"Give the folder that holds {SNAPSHOT_NAME}, or make one: teneral kv export."
        raise NotFoundError(
            f"there is no KV snapshot at {source.url}", source=source.url, hint=hint
        ) from error
    try:
        return parse_snapshot(data, expected_digest=digest), info.version
    except FormatError:
        again, info = source.read(SNAPSHOT_NAME, max_bytes=MAX_SNAPSHOT_JSON_BYTES)
        if again == data:
            raise
    return parse_snapshot(again, expected_digest=digest), info.version


class SnapshotReader:
    """Reads parts of one snapshot. Thread-safe."""

    def __init__(self, source: Source, snapshot: Snapshot) -> None:
        self._source = source
        self._snapshot = snapshot

    def read(self, part: SnapshotPart) -> Bytes:
        """Read the contents of the part's blocks, (blocks, block_bytes), owned by the caller.

        Blocks. Raises `IntegrityError`, naming a part that does not match the snapshot, and the
        source's errors.
        """
        return decode_blocks(self._snapshot.identity, part, self.read_stored(part), where=self._where(part))

    def read_stored(self, part: SnapshotPart) -> memoryview:
        """Read the part's verified bytes as stored. Raises the same errors as `read`."""
        stored = memoryview(bytearray(part.size_bytes))
        blob = self._snapshot.blobs[part.blob]
        for _ in range(2):  # bits flip on the way, too
            self._source.read_into(blob.name, part.offset_bytes, stored)
            got = blake3(stored).digest()
            if got == part.digest:
                return stored
        where = self._where(part)
        raise IntegrityError(
            f"{where} has a wrong digest",
            where=where,
            expected=part.digest.hex(),
            got=got.hex(),
            hint="Export the snapshot again.",
        )

    def _where(self, part: SnapshotPart) -> str:
        end = part.offset_bytes + part.size_bytes
        return f"{self._snapshot.blobs[part.blob].name}, bytes {part.offset_bytes} to {end}"


def encode_blocks(identity: Identity, content: Bytes) -> tuple[bytes, tuple[Plane, ...]]:
    """Encode these blocks, content (blocks, block_bytes) contiguous. Returns the stored bytes and
    their planes.
    """
    dtype = ELEMENT_DTYPES[identity.element_bytes]
    ((_, coded),) = encode_segment(dtype, Encoding.BYTES, content.reshape(-1)).items()
    stored = bytearray()
    planes: list[Plane] = []
    for codec, data in coded:
        stored += bytes(-len(stored) % PLANE_ALIGNMENT_BYTES)
        planes.append(Plane(codec, len(stored), len(data)))
        stored += data
    return bytes(stored), tuple(planes)


def decode_blocks(identity: Identity, part: SnapshotPart, stored: memoryview, *, where: str) -> Bytes:
    """Decode `stored`, the part's verified bytes, to (blocks, block_bytes). Raises
    `IntegrityError`.
    """
    content = np.empty((len(part.hashes), identity.block_bytes), np.uint8)
    count = content.size // identity.element_bytes
    tensor = Tensor(0, where, ELEMENT_DTYPES[identity.element_bytes], (count,), 0, Encoding.BYTES, 0)
    segment = Segment(0, 0, count, part.planes)
    decode_planes(tensor, segment, Tier.DRAFT, stored, content.reshape(-1).data, Scratch())
    return content


def place_part(
    identity: Identity, hashes: Sequence[bytes], content: Bytes, *, blob: int, end_bytes: int
) -> tuple[SnapshotPart, bytes]:
    """A part with these blocks after the one that ends at `end_bytes`, and the bytes to append to
    the blob.
    """
    offset_bytes = align(end_bytes, PLANE_ALIGNMENT_BYTES)
    stored, planes = encode_blocks(identity, content)
    part = SnapshotPart(blob, offset_bytes, len(stored), blake3(stored).digest(), planes, tuple(hashes))
    return part, bytes(offset_bytes - end_bytes) + stored
