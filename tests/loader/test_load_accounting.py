"""A load's progress, statistics and timeline, and the memory that it needs."""

from __future__ import annotations

import pytest
from tests.support.artifacts import build_artifact
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.weight_loads import LAYERS, assert_group_holds, poisoned

from teneral.loader.errors import InsufficientMemoryError, UsageError
from teneral.loader.format.manifest import Tier
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.timeline import Timeline


def test_progress_counts_up_to_everything() -> None:
    built = build_artifact(LAYERS, draft_elements=5_000, refine_elements=4_000)
    source = PacedSource(built.store)
    held = source.hold(reads_of(built.manifest, *built.parts_of("layers.1", Tier.DRAFT)))
    with WeightLoad(source, built.manifest, options=LoadOptions(connections=1)) as load:
        idle = load.progress()
        assert (idle.state, idle.fetched_bytes, idle.parts_decoded) == (LoadState.IDLE, 0, 0)
        assert idle.num_parts == len(built.manifest.parts)
        load.start()
        for group in (0, 1):  # two decoders may end them in either order
            load.wait(group, timeout_s=WAIT_S)
        held.wait_reached()
        halfway = load.progress()
        assert halfway.state is LoadState.LOADING
        assert (halfway.groups_ready_draft, halfway.groups_exact, halfway.num_groups) == (2, 2, 4)
        expected = [
            part.size_bytes
            for group in (0, 1)
            for tier in Tier
            for part in built.manifest.parts_of(group, tier)
        ]
        assert halfway.fetched_bytes == sum(expected)
        assert halfway.parts_decoded == len(expected)
        held.release()
        load.join(WAIT_S)
        done = load.progress()
        assert done.state is LoadState.EXACT
        assert (
            done.fetched_bytes
            == done.stored_bytes_total
            == sum(part.size_bytes for part in built.manifest.parts)
        )
        assert done.parts_decoded == done.num_parts
        assert done.groups_exact == done.groups_ready_draft == 4


def test_statistics_account_for_every_byte_and_read() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    with WeightLoad(source, built.manifest, options=LoadOptions(range_bytes=10_000)) as load:
        assert load.statistics().elapsed_s == 0
        load.start()
        load.join(WAIT_S)
        statistics = load.statistics()
        stored = sum(part.size_bytes for part in built.manifest.parts)
        assert statistics.stored_bytes == stored
        assert (
            statistics.fetch.size_bytes
            == statistics.verify.size_bytes
            == statistics.decode.size_bytes
            == stored
        )
        assert statistics.num_reads == len(source.calls)
        assert statistics.unverified_bytes == statistics.direct_bytes == statistics.num_refetched_parts == 0
        assert statistics.weight_bytes == sum(group.slab_bytes for group in built.manifest.groups)
        assert 0 < statistics.staging_peak_bytes <= statistics.staging_capacity_bytes
        assert statistics.elapsed_s > 0


def test_the_timeline_tells_the_way_of_every_part() -> None:
    built = build_artifact(LAYERS, draft_elements=5_000, refine_elements=4_000)
    timeline = Timeline()
    with WeightLoad(built.store, built.manifest, timeline=timeline) as load:
        load.start()
        load.join(WAIT_S)
    by_part: dict[int, dict[str, tuple[float, float]]] = {}
    for span in timeline.spans():
        if "part" in span.attributes:
            by_part.setdefault(span.attributes["part"], {})[span.lane] = (span.start_s, span.end_s)
    assert sorted(by_part) == [part.index for part in built.manifest.parts]
    for lanes in by_part.values():
        times = [*lanes["fetch"], *lanes["verify"], *lanes["decode"]]
        assert times == sorted(times)
    marks = [span.name for span in timeline.spans() if span.lane == "ready"]
    assert sorted(marks) == sorted(
        f"{name} {reached}" for name, _ in LAYERS for reached in ("draft", "exact")
    )
    whole = timeline.first("fetch", "load")
    assert whole is not None
    assert whole.attributes["state"] == "exact"
    assert all(whole.start_s <= start for lanes in by_part.values() for start, _ in lanes.values())
    one = next(span for span in timeline.spans() if span.lane == "decode" and span.attributes["part"] == 0)
    assert one.name == "embed draft"
    assert one.attributes == {
        "group": "embed",
        "tier": "draft",
        "part": 0,
        "bytes": built.manifest.parts[0].size_bytes,
    }


def test_a_group_is_marked_ready_before_waiting_threads_go_on() -> None:
    built = build_artifact(LAYERS)
    timeline = Timeline()
    with WeightLoad(built.store, built.manifest, timeline=timeline) as load:
        load.start()
        for group, (name, _) in enumerate(LAYERS):
            load.wait(group, timeout_s=WAIT_S)
            assert timeline.first("ready", f"{name} exact") is not None


def test_what_does_not_fit_is_refused_before_anything_is_read() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    with pytest.raises(InsufficientMemoryError, match="memory://objects") as caught:
        WeightLoad(source, built.manifest, options=LoadOptions(available_bytes=1000))
    assert caught.value.available_bytes == 1000
    assert caught.value.needed_bytes >= built.manifest.weight_bytes
    assert source.calls == []


def test_staging_counts_towards_the_memory_that_is_needed() -> None:
    built = build_artifact(LAYERS)
    enough = LoadOptions(available_bytes=built.manifest.weight_bytes + 10 * 1024 * 1024)
    assert WeightLoad(built.store, built.manifest, options=enough).progress().state is LoadState.IDLE
    with pytest.raises(InsufficientMemoryError):
        WeightLoad(
            built.store, built.manifest, options=LoadOptions(available_bytes=built.manifest.weight_bytes)
        )


def test_a_refusal_says_what_the_memory_would_be_for() -> None:
    built = build_artifact(LAYERS)
    options = LoadOptions(available_bytes=64 << 20, reserved_bytes=64 << 20)
    with pytest.raises(
        InsufficientMemoryError,
        match=r"needs 64 MiB of memory \(weights 0, .* at least 0, keys and values at least 64, .* another 0\), but 64",
    ) as caught:
        WeightLoad(built.store, built.manifest, options=options)
    largest = max(part.size_bytes for part in built.manifest.parts)
    extra = caught.value.needed_bytes - built.manifest.weight_bytes - (64 << 20)
    assert largest <= extra < largest + 4096


def test_a_model_that_fits_with_one_part_of_staging_is_loaded() -> None:
    built = build_artifact(LAYERS)
    largest = max(part.size_bytes for part in built.manifest.parts)
    room = LoadOptions(available_bytes=built.manifest.weight_bytes + largest + 4096)
    with poisoned(WeightLoad(built.store, built.manifest, options=room)) as load:
        load.start()
        for group in range(len(LAYERS)):
            load.wait(group, timeout_s=WAIT_S)
            assert_group_holds(load, built, group, Tier.REFINE)
        assert load.statistics().staging_capacity_bytes < largest + 4096


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("connections", 0),
        ("connections", 1000),
        ("range_bytes", 0),
        ("staging_bytes", -1),
        ("decode_threads", 0),
    ],
)
def test_invalid_options_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(UsageError, match=field) as caught:
        LoadOptions(**{field: value})
    assert caught.value.key == field
