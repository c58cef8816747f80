"""A KV snapshot as values: keys and values of named prefixes, stored so that another container need not compute them.

`docs/kv-snapshot.md` is the norm; this module holds its data types, and the pure function that says for what a snapshot
was made and for what it was not. The JSON is `snapshot_json.py`'s business, stored bytes are `parts.py`'s.
Tokens, salts and texts appear nowhere in a snapshot. Nothing here knows torch or does I/O.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property

from ....loader.errors import UsageError
from ....loader.format.manifest import Blob, Plane
from ...errors import SnapshotMismatchError

SNAPSHOT_NAME = "snapshot.json"
FOLDER = "kv/"  # of all blobs: a snapshot of unknown origin must not make us read or remove anything else
FORMAT_VERSION = 1
EPOCH = "exact"  # what weights that were not exact have made is never stored
RECENT = "recent-"  # begins the names that a server gives
MAX_BLOCK_BYTES = 64 * 1024 * 1024
MAX_PART_DECODED_BYTES = 64 * 1024 * 1024
MAX_PART_BYTES = MAX_PART_DECODED_BYTES + 64  # stored: never more than decoded, but for the planes' alignment
PART_BYTES = 4 * 1024 * 1024  # decoded, of the parts that are written here
ELEMENT_DTYPES = {1: "U8", 2: "U16", 4: "U32", 8: "U64"}  # by bytes, as `format.md` names them

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose keys and values they are, and how their bytes are to be read: with another one they are noise."""

    model: str  # digest of the manifest, 64 hexadecimal digits
    dtype: str  # that the model computes in
    epoch: str
    layout: str  # `KVStorage.layout`
    block_size: int  # tokens
    block_bytes: int
    element_bytes: int  # 1, 2, 4 or 8
    seed: str  # BLAKE3-256 of what every chain begins with, 64 hexadecimal digits


@dataclass(frozen=True, slots=True)
class SnapshotPart:
    """Bytes [offset_bytes, offset_bytes + size_bytes) of blob number `blob`: some blocks' contents, one behind another.

    `digest` is the BLAKE3-256 of these bytes; `hashes` are what the blocks are known by.
    """

    blob: int
    offset_bytes: int
    size_bytes: int
    digest: bytes
    planes: tuple[Plane, ...]
    hashes: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class SnapshotPrefix:
    """`blocks` are numbers of blocks, counted through all parts. They ascend: each stands behind the one it follows."""

    name: str
    blocks: tuple[int, ...]

    @property
    def is_automatic(self) -> bool:
        """Whether a server kept it, and nobody asked for it by name."""
        return self.name.startswith(RECENT)


@dataclass(frozen=True)
class Snapshot:
    """All that `snapshot.json` says. Prefixes stand in the order of their worth, the first one first."""

    generator: str
    host: Mapping[str, str]  # what computed it, for people
    identity: Identity
    blobs: tuple[Blob, ...]
    parts: tuple[SnapshotPart, ...]
    prefixes: tuple[SnapshotPrefix, ...]
    digest: bytes | None = None  # BLAKE3-256 of the stored object

    @cached_property
    def hashes(self) -> tuple[bytes, ...]:
        """Of every block, by its number."""
        return tuple(each for part in self.parts for each in part.hashes)

    @cached_property
    def part_of(self) -> tuple[int, ...]:
        """The number of the part that holds each block."""
        return tuple(number for number, part in enumerate(self.parts) for _ in part.hashes)

    def chain(self, prefix: SnapshotPrefix) -> tuple[bytes, ...]:
        """What the prefix's blocks are known by, in order."""
        return tuple(self.hashes[block] for block in prefix.blocks)

    def within(self, limit_bytes: int) -> tuple[SnapshotPrefix, ...]:
        """The first prefixes whose parts take no more than that, decoded; a later one may fit where another did not."""
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
        """Those that hold blocks of these prefixes, in the order in which the prefixes need them."""
        numbers = dict.fromkeys(self.part_of[block] for prefix in prefixes for block in prefix.blocks)
        return [self.parts[number] for number in numbers]


def check_prefix_name(name: str) -> str:
    """The name itself when a prefix can be called so; raises `UsageError` otherwise."""
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name[:200]!r} cannot be the name of a prefix",
            hint="Names are 1 to 128 letters, digits, dots, hyphens and underscores, a letter or digit first.",
        )
    return name


def require_same(snapshot: Identity, here: Identity, *, where: str) -> None:
    """Raises `SnapshotMismatchError`, which names all that differs, with both values. `where` is an address."""
    differing = [
        (_NAMES[field.name], getattr(snapshot, field.name), getattr(here, field.name))
        for field in fields(Identity)
        if getattr(snapshot, field.name) != getattr(here, field.name)
    ]
    if not differing:
        return
    told = "; ".join(f"its {name} is {theirs}, here it is {ours}" for name, theirs, ours in differing)
    raise SnapshotMismatchError(
        f"the KV snapshot {where} was made for something else: {told}",
        where=differing[0][0],
        hint="Export it again for this model and these settings, or give this one an address of its own.",
    )


def require_same_model(snapshot: Identity, model: str, *, where: str) -> None:
    """As `require_same`, as long as no more is known than the digest of the manifest."""
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
