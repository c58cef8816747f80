"""Whether the values of a packed artifact's manifest fit together: names, tensors, blobs, parts, segments, planes.

Everything is laid out in one prescribed order, so each check is a cursor that must be met exactly: what cannot be moved
cannot overlap, leave a hole, or be counted twice. Linear in the size of the manifest.
It does not know JSON; `docs/format.md`, "What a reader must check", is the norm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NoReturn

from .codec import decoded_plane_bytes
from .errors import ManifestError
from .manifest import (
    DTYPE_BITS,
    FRAME_ELEMENTS,
    MANIFEST_NAME,
    MAX_PART_BYTES,
    MAX_PART_DECODED_BYTES,
    MAX_PART_ELEMENTS,
    MAX_PART_SEGMENTS,
    PLANE_ALIGNMENT_BYTES,
    Codec,
    Encoding,
    Manifest,
    Part,
    Segment,
    Tensor,
    Tier,
    align,
)

MAX_TENSOR_ELEMENTS = 2**48
MAX_WEIGHT_BYTES = 16 * 2**40
RESERVED_TENSOR_NAME = "__metadata__"  # safetensors could not hold a tensor of that name


def check_manifest(manifest: Manifest) -> None:
    """Raises `ManifestError` that names the place when something does not fit."""
    _check_tensors(manifest)
    _check_names(manifest)
    _check_blobs(manifest)
    _check_parts(manifest)


def _check_tensors(manifest: Manifest) -> None:
    for tensor in manifest.tensors:
        where = f"tensor {tensor.name!r}"
        if math.prod(max(1, size) for size in tensor.shape) > MAX_TENSOR_ELEMENTS:
            _fail(f"it has more than {MAX_TENSOR_ELEMENTS} elements", where)
        if math.prod(tensor.shape) * DTYPE_BITS[tensor.dtype] % 8:
            _fail("its elements do not fill whole bytes", where)
        if tensor.encoding is Encoding.BF16_3 and tensor.dtype != "BF16":
            _fail(f"encoding {tensor.encoding.value!r} is for BF16, not {tensor.dtype}", where)
    if manifest.weight_bytes > MAX_WEIGHT_BYTES:
        _fail(f"the weights take more than {MAX_WEIGHT_BYTES} bytes", "groups")


def _check_names(manifest: Manifest) -> None:
    names = [tensor.name for tensor in manifest.tensors]
    tensor_names = set(names)
    _check_unique([*names, *manifest.aliases], "tensor")
    if RESERVED_TENSOR_NAME in tensor_names or RESERVED_TENSOR_NAME in manifest.aliases:
        _fail(f"no tensor can be called {RESERVED_TENSOR_NAME!r}", "groups")
    for alias, target in manifest.aliases.items():
        if target not in tensor_names:
            _fail(f"{alias!r} stands for {target!r}, which is no tensor", "aliases")
    _check_unique([group.name for group in manifest.groups], "group")
    stored = [MANIFEST_NAME, *(blob.name for blob in manifest.blobs), *(file.path for file in manifest.files)]
    _check_unique(stored, "stored object")
    _check_no_name_is_a_folder(stored)
    file_names = [file.name for file in manifest.files]
    _check_unique(file_names, "file")
    _check_no_name_is_a_folder(file_names)


def _check_unique(names: Iterable[str], what: str) -> None:
    seen: set[str] = set()
    for name in names:
        if name in seen:
            _fail(f"{what} {name!r} stands there twice", "names")
        seen.add(name)


def _check_no_name_is_a_folder(names: list[str]) -> None:
    taken = set(names)
    for name in names:
        for index, character in enumerate(name):
            if character == "/" and name[:index] in taken:
                _fail(f"{name[:index]!r} is both an object and a folder", "names")


def _check_blobs(manifest: Manifest) -> None:
    """Parts follow each other in their blobs, in the order of the manifest, and end where the blob does."""
    ends = [0] * len(manifest.blobs)
    for part in manifest.parts:
        where = f"parts[{part.index}]"
        if part.blob >= len(ends):
            _fail(f"there is no blob {part.blob}", where)
        if part.offset_bytes != align(ends[part.blob], PLANE_ALIGNMENT_BYTES):
            _fail(
                f"it does not start at byte {align(ends[part.blob], PLANE_ALIGNMENT_BYTES)} of its blob",
                where,
            )
        ends[part.blob] = part.offset_bytes + part.size_bytes
    for blob, end in zip(manifest.blobs, ends, strict=True):
        if not end <= blob.size_bytes <= align(end, PLANE_ALIGNMENT_BYTES) or not end:
            _fail(f"it has {blob.size_bytes} bytes, but its parts end at {end}", f"blob {blob.name!r}")


def _check_parts(manifest: Manifest) -> None:
    """The segments, taken in the order of the parts, run once through every tensor of every tier, tier by tier."""
    cursor = _Cursor(manifest.tensors)
    for part in manifest.parts:
        where = f"parts[{part.index}]"
        if not 0 < len(part.segments) <= MAX_PART_SEGMENTS:
            _fail(f"it has {len(part.segments)} segments, not 1 to {MAX_PART_SEGMENTS}", where)
        if part.size_bytes > MAX_PART_BYTES:
            _fail(f"it has {part.size_bytes} bytes, more than {MAX_PART_BYTES}", where)
        num_elements = decoded_bytes = end = 0
        for segment in part.segments:
            tensor = cursor.advance(part, segment, where)
            num_elements += segment.count
            decoded_bytes += segment.count * tensor.element_bytes
            end = _check_planes(tensor, segment, part, end, where)
        if num_elements > MAX_PART_ELEMENTS or decoded_bytes > MAX_PART_DECODED_BYTES:
            _fail(f"it has {num_elements} elements of {decoded_bytes} bytes, more than a part may", where)
        if not end <= part.size_bytes <= align(end, PLANE_ALIGNMENT_BYTES):
            _fail(f"it has {part.size_bytes} bytes, but its planes end at {end}", where)
    cursor.finish()


class _Cursor:
    """The one element that the next segment must start with."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self._remaining: Iterator[tuple[Tier, Tensor]] = (
            (tier, tensor)
            for tier in Tier
            for tensor in tensors
            if tensor.num_elements and (tier is Tier.DRAFT or tensor.has_refine)
        )
        self._current = next(self._remaining, None)
        self._start = 0

    def advance(self, part: Part, segment: Segment, where: str) -> Tensor:
        """Step over `segment`; returns its tensor. Refuses anything but the next stretch in order."""
        if self._current is None:
            _fail("it holds more than the tensors have", where)
        tier, tensor = self._current
        if (part.tier, part.group, segment.tensor, segment.start) != (
            tier, tensor.group, tensor.index, self._start,
        ):  # fmt: skip
            _fail(
                f"the next segment in order is of tensor {tensor.index}, group {tensor.group}, tier {tier.name.lower()}, "
                f"from element {self._start}",
                where,
            )
        end = segment.start + segment.count
        if segment.count < 1 or end > tensor.num_elements:
            _fail(f"{segment.count} elements from {segment.start} are not in tensor {tensor.index}", where)
        if end == tensor.num_elements:
            self._current, self._start = next(self._remaining, None), 0
        elif end % FRAME_ELEMENTS:
            _fail(f"tensor {tensor.index} is cut at {end}, which is no multiple of {FRAME_ELEMENTS}", where)
        else:
            self._start = end
        return tensor

    def finish(self) -> None:
        if self._current is not None:
            tier, tensor = self._current
            _fail(
                f"tensor {tensor.name!r}, tier {tier.name.lower()}, is not stored from {self._start} on",
                "parts",
            )


def _check_planes(tensor: Tensor, segment: Segment, part: Part, end: int, where: str) -> int:
    """The segment's planes follow the byte `end` of the part in order; returns where they end."""
    sizes_bytes = decoded_plane_bytes(tensor.encoding, part.tier, tensor.element_bytes, segment.count)
    if len(segment.planes) != len(sizes_bytes):
        _fail(f"tensor {tensor.index} has {len(segment.planes)} planes here, not {len(sizes_bytes)}", where)
    for plane, decoded_bytes in zip(segment.planes, sizes_bytes, strict=True):
        if plane.offset_bytes != align(end, PLANE_ALIGNMENT_BYTES):
            _fail(f"a plane starts at {plane.offset_bytes}, not {align(end, PLANE_ALIGNMENT_BYTES)}", where)
        if plane.codec is Codec.RAW:
            fits = plane.size_bytes == decoded_bytes
        else:
            fits = (
                tensor.encoding is not Encoding.WHOLE
                and 0 < plane.size_bytes < decoded_bytes
                and plane.size_bytes % PLANE_ALIGNMENT_BYTES == 0
            )
        if not fits:
            _fail(
                f"a {plane.codec.value} plane of {decoded_bytes} bytes cannot take {plane.size_bytes}", where
            )
        end = plane.offset_bytes + plane.size_bytes
    return end


def _fail(message: str, where: str) -> NoReturn:
    raise ManifestError(
        f"{MANIFEST_NAME}, {where}: {message}",
        where=where,
        hint="The file is damaged or was not written by `teneral pack`: pack the model again.",
    )
