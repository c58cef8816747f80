"""The manifest of an artifact as values: what is stored where, and how it becomes tensors.

`docs/format.md` is the norm; this module holds its data types and the pure functions over them.
Parsing and writing the JSON is in `manifest_json.py`. Nothing here does I/O or knows torch.

The nouns: a *tensor* belongs to one layer *group*; a group's tensors lie one behind another in one *slab* of
memory. A *part* is a stretch of a blob that holds up to `MAX_PART_ELEMENTS` elements of one group and one
*tier*; it is the unit of fetching and of verification, and is made of *segments*, each the elements
[start, start + count) of one tensor. A segment is stored as one or more *planes*; a coded plane is a run of
zstd *frames* of `FRAME_ELEMENTS` elements each.
"""

from __future__ import annotations

import enum
import math
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

from .encoding import Encoding as Encoding  # noqa: PLC0414 - all values of a manifest are found here
from .encoding import Tier as Tier  # noqa: PLC0414 - as above

FORMAT_VERSION = 1
FRAME_ELEMENTS = 65_536
MAX_PART_ELEMENTS = 16 * 1024 * 1024
MAX_PART_DECODED_BYTES = 64 * 1024 * 1024  # what a part's elements take in memory
MAX_PART_SEGMENTS = 16_384
# Stored: never more than decoded, but for what the planes' alignment adds.
MAX_PART_BYTES = 65 * 1024 * 1024
PLANE_ALIGNMENT_BYTES = 8  # of planes in their part, and of parts in their blob
SLAB_ALIGNMENT_BYTES = 64  # a cache line, and what oneDNN and a GPU's widest loads ask for

# Bits an element, by safetensors' name for the dtype. Sub-byte dtypes are stored packed, as
# safetensors does.
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F8_E8M0": 8,
    "U16": 16, "I16": 16, "F16": 16, "BF16": 16,
    "U32": 32, "I32": 32, "F32": 32,
    "U64": 64, "I64": 64, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
}  # fmt: skip
# Arrays that numpy has a dtype for. bfloat16 shows as its bit patterns; everything else as bytes.
NUMPY_DTYPES: dict[str, str] = {
    "BOOL": "?", "U8": "u1", "I8": "i1", "U16": "<u2", "I16": "<i2", "U32": "<u4", "I32": "<i4", "U64": "<u8",
    "I64": "<i8", "F16": "<f2", "F32": "<f4", "F64": "<f8", "C64": "<c8", "BF16": "<u2",
}  # fmt: skip


class Codec(enum.StrEnum):
    """The stored form of a plane."""

    RAW = "raw"
    ZSTD = "zstd"  # 8-aligned standard zstd frames, however they were compressed


class Plane(NamedTuple):
    """A stretch [offset_bytes, offset_bytes + size_bytes) of its part."""

    codec: Codec
    offset_bytes: int
    size_bytes: int


class Segment(NamedTuple):
    """Elements [start, start + count) of tensor number `tensor`.

    For sub-byte dtypes an element is one stored byte. `values` is the number of elements that are
    not zero where the tensor's encoding is sparse, else None. `is_delta`: differences, added to what
    the parts of a base have written; only manifests that were joined with their base's have such.
    """

    tensor: int
    start: int
    count: int  # type: ignore[assignment]  # shadows a method of tuples that is not used
    planes: tuple[Plane, ...]
    values: int | None = None
    is_delta: bool = False


class Part(NamedTuple):
    """Bytes [offset_bytes, offset_bytes + size_bytes) of blob number `blob`. `digest` is
    BLAKE3-256.

    `digest` is None only where the bytes were never packed (plain safetensors): nothing says then
    what they should be.
    """

    index: int  # type: ignore[assignment]  # as in `Segment`
    tier: Tier
    group: int
    blob: int
    offset_bytes: int
    size_bytes: int
    digest: bytes | None
    segments: tuple[Segment, ...]

    @property
    def has_delta(self) -> bool:
        """True if it needs all of its elements' base, and comes after that in its tier."""
        return any(segment.is_delta for segment in self.segments)


class Tensor(NamedTuple):
    """One tensor as its model knows it. `offset_bytes` is its place in its group's slab."""

    index: int  # type: ignore[assignment]  # as in `Segment`
    name: str
    dtype: str  # a key of DTYPE_BITS
    shape: tuple[int, ...]
    group: int
    encoding: Encoding
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        return tensor_bytes(self.dtype, self.shape)

    @property
    def element_bytes(self) -> int:
        """Bytes of one stored element; 1 for sub-byte dtypes, which are stored packed."""
        return max(1, DTYPE_BITS[self.dtype] // 8)

    @property
    def num_elements(self) -> int:
        """Stored elements: of a sub-byte dtype, its packed bytes."""
        return self.size_bytes // self.element_bytes


class Group(NamedTuple):
    """A layer group: what a forward pass needs at one step. `tensors` are indices, in slab order."""

    index: int  # type: ignore[assignment]  # as in `Segment`
    name: str
    tensors: tuple[int, ...]
    slab_bytes: int


class StatedDigest(NamedTuple):
    """The SHA-256 that a store states of a whole safetensors file, and that of its first `head_bytes`,
    which are in front of its tensors, as they were read.
    """

    sha256: bytes
    head_bytes: int
    head_sha256: bytes


class Blob(NamedTuple):
    """A stored object that holds parts back to back.

    `version` pins it where the source knows one, and `stated` is its digest where its store states one
    (plain safetensors only).
    """

    name: str
    size_bytes: int
    version: str | None = None
    stated: StatedDigest | None = None


class File(NamedTuple):
    """A small file kept next to the weights (config.json, tokenizer.json, …), stored as object
    `path`. `version` pins one without a digest (plain safetensors only).
    """

    name: str
    path: str
    size_bytes: int
    digest: bytes | None
    version: str | None = None


class _Manifest(NamedTuple):
    generator: str
    blobs: tuple[Blob, ...]
    files: tuple[File, ...]
    groups: tuple[Group, ...]
    tensors: tuple[Tensor, ...]
    parts: tuple[Part, ...]
    aliases: dict[str, str]  # name → name of the tensor that it shares its storage with
    metadata: dict[str, str]  # safetensors' __metadata__, merged
    # The artifact's, as `manifest_digest` has it; None when made from safetensors.
    digest: bytes | None = None
    # Of the folder that holds all objects; '' where each has a name of its own.
    generation: str = ""
    base: bytes | None = None  # the digest of the artifact that this one has differences to
    has_own_digest: bool = False  # which its bytes were checked against; older ones have none


class Manifest(_Manifest):
    """Everything a reader needs to allocate, fetch, verify and decode.

    Parts stand in the order of the format: all parts of a tier before those of the next, each in
    forward order.
    """

    @cached_property
    def by_name(self) -> dict[str, Tensor]:
        """Every name, aliases included."""
        table = {tensor.name: tensor for tensor in self.tensors}
        table.update({alias: table[target] for alias, target in self.aliases.items()})
        return table

    @cached_property
    def stated_blobs(self) -> tuple[int, ...]:
        """The numbers of the plain files whose digests their store states."""
        return tuple(number for number, blob in enumerate(self.blobs) if blob.stated is not None)

    @cached_property
    def weight_bytes(self) -> int:
        """Memory that the decoded weights take, alignment included."""
        return sum(group.slab_bytes for group in self.groups)

    def without_weights(self) -> Manifest:
        """The manifest without weights, for reading small files."""
        return self._replace(blobs=(), groups=(), tensors=(), parts=(), aliases={}, metadata={})

    def stored_bytes(self, tier: Tier) -> int:
        return sum(part.size_bytes for part in self.parts if part.tier is tier)

    def parts_of(self, group: int, tier: Tier) -> tuple[Part, ...]:
        return self._parts_by_group.get((group, tier), ())

    @cached_property
    def _parts_by_group(self) -> dict[tuple[int, Tier], tuple[Part, ...]]:
        table: dict[tuple[int, Tier], list[Part]] = {}
        for part in self.parts:
            table.setdefault((part.group, part.tier), []).append(part)
        return {key: tuple(parts) for key, parts in table.items()}

    def summary(self) -> dict[str, Any]:
        """Figures for people and logs, in bytes."""
        return {
            "groups": len(self.groups),
            "tensors": len(self.tensors),
            "parts": len(self.parts),
            "weight_bytes": self.weight_bytes,
            "sketch_bytes": self.stored_bytes(Tier.SKETCH),
            "draft_bytes": self.stored_bytes(Tier.DRAFT),
            "refine_bytes": self.stored_bytes(Tier.REFINE),
        }


def tensor_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes that a tensor takes; packed sub-byte dtypes must fill whole bytes (the parsers see to
    it).
    """
    return math.prod(shape) * DTYPE_BITS[dtype] // 8


def align(offset_bytes: int, alignment_bytes: int = SLAB_ALIGNMENT_BYTES) -> int:
    return -(-offset_bytes // alignment_bytes) * alignment_bytes


def place_tensors(sizes_bytes: list[int]) -> tuple[list[int], int]:
    """Offsets of a group's tensors in its slab, in order, and the slab's size. Nothing stores them."""
    offsets, end = [], 0
    for size_bytes in sizes_bytes:
        offset = align(end)
        offsets.append(offset)
        end = offset + size_bytes
    return offsets, align(end)


@cache  # of the few encodings that there are: every segment is asked about
def plane_shares(encoding: Encoding, tier: Tier, element_bytes: int) -> tuple[int, ...]:
    """Of each plane that an element is cut into in a tier: how many elements share one of its
    bytes.

    A whole plane is not cut, and has none. Of a sparse encoding: of each plane of values.
    """
    return tuple(8 // bits for bits in encoding.plane_bits(tier, element_bytes))


@lru_cache(maxsize=1024)  # most segments are as long as others
def decoded_plane_bytes(
    encoding: Encoding, tier: Tier, element_bytes: int, count: int, values: int | None = None
) -> tuple[int, ...]:
    """The bytes of each plane of `count` elements before it is coded: exactly the size of a raw
    plane. `values` is how many of them are not zero, for sparse encodings.
    """
    if encoding.is_whole:
        return (count * element_bytes,) if tier in encoding.tiers else ()
    shares = plane_shares(encoding, tier, element_bytes)
    if not encoding.is_sparse:
        return tuple(-(-count // share) for share in shares)
    assert values is not None
    sizes_bytes = tuple(-(-values // share) for share in shares)
    if tier is not encoding.tiers[0]:
        return sizes_bytes
    signs = (-(-(count - values) // 8),) if encoding.float_format is not None else ()
    return (-(-count // 8), *signs, *sizes_bytes)
