"""Changes by others between two steps of a worker: another one's part, index or manifest, and
answers that were lost.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.flipped_bits import accepted_flips, without_own_digest
from tests.support.memory_store import MemoryStore

from teneral.handlers.batch import parts
from teneral.handlers.batch.finish import finish_job, parse_manifest, read_finished
from teneral.handlers.batch.index import INDEX_NAME, JobIdentity, JobIndex, dump_index, make_index
from teneral.handlers.batch.input import LineScanner, Scanned
from teneral.handlers.batch.job import find_index, publish_index
from teneral.handlers.batch.parts import (
    Input,
    Places,
    describe_part,
    list_parts,
    part_name,
    put_part,
    read_part,
)
from teneral.handlers.batch.spec import JobMismatchError
from teneral.loader.errors import AlreadyExistsError, ChangedError, SourceError
from teneral.loader.sources.base import ObjectInfo, Store

IDENTITY = JobIdentity("/in.jsonl", "1", "f" * 64, {"max_line_bytes": "1024"})
RECORD = b'{"custom_id":"1","text":"a"}\n'


def scanned(count: int = 4) -> Scanned:
    scanner = LineScanner(max_line_bytes=1024, max_lines=100, part_lines=2)
    scanner.feed(b'{"prompt":"a"}\n' * count)
    return scanner.finish()


def index(count: int = 4) -> JobIndex:
    return make_index(IDENTITY, scanned(count), size_bytes=15 * count, max_line_bytes=1024)


def places_of(work: Store, final: Store | None = None) -> Places:
    given = Input(MemoryStore(), "in.jsonl", "/in.jsonl", None)
    return Places(given, "out", work, final, "out.jsonl" if final else "")


def put(store: Store, number: int, data: bytes) -> bool:
    return put_part(store, number, data, describe_part(data, 0)) is not None


def test_of_two_parts_with_one_number_the_first_stays() -> None:
    store = MemoryStore()
    assert put(store, 3, b"first\n")
    assert not put(store, 3, b"second\n")
    assert store.read(part_name(3), max_bytes=10)[0] == b"first\n"
    assert list_parts(store) == {3}


class Unreliable(MemoryStore):
    """Answers a put with an error: after it has taken it, or instead."""

    takes = True

    def put(self, name: str, data: bytes, **conditions: Any) -> ObjectInfo:
        if self.takes:
            super().put(name, data, **conditions)
        raise SourceError("409 ConditionalRequestConflict")


def test_a_part_that_was_taken_although_the_store_says_otherwise_counts() -> None:
    store = Unreliable()
    assert not put(store, 3, b"{}\n"), "it may be another job's"
    assert store.read(part_name(3), max_bytes=10)[0] == b"{}\n"
    store.takes = False
    with pytest.raises(SourceError, match="409"):
        put(store, 4, b"{}\n")


def test_an_input_that_is_replaced_between_two_reads_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "FIRST_READ_BYTES", 10)
    monkeypatch.setattr(parts, "READ_BYTES", 20)
    store = MemoryStore()
    version = store.put("in.jsonl", bytes(range(100))).version
    given = Input(store, "in.jsonl", "/in.jsonl", None)
    pieces = list(parts.read_input(given, version, 5, 95))
    assert [len(piece) for piece in pieces] == [10, 20, 20, 20, 20]
    assert b"".join(pieces) == bytes(range(5, 95))
    reading = parts.read_input(given, version, 5, 95)
    next(reading)
    store.put("in.jsonl", bytes(100))
    with pytest.raises(ChangedError):
        next(reading)


def test_of_two_who_begin_a_job_both_go_by_the_index_of_the_first() -> None:
    store = MemoryStore()
    first, is_new = publish_index(places_of(store), IDENTITY, scanned(), size_bytes=60, max_line_bytes=1024)
    assert is_new
    again, is_new = publish_index(places_of(store), IDENTITY, scanned(6), size_bytes=90, max_line_bytes=1024)
    assert not is_new
    assert again == first
    other = JobIdentity("/other.jsonl", "1", "f" * 64, {"max_line_bytes": "1024"})
    with pytest.raises(JobMismatchError, match="another input"):
        publish_index(places_of(store), other, scanned(), size_bytes=60, max_line_bytes=1024)


class BegunMeanwhile(MemoryStore):
    """Another worker begins the job, and finishes a part, just before the first look at the parts."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
        if not list(super().list(INDEX_NAME)):
            self.put(INDEX_NAME, dump_index(index()))
            self.put(part_name(0), RECORD * 2)
        return super().list(prefix)


def test_a_job_that_another_worker_begins_meanwhile_is_not_taken_for_a_strange_one() -> None:
    assert find_index(places_of(BegunMeanwhile())) == index()


def test_parts_without_an_index_are_somebody_elses() -> None:
    store = MemoryStore()
    assert find_index(places_of(store)) is None
    store.put(part_name(0), RECORD)
    with pytest.raises(JobMismatchError, match=r"without the job\.json"):
        find_index(places_of(store))


class FinishedMeanwhile(MemoryStore):
    """Another worker's manifest is there just before ours."""

    theirs = b""

    def put(
        self, name: str, data: bytes, *, if_absent: bool = False, if_version: str | None = None
    ) -> ObjectInfo:
        if name == "manifest.json" and if_absent:
            self.theirs = data
            super().put(name, data)
            raise AlreadyExistsError("it exists already", name=name)
        return super().put(name, data, if_absent=if_absent, if_version=if_version)


@pytest.mark.parametrize("kind", [MemoryStore, FinishedMeanwhile])
def test_any_worker_that_finishes_a_job_leaves_the_same_end(kind: type[MemoryStore]) -> None:
    work, final = kind(), MemoryStore()
    for number in range(2):
        put(work, number, RECORD * 2)
    places = places_of(work, final)
    finished = finish_job(places, index(), {})
    assert final.read("out.jsonl", max_bytes=1000)[0] == RECORD * 4
    manifest, info = work.read("manifest.json", max_bytes=10_000)
    assert finish_job(places, index(), {}) == finished == read_finished(places, index())
    assert work.stat("manifest.json") == info
    known = {number: read_part(work, number, index())[1] for number in range(2)}
    other = kind()
    for number in range(2):
        put(other, number, RECORD * 2)
    finish_job(places_of(other, MemoryStore()), index(), known)
    assert other.read("manifest.json", max_bytes=10_000)[0] == manifest
    assert json.loads(manifest)["records"] == 4


def test_every_flipped_bit_of_a_manifest_is_refused_and_one_of_an_older_worker_is_read() -> None:
    work = MemoryStore()
    for number in range(2):
        put(work, number, RECORD * 2)
    finished = finish_job(places_of(work), index(), {})
    manifest = work.read("manifest.json", max_bytes=10_000)[0]
    assert accepted_flips(manifest, parse_manifest) == []
    assert parse_manifest(without_own_digest(manifest)) == finished


def test_a_part_that_was_replaced_after_the_manifest_is_not_taken_into_the_file() -> None:
    work, final = MemoryStore(), MemoryStore()
    for number in range(2):
        put(work, number, RECORD * 2)
    finish_job(places_of(work), index(), {})
    work.put(part_name(1), RECORD.replace(b"a", b"b") * 2)
    with pytest.raises(Exception, match=r"parts/000001\.jsonl .* is not the one that manifest\.json names"):
        finish_job(places_of(work, final), index(), {})
    assert list(final.list()) == []
