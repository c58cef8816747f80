"""The stored side of a snapshot: blocks' bytes ↔ parts of a blob, and reading them, verified.

Invariant: content is handed out only after its part's digest was found right and every plane had decoded to exactly the
size that it must have. Coding is that of weights (`bytes` in `docs/format.md`): the bytes of the elements lie side by
side, so that the one with the exponents, which are much alike, is compressed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3

from ....loader.errors import IntegrityError
from ....loader.format.codec import Scratch, decode_planes, encode_segment
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
from .snapshot import ELEMENT_DTYPES, SNAPSHOT_NAME, Identity, Snapshot, SnapshotPart
from .snapshot_json import MAX_SNAPSHOT_JSON_BYTES, parse_snapshot

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


def open_snapshot(source: Source, *, digest: bytes | None = None) -> tuple[Snapshot, str]:
    """What `snapshot.json` says, and the version of the object, for who replaces it.

    Raises `NotFoundError` when there is none, `SnapshotError`, `IntegrityError` for another one than was pinned, and
    the source's errors.
    """
    data, info = source.read(SNAPSHOT_NAME, max_bytes=MAX_SNAPSHOT_JSON_BYTES)
    return parse_snapshot(data, expected_digest=digest), info.version


class SnapshotReader:
    """Reads parts of one snapshot. Thread-safe."""

    def __init__(self, source: Source, snapshot: Snapshot) -> None:
        self._source = source
        self._snapshot = snapshot

    def read(self, part: SnapshotPart) -> Bytes:
        """(blocks, block_bytes) The contents of the part's blocks, the caller's from now on.

        Blocks. Raises `IntegrityError` naming a part that is not what the snapshot says, and the source's errors.
        """
        return decode_blocks(self._snapshot.identity, part, self.read_stored(part), where=self._where(part))

    def read_stored(self, part: SnapshotPart) -> memoryview:
        """The part's verified bytes as they are stored. Errors as those of `read`."""
        stored = memoryview(bytearray(part.size_bytes))
        blob = self._snapshot.blobs[part.blob]
        self._source.read_into(blob.name, part.offset_bytes, stored)
        got = blake3(stored).digest()
        if got != part.digest:
            where = self._where(part)
            raise IntegrityError(
                f"{where} has a wrong digest",
                where=where,
                expected=part.digest.hex(),
                got=got.hex(),
                hint="Export the snapshot again.",
            )
        return stored

    def _where(self, part: SnapshotPart) -> str:
        end = part.offset_bytes + part.size_bytes
        return f"{self._snapshot.blobs[part.blob].name}, bytes {part.offset_bytes} to {end}"


def encode_blocks(identity: Identity, content: Bytes) -> tuple[bytes, tuple[Plane, ...]]:
    """What is stored of these blocks, content (blocks, block_bytes) contiguous, and the planes that it is made of."""
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
    """(blocks, block_bytes) What `stored`, the part's verified bytes, holds. Raises `IntegrityError`."""
    content = np.empty((len(part.hashes), identity.block_bytes), np.uint8)
    count = content.size // identity.element_bytes
    tensor = Tensor(0, where, ELEMENT_DTYPES[identity.element_bytes], (count,), 0, Encoding.BYTES, 0)
    segment = Segment(0, 0, count, part.planes)
    decode_planes(tensor, segment, Tier.DRAFT, stored, content.reshape(-1).data, Scratch())
    return content


def place_part(
    identity: Identity, hashes: Sequence[bytes], content: Bytes, *, blob: int, end_bytes: int
) -> tuple[SnapshotPart, bytes]:
    """A part with these blocks behind the one that ends at `end_bytes`, and what the blob is to be continued with."""
    offset_bytes = align(end_bytes, PLANE_ALIGNMENT_BYTES)
    stored, planes = encode_blocks(identity, content)
    part = SnapshotPart(blob, offset_bytes, len(stored), blake3(stored).digest(), planes, tuple(hashes))
    return part, bytes(offset_bytes - end_bytes) + stored
