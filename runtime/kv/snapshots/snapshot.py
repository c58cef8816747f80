"""A KV snapshot, keys and values of named prefixes stored so that another container need not
compute them: its data types, and `snapshot.json` ↔ `Snapshot` by strict parsing and canonical
output.

`docs/kv-snapshot.md` is the specification. Every invariant holds for a snapshot that
`parse_snapshot` returns: a reader may allocate and read by it. Time and memory are bounded by
constants for any input. Identities are compared here, `parts.py` parses the stored bytes. Tokens,
salts and texts appear nowhere in a snapshot. This module does not know torch and does no I/O.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any

from blake3 import blake3
from msgspec import Struct

from ....loader.errors import IntegrityError, UsageError
from ....loader.format.json_object import MAX_INTEGER, DocumentKind, JsonObject, is_text, with_own_digest
from ....loader.format.manifest import PLANE_ALIGNMENT_BYTES, Blob, Codec, Plane, align
from ...errors import SnapshotError, SnapshotMismatchError

SNAPSHOT_NAME = "snapshot.json"
# Of all blobs: a snapshot of unknown origin must not make us read or remove anything else.
FOLDER = "kv/"
FORMAT_VERSION = 1
# Keys and values of weights that were not exact are never stored.
EPOCH = "exact"
RECENT = "recent-"  # prefix of the names that a server gives
MAX_BLOCK_BYTES = 64 * 1024 * 1024
MAX_PART_DECODED_BYTES = 64 * 1024 * 1024
# Stored: never more than decoded, except for the planes' alignment.
MAX_PART_BYTES = MAX_PART_DECODED_BYTES + 64
PART_BYTES = 4 * 1024 * 1024  # decoded, of the parts written here
ELEMENT_DTYPES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}  # by bytes, as `format.md` names them

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
FORMAT_NAME = "teneral-kv"
MAX_SNAPSHOT_JSON_BYTES = 16 * 1024 * 1024
MAX_JSON_ITEMS = 2_000_000
MAX_BLOCKS = 65_536
MAX_PARTS = 65_536
MAX_BLOBS = 1_024
MAX_PREFIXES = 1_024
MAX_BLOCK_SIZE = 65_536

SNAPSHOT = DocumentKind(
    SNAPSHOT_NAME,
    SnapshotError,
    "The file is damaged, or Teneral did not write it. Export the snapshot again.",
    "A newer Teneral may have written it: upgrade, or export the snapshot again with this version.",
)

_TOP_KEYS = frozenset(
    (
        "format", "version", "generator", "host", "model", "dtype", "epoch", "layout", "block_size", "block_bytes",
        "element_bytes", "seed", "blobs", "parts", "prefixes",
    )
)  # fmt: skip
_BLOB_KEYS = frozenset(("name", "size"))
_PART_KEYS = frozenset(("blob", "offset", "size", "blake3", "planes", "blocks"))
_PREFIX_KEYS = frozenset(("name", "tokens", "blocks"))
_CODECS = {codec.value: codec for codec in Codec}


class Identity(Struct, frozen=True):
    """The origin and layout of keys and values. Under another identity they are meaningless."""

    model: str  # digest of the manifest, 64 hexadecimal digits
    dtype: str  # the model's compute dtype
    epoch: str
    layout: str  # `KVPool.layout`
    block_size: int  # tokens
    block_bytes: int
    element_bytes: int  # 1, 2, 4 or 8
    # BLAKE3-256 of the beginning of every chain, 64 hexadecimal digits.
    seed: str


class SnapshotPart(Struct, frozen=True):
    """Bytes [offset_bytes, offset_bytes + size_bytes) of blob number `blob`: the contents of some
    blocks, concatenated.

    `digest` is the BLAKE3-256 of these bytes; `hashes` are the blocks' keys.
    """

    blob: int
    offset_bytes: int
    size_bytes: int
    digest: bytes
    planes: tuple[Plane, ...]
    hashes: tuple[bytes, ...]


class SnapshotPrefix(Struct, frozen=True):
    """A stored prefix. `blocks` are ascending numbers of blocks, counted through all parts: each
    comes after its predecessor.
    """

    name: str
    blocks: tuple[int, ...]

    @property
    def is_automatic(self) -> bool:
        """True if a server kept it automatically, without a named export."""
        return self.name.startswith(RECENT)


class Snapshot(Struct, frozen=True, dict=True):
    """The content of `snapshot.json`. Prefixes are sorted by value, the most valuable first."""

    generator: str
    host: Mapping[str, str]  # the machine that computed it, for people
    identity: Identity
    blobs: tuple[Blob, ...]
    parts: tuple[SnapshotPart, ...]
    prefixes: tuple[SnapshotPrefix, ...]
    digest: bytes | None = None  # BLAKE3-256 of the stored object

    @cached_property
    def hashes(self) -> tuple[bytes, ...]:
        """The hash of every block, by its number."""
        return tuple(each for part in self.parts for each in part.hashes)

    @cached_property
    def part_of(self) -> tuple[int, ...]:
        """The number of the part that holds each block."""
        return tuple(number for number, part in enumerate(self.parts) for _ in part.hashes)

    def chain(self, prefix: SnapshotPrefix) -> tuple[bytes, ...]:
        """The hashes of the prefix's blocks, in order."""
        return tuple(self.hashes[block] for block in prefix.blocks)

    def within(self, limit_bytes: int) -> tuple[SnapshotPrefix, ...]:
        """The first prefixes whose decoded parts fit into `limit_bytes`; a later prefix may fit
        where another did not.
        """
        taken: set[int] = set()
        chosen: list[SnapshotPrefix] = []
        used_bytes = 0
        for prefix in self.prefixes:
            parts = {self.part_of[block] for block in prefix.blocks} - taken
            needed_bytes = sum(len(self.parts[part].hashes) for part in parts) * self.identity.block_bytes
            if used_bytes + needed_bytes <= limit_bytes:
                used_bytes += needed_bytes
                taken |= parts
                chosen.append(prefix)
        return tuple(chosen)

    def parts_for(self, prefixes: Sequence[SnapshotPrefix]) -> list[SnapshotPart]:
        """The parts that hold blocks of these prefixes, in the order of use."""
        numbers = dict.fromkeys(self.part_of[block] for prefix in prefixes for block in prefix.blocks)
        return [self.parts[number] for number in numbers]


_LAYOUT = re.compile(r"(int8\+)?([a-z0-9]{1,16})\[(\d{1,9}), ([12]), (\d{1,9}), (\d{1,9}), (\d{1,9})(\+1)?\]")
_TOKENS = re.compile(r"tokens\[(\d{1,9})\]")
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


def check_layout(identity: Identity) -> str:
    """The fault of the layout, alone or compared with the sizes; '' for one that a pool may have."""
    block_size, block_bytes, element_bytes = identity.block_size, identity.block_bytes, identity.element_bytes
    tokens = _TOKENS.fullmatch(identity.layout)
    if tokens is not None:
        wanted = (int(tokens[1]), 8 * int(tokens[1]), 8)
    else:
        sizes = [_sizes_of(group) for group in identity.layout.split(" + ")]  # of layers with the same sizes
        if None in sizes or len({size[::2] for size in sizes if size is not None}) > 1:
            return "is not one that this version knows"
        (slots, _, element), *_ = known = [size for size in sizes if size is not None]
        wanted = (slots, sum(size[1] for size in known), element)
    if wanted == (block_size, block_bytes, element_bytes):
        return ""
    return (
        f"means blocks of {wanted[0]} tokens and {wanted[1]} bytes in elements of {wanted[2]}, and they have "
        f"{block_size}, {block_bytes} and {element_bytes}"
    )


def _sizes_of(layout: str) -> tuple[int, int, int] | None:
    """Tokens and bytes of a block, and bytes of an element; None of a layout that is not known."""
    found = _LAYOUT.fullmatch(layout)
    if found is None or found[2] not in _DTYPE_BYTES or (found[1] is None) != (found[8] is None):
        return None
    number_bytes = _DTYPE_BYTES[found[2]]
    layers, parts, heads, slots, head_dim = (int(found[group]) for group in (3, 4, 5, 6, 7))
    row_bytes = head_dim * number_bytes if found[1] is None else head_dim + number_bytes
    return slots, layers * parts * heads * slots * row_bytes, number_bytes if found[1] is None else 1


def check_prefix_name(name: str) -> str:
    """Return the name if it is a valid prefix name; raise `UsageError` otherwise."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:200]!r} is not a valid prefix name",
            hint="Names are 1 to 128 letters, digits, dots, hyphens and underscores, a letter or digit first.",
        )
    return name


def require_same(snapshot: Identity, here: Identity, *, where: str) -> None:
    """Raise `SnapshotMismatchError` with both values of each difference. `where` is an address."""
    differing = [
        (_NAMES[field], getattr(snapshot, field), getattr(here, field))
        for field in Identity.__struct_fields__
        if getattr(snapshot, field) != getattr(here, field)
    ]
    if not differing:
        return
    differences = "; ".join(f"its {name} is {theirs}, here it is {ours}" for name, theirs, ours in differing)
    raise SnapshotMismatchError(
        f"the KV snapshot {where} was made for something else: {differences}",
        where=differing[0][0],
        hint="Export it again for this model and these settings, or give this one an address of its own.",
    )


def require_same_model(snapshot: Identity, model: str, *, where: str) -> None:
    """`require_same` when only the digest of the manifest is known yet."""
    if snapshot.model != model:
        raise SnapshotMismatchError(
            f"the KV snapshot {where} was made for another model: its model is {snapshot.model}, here it is {model}",
            where=_NAMES["model"],
            hint="Export it again for this model, or give this one an address of its own.",
        )


_NAMES = {
    "model": "model",
    "dtype": "dtype",
    "epoch": "epoch",
    "layout": "layout",
    "block_size": "block size",
    "block_bytes": "block bytes",
    "element_bytes": "element bytes",
    "seed": "seed",
}


def parse_snapshot(data: bytes, *, expected_digest: bytes | None = None) -> Snapshot:
    """Parse and check the snapshot in `data`.

    Raises `IntegrityError` if its BLAKE3-256 is not `expected_digest`, or it does not have the
    digest that stands at its end, before parsing; else `SnapshotError`, whose `where` names the
    place.
    """
    if len(data) > MAX_SNAPSHOT_JSON_BYTES:
        SNAPSHOT.refuse(f"it has {len(data)} bytes, more than {MAX_SNAPSHOT_JSON_BYTES}", SNAPSHOT_NAME)
    digest = blake3(data).digest()
    if expected_digest is not None and digest != expected_digest:
        raise IntegrityError(
            f"{SNAPSHOT_NAME} does not have the pinned digest",
            where=SNAPSHOT_NAME,
            expected=expected_digest.hex(),
            got=digest.hex(),
            hint="The snapshot was replaced, or the pin belongs to another one: renew or drop the address's '@b3:…'.",
        )
    document = SNAPSHOT.read_checked(data, max_items=MAX_JSON_ITEMS)
    _check_version(document)
    top = JsonObject(document, SNAPSHOT_NAME, _TOP_KEYS, document=SNAPSHOT)
    identity = _parse_identity(top)
    blobs = tuple(_parse_blob(*item) for item in top.items("blobs", MAX_BLOBS))
    parts = tuple(_parse_part(identity, *item) for item in top.items("parts", MAX_PARTS))
    num_blocks = _check_parts(parts, blobs)
    prefixes = tuple(
        _parse_prefix(identity, num_blocks, *item) for item in top.items("prefixes", MAX_PREFIXES)
    )
    _check_prefixes(prefixes, num_blocks)
    return Snapshot(
        generator=top.text("generator"),
        host=top.table("host", is_text),
        identity=identity,
        blobs=blobs,
        parts=parts,
        prefixes=prefixes,
        digest=digest,
    )


def dump_snapshot(snapshot: Snapshot) -> bytes:
    """The snapshot as canonical JSON. It is parsed again, so that no snapshot is published that
    readers refuse.
    """
    identity = snapshot.identity
    document = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "generator": snapshot.generator,
        "host": dict(snapshot.host),
        "model": identity.model,
        "dtype": identity.dtype,
        "epoch": identity.epoch,
        "layout": identity.layout,
        "block_size": identity.block_size,
        "block_bytes": identity.block_bytes,
        "element_bytes": identity.element_bytes,
        "seed": identity.seed,
        "blobs": [{"name": blob.name, "size": blob.size_bytes} for blob in snapshot.blobs],
        "parts": [
            {
                "blob": part.blob,
                "offset": part.offset_bytes,
                "size": part.size_bytes,
                "blake3": part.digest.hex(),
                "planes": [
                    (plane.codec.value, plane.offset_bytes, plane.size_bytes) for plane in part.planes
                ],
                "blocks": [each.hex() for each in part.hashes],
            }
            for part in snapshot.parts
        ],
        "prefixes": [
            {"name": prefix.name, "tokens": len(prefix.blocks) * identity.block_size, "blocks": prefix.blocks}
            for prefix in snapshot.prefixes
        ],
    }
    data = with_own_digest(json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode())
    parse_snapshot(data)
    return data


def _check_version(document: dict[str, Any]) -> None:
    if document.get("format") != FORMAT_NAME:
        SNAPSHOT.refuse("this is not a Teneral KV snapshot", "format")
    version = document.get("version")
    if version != FORMAT_VERSION or type(version) is not int:
        SNAPSHOT.refuse(
            f"its format version is {str(version)[:40]}, but only {FORMAT_VERSION} is supported",
            "version",
            hint=SNAPSHOT.newer,
        )


def _parse_identity(top: JsonObject) -> Identity:
    element_bytes = top.integer("element_bytes")
    block_bytes = top.integer("block_bytes", MAX_BLOCK_BYTES)
    block_size = top.integer("block_size", MAX_BLOCK_SIZE)
    if element_bytes not in ELEMENT_DTYPES:
        SNAPSHOT.refuse("it is not 1, 2, 4 or 8", "element_bytes")
    if not block_bytes or block_bytes % element_bytes:
        SNAPSHOT.refuse(f"{block_bytes} bytes are not a whole number of elements", "block_bytes")
    if not block_size:
        SNAPSHOT.refuse("a block holds at least one token", "block_size")
    return Identity(
        model=top.digest("model").hex(),
        dtype=top.text("dtype"),
        epoch=top.text("epoch"),
        layout=top.text("layout"),
        block_size=block_size,
        block_bytes=block_bytes,
        element_bytes=element_bytes,
        seed=top.digest("seed").hex(),
    )


def _parse_blob(value: Any, where: str) -> Blob:
    blob = JsonObject(value, where, _BLOB_KEYS, document=SNAPSHOT)
    name = blob.object_name("name")
    if not name.startswith(FOLDER):
        SNAPSHOT.refuse(f"{name[:200]!r} does not begin with {FOLDER!r}", f"{where}.name")
    return Blob(name, blob.integer("size"))


def _parse_part(identity: Identity, value: Any, where: str) -> SnapshotPart:
    part = JsonObject(value, where, _PART_KEYS, document=SNAPSHOT)
    max_blocks = MAX_PART_DECODED_BYTES // identity.block_bytes
    hashes = tuple(_parse_hash(*item) for item in part.items("blocks", max_blocks))
    if not hashes:
        SNAPSHOT.refuse("it holds no blocks", where)
    planes = tuple(_parse_plane(*item) for item in part.items("planes", identity.element_bytes))
    size_bytes = part.integer("size", MAX_PART_BYTES)
    _check_planes(
        planes, len(hashes) * identity.block_bytes // identity.element_bytes, identity, size_bytes, where
    )
    return SnapshotPart(
        blob=part.integer("blob"),
        offset_bytes=part.integer("offset"),
        size_bytes=size_bytes,
        digest=part.digest("blake3"),
        planes=planes,
        hashes=hashes,
    )


def _parse_hash(value: Any, where: str) -> bytes:
    return JsonObject({"blocks": value}, where, frozenset(("blocks",)), document=SNAPSHOT).digest("blocks")


def _parse_plane(value: Any, where: str) -> Plane:
    if type(value) is not list or len(value) != 3:
        SNAPSHOT.refuse("a plane is a list of its codec, offset and size", where)
    name, offset, size = value
    codec = _CODECS.get(name) if type(name) is str else None
    if codec is None:
        SNAPSHOT.refuse(f"the codec is not one of {', '.join(_CODECS)}", where, hint=SNAPSHOT.newer)
    return Plane(codec, _integer(offset, where), _integer(size, where))


def _integer(value: Any, where: str, maximum: int = MAX_INTEGER) -> int:
    if type(value) is not int or not 0 <= value <= maximum:
        SNAPSHOT.refuse(f"it is not an integer from 0 to {maximum}", where)
    return value


def _check_planes(
    planes: tuple[Plane, ...], count: int, identity: Identity, size_bytes: int, where: str
) -> None:
    """Check the planes against `format.md`: consecutive, each a raw plane or whole frames."""
    if len(planes) != identity.element_bytes:
        SNAPSHOT.refuse(f"it has {len(planes)} planes for elements of {identity.element_bytes} bytes", where)
    end = 0
    for plane in planes:
        if plane.offset_bytes != align(end, PLANE_ALIGNMENT_BYTES):
            SNAPSHOT.refuse(f"a plane begins at {plane.offset_bytes}, not behind the one before it", where)
        is_right = (
            plane.size_bytes == count
            if plane.codec is Codec.RAW
            else 0 < plane.size_bytes < count and not plane.size_bytes % PLANE_ALIGNMENT_BYTES
        )
        if not is_right:
            SNAPSHOT.refuse(
                f"a plane of {count} bytes is stored as {plane.size_bytes} of {plane.codec}", where
            )
        end = plane.offset_bytes + plane.size_bytes
    if size_bytes not in (end, align(end, PLANE_ALIGNMENT_BYTES)):
        SNAPSHOT.refuse(f"it has {size_bytes} bytes, but its planes end at {end}", where)


def _check_parts(parts: tuple[SnapshotPart, ...], blobs: tuple[Blob, ...]) -> int:
    """Check that parts lie within their blobs, in order, and hold no block twice. Returns the
    number of blocks.
    """
    if len({blob.name for blob in blobs}) != len(blobs):
        SNAPSHOT.refuse("duplicate name", "blobs")
    seen: set[bytes] = set()
    blob, end = 0, 0
    for number, part in enumerate(parts):
        where = f"parts[{number}]"
        if part.blob >= len(blobs):
            SNAPSHOT.refuse(f"there is no blob {part.blob}", where)
        if part.blob < blob or (part.blob == blob and part.offset_bytes < end):
            SNAPSHOT.refuse("it begins before the end of the part before it", where)
        blob, end = part.blob, part.offset_bytes + part.size_bytes
        if end > blobs[blob].size_bytes:
            SNAPSHOT.refuse(f"it ends at {end}, and its blob at {blobs[blob].size_bytes}", where)
        if len(set(part.hashes)) != len(part.hashes) or not seen.isdisjoint(part.hashes):
            SNAPSHOT.refuse("duplicate block", where)
        seen.update(part.hashes)
    if len(seen) > MAX_BLOCKS:
        SNAPSHOT.refuse(f"it holds more than {MAX_BLOCKS} blocks", "parts")
    return len(seen)


def _parse_prefix(identity: Identity, num_blocks: int, value: Any, where: str) -> SnapshotPrefix:
    prefix = JsonObject(value, where, _PREFIX_KEYS, document=SNAPSHOT)
    name = prefix.text("name")
    try:
        check_prefix_name(name)
    except UsageError as error:
        SNAPSHOT.refuse(error.message, f"{where}.name", hint=error.hint)
    blocks = tuple(
        _integer(each, place, num_blocks - 1) for each, place in prefix.items("blocks", num_blocks)
    )
    if not blocks or any(first >= second for first, second in pairwise(blocks)):
        SNAPSHOT.refuse("its blocks are not at least one, ascending", where)
    tokens = prefix.integer("tokens")
    if tokens != len(blocks) * identity.block_size:
        SNAPSHOT.refuse(f"{len(blocks)} blocks do not hold {tokens} tokens", where)
    return SnapshotPrefix(name, blocks)


def _check_prefixes(prefixes: tuple[SnapshotPrefix, ...], num_blocks: int) -> None:
    """Check that names are unique, and that a block has the same predecessor in every prefix."""
    if len({prefix.name for prefix in prefixes}) != len(prefixes):
        SNAPSHOT.refuse("duplicate name", "prefixes")
    before: dict[int, int] = {}
    for number, prefix in enumerate(prefixes):
        for last, block in zip((-1, *prefix.blocks), prefix.blocks, strict=False):
            if before.setdefault(block, last) != last:
                SNAPSHOT.refuse(f"block {block} follows another block than elsewhere", f"prefixes[{number}]")
