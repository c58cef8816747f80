"""`manifest.json` ↔ `Manifest`: the JSON of format 1, read with distrust and written canonically.

Here every value is checked by itself, with `json_object.py`; how the values fit together is checked
by `manifest_checks.py`. A manifest that leaves `parse_manifest` is sound: a reader may allocate and
read by it. For any input, time and memory are bounded by constants. `docs/format.md`, "The
manifest", is the norm. Nothing here does I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

from blake3 import blake3

from ..errors import IntegrityError, ManifestError
from .json_object import (
    MANIFEST,
    MAX_INTEGER,
    NEWER,
    OWN_DIGEST_KEY,
    JsonObject,
    is_digest,
    is_text,
    is_unicode,
    refuse,
    with_own_digest,
)
from .limits import MANIFEST_NAME, MAX_MANIFEST_BYTES, MAX_SMALL_FILE_BYTES
from .manifest import (
    DTYPE_BITS,
    FORMAT_VERSION,
    MAX_PART_SEGMENTS,
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

FORMAT_NAME = "teneral"
# About 160,000 tensors; bounds the memory of a hostile file, parsed, to about 1 GiB.
MAX_JSON_ITEMS = 5_000_000
MAX_TENSORS = 1_000_000
MAX_PARTS = 1_000_000
MAX_GROUPS = 100_000
MAX_BLOBS = 100_000
MAX_FILES = 10_000
MAX_DIMENSIONS = 32
BLOB_FOLDER = "blobs/"
MAX_PLANES = 8  # no element has more bytes, and no float with a mask and signs more planes

_TOP_KEYS = frozenset(
    ("format", "version", "generator", "blobs", "files", "groups", "parts", "aliases", "metadata")
)
_BASE_KEY = "base"  # in manifests with differences to another artifact
_GENERATION_KEY = "generation"  # in manifests whose objects all lie in one folder of that name
_END = re.compile(rb'(?:,"generation":"([0-9a-f]{12})")?(?:,"blake3":"([0-9a-f]{64})")?}\Z')
_END_BYTES = 105  # with both
_BLOB_KEYS = frozenset(("name", "size"))
_FILE_KEYS = frozenset(("name", "path", "size", "blake3"))
_GROUP_KEYS = frozenset(("name", "tensors"))
_TENSOR_KEYS = frozenset(("name", "dtype", "shape", "encoding"))
_PART_KEYS = frozenset(("tier", "group", "blob", "offset", "size", "blake3", "segments"))
_SEGMENT_KEYS = frozenset(("tensor", "start", "count", "planes"))
_VALUES_KEY = "values"  # of segments of sparse tensors
_SPARSE_SEGMENT_KEYS = _SEGMENT_KEYS | {_VALUES_KEY}

_TIERS = {tier.name.lower(): tier for tier in Tier}
_CODECS = {codec.value: codec for codec in Codec}
_DTYPES = {dtype: dtype for dtype in DTYPE_BITS}


Look: TypeAlias = Callable[[int, Blob, Part], bool]  # see `parse_manifest`


def parse_manifest(
    data: bytes, *, expected_digest: bytes | None = None, look: Look | None = None
) -> Manifest:
    """The manifest in `data`, checked as a whole.

    `look`, for callers in a hurry, gets the `weight_bytes` of all groups, which are final, and each
    part with its blob as soon as it was read, until it returns True. Nothing says yet that these
    fit together, nor that the manifest is not to be refused.

    Raises `IntegrityError` when it has not the digest that stands at its end, or that is not
    `expected_digest`, before anything is parsed; else `ManifestError`, whose `where` names the place.
    """
    if len(data) > MAX_MANIFEST_BYTES:
        refuse(f"it has {len(data)} bytes, more than {MAX_MANIFEST_BYTES}", MANIFEST_NAME)
    end = _read_end(data)
    if end.own_digest:
        hint = "Restore the object, or pack the model again."
        MANIFEST.check_own_digest(end.own_digest, end.own_digest_found, hint=hint)
    if expected_digest is not None and end.digest != expected_digest:
        raise IntegrityError(
            f"{MANIFEST_NAME} is not the one that was pinned",
            where=MANIFEST_NAME,
            expected=expected_digest.hex(),
            got=end.digest.hex(),
            hint="The artifact was replaced, or the pin is another's: renew or drop the address's '@b3:…'.",
        )
    document = MANIFEST.read(data, max_items=MAX_JSON_ITEMS)
    _check_version(document)
    _check_end(document, end)
    folder = blob_folder(end.generation) if end.generation else ""
    more_keys = {key for key in (_BASE_KEY, _GENERATION_KEY, OWN_DIGEST_KEY) if key in document}
    top = JsonObject(document, MANIFEST_NAME, _TOP_KEYS | more_keys)
    groups, tensors = _parse_groups(top.items("groups", MAX_GROUPS))
    blobs = tuple(_parse_blob(*item, folder) for item in top.items("blobs", MAX_BLOBS))
    manifest = Manifest(
        generator=top.text("generator"),
        blobs=blobs,
        files=tuple(_parse_file(*item, folder) for item in top.items("files", MAX_FILES)),
        groups=groups,
        tensors=tensors,
        parts=_parse_parts(top.items("parts", MAX_PARTS), groups, blobs, look),
        aliases=top.table("aliases", is_text),
        metadata=top.table("metadata", is_unicode),
        digest=end.digest,
        generation=end.generation,
        has_own_digest=bool(end.own_digest),
        base=top.digest(_BASE_KEY) if _BASE_KEY in document else None,
    )
    check_manifest(manifest)
    return manifest


def manifest_digest(data: bytes) -> bytes:
    """The digest that a pin names: BLAKE3-256 of the manifest without its generation and its own
    digest, so that packing the same weights again gives the same one. A manifest that has neither is
    hashed whole.
    """
    return _read_end(data).digest


class _LastKeys(NamedTuple):
    """The last keys of a manifest, '' for those that it lacks, and the digests of what is before them."""

    generation: str
    own_digest: str
    own_digest_found: str
    digest: bytes


def _read_end(data: bytes) -> _LastKeys:
    found = _END.search(data, max(0, len(data) - _END_BYTES))
    if found is None or not found.lastindex:
        return _LastKeys("", "", "", blake3(data).digest())
    generation, own_digest = ((group or b"").decode() for group in found.groups())
    hashed = blake3(memoryview(data)[: found.start()])
    digest = hashed.digest()
    hashed.update(memoryview(data)[found.start() : found.end(1) + 1 if generation else found.start()])
    return _LastKeys(generation, own_digest, hashed.hexdigest(), digest)


def blob_folder(generation: str) -> str:
    """The folder of an artifact's objects, with its slash."""
    return f"{BLOB_FOLDER}{generation}/"


def dump_manifest(manifest: Manifest) -> bytes:
    """The manifest as canonical JSON.

    It was parsed again and found equal, so that no manifest is published that a reader refuses.
    Raises `ManifestError` when the manifest breaks the format or is not one of packed weights.
    """
    folder = blob_folder(manifest.generation) if manifest.generation else ""
    document = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "generator": manifest.generator,
        "blobs": [
            {"name": blob.name.removeprefix(folder), "size": blob.size_bytes} for blob in manifest.blobs
        ],
        "files": [_file_to_json(file, folder) for file in manifest.files],
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
    if manifest.base is not None:
        document[_BASE_KEY] = manifest.base.hex()
    if manifest.generation:
        document[_GENERATION_KEY] = manifest.generation
    try:
        data = json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError as error:
        raise ManifestError(f"a text in the manifest is not valid Unicode: {error}") from error
    data = with_own_digest(data)
    again = parse_manifest(data)
    for field in Manifest._fields:
        if field in ("digest", "has_own_digest"):
            continue
        if getattr(again, field) != getattr(manifest, field):
            refuse("the manifest has something there that the format cannot express", field)
    return data


# JSON


def _check_version(document: dict[str, Any]) -> None:
    if document.get("format") != FORMAT_NAME:
        refuse("this is not the manifest of a Teneral artifact", "format")
    version = document.get("version")
    if type(version) is not int:
        refuse("it is not an integer", "version")
    if version != FORMAT_VERSION:
        refuse(f"format version {str(version)[:40]} is not {FORMAT_VERSION}", "version", hint=NEWER)


def _check_end(document: dict[str, Any], end: _LastKeys) -> None:
    """The last keys must stand where they are found without parsing."""
    if OWN_DIGEST_KEY in document and not end.own_digest:
        MANIFEST.refuse_misplaced_digest()
    if _GENERATION_KEY in document and not end.generation:
        refuse(
            "the manifest does not end with it, as 12 hexadecimal digits, and its own digest", _GENERATION_KEY
        )


# Values ← JSON

# Name, dtype, shape and encoding.
_TensorSpec: TypeAlias = tuple[str, str, tuple[int, ...], Encoding]


def _parse_blob(value: Any, where: str, folder: str) -> Blob:
    blob = JsonObject(value, where, _BLOB_KEYS)
    return Blob(blob.object_name("name", folder), blob.integer("size"))


def _parse_file(value: Any, where: str, folder: str) -> File:
    file = JsonObject(value, where, _FILE_KEYS)
    return File(
        name=file.object_name("name"),
        path=file.object_name("path", folder),
        size_bytes=file.integer("size", MAX_SMALL_FILE_BYTES),
        digest=file.digest("blake3"),
    )


def _parse_groups(items: Iterable[tuple[Any, str]]) -> tuple[tuple[Group, ...], tuple[Tensor, ...]]:
    """Tensors are numbered as they stand; their places in the slab follow from their order."""
    groups: list[Group] = []
    tensors: list[Tensor] = []
    for index, (value, where) in enumerate(items):
        group = JsonObject(value, where, _GROUP_KEYS)
        first = len(tensors)
        specs = [_parse_tensor(*item) for item in group.items("tensors", MAX_TENSORS - first)]
        if not specs:
            refuse("it has no tensors", where)
        offsets, slab_bytes = place_tensors([tensor_bytes(dtype, shape) for _, dtype, shape, _ in specs])
        for (name, dtype, shape, encoding), offset in zip(specs, offsets, strict=True):
            tensors.append(Tensor(len(tensors), name, dtype, shape, index, encoding, offset))
        groups.append(Group(index, group.text("name"), tuple(range(first, len(tensors))), slab_bytes))
    return tuple(groups), tuple(tensors)


# Most of a manifest is tensors, parts, segments and planes: what is right there is seen at a
# glance, and only what is not is looked at value by value, to say where it is wrong.


def _parse_tensor(value: Any, where: str) -> _TensorSpec:
    return _right_tensor(value) or _doubtful_tensor(value, where)


def _right_tensor(value: Any) -> _TensorSpec | None:
    try:
        name, dtype, shape = value["name"], _DTYPES[value["dtype"]], value["shape"]
        encoding = Encoding.find(value["encoding"])
        is_right = (
            len(value) == len(_TENSOR_KEYS)
            and is_text(name)
            and type(shape) is list
            and len(shape) <= MAX_DIMENSIONS
            and _are_integers(*shape)
        )
    except (LookupError, TypeError):
        return None
    return (name, dtype, tuple(shape), encoding) if is_right and encoding is not None else None


def _doubtful_tensor(value: Any, where: str) -> _TensorSpec:
    tensor = JsonObject(value, where, _TENSOR_KEYS)
    return (
        tensor.text("name"),
        tensor.one_of("dtype", _DTYPES),
        tuple(_integer(*item) for item in tensor.items("shape", MAX_DIMENSIONS)),
        tensor.found("encoding", Encoding.find),
    )


def _parse_parts(
    items: Iterable[tuple[Any, str]], groups: Sequence[Group], blobs: Sequence[Blob], look: Look | None
) -> tuple[Part, ...]:
    weight_bytes = sum(group.slab_bytes for group in groups)
    parts: list[Part] = []
    for index, item in enumerate(items):
        part = _parse_part(index, *item)
        parts.append(part)
        if look is not None and part.blob < len(blobs) and look(weight_bytes, blobs[part.blob], part):
            look = None
    return tuple(parts)


def _parse_part(index: int, value: Any, where: str) -> Part:
    return _right_part(index, value) or _doubtful_part(index, value, where)


def _right_part(index: int, value: Any) -> Part | None:
    try:
        group, blob, offset, size = value["group"], value["blob"], value["offset"], value["size"]
        tier, digest, segments = _TIERS[value["tier"]], value["blake3"], value["segments"]
        is_right = (
            len(value) == len(_PART_KEYS)
            and _are_integers(group, blob, offset, size)
            and is_digest(digest)
            and type(segments) is list
            and len(segments) <= MAX_PART_SEGMENTS
        )
        parsed = tuple([_right_segment(segment) for segment in segments])
    except (LookupError, TypeError, ValueError):
        return None
    return Part(index, tier, group, blob, offset, size, bytes.fromhex(digest), parsed) if is_right else None


def _right_segment(value: Any) -> Segment:
    """Raises some `LookupError`, `TypeError` or `ValueError` where anything is not right."""
    tensor, start, count, planes = value["tensor"], value["start"], value["count"], value["planes"]
    values = value.get(_VALUES_KEY)
    if (
        len(value) != len(_SEGMENT_KEYS) + (values is not None)
        or not _are_integers(tensor, start, count, 0 if values is None else values)
        or type(planes) is not list
        or len(planes) > MAX_PLANES
    ):
        raise ValueError
    parsed = []
    for plane in planes:
        name, offset, size = plane
        if type(plane) is not list or not _are_integers(offset, size):
            raise ValueError
        parsed.append(Plane(_CODECS[name], offset, size))
    return Segment(tensor, start, count, tuple(parsed), values)


def _are_integers(*values: Any) -> bool:
    for value in values:  # noqa: SIM110 - a generator takes three times as long
        if type(value) is not int or not 0 <= value <= MAX_INTEGER:
            return False
    return True


def _doubtful_part(index: int, value: Any, where: str) -> Part:
    part = JsonObject(value, where, _PART_KEYS)
    return Part(
        index=index,
        tier=part.one_of("tier", _TIERS),
        group=part.integer("group"),
        blob=part.integer("blob"),
        offset_bytes=part.integer("offset"),
        size_bytes=part.integer("size"),
        digest=part.digest("blake3"),
        segments=tuple(_doubtful_segment(*item) for item in part.items("segments", MAX_PART_SEGMENTS)),
    )


def _doubtful_segment(value: Any, where: str) -> Segment:
    is_sparse = type(value) is dict and _VALUES_KEY in value
    segment = JsonObject(value, where, _SPARSE_SEGMENT_KEYS if is_sparse else _SEGMENT_KEYS)
    return Segment(
        tensor=segment.integer("tensor"),
        start=segment.integer("start"),
        count=segment.integer("count"),
        planes=tuple(_doubtful_plane(item, where) for item, _ in segment.items("planes", MAX_PLANES)),
        values=segment.integer(_VALUES_KEY) if is_sparse else None,
    )


def _doubtful_plane(value: Any, where: str) -> Plane:
    if type(value) is not list or len(value) != 3:
        refuse("a plane is a list of its codec, offset and size", where)
    name, offset, size = value
    codec = _CODECS.get(name) if type(name) is str else None
    if codec is None:
        refuse(f"the codec is not one of {', '.join(_CODECS)}", where, hint=NEWER)
    return Plane(codec, _integer(offset, where), _integer(size, where))


def _integer(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= MAX_INTEGER:
        refuse(f"it is not an integer from 0 to {MAX_INTEGER}", where)
    return value


# Values → JSON


def _file_to_json(file: File, folder: str) -> dict[str, Any]:
    digest = _hexadecimal(file.digest, f"file {file.name!r}")
    path = file.path.removeprefix(folder)
    return {"name": file.name, "path": path, "size": file.size_bytes, "blake3": digest}


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
        "segments": [_segment_to_json(segment) for segment in part.segments],
    }


def _segment_to_json(segment: Segment) -> dict[str, Any]:
    planes = [(plane.codec.value, plane.offset_bytes, plane.size_bytes) for plane in segment.planes]
    found = {"tensor": segment.tensor, "start": segment.start, "count": segment.count, "planes": planes}
    return found if segment.values is None else {**found, _VALUES_KEY: segment.values}


def _hexadecimal(digest: bytes | None, where: str) -> str:
    if digest is None:
        refuse("it has no digest: only packed weights have a manifest to write", where)
    return digest.hex()
