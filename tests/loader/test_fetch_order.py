"""The order of fetches: the plan's, unless a caller asks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.artifacts import build_artifact
from tests.support.inspection import steps_of

from teneral.loader.format.manifest import Tier
from teneral.loader.load.options import Order
from teneral.loader.load.plan import FetchOrder, Plan, plan_load

LAYOUT = [
    ("embed", {"embed": ("BF16", (300, 64))}),
    ("layers.0", {"a": ("BF16", (200, 64)), "b": ("BF16", (96, 128))}),
    ("layers.1", {"c": ("BF16", (200, 64))}),
]
EVERYTHING_BYTES = 1 << 30


def plan() -> Plan:
    built = build_artifact(LAYOUT, draft_elements=3_000, refine_elements=2_000)
    return plan_load(built.manifest, Order.EXACT, on_demand=True)


def take_one(turns: FetchOrder) -> int:
    run = turns.next_run(0)
    assert run == [turns.peek()]
    take(turns, run)
    return run[0]


def take(turns: FetchOrder, run: list[int]) -> None:
    """Have these read, whole."""
    turns.take(run)
    for number in run:
        turns.handed_out(number, steps_of(turns)[number].part.size_bytes)


def test_without_a_wish_turns_follow_the_plan() -> None:
    steps = plan().steps
    turns = FetchOrder(plan())
    assert [take_one(turns) for _ in steps] == [step.number for step in steps]
    assert turns.peek() is None
    assert turns.next_run(EVERYTHING_BYTES) == []
    assert turns[0] == 0


def test_what_is_asked_for_comes_next_and_brings_what_it_needs() -> None:
    the_plan = plan()
    turns = FetchOrder(the_plan)
    take_one(turns)
    wish = next(step for step in reversed(the_plan.steps) if len(step.needs) == 2)
    turns.promote([wish.number])
    assert turns.awaited_bytes == sum(
        the_plan.steps[number].part.size_bytes for number in (*wish.needs, wish.number)
    )
    assert [take_one(turns) for _ in range(3)] == [*wish.needs, wish.number]
    assert take_one(turns) == 1
    turns.promote([wish.number, 0])  # had their turn
    assert take_one(turns) == 2


def test_the_first_group_is_awaited_until_all_of_it_is_asked_for() -> None:
    the_plan = plan()
    turns = FetchOrder(the_plan)
    first = [step for step in the_plan.steps if step.part.group == 1]
    for _ in first:
        assert turns.awaited_bytes == sum(step.part.size_bytes for step in first)
        take_one(turns)
    assert turns.awaited_bytes is None


def test_what_is_to_be_read_again_is_awaited_again() -> None:
    the_plan = plan()
    turns = FetchOrder(the_plan)
    first = [step for step in the_plan.steps if step.part.group == 1]
    for _ in first:
        take_one(turns)
    assert turns.awaited_bytes is None
    turns.handed_out(0, -first[0].part.size_bytes)
    assert turns.awaited_bytes == first[0].part.size_bytes
    turns.handed_out(0, first[0].part.size_bytes - 7)
    assert turns.awaited_bytes == first[0].part.size_bytes
    turns.handed_out(0, 7)
    assert turns.awaited_bytes is None


def test_a_run_is_what_lies_together_and_fits_one_range() -> None:
    the_plan = plan()
    turns = FetchOrder(the_plan)
    drafts = [step for step in the_plan.steps if step.part.group == 1 and step.part.tier is Tier.DRAFT]
    assert len(drafts) > 3
    assert turns.next_run(EVERYTHING_BYTES) == [step.number for step in drafts]
    begin, end = drafts[0].part.offset_bytes, drafts[2].part.offset_bytes + drafts[2].part.size_bytes
    assert turns.next_run(end - begin) == [0, 1, 2]
    assert turns.next_run(end - begin - 1) == [0, 1]


@settings(max_examples=50, deadline=None)
@given(st.data())
def test_whatever_is_asked_for_every_step_has_one_turn_after_those_that_it_needs(data: st.DataObject) -> None:
    the_plan = plan()
    turns = FetchOrder(the_plan)
    order: list[int] = []
    while turns.peek() is not None:
        if data.draw(st.booleans()):
            turns.promote(data.draw(st.sets(st.integers(0, len(the_plan.steps) - 1), max_size=4)))
        run = turns.next_run(data.draw(st.sampled_from([0, 3_000, EVERYTHING_BYTES])))
        take(turns, run)
        order += run
    assert sorted(order) == [step.number for step in the_plan.steps]
    assert [turns[number] for number in order] == list(range(len(order)))
    for number in order:
        assert all(turns[needed] < turns[number] for needed in the_plan.steps[number].needs)
    assert turns.awaited_bytes is None


def tiers_of(plan: Plan, numbers: list[int]) -> list[Tier]:
    return [plan.steps[number].part.tier for number in numbers]


def test_what_had_its_turn_stays_and_the_rest_goes_on_in_the_other_order() -> None:
    the_plan = plan()
    turns = FetchOrder(the_plan)
    had = [take_one(turns) for _ in range(len(the_plan.steps) // 3)]
    assert Tier.REFINE in tiers_of(the_plan, had)
    turns.reorder(Order.DRAFT_FIRST)
    rest = [take_one(turns) for _ in range(len(the_plan.steps) - len(had))]
    assert sorted(had + rest) == list(range(len(the_plan.steps)))
    assert tiers_of(the_plan, rest) == sorted(tiers_of(the_plan, rest))
    assert turns.peek() is None


def test_what_was_asked_for_comes_first_in_the_other_order_too() -> None:
    the_plan = plan()
    turns = FetchOrder(the_plan)
    wish = next(step for step in reversed(the_plan.steps) if len(step.needs) == 2)
    turns.promote([wish.number])
    turns.reorder(Order.DRAFT_FIRST)
    assert [take_one(turns) for _ in range(3)] == [*wish.needs, wish.number]


def test_going_back_to_the_plans_own_order_is_as_if_nothing_had_been() -> None:
    the_plan = plan()
    turns = FetchOrder(the_plan)
    turns.reorder(Order.DRAFT_FIRST)
    turns.reorder(Order.EXACT)
    assert [take_one(turns) for _ in the_plan.steps] == list(range(len(the_plan.steps)))


@settings(max_examples=60, deadline=None)
@given(
    first=st.sampled_from(Order),
    cuts=st.tuples(st.integers(700, 9_000), st.integers(700, 9_000)),
    on_demand=st.booleans(),
    data=st.data(),
)
def test_whenever_the_order_changes_every_step_has_one_turn_after_those_that_it_needs(
    first: Order, cuts: tuple[int, int], on_demand: bool, data: st.DataObject
) -> None:
    built = build_artifact(LAYOUT, draft_elements=cuts[0], refine_elements=cuts[1])
    the_plan = plan_load(built.manifest, first, on_demand=on_demand)
    turns = FetchOrder(the_plan)
    order: list[int] = []
    while turns.peek() is not None:
        match data.draw(st.sampled_from(["take", "take", "take", "reorder", "promote"])):
            case "reorder":
                turns.reorder(data.draw(st.sampled_from(Order)))
            case "promote":
                turns.promote(data.draw(st.sets(st.integers(0, len(the_plan.steps) - 1), max_size=3)))
        run = turns.next_run(data.draw(st.sampled_from([0, 3_000, EVERYTHING_BYTES])))
        take(turns, run)
        order += run
    assert sorted(order) == list(range(len(the_plan.steps)))
    for number in order:
        assert all(turns[needed] < turns[number] for needed in the_plan.steps[number].needs)
    assert turns.awaited_bytes is None


def test_a_tier_that_comes_before_the_next_has_an_end_of_its_own() -> None:
    built = build_artifact(LAYOUT, draft_elements=3_000, refine_elements=2_000)
    the_plan = plan_load(built.manifest, Order.DRAFT_FIRST, on_demand=True)
    of_tier = {
        tier: sum(step.part.size_bytes for step in the_plan.steps if step.part.tier is tier) for tier in Tier
    }
    turns = FetchOrder(the_plan)
    last = len(the_plan.steps) - 1
    assert turns.bytes_to_end(0) == of_tier[Tier.SKETCH] + of_tier[Tier.DRAFT]
    assert turns.bytes_to_end(last) == turns.unread_bytes == the_plan.stored_bytes
    take_one(turns)
    read_bytes = the_plan.steps[0].part.size_bytes
    assert turns.bytes_to_end(0) == of_tier[Tier.SKETCH] + of_tier[Tier.DRAFT] - read_bytes
    turns.handed_out(0, -read_bytes)  # to be read again
    assert turns.bytes_to_end(0) == of_tier[Tier.SKETCH] + of_tier[Tier.DRAFT]
    turns.reorder(Order.EXACT)
    assert turns.bytes_to_end(0) == the_plan.stored_bytes


def test_tiers_that_take_turns_end_together() -> None:
    turns = FetchOrder(plan())
    assert turns.bytes_to_end(0) == turns.unread_bytes == plan().stored_bytes
