"""Consistency of the values of a packed artifact's manifest: tensors, names, blobs, parts,
planes.

Everything lies in one prescribed order, so a check is a cursor that each item must meet exactly:
what cannot be elsewhere cannot overlap, leave a hole, or come twice. Linear in the size of the
manifest. It does not know JSON. `docs/format.md`, "What a reader must check", is the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from .json_object import refuse
from .limits import MANIFEST_NAME
from .manifest import (
    DTYPE_BITS,
    FRAME_ELEMENTS,
    MAX_PART_BYTES,
    MAX_PART_DECODED_BYTES,
    MAX_PART_ELEMENTS,
    MAX_PART_SEGMENTS,
    PLANE_ALIGNMENT_BYTES,
    Codec,
    Encoding,
    Manifest,
    Segment,
    Tensor,
    Tier,
    align,
    decoded_plane_bytes,
)

MAX_TENSOR_ELEMENTS = 2**48
MAX_WEIGHT_BYTES = 16 * 2**40
RESERVED_TENSOR_NAME = "__metadata__"  # a safetensors file could not hold a tensor of that name


def check_manifest(manifest: Manifest) -> None:
    """Raises `ManifestError`, whose `where` names the place, when something does not fit."""
    _check_tensors(manifest)
    _check_tensor_names(manifest)
    _check_object_names(manifest)
    _check_blobs(manifest)
    _check_parts(manifest)


def _check_tensors(manifest: Manifest) -> None:
    for tensor in manifest.tensors:
        where = f"tensor {tensor.name!r}"
        # Dimensions of 0 do not make the others harmless: strides multiply them too.
        if math.prod(max(1, size) for size in tensor.shape) > MAX_TENSOR_ELEMENTS:
            refuse(f"its shape holds more than {MAX_TENSOR_ELEMENTS} elements", where)
        if math.prod(tensor.shape) * DTYPE_BITS[tensor.dtype] % 8:
            refuse("its elements do not fill whole bytes", where)
        if not tensor.encoding.fits(tensor.dtype):
            refuse(f"encoding {tensor.encoding.value!r} is not for {tensor.dtype}", where)
        if tensor.encoding in (Encoding.SAME, Encoding.DELTA) and manifest.base is None:
            refuse(f"encoding {tensor.encoding.value!r} needs a base, and there is none", where)
        if tensor.encoding is Encoding.BYTES_SPARSE and tensor.element_bytes != 1:
            refuse(f"encoding {tensor.encoding.value!r} is not for {tensor.dtype}", where)
    if manifest.weight_bytes > MAX_WEIGHT_BYTES:
        refuse(f"the weights take more than {MAX_WEIGHT_BYTES} bytes", "groups")


def _check_tensor_names(manifest: Manifest) -> None:
    names = {tensor.name for tensor in manifest.tensors}
    _check_unique((*(tensor.name for tensor in manifest.tensors), *manifest.aliases), "groups")
    if RESERVED_TENSOR_NAME in names or RESERVED_TENSOR_NAME in manifest.aliases:
        refuse(f"no tensor can be called {RESERVED_TENSOR_NAME!r}", "groups")
    for alias, target in manifest.aliases.items():
        if target not in names:
            refuse(f"{alias!r} stands for {target!r}, which is not a tensor", "aliases")
    _check_unique((group.name for group in manifest.groups), "groups")


def _check_object_names(manifest: Manifest) -> None:
    stored = [MANIFEST_NAME, *(blob.name for blob in manifest.blobs), *(file.path for file in manifest.files)]
    given_back = [file.name for file in manifest.files]
    for names, where in ((stored, "blobs and files"), (given_back, "files")):
        _check_unique(names, where)
        # With '/' sorted before all else, what lies in a folder stands right behind an object of
        # its name.
        ordered = sorted(names, key=lambda name: name.replace("/", "\0"))
        for name, following in pairwise(ordered):
            if following.startswith(f"{name}/"):
                refuse(f"{following!r} lies in a folder, but {name!r} is an object", where)


def _check_unique(names: Iterable[str], where: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            refuse(f"the name {name!r} stands there twice", where)
        seen.add(name)


def _check_blobs(manifest: Manifest) -> None:
    """Parts follow one another in their blobs, in the manifest's order, and fill them."""
    ends = [0] * len(manifest.blobs)
    for part in manifest.parts:
        where = f"parts[{part.index}]"
        if part.blob >= len(ends):
            refuse(f"there is no blob {part.blob}", where)
        expected = align(ends[part.blob], PLANE_ALIGNMENT_BYTES)
        if part.offset_bytes != expected:
            refuse(f"its offset is {part.offset_bytes}, but the part before it ends at {expected}", where)
        ends[part.blob] = part.offset_bytes + part.size_bytes
    for blob, end in zip(manifest.blobs, ends, strict=True):
        if not end or not end <= blob.size_bytes <= align(end, PLANE_ALIGNMENT_BYTES):
            refuse(f"it has {blob.size_bytes} bytes, but its parts end at {end}", f"blob {blob.name!r}")


def _check_parts(manifest: Manifest) -> None:
    """Segments, in the order of the parts, run once through the elements of all tensors, tier by
    tier.
    """
    cursor, values = _NextSegments(manifest.tensors), _ValueCounts()
    for part in manifest.parts:
        where = f"parts[{part.index}]"
        if not 0 < len(part.segments) <= MAX_PART_SEGMENTS or part.size_bytes > MAX_PART_BYTES:
            refuse(f"it has {len(part.segments)} segments in {part.size_bytes} bytes", where)
        num_elements = decoded_bytes = end = 0
        for segment in part.segments:
            tensor = cursor.advance(part.tier, part.group, segment, where)
            values.add(tensor, part.tier, segment, where)
            num_elements += segment.count
            decoded_bytes += segment.count * tensor.element_bytes
            end = _check_planes(tensor, part.tier, segment, end, where)
        if num_elements > MAX_PART_ELEMENTS or decoded_bytes > MAX_PART_DECODED_BYTES:
            refuse(f"it has {num_elements} elements of {decoded_bytes} bytes, more than a part may", where)
        if not end <= part.size_bytes <= align(end, PLANE_ALIGNMENT_BYTES):
            refuse(f"it has {part.size_bytes} bytes, but its planes end at {end}", where)
    cursor.finish()
    values.finish(manifest.tensors)


class _ValueCounts:
    """The values of sparse tensors, tier by tier: a later tier has bits of each that the first has."""

    def __init__(self) -> None:
        self._counts: dict[tuple[int, Tier], int] = {}

    def add(self, tensor: Tensor, tier: Tier, segment: Segment, where: str) -> None:
        """Count a segment's values, which it must have where its tensor is sparse, and only there."""
        if not tensor.encoding.is_sparse:
            if segment.values is not None:
                refuse(f"a segment of tensor {tensor.index}, which is not sparse, has 'values'", where)
            return
        if segment.values is None:
            refuse(f"a segment of tensor {tensor.index}, which is sparse, lacks 'values'", where)
        if not 1 <= segment.values <= segment.count:
            refuse(f"a segment of {segment.count} elements has {segment.values} values", where)
        key = tensor.index, tier
        self._counts[key] = self._counts.get(key, 0) + segment.values

    def finish(self, tensors: Sequence[Tensor]) -> None:
        """Refuse tensors whose tiers have different numbers of values."""
        for (index, tier), count in self._counts.items():
            first = self._counts[index, tensors[index].encoding.tiers[0]]
            if count != first:
                name = tier.name.lower()
                where = f"tensor {tensors[index].name!r}"
                refuse(f"its {name} tier has {count} values, but its first tier {first}", where)


class _NextSegments:
    """The one element of one tier that the next segment must start with."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        sizes = [(tensor, tensor.num_elements) for tensor in tensors]
        self._remaining = (
            (tier, tensor, num_elements)
            for tier in Tier
            for tensor, num_elements in sizes
            if num_elements and tier in tensor.encoding.tiers
        )
        self._current = next(self._remaining, None)
        self._start = 0

    def advance(self, tier: Tier, group: int, segment: Segment, where: str) -> Tensor:
        """Step over the segment, and return its tensor."""
        if self._current is None:
            refuse("all tensors have ended before it", where)
        expected_tier, tensor, num_elements = self._current
        expected = expected_tier, tensor.group, tensor.index, self._start
        if (tier, group, segment.tensor, segment.start) != expected:
            refuse(
                f"what comes next is the {expected_tier.name.lower()} tier of tensor {tensor.index}, "
                f"in group {tensor.group}, from element {self._start} on",
                where,
            )
        end = segment.start + segment.count
        if not segment.start < end <= num_elements:
            refuse(f"tensor {tensor.index} has {num_elements} elements, not {end}", where)
        if end == num_elements:
            self._current, self._start = next(self._remaining, None), 0
        elif end % FRAME_ELEMENTS:
            refuse(f"its cut at {end} is no multiple of {FRAME_ELEMENTS}", where)
        else:
            self._start = end
        return tensor

    def finish(self) -> None:
        """Refuse what has not been stepped over."""
        if self._current is not None:
            tier, tensor, _ = self._current
            refuse(f"the {tier.name.lower()} tier of tensor {tensor.name!r} is not stored whole", "parts")


def _check_planes(tensor: Tensor, tier: Tier, segment: Segment, end: int, where: str) -> int:
    """A segment's planes follow byte `end` of their part; returns where they end."""
    sizes_bytes = decoded_plane_bytes(
        tensor.encoding, tier, tensor.element_bytes, segment.count, segment.values
    )
    if len(segment.planes) != len(sizes_bytes):
        refuse(f"a segment has {len(segment.planes)} planes, not {len(sizes_bytes)}", where)
    for (codec, offset_bytes, size_bytes), decoded_bytes in zip(segment.planes, sizes_bytes, strict=True):
        if offset_bytes != align(end, PLANE_ALIGNMENT_BYTES):
            refuse(f"a plane starts at {offset_bytes}, but the plane before it ends at {end}", where)
        if codec is Codec.RAW:
            fits = size_bytes == decoded_bytes
        else:  # coded planes are smaller than raw ones, or a writer would have left them raw
            fits = (
                not tensor.encoding.is_whole
                and 0 < size_bytes < decoded_bytes
                and size_bytes % PLANE_ALIGNMENT_BYTES == 0
            )
        if not fits:
            refuse(f"{size_bytes} bytes cannot be a {codec.value} plane of {decoded_bytes}", where)
        end = offset_bytes + size_bytes
    return end
