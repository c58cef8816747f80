"""Plans are values: they are tested without a thread or a byte read."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.artifacts import BuiltArtifact, build_artifact

from teneral.loader.format.manifest import Tier
from teneral.loader.stream.options import Order
from teneral.loader.stream.plan import MIN_RANGE_BYTES, Plan, plan_load

MIB = 1024 * 1024
THREE_LAYERS = [
    ("embed", {"embed": ("BF16", (300, 64))}),
    ("layers.0", {"a": ("BF16", (200, 64)), "norm": ("F32", (64,)), "b": ("BF16", (96, 128))}),
    ("layers.1", {"c": ("BF16", (200, 64)), "d": ("F16", (100, 64))}),
    ("head", {"norm_f": ("BF16", (64,))}),
]


def plan_of(
    built: BuiltArtifact, order: Order = Order.EXACT, range_bytes: int = MIB, connections: int = 8
) -> Plan:
    return plan_load(built.manifest, order, range_bytes=range_bytes, connections=connections)


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


@settings(max_examples=40, deadline=None)
@given(
    range_bytes=st.integers(1, 3 * MIB),
    connections=st.integers(1, 32),
    packed=st.booleans(),
)
def test_ranges_cover_each_part_once_and_stay_within_the_bound(
    range_bytes: int, connections: int, packed: bool
) -> None:
    layout = [
        ("a", {"w": ("F32", (700, 1000))}),
        ("b", {"v": ("F32", (30, 10))}),
        ("c", {"u": ("F32", (100, 100))}),
    ]
    if range_bytes < 1000:
        layout = layout[1:2]
    built = build_artifact(layout, packed=packed, draft_elements=400_000)
    plan = plan_of(built, range_bytes=range_bytes, connections=connections)
    for step, reads in zip(plan.steps, plan.reads, strict=True):
        assert all(read.step == step.number for read in reads)
        assert reads[0].start_bytes == 0
        assert reads[-1].end_bytes == step.part.size_bytes
        assert all(before.end_bytes == after.start_bytes for before, after in pairwise(reads))
        assert all(0 < read.end_bytes - read.start_bytes <= range_bytes for read in reads)


def test_parts_at_both_ends_are_shared_by_all_connections() -> None:
    layout = [(name, {name: ("F32", (1000, 1000))}) for name in ("first", "middle", "last")]
    built = build_artifact(layout, packed=False, draft_elements=1_000_000)
    plan = plan_of(built, range_bytes=4 * MIB, connections=8)
    assert [len(reads) for reads in plan.reads] == [8, 1, 8]


def test_sharing_does_not_make_requests_that_are_too_small_to_pay() -> None:
    built = build_artifact([("only", {"w": ("F32", (500, 250))})], packed=False, draft_elements=1_000_000)
    plan = plan_of(built, range_bytes=4 * MIB, connections=64)
    (reads,) = plan.reads
    assert len(reads) == 2
    assert reads[0].end_bytes > MIN_RANGE_BYTES * 0.9  # two equal ones, where 64 were wanted


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
