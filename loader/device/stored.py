"""Images of parts as they are stored: the device itself verifies, decodes and merges them.

    image:  [ the part ][ tables ][ rooms for decoded planes ][ nodes of BLAKE3's tree ]
            └─── uploaded ───────┘└──────────── on the device only ──────────────────┘

The tables begin with the part's digest and a word, `wrong`, that the device sets where the digest differs or a frame is
damaged; then nothing of the part has changed a weight. Behind them are the tables of the kernels: frames to decode,
and what `image.py` describes. Raw planes are read where they lie in the part.

The host reads headers only (`write_tables`). It refuses what the device cannot do: frames with sequences, and bytes
that are not what the manifest says; the host's own way (`sink.py`) is for these. Both processes of a load make the same
plan from the manifest. Nothing here knows memory, devices or threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..format.manifest import (
    FRAME_ELEMENTS,
    Codec,
    Manifest,
    Part,
    Segment,
    Tensor,
    align,
    decoded_plane_bytes,
)
from .image import (
    COPY_KERNEL,
    FRAME_ENTRY_BYTES,
    PLANE_BYTES,
    RECIPE_BYTES,
    Copy,
    Launch,
    Layout,
    PartImage,
    Recipe,
    is_flat,
    recipe_for,
)

DIGEST_BYTES = 32
WRONG_BYTES = 4  # the word behind the digest
DIGEST_DIFFERS, FRAME_DAMAGED = 1, 2  # its bits
HASH_KERNEL, ROOT_KERNEL, DECODE_KERNEL = "blake3_chunks", "blake3_root", "huf_frames"
HASHED_BYTES = 128 * 1024  # of the part, by a block of the first; each leaves a node
NODE_BYTES = 32
COPIED_ENTRY_BYTES, CODED_ENTRY_BYTES = 16, 24  # `tn_copied_bytes` and `tn_coded_frame` of native/core.h


class StoredImage(NamedTuple):
    """One part's image. Offsets are from its first byte on, which is the part's."""

    part_bytes: int
    tables_begin: int  # of the digest
    tables_bytes: int
    nodes_begin: int
    size_bytes: int  # of memory that it takes on the device
    written_bytes: int  # of weights
    decode: Launch  # over no frames, where all planes are raw and need no check
    launches: tuple[Launch, ...]  # that write weights

    @property
    def wrong_begin(self) -> int:
        return self.tables_begin + DIGEST_BYTES

    @property
    def sent_bytes(self) -> int:
        """Bytes that cross the link."""
        return self.part_bytes + self.tables_bytes


def can_be_stored(manifest: Manifest, part: Part) -> bool:
    """True if a device can take the part as it is stored, if its frames are those of `huf_frames.cu`."""
    return part.digest is not None and not any(
        segment.is_delta or manifest.tensors[segment.tensor].encoding.is_sparse for segment in part.segments
    )


def plan_plain(manifest: Manifest, part: Part, starts: Sequence[int]) -> PartImage | None:
    """The image of a part of plain safetensors: its bytes go to the weights as they are. None for others."""
    if part.digest is not None or any(len(segment.planes) != 1 for segment in part.segments):
        return None
    copies: list[Copy] = []
    for segment in part.segments:
        tensor, (plane,) = manifest.tensors[segment.tensor], segment.planes
        if not is_flat(tensor.encoding, tensor.element_bytes) or plane.codec is not Codec.RAW:
            return None
        copy = Copy(plane.offset_bytes, _out_bytes(tensor, segment, starts), plane.size_bytes)
        last = copies[-1] if copies else Copy(0, 0, 0)
        if copy.image_bytes - last.image_bytes == copy.weights_bytes - last.weights_bytes == last.size_bytes:
            copies[-1:] = [last._replace(size_bytes=last.size_bytes + copy.size_bytes)]
        else:
            copies.append(copy)
    size_bytes = sum(copy.size_bytes for copy in copies)
    return PartImage(part.size_bytes, 0, size_bytes, size_bytes, (), tuple(copies), ())


def plan_stored(manifest: Manifest, part: Part) -> StoredImage:
    """The image of a part that `can_be_stored`."""
    return _plan(_stretches(manifest, part), part.size_bytes)[0]


def max_tables_bytes(part: Part) -> int:
    """The tables of a part's image take no more: cheaper to know than the plan. 0 for a part that is never sent so."""
    if part.digest is None:
        return 0
    total = 2 * PLANE_BYTES + DIGEST_BYTES + WRONG_BYTES
    for segment in part.segments:
        num_frames = -(-segment.count // FRAME_ELEMENTS)
        entries_bytes = FRAME_ENTRY_BYTES + len(segment.planes) * CODED_ENTRY_BYTES
        total += RECIPE_BYTES + PLANE_BYTES + num_frames * entries_bytes
    return align(total, PLANE_BYTES)


def max_stored_bytes(part: Part) -> int:
    """A part's image takes no more on the device."""
    rooms_bytes = sum(
        segment.count + PLANE_BYTES
        for segment in part.segments
        for plane in segment.planes
        if plane.codec is Codec.ZSTD
    )
    nodes_bytes = num_blocks(part.size_bytes) * NODE_BYTES
    return part.size_bytes + max_tables_bytes(part) + rooms_bytes + nodes_bytes + 4 * PLANE_BYTES


def num_blocks(part_bytes: int) -> int:
    """Of the kernel that hashes a part."""
    return -(-max(1, part_bytes) // HASHED_BYTES)


def write_tables(
    manifest: Manifest, part: Part, starts: Sequence[int], stored: memoryview, out: memoryview
) -> StoredImage | None:
    """Write the tables of the part's image into `out`, `max_tables_bytes` at a multiple of 16. `stored` are the part's
    bytes, unverified: None, with `out` undefined, where they are not what the manifest says, or have frames with
    sequences.
    """
    import numpy as np  # decoding threads have it; plans are made before

    from ..native.walk import PlaneWalk, SegmentWalk, walk_part

    stretches = _stretches(manifest, part)
    image, places = _plan(stretches, part.size_bytes)
    assert part.digest is not None
    out[: DIGEST_BYTES + WRONG_BYTES] = part.digest + bytes(WRONG_BYTES)
    segments = []
    for stretch, place in zip(stretches, places, strict=True):
        if stretch.recipe is not None:
            packed = stretch.recipe.packed()
            out[place.recipe_begin : place.recipe_begin + len(packed)] = packed
        planes = [
            PlaneWalk(plane.offset_bytes, plane.size_bytes, room, bits, plane.codec is Codec.ZSTD)
            for plane, room, bits in zip(stretch.segment.planes, place.rooms, stretch.bits, strict=True)
        ]
        segments.append(
            SegmentWalk(
                place.entries_begin,
                _out_bytes(stretch.tensor, stretch.segment, starts),
                planes,
                stretch.segment.count,
                stretch.tensor.element_bytes,
                stretch.exponent_bits,
                stretch.recipe is None,
            )
        )
    is_understood = walk_part(
        np.frombuffer(stored, np.uint8),
        segments,
        np.frombuffer(out, np.uint8),
        frames_bytes=image.decode.table_bytes - image.tables_begin,
        num_frames=image.decode.num_frames,
    )
    return image if is_understood else None


class _Stretch(NamedTuple):
    """A segment, and what becomes of its planes."""

    tensor: Tensor
    segment: Segment
    recipe: Recipe | None  # None: its one plane is copied
    bits: tuple[int, ...]  # of an element, in each plane; 0: all of it
    sizes_bytes: tuple[int, ...]  # of the planes, decoded
    exponent_bits: int  # that bytes of the first plane may have

    @property
    def num_entries(self) -> int:
        return 1 if self.recipe is None else -(-self.segment.count // FRAME_ELEMENTS)

    @property
    def entry_bytes(self) -> int:
        return COPIED_ENTRY_BYTES if self.recipe is None else FRAME_ENTRY_BYTES

    @property
    def num_coded_frames(self) -> int:
        """Frames of coded planes, and pieces of raw ones in which bits must be 0."""
        num_frames, found = -(-self.segment.count // FRAME_ELEMENTS), 0
        for number, (plane, bits) in enumerate(zip(self.segment.planes, self.bits, strict=True)):
            if plane.codec is Codec.ZSTD or (number == 0 and self.exponent_bits < 8):
                found += num_frames
            elif bits and self.segment.count * bits % 8:
                found += 1  # behind the last element
        return found


class _Place(NamedTuple):
    """The offsets of a segment's entries in the tables, and of its planes' rooms in the image; 0 for a raw plane."""

    recipe_begin: int
    entries_begin: int
    rooms: tuple[int, ...]


def _stretches(manifest: Manifest, part: Part) -> list[_Stretch]:
    found = []
    for segment in part.segments:
        tensor = manifest.tensors[segment.tensor]
        encoding, element_bytes, tier = tensor.encoding, tensor.element_bytes, part.tier
        recipe = None if is_flat(encoding, element_bytes) else recipe_for(encoding, tier, element_bytes)
        bits = (0,) if encoding.is_whole else encoding.plane_bits(tier, element_bytes)
        sizes_bytes = decoded_plane_bytes(encoding, tier, element_bytes, segment.count)
        float_format = encoding.float_format
        has_exponents = float_format is not None and tier is encoding.tiers[0]
        exponent_bits = float_format.exponent_bits if float_format is not None and has_exponents else 8
        found.append(_Stretch(tensor, segment, recipe, bits, sizes_bytes, exponent_bits))
    return found


def _plan(stretches: Sequence[_Stretch], part_bytes: int) -> tuple[StoredImage, list[_Place]]:
    layout = Layout()
    layout.take(part_bytes)
    tables_begin = layout.take(DIGEST_BYTES + WRONG_BYTES)
    by_recipe: dict[Recipe | None, list[_Stretch]] = {}
    for stretch in stretches:
        by_recipe.setdefault(stretch.recipe, []).append(stretch)
    launches, begins, next_entry = [], {}, {}
    for recipe, group in by_recipe.items():
        num = sum(each.num_entries for each in group)
        head_bytes = 0 if recipe is None else RECIPE_BYTES
        begin = layout.take(head_bytes + num * group[0].entry_bytes)
        launches.append(Launch(COPY_KERNEL if recipe is None else recipe.kernel, begin, num))
        begins[recipe] = begin - tables_begin
        next_entry[recipe] = begins[recipe] + head_bytes
    num_frames = sum(each.num_coded_frames for each in stretches)
    decode = Launch(DECODE_KERNEL, layout.take(num_frames * CODED_ENTRY_BYTES), num_frames)
    tables_end = layout.end
    places = []
    for each in stretches:
        rooms = tuple(
            layout.take(size_bytes) if plane.codec is Codec.ZSTD else 0
            for plane, size_bytes in zip(each.segment.planes, each.sizes_bytes, strict=True)
        )
        places.append(_Place(begins[each.recipe], next_entry[each.recipe], rooms))
        next_entry[each.recipe] += each.num_entries * each.entry_bytes
    nodes_begin = layout.take(num_blocks(part_bytes) * NODE_BYTES)
    written_bytes = sum(each.segment.count * each.tensor.element_bytes for each in stretches)
    image = StoredImage(
        part_bytes,
        tables_begin,
        tables_end - tables_begin,
        nodes_begin,
        layout.end,
        written_bytes,
        decode,
        tuple(launches),
    )
    return image, places


def _out_bytes(tensor: Tensor, segment: Segment, starts: Sequence[int]) -> int:
    """The offset of the segment's elements in the weights."""
    return starts[tensor.group] + tensor.offset_bytes + segment.start * tensor.element_bytes
