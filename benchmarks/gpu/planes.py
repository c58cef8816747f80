"""Parts of one large bf16 matrix, made in memory: the input of the benchmarks that place weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from benchmarks.report import note

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
    decoded_plane_bytes,
)


@dataclass(frozen=True)
class Parts:
    """`parts` of `manifest`, by tier; `stored` are the bytes of each tier's parts, which are all the same."""

    manifest: Manifest
    parts: dict[Tier, tuple[Part, ...]]
    stored: dict[Tier, bytes]


def empty_parts(dtype: str, encoding: str, count: int) -> Parts:
    """One part a tier, whose planes are raw and never looked at: any number of elements."""
    return _make(dtype, encoding, count, 1, {})


def coded_parts(count: int, num_parts: int) -> Parts:
    """Of normally distributed bf16 weights, `bf16.3`, `count` elements a part, coded as the packer does it."""
    floats = np.random.default_rng(0).standard_normal(count, dtype=np.float32) * np.float32(0.02)
    words = (floats.view("<u4") >> 16).astype("<u2").view(np.uint8)
    coded = codec.encode_segment("BF16", Encoding.BF16_3, words)
    return _make("BF16", "bf16.3", count, num_parts, {tier: list(planes) for tier, planes in coded.items()})


def _make(dtype: str, encoding: str, count: int, num_parts: int, coded: dict[Tier, list[Any]]) -> Parts:
    found = Encoding.find(encoding)
    assert found is not None
    tensor = Tensor(0, "w", dtype, (num_parts, count), 0, found, 0)
    stored: dict[Tier, bytes] = {}
    parts: list[Part] = []
    for tier in found.tiers:
        planes, content, at = [], bytearray(), 0
        sizes = decoded_plane_bytes(found, tier, DTYPE_BITS[dtype] // 8, count)
        for place, size_bytes in enumerate(sizes):
            how, data = coded[tier][place] if coded else (Codec.RAW, b"")
            at = align(at, 8)
            planes.append(Plane(how, at, len(data) if coded else size_bytes))
            content += bytes(at - len(content)) + bytes(data) if coded else b""
            at = len(content) if coded else at + size_bytes
        stored[tier] = bytes(content)
        for number in range(num_parts):
            segment = Segment(0, number * count, count, tuple(planes))
            parts.append(Part(len(parts), tier, 0, 0, 0, at, None, (segment,)))
    group = Group(0, "all", (0,), align(tensor.size_bytes))
    manifest = Manifest("benchmark", (Blob("b", 0),), (), (group,), (tensor,), tuple(parts), {}, {})
    by_tier = {tier: tuple(part for part in parts if part.tier is tier) for tier in found.tiers}
    return Parts(manifest, by_tier, stored)


def open_device() -> Any:
    """The first CUDA device, opened as a load does it; None, and a word why, where there is none."""
    from teneral.loader.device.cuda import CudaDevice
    from teneral.loader.errors import LoadError
    from teneral.loader.timeline import Timeline

    try:
        return CudaDevice(0, timeline=Timeline())
    except LoadError as error:
        note(f"no device: {error.message}; scripts/gpu-check runs this where there is one")
        return None
