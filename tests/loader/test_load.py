"""Whole loads: what is in the slabs when a gate opens, in whatever order bytes arrive."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.artifacts import build_artifact
from tests.support.checkpoints import llama_contents, model_store
from tests.support.memory_store import MemoryStore
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.weight_loads import LAYERS, assert_group_holds, poisoned

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import UnavailableError
from teneral.loader.format.manifest import Tier
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.plan import RowParts
from teneral.loader.tools.pack.pack import pack


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.002)


dtypes = st.sampled_from(["BF16", "BF16", "BF16", "F16", "F32", "U8", "I64", "BOOL", "F8_E4M3", "F4"])


shapes = st.one_of(
    st.tuples(st.integers(0, 60), st.integers(1, 50).map(lambda half: 2 * half)),
    st.tuples(st.integers(0, 300).map(lambda half: 2 * half)),
    st.just((2,)),
)


@st.composite
def layouts(draw: st.DrawFn) -> list[tuple[str, dict[str, tuple[str, tuple[int, ...]]]]]:
    groups = []
    for group in range(draw(st.integers(1, 5))):
        tensors = draw(st.lists(st.tuples(dtypes, shapes), max_size=5))
        groups.append(
            (f"group.{group}", {f"g{group}.t{number}": entry for number, entry in enumerate(tensors)})
        )
    return groups


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layout=layouts(),
    seed=st.integers(0, 2**32 - 1),
    packed=st.booleans(),
    cuts=st.tuples(st.integers(500, 9_000), st.integers(500, 9_000)),
    order=st.sampled_from(Order),
    connections=st.integers(1, 6),
    decode_threads=st.integers(1, 3),
    staging_bytes=st.sampled_from([0, 8192, 1 << 20]),
    range_bytes=st.integers(700, 20_000),
    data=st.data(),
)
def test_gates_open_over_exact_values_however_bytes_arrive(
    layout: list[tuple[str, dict[str, tuple[str, tuple[int, ...]]]]],
    seed: int,
    packed: bool,
    cuts: tuple[int, int],
    order: Order,
    connections: int,
    decode_threads: int,
    staging_bytes: int,
    range_bytes: int,
    data: st.DataObject,
) -> None:
    built = build_artifact(layout, seed=seed, packed=packed, draft_elements=cuts[0], refine_elements=cuts[1])
    source = PacedSource(built.store)
    source.delay(seed=seed, max_s=0.001)
    options = LoadOptions(
        connections=connections,
        decode_threads=decode_threads,
        staging_bytes=staging_bytes,
        range_bytes=range_bytes,
        order=order,
    )
    with poisoned(WeightLoad(source, built.manifest, options=options)) as load:
        load.start()
        for group in data.draw(st.permutations(range(len(layout)))):
            load.wait(group, Tier.REFINE, timeout_s=WAIT_S)
            assert_group_holds(load, built, group, Tier.REFINE)
        assert load.join(WAIT_S)
        load.check_integrity()
        assert load.progress().state is LoadState.EXACT
        assert load.statistics().staging_peak_bytes <= load.statistics().staging_capacity_bytes


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layout=layouts(),
    seed=st.integers(0, 2**32 - 1),
    cuts=st.tuples(st.integers(500, 9_000), st.integers(500, 9_000)),
)
def test_the_draft_is_whole_while_no_refinement_has_come(
    layout: list[tuple[str, dict[str, tuple[str, tuple[int, ...]]]]], seed: int, cuts: tuple[int, int]
) -> None:
    built = build_artifact(layout, seed=seed, draft_elements=cuts[0], refine_elements=cuts[1])
    source = PacedSource(built.store)
    source.delay(seed=seed, max_s=0.001)
    refinements = [part for part in built.manifest.parts if part.tier is Tier.REFINE]
    held = source.hold(reads_of(built.manifest, *refinements))
    options = LoadOptions(order=Order.DRAFT_FIRST, connections=3, range_bytes=5_000)
    with poisoned(WeightLoad(source, built.manifest, options=options)) as load:
        load.start()
        for group in range(len(layout)):
            load.wait(group, Tier.DRAFT, timeout_s=WAIT_S)
            assert_group_holds(load, built, group, Tier.DRAFT)
            assert load.is_ready(group, Tier.REFINE) == (built.manifest.parts_of(group, Tier.REFINE) == ())
        held.release()
        for group in range(len(layout)):
            load.wait(group, Tier.REFINE, timeout_s=WAIT_S)
            assert_group_holds(load, built, group, Tier.REFINE)


def test_a_refinement_that_arrives_before_its_draft_waits_for_it() -> None:
    built = build_artifact(
        [("only", {"w": ("BF16", (100, 100))})], draft_elements=10_000, refine_elements=5_000
    )
    source = PacedSource(built.store)
    (draft,) = built.parts_of("only", Tier.DRAFT)
    held = source.hold(reads_of(built.manifest, draft))
    refine_bytes = built.manifest.stored_bytes(Tier.REFINE)
    with poisoned(WeightLoad(source, built.manifest)) as load:
        load.start()
        wait_until(lambda: load.progress().fetched_bytes == refine_bytes)
        assert load.progress().parts_decoded == 0
        held.release()
        load.wait(0, timeout_s=WAIT_S)
        assert_group_holds(load, built, 0, Tier.REFINE)


def test_parts_that_are_asked_for_come_before_all_that_has_no_turn_yet() -> None:
    built = build_artifact(LAYERS, draft_elements=3_000, refine_elements=3_000)
    source = PacedSource(built.store)
    held = source.hold()
    options = LoadOptions(connections=1, on_demand=True)
    table = RowParts(built.manifest, "embed")
    wanted = table.holding([0, 150])
    assert 0 < len(wanted) < len(table.all)
    with poisoned(WeightLoad(source, built.manifest, options=options)) as load:
        load.start()
        held.wait_reached()
        load.want_parts(wanted)
        held.release()
        load.wait_parts(wanted, timeout_s=WAIT_S)
        rows = load.array("embed")
        expected = built.originals["embed"].view("<u2").reshape(rows.shape)
        assert np.array_equal(rows[[0, 150]], expected[[0, 150]])
        load.wait(3, timeout_s=WAIT_S)
        load.wait(0, timeout_s=WAIT_S)
        assert_group_holds(load, built, 0, Tier.REFINE)
        assert load.wanted_parts() == wanted
    first = reads_of(built.manifest, built.parts_of("layers.0", Tier.DRAFT)[0])
    assert first(source.calls[0])
    asked = reads_of(built.manifest, *(built.manifest.parts[number] for number in wanted))
    others = reads_of(built.manifest, *(part for part in built.manifest.parts if part.index not in wanted))
    came = [asked(call) for call in source.calls[1:]]
    assert came == sorted(came, reverse=True)
    assert sum(others(call) and asked(call) for call in source.calls) == 0


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1000), data=st.data())
def test_rows_hold_their_values_as_soon_as_their_parts_are_there_in_whatever_order_ranges_arrive(
    seed: int, data: st.DataObject
) -> None:
    built = build_artifact(LAYERS, seed=seed, draft_elements=2_000, refine_elements=1_500)
    source = PacedSource(built.store)
    source.delay(seed=seed, max_s=0.002)
    table = RowParts(built.manifest, "embed")
    options = LoadOptions(
        on_demand=True, range_bytes=1_000, staging_bytes=data.draw(st.sampled_from([0, 1 << 20]))
    )
    wishes = data.draw(st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=5), max_size=5))
    expected = built.originals["embed"].view("<u2").reshape(300, 64)
    with poisoned(WeightLoad(source, built.manifest, options=options)) as load:
        load.start()
        for rows in wishes:
            load.wait_parts(table.holding(rows), timeout_s=WAIT_S)
            assert np.array_equal(load.array("embed")[rows], expected[rows])
        for group in range(len(LAYERS)):
            load.wait(group, timeout_s=WAIT_S)
            assert_group_holds(load, built, group, Tier.REFINE)
        assert load.join(WAIT_S)
        load.check_integrity()


def test_a_failed_load_fails_the_wait_for_its_parts() -> None:
    built = build_artifact(LAYERS, draft_elements=3_000, refine_elements=3_000)
    source = PacedSource(built.store)
    source.fail(lambda: UnavailableError("gone"))
    with WeightLoad(source, built.manifest, options=LoadOptions(on_demand=True)) as load:
        load.start()
        with pytest.raises(UnavailableError, match="gone"):
            load.wait_parts(RowParts(built.manifest, "embed").all, timeout_s=WAIT_S)
        assert isinstance(load.failure, UnavailableError)


def test_staging_for_a_single_part_feeds_many_connections_without_a_deadlock() -> None:
    built = build_artifact(LAYERS, draft_elements=3_000, refine_elements=2_000)
    source = PacedSource(built.store)
    source.delay(seed=5, max_s=0.002)
    options = LoadOptions(connections=16, staging_bytes=0, range_bytes=512, decode_threads=4)
    with poisoned(WeightLoad(source, built.manifest, options=options)) as load:
        load.start()
        for group in reversed(range(len(LAYERS))):
            load.wait(group, timeout_s=WAIT_S)
            assert_group_holds(load, built, group, Tier.REFINE)
        largest = max(part.size_bytes for part in built.manifest.parts)
        assert load.statistics().staging_capacity_bytes < 2 * largest + 4096
        load.check_integrity()


def test_the_first_layer_can_be_used_before_the_last_one_was_asked_for() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    last_group = reads_of(built.manifest, *built.manifest.parts_of(3, Tier.DRAFT))
    held = source.hold(reads_of(built.manifest, *built.manifest.parts_of(2, Tier.DRAFT)))
    with poisoned(WeightLoad(source, built.manifest, options=LoadOptions(connections=1))) as load:
        load.start()
        load.wait(0, timeout_s=WAIT_S)
        load.wait(1, timeout_s=WAIT_S)
        assert_group_holds(load, built, 1, Tier.REFINE)
        assert not any(last_group(call) for call in source.calls)
        assert not load.is_ready(3)
        held.release()
        load.wait(3, timeout_s=WAIT_S)
        assert any(last_group(call) for call in source.calls)


def test_a_refinement_that_is_decoded_twice_changes_nothing() -> None:
    built = build_artifact(LAYERS)
    with WeightLoad(built.store, built.manifest) as load:
        load.start()
        load.wait(1, timeout_s=WAIT_S)
    with WeightLoad(built.store.reopen(), built.manifest) as again:
        again.start()
        again.wait(1, timeout_s=WAIT_S)
        assert np.array_equal(load.slab(1), again.slab(1))


def test_groups_with_nothing_to_load_are_ready_before_the_start() -> None:
    built = build_artifact([("empty", {}), ("hollow", {"w": ("BF16", (0, 8))})])
    load = WeightLoad(built.store, built.manifest)
    assert load.is_ready(0)
    load.wait(1, Tier.REFINE, timeout_s=0)
    assert load.progress().state is LoadState.IDLE
    load.start()
    assert load.progress().state is LoadState.EXACT
    assert load.array("w").shape == (0, 8)
    assert load.join(0)


def test_arrays_have_the_dtype_and_shape_of_their_tensors() -> None:
    expected = {  # stored dtype and shape, and what numpy shows of it
        "bf16": ("BF16", (2, 3), "uint16", (2, 3)),
        "f16": ("F16", (4,), "float16", (4,)),
        "f32": ("F32", (), "float32", ()),
        "bool": ("BOOL", (5,), "bool", (5,)),
        "i64": ("I64", (1, 2), "int64", (1, 2)),
        "c64": ("C64", (3,), "complex64", (3,)),
        "f8": ("F8_E5M2", (2, 2), "uint8", (2, 2)),
        "f4": ("F4", (3, 4), "uint8", (6,)),
    }
    built = build_artifact(
        [("only", {name: (dtype, shape) for name, (dtype, shape, *_) in expected.items()})]
    )
    with WeightLoad(built.store, built.manifest) as load:
        load.start()
        load.wait(0, timeout_s=WAIT_S)
        shown = {name: (str(load.array(name).dtype), load.array(name).shape) for name in expected}
        assert shown == {name: (dtype, shape) for name, (_, _, dtype, shape) in expected.items()}
        assert all(load.array(name).tobytes() == built.originals[name].tobytes() for name in expected)
        with pytest.raises(KeyError):
            load.array("other")


def test_an_alias_is_the_same_memory() -> None:
    built = build_artifact([("only", {"embed": ("BF16", (8, 8))})])
    built.manifest.aliases["head"] = "embed"
    load = WeightLoad(built.store, built.manifest)
    assert np.shares_memory(load.array("head"), load.array("embed"))


def test_weights_stay_when_the_load_is_closed_and_forgotten() -> None:
    built = build_artifact(LAYERS)
    load = WeightLoad(built.store, built.manifest)
    view = load.array("a")
    load.start()
    load.wait(1, timeout_s=WAIT_S)
    load.close()
    del load
    gc.collect()
    assert view.tobytes() == built.originals["a"].tobytes()


def test_slabs_are_the_same_memory_before_and_after_the_load() -> None:
    built = build_artifact(LAYERS)
    with WeightLoad(built.store, built.manifest) as load:
        before = [load.slab(group).ctypes.data for group in range(4)]
        load.start()
        load.wait(3, timeout_s=WAIT_S)
        assert [load.slab(group).ctypes.data for group in range(4)] == before


def test_waiting_before_the_start_is_allowed() -> None:
    built = build_artifact(LAYERS)
    with WeightLoad(built.store, built.manifest) as load:
        waiter = threading.Thread(target=load.wait, args=(3,))
        waiter.start()
        load.start()
        waiter.join(WAIT_S)
        assert not waiter.is_alive()
        assert load.is_ready(3)


def test_a_wait_that_takes_too_long_times_out_and_the_load_goes_on() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    held = source.hold()
    with WeightLoad(source, built.manifest) as load:
        load.start()
        with pytest.raises(TimeoutError):
            load.wait(0, timeout_s=0.01)
        held.release()
        load.wait(0, timeout_s=WAIT_S)
        assert load.is_ready(0)


def test_a_load_starts_once() -> None:
    built = build_artifact(LAYERS)
    with WeightLoad(built.store, built.manifest) as load:
        load.start()
        with pytest.raises(RuntimeError, match="once"):
            load.start()


def test_plain_weights_are_read_straight_into_place_and_counted_as_unverified() -> None:
    layout = [
        ("a", {"w": ("F32", (100, 16))}),
        ("b", {"v": ("BF16", (64, 10)), "odd": ("U8", (7,)), "last": ("U8", (3,))}),
    ]
    built = build_artifact(layout, packed=False)
    with poisoned(WeightLoad(built.store, built.manifest)) as load:
        load.start()
        for group in range(2):
            load.wait(group, timeout_s=WAIT_S)
            assert_group_holds(load, built, group, Tier.REFINE)
        load.join(WAIT_S)
        statistics = load.statistics()
        assert statistics.unverified_bytes == statistics.stored_bytes == 6400 + 1290
        assert statistics.direct_bytes == 6400
        assert statistics.verify.size_bytes == 0


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "plain"])
def test_a_model_directory_loads_bit_for_bit_packed_or_plain(packed: bool) -> None:
    contents = llama_contents()
    directory = model_store(contents, num_shards=3)
    source = directory
    if packed:
        source = MemoryStore()
        pack(directory, source)
    manifest = open_artifact(source)
    with poisoned(WeightLoad(source, manifest, options=LoadOptions(range_bytes=5_000))) as load:
        load.start()
        for group in range(len(manifest.groups)):
            load.wait(group, timeout_s=WAIT_S)
        assert {name: load.array(name).tobytes() for name in contents} == {
            name: data for name, (_, _, data) in contents.items()
        }
        assert load.statistics().unverified_bytes == (0 if packed else load.statistics().stored_bytes)


@pytest.mark.parametrize(("cores", "may_decode"), [(1, False), (2, False), (4, True)])
def test_until_full_speed_decoding_leaves_two_cores_alone(
    cores: int, may_decode: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teneral.loader.load.load.available_cores", lambda: cores)
    built = build_artifact(LAYERS)
    full_speed = threading.Event()
    with WeightLoad(built.store, built.manifest, full_speed=full_speed) as load:
        load.start()
        stored = sum(part.size_bytes for part in built.manifest.parts)
        wait_until(lambda: load.progress().fetched_bytes == stored)
        if may_decode:
            load.wait(len(LAYERS) - 1, timeout_s=WAIT_S)
        else:
            assert load.progress().parts_decoded == 0
        full_speed.set()
        for group in range(len(LAYERS)):
            load.wait(group, timeout_s=WAIT_S)
            assert_group_holds(load, built, group, Tier.REFINE)


@pytest.mark.parametrize("when", ["before the start", "while parts arrive"])
def test_whenever_full_speed_comes_everything_is_decoded(when: str) -> None:
    built = build_artifact(LAYERS)
    full_speed = threading.Event()
    if when == "before the start":
        full_speed.set()
    options = LoadOptions(connections=2, range_bytes=2000, decode_threads=3)
    with WeightLoad(built.store, built.manifest, options=options, full_speed=full_speed) as load:
        load.start()
        if when == "while parts arrive":
            full_speed.set()
        for group in range(len(LAYERS)):
            load.wait(group, timeout_s=WAIT_S)
            assert_group_holds(load, built, group, Tier.REFINE)
        assert load.join(WAIT_S)
        load.check_integrity()


def test_a_load_that_is_cancelled_before_full_speed_ends() -> None:
    built = build_artifact(LAYERS)
    source = PacedSource(built.store)
    source.hold()
    load = WeightLoad(source, built.manifest, full_speed=threading.Event())
    load.start()
    load.close()
    assert load.join(0)
