"""Fine-tunes over a base that is in memory: bit for bit, from their differences alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.loader.test_fine_tunes import BASE, FINE_TUNE, WAIT_S, bytes_of, objects_of, tuned
from tests.support.checkpoints import Contents, llama_contents, model_store, random_content
from tests.support.inspection import slabs_of
from tests.support.memory_store import MemoryStore
from tests.support.paced import PacedSource, every_read

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import IntegrityError, LoadCancelledError, ManifestError, UsageError
from teneral.loader.format import delta
from teneral.loader.format.manifest import FRAME_ELEMENTS, Encoding, Tier
from teneral.loader.load import workers
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.plan import RowParts
from teneral.loader.load.resident import ResidentBase
from teneral.loader.sources.base import Source
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions


def packed(contents: Contents, **options: Any) -> MemoryStore:
    store = MemoryStore()
    pack(model_store(contents), store, **options)
    return store


def resident(store: Source) -> ResidentBase:
    """The base's weights, as a server that is warm with it has them."""
    manifest = open_artifact(store)
    with WeightLoad(store, manifest) as load:
        load.start()
        for group in manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        assert load.join(WAIT_S)
        slabs = [load.slab(group.index) for group in manifest.groups]
    for slab in slabs:
        slab.flags.writeable = False
    return ResidentBase(manifest, slabs)


def switched(store: Source, base: ResidentBase, **options: Any) -> dict[str, bytes]:
    manifest = base.join(open_artifact(store, without_base=True), store.url)
    with WeightLoad(store, manifest, options=LoadOptions(**options), base=base) as load:
        for group in manifest.groups:
            load.slab(group.index)[:] = 0xA5
        load.start()
        for group in manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)
        assert load.join(WAIT_S)
        load.check_integrity()
        return {tensor.name: load.array(tensor.name).tobytes() for tensor in manifest.tensors}


@pytest.fixture(scope="module")
def base_store() -> MemoryStore:
    return packed(BASE)


@pytest.fixture(scope="module")
def base(base_store: MemoryStore) -> ResidentBase:
    return resident(base_store)


@pytest.fixture(scope="module")
def store(base_store: MemoryStore) -> MemoryStore:
    return packed(FINE_TUNE, base=Base(base_store))


@pytest.mark.parametrize("order", list(Order))
@pytest.mark.parametrize("on_demand", [True, False])
def test_differences_and_the_base_in_memory_are_the_fine_tune(
    store: MemoryStore, base: ResidentBase, order: Order, on_demand: bool
) -> None:
    found = switched(store, base, order=order, on_demand=on_demand, decode_threads=3)
    assert found == bytes_of(FINE_TUNE)


def test_only_the_differences_are_read_and_the_base_is_not_written(
    store: MemoryStore, base_store: MemoryStore
) -> None:
    base = resident(base_store)
    before = [slab.tobytes() for slab in slabs_of(base)]
    paced = PacedSource(store)
    assert switched(paced, base) == bytes_of(FINE_TUNE)
    read_bytes = sum(call.end - call.start for call in paced.calls)
    alone = open_artifact(store, without_base=True)
    assert read_bytes == sum(part.size_bytes for part in alone.parts)
    assert [slab.tobytes() for slab in slabs_of(base)] == before


def test_small_parts_and_little_staging(
    store: MemoryStore, base_store: MemoryStore, base: ResidentBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    from teneral.loader.format import layout

    monkeypatch.setattr(layout, "MAX_PART_ELEMENTS", FRAME_ELEMENTS)
    monkeypatch.setattr(delta, "COPIED_ELEMENTS", 1000)
    cut = packed(FINE_TUNE, base=Base(base_store))
    for decode_threads in (1, 4):
        found = switched(cut, base, staging_bytes=0, range_bytes=4096, decode_threads=decode_threads)
        assert found == bytes_of(FINE_TUNE)


@pytest.mark.parametrize("tiers", [TierOptions(sketch_bits=1), TierOptions(draft_bits=7)])
def test_a_base_may_have_other_tiers(tiers: TierOptions) -> None:
    base = packed(BASE, tiers=tiers)
    assert switched(packed(FINE_TUNE, base=Base(base)), resident(base)) == bytes_of(FINE_TUNE)


def test_every_dtype_may_differ_or_be_the_same() -> None:
    dtypes = ("BF16", "F16", "F32", "F64", "I8", "U8", "I64", "F8_E4M3")
    contents: Contents = {f"layers.0.{dtype}": random_content(dtype, (70, 40)) for dtype in dtypes}
    contents |= {f"layers.1.{dtype}": random_content(dtype, (7, 40), 1) for dtype in (*dtypes, "BOOL")}
    contents["layers.1.none"] = random_content("BF16", (0, 4))
    fine_tune = {
        name: tuned(content) if name.startswith("layers.0") else content for name, content in contents.items()
    }
    base = packed(contents)
    assert switched(packed(fine_tune, base=Base(base)), resident(base)) == bytes_of(fine_tune)


def test_tensors_that_are_new_or_whole_are_read_in_all_their_tiers() -> None:
    contents = dict(FINE_TUNE)
    del contents["model.layers.1.mlp.up_proj.weight"]
    contents["model.embed_tokens.weight"] = random_content("BF16", (304, 128), 77)
    contents["model.layers.0.self_attn.q_proj.bias"] = random_content("BF16", (128,), 78)
    base = packed(BASE)
    assert switched(packed(contents, base=Base(base)), resident(base)) == bytes_of(contents)


def test_a_fine_tune_that_is_its_base_needs_no_byte_of_weights(base_store: MemoryStore) -> None:
    base = resident(base_store)
    paced = PacedSource(packed(BASE, base=Base(base_store)))
    assert switched(paced, base) == bytes_of(BASE)
    assert not paced.calls


def test_tied_weights() -> None:
    contents = llama_contents(hidden=128, tied=True)
    fine_tune = {name: tuned(content, 5) for name, content in contents.items()}
    base = packed(contents)
    found = switched(packed(fine_tune, base=Base(base)), resident(base))
    assert found == {name: data for name, data in bytes_of(fine_tune).items() if name != "lm_head.weight"}


def test_no_tier_but_the_exact_one_is_ever_usable(store: MemoryStore, base: ResidentBase) -> None:
    paced = PacedSource(store)
    manifest = base.join(open_artifact(store, without_base=True), store.url)
    last = max(part.index for part in manifest.parts if part.size_bytes)
    held = paced.hold(every_read)
    with WeightLoad(paced, manifest, base=base) as load:
        load.start()
        held.wait_reached()
        differs = {part.group for part in manifest.parts if part.size_bytes}
        assert not any(load.is_ready(group, Tier.SKETCH) for group in differs)
        held.release()
        load.wait(manifest.parts[last].group, timeout_s=WAIT_S)
        assert load.join(WAIT_S)


@pytest.mark.parametrize("same", [True, False])
def test_rows_that_are_waited_for_are_the_fine_tunes(
    base_store: MemoryStore, base: ResidentBase, same: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta, "COPIED_ELEMENTS", 1000)
    name = "model.embed_tokens.weight"
    contents = FINE_TUNE | ({name: BASE[name]} if same else {})
    store = packed(contents, base=Base(base_store))
    tensor = open_artifact(store, without_base=True).by_name[name]
    assert tensor.encoding is (Encoding.SAME if same else Encoding.DELTA)
    manifest = base.join(open_artifact(store, without_base=True), store.url)
    parts = RowParts(manifest, name).holding([0, 7, 299])
    assert parts
    with WeightLoad(store, manifest, options=LoadOptions(on_demand=True), base=base) as load:
        load.start()
        load.wait_parts(parts, timeout_s=WAIT_S)
        rows = load.array(name)[[0, 7, 299]].tobytes()
        assert load.join(WAIT_S)
    expected = np.frombuffer(contents[name][2], "<u2").reshape(300, 128)[[0, 7, 299]].tobytes()
    assert rows == expected


def test_the_nodes_cache_keeps_differences(store: MemoryStore, base: ResidentBase, tmp_path: Any) -> None:
    options = {"cache_dir": str(tmp_path), "cache_bytes": 1 << 30}
    manifest = base.join(open_artifact(store, without_base=True), store.url)
    with WeightLoad(store, manifest, options=LoadOptions(**options), base=base) as load:
        load.start()
        assert load.join(WAIT_S)
        assert load.join_cache(WAIT_S)
        statistics = load.statistics()
        assert statistics.unverified_bytes == 0
        assert statistics.cache is not None
        assert not statistics.cache.troubles
    paced = PacedSource(store)
    assert switched(paced, base, **options) == bytes_of(FINE_TUNE)
    assert not paced.calls


def test_nothing_is_decoded_while_the_base_has_its_head_start(
    store: MemoryStore, base: ResidentBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "HEAD_START_S", 3.0)
    source = PacedSource(store.reopen())
    manifest = base.join(open_artifact(source, without_base=True), source.url)
    assert any(not part.size_bytes for part in manifest.parts), "copies, which wait for no byte"
    with WeightLoad(source, manifest, base=base) as load:
        held = source.hold(every_read)
        load.start()
        held.wait_reached()
        assert load.progress().parts_decoded == 0
        held.release()  # enough has come then
        for group in manifest.groups:
            load.wait(group.index, timeout_s=WAIT_S)


def test_a_load_can_be_cancelled(store: MemoryStore, base: ResidentBase) -> None:
    paced = PacedSource(MemoryStore(objects_of(store)))  # it closes what it reads
    held = paced.hold(every_read)
    manifest = base.join(open_artifact(store, without_base=True), store.url)
    with WeightLoad(paced, manifest, base=base) as load:
        load.start()
        held.wait_reached()
        load.cancel()
        held.release()
        with pytest.raises(LoadCancelledError):
            load.wait(len(manifest.groups) - 1, timeout_s=WAIT_S)


# Refusals


def test_damaged_differences_fail_the_load_and_leave_the_base(
    store: MemoryStore, base_store: MemoryStore
) -> None:
    base = resident(base_store)
    before = [slab.tobytes() for slab in slabs_of(base)]
    alone = open_artifact(store, without_base=True)
    for blob in alone.blobs:
        damaged = objects_of(store)
        content = bytearray(damaged[blob.name])
        content[len(content) // 2] ^= 1
        damaged[blob.name] = bytes(content)
        with pytest.raises(IntegrityError, match="wrong digest"):
            switched(MemoryStore(damaged), base)
    assert [slab.tobytes() for slab in slabs_of(base)] == before
    assert switched(store, base) == bytes_of(FINE_TUNE)


def test_another_base_is_refused_before_a_byte_of_weights_is_read(store: MemoryStore) -> None:
    other = resident(packed(llama_contents(num_layers=2, hidden=128, vocabulary=301)))
    paced = PacedSource(store)
    with pytest.raises(IntegrityError, match="is not the base of") as caught:
        switched(paced, other)
    assert caught.value.hint
    assert not paced.calls


def test_plain_weights_in_memory_are_no_base(store: MemoryStore) -> None:
    plain = resident(model_store(BASE))
    with pytest.raises(UsageError, match="plain safetensors"):
        switched(store, plain)


def test_a_whole_model_is_refused(base_store: MemoryStore, base: ResidentBase) -> None:
    with pytest.raises(UsageError, match="is whole"):
        switched(base_store, base)


def test_a_manifest_that_lies_about_the_base_is_refused(store: MemoryStore, base: ResidentBase) -> None:
    renamed = tuple(tensor._replace(name=f"{tensor.name}.old") for tensor in base.manifest.tensors)
    other = ResidentBase(base.manifest._replace(tensors=renamed), slabs_of(base))
    with pytest.raises(ManifestError, match="the base has no such tensor"):
        switched(store, other)
