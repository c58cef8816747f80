"""Three tiers: what each of them gives, from packing to the slabs and back to safetensors."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.artifacts import BuiltArtifact, build_artifact, coarse
from tests.support.checkpoints import Contents, llama_contents, model_store, random_content, read_back
from tests.support.memory_store import MemoryStore
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.weight_loads import start_process_load

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import UsageError
from teneral.loader.format.manifest import Manifest, Tier
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.plan import Plan, RowParts, plan_load
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.loader.tools.part_reader import PartReader
from teneral.loader.tools.unpack import unpack
from teneral.loader.tools.verify import verify

LAYERS = [
    ("embed", {"embed": ("BF16", (300, 64)), "types": ("BF16", (20, 64)), "norm": ("BF16", (64,))}),
    ("layers.0", {"a": ("BF16", (200, 64)), "scale": ("F32", (64,)), "b": ("BF16", (96, 128))}),
    ("layers.1", {"c": ("BF16", (200, 64)), "codes": ("I8", (100, 64))}),
    ("head", {"norm_f": ("BF16", (64,))}),
]
CUTS = st.tuples(*[st.integers(1_000, 30_000)] * 3)
EMBED, HEAD = "model.embed_tokens.weight", "lm_head.weight"


def sketched(cuts: tuple[int, int, int], seed: int = 0) -> BuiltArtifact:
    return build_artifact(
        LAYERS,
        seed=seed,
        sketch_bits=1,
        sketch_elements=cuts[0],
        draft_elements=cuts[1],
        refine_elements=cuts[2],
    )


def packed(contents: Contents, **bits: int) -> tuple[MemoryStore, Manifest]:
    store = MemoryStore()
    manifest = pack(model_store(contents), store, tiers=TierOptions(**bits), threads=1).manifest
    return store, manifest


def encodings(manifest: Manifest) -> dict[str, str]:
    return {name: tensor.encoding.value for name, tensor in manifest.by_name.items()}


# In which order


def elements(plan: Plan, number: int) -> set[tuple[int, int]]:
    segments = plan.steps[number].part.segments
    return {(seg.tensor, index) for seg in segments for index in range(seg.start, seg.start + seg.count)}


@settings(max_examples=12, deadline=None)
@given(cuts=CUTS, order=st.sampled_from(Order), on_demand=st.booleans())
def test_a_step_needs_the_tier_before_and_what_that_needs(
    cuts: tuple[int, int, int], order: Order, on_demand: bool
) -> None:
    plan = plan_load(sketched(cuts).manifest, order, on_demand=on_demand)
    held = {step.number: elements(plan, step.number) for step in plan.steps}
    for step in plan.steps:
        direct = {
            other.number
            for other in plan.steps
            if other.part.tier == step.part.tier - 1 and held[other.number] & held[step.number]
        }
        needed = {further for number in direct for further in plan.steps[number].needs}
        assert set(step.needs) == direct | needed
        assert max(step.needs, default=-1) < step.number
        assert bool(step.needs) == (step.part.tier > Tier.SKETCH)


@settings(max_examples=25, deadline=None)
@given(cuts=CUTS, on_demand=st.booleans())
def test_every_order_of_a_plan_puts_what_is_needed_first(cuts: tuple[int, int, int], on_demand: bool) -> None:
    plan = plan_load(sketched(cuts).manifest, Order.DRAFT_FIRST, on_demand=on_demand)
    for order in Order:
        turn = {number: place for place, number in enumerate(plan.numbers(order))}
        assert sorted(turn) == list(range(len(plan.steps)))
        for step in plan.steps:
            assert all(turn[needed] < turn[step.number] for needed in step.needs)


def test_tiers_come_one_after_the_other_or_group_by_group() -> None:
    manifest = sketched((5_000, 6_000, 7_000)).manifest
    steps = plan_load(manifest, Order.DRAFT_FIRST).steps
    tiers_first = [(step.part.tier, step.part.group) for step in steps]
    assert tiers_first == sorted(tiers_first)
    groups_first = [(step.part.group, step.part.tier) for step in plan_load(manifest, Order.EXACT).steps]
    assert groups_first == sorted(groups_first)
    assert {tier for tier, _ in tiers_first} == set(Tier)


@settings(max_examples=25, deadline=None)
@given(cuts=CUTS, rows=st.lists(st.integers(0, 299), max_size=6))
def test_rows_are_in_parts_of_all_tiers(cuts: tuple[int, int, int], rows: list[int]) -> None:
    manifest = sketched(cuts).manifest
    wanted = {(0, row * 64 + column) for row in rows for column in range(64)}
    expected = {
        part.index
        for part in manifest.parts
        for segment in part.segments
        if segment.tensor == 0
        and wanted & {(0, index) for index in range(segment.start, segment.start + segment.count)}
    }
    assert RowParts(manifest, "embed").holding(rows) == expected


# What is in the slabs


def assert_group_holds(load: WeightLoad, built: BuiltArtifact, group: int, tier: Tier) -> None:
    for index in built.manifest.groups[group].tensors:
        tensor = built.manifest.tensors[index]
        held = load.slab(group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        assert np.array_equal(held, built.expected(tensor.name, tier)), tensor.name


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(cuts=CUTS, seed=st.integers(0, 2**32 - 1), decode_threads=st.integers(1, 3))
def test_gates_open_over_the_values_of_their_tier_however_bytes_arrive(
    cuts: tuple[int, int, int], seed: int, decode_threads: int
) -> None:
    built = sketched(cuts, seed)
    source = PacedSource(built.store)
    source.delay(seed=seed, max_s=0.001)
    holds = {
        tier: source.hold(
            reads_of(built.manifest, *[part for part in built.manifest.parts if part.tier is tier])
        )
        for tier in (Tier.DRAFT, Tier.REFINE)
    }
    options = LoadOptions(
        order=Order.DRAFT_FIRST, connections=3, range_bytes=5_000, decode_threads=decode_threads
    )
    with WeightLoad(source, built.manifest, options=options) as load:
        for group in built.manifest.groups:
            load.slab(group.index)[:] = 0xFF
        load.start()
        for tier in Tier:
            for group in range(len(LAYERS)):
                load.wait(group, tier, timeout_s=WAIT_S)
                assert_group_holds(load, built, group, tier)
            # The head is whole in the sketch, and so exact with it.
            assert load.is_ready(0, Tier.REFINE) == (tier is Tier.REFINE)
            assert load.is_ready(3, Tier.REFINE)
            for later, held in holds.items():
                if later == tier + 1:
                    held.release()
        assert load.join(WAIT_S)
        load.check_integrity()


@settings(max_examples=25, deadline=None)
@given(cuts=CUTS, order=st.randoms(use_true_random=False))
def test_any_order_that_needs_allow_gives_every_bit_and_parts_may_come_twice(
    cuts: tuple[int, int, int], order: random.Random
) -> None:
    built = sketched(cuts)
    reader = PartReader(built.store, built.manifest)
    slabs = [np.full(group.slab_bytes, 0xFF, np.uint8) for group in built.manifest.groups]
    waiting = list(plan_load(built.manifest, Order.EXACT).steps)
    done: set[int] = set()
    while waiting:
        step = order.choice([step for step in waiting if done.issuperset(step.needs)])
        for _ in range(order.randint(1, 2)):
            stored = reader.read(step.part)
            for segment in step.part.segments:
                tensor = built.manifest.tensors[segment.tensor]
                begin = tensor.offset_bytes + segment.start * tensor.element_bytes
                out = slabs[tensor.group][begin : begin + reader.segment_bytes(segment)]
                reader.decode(step.part, segment, stored, out)
        waiting.remove(step)
        done.add(step.number)
    for tensor in built.manifest.tensors:
        held = slabs[tensor.group][tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        assert np.array_equal(held, built.originals[tensor.name]), tensor.name


def test_a_load_in_a_process_of_its_own_opens_the_gates_of_all_tiers(tmp_path: Path) -> None:
    contents = llama_contents(num_layers=1)
    manifest = pack(model_store(contents), FileStore(tmp_path), tiers=TierOptions(sketch_bits=1)).manifest
    with start_process_load(str(tmp_path), options=LoadOptions(order=Order.DRAFT_FIRST)) as load:
        for tier in Tier:
            for group in manifest.groups:
                load.wait(group.index, tier, timeout_s=WAIT_S)
        assert load.manifest.tensors == manifest.tensors
        for tensor in manifest.tensors:
            held = load.slab(tensor.group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
            assert held.tobytes() == contents[tensor.name][2], tensor.name


# From a model to an artifact and back


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
@pytest.mark.parametrize(
    ("draft_bits", "sketch_bits"),
    [
        *((bits, None) for bits in range(8)),
        *((bits, sketch) for sketch in (0, 1) for bits in range(sketch + 1, 8)),
    ],
)
@pytest.mark.parametrize("tied", [False, True])
def test_a_model_comes_back_bit_by_bit_whatever_its_tiers(
    tmp_path: Path, dtype: str, draft_bits: int, sketch_bits: int | None, tied: bool
) -> None:
    contents = llama_contents(num_layers=1, dtype=dtype, tied=tied)
    store = MemoryStore()
    tiers = TierOptions(draft_bits=draft_bits, sketch_bits=sketch_bits)
    manifest = pack(model_store(contents), store, tiers=tiers, threads=1).manifest
    assert open_artifact(store) == manifest
    assert (manifest.stored_bytes(Tier.SKETCH) > 0) == (sketch_bits is not None)
    unpack(store, tmp_path / "back", threads=2)
    assert read_back([(tmp_path / "back" / "model.safetensors").read_bytes()]) == contents
    with WeightLoad(store, manifest) as load:
        load.start()
        assert load.join(WAIT_S)
        for tensor in manifest.tensors:
            held = load.slab(tensor.group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
            assert held.tobytes() == contents[tensor.name][2], tensor.name


@pytest.mark.parametrize("tier", [Tier.SKETCH, Tier.DRAFT])
@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_a_part_reader_gives_the_values_of_each_tier(tier: Tier, dtype: str) -> None:
    contents = llama_contents(num_layers=1, dtype=dtype)
    store, manifest = packed(contents, draft_bits=5, sketch_bits=2)
    reader = PartReader(store, manifest)
    values = {tensor.index: np.zeros(tensor.size_bytes, np.uint8) for tensor in manifest.tensors}
    for part in manifest.parts:
        if part.tier <= tier:
            stored = reader.read(part)
            for segment in part.segments:
                width = manifest.tensors[segment.tensor].element_bytes
                out = values[segment.tensor][segment.start * width : (segment.start + segment.count) * width]
                reader.decode(part, segment, stored, out)
    for tensor in manifest.tensors:
        exact = np.frombuffer(contents[tensor.name][2], np.uint8)
        has_more = tensor.name.endswith(("v_proj.weight", "lm_head.weight"))
        bits = {Tier.SKETCH: 2, Tier.DRAFT: 7 if has_more else 5}[tier]
        expected = coarse(dtype, bits, exact) if len(tensor.shape) > 1 else exact
        assert np.array_equal(values[tensor.index], expected), tensor.name


def test_an_artifact_with_a_sketch_has_everything_in_it() -> None:
    contents = llama_contents(num_layers=1)
    contents["model.layers.0.codes"] = random_content("I8", (40, 40))
    contents["model.layers.0.quantized.weight"] = random_content("F8_E4M3", (40, 40))
    store, manifest = packed(contents, sketch_bits=1)
    assert {tensor.encoding.tiers[0] for tensor in manifest.tensors} == {Tier.SKETCH}
    assert encodings(manifest)["model.layers.0.codes"] == "bytes.sketch"
    assert encodings(manifest)["model.norm.weight"] == "whole.sketch"
    assert verify(store).ok
    names = [info.name.rpartition("/")[2] for info in store.list("blobs/") if info.name.endswith(".bin")]
    assert sorted(names) == ["draft-000.bin", "refine-000.bin", "sketch-000.bin"]
    assert all(one.tier <= other.tier for one, other in pairwise(manifest.parts))


def test_a_sketch_of_one_bit_takes_29_percent_and_costs_nothing_in_all() -> None:
    contents = llama_contents(num_layers=1, hidden=256, vocabulary=2000)
    _, plain = packed(contents)
    _, with_sketch = packed(contents, sketch_bits=1)
    raw_bytes = plain.weight_bytes
    assert 0.28 < with_sketch.stored_bytes(Tier.SKETCH) / raw_bytes < 0.31
    stored = [sum(part.size_bytes for part in manifest.parts) for manifest in (plain, with_sketch)]
    assert abs(stored[1] - stored[0]) < 0.01 * stored[0]
    assert with_sketch.stored_bytes(Tier.REFINE) == plain.stored_bytes(Tier.REFINE)


# How many bits for which tensor


def test_embeddings_and_head_may_have_more_bits_than_the_layers() -> None:
    _, manifest = packed(llama_contents(), draft_bits=2, embed_bits=4, head_bits=5)
    found = encodings(manifest)
    assert found[EMBED] == "bf16.4"
    assert found[HEAD] == "bf16.5"
    assert found["model.layers.1.mlp.up_proj.weight"] == "bf16.2"
    assert found["model.norm.weight"] == "whole"


@pytest.mark.parametrize(("embed_bits", "head_bits", "expected"), [(4, 5, "bf16.5"), (6, 5, "bf16.6")])
def test_tied_embeddings_have_the_bits_of_whichever_asks_for_more(
    embed_bits: int, head_bits: int, expected: str
) -> None:
    _, manifest = packed(llama_contents(tied=True), embed_bits=embed_bits, head_bits=head_bits)
    assert manifest.aliases == {HEAD: EMBED}
    assert encodings(manifest)[EMBED] == expected


def test_embeddings_are_the_head_too_where_there_is_none() -> None:
    contents = llama_contents()
    del contents[HEAD]
    _, manifest = packed(contents, head_bits=6)
    assert encodings(manifest)[EMBED] == "bf16.6"
    assert encodings(manifest)["model.layers.0.mlp.up_proj.weight"] == "bf16.3"


@pytest.mark.parametrize(
    ("dtype", "expected", "more"),
    [("BF16", "bf16.3", "bf16.5"), ("F16", "f16.3", "f16.5"), ("F32", "f32.7", "f32.7")],
)
def test_without_a_wish_the_bits_suit_the_dtype_and_the_head_and_values_have_more(
    dtype: str, expected: str, more: str
) -> None:
    _, manifest = packed(llama_contents(dtype=dtype))
    found = encodings(manifest)
    matrices = {name: found[name] for name, tensor in manifest.by_name.items() if len(tensor.shape) > 1}
    has_more = {name for name in matrices if name.endswith(("v_proj.weight", "lm_head.weight"))}
    assert len(has_more) == 3
    assert {matrices[name] for name in has_more} == {more}
    assert {matrices[name] for name in matrices.keys() - has_more} == {expected}


def test_tied_embeddings_of_a_decoder_have_the_heads_bits_and_an_encoders_have_not() -> None:
    _, manifest = packed(llama_contents(tied=True))
    assert encodings(manifest)[EMBED] == "bf16.5"
    contents = llama_contents()
    del contents["lm_head.weight"]
    assert encodings(packed(contents)[1])[EMBED] == "bf16.5"
    encoder = {name: content for name, content in contents.items() if "v_proj" not in name}
    assert encodings(packed(encoder)[1])[EMBED] == "bf16.3"


@pytest.mark.parametrize(
    ("bits", "message"),
    [
        ({"draft_bits": 8}, "--draft-bits 8: a tier has 0 to 7 mantissa bits"),
        ({"draft_bits": -1}, "--draft-bits -1"),
        ({"embed_bits": 9}, "--embed-bits 9"),
        ({"head_bits": 8}, "--head-bits 8"),
        ({"sketch_bits": 7}, "--sketch-bits 7: a tier has 0 to 6 mantissa bits"),
        ({"sketch_bits": 3}, "--sketch-bits 3 leaves a draft of 3 mantissa bits nothing to add"),
        ({"sketch_bits": 4, "draft_bits": 2}, "leaves a draft of 2"),
        ({"sketch_bits": 2, "draft_bits": 5, "embed_bits": 1}, "leaves a draft of 1"),
        ({"sketch_bits": 2, "head_bits": 2}, "leaves a draft of 2"),
    ],
)
def test_invalid_bits_are_refused(bits: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        TierOptions(**bits)
    assert caught.value.hint
