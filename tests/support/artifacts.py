"""Small artifacts put together by hand in a `MemoryStore`, cut into parts as the packer never would.

The draft and the refine tier may be cut at different elements, so that a refine part needs several draft
parts. Also builds the manifests of never-packed weights (`packed=False`): whole raw planes without digests.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import (
    NotFoundError,
)
from teneral.loader.format import codec
from teneral.loader.format.manifest import (
    DTYPE_BITS,
    Blob,
    Codec,
    Encoding,
    Group,
    Manifest,
    Part,
    Plane,
    Segment,
    Tensor,
    Tier,
    align,
    place_tensors,
    tensor_bytes,
)
from teneral.loader.sources.file.store import FileStore

Bytes = npt.NDArray[np.uint8]


Shape = tuple[int, ...]


Layout = Sequence[tuple[str, Mapping[str, tuple[str, Shape]]]]  # [(group, {tensor: (dtype, shape)})]


@dataclass(frozen=True)
class BuiltArtifact:
    """`originals` are the tensors' bytes, by name."""

    manifest: Manifest
    store: MemoryStore
    originals: dict[str, Bytes]

    def expected(self, name: str, tier: Tier) -> Bytes:
        """The tensor's bytes once that tier is there. Until a split tensor is exact it has midpoints for low bits."""
        data = self.originals[name]
        tensor = self.manifest.by_name[name]
        if tier is Tier.REFINE or len(tensor.encoding.tiers) == 1:
            return data
        return coarse(tensor.dtype, tensor.encoding.mantissa_bits(tier), data)

    def parts_of(self, group: str, tier: Tier) -> tuple[Part, ...]:
        index = next(entry.index for entry in self.manifest.groups if entry.name == group)
        return self.manifest.parts_of(index, tier)


def weight_bytes(dtype: str, shape: Shape, rng: np.random.Generator) -> Bytes:
    """Random content: normally distributed floats, as weights are, and any bits elsewhere."""
    size_bytes = tensor_bytes(dtype, shape)
    if dtype in ("BF16", "F32"):
        floats = rng.normal(0, 0.02, size_bytes // (DTYPE_BITS[dtype] // 8)).astype("<f4")
        words = floats.view("<u4")
        return ((words >> 16).astype("<u2") if dtype == "BF16" else words).view(np.uint8)
    return rng.integers(0, 2 if dtype == "BOOL" else 256, size_bytes, dtype=np.uint8)


def coarse(dtype: str, mantissa_bits: int, data: Bytes) -> Bytes:
    """Floats of which only the first mantissa bits are known: the others are the middle of their range."""
    word, all_bits = {"BF16": ("<u2", 7), "F16": ("<u2", 10), "F32": ("<u4", 23)}[dtype]
    unknown = all_bits - mantissa_bits
    if unknown == 0:
        return data
    words = data.view(word)
    return ((words >> unknown << unknown) | (1 << (unknown - 1))).astype(word).view(np.uint8)


def build_artifact(
    layout: Layout,
    *,
    seed: int = 0,
    packed: bool = True,
    draft_elements: int = 100_000,
    refine_elements: int = 70_000,
    sketch_bits: int | None = None,
    sketch_elements: int = 100_000,
) -> BuiltArtifact:
    """An artifact whose parts hold up to `part_elements` elements of their tier, of any number of tensors.

    With `sketch_bits`, matrices of bf16 have a sketch of that number of mantissa bits, and whole tensors are in it.
    """
    rng = np.random.default_rng(seed)
    groups: list[Group] = []
    tensors: list[Tensor] = []
    originals: dict[str, Bytes] = {}
    for group_index, (group_name, members) in enumerate(layout):
        offsets, slab_bytes = place_tensors([tensor_bytes(*member) for member in members.values()])
        first = len(tensors)
        for (name, (dtype, shape)), offset in zip(members.items(), offsets, strict=True):
            encoding = _encoding(dtype, shape, sketch_bits) if packed else Encoding.WHOLE
            tensors.append(Tensor(len(tensors), name, dtype, shape, group_index, encoding, offset))
            originals[name] = weight_bytes(dtype, shape, rng)
        groups.append(Group(group_index, group_name, tuple(range(first, len(tensors))), slab_bytes))
    writer = _BlobWriter(tensors, originals, packed=packed)
    for tier, most in zip(Tier, (sketch_elements, draft_elements, refine_elements), strict=True):
        for group in groups:
            members_of = [tensors[index] for index in group.tensors]
            for stretches in _cut([tensor for tensor in members_of if tier in tensor.encoding.tiers], most):
                writer.add_part(tier, group.index, stretches)
    manifest = Manifest(
        generator="tests",
        blobs=writer.blobs(),
        files=(),
        groups=tuple(groups),
        tensors=tuple(tensors),
        parts=tuple(writer.parts),
        aliases={},
        metadata={},
    )
    return BuiltArtifact(manifest, MemoryStore(writer.objects()), originals)


def _encoding(dtype: str, shape: Shape, sketch_bits: int | None) -> Encoding:
    """The packer's choice, but even the smallest bf16 matrix is split."""
    if dtype == "BF16" and len(shape) > 1 and math.prod(shape):
        return Encoding.of_float(dtype, 3, sketch_bits)
    return codec.choose_encoding(dtype, shape, sketch_bits=sketch_bits)


def _cut(tensors: Sequence[Tensor], most: int) -> Iterator[list[tuple[Tensor, int, int]]]:
    """Parts as lists of (tensor, first element, element past the last)."""
    part: list[tuple[Tensor, int, int]] = []
    room = most
    for tensor in tensors:
        start = 0
        while start < tensor.num_elements:
            end = min(tensor.num_elements, start + room)
            part.append((tensor, start, end))
            room -= end - start
            start = end
            if room == 0:
                yield part
                part, room = [], most
    if part:
        yield part


class _BlobWriter:
    """Collects parts: one blob a tier."""

    def __init__(self, tensors: Sequence[Tensor], originals: Mapping[str, Bytes], *, packed: bool) -> None:
        self._originals = originals
        self._packed = packed
        self._data: dict[Tier, bytearray] = {}  # by tier, in the order of their parts
        self.parts: list[Part] = []

    def add_part(self, tier: Tier, group: int, stretches: list[tuple[Tensor, int, int]]) -> None:
        content = bytearray()
        segments = []
        for tensor, start, end in stretches:
            data = self._originals[tensor.name][start * tensor.element_bytes : end * tensor.element_bytes]
            planes = []
            for plane_codec, coded in self._encode(tensor, tier, data):
                planes.append(Plane(plane_codec, len(content), len(coded)))
                content += coded
                content += bytes(align(len(content), 8) - len(content)) if self._packed else b""
            segments.append(Segment(tensor.index, start, end - start, tuple(planes)))
        blob = self._data.setdefault(tier, bytearray())
        digest = blake3(content).digest() if self._packed else None
        self.parts.append(
            Part(
                len(self.parts),
                tier,
                group,
                list(self._data).index(tier),
                len(blob),
                len(content),
                digest,
                tuple(segments),
            )
        )
        blob += content

    def _encode(self, tensor: Tensor, tier: Tier, data: Bytes) -> list[tuple[Codec, bytes]]:
        planes = codec.encode_segment(tensor.dtype, tensor.encoding, data)[tier]
        return [(plane_codec, bytes(coded)) for plane_codec, coded in planes]

    def blobs(self) -> tuple[Blob, ...]:
        return tuple(
            Blob(f"blobs/{tier.name.lower()}-000.bin", len(data)) for tier, data in self._data.items()
        )

    def objects(self) -> dict[str, bytes]:
        return {
            blob.name: bytes(self._data[tier]) for blob, tier in zip(self.blobs(), self._data, strict=True)
        }


def names_in(store: MemoryStore | FileStore) -> list[str]:
    try:
        return [info.name for info in store.list()]
    except NotFoundError:
        return []
