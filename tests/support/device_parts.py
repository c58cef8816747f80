"""Parts with a few tensors of given content and encoding, coded as the packer codes them; one part a tier."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from blake3 import blake3
from tests.support.paced import WAIT_S

from teneral.loader.format import codec
from teneral.loader.format.fill import Scratch, decode_planes
from teneral.loader.format.manifest import (
    DTYPE_BITS,
    Blob,
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
)
from teneral.loader.load.device_load import DeviceLoad

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class CodedTensors:
    """`stored` are the parts' bytes, in the manifest's order: one part for each tier that any tensor has."""

    manifest: Manifest
    stored: tuple[bytes, ...]
    contents: dict[str, Bytes]

    def expected(self, upto: Tier) -> Bytes:
        """The weights, as the decoder on the host makes them of all parts up to that tier; 0 where there are none."""
        weights = np.zeros(align(self.manifest.groups[0].slab_bytes), np.uint8)
        for part, stored in zip(self.manifest.parts, self.stored, strict=True):
            if part.tier > upto:
                continue
            for segment in part.segments:
                tensor = self.manifest.tensors[segment.tensor]
                begin = tensor.offset_bytes + segment.start * tensor.element_bytes
                out = weights[begin : begin + segment.count * tensor.element_bytes]
                decode_planes(tensor, segment, part.tier, memoryview(stored), out, Scratch())
        return weights


def code_tensors(tensors: Mapping[str, tuple[str, str, Bytes]], *, cut_at: int | None = None) -> CodedTensors:
    """One group of tensors: dtype, encoding's name and bytes by name; cut into segments of that number of elements."""
    offsets, slab_bytes = place_tensors([content.size for _, _, content in tensors.values()])
    made = []
    for index, ((name, (dtype, encoding, content)), offset) in enumerate(
        zip(tensors.items(), offsets, strict=True)
    ):
        found = Encoding.find(encoding)
        assert found is not None
        made.append(Tensor(index, name, dtype, (content.size * 8 // DTYPE_BITS[dtype],), 0, found, offset))
    contents = {name: content for name, (_, _, content) in tensors.items()}
    parts, stored, begin = [], [], 0
    for tier in Tier:
        of_tier = [tensor for tensor in made if tier in tensor.encoding.tiers]
        if not of_tier:
            continue
        content, segments = _code(tier, of_tier, contents, cut_at)
        digest = blake3(content).digest()
        parts.append(Part(len(parts), tier, 0, 0, begin, len(content), digest, tuple(segments)))
        stored.append(content)
        begin += align(len(content), 8)
    group = Group(0, "all", tuple(range(len(made))), slab_bytes)
    manifest = Manifest("tests", (Blob("b", begin),), (), (group,), tuple(made), tuple(parts), {}, {})
    return CodedTensors(manifest, tuple(stored), contents)


def _code(
    tier: Tier, tensors: list[Tensor], contents: Mapping[str, Bytes], cut_at: int | None
) -> tuple[bytes, list[Segment]]:
    content, segments = bytearray(), []
    for tensor in tensors:
        step = cut_at or max(1, tensor.num_elements)
        for start in range(0, tensor.num_elements, step):
            count = min(step, tensor.num_elements - start)
            data = contents[tensor.name][
                start * tensor.element_bytes : (start + count) * tensor.element_bytes
            ]
            planes = []
            for plane_codec, coded in codec.encode_segment(tensor.dtype, tensor.encoding, data)[tier]:
                content += bytes(-len(content) % 8)
                planes.append(Plane(plane_codec, len(content), len(coded)))
                content += bytes(coded)
            segments.append(Segment(tensor.index, start, count, tuple(planes)))
    return bytes(content), segments


def weights_like(dtype: str, count: int, seed: int = 0) -> Bytes:
    """Elements: half normally distributed floats, half any bits (NaNs, infinities, zeros among them)."""
    rng = np.random.default_rng(seed)
    size_bytes = count * max(1, DTYPE_BITS[dtype] // 8)
    data = rng.integers(0, 256, size_bytes, dtype=np.uint8)
    if dtype in ("BF16", "F16", "F32"):
        floats = rng.normal(0, 0.02, count // 2).astype("<f4")
        if dtype == "BF16":
            normal = (floats.view("<u4") >> 16).astype("<u2").view(np.uint8)
        else:
            normal = floats.astype("<f2" if dtype == "F16" else "<f4").view(np.uint8)
        data[: normal.size] = normal
    return data


def every_word(bits: int = 16) -> Bytes:
    """Every bit pattern of 16 bits once, in an order in which neighbours differ in all places."""
    words = np.arange(1 << bits, dtype="<u2")
    return (words * np.uint16(40503)).astype("<u2").view(np.uint8)


def seen(load: DeviceLoad, name: str) -> bytes:
    """A tensor as the host's own stream sees it."""
    tensor = load.manifest.by_name[name]
    load.order_after([tensor.group], 0)
    slab = load.device_slab(tensor.group)
    return slab[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes].tobytes()


def assert_exact(load: DeviceLoad, originals: dict[str, np.ndarray]) -> None:
    for group in load.manifest.groups:
        load.wait(group.index, timeout_s=WAIT_S)
    for name, original in originals.items():
        assert seen(load, name) == original.tobytes(), name
