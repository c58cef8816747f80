"""Small valid artifacts of format 1, as a manifest and the objects it names, laid out by the rules of
`docs/format.md` without the packer."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from teneral.loader.format import codec
from teneral.loader.format.limits import MANIFEST_NAME
from teneral.loader.format.manifest import (
    DTYPE_BITS,
    FRAME_ELEMENTS,
    Blob,
    Encoding,
    File,
    Group,
    Manifest,
    Part,
    Plane,
    Segment,
    Tensor,
    Tier,
    place_tensors,
    tensor_bytes,
)
from teneral.loader.format.manifest_json import dump_manifest

Bytes = npt.NDArray[np.uint8]
Shapes = Mapping[str, tuple[str, tuple[int, ...]]]  # name → dtype, shape


@dataclass(frozen=True)
class FormatArtifact:
    """`contents` are the tensors' bytes by name; `objects` everything that is stored, manifest included."""

    manifest: Manifest
    contents: dict[str, Bytes]
    objects: dict[str, bytes]


def weight_like(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Bytes:
    """Bytes as trained weights have them, where the dtype is a float; any others elsewhere."""
    count = math.prod(shape)
    if dtype in ("F16", "F32", "F64", "BF16"):
        floats = rng.normal(0, 0.02, count).astype("<f4")
        if dtype == "BF16":
            return (floats.view("<u4") >> 16).astype("<u2").view(np.uint8)
        return floats.astype({"F16": "<f2", "F32": "<f4", "F64": "<f8"}[dtype]).view(np.uint8)
    return rng.integers(0, 2 if dtype == "BOOL" else 256, tensor_bytes(dtype, shape), dtype=np.uint8)


def build_format_artifact(
    layout: Mapping[str, Shapes],
    *,
    files: Mapping[str, bytes] | None = None,
    aliases: Mapping[str, str] | None = None,
    metadata: Mapping[str, str] | None = None,
    part_elements: int = 4 * FRAME_ELEMENTS,
    parts_in_blob: int = 3,
    seed: int = 0,
    encodings: Mapping[str, str] | None = None,
) -> FormatArtifact:
    """`layout` gives the groups. Parts hold up to `part_elements`, a multiple of `FRAME_ELEMENTS`. Tensors that
    `encodings` names are stored so, the others as the packer would."""
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    tensors: list[Tensor] = []
    for name, members in layout.items():
        offsets, slab_bytes = place_tensors([tensor_bytes(*member) for member in members.values()])
        first = len(tensors)
        for (tensor_name, (dtype, shape)), offset in zip(members.items(), offsets, strict=True):
            chosen = (encodings or {}).get(tensor_name)
            encoding = codec.choose_encoding(dtype, shape) if chosen is None else Encoding.find(chosen)
            assert encoding is not None, chosen
            tensors.append(Tensor(len(tensors), tensor_name, dtype, shape, len(groups), encoding, offset))
        groups.append(Group(len(groups), name, tuple(range(first, len(tensors))), slab_bytes))
    contents = {tensor.name: weight_like(tensor.dtype, tensor.shape, rng) for tensor in tensors}
    for tensor in tensors:
        if tensor.encoding.is_sparse:
            elements = contents[tensor.name].reshape(-1, tensor.element_bytes)
            elements[rng.random(len(elements)) < 0.5] = 0
            elements[rng.random(len(elements)) < 0.02] = [0] * (tensor.element_bytes - 1) + [0x80]
    parts, blobs = _store_parts(tensors, contents, part_elements, parts_in_blob)
    stored_files = {f"files/{name}": data for name, data in (files or {}).items()}
    manifest = Manifest(
        generator="tests",
        blobs=tuple(Blob(name, len(data)) for name, data in blobs.items()),
        files=tuple(
            File(name, f"files/{name}", len(data), blake3(data).digest())
            for name, data in (files or {}).items()
        ),
        groups=tuple(groups),
        tensors=tuple(tensors),
        parts=tuple(parts),
        aliases=dict(aliases or {}),
        metadata=dict(metadata or {}),
    )
    objects = {MANIFEST_NAME: dump_manifest(manifest), **blobs, **stored_files}
    return FormatArtifact(manifest, contents, objects)


def _store_parts(
    tensors: Sequence[Tensor], contents: Mapping[str, Bytes], part_elements: int, parts_in_blob: int
) -> tuple[list[Part], dict[str, bytes]]:
    parts: list[Part] = []
    blobs: dict[str, bytes] = {}
    for tier in Tier:
        for members in _gather(tensors, tier, part_elements):
            blob = len(parts) // parts_in_blob
            name = f"blobs/{blob:03}.bin"
            before = blobs.get(name, b"")
            before += bytes(-len(before) % 8)
            content, segments = _encode_part(tier, members, contents)
            blobs[name] = before + content
            parts.append(
                Part(
                    len(parts),
                    tier,
                    members[0][0].group,
                    blob,
                    len(before),
                    len(content),
                    blake3(content).digest(),
                    segments,
                )
            )
    return parts, blobs


def _gather(
    tensors: Sequence[Tensor], tier: Tier, part_elements: int
) -> Iterator[list[tuple[Tensor, int, int]]]:
    """Parts as lists of (tensor, start, count)."""
    part: list[tuple[Tensor, int, int]] = []
    for tensor in tensors:
        if tier not in tensor.encoding.tiers:
            continue
        for start in range(0, tensor.num_elements, part_elements):
            count = min(part_elements, tensor.num_elements - start)
            room = part_elements - sum(member[2] for member in part)
            if part and (part[0][0].group != tensor.group or count > room):
                yield part
                part = []
            part.append((tensor, start, count))
    if part:
        yield part


def _encode_part(
    tier: Tier, members: Sequence[tuple[Tensor, int, int]], contents: Mapping[str, Bytes]
) -> tuple[bytes, tuple[Segment, ...]]:
    content = b""
    segments: list[Segment] = []
    for tensor, start, count in members:
        width = max(1, DTYPE_BITS[tensor.dtype] // 8)
        data = contents[tensor.name][start * width : (start + count) * width]
        planes: list[Plane] = []
        for plane_codec, stored in codec.encode_segment(tensor.dtype, tensor.encoding, data)[tier]:
            content += bytes(-len(content) % 8)
            planes.append(Plane(plane_codec, len(content), len(stored)))
            content += bytes(stored)
        values = codec.num_values(tensor.encoding, data)
        segments.append(Segment(tensor.index, start, count, tuple(planes), values))
    return content, tuple(segments)


MIXED_LAYOUT: dict[str, Shapes] = {
    "embed": {"embed.weight": ("BF16", (600, 300)), "steps": ("I64", (4, 300))},
    "layers.0": {
        "norm.weight": ("BF16", (300,)),
        "up.weight": ("BF16", (301, 301)),
        "down.weight": ("F16", (97, 103)),
        "scales": ("F32", (40, 31)),
        "codes": ("I8", (97, 103)),
        "packed": ("F4", (64, 32)),
        "nothing": ("BF16", (0, 8)),
        "scalar": ("F32", ()),
    },
    "head": {"mask": ("BOOL", (50, 50)), "tiny": ("BF16", (2, 2)), "wide": ("F64", (11, 13))},
}
"""Every encoding, odd counts, an empty tensor, a scalar, and tensors of more than one part."""
