"""Generations of an artifact that nothing refers to: what `pack --force` has replaced, and what packs
that were killed have left.

A generation is the folder `blobs/GENERATION/` of one packing (decision 0003). The manifest names the
one in use. Others may still be read by loads that began before they were replaced, or be written by a
pack under way; so none is removed before all of it, and the manifest, have been as they are for some
time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import NotFoundError, SourceError, UsageError
from ..format.limits import MANIFEST_NAME, MAX_MANIFEST_BYTES
from ..format.manifest_json import BLOB_FOLDER, parse_manifest
from ..sources.base import ObjectInfo, Store
from ..sources.file.store import FileStore
from .progress_bar import format_bytes, format_duration

KEPT_S = 24 * 3600.0
_GENERATION = re.compile(rf"{BLOB_FOLDER}([0-9a-f]{{12}})/")


@dataclass(frozen=True, slots=True)
class StoredGeneration:
    """An unused generation: the names of its objects, and since when it has been as it is, None where
    the store does not say.
    """

    name: str
    objects: tuple[str, ...]
    size_bytes: int
    unchanged_since_unix_s: float | None

    @property
    def folder(self) -> str:
        return f"{BLOB_FOLDER}{self.name}"


@dataclass(frozen=True, slots=True)
class GarbageReport:
    """`kept` are unused generations, too: younger ones, or those that a pack still writes."""

    url: str
    removed: tuple[StoredGeneration, ...]
    kept: tuple[StoredGeneration, ...]
    is_dry_run: bool
    older_than_s: float

    def render(self) -> str:
        """A line for each unused generation."""
        if not self.removed and not self.kept:
            return f"nothing is unused at {self.url}"
        verb = "would be removed" if self.is_dry_run else "removed"
        why = f"kept: not yet unused for {format_duration(self.older_than_s)}"
        lines = [_line(each, verb) for each in self.removed] + [_line(each, why) for each in self.kept]
        return "\n".join(lines)


def _line(generation: StoredGeneration, what: str) -> str:
    since_s = generation.unchanged_since_unix_s
    age = "of unknown age" if since_s is None else f"{format_duration(max(0.0, time.time() - since_s))} old"
    return f"{generation.folder}: {format_bytes(generation.size_bytes)}, {age}; {what}"


def collect_garbage(store: Store, *, older_than_s: float = KEPT_S, dry_run: bool = False) -> GarbageReport:
    """Remove the generations that have been unused for `older_than_s`. With 0, all that are not being
    written to this local folder: then no pack may be under way elsewhere, and loads of them end.

    Raises `ManifestError` for a manifest that cannot be read, when nothing is removed, `UsageError`
    for a negative age, and the store's errors.
    """
    if older_than_s < 0:
        raise UsageError("an age cannot be negative", key="older_than")
    due: list[StoredGeneration] = []
    kept: list[StoredGeneration] = []
    for generation in find_unused(store):
        since_s = generation.unchanged_since_unix_s
        is_old = older_than_s == 0 or (since_s is not None and time.time() - since_s >= older_than_s)
        (due if is_old and not _is_written(store, generation) else kept).append(generation)
    if not dry_run:
        for generation in due:
            # A pack may have been published meanwhile.
            if generation.name in _used(store):
                raise UsageError(
                    f"{generation.folder} was published meanwhile", hint="Run the command again."
                )
            _remove(store, generation)
    return GarbageReport(store.url, tuple(due), tuple(kept), dry_run, older_than_s)


def find_unused(store: Store) -> tuple[StoredGeneration, ...]:
    """The generations that the manifest does not name. Raises as `collect_garbage`."""
    used = _used(store)
    objects: dict[str, list[ObjectInfo]] = {}
    listed = [*store.list(BLOB_FOLDER), *_unfinished(store)]
    for info in listed:
        found = _GENERATION.match(info.name)
        if found and found[1] not in used:
            objects.setdefault(found[1], []).append(info)
    replaced_s = _replaced_at(store)
    return tuple(_generation(name, members, replaced_s) for name, members in sorted(objects.items()))


def find_unused_quietly(store: Store) -> tuple[StoredGeneration, ...]:
    """`find_unused`, or nothing where the store cannot be listed: only for information."""
    try:
        return find_unused(store)
    except (SourceError, UsageError):
        return ()


def describe_unused(generations: Sequence[StoredGeneration], url: str) -> str:
    """A line for people."""
    size = format_bytes(sum(each.size_bytes for each in generations))
    return (
        f"{size} there are unused now, and stay for loads under way; after {format_duration(KEPT_S)} "
        f"`teneral gc {url}` removes them"
    )


def _used(store: Store) -> set[str]:
    try:
        data, _ = store.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
    except NotFoundError as error:
        if error.is_bucket:
            raise
        return set()
    manifest = parse_manifest(data)
    names = (*(blob.name for blob in manifest.blobs), *(file.path for file in manifest.files))
    return {manifest.generation, *(found[1] for name in names if (found := _GENERATION.match(name)))}


def _replaced_at(store: Store) -> float | None:
    """When the manifest was written, and so the last generation became unused; None where there is none."""
    return max((info.modified_unix_s or time.time() for info in store.list(MANIFEST_NAME)), default=None)


def _generation(name: str, objects: Sequence[ObjectInfo], replaced_s: float | None) -> StoredGeneration:
    times = [info.modified_unix_s for info in objects]
    since_s = None if None in times else max(each for each in (*times, replaced_s) if each is not None)
    size_bytes = sum(info.size_bytes for info in objects)
    return StoredGeneration(name, tuple(info.name for info in objects), size_bytes, since_s)


def _unfinished(store: Store) -> tuple[ObjectInfo, ...]:
    """Files that killed packs had not finished; object stores list none."""
    if not isinstance(store, FileStore):
        return ()
    return store.unfinished(BLOB_FOLDER.rstrip("/"))


def _is_written(store: Store, generation: StoredGeneration) -> bool:
    return isinstance(store, FileStore) and store.is_written(generation.folder)


def _remove(store: Store, generation: StoredGeneration) -> None:
    for name in generation.objects:
        store.delete(name)
