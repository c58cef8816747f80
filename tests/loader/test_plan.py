"""Plans are values: they are tested without a thread or a byte read."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.artifacts import BuiltArtifact, build_artifact

from teneral.loader.format.manifest import Tier
from teneral.loader.load.options import Order
from teneral.loader.load.plan import Plan, expert_groups, follows, plan_load

THREE_LAYERS = [
    ("embed", {"embed": ("BF16", (300, 64))}),
    ("layers.0", {"a": ("BF16", (200, 64)), "norm": ("F32", (64,)), "b": ("BF16", (96, 128))}),
    ("layers.1", {"c": ("BF16", (200, 64)), "d": ("F16", (100, 64))}),
    ("head", {"norm_f": ("BF16", (64,))}),
]


def plan_of(built: BuiltArtifact, order: Order = Order.EXACT) -> Plan:
    return plan_load(built.manifest, order)


def turns(plan: Plan) -> list[tuple[int, Tier]]:
    """Group and tier of each step, repetitions left out."""
    seen: list[tuple[int, Tier]] = []
    for step in plan.steps:
        turn = (step.part.group, step.part.tier)
        if turn not in seen[-1:]:
            seen.append(turn)
    return seen


def test_exact_order_completes_one_group_after_the_other() -> None:
    plan = plan_of(build_artifact(THREE_LAYERS, draft_elements=5_000, refine_elements=4_000))
    assert turns(plan) == [
        (0, Tier.DRAFT),
        (0, Tier.REFINE),
        (1, Tier.DRAFT),
        (1, Tier.REFINE),
        (2, Tier.DRAFT),
        (2, Tier.REFINE),
        (3, Tier.DRAFT),
    ]


def test_draft_first_order_reads_all_drafts_before_any_refinement() -> None:
    plan = plan_of(
        build_artifact(THREE_LAYERS, draft_elements=5_000, refine_elements=4_000), Order.DRAFT_FIRST
    )
    assert turns(plan) == [(group, Tier.DRAFT) for group in range(4)] + [
        (group, Tier.REFINE) for group in range(3)
    ]


def test_every_part_is_planned_once() -> None:
    built = build_artifact(THREE_LAYERS, draft_elements=3_000, refine_elements=2_000)
    for order in Order:
        plan = plan_of(built, order)
        assert sorted(step.part.index for step in plan.steps) == [part.index for part in built.manifest.parts]
        assert [step.number for step in plan.steps] == list(range(len(plan.steps)))
        assert plan.stored_bytes == sum(part.size_bytes for part in built.manifest.parts)


@settings(max_examples=40, deadline=None)
@given(
    draft_elements=st.integers(1_000, 30_000),
    refine_elements=st.integers(1_000, 30_000),
    order=st.sampled_from(Order),
)
def test_a_refine_step_needs_exactly_the_draft_steps_that_share_elements_with_it(
    draft_elements: int, refine_elements: int, order: Order
) -> None:
    built = build_artifact(THREE_LAYERS, draft_elements=draft_elements, refine_elements=refine_elements)
    plan = plan_of(built, order)

    def elements(number: int) -> set[tuple[int, int]]:
        segments = plan.steps[number].part.segments
        return {(seg.tensor, index) for seg in segments for index in range(seg.start, seg.start + seg.count)}

    drafts = {step.number: elements(step.number) for step in plan.steps if step.part.tier is Tier.DRAFT}
    for step in plan.steps:
        if step.part.tier is Tier.DRAFT:
            assert step.needs == ()
        else:
            own = elements(step.number)
            assert step.needs == tuple(number for number, theirs in drafts.items() if theirs & own)
            assert max(step.needs) < step.number


@pytest.mark.parametrize("order", Order)
def test_tables_come_last_when_their_rows_are_asked_for(order: Order) -> None:
    built = build_artifact(THREE_LAYERS, draft_elements=6_500, refine_elements=4_000)
    plan = plan_load(built.manifest, order, on_demand=True)
    embed = [step.number for step in plan.steps if step.part.group == 0]
    for tier in (Tier.DRAFT, Tier.REFINE):
        ours = [number for number in embed if plan.steps[number].part.tier is tier]
        others = [step.number for step in plan.steps if step.part.group != 0 and step.part.tier is tier]
        assert len(ours) > 1
        assert min(ours) > max(others)
    if order is Order.EXACT:
        assert embed == list(range(len(plan.steps) - len(embed), len(plan.steps)))


def test_a_first_group_in_one_part_comes_first_all_the_same() -> None:
    plan = plan_load(build_artifact(THREE_LAYERS).manifest, Order.EXACT, on_demand=True)
    assert plan.steps[0].part.group == 0


@settings(max_examples=60, deadline=None)
@given(
    draft_elements=st.integers(1_000, 30_000),
    refine_elements=st.integers(1_000, 30_000),
    order=st.sampled_from(Order),
    on_demand=st.booleans(),
)
def test_every_step_comes_after_those_that_it_needs(
    draft_elements: int, refine_elements: int, order: Order, on_demand: bool
) -> None:
    layout = [
        ("embed", {"embed": ("BF16", (300, 64)), "types": ("BF16", (20, 64)), "norm": ("BF16", (64,))}),
        *THREE_LAYERS[1:],
    ]
    built = build_artifact(layout, draft_elements=draft_elements, refine_elements=refine_elements)
    plan = plan_load(built.manifest, order, on_demand=on_demand)
    assert sorted(step.part.index for step in plan.steps) == list(range(len(built.manifest.parts)))
    for step in plan.steps:
        assert all(needed < step.number for needed in step.needs)
        assert bool(step.needs) == (step.part.tier is Tier.REFINE)


def test_parts_that_lie_behind_each_other_can_be_read_together() -> None:
    plan = plan_of(build_artifact(THREE_LAYERS, draft_elements=5_000, refine_elements=4_000))
    for step, following in pairwise(plan.steps):
        same_kind = (step.part.group, step.part.tier) == (following.part.group, following.part.tier)
        assert follows(step, following) == same_kind
        assert not follows(following, step)


def test_parts_that_belong_apart_in_memory_are_not_read_together() -> None:
    layout = [("a", {"u": ("U8", (100,)), "w": ("F32", (100,)), "v": ("F32", (64,))})]
    plan = plan_of(build_artifact(layout, packed=False, draft_elements=100))
    # Between the bytes of u and those of w are 28 that align w in the slab, and none in the blob.
    assert [step.slab_offset_bytes for step in plan.steps] == [0, 128, 576]
    assert [follows(*pair) for pair in pairwise(plan.steps)] == [False, False]


def test_raw_parts_without_a_digest_go_straight_to_their_place() -> None:
    layout = [("a", {"first": ("F32", (16, 10)), "second": ("U8", (128,))}), ("b", {"third": ("I64", (7,))})]
    plan = plan_of(build_artifact(layout, packed=False))
    assert [step.slab_offset_bytes for step in plan.steps] == [0, 0]


def test_a_raw_part_in_the_middle_of_a_tensor_knows_its_offset() -> None:
    built = build_artifact(
        [("a", {"w": ("F32", (100,)), "v": ("F16", (64,))})], packed=False, draft_elements=60
    )
    plan = plan_of(built)
    assert [step.slab_offset_bytes for step in plan.steps[:1]] == [0]
    # The second part ends in the gap that aligns the second tensor: its bytes are not the slab's.
    assert plan.steps[1].slab_offset_bytes is None
    assert plan.steps[2].slab_offset_bytes == 448 + 2 * (120 - 100)


def test_parts_with_a_digest_are_always_staged() -> None:
    plan = plan_of(build_artifact([("a", {"w": ("F32", (64,))})], packed=True))
    assert [step.slab_offset_bytes for step in plan.steps] == [None]


def test_a_manifest_without_parts_has_an_empty_plan() -> None:
    plan = plan_of(build_artifact([("empty", {}), ("nothing", {"w": ("BF16", (0, 8))})]))
    assert plan.steps == ()
    assert plan.stored_bytes == 0


def mixture(*, tied: bool) -> BuiltArtifact:
    """Two layers of two experts each; the table is in two parts."""
    groups = [("embed", {"embed": ("BF16", (2048, 64))})]
    for layer in range(2):
        groups.append((f"layers.{layer}", {f"own.{layer}": ("BF16", (64, 64))}))
        groups += [
            (f"layers.{layer}.experts.{expert}", {f"expert.{layer}.{expert}": ("BF16", (64, 64))})
            for expert in range(2)
        ]
    head = {"norm": ("BF16", (64,))} if tied else {"norm": ("BF16", (64,)), "head": ("BF16", (2048, 64))}
    return build_artifact([*groups, ("head", head)], draft_elements=1024 * 64, refine_elements=1024 * 64)


@pytest.mark.parametrize("tied", [True, False])
def test_experts_come_last_and_a_table_that_is_no_head_with_them(tied: bool) -> None:
    manifest = mixture(tied=tied).manifest
    plan = plan_load(manifest, Order.EXACT, on_demand=True)
    names = list(dict.fromkeys(manifest.groups[step.part.group].name for step in plan.steps))
    experts = [f"layers.{layer}.experts.{expert}" for layer in range(2) for expert in range(2)]
    assert names == ["layers.0", "layers.1", "head", "embed", *experts]
    optional = {manifest.groups[manifest.parts[index].group].name for index in plan.optional}
    assert optional == {*experts} | (set() if tied else {"embed"})
    assert not plan_load(manifest, Order.EXACT).optional


def test_parts_can_be_left_out() -> None:
    manifest = mixture(tied=True).manifest
    experts = expert_groups(manifest)
    of_experts = frozenset(part.index for part in manifest.parts if part.group in experts)
    plan = plan_load(manifest, Order.EXACT, on_demand=True, without=of_experts)
    assert {step.part.group for step in plan.steps} == {group.index for group in manifest.groups} - experts
    assert [step.number for step in plan.steps] == list(range(len(plan.steps)))
