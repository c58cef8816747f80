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
FLOATS = {"bf16": (8, 7), "f16": (5, 10), "f32": (8, 23)}  # bits of the exponent and of the mantissa


def read_weights(
    objects: Mapping[str, bytes],
    *,
    tiers: tuple[str, ...] = ("sketch", "draft", "refine"),
    base: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """Every tensor's bytes by name, aliases too, as far as `tiers` tell them. `base` has the base's objects."""
    manifest = read_manifest(objects["manifest.json"])
    tensors = [tensor for group in manifest["groups"] for tensor in group["tensors"]]
    contents = [bytearray(size_bytes(tensor)) for tensor in tensors]
    if "base" in manifest:
        assert base is not None
        values = read_weights(base)
        for tensor, content in zip(tensors, contents, strict=True):
            if tensor["encoding"] in ("same", "delta"):
                content[:] = values[tensor["name"]]
    for part in manifest["parts"]:
        if part["tier"] not in tiers:
            continue
        blob = objects[folder_of(manifest) + manifest["blobs"][part["blob"]]["name"]]
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
    manifest = read_manifest(objects["manifest.json"])
    for file in manifest["files"]:
        assert blake3(objects[folder_of(manifest) + file["path"]]).hexdigest() == file["blake3"]
    return {file["name"]: objects[folder_of(manifest) + file["path"]] for file in manifest["files"]}


def read_manifest(data: bytes) -> dict[str, Any]:
    """The manifest, whose own digest is right where it has one."""
    manifest: dict[str, Any] = json.loads(data)
    if "blake3" in manifest:
        before, end = data[:-77], data[-77:]
        assert end == b',"blake3":"%b"}' % blake3(before).hexdigest().encode()
    return manifest


def folder_of(manifest: Mapping[str, Any]) -> str:
    return f"blobs/{manifest['generation']}/" if "generation" in manifest else ""


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
    kind, *numbers = tensor["encoding"].split(".")
    if "sparse" in numbers:
        numbers.remove("sparse")
        write_sparse(tensor | {"encoding": ".".join([kind, *numbers])}, tier, segment, planes, content)
    elif kind == "delta":
        for index in range(count):
            z = sum(plane[index] << 8 * place for place, plane in enumerate(planes))
            at = (start + index) * width
            value = int.from_bytes(content[at : at + width], "little") + (-(z + 1) // 2 if z & 1 else z // 2)
            content[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
    elif kind == "whole":
        content[start * width : (start + count) * width] = planes[0]
    elif kind == "bytes":
        for place, plane in enumerate(planes):
            assert len(plane) == count
            content[start * width + place : (start + count) * width : width] = plane
    else:
        words = [
            int.from_bytes(content[width * index : width * index + width], "little")
            for index in range(start, start + count)
        ]
        for index, word in enumerate(float_words(kind, list(map(int, numbers)), tier, planes, words), start):
            content[width * index : width * index + width] = word.to_bytes(width, "little")


def write_sparse(
    tensor: Mapping[str, Any],
    tier: str,
    segment: Mapping[str, Any],
    planes: list[bytes],
    content: bytearray,
) -> None:
    """Values are decoded as a tensor of their own, over what earlier tiers wrote."""
    width = ELEMENT_BYTES.get(tensor["dtype"], 1)
    start, count, num = segment["start"], segment["count"], segment["values"]
    kind, *numbers = tensor["encoding"].split(".")
    places = range(start * width, (start + count) * width, width)
    if tier == ("sketch" if len(numbers) == 2 else "draft"):
        mask, planes = bits_of(planes[0], count), planes[1:]
        if kind != "bytes":
            signs, planes = iter(bits_of(planes[0], count - num)), planes[1:]
            for place in (place for place, bit in zip(places, mask, strict=True) if not bit):
                content[place : place + width] = (next(signs) << 8 * width - 1).to_bytes(width, "little")
    else:
        high = 0x7F if kind != "bytes" else 0xFF
        mask = [
            any(content[place : place + width - 1]) or content[place + width - 1] & high != 0
            for place in places
        ]
    found = [place for place, bit in zip(places, mask, strict=True) if bit]
    assert len(found) == num
    values = bytearray(b"".join(content[place : place + width] for place in found))
    write_segment(tensor, tier, {"start": 0, "count": num}, planes, values)
    for number, place in enumerate(found):
        content[place : place + width] = values[number * width : number * width + width]


def bits_of(plane: bytes, count: int) -> list[int]:
    assert len(plane) == -(-count // 8)
    return [plane[index // 8] >> index % 8 & 1 for index in range(count)]


def float_words(kind: str, numbers: list[int], tier: str, planes: list[bytes], words: list[int]) -> list[int]:
    """The floats' bit patterns once this tier is there; `words` are those before."""
    exponent_bits, mantissa_bits = FLOATS[kind]
    known = dict(zip(("draft",) if len(numbers) == 1 else ("sketch", "draft"), numbers, strict=True))
    known["refine"] = mantissa_bits
    names = list(known)
    missing = mantissa_bits - known[tier]
    fill = 1 << (missing - 1) if missing else 0
    if tier == names[0]:
        field = field_values(planes[1:], 1 + known[tier], len(words))
        signs = [value >> known[tier] for value in field]
        mantissas = [value & ((1 << known[tier]) - 1) for value in field]
        assert len(planes[0]) == len(words)
        return [
            sign << (exponent_bits + mantissa_bits) | exponent << mantissa_bits | mantissa << missing | fill
            for sign, exponent, mantissa in zip(signs, planes[0], mantissas, strict=True)
        ]
    before = known[names[names.index(tier) - 1]]
    kept = -1 << (mantissa_bits - before)
    field = field_values(planes, known[tier] - before, len(words))
    return [word & kept | value << missing | fill for word, value in zip(words, field, strict=True)]


def field_values(planes: list[bytes], field_bits: int, count: int) -> list[int]:
    sizes = [8] * (field_bits // 8) + [size for size in (4, 2, 1) if field_bits % 8 & size]
    values = [0] * count
    for plane, bits in zip(planes, sizes, strict=True):
        values = [
            value << bits | more for value, more in zip(values, unpacked(plane, bits, count), strict=True)
        ]
    return values


def unpacked(plane: bytes, bits: int, count: int) -> list[int]:
    """One value an element: every frame has its first elements in the lowest bits of its bytes."""
    share, values, position = 8 // bits, [], 0
    while len(values) < count:
        in_frame = min(FRAME_ELEMENTS, count - len(values))
        height = -(-in_frame // share)
        frame = plane[position : position + height]
        values += [
            frame[index % height] >> bits * (index // height) & ((1 << bits) - 1) for index in range(in_frame)
        ]
        position += height
    assert position == len(plane)
    return values
