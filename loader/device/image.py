"""What is uploaded of one piece of a part, and what the device then does: an image, laid out by the manifest alone.

    image:  [ tables ][ planes, as they are before they are merged ] [ what is copied as it is ]
            └────────── uploaded, then merged by kernels ─────────┘ └─ sent straight to the weights ─┘

A table is a `Recipe` and an array of frames: which words a kernel makes of which bytes. Planes stand one behind
another, each at a multiple of `PLANE_BYTES`; with `coded`, a device that decompresses by itself gets planes as they
are stored, and room for them behind the image, which exists on the device only. So the link carries planes, never
expanded weights.

Whoever fills an image and whoever sends it (two processes) make the same one of the same manifest. Pure; sizes were
checked with the manifest. It does not know memory, devices or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ..format.manifest import (
    FRAME_ELEMENTS,
    Codec,
    Group,
    Manifest,
    Part,
    Tensor,
    align,
    decoded_plane_bytes,
)
from .recipe import MAX_PLANES, RECIPE_BYTES, Recipe, is_flat, recipe_for

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

PLANE_BYTES = 16  # what a kernel's widest access is aligned to
FRAME_ENTRY_BYTES = 48  # `struct Frame` in the kernels' source
CHUNK_ENTRY_BYTES = 16  # of `resolve_chunks`, there, too
CHUNK_STATUS_BYTES = 4  # that the device tells of each chunk that it decompresses


class Copy(NamedTuple):
    """Bytes that go from the image to the weights as they are."""

    image_bytes: int  # where they begin in the image
    weights_bytes: int  # and in the weights
    size_bytes: int


class Launch(NamedTuple):
    """One kernel over one table."""

    kernel: str
    table_bytes: int  # where the table begins in the image
    num_frames: int


class PlacedPlane(NamedTuple):
    """Where a plane lies in the image as the kernels read it, and, if it comes coded, as it was stored."""

    offset_bytes: int
    size_bytes: int
    coded_bytes: int | None = None  # where; None: it is decoded, or raw


class Chunks(NamedTuple):
    """Frames of zstd that the device decompresses before the kernels run."""

    table_bytes: int  # where their table begins in the image
    num: int
    total_bytes: int  # decompressed, of all; none has more than FRAME_ELEMENTS
    status_bytes: int  # where their statuses come to, in the host's image, once they are decompressed


class PartImage(NamedTuple):
    """One part's image. All numbers are from its first byte on."""

    size_bytes: int  # of memory that it takes in the ring, on both sides
    upload_bytes: int  # of its front, which the kernels need
    sent_bytes: int  # that cross the link, in all
    written_bytes: int  # of weights
    launches: tuple[Launch, ...]
    copies: tuple[Copy, ...]
    planes: tuple[tuple[PlacedPlane, ...], ...]  # of each segment; of a flat one where it stands in the image
    chunks: Chunks | None = None


class _Layout:
    """Hands out memory, one piece behind another."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, size_bytes: int) -> int:
        begin = align(self.end, PLANE_BYTES)
        self.end = begin + size_bytes
        return begin


class _Piece(NamedTuple):
    """A plane that a kernel reads."""

    segment: int  # its number in the part
    size_bytes: int  # decoded
    stored_bytes: int | None  # of one that the device decompresses


def slab_starts(groups: Sequence[Group]) -> tuple[list[int], int]:
    """Where each group's slab begins in the weights, one piece of memory, and how much that is."""
    ends = list(accumulate(align(group.slab_bytes) for group in groups))
    return [0, *ends[:-1]][: len(groups)], ends[-1] if ends else 0


def plan_image(manifest: Manifest, part: Part, starts: Sequence[int], *, coded: bool = False) -> PartImage:
    """The part's image; `starts` are those of the manifest's slabs. With `coded`, the device decompresses what it
    may."""
    tensors = [manifest.tensors[segment.tensor] for segment in part.segments]
    pieces, flat = _pieces(part, tensors, coded), _flat_segments(part, tensors)
    layout = _Layout()
    launches = tuple(
        Launch(recipe.kernel, layout.take(RECIPE_BYTES + num * FRAME_ENTRY_BYTES), num)
        for recipe, num in _num_frames(part, tensors).items()
    )
    coded_pieces = [piece for piece in pieces if piece.stored_bytes is not None]
    num_chunks = sum(-(-piece.size_bytes // FRAME_ELEMENTS) for piece in coded_pieces)
    chunk_table = layout.take(num_chunks * CHUNK_ENTRY_BYTES)
    uploaded = [
        layout.take(piece.size_bytes if piece.stored_bytes is None else piece.stored_bytes)
        for piece in pieces
    ]
    upload_bytes = layout.end
    copies = {
        number: Copy(layout.take(size_bytes), starts[part.group] + offset_bytes, size_bytes)
        for number, offset_bytes, size_bytes in flat
    }
    placed: list[list[PlacedPlane]] = [[] for _ in part.segments]
    for number, copy in copies.items():
        placed[number].append(PlacedPlane(copy.image_bytes, copy.size_bytes))
    for piece, place in zip(pieces, uploaded, strict=True):
        if piece.stored_bytes is None:
            plane = PlacedPlane(place, piece.size_bytes)
        else:
            plane = PlacedPlane(layout.take(piece.size_bytes), piece.size_bytes, place)
        placed[piece.segment].append(plane)
    status = layout.take(num_chunks * CHUNK_STATUS_BYTES)
    decompressed_bytes = sum(piece.size_bytes for piece in coded_pieces)
    return PartImage(
        size_bytes=layout.end,
        upload_bytes=upload_bytes,
        sent_bytes=upload_bytes + sum(copy.size_bytes for copy in copies.values()),
        written_bytes=sum(
            segment.count * tensor.element_bytes
            for segment, tensor in zip(part.segments, tensors, strict=True)
        ),
        launches=launches,
        copies=tuple(copies.values()),
        planes=tuple(map(tuple, placed)),
        chunks=Chunks(chunk_table, num_chunks, decompressed_bytes, status) if num_chunks else None,
    )


def pack_tables(
    image: PartImage, manifest: Manifest, part: Part, starts: Sequence[int], out: memoryview
) -> None:
    """Write the image's tables into its memory; what is told of chunks is written by who knows where they begin."""
    import numpy as np  # with whom decodes; plans are made before

    frame_type = np.dtype(
        [("out", "<u8"), ("count", "<u4"), ("unused", "<u4"), ("planes", "<u4", MAX_PLANES)]
    )
    assert frame_type.itemsize == FRAME_ENTRY_BYTES
    tables: dict[Recipe, list[npt.NDArray[np.void]]] = {}
    for segment, placed in zip(part.segments, image.planes, strict=True):
        tensor = manifest.tensors[segment.tensor]
        if is_flat(tensor.encoding, tensor.element_bytes):
            continue
        recipe = recipe_for(tensor.encoding, part.tier, tensor.element_bytes)
        first = np.arange(0, segment.count, FRAME_ELEMENTS, dtype=np.uint64)
        frames = np.zeros(first.size, frame_type)
        begin = starts[tensor.group] + tensor.offset_bytes + segment.start * tensor.element_bytes
        frames["out"] = begin + first * np.uint64(tensor.element_bytes)
        frames["count"] = np.minimum(segment.count - first, FRAME_ELEMENTS)
        for place, (plane, bits) in enumerate(zip(placed, recipe.bits, strict=True)):
            frames["planes"][:, place] = plane.offset_bytes + first * np.uint64(bits) // np.uint64(8)
        tables.setdefault(recipe, []).append(frames)
    for launch, (recipe, frames_of) in zip(image.launches, tables.items(), strict=True):
        table = recipe.packed() + np.concatenate(frames_of).tobytes()
        out[launch.table_bytes : launch.table_bytes + len(table)] = table


def _num_frames(part: Part, tensors: Sequence[Tensor]) -> dict[Recipe, int]:
    """How many frames each recipe is for, in the order in which they first come up."""
    found: dict[Recipe, int] = {}
    for segment, tensor in zip(part.segments, tensors, strict=True):
        if not is_flat(tensor.encoding, tensor.element_bytes):
            recipe = recipe_for(tensor.encoding, part.tier, tensor.element_bytes)
            found[recipe] = found.get(recipe, 0) - (-segment.count // FRAME_ELEMENTS)
    return found


def _flat_segments(part: Part, tensors: Sequence[Tensor]) -> list[tuple[int, int, int]]:
    """Of each segment that is copied: its number, its offset in the slab, and its bytes."""
    return [
        (
            number,
            tensor.offset_bytes + segment.start * tensor.element_bytes,
            segment.count * tensor.element_bytes,
        )
        for number, (segment, tensor) in enumerate(zip(part.segments, tensors, strict=True))
        if is_flat(tensor.encoding, tensor.element_bytes)
    ]


def _pieces(part: Part, tensors: Sequence[Tensor], coded: bool) -> list[_Piece]:
    """All planes that kernels read, in the part's order."""
    found = []
    for number, (segment, tensor) in enumerate(zip(part.segments, tensors, strict=True)):
        if is_flat(tensor.encoding, tensor.element_bytes):
            continue
        sizes = decoded_plane_bytes(tensor.encoding, part.tier, tensor.element_bytes, segment.count)
        all_bits = tensor.encoding.plane_bits(part.tier, tensor.element_bytes)
        for plane, size_bytes, bits in zip(segment.planes, sizes, all_bits, strict=True):
            stays = coded and plane.codec is Codec.ZSTD and bits == 8 and not _has_checked_bytes(tensor)
            found.append(_Piece(number, size_bytes, plane.size_bytes if stays else None))
    return found


def _has_checked_bytes(tensor: Tensor) -> bool:
    """Whether bytes of its planes may be wrong though decompressed: who decompresses must look at them."""
    float_format = tensor.encoding.float_format
    return float_format is not None and float_format.exponent_bits < 8
