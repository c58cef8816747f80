"""The first bytes of a load are asked for once, before its manifest was checked, and never where they must not be."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.artifacts import BuiltArtifact, build_artifact
from tests.support.faulty_loads import LAYERS, FaultyStore, check_load, faulty_store
from tests.support.flipped_bits import without_own_digest
from tests.support.inspection import slices_of
from tests.support.paced import WAIT_S
from tests.support.store_faults import Fault
from tests.support.store_http import Request

from teneral.loader.errors import ChangedError, IntegrityError, ManifestError
from teneral.loader.format.manifest import Blob, Manifest, Part
from teneral.loader.format.manifest_json import dump_manifest, parse_manifest
from teneral.loader.load import prefetch as ahead
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.load.prefetch import ROOM_BYTES, Prefetch
from teneral.loader.memory.limits import MIB
from teneral.loader.sources.base import Source, SourceOptions
from teneral.loader.sources.http.source import HttpSource
from teneral.loader.timeline import Timeline

SLICE_BYTES = 10_000
NUM_SLICES = 4
OPTIONS = LoadOptions(range_bytes=30_000, available_bytes=1 << 40)


@pytest.fixture(autouse=True)
def _small_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "SLICE_BYTES", SLICE_BYTES)
    monkeypatch.setattr(ahead, "MAX_SLICES", NUM_SLICES)


def whole_parts() -> BuiltArtifact:
    """Two parts a layer, one of each tier."""
    return build_artifact(LAYERS, draft_elements=300 * 300, refine_elements=300 * 300)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FaultyStore]:
    with faulty_store(tmp_path, built=whole_parts()) as store:
        yield store


@pytest.fixture
def source(store: FaultyStore) -> Iterator[HttpSource]:
    source = HttpSource(store.url, SourceOptions(hedge_after_s=0.0, read_timeout_s=5.0))
    yield source
    source.close()


def begun(
    source: Source,
    manifest: Manifest,
    options: LoadOptions = OPTIONS,
    *,
    timeline: Timeline | None = None,
    weights_are_here: bool = True,
) -> Prefetch:
    """What has been shown the manifest as its parser would."""
    reader = Prefetch(source, options, timeline=timeline, weights_are_here=weights_are_here)
    for part in manifest.parts:
        if reader.look(manifest.weight_bytes, manifest.blobs[part.blob], part):
            break
    return reader


def load(store: FaultyStore, source: HttpSource, reader: Prefetch) -> None:
    with WeightLoad(source, store.built.manifest, options=OPTIONS, prefetch=reader) as load:
        check_load(load, store.built)


def asked_for(store: FaultyStore) -> list[tuple[str, int, int]]:
    return [(entry.key, entry.start or 0, entry.end or 0) for entry in store.server.log()]


def test_every_byte_is_asked_for_once_and_those_ahead_before_all_others(
    store: FaultyStore, source: HttpSource
) -> None:
    manifest = store.built.manifest
    first = manifest.parts[0]
    assert first.size_bytes > NUM_SLICES * SLICE_BYTES
    reader = begun(source, manifest, timeline=(timeline := Timeline()))
    slices = [(first.offset_bytes + SLICE_BYTES * number, SLICE_BYTES) for number in range(NUM_SLICES)]
    load(store, source, reader)
    asked = sorted((start, end) for _, start, end in asked_for(store))
    assert set(asked) >= {(start, start + size) for start, size in slices}
    assert sum(end - start for start, end in asked) == sum(part.size_bytes for part in manifest.parts)
    spans = [(span.lane, span.name, span.attributes) for span in timeline.spans()]
    assert spans == [("fetch", "ahead", {"bytes": SLICE_BYTES})] * NUM_SLICES


@pytest.mark.parametrize("seed", range(5))
def test_whatever_ranges_take_it_in_whatever_order_it_is_what_is_stored(
    store: FaultyStore, source: HttpSource, seed: int
) -> None:
    manifest = store.built.manifest
    first, blob = manifest.parts[0], manifest.blobs[0].name
    stored, _ = store.built.store.read(blob, max_bytes=1 << 30)
    reader = begun(source, manifest)
    rng = random.Random(seed)
    end = NUM_SLICES * SLICE_BYTES
    cuts = sorted({first.offset_bytes, end, *rng.sample(range(first.offset_bytes + 1, end), 9)})
    ranges = list(itertools.pairwise(cuts))
    rng.shuffle(ranges)
    for start, end in ranges:
        memory, at = bytearray(end - start), start
        while at < end:
            taken = reader.take(blob, at, memoryview(memory)[at - start :])
            assert taken is not None
            assert taken.version is not None
            at += taken.num_bytes
        assert memory == stored[start:end]
    assert all(reader.take(blob, start, memoryview(bytearray(9))) is None for start, _ in ranges)
    assert slices_of(reader) == []


def test_no_reader_gets_bytes_of_another_place(store: FaultyStore, source: HttpSource) -> None:
    manifest = store.built.manifest
    first, blob = manifest.parts[0], manifest.blobs[0].name
    reader = begun(source, manifest)
    memory = memoryview(bytearray(9))
    assert reader.take("another", first.offset_bytes, memory) is None
    assert reader.take(blob, first.offset_bytes + NUM_SLICES * SLICE_BYTES, memory) is None


def test_with_rows_on_demand_the_first_groups_parts_are_passed_over(
    store: FaultyStore, source: HttpSource
) -> None:
    manifest = store.built.manifest
    second = next(part for part in manifest.parts if part.group == 1)
    begun(source, manifest, OPTIONS._replace(on_demand=True)).take(
        manifest.blobs[second.blob].name, second.offset_bytes, memoryview(bytearray(1))
    )
    assert min(start for _, start, _ in asked_for(store)) == second.offset_bytes


@pytest.mark.parametrize(
    "options",
    [
        {"available_bytes": ROOM_BYTES + MIB},
        {"available_bytes": ROOM_BYTES + 2 * MIB, "reserved_bytes": MIB},
        {"cache_dir": "cache"},
    ],
)
def test_nothing_is_read_where_there_may_be_no_room_or_no_need(
    store: FaultyStore, source: HttpSource, options: dict[str, object]
) -> None:
    manifest = store.built.manifest
    assert manifest.weight_bytes > MIB
    reader = begun(source, manifest, OPTIONS._replace(**options))
    assert slices_of(reader) == []
    assert asked_for(store) == []


def test_weights_of_another_device_need_no_room_here(store: FaultyStore, source: HttpSource) -> None:
    options = OPTIONS._replace(available_bytes=ROOM_BYTES, reserved_bytes=MIB)
    assert slices_of(begun(source, store.built.manifest, options, weights_are_here=False))


def test_what_is_on_this_machine_is_not_asked_for_ahead(store: FaultyStore) -> None:
    assert slices_of(begun(store.built.store, store.built.manifest)) == []


def test_what_fails_is_left_to_the_load(store: FaultyStore, source: HttpSource) -> None:
    failures = iter(range(NUM_SLICES))
    store.set_fault(lambda request: Fault(status=404) if next(failures, None) is not None else None)
    reader = begun(source, store.built.manifest)
    for each in slices_of(reader):
        assert each.done.wait(WAIT_S)
        assert each.has_failed
    load(store, source, reader)


def test_a_bit_that_was_flipped_ahead_is_found_and_fetched_again(
    store: FaultyStore, source: HttpSource
) -> None:
    lock, flips = threading.Lock(), iter(range(NUM_SLICES))

    def flip(request: Request) -> Fault | None:
        with lock:
            return Fault(flip_bit=8) if next(flips, None) is not None else None

    store.set_fault(flip)
    reader = begun(source, store.built.manifest)
    for each in slices_of(reader):
        assert each.done.wait(WAIT_S)
    load(store, source, reader)


def test_a_bit_that_stays_flipped_is_refused(store: FaultyStore, source: HttpSource) -> None:
    store.set_fault(lambda _: Fault(flip_bit=8))
    with pytest.raises(IntegrityError):
        load(store, source, begun(source, store.built.manifest))


def test_what_was_read_ahead_binds_the_load_to_its_version(store: FaultyStore, source: HttpSource) -> None:
    manifest = store.built.manifest
    reader = begun(source, manifest)
    for each in slices_of(reader):
        assert each.done.wait(WAIT_S)
    path = store.folder / manifest.blobs[0].name
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content)  # the same bytes, which no version shows
    with pytest.raises(ChangedError):
        load(store, source, reader)


def test_a_manifest_is_shown_part_by_part_before_it_is_checked() -> None:
    built = whole_parts()
    data = dump_manifest(built.manifest)
    seen: list[Part] = []

    def look(weight_bytes: int, blob: Blob, part: Part) -> bool:
        assert weight_bytes == built.manifest.weight_bytes
        assert blob == built.manifest.blobs[part.blob]
        seen.append(part)
        return len(seen) == 3

    assert parse_manifest(data, look=look) == parse_manifest(data)
    assert tuple(seen) == built.manifest.parts[:3]
    size = f'"size":{built.manifest.parts[-1].size_bytes},'.encode()
    damaged = b'"size":1,'.join(without_own_digest(data).rsplit(size, 1))
    seen.clear()
    with pytest.raises(ManifestError):
        parse_manifest(damaged, look=look)
    assert len(seen) == 3


def test_a_part_of_a_missing_blob_is_never_shown() -> None:
    built = whole_parts()
    data = without_own_digest(dump_manifest(built.manifest)).replace(b'"blob":0,', b'"blob":7,')

    def look(weight_bytes: int, blob: Blob, part: Part) -> bool:
        assert blob == built.manifest.blobs[1]
        return False

    with pytest.raises(ManifestError, match="there is no blob 7"):
        parse_manifest(data, look=look)


def test_a_pinned_manifest_that_was_replaced_is_never_shown(store: FaultyStore) -> None:
    data = dump_manifest(store.built.manifest)

    def look(weight_bytes: int, blob: Blob, part: Part) -> bool:
        raise AssertionError(part)

    with pytest.raises(IntegrityError):
        parse_manifest(data, expected_digest=bytes(32), look=look)
