"""Packing what is mostly zero: exact, smaller, in tiers; and pruning by magnitude."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.checkpoints import Contents, llama_contents, model_store, random_content
from tests.support.memory_store import MemoryStore

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import UsageError
from teneral.loader.format.manifest import Manifest
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.tools.inspect import describe, render_table
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.loader.tools.pack.prune import PruneOptions, magnitude_keys, prune_two_of_four
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.loader.tools.unpack import unpack
from teneral.loader.tools.verify import verify

HALF, TWO_OF_FOUR = PruneOptions(0.5), PruneOptions(None)


def masked(contents: Contents, share: float, *, negative: bool = False) -> Contents:
    """The matrices of layers times a random mask, as others' tools leave them."""
    rng = np.random.default_rng(0)
    found = dict(contents)
    for name, (dtype, shape, data) in contents.items():
        if len(shape) == 2 and ".layers." in name:
            words = np.frombuffer(data, "<u2").copy()
            words[rng.random(words.size) < share] &= 0x8000 if negative else 0
            found[name] = (dtype, shape, words.tobytes())
    return found


def stored_ratio(manifest: Manifest) -> float:
    """Of the layers' matrices."""
    description = describe(manifest, "memory://")
    rows = [group for group in description["groups"] if group["name"].startswith("layers")]
    ratio: float = sum(row["stored_bytes"] for row in rows) / sum(row["raw_bytes"] for row in rows)
    return ratio


def loaded(store: MemoryStore, order: Order = Order.DRAFT_FIRST) -> dict[str, bytes]:
    manifest = open_artifact(store)
    with WeightLoad(store, manifest, options=LoadOptions(order=order)) as load:
        load.start()
        load.join()
        found = {}
        for tensor in manifest.tensors:
            slab = load.slab(tensor.group)
            found[tensor.name] = slab[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes].tobytes()
        return found


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize("order", [Order.DRAFT_FIRST, Order.EXACT])
def test_pruned_weights_of_others_are_packed_sparse_and_come_back_bit_for_bit(
    dtype: str, order: Order
) -> None:
    contents = llama_contents(hidden=128, dtype=dtype)
    if dtype != "F32":
        contents = masked(contents, 0.5, negative=True)
    else:
        contents = {
            name: (kind, shape, (np.frombuffer(data, "<f4") * (np.arange(len(data) // 4) % 2)).astype("<f4").tobytes())
            for name, (kind, shape, data) in contents.items()
        }  # fmt: skip
    store = MemoryStore()
    manifest = pack(model_store(contents), store).manifest
    assert any(tensor.encoding.is_sparse for tensor in manifest.tensors)
    assert loaded(store, order) == {name: data for name, (_, _, data) in contents.items()}
    assert verify(store).ok


def test_int8_weights_that_are_mostly_zero_are_packed_sparse(tmp_path: object) -> None:
    data = np.random.default_rng(0).integers(-128, 128, 300 * 300).astype("i1")
    data[::2] = 0
    contents: Contents = {
        "layers.0.w": ("I8", (300, 300), data.tobytes()),
        "b": random_content("BF16", (64, 64)),
    }
    store = MemoryStore()
    manifest = pack(model_store(contents), store).manifest
    assert manifest.by_name["layers.0.w"].encoding.value == "bytes.sparse"
    assert loaded(store) == {name: content for name, (_, _, content) in contents.items()}


def test_what_is_not_sparse_enough_or_all_zero_stays_dense() -> None:
    contents = masked(llama_contents(hidden=128), 0.02)
    contents["model.layers.0.mlp.up_proj.weight"] = ("BF16", (256, 128), bytes(2 * 256 * 128))
    manifest = pack(model_store(contents), MemoryStore()).manifest
    assert {tensor.encoding.value for tensor in manifest.tensors} == {"bf16.3", "bf16.5", "whole"}


def test_dense_can_be_asked_for() -> None:
    contents = masked(llama_contents(hidden=128), 0.5)
    manifest = pack(model_store(contents), MemoryStore(), sparse=False).manifest
    assert {tensor.encoding.value for tensor in manifest.tensors} == {"bf16.3", "bf16.5", "whole"}


def test_sparse_tensors_come_in_a_sketch_too() -> None:
    contents = masked(llama_contents(hidden=128), 0.5)
    store = MemoryStore()
    pack(model_store(contents), store, tiers=TierOptions(sketch_bits=1))
    assert "bf16.sparse.1.3" in {tensor.encoding.value for tensor in open_artifact(store).tensors}
    assert loaded(store) == {name: data for name, (_, _, data) in contents.items()}
    assert verify(store).ok


def test_half_of_each_matrix_is_pruned_and_nothing_else(tmp_path: object) -> None:
    contents = llama_contents(hidden=256)
    store = MemoryStore()
    result = pack(model_store(contents), store, prune=HALF)
    found = loaded(store)
    for name, (_, shape, data) in contents.items():
        before, after = np.frombuffer(data, "<u2"), np.frombuffer(found[name], "<u2")
        if len(shape) < 2 or ".layers." not in name:
            assert np.array_equal(before, after), name
            continue
        pruned = after == 0
        assert 0.49 < pruned.mean() < 0.51
        assert np.array_equal(after[~pruned], before[~pruned])
        assert (before[pruned] & 0x7FFF).max() < (before[~pruned] & 0x7FFF).min()
    assert result.manifest.metadata["teneral.pruned"] == "0.5 of each by magnitude, 14 matrices of layers"
    assert "pruned: 0.5 of each by magnitude" in result.render()
    assert stored_ratio(result.manifest) < 0.38


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
def test_two_of_each_four_are_pruned(dtype: str) -> None:
    contents = llama_contents(hidden=256, dtype=dtype)
    store = MemoryStore()
    result = pack(model_store(contents), store, prune=TWO_OF_FOUR)
    after = np.frombuffer(
        loaded(store)["model.layers.0.mlp.up_proj.weight"], "<u2" if dtype == "BF16" else "<u4"
    )
    assert ((after.reshape(-1, 4) == 0).sum(axis=1) == 2).all()
    if dtype == "BF16":
        assert stored_ratio(result.manifest) < 0.37


def test_packing_again_what_was_pruned_gives_the_same_artifact(tmp_path: object) -> None:
    store, again = MemoryStore(), MemoryStore()
    first = pack(model_store(llama_contents(hidden=128)), store, prune=TWO_OF_FOUR)
    unpack(store, f"{tmp_path}/model")
    from teneral.loader.sources.file.store import FileStore

    assert pack(FileStore(f"{tmp_path}/model"), again).manifest.digest == first.manifest.digest


def test_embeddings_and_the_head_are_pruned_when_asked_for_and_routers_are_not() -> None:
    contents = llama_contents(hidden=128)
    contents["model.layers.0.mlp.gate.weight"] = random_content("BF16", (8, 256))
    for everything in (False, True):
        store = MemoryStore()
        pack(model_store(contents), store, prune=PruneOptions(0.5, everything))
        found = loaded(store)
        for name in ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.mlp.gate.weight"):
            assert (found[name] != contents[name][2]) is everything


def test_inspect_shows_what_was_pruned() -> None:
    store = MemoryStore()
    manifest = pack(model_store(llama_contents(hidden=128)), store, prune=HALF).manifest
    description = describe(manifest, "memory://")
    assert description["sparse"]["tensors"] == 14
    assert 0.49 < description["sparse"]["zeros_ratio"] < 0.51
    table = render_table(description)
    assert "pruned    0.5 of each by magnitude, 14 matrices of layers" in table
    assert "14 tensors, of which 50." in table


@pytest.mark.parametrize("text", ["0", "1", "-0.5", "half", "4:8", "nan", ""])
def test_shares_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(UsageError):
        PruneOptions.from_flags(text, everything=False)


def test_flags_are_read() -> None:
    assert PruneOptions.from_flags("2:4", everything=False) == TWO_OF_FOUR
    assert PruneOptions.from_flags("0.5", everything=True) == PruneOptions(0.5, True)
    assert PruneOptions.from_flags(None, everything=False) is None
    with pytest.raises(UsageError, match="--prune-all says where"):
        PruneOptions.from_flags(None, everything=True)


def test_pruning_with_nothing_to_prune_or_with_integers_is_refused() -> None:
    store = MemoryStore()
    with pytest.raises(UsageError, match="no matrices of floats"):
        pack(model_store({"w": ("I8", (64, 64), bytes(64 * 64))}), store, prune=HALF)
    with pytest.raises(UsageError, match="--prune cannot go with --quantize"):
        pack(model_store(llama_contents()), store, prune=HALF, quantize=QuantizeOptions(8))
    assert not list(store.list())


def test_a_load_of_a_pruned_model_has_its_zeros() -> None:
    store = MemoryStore()
    manifest = pack(model_store(llama_contents(hidden=128)), store, prune=HALF).manifest
    with WeightLoad(store, manifest, options=LoadOptions(order=Order.DRAFT_FIRST)) as load:
        load.start()
        load.join()
        tensor = manifest.by_name["model.layers.0.mlp.up_proj.weight"]
        exact = load.slab(tensor.group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        assert (exact.view("<u2") == 0).mean() > 0.49


def test_the_smallest_two_of_four_are_found_by_all_of_their_bits() -> None:
    words = np.array([5, 0x80000004, 6, 3, 0, 0x80000000, 0, 1, 7, 7, 7, 7], "<u4")
    prune_two_of_four(words)
    assert words.tolist() == [5, 0, 6, 0, 0, 0, 0, 1, 0, 0, 7, 7]


def test_keys_grow_with_magnitudes() -> None:
    floats = np.array([0.0, -0.0, 1e-40, -0.5, 0.75, -2.0, np.inf], "<f4")
    keys = magnitude_keys(floats.view("<u4"))
    assert (np.diff(keys.astype(int)) >= 0).all()
    assert keys[0] == keys[1] == 0
