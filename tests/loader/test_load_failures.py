"""Loads that fail: the errors of readers, no use of unverified bytes, and the end of every thread."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from blake3 import blake3
from tests.support.artifacts import BuiltArtifact, build_artifact
from tests.support.inspection import threads_of
from tests.support.memory_store import MemoryStore
from tests.support.paced import WAIT_S, PacedSource, reads_of

from teneral.loader.errors import (
    ChangedError,
    IntegrityError,
    LoadCancelledError,
    SourceClosedError,
    TeneralError,
    UnavailableError,
)
from teneral.loader.format.manifest import Tier
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.load.queue import WorkQueue
from teneral.loader.load.targets import base
from teneral.loader.timeline import Timeline

LAYERS = [(f"layers.{number}", {f"w{number}": ("BF16", (100, 100))}) for number in range(4)]


def part_of(built: BuiltArtifact, group: str, tier: Tier = Tier.DRAFT):
    return built.parts_of(group, tier)[0]


def assert_ended(load: WeightLoad) -> None:
    assert load.join(WAIT_S)
    assert not [thread for thread in threads_of(load) if thread.is_alive()]


def test_a_read_that_fails_ends_the_load_and_names_part_and_source() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    bad = part_of(built, "layers.2")
    source.fail(
        lambda: UnavailableError("503 Slow Down", source="s3://bucket", hint="Try later.", retry_after_s=3),
        reads_of(built.manifest, bad),
    )
    held = source.hold(reads_of(built.manifest, bad))
    with WeightLoad(source, built.manifest, options=LoadOptions(connections=1)) as load:
        load.start()
        load.wait(1, timeout_s=WAIT_S)
        held.release()
        with pytest.raises(
            UnavailableError, match=r"part 2 \(layers\.2 draft, bytes \[\d+, \d+\) of blobs/draft"
        ) as caught:
            load.wait(3, timeout_s=WAIT_S)
        assert "memory://objects" in str(caught.value)
        assert "503 Slow Down" in str(caught.value)
        assert (caught.value.hint, caught.value.retry_after_s) == ("Try later.", 3)
        assert isinstance(caught.value.__cause__, UnavailableError)
        assert load.progress().state is LoadState.FAILED
        load.wait(1)  # what had arrived stays usable
        assert load.array("w1").tobytes() == built.originals["w1"].tobytes()
        assert_ended(load)


def test_a_failure_reaches_every_waiting_reader() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    source.fail(lambda: UnavailableError("gone"))
    load = WeightLoad(source, built.manifest)
    with ThreadPoolExecutor(6) as pool:
        waits = [pool.submit(load.wait, group, tier) for group in (0, 3) for tier in Tier]
        load.start()
        errors = [each.exception(WAIT_S) for each in waits]
    load.close()
    assert all(isinstance(error, UnavailableError) for error in errors)
    assert len({id(error) for error in errors}) == len(waits)


def test_a_wrong_digest_is_fetched_again_and_used_when_right() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    bad = part_of(built, "layers.1", Tier.REFINE)
    source.spoil(reads_of(built.manifest, bad), times=1)
    timeline = Timeline()
    with WeightLoad(source, built.manifest, timeline=timeline) as load:
        load.start()
        for group in range(4):
            load.wait(group, timeout_s=WAIT_S)
            assert load.array(f"w{group}").tobytes() == built.originals[f"w{group}"].tobytes()
        load.join(WAIT_S)
        statistics = load.statistics()
        assert statistics.num_refetched_parts == 1
        assert statistics.fetch.size_bytes == statistics.stored_bytes + bad.size_bytes
        assert load.progress().fetched_bytes == statistics.stored_bytes
    verdicts = [
        span.attributes["right"]
        for span in timeline.spans()
        if span.lane == "verify" and span.attributes["part"] == bad.index
    ]
    assert verdicts == [False, True]


def test_a_part_fetched_again_needs_no_new_staging() -> None:
    built = build_artifact(LAYERS, draft_elements=2_000, refine_elements=1_500)
    source = PacedSource(built.store)
    bad = [part_of(built, "layers.0"), *built.parts_of("layers.2", Tier.REFINE)]
    for part in bad:
        source.spoil(reads_of(built.manifest, part), times=1)
    options = LoadOptions(staging_bytes=0, connections=4, range_bytes=400)
    with WeightLoad(source, built.manifest, options=options) as load:
        load.start()
        for group in range(4):
            load.wait(group, timeout_s=WAIT_S)
            assert load.array(f"w{group}").tobytes() == built.originals[f"w{group}"].tobytes()
        assert load.statistics().num_refetched_parts == len(bad)


def test_a_digest_that_stays_wrong_is_refused_by_name_and_nothing_of_it_is_used() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    bad = part_of(built, "layers.2")
    source.spoil(reads_of(built.manifest, bad), times=1_000_000)
    with WeightLoad(source, built.manifest, options=LoadOptions(connections=2)) as load:
        load.slab(2)[:] = 0xFF
        load.start()
        with pytest.raises(
            IntegrityError, match=r"part 2 \(layers\.2 draft, bytes \[\d+, \d+\) of blobs/draft"
        ) as caught:
            load.wait(2, timeout_s=WAIT_S)
        assert "memory://objects" in caught.value.where
        assert bad.digest is not None
        assert caught.value.expected == bad.digest.hex()
        assert len(caught.value.got) == 64
        assert caught.value.got != caught.value.expected
        assert "verify" in caught.value.hint
        assert np.all(load.slab(2) == 0xFF)
        assert_ended(load)
    asked = [call for call in source.calls if reads_of(built.manifest, bad)(call)]
    assert len(asked) == 2


def test_a_truncated_blob_is_refused_by_the_part_that_is_not_there() -> None:
    built = build_artifact(LAYERS)
    blob = built.manifest.blobs[0]
    whole, _ = built.store.read(blob.name, max_bytes=1 << 30)
    store = MemoryStore({blob.name: whole[:-100], built.manifest.blobs[1].name: b""})
    with WeightLoad(store, built.manifest, options=LoadOptions(connections=1)) as load:
        load.start()
        with pytest.raises(ChangedError, match=r"part 4 \(layers\.0 refine.*blobs/refine-000"):
            load.wait(3, timeout_s=WAIT_S)
    tail = MemoryStore({blob.name: whole[:-100]})
    only_draft = built.manifest._replace(parts=built.manifest.parts[:4])
    with WeightLoad(tail, only_draft, options=LoadOptions(connections=1)) as load:
        load.start()
        with pytest.raises(ChangedError, match=r"part 3 \(layers\.3 draft.*truncated"):
            load.wait(3, timeout_s=WAIT_S)


def test_a_part_that_is_as_stored_but_does_not_decode_is_refused_by_name() -> None:
    built = build_artifact(LAYERS)
    part = part_of(built, "layers.1")
    blob = built.manifest.blobs[part.blob]
    data = bytearray(built.store.read(blob.name, max_bytes=1 << 30)[0])
    data[part.offset_bytes : part.offset_bytes + 4] = b"\0\0\0\0"  # no zstd frame begins like this
    built.store.put(blob.name, bytes(data))
    digest = blake3(data[part.offset_bytes : part.offset_bytes + part.size_bytes]).digest()
    parts = tuple(
        each._replace(digest=digest) if each.index == part.index else each for each in built.manifest.parts
    )
    with WeightLoad(built.store, built.manifest._replace(parts=parts)) as load:
        load.start()
        with pytest.raises(IntegrityError, match=r"part 1 \(layers\.1 draft.*w1"):
            load.wait(1, timeout_s=WAIT_S)
        assert_ended(load)


def test_a_source_that_is_closed_under_a_load_ends_it() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    held = source.hold()
    with WeightLoad(source, built.manifest) as load:
        load.start()
        held.wait_reached()
        source.close()
        with pytest.raises(SourceClosedError, match=r"part \d .*given up"):
            load.wait(0, timeout_s=WAIT_S)
        assert_ended(load)


def test_a_defect_in_a_source_is_reported_as_one() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    source.fail(lambda: ZeroDivisionError("division by zero"))
    with WeightLoad(source, built.manifest) as load:
        load.start()
        with pytest.raises(TeneralError, match=r"part \d .*ZeroDivisionError: division by zero") as caught:
            load.wait(0, timeout_s=WAIT_S)
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        assert "report" in caught.value.hint


def test_cancelling_wakes_waiting_threads_and_ends_reads_on_their_way() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    held = source.hold(reads_of(built.manifest, part_of(built, "layers.1"), part_of(built, "layers.3")))
    load = WeightLoad(source, built.manifest, options=LoadOptions(connections=2))
    with ThreadPoolExecutor(1) as pool:
        load.start()
        held.wait_reached()
        waiting = pool.submit(load.wait, 3)
        load.cancel()
        assert isinstance(waiting.exception(WAIT_S), LoadCancelledError)
    assert source.closed
    assert_ended(load)
    assert load.progress().state is LoadState.CANCELLED
    with pytest.raises(LoadCancelledError):
        load.wait(1)


def test_cancelling_while_fetchers_wait_for_staging_ends_them() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    held = source.hold(reads_of(built.manifest, part_of(built, "layers.0")))
    load = WeightLoad(source, built.manifest, options=LoadOptions(connections=8, staging_bytes=0))
    load.start()
    held.wait_reached()
    load.close()
    assert_ended(load)


def test_closing_a_finished_load_leaves_the_source_open() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    load = WeightLoad(source, built.manifest)
    load.start()
    load.join(WAIT_S)
    load.cancel()
    load.close()
    load.close()
    assert not source.closed
    assert load.progress().state is LoadState.EXACT
    load.wait(3)


def test_closing_a_failed_load_does_not_wait_for_reads_that_hang() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    held = source.hold(reads_of(built.manifest, part_of(built, "layers.0")))
    source.fail(lambda: UnavailableError("gone"), reads_of(built.manifest, part_of(built, "layers.1")))
    load = WeightLoad(source, built.manifest)
    load.start()
    held.wait_reached()
    with pytest.raises(UnavailableError):
        load.wait(3, timeout_s=WAIT_S)
    assert not load.join(0)
    load.close()
    assert_ended(load)
    with pytest.raises(UnavailableError):
        load.wait(3)


def test_a_load_that_was_cancelled_first_never_reads() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    load = WeightLoad(source, built.manifest)
    load.cancel()
    load.start()
    with pytest.raises(LoadCancelledError):
        load.wait(0)
    assert load.join(0)
    assert source.calls == []
    assert not source.closed


def test_closing_a_load_that_never_started_lets_waiters_go() -> None:
    built = build_artifact(LAYERS)
    load = WeightLoad(built.store, built.manifest)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(load.wait, 0)
        load.close()
        assert isinstance(waiting.exception(WAIT_S), LoadCancelledError)


def test_many_loads_cancelled_at_any_moment_leave_no_thread() -> None:
    built = build_artifact(LAYERS, draft_elements=2_000, refine_elements=1_500)
    before = set(threading.enumerate())
    for seed in range(25):
        source = PacedSource(built.store.reopen())
        source.delay(seed=seed, max_s=0.001)
        load = WeightLoad(source, built.manifest, options=LoadOptions(range_bytes=500, staging_bytes=8192))
        load.start()
        if seed % 5:
            load.wait(seed % 4, Tier.DRAFT, timeout_s=WAIT_S)
        load.close()
        assert_ended(load)
        load.check_integrity()
    assert set(threading.enumerate()) <= before  # others' threads may end meanwhile


def test_readers_that_the_system_refuses_leave_the_load_to_those_that_there_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    held = source.hold(reads_of(built.manifest, part_of(built, "layers.1")))
    start, refused = threading.Thread.start, []

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "teneral-fetch-3":
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with WeightLoad(source, built.manifest, options=LoadOptions(connections=1)) as load:
        load.start()
        monkeypatch.setattr(WorkQueue, "connections", 8)  # as if more had turned out to be faster
        held.release()
        for group in built.manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        assert_ended(load)
    assert len(refused) == 1


def test_a_load_whose_last_thread_is_refused_is_complete_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    built = build_artifact(LAYERS)
    monkeypatch.setattr(base, "MIN_HUGE_BYTES", 0)
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:
        if thread.name == "teneral-huge-pages":
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with WeightLoad(built.store, built.manifest) as load:
        load.start()
        for group in built.manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        assert_ended(load)
        assert load.progress().state is LoadState.EXACT
