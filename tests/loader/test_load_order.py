"""The first tier of a load, the decision about it, and the guarantees for readers of a draft."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.artifacts import BuiltArtifact, build_artifact
from tests.support.checkpoints import llama_contents, model_store
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.store_faults import Fault
from tests.support.store_http import Request
from tests.support.store_server import StoreServer
from tests.support.weight_loads import start_process_load

from teneral.loader.format.manifest import Tier
from teneral.loader.load import policy
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.launch import is_possible
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.process_load import ProcessLoad
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Span, Timeline
from teneral.loader.tools.pack.pack import pack

LAYERS = [(f"layers.{number}", {f"w{number}": ("BF16", (300, 300))}) for number in range(8)]
NEVER_S = 3600.0
needs_memory_files = pytest.mark.skipif(not is_possible(), reason="this system has no memory files")


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline_s, "it did not come about"
        time.sleep(0.002)


def small_parts() -> BuiltArtifact:
    return build_artifact(LAYERS, draft_elements=30_000, refine_elements=20_000)


def slow_source(built: BuiltArtifact, max_s: float = 0.08) -> PacedSource:
    source = PacedSource(built.store)
    source.delay(seed=0, max_s=max_s)
    return source


def tiers_read(source: PacedSource) -> list[str]:
    """Of the blobs, in the order in which ranges were asked for."""
    return [call.name.removeprefix("blobs/").partition("-")[0] for call in source.calls]


def decisions(timeline: Timeline) -> list[Span]:
    return [span for span in timeline.spans() if span.lane == "process" and "why" in span.attributes]


def load_all(load: WeightLoad, built: BuiltArtifact) -> None:
    load.start()
    for group in built.manifest.groups:
        load.wait(group.index, timeout_s=WAIT_S)
    for name, original in built.originals.items():
        assert load.array(name).tobytes() == original.tobytes(), name


def auto(**options: object) -> LoadOptions:
    return LoadOptions(order=Order.AUTO, connections=2, range_bytes=30_000, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("sends_drafts", [False, True])
def test_on_a_slow_link_the_draft_is_chosen_to_come_first_and_the_timeline_says_why(
    sends_drafts: bool,
) -> None:
    built, timeline = small_parts(), Timeline()
    source = slow_source(built)
    with WeightLoad(
        source, built.manifest, options=auto(sends_drafts=sends_drafts), timeline=timeline
    ) as load:
        assert load.order is Order.AUTO
        load_all(load, built)
        assert load.order is load.progress().order is Order.DRAFT_FIRST
    tiers = tiers_read(source)
    assert tiers == sorted(tiers)  # "draft" before "refine"
    (decision,) = decisions(timeline)
    decided = decision.attributes
    assert decision.name == f"draft-first: {decided['why']}"
    assert decided["order"] == "draft-first"
    assert ("sooner" if sends_drafts else "proposals") in str(decided["why"])
    assert 0.2 <= decided["draft_s"] < decided["exact_s"]
    assert decided["rate_bytes_per_s"] > 0
    assert decided["num_proposals"] >= 4


def test_where_all_is_there_before_anything_can_use_it_the_exact_weights_come_in_order() -> None:
    built, timeline = small_parts(), Timeline()
    source = slow_source(built)
    with WeightLoad(
        source, built.manifest, options=auto(ready_s=NEVER_S, sends_drafts=True), timeline=timeline
    ) as load:
        load_all(load, built)
        assert load.order is load.progress().order is Order.EXACT
    tiers = tiers_read(source)
    assert tiers != sorted(tiers)
    assert tiers[-1] == "refine"
    assert sorted((call.name, call.start) for call in source.calls) == sorted(
        {(call.name, call.start) for call in source.calls}
    ), "something was read twice"
    (decision,) = decisions(timeline)
    assert decision.attributes["order"] == "exact"


def test_on_a_link_so_fast_that_nothing_can_be_decided_before_the_end_nothing_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "MIN_WATCHED_S", NEVER_S)  # the load ends before
    built, timeline = small_parts(), Timeline()
    with WeightLoad(PacedSource(built.store), built.manifest, options=auto(), timeline=timeline) as load:
        load_all(load, built)
        assert load.order is Order.AUTO
    assert decisions(timeline) == []


def test_a_model_without_tiers_is_loaded_in_order() -> None:
    layout = [(f"layers.{number}", {f"w{number}": ("U8", (300, 600))}) for number in range(8)]
    built = build_artifact(layout, draft_elements=30_000)
    timeline = Timeline()
    source = slow_source(built)
    with WeightLoad(source, built.manifest, options=auto(sends_drafts=True), timeline=timeline) as load:
        load_all(load, built)
        assert load.order is Order.EXACT
    assert decisions(timeline)[0].attributes["why"] == "there is no refine tier, or nothing left of it"


@pytest.fixture
def cached(tmp_path: Path) -> tuple[BuiltArtifact, Path]:
    """An artifact, and a cache on the node that holds all of it."""
    built = small_parts()
    with WeightLoad(built.store, built.manifest, options=auto(cache_dir=str(tmp_path))) as load:
        load_all(load, built)
        assert load.join_cache(WAIT_S)
    return built, tmp_path


def test_what_the_node_has_is_loaded_in_order_without_waiting_for_a_link_to_show_its_rate(
    cached: tuple[BuiltArtifact, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, folder = cached
    monkeypatch.setattr(policy, "MIN_WATCHED_S", 0.0)
    monkeypatch.setattr(policy, "MAX_WATCHED_S", NEVER_S)
    source, timeline = PacedSource(built.store), Timeline()
    settings = auto(cache_dir=str(folder), ready_s=NEVER_S)
    with WeightLoad(source, built.manifest, options=settings, timeline=timeline) as load:
        load_all(load, built)
        assert load.order is Order.EXACT
    assert source.calls == []
    assert len(decisions(timeline)) == 1


def test_the_speed_of_the_nodes_cache_decides_nothing_about_what_it_lacks(
    cached: tuple[BuiltArtifact, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    built, folder = cached
    lacking = [part for group in (6, 7) for tier in Tier for part in built.manifest.parts_of(group, tier)]
    for part in lacking:
        assert part.digest is not None
        (file,) = folder.rglob(part.digest.hex())
        file.unlink()
    monkeypatch.setattr(policy, "MIN_WATCHED_S", 0.0)
    monkeypatch.setattr(policy, "MAX_WATCHED_S", NEVER_S)
    source, timeline = PacedSource(built.store), Timeline()
    held = source.hold()
    with WeightLoad(source, built.manifest, options=auto(cache_dir=str(folder)), timeline=timeline) as load:
        load.start()
        for group in range(6):
            load.wait(group, Tier.DRAFT, timeout_s=WAIT_S)
        held.wait_reached()
        assert load.order is Order.AUTO
        held.release()
        for group in built.manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        decided = decisions(timeline)[0].attributes
        rate = load.statistics().link.rate_bytes_per_s  # goes on to change, as much as a busy machine likes
        assert rate / 10 < decided["rate_bytes_per_s"] < rate * 100


@pytest.mark.parametrize("order", [Order.EXACT, Order.DRAFT_FIRST])
def test_an_order_that_was_asked_for_is_never_decided_otherwise(order: Order) -> None:
    built, timeline = small_parts(), Timeline()
    options = LoadOptions(order=order, connections=2, range_bytes=30_000)
    with WeightLoad(slow_source(built, 0.03), built.manifest, options=options, timeline=timeline) as load:
        load_all(load, built)
        assert load.order is order
    assert load.statistics().elapsed_s > 0.2
    assert decisions(timeline) == []


def test_draft_first_opens_every_draft_gate_before_any_exact_one() -> None:
    built, timeline = small_parts(), Timeline()
    options = LoadOptions(order=Order.DRAFT_FIRST, connections=1, decode_threads=1, range_bytes=7_000)
    with WeightLoad(PacedSource(built.store), built.manifest, options=options, timeline=timeline) as load:
        load_all(load, built)
    reached = [span.attributes["tier"] for span in timeline.spans() if span.lane == "ready"]
    num_groups = len(LAYERS)
    assert [tier for tier in reached if tier != "sketch"] == ["draft"] * num_groups + ["exact"] * num_groups


def test_how_long_a_load_will_take_is_known_once_bytes_have_come_and_nothing_in_the_end() -> None:
    built = small_parts()
    source = slow_source(built, max_s=0.02)
    refinements = [part for part in built.manifest.parts if part.tier is Tier.REFINE]
    held = source.hold(reads_of(built.manifest, *refinements))
    options = LoadOptions(order=Order.DRAFT_FIRST, connections=2, range_bytes=30_000)
    with WeightLoad(source, built.manifest, options=options) as load:
        assert load.left_s() == float("inf")
        load.start()
        for group in built.manifest.groups:
            load.wait(group.index, Tier.DRAFT, timeout_s=WAIT_S)
        progress = load.progress()
        assert progress.rate_bytes_per_s > 0
        left_bytes = progress.stored_bytes_total - progress.fetched_bytes
        assert progress.left_s == left_bytes / progress.rate_bytes_per_s
        assert progress.left_s > 0
        held.release()
        load_all_that_is_left(load)
        assert load.left_s() == 0.0


def load_all_that_is_left(load: WeightLoad | ProcessLoad) -> None:
    for group in load.manifest.groups:
        load.wait(group.index, timeout_s=WAIT_S)
    assert load.join(WAIT_S)


dtypes = st.sampled_from(["BF16", "BF16", "F16", "F32", "U8"])
shapes = st.tuples(st.integers(1, 60), st.integers(1, 50).map(lambda half: 2 * half))
layouts = st.lists(st.lists(st.tuples(dtypes, shapes), max_size=3), min_size=1, max_size=5).map(
    lambda groups: [
        (f"group.{number}", {f"g{number}.t{index}": entry for index, entry in enumerate(tensors)})
        for number, tensors in enumerate(groups)
    ]
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    layout=layouts,
    packed=st.booleans(),
    cuts=st.tuples(st.integers(500, 9_000), st.integers(500, 9_000)),
    first=st.sampled_from(Order),
    changes=st.lists(st.tuples(st.integers(0, 20), st.sampled_from(Order)), max_size=4),
    connections=st.integers(1, 5),
    decode_threads=st.integers(1, 2),
    on_demand=st.booleans(),
)
def test_a_load_whose_order_changes_on_the_way_reads_everything_once_and_ends_exact(
    layout: list[tuple[str, dict[str, tuple[str, tuple[int, ...]]]]],
    packed: bool,
    cuts: tuple[int, int],
    first: Order,
    changes: list[tuple[int, Order]],
    connections: int,
    decode_threads: int,
    on_demand: bool,
) -> None:
    built = build_artifact(layout, packed=packed, draft_elements=cuts[0], refine_elements=cuts[1])
    source = slow_source(built, max_s=0.001)
    options = LoadOptions(
        order=first,
        connections=connections,
        decode_threads=decode_threads,
        staging_bytes=0,  # so: room for one part
        range_bytes=3_000,
        on_demand=on_demand,
    )
    with WeightLoad(source, built.manifest, options=options) as load:
        load.start()
        for num_reads, order in sorted(changes):
            while load.progress().state is LoadState.LOADING and len(source.calls) < num_reads:
                time.sleep(0.0005)
            load.reorder(order)
        load_all_that_is_left(load)
        load.check_integrity()
        for name, original in built.originals.items():
            assert load.array(name).tobytes() == original.tobytes(), name
        assert load.statistics().num_refetched_parts == 0
        places = sorted((call.name, call.start, call.end) for call in source.calls)
        for before, after in itertools.pairwise(places):
            assert before[0] != after[0] or before[2] <= after[1], "bytes were read twice"


@pytest.mark.parametrize("decode_threads", [1, 3])
def test_while_a_draft_is_used_no_byte_of_it_changes_though_all_that_refines_it_has_arrived(
    decode_threads: int,
) -> None:
    built = small_parts()
    source = PacedSource(built.store)
    refinements = [part for part in built.manifest.parts if part.tier is Tier.REFINE]
    held = source.hold(reads_of(built.manifest, *refinements))
    options = LoadOptions(
        order=Order.DRAFT_FIRST, connections=64, decode_threads=decode_threads, staging_bytes=1 << 24
    )
    with WeightLoad(source, built.manifest, options=options) as load:
        load.start()
        load.wait(0, Tier.DRAFT, timeout_s=WAIT_S)
        draft = built.expected("w0", Tier.DRAFT)
        with load.reading(0):
            held.release()
            wait_until(lambda: load.progress().fetched_bytes == load.progress().stored_bytes_total)
            time.sleep(0.05)
            assert np.array_equal(load.slab(0)[: len(draft)], draft)
            assert not load.is_ready(0)
        load.wait(0, timeout_s=WAIT_S)
        assert load.array("w0").tobytes() == built.originals["w0"].tobytes()


def test_a_draft_can_be_used_again_and_again_between_its_refinements() -> None:
    """Whatever is seen while it is used, it does not change meanwhile, and in the end it is exact."""
    built = build_artifact(LAYERS[:2], draft_elements=30_000, refine_elements=1_000)
    source = PacedSource(built.store)
    source.delay(seed=1, max_s=0.002)
    options = LoadOptions(order=Order.DRAFT_FIRST, connections=2, range_bytes=2_000, decode_threads=2)
    with WeightLoad(source, built.manifest, options=options) as load:
        load.start()
        load.wait(0, Tier.DRAFT, timeout_s=WAIT_S)
        seen: set[bytes] = set()
        while not load.is_ready(0):
            with load.reading(0):
                before = load.slab(0).tobytes()
                time.sleep(0.001)
                assert load.slab(0).tobytes() == before
            seen.add(before)
        assert len(seen) > 2
        assert load.array("w0").tobytes() == built.originals["w0"].tobytes()


def test_closing_a_load_waits_for_who_uses_a_draft() -> None:
    built = small_parts()
    source = PacedSource(built.store)
    refinements = [part for part in built.manifest.parts if part.tier is Tier.REFINE]
    source.hold(reads_of(built.manifest, *refinements))
    load = WeightLoad(source, built.manifest, options=LoadOptions(order=Order.DRAFT_FIRST, connections=64))
    load.start()
    load.wait(0, Tier.DRAFT, timeout_s=WAIT_S)
    with load.reading(0):
        closer = threading.Thread(target=load.close)
        closer.start()
        closer.join(0.1)
        assert closer.is_alive()
    closer.join(WAIT_S)
    assert not closer.is_alive()
    with load.reading(0):  # the values stay, and so may who looks at them
        pass


# -- in a process of its own -------------------------------------------------------------------------------------


class GatedStore:
    """A packed model behind a server that holds back what refines it until `release`."""

    def __init__(self, folder: Path, **server: float) -> None:
        self._may_go = threading.Event()
        self.num_held = 0
        self.server = StoreServer(folder, fault=self._hold, **server)  # type: ignore[arg-type]
        self.url = f"{self.server.url}/bucket/model"

    def release(self) -> None:
        self._may_go.set()

    def _hold(self, request: Request) -> Fault | None:
        if "refine" in request.key:
            self.num_held += 1
            self._may_go.wait(WAIT_S)
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("order")
    pack(model_store(llama_contents(num_layers=3)), FileStore(path / "bucket" / "model"))
    return path


@pytest.fixture
def gated(folder: Path) -> Iterator[GatedStore]:
    store = GatedStore(folder)
    with store.server:
        yield store
        store.release()


@pytest.fixture(scope="module")
def larger(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Large enough for a decision on a slow link."""
    path = tmp_path_factory.mktemp("larger")
    contents = llama_contents(num_layers=5, hidden=128, vocabulary=600)
    pack(model_store(contents), FileStore(path / "bucket" / "model"))
    return path


def exact_slab(folder: Path, group: int) -> bytes:
    source = FileStore(folder / "bucket" / "model")
    load = start_process_load(str(folder / "bucket" / "model"))
    try:
        load.wait(group, timeout_s=WAIT_S)
        return load.slab(group).tobytes()
    finally:
        load.close()
        source.close()


@needs_memory_files
def test_what_this_process_uses_no_other_process_refines(folder: Path, gated: GatedStore) -> None:
    load = start_process_load(gated.url, options=LoadOptions(order=Order.DRAFT_FIRST, decode_threads=2))
    group = next(
        group.index for group in load.manifest.groups if load.manifest.parts_of(group.index, Tier.REFINE)
    )
    load.wait(group, Tier.DRAFT, timeout_s=WAIT_S)
    assert load.order is Order.DRAFT_FIRST
    draft = load.slab(group).tobytes()
    with load.reading(group):
        gated.release()
        wait_until(lambda: load.progress().fetched_bytes == load.progress().stored_bytes_total)
        time.sleep(0.1)
        assert load.slab(group).tobytes() == draft
        assert not load.is_ready(group)
    load.wait(group, timeout_s=WAIT_S)
    exact = load.slab(group).tobytes()
    assert exact != draft
    assert exact == exact_slab(folder, group)
    assert load.join(WAIT_S)
    assert load.refine_wait_s >= 0
    load.close()


@needs_memory_files
def test_a_child_that_is_killed_while_it_refines_blocks_no_reader(gated: GatedStore) -> None:
    load = start_process_load(gated.url, options=LoadOptions(order=Order.DRAFT_FIRST))
    load.wait(0, Tier.DRAFT, timeout_s=WAIT_S)
    with load.reading(0):
        gated.release()
        load.cancel()
    assert load.join(WAIT_S)
    with load.reading(0):
        pass
    load.close()


@needs_memory_files
def test_what_the_child_decides_is_known_here(larger: Path) -> None:
    timeline = Timeline()
    with StoreServer(larger, rate_mb_s=2.0) as server:
        options = LoadOptions(order=Order.AUTO, range_bytes=30_000, connections=4)
        load = start_process_load(f"{server.url}/bucket/model", options=options, timeline=timeline)
        load_all_that_is_left(load)
    assert load.order is Order.DRAFT_FIRST
    assert load.left_s() == 0.0
    (decision,) = decisions(timeline)
    assert decision.attributes["order"] == "draft-first"
