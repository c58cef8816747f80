"""Groups that come and go: what makes way for what, and what waiting threads see."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.paced import WAIT_S, PacedSource, reads_of

from teneral.loader.artifact import open_artifact
from teneral.loader.cache import writer
from teneral.loader.errors import (
    IntegrityError,
    LoadCancelledError,
    PartsUnavailableError,
    UnavailableError,
    UsageError,
)
from teneral.loader.format.manifest import Manifest
from teneral.loader.format.safetensors import SafetensorsWriter, TensorSpec
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.experts import Residency
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.load.pages import plan_paging
from teneral.loader.load.plan import expert_groups
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack

LAYERS, EXPERTS, SIDE = 2, 6, 128
EXPERT_BYTES = 2 * SIDE * SIDE


# ---- decisions ----


def test_those_used_longest_ago_make_way() -> None:
    residency = Residency(dict.fromkeys(range(9), 10), 30)
    for group in (1, 2, 3):
        assert residency.victims(group, ()) == []
        residency.admit(group)
    residency.use([1])
    assert residency.victims(4, ()) == [2]
    assert residency.victims(4, {2}) == [3]
    assert residency.victims(4, {1, 2, 3}) is None


def test_as_many_make_way_as_are_needed() -> None:
    residency = Residency({1: 10, 2: 10, 3: 10, 4: 25}, 30)
    for group in (1, 2, 3):
        residency.admit(group)
    assert residency.victims(4, ()) == [1, 2, 3]
    assert residency.victims(4, {1}) is None


@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    budget=st.integers(9, 30),
    steps=st.lists(st.sets(st.integers(0, 7)), max_size=30),
)
@settings(max_examples=200, deadline=None)
def test_any_steps_that_fit_by_themselves_find_room(
    sizes: list[int], budget: int, steps: list[set[int]]
) -> None:
    residency = Residency(dict(enumerate(sizes)), budget)
    for step in steps:
        wanted = {group for group in step if group < len(sizes)}
        if sum(sizes[group] for group in wanted) > budget:
            continue
        residency.use(sorted(wanted))
        for group in sorted(wanted):
            if group not in residency:
                victims = residency.victims(group, wanted)
                assert victims is not None
                assert wanted.isdisjoint(victims)
                for each in victims:
                    residency.evict(each)
                residency.admit(group)
        assert wanted <= set(residency.pages)
        assert residency.used_bytes == sum(sizes[group] for group in residency.pages) <= budget


# ---- a mixture of a few matrices ----


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    names = ["model.embed_tokens.weight", "model.norm.weight"]
    for layer in range(LAYERS):
        names.append(f"model.layers.{layer}.self_attn.q_proj.weight")
        names += [f"model.layers.{layer}.mlp.experts.{number}.up_proj.weight" for number in range(EXPERTS)]
    specs = [TensorSpec(name, "BF16", (SIDE,) if "norm" in name else (SIDE, SIDE)) for name in names]
    random = np.random.default_rng(0)
    with (folder / "model.safetensors").open("wb") as file:
        writer = SafetensorsWriter(file, specs, {"format": "pt"})
        for spec in specs:
            values = random.standard_normal(spec.shape, dtype=np.float32)
            writer.write((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).data)
        writer.finish()
    pack(open_source(str(folder)), open_store(str(folder / "packed")))
    return folder / "packed"


@contextmanager
def paged(
    artifact: Path, num_experts: int, *, cache_dir: Path | None = None
) -> Iterator[tuple[WeightLoad, PacedSource, list[int]]]:
    """A load that has begun, with room for this number of experts, and the experts' groups."""
    source = PacedSource(open_source(str(artifact)))
    manifest = open_artifact(source)
    experts = sorted(expert_groups(manifest))
    paging = plan_paging(manifest, manifest.weight_bytes - (len(experts) - num_experts) * EXPERT_BYTES)
    assert paging is not None
    options = LoadOptions(on_demand=True, cache_dir=None if cache_dir is None else str(cache_dir))
    with closing(source), WeightLoad(source, manifest, paging=paging, options=options) as load:
        load.start()
        yield load, source, experts
        load.check_integrity()


@pytest.fixture(scope="module")
def contents(artifact: Path) -> list[bytes]:
    """Of each group's slab."""
    source = open_source(str(artifact))
    manifest = open_artifact(source)
    with closing(source), WeightLoad(source, manifest, options=LoadOptions()) as load:
        load.start()
        assert load.join(WAIT_S)
        return [bytes(load.slab(group.index)) for group in manifest.groups]


def holds(load: WeightLoad, group: int, contents: list[bytes]) -> bool:
    return bytes(load.slab(group)) == contents[group]


def test_the_rest_is_loaded_and_experts_are_not(artifact: Path, contents: list[bytes]) -> None:
    with paged(artifact, EXPERTS) as (load, source, experts):
        others = [group.index for group in load.manifest.groups if group.index not in experts]
        for group in others:
            load.wait(group, timeout_s=WAIT_S)
            assert holds(load, group, contents)
        progress = load.progress()
        assert (progress.groups_exact, progress.num_groups) == (len(others), len(others))
        assert progress.state is LoadState.EXACT
        assert not any(load.is_ready(group) for group in experts)
        is_expert = reads_of(load.manifest, *(part for part in load.manifest.parts if part.group in experts))
        assert not any(is_expert(call) for call in source.calls)


def test_wanted_groups_come_and_what_was_used_longest_ago_goes(artifact: Path, contents: list[bytes]) -> None:
    with paged(artifact, EXPERTS) as (load, _, experts):
        for turn in range(3):
            for pair in zip(experts[::2], experts[1::2], strict=True):
                load.experts.want(pair)
                assert load.experts.wait(pair, WAIT_S), turn
                assert all(holds(load, group, contents) for group in pair)
                load.check_integrity()
        figures = load.experts.statistics()
        assert figures.resident_bytes <= figures.budget_bytes == EXPERTS * EXPERT_BYTES
        assert figures.evictions_total == 3 * len(experts) - EXPERTS
        assert figures.misses_total == 3 * len(experts)
        assert figures.refetched_bytes_total * 3 == figures.fetched_bytes_total * 2


def test_an_evicted_group_has_no_pages(artifact: Path) -> None:
    with paged(artifact, EXPERTS) as (load, _, experts):
        first, later = experts[0], experts[1 : EXPERTS + 1]
        for wanted in ([first], later):
            load.experts.want(wanted)
            assert load.experts.wait(wanted, WAIT_S)
        inner = load.slab(first)[4096:-4096]
        assert len(inner) > 4096
        assert not inner.any()


def test_wanted_groups_stay_whatever_else_was_asked_for(artifact: Path, contents: list[bytes]) -> None:
    with paged(artifact, EXPERTS) as (load, source, experts):
        abandoned, wanted = experts[:EXPERTS], experts[EXPERTS:]
        held = source.hold(
            reads_of(load.manifest, *(part for part in load.manifest.parts if part.group in abandoned))
        )
        load.experts.want(abandoned)
        held.wait_reached()
        load.experts.want(wanted)  # has no room for all before the others have ended
        assert not load.experts.wait(wanted, 0.05)
        held.release()
        assert load.experts.wait(wanted, WAIT_S)
        assert all(holds(load, group, contents) for group in wanted)


def test_a_group_that_is_there_is_not_fetched_again(artifact: Path) -> None:
    with paged(artifact, EXPERTS) as (load, source, experts):
        for wanted in (experts[:2], experts[2:4]):
            load.experts.want(wanted)
            assert load.experts.wait(wanted, WAIT_S)
        num_calls = len(source.calls)
        load.experts.want(experts[:2])
        assert load.experts.wait(experts[:2], 0.0)
        assert len(source.calls) == num_calls


def part_of(manifest: Manifest, group: int) -> list:
    return [part for part in manifest.parts if part.group == group]


def test_damage_is_read_once_more_and_then_raised_until_it_is_gone(
    artifact: Path, contents: list[bytes]
) -> None:
    with paged(artifact, EXPERTS) as (load, source, experts):
        bad, good = experts[0], experts[1]
        source.spoil(reads_of(load.manifest, *part_of(load.manifest, bad)), times=3)
        load.experts.want([bad, good])
        with pytest.raises(PartsUnavailableError, match=r"layers\.0\.experts\.0.*wrong digest") as raised:
            load.experts.wait([bad, good], WAIT_S)
        assert isinstance(raised.value.__cause__, IntegrityError)
        load.experts.want([good])
        assert load.experts.wait([good], WAIT_S)
        load.experts.want([bad])  # spoilt once more, and right the second time
        assert load.experts.wait([bad], WAIT_S)
        assert holds(load, bad, contents)
        assert load.experts.statistics().failures_total == 1


def test_a_store_that_gives_nothing_fails_waiting_threads_alone(
    artifact: Path, contents: list[bytes]
) -> None:
    with paged(artifact, EXPERTS) as (load, source, experts):
        is_down = [True]
        rule = reads_of(load.manifest, *part_of(load.manifest, experts[3]))
        source.fail(lambda: UnavailableError("the store is gone"), lambda call: is_down[0] and rule(call))
        load.experts.want(experts[3:4])
        with pytest.raises(PartsUnavailableError, match="the store is gone"):
            load.experts.wait(experts[3:4], WAIT_S)
        assert load.failure is None
        is_down[0] = False
        load.experts.want(experts[3:4])
        assert load.experts.wait(experts[3:4], WAIT_S)
        assert holds(load, experts[3], contents)


def test_cancelling_wakes_waiting_threads(artifact: Path) -> None:
    with paged(artifact, EXPERTS) as (load, source, experts):
        held = source.hold(reads_of(load.manifest, *part_of(load.manifest, experts[0])))
        load.experts.want(experts[:1])
        held.wait_reached()
        timer = threading.Timer(0.05, load.cancel)
        timer.start()
        with pytest.raises(LoadCancelledError):
            load.experts.wait(experts[:1], WAIT_S)
        timer.join()


def test_the_nodes_cache_saves_the_second_fetch(
    artifact: Path, tmp_path: Path, contents: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    # A disk that answers late, as on a busy machine, would send some reads to the store.
    monkeypatch.setattr(writer, "FAST_GRACE_S", WAIT_S)
    monkeypatch.setattr(writer, "CRAWL_GRACE_S", WAIT_S)
    monkeypatch.setattr(writer, "WAIT_S", WAIT_S)
    with paged(artifact, EXPERTS, cache_dir=tmp_path / "cache") as (load, _, experts):
        for group in experts:
            load.experts.want([group])
            assert load.experts.wait([group], WAIT_S)
    assert load.join_cache(WAIT_S)
    with paged(artifact, EXPERTS, cache_dir=tmp_path / "cache") as (load, source, experts):
        load.join(WAIT_S)
        source.calls.clear()
        for group in experts:
            load.experts.want([group])
            assert load.experts.wait([group], WAIT_S)
            assert holds(load, group, contents)
        assert not source.calls


# ---- sizes ----


def test_sizes_below_what_a_step_needs_are_refused_with_the_numbers(artifact: Path) -> None:
    manifest = open_artifact(open_source(str(artifact)))
    resident = manifest.weight_bytes - LAYERS * EXPERTS * EXPERT_BYTES
    least = resident + EXPERTS * EXPERT_BYTES
    assert plan_paging(manifest, manifest.weight_bytes) is None
    paging = plan_paging(manifest, least)
    assert paging is not None
    assert paging.budget_bytes == EXPERTS * EXPERT_BYTES
    with pytest.raises(UsageError, match="a step needs") as raised:
        plan_paging(manifest, least - 1)
    assert str(least) in raised.value.hint
    assert "layers.0" in raised.value.message


def test_a_model_without_experts_cannot_be_left_out(artifact: Path) -> None:
    manifest = open_artifact(open_source(str(artifact)))
    groups = tuple(group._replace(name=f"group {group.index}") for group in manifest.groups)
    with pytest.raises(UsageError, match="no experts in groups of their own"):
        plan_paging(manifest._replace(groups=groups), manifest.weight_bytes - 1)
