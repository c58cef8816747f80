"""`manifest.json` ↔ `Manifest`: the JSON of format 1, read with distrust and written canonically.

This module checks every value by itself (type, range, known names, no unknown or duplicate key); how the values fit together
is checked by `manifest_checks.py`. A manifest that leaves `parse_manifest` is sound: a reader may allocate and read by it.
Time and memory are bounded by constants for any input of at most `MAX_MANIFEST_BYTES`.
`docs/format.md`, "The manifest", is the norm.
"""

from __future__ import annotations

import json
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
from .manifest_checks import check_manifest
from .sources.base import check_name

FORMAT_NAME = "teneral"
MAX_MANIFEST_BYTES = 64 * 1024 * 1024
MAX_JSON_VALUES = 4_000_000  # bounds what a hostile file can make of its 64 MiB once it is parsed
MAX_TENSORS = 1_000_000
MAX_PARTS = 1_000_000
MAX_GROUPS = 100_000
MAX_BLOBS = 100_000
MAX_FILES = 10_000
MAX_FILE_BYTES = 256 * 1024 * 1024
MAX_DIMENSIONS = 32
MAX_TEXT_BYTES = 1024
MAX_INTEGER = 2**53 - 1  # what every JSON reader can hold exactly

_TIER_NAMES = {"draft": Tier.DRAFT, "refine": Tier.REFINE}
_NEWER = "A newer Teneral may have written it: upgrade, or pack the model again with this one."
_DAMAGED = "The file is damaged or was not written by `teneral pack`: pack the model again."

T = TypeVar("T")


def parse_manifest(data: bytes, *, expected_digest: bytes | None = None) -> Manifest:
    """The manifest in `data`, checked whole.

    Raises `IntegrityError` when its BLAKE3-256 is not `expected_digest`, before anything is parsed, and `ManifestError`
    for everything else that the format does not allow.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        _fail(
            f"{len(data)} bytes are more than the {MAX_MANIFEST_BYTES} that a manifest may have",
            MANIFEST_NAME,
        )
    digest = blake3(data).digest()
    if expected_digest is not None and digest != expected_digest:
        raise IntegrityError(
            f"{MANIFEST_NAME} is not the one that was pinned",
            where=MANIFEST_NAME,
            expected=expected_digest.hex(),
            got=digest.hex(),
            hint="The artifact was replaced, or the pin belongs to another one. Remove or renew the '@b3:…' of the address.",
        )
    document = _read_json(data)
    _check_version(document)
    _check_keys(
        document,
        "format version generator blobs files groups parts aliases metadata",
        MANIFEST_NAME,
    )
    groups, tensors = _parse_groups(document["groups"])
    manifest = Manifest(
        generator=_text(document["generator"], "generator"),
        blobs=tuple(_parse_blob(*item) for item in _items(document["blobs"], "blobs", MAX_BLOBS)),
        files=tuple(_parse_file(*item) for item in _items(document["files"], "files", MAX_FILES)),
        groups=groups,
        tensors=tensors,
        parts=tuple(
            _parse_part(index, value, where)
            for index, (value, where) in enumerate(_items(document["parts"], "parts", MAX_PARTS))
        ),
        aliases=_text_table(document["aliases"], "aliases", MAX_TEXT_BYTES),
        metadata=_text_table(document["metadata"], "metadata", MAX_MANIFEST_BYTES),
        digest=digest,
    )
    check_manifest(manifest)
    return manifest


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON. What is returned was parsed again and found equal, so no writer can publish
    what a reader would refuse. Raises `ManifestError` when the values break the format."""
    document = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "generator": manifest.generator,
        "blobs": [{"name": blob.name, "size": blob.size_bytes} for blob in manifest.blobs],
        "files": [_dump_file(file) for file in manifest.files],
        "groups": [
            {
                "name": group.name,
                "tensors": [_dump_tensor(manifest.tensors[index]) for index in group.tensors],
            }
            for group in manifest.groups
        ],
        "parts": [_dump_part(part) for part in manifest.parts],
        "aliases": manifest.aliases,
        "metadata": manifest.metadata,
    }
    data = json.dumps(document, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    again = parse_manifest(data)
    for field in ("generator", "blobs", "files", "groups", "tensors", "parts", "aliases", "metadata"):
        if getattr(again, field) != getattr(manifest, field):
            _fail(
                "the value has something that the JSON cannot hold (such as a slab offset of its own)", field
            )
    return data


def _read_json(data: bytes) -> dict[str, Any]:
    # Every value but the first is preceded by one of these, so they bound the number of objects that json can make.
    if sum(map(data.count, (b",", b"[", b"{", b":"))) > MAX_JSON_VALUES:
        _fail(f"it holds more than {MAX_JSON_VALUES} values", MANIFEST_NAME)
    try:
        document = json.loads(
            data.decode("utf-8"),
            object_pairs_hook=_object,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except RecursionError:
        _fail("it is nested too deeply", MANIFEST_NAME)
    except ValueError as error:
        raise ManifestError(
            f"{MANIFEST_NAME} is not valid JSON: {error}", where=MANIFEST_NAME, hint=_DAMAGED
        ) from error
    if type(document) is not dict:
        _fail("it is not a JSON object", MANIFEST_NAME)
    return document


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        keys = [key for key, _ in pairs]
        _fail(
            f"key {next(key for key in table if keys.count(key) > 1)!r} stands twice in one object",
            MANIFEST_NAME,
        )
    return table


def _refuse_number(text: str) -> NoReturn:
    _fail(f"the number {text[:40]} is not an integer", MANIFEST_NAME)


def _check_version(document: dict[str, Any]) -> None:
    if document.get("format") != FORMAT_NAME:
        _fail("it is not the manifest of a Teneral artifact", "format")
    version = document.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        _fail(f"format version {version!r} is not {FORMAT_VERSION}", "version", hint=_NEWER)


def _parse_blob(value: Any, where: str) -> Blob:
    _check_keys(value, "name size", where)
    return Blob(
        _object_name(value["name"], f"{where}.name"), _integer(value["size"], f"{where}.size", minimum=1)
    )


def _parse_file(value: Any, where: str) -> File:
    _check_keys(value, "name path size blake3", where)
    return File(
        name=_object_name(value["name"], f"{where}.name"),
        path=_object_name(value["path"], f"{where}.path"),
        size_bytes=_integer(value["size"], f"{where}.size", maximum=MAX_FILE_BYTES),
        digest=_digest(value["blake3"], f"{where}.blake3"),
    )


def _parse_groups(value: Any) -> tuple[tuple[Group, ...], tuple[Tensor, ...]]:
    groups: list[Group] = []
    tensors: list[Tensor] = []
    for index, (item, where) in enumerate(_items(value, "groups", MAX_GROUPS)):
        _check_keys(item, "name tensors", where)
        specs = [
            _parse_tensor_spec(*spec)
            for spec in _items(item["tensors"], f"{where}.tensors", MAX_TENSORS - len(tensors), minimum=1)
        ]
        offsets, slab_bytes = place_tensors([tensor_bytes(dtype, shape) for _, dtype, shape, _ in specs])
        first = len(tensors)
        for (name, dtype, shape, encoding), offset in zip(specs, offsets, strict=True):
            tensors.append(Tensor(len(tensors), name, dtype, shape, index, encoding, offset))
        numbers = tuple(range(first, len(tensors)))
        groups.append(Group(index, _text(item["name"], f"{where}.name"), numbers, slab_bytes))
    return tuple(groups), tuple(tensors)


def _parse_tensor_spec(value: Any, where: str) -> tuple[str, str, tuple[int, ...], Encoding]:
    _check_keys(value, "name dtype shape encoding", where)
    name = _text(value["name"], f"{where}.name")
    dtype = _text(value["dtype"], f"{where}.dtype")
    if dtype not in DTYPE_BITS:
        _fail(f"dtype {dtype!r} is unknown", f"{where}.dtype", hint=_NEWER)
    shape = tuple(
        _integer(size, f"{where}.shape")
        for size, _ in _items(value["shape"], f"{where}.shape", MAX_DIMENSIONS)
    )
    encoding = _known(value["encoding"], {item.value: item for item in Encoding}, "encoding", where)
    return name, dtype, shape, encoding


def _parse_part(index: int, value: Any, where: str) -> Part:
    _check_keys(value, "tier group blob offset size blake3 segments", where)
    return Part(
        index=index,
        tier=_known(value["tier"], _TIER_NAMES, "tier", where),
        group=_integer(value["group"], f"{where}.group"),
        blob=_integer(value["blob"], f"{where}.blob"),
        offset_bytes=_integer(value["offset"], f"{where}.offset"),
        size_bytes=_integer(value["size"], f"{where}.size"),
        digest=_digest(value["blake3"], f"{where}.blake3"),
        segments=tuple(
            _parse_segment(*item) for item in _items(value["segments"], f"{where}.segments", MAX_JSON_VALUES)
        ),
    )


def _parse_segment(value: Any, where: str) -> Segment:
    _check_keys(value, "tensor start count planes", where)
    return Segment(
        tensor=_integer(value["tensor"], f"{where}.tensor"),
        start=_integer(value["start"], f"{where}.start"),
        count=_integer(value["count"], f"{where}.count"),
        planes=tuple(
            _parse_plane(*item) for item in _items(value["planes"], f"{where}.planes", MAX_DIMENSIONS)
        ),
    )


def _parse_plane(value: Any, where: str) -> Plane:
    if type(value) is not list or len(value) != 3:
        _fail("a plane is a list of codec, offset and size", where)
    codec = _known(value[0], {item.value: item for item in Codec}, "codec", where)
    return Plane(codec, _integer(value[1], f"{where}[1]"), _integer(value[2], f"{where}[2]"))


def _dump_file(file: File) -> dict[str, Any]:
    return {
        "name": file.name,
        "path": file.path,
        "size": file.size_bytes,
        "blake3": _hex(file.digest, file.name),
    }


def _dump_tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "encoding": tensor.encoding.value,
    }


def _dump_part(part: Part) -> dict[str, Any]:
    return {
        "tier": part.tier.name.lower(),
        "group": part.group,
        "blob": part.blob,
        "offset": part.offset_bytes,
        "size": part.size_bytes,
        "blake3": _hex(part.digest, f"part {part.index}"),
        "segments": [
            {
                "tensor": segment.tensor,
                "start": segment.start,
                "count": segment.count,
                "planes": [
                    [plane.codec.value, plane.offset_bytes, plane.size_bytes] for plane in segment.planes
                ],
            }
            for segment in part.segments
        ],
    }


def _hex(digest: bytes | None, where: str) -> str:
    if digest is None:
        _fail("it has no digest, so it was never packed", where)
    return digest.hex()


def _check_keys(value: Any, keys: str, where: str) -> None:
    """`value` is an object with exactly the keys that stand, with spaces between, in `keys`."""
    if type(value) is not dict:
        _fail("it is not a JSON object", where)
    wanted = keys.split()
    for key in wanted:
        if key not in value:
            _fail(f"key {key!r} is missing", where)
    for key in value:
        if key not in wanted:
            _fail(f"key {key[:40]!r} is unknown", where, hint=_NEWER)


def _items(value: Any, where: str, maximum: int, *, minimum: int = 0) -> list[tuple[Any, str]]:
    """The items of a list, each with the place to name in an error."""
    if type(value) is not list:
        _fail("it is not a list", where)
    if not minimum <= len(value) <= maximum:
        _fail(f"{len(value)} items are not within {minimum} and {maximum}", where)
    return [(item, f"{where}[{index}]") for index, item in enumerate(value)]


def _integer(value: Any, where: str, *, minimum: int = 0, maximum: int = MAX_INTEGER) -> int:
    if type(value) is not int:  # bool is a subclass of int
        _fail("it is not an integer", where)
    if not minimum <= value <= maximum:
        _fail(f"it is not within {minimum} and {maximum}", where)
    return value


def _text(value: Any, where: str, *, maximum_bytes: int = MAX_TEXT_BYTES) -> str:
    """A non-empty string that can be encoded and holds no control characters."""
    text = _encodable(value, where, maximum_bytes)
    if not text or any(ord(character) < 0x20 or ord(character) == 0x7F for character in text):
        _fail("it is empty or holds control characters", where)
    return text


def _encodable(value: Any, where: str, maximum_bytes: int) -> str:
    if type(value) is not str:
        _fail("it is not a string", where)
    try:
        size_bytes = len(value.encode())
    except UnicodeEncodeError:
        _fail("it holds half a surrogate pair", where)
    if size_bytes > maximum_bytes:
        _fail(f"it takes more than {maximum_bytes} bytes", where)
    return value


def _text_table(value: Any, where: str, maximum_bytes: int) -> dict[str, str]:
    if type(value) is not dict:
        _fail("it is not a JSON object", where)
    if len(value) > MAX_TENSORS:
        _fail(f"{len(value)} entries are more than {MAX_TENSORS}", where)
    return {
        _encodable(key, where, maximum_bytes): _encodable(item, f"{where}[{key[:40]!r}]", maximum_bytes)
        for key, item in value.items()
    }


def _object_name(value: Any, where: str) -> str:
    name = _text(value, where)
    try:
        return check_name(name)
    except UsageError as error:
        raise ManifestError(
            f"{MANIFEST_NAME}, {where}: {error.message}", where=where, hint=error.hint
        ) from error


def _digest(value: Any, where: str) -> bytes:
    text = _text(value, where)
    if len(text) != 64 or text.strip("0123456789abcdef"):
        _fail("it is not 64 lower-case hexadecimal digits", where)
    return bytes.fromhex(text)


def _known(value: Any, table: dict[str, T], what: str, where: str) -> T:
    text = _text(value, f"{where}.{what}")
    if text not in table:
        _fail(f"{what} {text[:40]!r} is unknown", f"{where}.{what}", hint=_NEWER)
    return table[text]


def _fail(message: str, where: str, *, hint: str = _DAMAGED) -> NoReturn:
    place = where if where == MANIFEST_NAME else f"{MANIFEST_NAME}, {where}"
    raise ManifestError(f"{place}: {message}", where=where, hint=hint)
