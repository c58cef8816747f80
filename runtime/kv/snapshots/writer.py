"""The writer of snapshots: blobs first, `snapshot.json` last, conditional on the previous version.

A snapshot therefore exists as a whole or not at all, and of two concurrent writers one wins and the
other changes nothing. Blobs are never changed, only added: a new generation refers to the old parts
that it keeps. Blobs that no generation refers to are removed afterwards. This module does not know
the source of blocks.

The next generation of a snapshot: the choice of its prefixes (a pure decision), and its writing.

Prefixes exported by name stay until they are exported again. They are followed by those that a
server found useful, within a limit of bytes, and then by the remains of earlier servers. A
generation consists of parts of the previous one, and of one new blob with the blocks that are in
none of them.
"""

from __future__ import annotations

import platform
import secrets
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
from blake3 import blake3
from msgspec import Struct
from msgspec.structs import replace

from ....loader.errors import FormatError, NotFoundError, SourceError, TeneralError
from ....loader.format.manifest import PLANE_ALIGNMENT_BYTES, Blob, align
from ....loader.sources.base import ObjectWriter, Store
from .parts import open_snapshot, place_part
from .snapshot import (
    FOLDER,
    MAX_SNAPSHOT_JSON_BYTES,
    PART_BYTES,
    RECENT,
    SNAPSHOT_NAME,
    Identity,
    Snapshot,
    SnapshotPart,
    SnapshotPrefix,
    dump_snapshot,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Published(Struct, frozen=True):
    """The object at an address. `snapshot` is None if it is not a readable snapshot."""

    snapshot: Snapshot | None
    version: str


def find_published(store: Store) -> Published | None:
    """Find the snapshot to continue or replace; None without one. Raises the store's errors."""
    try:
        snapshot, version = open_snapshot(store)
    except NotFoundError:
        return None
    except FormatError:
        return Published(None, store.stat(SNAPSHOT_NAME).version)
    return Published(snapshot, version)


class NamedChain(Struct, frozen=True):
    """A prefix to be published: the hashes of its blocks, in order."""

    name: str
    hashes: tuple[bytes, ...]


class SnapshotWriter:
    """The writer of one generation, for one thread. End with `publish` or `discard`."""

    def __init__(
        self,
        store: Store,
        identity: Identity,
        *,
        replaced: Published | None,
        kept: Sequence[bytes] = (),
        generator: str = "",
        host: Mapping[str, str] | None = None,
    ) -> None:
        """Write the generation after `replaced`, keeping those of its parts that hold the blocks
        `kept`.

        `generator` and `host` default to this program on this machine.
        """
        self._store = store
        self._identity = identity
        self._replaced = replaced
        self._generator, self._host = generator, host
        self._blobs: list[Blob] = []
        self._parts: list[SnapshotPart] = []
        self._blob_name = f"{FOLDER}{secrets.token_hex(8)}.bin"
        self._writer: ObjectWriter | None = None
        self._end_bytes = 0
        old = replaced.snapshot if replaced is not None else None
        # Under another identity, equal hashes stand for different bytes.
        if old is not None and old.identity == identity:
            self._keep(old, set(kept))
        self._held = {each for part in self._parts for each in part.hashes}

    @property
    def held(self) -> frozenset[bytes]:
        """The blocks of this generation so far."""
        return frozenset(self._held)

    @property
    def written_bytes(self) -> int:
        return self._end_bytes

    def add(self, hashes: Sequence[bytes], content: NDArray[np.uint8]) -> None:
        """Store these blocks, content (blocks, block_bytes), as one part. None of them is held yet;
        each comes after its predecessor.
        """
        part, data = place_part(
            self._identity, hashes, content, blob=len(self._blobs), end_bytes=self._end_bytes
        )
        self._append(part, data)

    def copy(self, part: SnapshotPart, stored: bytes | memoryview) -> None:
        """Store a part of another snapshot of the same identity, unchanged."""
        offset_bytes = align(self._end_bytes, PLANE_ALIGNMENT_BYTES)
        here = replace(part, blob=len(self._blobs), offset_bytes=offset_bytes)
        self._append(here, bytes(offset_bytes - self._end_bytes) + stored)

    def publish(
        self, chains: Sequence[NamedChain], *, is_time_left: Callable[[], bool] = lambda: True
    ) -> bytes:
        """Publish the snapshot with these prefixes, whose blocks are held. Returns the digest for a
        pin.

        Raises `AlreadyExistsError` if the object was replaced meanwhile, `TimeoutError` if
        `is_time_left` returns False at the last moment, and the store's errors: then nothing has
        changed.
        """
        try:
            snapshot, data = self._finish(chains)
            if not is_time_left():
                raise TimeoutError("no time was left to publish the snapshot")
            self._put(data)
        except BaseException:
            self.discard()
            raise
        self._writer = None  # the written blob is in use
        self._remove_unused(snapshot)
        return blake3(data).digest()

    def discard(self) -> None:
        """Remove the written blob; if that fails it stays, unreferenced. Idempotent."""
        if self._writer is None:
            return
        writer, self._writer = self._writer, None
        with suppress(TeneralError):
            writer.abort()
        with suppress(TeneralError):
            self._store.delete(self._blob_name)

    def _append(self, part: SnapshotPart, data: bytes) -> None:
        if self._writer is None:
            self._writer = self._store.create(self._blob_name)
        self._writer.write(data)
        self._end_bytes += len(data)
        self._parts.append(part)
        self._held.update(part.hashes)

    def _keep(self, snapshot: Snapshot, kept: set[bytes]) -> None:
        parts = [part for part in snapshot.parts if not kept.isdisjoint(part.hashes)]
        numbers = {number: index for index, number in enumerate(sorted({part.blob for part in parts}))}
        self._blobs = [snapshot.blobs[number] for number in numbers]
        self._parts = [replace(part, blob=numbers[part.blob]) for part in parts]

    def _finish(self, chains: Sequence[NamedChain]) -> tuple[Snapshot, bytes]:
        blobs = list(self._blobs)
        if self._writer is not None:
            self._writer.commit()
            blobs.append(Blob(self._blob_name, self._end_bytes))
        numbers = {
            each: number for number, each in enumerate(each for part in self._parts for each in part.hashes)
        }
        snapshot = Snapshot(
            generator=self._generator or _this_program(),
            host=_this_host() if self._host is None else self._host,
            identity=self._identity,
            blobs=tuple(blobs),
            parts=tuple(self._parts),
            prefixes=tuple(
                SnapshotPrefix(chain.name, tuple(numbers[each] for each in chain.hashes)) for chain in chains
            ),
        )
        return snapshot, dump_snapshot(snapshot)

    def _put(self, data: bytes) -> None:
        try:
            if self._replaced is None:
                self._store.put(SNAPSHOT_NAME, data, if_absent=True)
            else:
                self._store.put(SNAPSHOT_NAME, data, if_version=self._replaced.version)
        except SourceError as error:
            # The store may have accepted it although its answer was lost: then a retry found our
            # own version.
            if not self._is_published(data, error):
                raise

    def _is_published(self, data: bytes, error: SourceError) -> bool:
        try:
            return self._store.read(SNAPSHOT_NAME, max_bytes=MAX_SNAPSHOT_JSON_BYTES)[0] == data
        except (NotFoundError, FormatError):
            return False
        except SourceError:
            # Unknown, so the blob stays in case it is referenced.
            self._writer = None
            raise error from None

    def _remove_unused(self, snapshot: Snapshot) -> None:
        """Remove unreferenced blobs. A reader of the old generation finds it replaced, and
        continues without it.
        """
        if self._replaced is None or self._replaced.snapshot is None:
            return
        used = {blob.name for blob in snapshot.blobs}
        for blob in self._replaced.snapshot.blobs:
            if blob.name not in used:
                with suppress(TeneralError):
                    self._store.delete(blob.name)


def _this_program() -> str:
    from .... import __version__

    return f"teneral {__version__}"


def _this_host() -> dict[str, str]:
    """The properties of this machine that may affect the last bits of results."""
    host = {"numpy": np.__version__, "machine": platform.machine() or "unknown"}
    # If torch computed, it is imported.
    torch = sys.modules.get("torch")
    return host if torch is None else {**host, "torch": str(torch.__version__)}


MAX_RECENT = 64  # prefixes that servers keep automatically

Chain = tuple[bytes, ...]
# Reads the contents of these blocks of a chain, (blocks, block_bytes), from the first up to the
# first missing one.
ReadBlocks = Callable[[Sequence[bytes]], "NDArray[np.uint8]"]


def plan_generation(
    base: Snapshot | None,
    *,
    exported: Mapping[str, Chain] | None = None,
    wanted: Sequence[Chain] = (),
    max_blocks: int | None = None,
) -> list[NamedChain]:
    """The prefixes of the generation after `base`, most valuable first.

    `exported` are those named now, `wanted` the useful ones, best first. With `max_blocks`, unnamed
    prefixes are left out if they would exceed that number of different blocks.
    """
    exported = exported or {}
    before = base.prefixes if base is not None else ()
    chains = {prefix.name: base.chain(prefix) for prefix in before} if base is not None else {}
    named = dict(exported)
    named |= {
        prefix.name: chains[prefix.name]
        for prefix in before
        if not prefix.is_automatic and prefix.name not in exported
    }
    candidates = [*wanted, *(chains[prefix.name] for prefix in before if prefix.is_automatic)]
    recent = _choose(candidates, list(named.values()), max_blocks)
    automatic = [NamedChain(f"{RECENT}{number}", chain) for number, chain in enumerate(recent, start=1)]
    return [*(NamedChain(name, chain) for name, chain in named.items()), *automatic]


def _choose(candidates: Sequence[Chain], named: Sequence[Chain], max_blocks: int | None) -> list[Chain]:
    taken = {each for chain in named for each in chain}
    chosen: list[Chain] = []
    for chain in candidates:
        if len(chosen) == MAX_RECENT:
            break
        new = [each for each in chain if each not in taken]
        # A chain without new blocks is the beginning of another one.
        if new and (max_blocks is None or len(taken) + len(new) <= max_blocks):
            taken.update(new)
            chosen.append(chain)
    ends = {each for chain in (*named, *chosen) for each in chain[:-1]}
    return [chain for chain in chosen if chain[-1] not in ends]


def write_generation(
    store: Store,
    identity: Identity,
    chains: Sequence[NamedChain],
    read: ReadBlocks,
    *,
    replaced: Published | None,
    lost: Collection[bytes] = (),
    is_time_left: Callable[[], bool] = lambda: True,
) -> tuple[bytes, int]:
    """Write this generation in the place of `replaced`, of which the blocks `lost` are not kept. Returns its
    digest and the number of bytes written.

    Chains are cut at their first unreadable block. Raises the errors of `SnapshotWriter.publish`;
    then the old generation stays.
    """
    wanted = {each for chain in chains for each in chain.hashes}
    writer = SnapshotWriter(store, identity, replaced=replaced, kept=tuple(wanted.difference(lost)))
    try:
        whole: list[NamedChain] = []
        for chain in chains:
            _add_missing(writer, identity, chain.hashes, read, is_time_left)
            held = writer.held
            length = next(
                (number for number, each in enumerate(chain.hashes) if each not in held), len(chain.hashes)
            )
            if length:
                whole.append(NamedChain(chain.name, chain.hashes[:length]))
    except BaseException:
        writer.discard()
        raise
    return writer.publish(whole, is_time_left=is_time_left), writer.written_bytes


def _add_missing(
    writer: SnapshotWriter,
    identity: Identity,
    hashes: Chain,
    read: ReadBlocks,
    is_time_left: Callable[[], bool],
) -> None:
    held = writer.held
    missing = [each for each in hashes if each not in held]
    step = max(1, PART_BYTES // identity.block_bytes)
    for start in range(0, len(missing), step):
        if not is_time_left():
            raise TimeoutError("no time was left to write the snapshot")
        piece = missing[start : start + step]
        content = read(piece)
        if len(content):
            writer.add(piece[: len(content)], content)
        if len(content) < len(piece):
            return
