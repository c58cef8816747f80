"""Images: what is uploaded of one piece of a part, and the arithmetic by which a device makes words
of it.

    image:  [ tables ][ planes, as they are before they are merged ] [ what is copied as it is ]
            └────────── uploaded, then merged by kernels ─────────┘ └─ sent straight to the weights ─┘

A table is a `Recipe` and an array of frames: which words a kernel makes of which bytes. Planes
stand one behind another, each at a multiple of `PLANE_BYTES`; with `coded`, a device that
decompresses by itself gets planes as they are stored, and room for them behind the image, which
exists on the device only. So the link carries planes, never expanded weights.

A *word* is an element's bits. A recipe takes bits of each plane and puts them where they belong:

    word = (word & keep) | fill | (bits of plane 0) << up[0] | (bits of plane 1) << up[1] | …

but for the plane that begins with the sign: its highest bit goes to `sign_up`, and only the others
to `up`. This covers every encoding of the format that is cut at all (`docs/format.md`,
"Encodings"), so one kernel a word size does.

The process that fills an image and the one that sends it make the same layout of the same manifest.
Pure; sizes were checked with the manifest. Nothing here knows memory, devices or threads.
"""

from __future__ import annotations

import struct
from collections.abc import Container, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, NamedTuple

from ..errors import UsageError
from ..format.encoding import Encoding, Tier, cut_field
from ..format.manifest import (
    FRAME_ELEMENTS,
    Codec,
    Group,
    Manifest,
    Part,
    Plane,
    Segment,
    Tensor,
    align,
    decoded_plane_bytes,
)

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

MAX_PLANES = 8
MAX_PLANS = 256  # that are kept, of images of one shape
NO_PLANE = 0xFFFFFFFF  # for `sign_plane`: no plane has a sign

# Named by what they do: `kernels/merge.cu`. The first two are for what most weights are, and as
# fast as memory; the others do anything, words of that many bits.
DRAFT_KERNEL, REFINE_KERNEL = "merge_bf16_draft", "refine_low_nibbles"
GENERAL_KERNELS = {2: "merge_words_16", 4: "merge_words_32", 8: "merge_words_64"}
COPY_KERNEL = "copy_if"  # bytes that are weights as they are
RESOLVE_KERNEL = "resolve_chunks"  # for a decompressor, before these
KERNELS = (DRAFT_KERNEL, REFINE_KERNEL, *GENERAL_KERNELS.values())

# keep, fill, num_planes, word_bytes, sign_plane, sign_up, bits[8], up[8]: `struct Recipe` in the
# kernels' source.
_RECIPE = struct.Struct("<QQIIII8I8I")
RECIPE_BYTES = _RECIPE.size


class Recipe(NamedTuple):
    """Of one tier of an encoding. `bits` and `ups` are those of its planes, in the format's order."""

    word_bytes: int  # 2, 4 or 8
    keep: int  # bits that stay as they are; 0: nothing needs to be there
    fill: int
    bits: tuple[int, ...]  # 8, 4, 2 or 1 each
    ups: tuple[int, ...]
    sign_plane: int = NO_PLANE
    sign_up: int = 0

    @property
    def kernel(self) -> str:
        """The name of the kernel that follows it fastest."""
        if self == _BF16_DRAFT:
            return DRAFT_KERNEL
        if self == _LOW_NIBBLES:
            return REFINE_KERNEL
        return GENERAL_KERNELS[self.word_bytes]

    def packed(self) -> bytes:
        """The bytes that the kernels read."""
        unused = (0,) * (MAX_PLANES - len(self.bits))
        numbers = (len(self.bits), self.word_bytes, self.sign_plane, self.sign_up)
        return _RECIPE.pack(self.keep, self.fill, *numbers, *self.bits, *unused, *self.ups, *unused)

    @staticmethod
    def unpack(data: bytes | memoryview) -> Recipe:
        """The value that `packed` has written, from the front of the data."""
        keep, fill, num_planes, word_bytes, sign_plane, sign_up, *rest = _RECIPE.unpack_from(data)
        bits, ups = rest[:num_planes], rest[MAX_PLANES : MAX_PLANES + num_planes]
        return Recipe(word_bytes, keep, fill, tuple(bits), tuple(ups), sign_plane, sign_up)


def check_placeable(manifest: Manifest) -> None:
    """Raises `UsageError` for weights that devices do not merge: differences."""
    if any(part.has_delta for part in manifest.parts):
        raise UsageError(
            "a GPU cannot be loaded from differences to a base yet",
            key="device",
            hint="Pack the fine-tune without --base, or serve it on the CPU.",
        )


def as_placed(manifest: Manifest) -> Manifest:
    """The manifest of what the host makes images of: itself, but that it holds sparse tensors whole, in each tier. A
    part's come behind its bytes, in order.
    """
    sparse = {tensor.index for tensor in manifest.tensors if tensor.encoding.is_sparse}
    if not sparse:
        return manifest
    tensors = tuple(
        each._replace(encoding=Encoding.WHOLE) if each.index in sparse else each for each in manifest.tensors
    )
    return manifest._replace(
        tensors=tensors, parts=tuple(_with_wholes(part, tensors, sparse) for part in manifest.parts)
    )


def _with_wholes(part: Part, tensors: Sequence[Tensor], sparse: Container[int]) -> Part:
    end, segments = part.size_bytes, []
    for segment in part.segments:
        if segment.tensor in sparse:
            size_bytes = segment.count * tensors[segment.tensor].element_bytes
            plane = Plane(Codec.RAW, align(end, PLANE_BYTES), size_bytes)
            end = plane.offset_bytes + size_bytes
            segment = segment._replace(planes=(plane,), values=None)  # noqa: PLW2901
        segments.append(segment)
    return part._replace(segments=tuple(segments))


def is_flat(encoding: Encoding, element_bytes: int) -> bool:
    """True if the one plane of a tensor is the tensor itself: it is copied, and needs no recipe."""
    return encoding.is_whole or (encoding.float_format is None and element_bytes == 1)


def recipe_for(encoding: Encoding, tier: Tier, element_bytes: int) -> Recipe:
    """For a tier that the encoding has, and that is not flat."""
    float_format = encoding.float_format
    if float_format is None:
        places = range(element_bytes)
        return Recipe(element_bytes, 0, 0, (8,) * element_bytes, tuple(8 * place for place in places))
    known, before = encoding.mantissa_bits(tier), encoding.bits_before(tier)
    unknown = float_format.mantissa_bits - known
    fill = 1 << unknown - 1 if unknown else 0
    if before is not None:
        ones = (1 << float_format.bits) - 1
        keep = -1 << float_format.mantissa_bits - before & ones
        bits = cut_field(known - before)
        return Recipe(element_bytes, keep, fill, bits, _ups(bits, unknown))
    bits = cut_field(1 + known)
    return Recipe(
        element_bytes,
        0,
        fill,
        (8, *bits),
        (float_format.mantissa_bits, *_ups(bits, unknown)),
        sign_plane=1,
        sign_up=float_format.bits - 1,
    )


def _ups(bits: tuple[int, ...], unknown: int) -> tuple[int, ...]:
    """The position of the lowest bit of each plane of a field; below the field are `unknown` bits."""
    return tuple(unknown + sum(bits[place + 1 :]) for place in range(len(bits)))


_BF16_DRAFT = recipe_for(Encoding.BF16_3, Tier.DRAFT, 2)
_LOW_NIBBLES = recipe_for(Encoding.BF16_3, Tier.REFINE, 2)


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
    """A plane's place in the image as the kernels read it, and, if it comes coded, as it was
    stored.
    """

    offset_bytes: int
    size_bytes: int
    coded_bytes: int | None = None  # where; None: it is decoded, or raw


class Chunks(NamedTuple):
    """Frames of zstd that the device decompresses before the kernels run."""

    table_bytes: int  # where their table begins in the image
    num: int
    total_bytes: int  # decompressed, of all; none has more than FRAME_ELEMENTS
    # Where their statuses come to, in the host's image, once they are decompressed.
    status_bytes: int


class PartImage(NamedTuple):
    """One part's image. All numbers are from its first byte on."""

    size_bytes: int  # of memory that it takes in the ring, on both sides
    upload_bytes: int  # of its front, which the kernels need
    sent_bytes: int  # that cross the link, in all
    written_bytes: int  # of weights
    launches: tuple[Launch, ...]
    copies: tuple[Copy, ...]
    # Of each segment; of a flat one where it stands in the image.
    planes: tuple[tuple[PlacedPlane, ...], ...]
    chunks: Chunks | None = None


class Layout:
    """Hands out memory, one piece behind another."""

    def __init__(self) -> None:
        self.end = 0

    def take(self, size_bytes: int) -> int:
        begin = align(self.end, PLANE_BYTES)
        self.end = begin + size_bytes
        return begin


class _SegmentLayout(NamedTuple):
    """A segment, as far as the layout of the image depends on it."""

    encoding: Encoding
    element_bytes: int
    num_elements: int
    flat_bytes: int | None  # where it begins in the weights, if it is copied
    stored: tuple[int | None, ...] = ()  # bytes of each plane as stored, if the device decompresses it

    @property
    def num_frames(self) -> int:
        return -(-self.num_elements // FRAME_ELEMENTS)


class _Piece(NamedTuple):
    """A plane that a kernel reads."""

    segment: int  # its number in the part
    size_bytes: int  # decoded
    stored_bytes: int | None  # of one that the device decompresses


def slab_starts(groups: Sequence[Group]) -> tuple[list[int], int]:
    """The offset of each group's slab in the weights, one piece of memory, and the size of that."""
    ends = list(accumulate(align(group.slab_bytes) for group in groups))
    return [0, *ends[:-1]][: len(groups)], ends[-1] if ends else 0


def plan_image(manifest: Manifest, part: Part, starts: Sequence[int], *, coded: bool = False) -> PartImage:
    """The part's image; `starts` are those of the manifest's slabs. With `coded`, the device
    decompresses what it may. Parts of one shape have the same one, which is made once.
    """
    return _plan(part.tier, _stretches(manifest, part, starts, coded))


def _stretches(
    manifest: Manifest, part: Part, starts: Sequence[int], coded: bool
) -> tuple[_SegmentLayout, ...]:
    found = []
    for segment in part.segments:
        tensor = manifest.tensors[segment.tensor]
        encoding, element_bytes = tensor.encoding, tensor.element_bytes
        if is_flat(encoding, element_bytes):
            begin = starts[part.group] + tensor.offset_bytes + segment.start * element_bytes
            found.append(_SegmentLayout(encoding, element_bytes, segment.count, begin))
        elif coded:
            stored = _stored(tensor, segment, part.tier)
            found.append(_SegmentLayout(encoding, element_bytes, segment.count, None, stored))
        else:
            found.append(_SegmentLayout(encoding, element_bytes, segment.count, None))
    return tuple(found)


def _stored(tensor: Tensor, segment: Segment, tier: Tier) -> tuple[int | None, ...]:
    """The `stored` of a `_SegmentLayout`. A device decompresses whole bytes that may have any value."""
    all_bits = tensor.encoding.plane_bits(tier, tensor.element_bytes)
    may_stay = not _has_checked_bytes(tensor)
    return tuple(
        plane.size_bytes if may_stay and plane.codec is Codec.ZSTD and bits == 8 else None
        for plane, bits in zip(segment.planes, all_bits, strict=True)
    )


@lru_cache(maxsize=MAX_PLANS)
def _plan(tier: Tier, stretches: tuple[_SegmentLayout, ...]) -> PartImage:
    pieces = _pieces(tier, stretches)
    layout = Layout()
    launches = tuple(
        Launch(recipe.kernel, layout.take(RECIPE_BYTES + num * FRAME_ENTRY_BYTES), num)
        for recipe, num in _num_frames(tier, stretches).items()
    )
    coded_pieces = [piece for piece in pieces if piece.stored_bytes is not None]
    num_chunks = sum(-(-piece.size_bytes // FRAME_ELEMENTS) for piece in coded_pieces)
    chunk_table = layout.take(num_chunks * CHUNK_ENTRY_BYTES)
    uploaded = [
        layout.take(piece.size_bytes if piece.stored_bytes is None else piece.stored_bytes)
        for piece in pieces
    ]
    upload_bytes = layout.end
    copies: dict[int, Copy] = {}
    for number, stretch in enumerate(stretches):
        if stretch.flat_bytes is not None:
            size_bytes = stretch.num_elements * stretch.element_bytes
            copies[number] = Copy(layout.take(size_bytes), stretch.flat_bytes, size_bytes)
    placed: list[list[PlacedPlane]] = [[] for _ in stretches]
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
        written_bytes=sum(stretch.num_elements * stretch.element_bytes for stretch in stretches),
        launches=launches,
        copies=tuple(copies.values()),
        planes=tuple(map(tuple, placed)),
        chunks=Chunks(chunk_table, num_chunks, decompressed_bytes, status) if num_chunks else None,
    )


def pack_tables(
    image: PartImage, manifest: Manifest, part: Part, starts: Sequence[int], out: memoryview
) -> None:
    """Write the image's tables into its memory; the table of chunks is written by the code that
    knows where they begin.
    """
    stretches = _stretches(manifest, part, starts, coded=image.chunks is not None)
    for launch, table in zip(image.launches, _tables(part.tier, stretches), strict=True):
        frames = table.frames.copy()
        at = 0
        for number in table.segments:
            segment = part.segments[number]
            tensor = manifest.tensors[segment.tensor]
            begin = starts[tensor.group] + tensor.offset_bytes + segment.start * tensor.element_bytes
            end = at + stretches[number].num_frames
            frames["out"][at:end] += begin
            at = end
        content = table.recipe + frames.tobytes()
        out[launch.table_bytes : launch.table_bytes + len(content)] = content


class _Table(NamedTuple):
    """A launch's table, but for where its segments begin in the weights: `out` counts from there."""

    recipe: bytes
    frames: npt.NDArray[np.void]
    segments: tuple[int, ...]  # their numbers in the part, in the order of the frames


@lru_cache(maxsize=MAX_PLANS)
def _tables(tier: Tier, stretches: tuple[_SegmentLayout, ...]) -> tuple[_Table, ...]:
    """One for each launch of the image, in order."""
    import numpy as np  # decoding threads have it; plans are made before

    frame_type = np.dtype(
        [("out", "<u8"), ("count", "<u4"), ("unused", "<u4"), ("planes", "<u4", MAX_PLANES)]
    )
    assert frame_type.itemsize == FRAME_ENTRY_BYTES
    found: dict[Recipe, tuple[list[int], list[npt.NDArray[np.void]]]] = {}
    for number, (stretch, placed) in enumerate(zip(stretches, _plan(tier, stretches).planes, strict=True)):
        if stretch.flat_bytes is not None:
            continue
        recipe = recipe_for(stretch.encoding, tier, stretch.element_bytes)
        first = np.arange(0, stretch.num_elements, FRAME_ELEMENTS, dtype=np.uint64)
        frames = np.zeros(first.size, frame_type)
        frames["out"] = first * np.uint64(stretch.element_bytes)
        frames["count"] = np.minimum(stretch.num_elements - first, FRAME_ELEMENTS)
        for place, (plane, bits) in enumerate(zip(placed, recipe.bits, strict=True)):
            frames["planes"][:, place] = plane.offset_bytes + first * np.uint64(bits) // np.uint64(8)
        numbers, frames_of = found.setdefault(recipe, ([], []))
        numbers.append(number)
        frames_of.append(frames)
    return tuple(
        _Table(recipe.packed(), np.concatenate(frames_of), tuple(numbers))
        for recipe, (numbers, frames_of) in found.items()
    )


def _num_frames(tier: Tier, stretches: Sequence[_SegmentLayout]) -> dict[Recipe, int]:
    """The number of frames of each recipe, in the order in which they first come up."""
    found: dict[Recipe, int] = {}
    for stretch in stretches:
        if stretch.flat_bytes is None:
            recipe = recipe_for(stretch.encoding, tier, stretch.element_bytes)
            found[recipe] = found.get(recipe, 0) + stretch.num_frames
    return found


def _pieces(tier: Tier, stretches: Sequence[_SegmentLayout]) -> list[_Piece]:
    """All planes that kernels read, in the part's order."""
    found = []
    for number, stretch in enumerate(stretches):
        if stretch.flat_bytes is not None:
            continue
        sizes = decoded_plane_bytes(stretch.encoding, tier, stretch.element_bytes, stretch.num_elements)
        stored = stretch.stored or (None,) * len(sizes)
        found += [_Piece(number, *of_plane) for of_plane in zip(sizes, stored, strict=True)]
    return found


def _has_checked_bytes(tensor: Tensor) -> bool:
    """True if bytes of its planes may be wrong though decompressed: who decompresses must look at
    them.
    """
    float_format = tensor.encoding.float_format
    return float_format is not None and float_format.exponent_bits < 8
