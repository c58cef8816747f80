"""A part that has arrived becomes its image: tables, and planes as the device's kernels take them.

Of what is decompressed here every check of the format is made here; what the device decompresses has its frames'
headers checked. The part must have been verified. Works without the GIL for the most part. It does not know rings or
devices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..format.codec import unpack_planes
from ..format.manifest import FRAME_ELEMENTS, Manifest, Part
from ..format.zstd import FrameReader
from .image import PartImage, PlacedPlane, pack_tables


def fill_image(
    image: PartImage,
    manifest: Manifest,
    part: Part,
    starts: Sequence[int],
    stored: memoryview,
    out: memoryview,
) -> None:
    """Write into `out`, the image's memory, at least all that is to be sent of it.

    `image` was planned for this part with these `starts`. Raises `IntegrityError` when a plane is not what its codec
    says, or has bits that mean nothing; `out` is then undefined.
    """
    pack_tables(image, manifest, part, starts, out)
    memory = np.frombuffer(out, np.uint8)
    chunks: list[tuple[int, int, int, int]] = []
    for segment, placed in zip(part.segments, image.planes, strict=True):
        tensor = manifest.tensors[segment.tensor]
        outs = [
            memory[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
            if plane.coded_bytes is None
            else None
            for plane in placed
        ]
        unpack_planes(tensor, segment, part.tier, stored, outs)
        for plane, place in zip(segment.planes, placed, strict=True):
            if place.coded_bytes is not None:
                coded = stored[plane.offset_bytes : plane.offset_bytes + plane.size_bytes]
                chunks += _keep_coded(coded, place, memory, where=f"tensor {tensor.name!r}")
    if image.chunks is not None:
        begin = image.chunks.table_bytes
        table = np.array(chunks, "<u4").tobytes()
        out[begin : begin + len(table)] = table


def _keep_coded(
    coded: memoryview, place: PlacedPlane, memory: npt.NDArray[np.uint8], *, where: str
) -> list[tuple[int, int, int, int]]:
    """Copy a plane's frames as they are. Of each, as `resolve_chunks` reads it: where it is and how long, coded,
    decoded."""
    assert place.coded_bytes is not None
    begin = place.coded_bytes
    np.copyto(memory[begin : begin + len(coded)], np.frombuffer(coded, np.uint8))
    frames = FrameReader(coded, FRAME_ELEMENTS, where=where)
    extents = frames.skip(place.size_bytes)
    frames.finish()
    sizes = [FRAME_ELEMENTS] * (len(extents) - 1) + [place.size_bytes - FRAME_ELEMENTS * (len(extents) - 1)]
    return [
        (begin + offset, length, place.offset_bytes + number * FRAME_ELEMENTS, size)
        for number, ((offset, length), size) in enumerate(zip(extents, sizes, strict=True))
    ]
