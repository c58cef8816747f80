"""Fair order: tenants are served tokens in equal shares, and no request waits for ever."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.runtime.engine.waiting import (
    MAX_DEBTORS,
    MAX_PASSED_OVER,
    Account,
    Accounts,
    WaitingList,
    fair_order,
)
from teneral.runtime.step.requests import Priority


@dataclass(eq=False)
class Ask:
    queue_name: str
    num_tokens: int = 10
    number: int = 0
    priority: Priority = Priority.INTERACTIVE

    def __repr__(self) -> str:
        return f"{self.queue_name}{self.number}"


def asks(tenant: str, count: int, num_tokens: int = 10) -> list[Ask]:
    return [Ask(tenant, num_tokens, number) for number in range(count)]


def names(order: list[Ask]) -> str:
    return "".join(ask.queue_name for ask in order)


def admit_first(waiting: WaitingList[Ask]) -> Ask:
    waiting.arrange()
    first = next(iter(waiting))
    waiting.start(first)
    waiting.charge(first, num_prompt_tokens=first.num_tokens)
    waiting.check_integrity()
    return first


# -- the order, as a function --------------------------------------------------------------------------------


def test_one_tenant_is_served_in_the_order_of_its_requests() -> None:
    waiting = asks("a", 5)
    assert fair_order(waiting, {"a": Account(7.0)}) == waiting


def test_tenants_that_are_even_take_turns() -> None:
    order = fair_order([*asks("a", 3), *asks("b", 3)], {"a": Account(0.0), "b": Account(0.0)})
    assert names(order) == "ababab"
    assert [ask.number for ask in order] == [0, 0, 1, 1, 2, 2]


def test_turns_are_of_tokens_not_of_requests() -> None:
    order = fair_order([*asks("a", 2, 30), *asks("b", 6, 10)], {"a": Account(0.0), "b": Account(0.0)})
    assert names(order) == "abbbabbb"


def test_who_was_served_least_goes_first() -> None:
    order = fair_order([*asks("a", 2), *asks("b", 4)], {"a": Account(20.0), "b": Account(0.0)})
    assert names(order) == "bbabab"


def test_who_was_passed_over_too_often_goes_first_with_one_request() -> None:
    accounts = {"a": Account(1000.0, num_passed_over=2 * MAX_PASSED_OVER), "b": Account(0.0)}
    assert names(fair_order([*asks("b", 3), *asks("a", 2)], accounts)) == "abbba"


lines = st.lists(
    st.tuples(st.sampled_from("abcde"), st.integers(1, 500), st.integers(0, 1_000)), min_size=1, max_size=40
)


@given(lines, st.dictionaries(st.sampled_from("abcde"), st.tuples(st.floats(0, 1e6), st.integers(0, 400))))
def test_any_order_has_everybody_once_and_keeps_that_of_each_tenant(
    lines: list[tuple[str, int, int]], served: dict[str, tuple[float, int]]
) -> None:
    waiting = [Ask(tenant, num_tokens, number) for number, (tenant, num_tokens, _) in enumerate(lines)]
    accounts = {
        tenant: Account(served.get(tenant, (0.0, 0))[0], num_passed_over=served.get(tenant, (0.0, 0))[1])
        for tenant in "abcde"
    }
    order = fair_order(waiting, accounts)
    assert sorted(order, key=lambda ask: ask.number) == waiting
    for tenant in "abcde":
        own = [ask.number for ask in order if ask.queue_name == tenant]
        assert own == sorted(own)


# -- the books -----------------------------------------------------------------------------------------------


def test_a_single_request_waits_for_at_most_one_of_two_hundred_others() -> None:
    waiting: WaitingList[Ask] = WaitingList()
    for ask in asks("many", 200):
        waiting.join(ask)
    for _ in range(50):
        admit_first(waiting)
    waiting.join(Ask("one", 500))
    assert "one" in {admit_first(waiting).queue_name for _ in range(2)}


def test_turns_cannot_be_saved_up_by_waiting_elsewhere() -> None:
    waiting: WaitingList[Ask] = WaitingList()
    for ask in [*asks("a", 100), *asks("b", 1)]:
        waiting.join(ask)
    for _ in range(60):
        admit_first(waiting)
    for ask in asks("b", 30):
        waiting.join(ask)
    served = names([admit_first(waiting) for _ in range(20)])
    assert abs(served.count("a") - served.count("b")) <= 2


def test_a_pause_does_not_cancel_what_a_tenant_owes() -> None:
    waiting: WaitingList[Ask] = WaitingList()
    greedy = Ask("greedy", 1_000)
    for ask in (greedy, *asks("a", 100)):
        waiting.join(ask)
    assert {admit_first(waiting).queue_name for _ in range(2)} == {"greedy", "a"}
    waiting.end(greedy)
    waiting.join(Ask("greedy"))
    assert names([admit_first(waiting) for _ in range(50)]) == "a" * 50


def test_when_no_request_is_left_all_accounts_begin_anew() -> None:
    waiting: WaitingList[Ask] = WaitingList()
    greedy = Ask("greedy", 1_000)
    waiting.join(greedy)
    admit_first(waiting)
    waiting.end(greedy)
    for ask in (Ask("a"), Ask("greedy")):
        waiting.join(ask)
    assert names([admit_first(waiting) for _ in range(2)]) == "agreedy"


def test_answers_cost_twice_what_prompts_do() -> None:
    waiting: WaitingList[Ask] = WaitingList()
    for ask in [*asks("a", 4), *asks("b", 8)]:
        waiting.join(ask)
    waiting.charge(admit_first(waiting), num_output_tokens=12)  # 34 with its prompt
    assert names([admit_first(waiting) for _ in range(5)]) == "bbbba"


def test_newcomers_pass_a_large_request_over_no_more_often_than_the_bound_says() -> None:
    """A tenant that owes, and another that never had a turn for each that gets one."""
    waiting: WaitingList[Ask] = WaitingList()
    first = Ask("large", 100_000)
    waiting.join(first)
    waiting.join(Ask("x0", 1))
    admit_first(waiting)
    large = Ask("large", 100_000, 1)
    waiting.join(large)
    num_before = 0
    while (admitted := admit_first(waiting)) is not large:
        num_before += 1
        waiting.end(admitted)
        waiting.join(Ask(f"x{num_before}", 1))
        assert num_before <= 2 * MAX_PASSED_OVER + 1  # two tenants wait at any time
    assert num_before > MAX_PASSED_OVER  # it owed, so it did wait


def test_the_accounts_of_tenants_that_left_are_bounded() -> None:
    accounts = Accounts()
    accounts.wait("stays")
    for number in range(MAX_DEBTORS + 500):
        name = f"t{number}"
        accounts.wait(name)
        accounts.start(name)
        accounts.charge(name, 10.0 + number)
        accounts.end(name)
    accounts.check_integrity()
    assert len(accounts.by_tenant) == MAX_DEBTORS + 1


def test_who_was_preempted_is_the_first_of_its_tenant_again_and_batch_work_goes_last() -> None:
    waiting: WaitingList[Ask] = WaitingList()
    batch = Ask("a", number=9, priority=Priority.BATCH)
    for ask in (batch, *asks("a", 3)):
        waiting.join(ask)
    first = admit_first(waiting)
    waiting.put_back(first)
    assert [ask.number for ask in waiting] == [0, 1, 2, 9]
    assert waiting.num_by_priority() == {Priority.INTERACTIVE: 3, Priority.BATCH: 1}
    assert (waiting.num_tenants(), waiting.num_of_tenant("a"), len(waiting)) == (1, 4, 4)


@settings(deadline=None)
@given(st.data())
def test_shares_stay_even_among_tenants_that_always_have_something_waiting(data: st.DataObject) -> None:
    """No two of them are ever further apart than their largest requests (Goyal et al., theorem 1)."""
    waiting: WaitingList[Ask] = WaitingList()
    sizes = {tenant: data.draw(st.integers(1, 60), label=tenant) for tenant in "abc"}
    served = dict.fromkeys(sizes, 0)
    for tenant, size in sizes.items():
        for ask in asks(tenant, 40, size):
            waiting.join(ask)
    for _ in range(30):
        admitted = admit_first(waiting)
        served[admitted.queue_name] += admitted.num_tokens
        if data.draw(st.booleans()):
            waiting.end(admitted)
        waiting.join(Ask(admitted.queue_name, admitted.num_tokens))
        for one, other in combinations(sizes, 2):
            assert abs(served[one] - served[other]) <= sizes[one] + sizes[other]
