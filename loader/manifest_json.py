"""`manifest.json` ↔ `Manifest`: the JSON of format 1, read with distrust and written canonically.

Here every value is checked by itself: its type, range and name, and that no key is missing, unknown or there
twice. How the values fit together is checked by `manifest_checks.py`. A manifest that leaves `parse_manifest`
is sound: a reader may allocate and read by it. For any input, time and memory are bounded by constants.
`docs/format.md`, "The manifest", is the norm. Nothing here does I/O.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TypeVar

from blake3 import blake3

from .errors import IntegrityError, ManifestError, UsageError
from .manifest import (
    DTYPE_BITS,
    FORMAT_VERSION,
    MANIFEST_NAME,
    Blob,
    Codec,
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
from .manifest_checks import DAMAGED, check_manifest, refuse
from .sources.base import check_name

FORMAT_NAME = "teneral"
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_JSON_ITEMS = 8_000_000  # bounds the memory that a hostile 64 MiB can take once parsed, to about 1 GiB
MAX_TENSORS = 1_000_000
MAX_PARTS = 1_000_000
MAX_GROUPS = 100_000
MAX_BLOBS = 100_000
MAX_FILES = 10_000
MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_DIMENSIONS = 32
MAX_TEXT_BYTES = 1024
MAX_INTEGER = 2**53 - 1  # what every JSON reader holds exactly

_TIERS = {tier.name.lower(): tier for tier in Tier}
_ENCODINGS = {encoding.value: encoding for encoding in Encoding}
_CODECS = {codec.value: codec for codec in Codec}
_DTYPES = {dtype: dtype for dtype in DTYPE_BITS}

_NEWER = "A newer Teneral may have written it: upgrade, or pack the model again with this version."

T = TypeVar("T")


def parse_manifest(data: bytes, *, expected_digest: bytes | None = None) -> Manifest:
    """The manifest in `data`, checked as a whole.

    Raises `IntegrityError` when its BLAKE3-256 is not `expected_digest`, before anything is parsed; else
    `ManifestError`, whose `where` names the place.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        refuse(f"it has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}", MANIFEST_NAME)
    digest = blake3(data).digest()
    if expected_digest is not None and digest != expected_digest:
        raise IntegrityError(
            f"{MANIFEST_NAME} is not the one that was pinned",
            where=MANIFEST_NAME,
            expected=expected_digest.hex(),
            got=digest.hex(),
            hint="The artifact was replaced, or the pin is another's: renew or drop the address's '@b3:…'.",
        )
    document = _read_json(data)
    _check_version(document)
    keys = ("format", "version", "generator", "blobs", "files", "groups", "parts", "aliases", "metadata")
    _check_keys(document, keys, MANIFEST_NAME)
    groups, tensors = _parse_groups(document["groups"])
    manifest = Manifest(
        generator=_text(document["generator"], "generator"),
        blobs=tuple(_parse_blob(*item) for item in _items(document["blobs"], "blobs", MAX_BLOBS)),
        files=tuple(_parse_file(*item) for item in _items(document["files"], "files", MAX_FILES)),
        groups=groups,
        tensors=tensors,
        parts=tuple(
            _parse_part(index, *item)
            for index, item in enumerate(_items(document["parts"], "parts", MAX_PARTS))
        ),
        aliases=_text_table(document["aliases"], "aliases", MAX_TEXT_BYTES),
        metadata=_text_table(document["metadata"], "metadata", MAX_MANIFEST_BYTES),
        digest=digest,
    )
    check_manifest(manifest)
    return manifest


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON.

    It was parsed again and found equal, so nobody can publish what a reader refuses. Raises `ManifestError`
    when the manifest breaks the format or is not one of packed weights.
    """
    document = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "generator": manifest.generator,
        "blobs": [{"name": blob.name, "size": blob.size_bytes} for blob in manifest.blobs],
        "files": [_file_to_json(file) for file in manifest.files],
        "groups": [
            {
                "name": group.name,
                "tensors": [_tensor_to_json(manifest.tensors[index]) for index in group.tensors],
            }
            for group in manifest.groups
        ],
        "parts": [_part_to_json(part) for part in manifest.parts],
        "aliases": manifest.aliases,
        "metadata": manifest.metadata,
    }
    try:
        data = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ManifestError(f"a text in the manifest is not valid Unicode: {error}") from error
    again = parse_manifest(data)
    for field in ("generator", "blobs", "files", "groups", "tensors", "parts", "aliases", "metadata"):
        if getattr(again, field) != getattr(manifest, field):
            refuse("the manifest has something there that the format cannot express", field)
    return data


# JSON


def _read_json(data: bytes) -> dict[str, Any]:
    # One of these stands before every value but those of objects' first keys.
    if data.count(b",") + data.count(b"[") + data.count(b"{") > MAX_JSON_ITEMS:
        refuse(f"it holds more than {MAX_JSON_ITEMS} items", MANIFEST_NAME)
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_unique_keys,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except RecursionError:
        refuse("it is nested too deeply", MANIFEST_NAME)
    except ValueError as error:  # of json, of UTF-8, or of an integer with thousands of digits
        raise ManifestError(
            f"{MANIFEST_NAME} is not valid JSON: {error}", where=MANIFEST_NAME, hint=DAMAGED
        ) from error
    if type(document) is not dict:
        refuse("it is not a JSON object", MANIFEST_NAME)
    return document


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = dict(pairs)
    if len(table) != len(pairs):
        refuse("a key stands twice in one object", MANIFEST_NAME)
    return table


def _refuse_number(text: str) -> NoReturn:
    refuse(f"the number {text[:40]} is not an integer", MANIFEST_NAME)


def _check_version(document: dict[str, Any]) -> None:
    if document.get("format") != FORMAT_NAME:
        refuse("this is not the manifest of a Teneral artifact", "format")
    version = document.get("version")
    if type(version) is not int:
        refuse("it is not an integer", "version")
    if version != FORMAT_VERSION:
        refuse(f"format version {str(version)[:40]} is not {FORMAT_VERSION}", "version", hint=_NEWER)


# Values ← JSON


def _parse_blob(value: Any, where: str) -> Blob:
    _check_keys(value, ("name", "size"), where)
    return Blob(_object_name(value["name"], f"{where}.name"), _integer(value["size"], f"{where}.size"))


def _parse_file(value: Any, where: str) -> File:
    _check_keys(value, ("name", "path", "size", "blake3"), where)
    return File(
        name=_object_name(value["name"], f"{where}.name"),
        path=_object_name(value["path"], f"{where}.path"),
        size_bytes=_integer(value["size"], f"{where}.size", MAX_FILE_BYTES),
        digest=_digest(value["blake3"], f"{where}.blake3"),
    )


def _parse_groups(value: Any) -> tuple[tuple[Group, ...], tuple[Tensor, ...]]:
    """Tensors are numbered as they stand; their places in the slab follow from their order."""
    groups: list[Group] = []
    tensors: list[Tensor] = []
    for index, (item, where) in enumerate(_items(value, "groups", MAX_GROUPS)):
        _check_keys(item, ("name", "tensors"), where)
        first = len(tensors)
        specs = [_parse_tensor(*spec) for spec in _items(item["tensors"], f"{where}.tensors", MAX_TENSORS)]
        offsets, slab_bytes = place_tensors([tensor_bytes(dtype, shape) for _, dtype, shape, _ in specs])
        for (name, dtype, shape, encoding), offset in zip(specs, offsets, strict=True):
            tensors.append(Tensor(len(tensors), name, dtype, shape, index, encoding, offset))
        if not first < len(tensors) <= MAX_TENSORS:
            refuse(f"the group is empty, or there are more than {MAX_TENSORS} tensors", where)
        name = _text(item["name"], f"{where}.name")
        groups.append(Group(index, name, tuple(range(first, len(tensors))), slab_bytes))
    return tuple(groups), tuple(tensors)


def _parse_tensor(value: Any, where: str) -> tuple[str, str, tuple[int, ...], Encoding]:
    _check_keys(value, ("name", "dtype", "shape", "encoding"), where)
    return (
        _text(value["name"], f"{where}.name"),
        _known(value["dtype"], _DTYPES, f"{where}.dtype"),
        tuple(_integer(*item) for item in _items(value["shape"], f"{where}.shape", MAX_DIMENSIONS)),
        _known(value["encoding"], _ENCODINGS, f"{where}.encoding"),
    )


def _parse_part(index: int, value: Any, where: str) -> Part:
    _check_keys(value, ("tier", "group", "blob", "offset", "size", "blake3", "segments"), where)
    segments = _items(value["segments"], f"{where}.segments", MAX_JSON_ITEMS)
    return Part(
        index=index,
        tier=_known(value["tier"], _TIERS, f"{where}.tier"),
        group=_integer(value["group"], f"{where}.group"),
        blob=_integer(value["blob"], f"{where}.blob"),
        offset_bytes=_integer(value["offset"], f"{where}.offset"),
        size_bytes=_integer(value["size"], f"{where}.size"),
        digest=_digest(value["blake3"], f"{where}.blake3"),
        segments=tuple(_parse_segment(*item) for item in segments),
    )


def _parse_segment(value: Any, where: str) -> Segment:
    _check_keys(value, ("tensor", "start", "count", "planes"), where)
    return Segment(
        tensor=_integer(value["tensor"], f"{where}.tensor"),
        start=_integer(value["start"], f"{where}.start"),
        count=_integer(value["count"], f"{where}.count"),
        planes=tuple(_parse_plane(*item) for item in _items(value["planes"], f"{where}.planes", 8)),
    )


def _parse_plane(value: Any, where: str) -> Plane:
    if type(value) is not list or len(value) != 3:
        refuse("a plane is a list of its codec, offset and size", where)
    return Plane(_known(value[0], _CODECS, where), _integer(value[1], where), _integer(value[2], where))


# Values → JSON


def _file_to_json(file: File) -> dict[str, Any]:
    digest = _hexadecimal(file.digest, f"file {file.name!r}")
    return {"name": file.name, "path": file.path, "size": file.size_bytes, "blake3": digest}


def _tensor_to_json(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": tensor.shape,
        "encoding": tensor.encoding.value,
    }


def _part_to_json(part: Part) -> dict[str, Any]:
    return {
        "tier": part.tier.name.lower(),
        "group": part.group,
        "blob": part.blob,
        "offset": part.offset_bytes,
        "size": part.size_bytes,
        "blake3": _hexadecimal(part.digest, f"parts[{part.index}]"),
        "segments": [
            {
                "tensor": segment.tensor,
                "start": segment.start,
                "count": segment.count,
                "planes": [
                    (plane.codec.value, plane.offset_bytes, plane.size_bytes) for plane in segment.planes
                ],
            }
            for segment in part.segments
        ],
    }


def _hexadecimal(digest: bytes | None, where: str) -> str:
    if digest is None:
        refuse("it has no digest: only packed weights have a manifest to write", where)
    return digest.hex()


# Single values


def _check_keys(value: Any, keys: tuple[str, ...], where: str) -> None:
    """That `value` is an object with exactly these keys."""
    if type(value) is not dict:
        refuse("it is not a JSON object", where)
    for key in keys:
        if key not in value:
            refuse(f"key {key!r} is missing", where)
    for key in value:
        if key not in keys:
            refuse(f"key {key[:40]!r} is unknown", where, hint=_NEWER)


def _items(value: Any, where: str, maximum: int) -> Iterator[tuple[Any, str]]:
    """The items of a list, each with its place."""
    if type(value) is not list:
        refuse("it is not a list", where)
    if len(value) > maximum:
        refuse(f"it has {len(value)} items, more than {maximum}", where)
    return ((item, f"{where}[{index}]") for index, item in enumerate(value))


def _integer(value: Any, where: str, maximum: int = MAX_INTEGER) -> int:
    if type(value) is not int or not 0 <= value <= maximum:  # a bool is an int, but not of that type
        refuse(f"it is not an integer from 0 to {maximum}", where)
    return value


def _text(value: Any, where: str) -> str:
    """A string of 1 to `MAX_TEXT_BYTES` bytes without control characters."""
    text = _unicode(value, where, MAX_TEXT_BYTES)
    if not text or any(character < " " or character == "\x7f" for character in text):
        refuse("it is empty or holds control characters", where)
    return text


def _unicode(value: Any, where: str, maximum_bytes: int) -> str:
    if type(value) is not str:
        refuse("it is not a string", where)
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        refuse("it holds half of a surrogate pair", where)
    if size_bytes > maximum_bytes:
        refuse(f"it takes more than {maximum_bytes} bytes", where)
    return value


def _text_table(value: Any, where: str, maximum_bytes: int) -> dict[str, str]:
    """An object whose keys and values are strings."""
    if type(value) is not dict:
        refuse("it is not a JSON object", where)
    if len(value) > MAX_TENSORS:
        refuse(f"it has {len(value)} entries, more than {MAX_TENSORS}", where)
    return {
        _unicode(key, where, maximum_bytes): _unicode(item, where, maximum_bytes)
        for key, item in value.items()
    }


def _object_name(value: Any, where: str) -> str:
    try:
        return check_name(_text(value, where))
    except UsageError as error:
        raise ManifestError(
            f"{MANIFEST_NAME}, {where}: {error.message}", where=where, hint=error.hint
        ) from error


def _digest(value: Any, where: str) -> bytes:
    text = _text(value, where)
    if len(text) != 64 or text.strip("0123456789abcdef"):
        refuse("it is not 64 lower-case hexadecimal digits", where)
    return bytes.fromhex(text)


def _known(value: Any, names: Mapping[str, T], where: str) -> T:
    text = _text(value, where)
    if text not in names:
        refuse(f"{text[:40]!r} is not one of {', '.join(names)}", where, hint=_NEWER)
    return names[text]
