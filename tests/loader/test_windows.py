"""Groups one after another: all of them, right, in order, and never more of them in memory than two windows."""

from __future__ import annotations

import gc
import weakref

import pytest
from tests.support.artifacts import BuiltArtifact, build_artifact
from tests.support.paced import PacedSource, reads_of

from teneral.loader.errors import ChangedError, IntegrityError, UnavailableError
from teneral.loader.format.manifest import Tier
from teneral.loader.load import windows as successive
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.windows import SuccessiveLoad, cut_windows
from teneral.loader.timeline import Timeline

LAYERS = [(f"layers.{number}", {f"w{number}": ("BF16", (100, 100))}) for number in range(6)]


@pytest.fixture
def built() -> BuiltArtifact:
    return build_artifact(LAYERS)


def slab_bytes(built: BuiltArtifact) -> int:
    return built.manifest.groups[0].slab_bytes


def values(built: BuiltArtifact, load: SuccessiveLoad) -> dict[int, bytes]:
    taken = {}
    for group, slab in load.slabs():
        tensor = built.manifest.tensors[built.manifest.groups[group].tensors[0]]
        taken[group] = slab[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes].tobytes()
    return taken


def originals(built: BuiltArtifact) -> list[bytes]:
    return [built.originals[f"w{number}"].tobytes() for number in range(len(LAYERS))]


@pytest.mark.parametrize("window_bytes", [1, 45_000, 1 << 30])
def test_every_group_arrives_exact_and_in_order_however_wide_the_window(built, window_bytes):
    with SuccessiveLoad(built.store, built.manifest, window_bytes=window_bytes) as load:
        taken = values(built, load)
    assert list(taken) == list(range(6))
    assert list(taken.values()) == originals(built)


def test_some_groups_are_read_without_the_others(built):
    source = PacedSource(built.store)
    with SuccessiveLoad(source, built.manifest, groups=[1, 4], window_bytes=1) as load:
        taken = values(built, load)
        done = load.statistics()
    assert {group: originals(built)[group] for group in (1, 4)} == taken
    chosen = [part.size_bytes for part in built.manifest.parts if part.group in (1, 4)]
    assert (done.stored_bytes, done.num_windows) == (sum(chosen), 2)
    assert done.unverified_bytes == 0


def test_windows_hold_as_many_groups_as_fit_and_at_least_one(built):
    size = slab_bytes(built)
    groups = range(6)
    assert cut_windows(built.manifest, groups, size - 1) == [(0,), (1,), (2,), (3,), (4,), (5,)]
    assert cut_windows(built.manifest, groups, 3 * size - 1) == [(0, 1), (2, 3), (4, 5)]
    assert cut_windows(built.manifest, groups, 4 * size) == [(0, 1, 2, 3), (4, 5)]
    assert cut_windows(built.manifest, (), size) == []


def test_a_load_of_some_groups_reads_their_parts_and_has_memory_for_no_others(built):
    with WeightLoad(built.store, built.manifest, groups=frozenset([2])) as load:
        load.start()
        load.wait(2)
        assert load.join()
        assert load.statistics().stored_bytes == sum(
            part.size_bytes for part in built.manifest.parts if part.group == 2
        )
        sizes = {group.index: load.slab(group.index).size for group in built.manifest.groups}
        assert {group for group, size in sizes.items() if size} == {2}
        assert not load.is_ready(1)


def test_at_most_two_windows_are_in_memory_while_they_are_taken(built, monkeypatch):
    alive: weakref.WeakSet[WeightLoad] = weakref.WeakSet()

    class Watched(WeightLoad):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            alive.add(self)

    monkeypatch.setattr(successive, "WeightLoad", Watched)
    most = 0
    gc.disable()  # what went has to go at once, and not when the collector comes by
    try:
        with SuccessiveLoad(built.store, built.manifest, window_bytes=1) as load:
            for _, slab in load.slabs():
                del slab
                most = max(most, len(alive))
    finally:
        gc.enable()
    assert most == 2


def test_what_was_handed_out_stays_although_the_load_goes_on_and_is_closed(built):
    with SuccessiveLoad(built.store, built.manifest, window_bytes=1) as load:
        kept = [slab for _, slab in load.slabs()]
    assert [slab[: 100 * 100 * 2].tobytes() for slab in kept] == originals(built)


def test_the_next_window_is_read_before_the_last_group_of_this_one_is_taken(built):
    source = PacedSource(built.store)
    second = next(part for part in built.manifest.parts if part.group == 1)
    with SuccessiveLoad(source, built.manifest, window_bytes=1) as load:
        slabs = load.slabs()
        held = source.hold(reads_of(built.manifest, second))
        next(slabs)
        held.wait_reached()  # for the read to begin, before its group is requested
        held.release()
        assert [group for group, _ in slabs] == [1, 2, 3, 4, 5]


def test_a_damaged_part_is_named_as_the_whole_artifact_numbers_it(built):
    bad = next(part for part in built.manifest.parts if part.group == 3 and part.tier is Tier.REFINE)
    source = PacedSource(built.store)
    source.spoil(reads_of(built.manifest, bad), times=2)  # the second is the loader's own try
    taken = []
    with (
        SuccessiveLoad(source, built.manifest, window_bytes=1) as load,
        pytest.raises(IntegrityError, match=rf"part {bad.index} \(layers\.3 refine") as caught,
    ):
        taken.extend(group for group, _ in load.slabs())
    assert taken == [0, 1, 2]
    assert f"part {bad.index} (" in caught.value.where


def test_a_store_that_fails_ends_it_with_the_stores_own_error(built):
    source = PacedSource(built.store)
    bad = next(part for part in built.manifest.parts if part.group == 2)
    source.fail(
        lambda: UnavailableError("503 Slow Down", source="s3://bucket", hint="Try later."),
        reads_of(built.manifest, bad),
    )
    with (
        SuccessiveLoad(source, built.manifest, window_bytes=1) as load,
        pytest.raises(UnavailableError, match="503 Slow Down") as caught,
    ):
        list(load.slabs())
    assert caught.value.hint == "Try later."


def test_the_timeline_has_a_span_for_each_window(built):
    timeline = Timeline()
    with SuccessiveLoad(
        built.store, built.manifest, window_bytes=2 * slab_bytes(built), timeline=timeline
    ) as load:
        list(load.slabs())
    assert [span.name for span in timeline.spans()] == [
        "layers.0 … layers.1",
        "layers.2 … layers.3",
        "layers.4 … layers.5",
    ]


def test_an_object_that_is_replaced_between_two_windows_is_refused_as_changed(built: BuiltArtifact) -> None:
    with SuccessiveLoad(built.store, built.manifest, window_bytes=1) as load:
        slabs = load.slabs()
        next(slabs)
        for blob in built.manifest.blobs:
            built.store.put(blob.name, built.store.read(blob.name, max_bytes=1 << 30)[0])
        with pytest.raises(ChangedError, match=r"part \d+"):
            list(slabs)
