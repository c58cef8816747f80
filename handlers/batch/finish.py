"""The end of a job: the manifest, which says that all parts are there, and the one file that is made of them.

Whoever finds all parts there does it; that several do is no harm. The manifest is written by a conditional put and is
the same whoever writes it; the file is made of the same parts, and replaces itself whole. A job that was cut off
between the two is finished by its next run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from ...loader.errors import AlreadyExistsError, NotFoundError, SourceError
from ...loader.format.json_object import Document, JsonObject
from .errors import JobFormatError, JobMismatchError
from .index import FORMAT_NAME, FORMAT_VERSION, JobIndex
from .partial import PARTIAL_FOLDER
from .parts import PartInfo, part_name, read_part, remove_quietly
from .places import Places
from .scan import MAX_PARTS

MANIFEST_NAME = "manifest.json"
MAX_MANIFEST_BYTES = 4 << 20
MAX_RECORD_BYTES = 1 << 50
_MANIFEST = Document(
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
    """What a manifest says."""

    key: str
    parts: tuple[PartInfo, ...]

    @property
    def num_failed(self) -> int:
        return sum(part.num_failed for part in self.parts)

    @property
    def size_bytes(self) -> int:
        """Of all parts, which is that of the one file."""
        return sum(part.size_bytes for part in self.parts)


def finish_job(places: Places, index: JobIndex, known: Mapping[int, PartInfo]) -> Finished:
    """Write the manifest and the file, where they are not there yet. All parts are there; `known` are those that this
    process has written itself. Blocks.
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
    _remove_partials(places)
    return finished


def read_finished(places: Places, index: JobIndex) -> Finished | None:
    """The manifest of a job whose parts are all there; None where there is none yet. Blocks."""
    try:
        data, _ = places.work.read(MANIFEST_NAME, max_bytes=MAX_MANIFEST_BYTES)
    except NotFoundError:
        return None
    finished = parse_manifest(data)
    if finished.key != index.key or len(finished.parts) != len(index.parts):
        raise JobFormatError(
            f"{MANIFEST_NAME} in {places.work.url} is not that of the job beside it",
            where=MANIFEST_NAME,
            hint="Choose another output.",
        )
    return finished


def write_file(places: Places, index: JobIndex, finished: Finished) -> None:
    """The one file, where one is wanted and is not there. Atomic: it appears whole, or not at all. Blocks."""
    if places.final is None or is_file_there(places, finished):
        return
    with places.final.create(places.final_name) as writer:
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
    """Raises `JobMismatchError` where something else is."""
    assert places.final is not None
    try:
        found = places.final.stat(places.final_name)
    except NotFoundError:
        return False
    if found.size_bytes != finished.size_bytes:
        raise JobMismatchError(
            f"{places.output} is there, and is not what this job has made",
            source=places.final.url,
            name=places.final_name,
            hint="Move it away, or choose another output.",
        )
    return True


def dump_manifest(finished: Finished, index: JobIndex, places: Places) -> bytes:
    """The same for whoever makes it: it holds no times."""
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
    return json.dumps(document, ensure_ascii=False, indent=1).encode() + b"\n"


def parse_manifest(data: bytes) -> Finished:
    """Raises `JobFormatError`."""
    document = _MANIFEST.read(data, max_items=8 * MAX_PARTS)
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


def _remove_partials(places: Places) -> None:
    """What workers that were stopped have left, and others have completed meanwhile."""
    try:
        names = [info.name for info in islice(places.work.list(PARTIAL_FOLDER), MAX_PARTS)]
    except SourceError:
        return
    for name in names:
        remove_quietly(places.work, name)
