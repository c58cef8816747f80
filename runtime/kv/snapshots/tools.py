"""The snapshot commands of `teneral kv` that need no model: describe, verify and copy."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any

from ....loader.errors import AlreadyExistsError, ChangedError, FormatError, NotFoundError
from ....loader.sources.base import Source, Store
from ....loader.tools.part_reader import map_in_order
from ....loader.tools.progress_bar import TransferProgress, format_bytes
from .parts import SnapshotReader, decode_blocks, open_snapshot
from .snapshot import (
    EPOCH,
    FORMAT_VERSION,
    SNAPSHOT_NAME,
    Identity,
    Snapshot,
    SnapshotPart,
    check_layout,
)
from .writer import NamedChain, SnapshotWriter, find_published

# Of the value that `describe` returns.
SCHEMA = 1

_FINDINGS = (
    FormatError,
    NotFoundError,
    ChangedError,
    # Problems of the snapshot itself, not of this attempt to read it.
)

OnProgress = Callable[[TransferProgress], None]


@dataclass(frozen=True, slots=True)
class SnapshotReport:
    """The result of reading a snapshot, with a line for each problem."""

    url: str
    digest: bytes
    num_parts: int
    stored_bytes: int
    problems: tuple[str, ...]

    @property
    def ok(self) -> bool:
        return not self.problems

    def render(self) -> str:
        """The report as a few lines of text."""
        what = f"{self.num_parts} parts, {format_bytes(self.stored_bytes)}"
        if self.problems:
            lines = (f"  {problem}" for problem in self.problems)
            return "\n".join([f"damaged: {self.url}, {what}; problems: {len(self.problems)}", *lines])
        return f"intact: {what}\n  {self.url}@b3:{self.digest.hex()}"


def describe(snapshot: Snapshot, url: str) -> dict[str, Any]:
    """The snapshot as a JSON-ready value. Adding keys does not change its schema number."""
    identity = snapshot.identity
    digest = _digest_of(snapshot).hex()
    return {
        "schema": SCHEMA,
        "url": url,
        "format": f"teneral-kv {FORMAT_VERSION}",
        "generator": snapshot.generator,
        "host": dict(snapshot.host),
        "digest": digest,
        "pin": f"{url}@b3:{digest}",
        "model": identity.model,
        "dtype": identity.dtype,
        "epoch": identity.epoch,
        "layout": identity.layout,
        "block_size": identity.block_size,
        "block_bytes": identity.block_bytes,
        "blocks": len(snapshot.hashes),
        "decoded_bytes": len(snapshot.hashes) * identity.block_bytes,
        "stored_bytes": sum(part.size_bytes for part in snapshot.parts),
        "parts": len(snapshot.parts),
        "blobs": [{"name": blob.name, "bytes": blob.size_bytes} for blob in snapshot.blobs],
        "prefixes": [
            {
                "name": prefix.name,
                "blocks": len(prefix.blocks),
                "tokens": len(prefix.blocks) * identity.block_size,
                "bytes": len(prefix.blocks) * identity.block_bytes,
            }
            for prefix in snapshot.prefixes
        ],
    }


def render_table(description: dict[str, Any]) -> str:
    """The value of `describe` as a table for a terminal: a header, and a row for each prefix."""
    host = ", ".join(f"{name} {value}" for name, value in description["host"].items())
    header = {
        "snapshot": description["url"],
        "format": f"{description['format']}, written by {description['generator']} ({host})",
        "digest": f"b3:{description['digest']}",
        "model": f"b3:{description['model']}",
        "keys": f"{description['dtype']}, {description['epoch']}, {description['layout']}, {description['block_size']} "
        "tokens a block",
        "stored": f"{description['blocks']} blocks in {description['parts']} parts, "
        f"{format_bytes(description['stored_bytes'])} of {format_bytes(description['decoded_bytes'])}",
    }
    rows = [("prefix", "tokens", "in memory")]
    rows += [
        (prefix["name"], f"{prefix['tokens']:,}", format_bytes(prefix["bytes"]))
        for prefix in description["prefixes"]
    ]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = [f"{row[0]:{widths[0]}}  {row[1]:>{widths[1]}}  {row[2]:>{widths[2]}}".rstrip() for row in rows]
    lines = [f"{name:9} {text}" for name, text in header.items()]
    return "\n".join([*lines, "", table[0], "─" * len(table[0]), *table[1:]])


def verify_snapshot(
    source: Source, *, digest: bytes | None = None, progress: OnProgress | None = None
) -> SnapshotReport:
    """Read and check every part, and what the snapshot says of itself. Blocks; `progress` is called from this thread.

    Raises `SnapshotError` for an unusable `snapshot.json`, `IntegrityError` if it is not the pinned
    one, `NotFoundError` without one, and errors of a store that does not answer.
    """
    snapshot, _ = open_snapshot(source, digest=digest)
    reader = SnapshotReader(source, snapshot)
    problems = _problems_of_identity(snapshot.identity)
    for blob in snapshot.blobs:
        try:
            size_bytes = source.stat(blob.name).size_bytes
        except NotFoundError:
            # Each of its parts reports it.
            continue
        if size_bytes != blob.size_bytes:
            problems.append(f"{blob.name}: it has {size_bytes} bytes instead of {blob.size_bytes}")

    total_bytes = sum(part.size_bytes for part in snapshot.parts)
    done_bytes = 0
    with closing(map_in_order(partial(_problem_of, reader), snapshot.parts, None)) as results:
        for part, problem in zip(snapshot.parts, results, strict=True):
            problems += [problem] if problem is not None else []
            done_bytes += part.size_bytes
            if progress is not None:
                progress(TransferProgress(done_bytes, total_bytes))
    return SnapshotReport(source.url, _digest_of(snapshot), len(snapshot.parts), total_bytes, tuple(problems))


def _problems_of_identity(identity: Identity) -> list[str]:
    """Fields that no server has, so that none would use the snapshot. They have no digest of their own."""
    problems = []
    if identity.epoch != EPOCH:
        problems.append(f"{SNAPSHOT_NAME}: its epoch is {identity.epoch!r}, and must be {EPOCH!r}")
    found = check_layout(identity)
    if found:
        problems.append(f"{SNAPSHOT_NAME}: its layout {identity.layout!r} {found}")
    return problems


def lost_blocks(source: Source, snapshot: Snapshot) -> set[bytes]:
    """The hashes of all blocks in damaged or missing parts. Reads every part. Blocks; raises errors of a store that
    does not answer.
    """
    check = partial(_problem_of, SnapshotReader(source, snapshot))
    with closing(map_in_order(check, snapshot.parts, None)) as problems:
        found = [part for part, problem in zip(snapshot.parts, problems, strict=True) if problem]
    return {each for part in found for each in part.hashes}


def _problem_of(reader: SnapshotReader, part: SnapshotPart) -> str | None:
    """The finding about a part; None for one that is intact."""
    try:
        reader.read(part)
    except _FINDINGS as error:
        return error.message
    return None


def copy_snapshot(
    source: Source,
    store: Store,
    *,
    digest: bytes | None = None,
    force: bool = False,
    progress: OnProgress | None = None,
) -> SnapshotReport:
    """Copy a snapshot, verifying each part. It exists in `store` as a whole, or not at all.

    The copy has a `snapshot.json` of its own, and therefore another digest. Raises
    `AlreadyExistsError` if there is one, unless `force` is set; else the errors of
    `verify_snapshot`, and `IntegrityError` for the first bad part.
    """
    snapshot, _ = open_snapshot(source, digest=digest)
    replaced = find_published(store)
    if replaced is not None and not force:
        raise AlreadyExistsError(
            f"a KV snapshot exists already at {store.url}",
            source=store.url,
            name=SNAPSHOT_NAME,
            hint="Choose another address, or replace it with --force.",
        )
    reader = SnapshotReader(source, snapshot)
    writer = SnapshotWriter(
        store, snapshot.identity, replaced=replaced, generator=snapshot.generator, host=snapshot.host
    )
    total_bytes = sum(part.size_bytes for part in snapshot.parts)
    done_bytes = 0
    try:
        with closing(map_in_order(reader.read_stored, snapshot.parts, None)) as contents:
            for part, stored in zip(snapshot.parts, contents, strict=True):
                decode_blocks(snapshot.identity, part, stored, where=f"part of {source.url}")
                writer.copy(part, stored)
                done_bytes += part.size_bytes
                if progress is not None:
                    progress(TransferProgress(done_bytes, total_bytes))
    except BaseException:
        writer.discard()
        raise
    chains = [NamedChain(prefix.name, snapshot.chain(prefix)) for prefix in snapshot.prefixes]
    pin = writer.publish(chains)
    return SnapshotReport(store.url, pin, len(snapshot.parts), total_bytes, ())


def _digest_of(snapshot: Snapshot) -> bytes:
    assert snapshot.digest is not None  # set because it was read
    return snapshot.digest
