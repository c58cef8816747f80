"""The data types of a KV snapshot: keys and values of named prefixes, stored so that another
container need not compute them.

`docs/kv-snapshot.md` is the specification; this module also has the pure comparison of identities.
`snapshot_json.py` parses the JSON, `parts.py` the stored bytes. Tokens, salts and texts appear
nowhere in a snapshot. This module does not know torch and does no I/O.
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


@dataclass(frozen=True, slots=True)
class Identity:
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


@dataclass(frozen=True, slots=True)
class SnapshotPart:
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


@dataclass(frozen=True, slots=True)
class SnapshotPrefix:
    """A stored prefix. `blocks` are ascending numbers of blocks, counted through all parts: each
    comes after its predecessor.
    """

    name: str
    blocks: tuple[int, ...]

    @property
    def is_automatic(self) -> bool:
        """True if a server kept it automatically, without a named export."""
        return self.name.startswith(RECENT)


@dataclass(frozen=True)
class Snapshot:
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
        (_NAMES[field.name], getattr(snapshot, field.name), getattr(here, field.name))
        for field in fields(Identity)
        if getattr(snapshot, field.name) != getattr(here, field.name)
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
