"""A second reader of format 1, made from `docs/format.md` alone: slow, plain, and without a line of Teneral.

It proves two things: that the page says enough, and that artifacts are what the page says. It trusts what it
reads (the checks are tested elsewhere), but for digests and for the length of planes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import zstandard
from blake3 import blake3

FRAME_ELEMENTS = 65_536
ELEMENT_BYTES = {"U16": 2, "I16": 2, "F16": 2, "BF16": 2, "U32": 4, "I32": 4, "F32": 4}
ELEMENT_BYTES |= {"U64": 8, "I64": 8, "F64": 8, "C64": 8}  # all others: 1
BITS = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
MIDPOINT = 0b1000


def read_weights(
    objects: Mapping[str, bytes], *, tiers: tuple[str, ...] = ("draft", "refine")
) -> dict[str, bytes]:
    """Every tensor's bytes by name, aliases too, as far as `tiers` tell them."""
    manifest = json.loads(objects["manifest.json"])
    tensors = [tensor for group in manifest["groups"] for tensor in group["tensors"]]
    contents = [bytearray(size_bytes(tensor)) for tensor in tensors]
    for part in manifest["parts"]:
        if part["tier"] not in tiers:
            continue
        blob = objects[manifest["blobs"][part["blob"]]["name"]]
        stored = blob[part["offset"] : part["offset"] + part["size"]]
        assert blake3(stored).hexdigest() == part["blake3"]
        for segment in part["segments"]:
            number = segment["tensor"]
            planes = [
                plane_bytes(stored[offset : offset + size], codec)
                for codec, offset, size in segment["planes"]
            ]
            write_segment(tensors[number], part["tier"], segment, planes, contents[number])
    weights = {tensor["name"]: bytes(content) for tensor, content in zip(tensors, contents, strict=True)}
    return weights | {alias: weights[name] for alias, name in manifest["aliases"].items()}


def read_files(objects: Mapping[str, bytes]) -> dict[str, bytes]:
    """The small files by their names."""
    manifest = json.loads(objects["manifest.json"])
    for file in manifest["files"]:
        assert blake3(objects[file["path"]]).hexdigest() == file["blake3"]
    return {file["name"]: objects[file["path"]] for file in manifest["files"]}


def size_bytes(tensor: Mapping[str, Any]) -> int:
    num_elements = 1
    for size in tensor["shape"]:
        num_elements *= size
    return num_elements * BITS.get(tensor["dtype"], 8 * ELEMENT_BYTES.get(tensor["dtype"], 1)) // 8


def plane_bytes(stored: bytes, codec: str) -> bytes:
    """Any zstd decoder will do: frames are standard ones, and it skips the padding by itself."""
    if codec == "raw":
        return stored
    with zstandard.ZstdDecompressor().stream_reader(stored, read_across_frames=True) as reader:
        return reader.read()


def write_segment(
    tensor: Mapping[str, Any],
    tier: str,
    segment: Mapping[str, Any],
    planes: list[bytes],
    content: bytearray,
) -> None:
    width = ELEMENT_BYTES.get(tensor["dtype"], 1)
    start, count = segment["start"], segment["count"]
    if tensor["encoding"] == "whole":
        content[start * width : (start + count) * width] = planes[0]
    elif tensor["encoding"] == "bytes":
        for place, plane in enumerate(planes):
            assert len(plane) == count
            content[start * width + place : (start + count) * width : width] = plane
    elif tier == "draft":
        exponents, tops = planes[0], nibbles(planes[1], count)
        for index in range(count):
            word = tops[index] >> 3 << 15 | exponents[index] << 7 | (tops[index] & 7) << 4 | MIDPOINT
            content[2 * (start + index) : 2 * (start + index) + 2] = word.to_bytes(2, "little")
    else:
        for index, low in enumerate(nibbles(planes[0], count)):
            content[2 * (start + index)] = content[2 * (start + index)] & 0xF0 | low


def nibbles(plane: bytes, count: int) -> list[int]:
    """One an element; every frame has its first half in the low nibbles, its second in the high ones."""
    values: list[int] = []
    position = 0
    while len(values) < count:
        in_frame = min(FRAME_ELEMENTS, count - len(values))
        half = (in_frame + 1) // 2
        frame = plane[position : position + half]
        values += [byte & 15 for byte in frame] + [byte >> 4 for byte in frame[: in_frame - half]]
        position += half
    assert position == len(plane)
    return values
