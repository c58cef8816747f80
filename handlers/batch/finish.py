"""The end of a job: the manifest, which marks the job as complete, and the one output file.

Any worker that finds all parts does it; several are harmless. Manifest and file are the same from
each worker, and each is only created if it does not exist. An existing file is recognised by the
digests of the parts, or refused. A job that was interrupted between the two is finished by its next
run.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...loader.errors import AlreadyExistsError, NotFoundError, SourceError, UnavailableError
from ...loader.format.json_object import DocumentKind, JsonObject, with_own_digest
from ...loader.sources.base import ObjectInfo
from ...loader.sources.http.retry import pause_s
from .claims import CLAIMS_FOLDER
from .index import FORMAT_NAME, FORMAT_VERSION, JobIndex
from .input import MAX_PARTS
from .parts import PARTIAL_FOLDER, Input, PartInfo, Places, part_name, read_input, read_part, remove_quietly
from .spec import JobFormatError, JobMismatchError

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
MAX_RECORD_BYTES = 1 << 50
# Attempts to write the file, if others write it concurrently or the store fails.
MAX_WRITES = 6
_MANIFEST = DocumentKind(
    MANIFEST_NAME,
    JobFormatError,
    "It is damaged, or Teneral did not write it: remove it and run the job again.",
    "A newer Teneral may have written it: upgrade, or choose another output.",
)
_KEYS = frozenset(
    ("format", "version", "key", "input", "model", "records", "succeeded", "failed", "output", "parts")
)
_PART_KEYS = frozenset(("name", "bytes", "sha256", "records", "failed"))


@dataclass(frozen=True, slots=True)
class Finished:
    """The content of a manifest."""

    key: str
    parts: tuple[PartInfo, ...]

    @property
    def num_failed(self) -> int:
        return sum(part.num_failed for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """The size of all parts, which is that of the output file."""
        return sum(part.size_bytes for part in self.parts)


def finish_job(places: Places, index: JobIndex, known: Mapping[int, PartInfo]) -> Finished:
    """Write the manifest and the file, if they do not exist. All parts exist; `known` are those
    written by this process. Blocks.
    """
    finished = read_finished(places, index)
    if finished is None:
        parts = [
            known[number] if number in known else read_part(places.work, number, index)[1]
            for number in range(len(index.parts))
        ]
        finished = Finished(index.key, tuple(parts))
        try:
            places.work.put(MANIFEST_NAME, dump_manifest(finished, index, places), if_absent=True)
        except AlreadyExistsError:
            finished = read_finished(places, index) or finished
    write_file(places, index, finished)
    _remove_leftovers(places)
    return finished


def read_finished(places: Places, index: JobIndex) -> Finished | None:
    """The manifest of a job whose parts all exist; None without one. Blocks."""
    try:
        data, _ = places.work.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
    except NotFoundError:
        return None
    finished = parse_manifest(data)
    if finished.key != index.key or len(finished.parts) != len(index.parts):
        raise JobFormatError(
            f"{MANIFEST_NAME} in {places.work.url} is not that of the job in the same folder",
            where=MANIFEST_NAME,
            hint="Choose another output.",
        )
    return finished


def write_file(places: Places, index: JobIndex, finished: Finished) -> None:
    """Write the one output file, if one is configured and does not exist. Blocks.

    Atomic: it appears as a whole, or not at all; it replaces nothing. Raises `JobMismatchError` if
    another file is in its place.
    """
    if places.final is None:
        return
    for attempt in range(1, MAX_WRITES + 1):
        if is_file_there(places, finished):
            return
        try:
            _create_file(places, index, finished)
            return
        except (
            AlreadyExistsError,
            UnavailableError,
        ):  # another worker's write, or a lost response to this one
            if attempt == MAX_WRITES:
                raise
        time.sleep(pause_s(attempt, None))


def _create_file(places: Places, index: JobIndex, finished: Finished) -> None:
    assert places.final is not None
    with places.final.create(places.final_name, if_absent=True) as writer:
        for number, part in enumerate(finished.parts):
            data, found = read_part(places.work, number, index)
            if found.sha256 != part.sha256:
                raise JobFormatError(
                    f"{part_name(number)} in {places.work.url} is not the one that {MANIFEST_NAME} names",
                    where=part_name(number),
                    hint="It was replaced or damaged: choose another output.",
                )
            writer.write(data)


def is_file_there(places: Places, finished: Finished) -> bool:
    """True if the output file exists, by reading it. Raises `JobMismatchError` if it is another
    file.
    """
    assert places.final is not None
    try:
        found = places.final.stat(places.final_name)
    except NotFoundError:
        return False
    if not _holds_parts(places, found, finished):
        raise JobMismatchError(
            f"{places.output} exists and is not this job's output",
            source=places.final.url,
            name=places.final_name,
            hint="Move it away, or choose another output.",
        )
    return True


def _holds_parts(places: Places, found: ObjectInfo, finished: Finished) -> bool:
    """True if the file consists of these parts, by their digests."""
    assert places.final is not None
    if found.size_bytes != finished.size_bytes:
        return False
    given = Input(places.final, places.final_name, places.output, found.version)
    chunks = read_input(given, found.version, 0, found.size_bytes)
    sizes = [part.size_bytes for part in finished.parts]
    digests = zip(digests_of(chunks, sizes), finished.parts, strict=True)
    return all(digest == part.sha256 for digest, part in digests)


def digests_of(chunks: Iterable[bytes], sizes_bytes: Iterable[int]) -> Iterable[str]:
    """The SHA-256 of each consecutive range of these sizes."""
    rest = memoryview(b"")
    pieces = iter(chunks)
    for size_bytes in sizes_bytes:
        digest, left_bytes = hashlib.sha256(), size_bytes
        while left_bytes > 0:
            rest = rest or memoryview(next(pieces))
            taken = rest[:left_bytes]
            digest.update(taken)
            left_bytes, rest = left_bytes - len(taken), rest[len(taken) :]
        yield digest.hexdigest()


def dump_manifest(finished: Finished, index: JobIndex, places: Places) -> bytes:
    """The manifest as JSON, the same from every worker: it contains no times."""
    document: dict[str, Any] = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "key": index.key,
        "input": index.identity.input,
        "model": index.identity.model,
        "records": index.num_records,
        "succeeded": index.num_records - finished.num_failed,
        "failed": finished.num_failed,
        "output": places.final_name or None,
        "parts": [
            {
                "name": part_name(number),
                "bytes": part.size_bytes,
                "sha256": part.sha256,
                "records": part.num_records,
                "failed": part.num_failed,
            }
            for number, part in enumerate(finished.parts)
        ],
    }
    return with_own_digest(json.dumps(document, ensure_ascii=False, indent=1).encode())


def parse_manifest(data: bytes) -> Finished:
    """Parse a manifest. Raises `IntegrityError` if it does not have the digest that stands at its end;
    else `JobFormatError`.
    """
    document = _MANIFEST.read_checked(data, max_items=8 * MAX_PARTS)
    top = JsonObject(document, MANIFEST_NAME, _KEYS, document=_MANIFEST)
    if top.text("format") != FORMAT_NAME or top.integer("version") != FORMAT_VERSION:
        _MANIFEST.refuse("it is of another format or version", MANIFEST_NAME)
    parts: list[PartInfo] = []
    for value, place in top.items("parts", MAX_PARTS):
        part = JsonObject(value, place, _PART_KEYS, document=_MANIFEST)
        num_records = part.integer("records")
        parts.append(
            PartInfo(
                part.integer("bytes", MAX_RECORD_BYTES),
                part.digest("sha256").hex(),
                num_records,
                part.integer("failed", num_records),
            )
        )
    return Finished(top.digest("key").hex(), tuple(parts))


def _remove_leftovers(places: Places) -> None:
    """Remove what workers that ended left of parts that others have completed."""
    for folder in (PARTIAL_FOLDER, CLAIMS_FOLDER):
        try:
            names = [info.name for info in islice(places.work.list(folder), MAX_PARTS)]
        except SourceError:
            continue
        for name in names:
            remove_quietly(places.work, name)
