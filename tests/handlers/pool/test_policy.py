"""The scaling policy: its invariants over random histories, and eviction by greedy-dual."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from teneral.handlers.pool.policy import (
    Candidate,
    Demand,
    Idle,
    IdleGaps,
    InstanceLoad,
    Quiet,
    Window,
    desired,
    route,
    to_end,
    value_of,
    victim,
)
from teneral.handlers.pool.values import Model


@pytest.mark.parametrize(
    ("in_work", "waiting", "wanted"),
    [(0, 0, 1), (1, 0, 2), (8, 0, 2), (8, 1, 3), (0, 9, 3), (100, 0, 4)],
)
def test_instances_are_wanted_for_each_target_of_requests(in_work: int, waiting: int, wanted: int) -> None:
    model = Model("m", "/m", min_warm=1, max_instances=4, buffer=1, target_concurrency=8)
    assert desired(model, Demand(in_work, waiting)) == wanted


def test_a_request_goes_to_its_session_unless_that_is_busier_by_more_than_two() -> None:
    model = Model("m", "/m", max_concurrency=5)
    assert route(model, [InstanceLoad("a", 1), InstanceLoad("b", 3, has_session=True)]) == "b"
    assert route(model, [InstanceLoad("a", 0), InstanceLoad("b", 3, has_session=True)]) == "a"
    assert route(model, [InstanceLoad("a", 5), InstanceLoad("b", 5, has_session=True)]) is None


def test_a_victim_is_the_candidate_that_costs_least_to_bring_back() -> None:
    base = Candidate("a", frequency=1, return_s=1.0, memory_bytes=10**9, priority=0, clock=0.0)
    assert victim([]) is None
    assert victim([base, base._replace(key="often", frequency=5)]) == base
    assert victim([base, base._replace(key="slow", return_s=9.0)]) == base
    assert victim([base, base._replace(key="small", memory_bytes=10**8)]) == base
    assert victim([base, base._replace(key="recent", clock=1.0)]) == base
    assert victim([base, base._replace(key="dear", priority=10)]) == base
    assert value_of(base._replace(priority=10)) == 2 * value_of(base)


class PolicyMachine(RuleBasedStateMachine):
    """A pool of one model whose events come in any order; it acts on the policy's answers as the supervisor does."""

    @initialize(
        min_warm=st.integers(0, 4),
        more=st.integers(1, 6),
        buffer=st.integers(0, 3),
        aim=st.integers(1, 4),
        policy=st.sampled_from(["fixed", "hybrid"]),
        habit_s=st.lists(st.floats(0, 300), max_size=30),
    )
    def begin(
        self, min_warm: int, more: int, buffer: int, aim: int, policy: str, habit_s: list[float]
    ) -> None:
        self.model = Model(
            "m",
            "/m",
            min_warm=min_warm,
            max_instances=min_warm + more + buffer,
            buffer=buffer,
            idle_timeout_s=10,
            policy=policy,
            target_concurrency=aim,
            max_concurrency=4 * aim,
        )
        self.now_s = 0.0
        self.names = map(str, itertools.count())
        self.starting: list[str] = []
        self.work: dict[str, int] = {}  # ready instances
        self.idle_since_s: dict[str, float] = {}
        self.waiting = 0
        self.ended_with_work = False
        self.gaps = IdleGaps()
        for gap_s in habit_s:
            self.gaps.observe(gap_s)
        self.quiet_since_s: float | None = None
        self.window: Window | None = None
        self.act()

    @property
    def demand(self) -> Demand:
        return Demand(sum(self.work.values()), self.waiting)

    @property
    def quiet(self) -> Quiet | None:
        if self.model.policy == "fixed" or self.window is None or self.quiet_since_s is None:
            return None
        return Quiet(self.now_s - self.quiet_since_s, self.window)

    def act(self) -> None:
        if any(self.demand):
            self.quiet_since_s = None
        elif self.quiet_since_s is None:
            self.quiet_since_s, self.window = self.now_s, self.gaps.window()
        while self.waiting and (key := route(self.model, [InstanceLoad(k, n) for k, n in self.work.items()])):
            self.waiting -= 1
            self.work[key] += 1
        count = desired(self.model, self.demand, self.quiet) - len(self.starting) - len(self.work)
        self.starting += [next(self.names) for _ in range(count)]
        idle = [Idle(k, self.now_s - self.idle_since_s[k]) for k, n in self.work.items() if n == 0]
        for key in to_end(self.model, self.demand, ready=len(self.work), idle=idle, quiet=self.quiet):
            self.ended_with_work |= self.work.pop(key) > 0

    @rule(count=st.integers(1, 9))
    def requests_arrive(self, count: int) -> None:
        if self.quiet_since_s is not None:
            self.gaps.observe(self.now_s - self.quiet_since_s)
        self.waiting += count
        self.act()

    @precondition(lambda self: self.starting)
    @rule()
    def a_start_succeeds(self) -> None:
        key = self.starting.pop(0)
        self.work[key] = 0
        self.idle_since_s[key] = self.now_s
        self.act()

    @precondition(lambda self: self.starting)
    @rule()
    def a_start_fails(self) -> None:
        self.starting.pop(0)
        self.act()

    @precondition(lambda self: any(self.work.values()))
    @rule(choice=st.randoms(use_true_random=False))
    def a_request_ends(self, choice) -> None:
        key = choice.choice([key for key, count in self.work.items() if count])
        self.work[key] -= 1
        self.idle_since_s[key] = self.now_s
        self.act()

    @precondition(lambda self: self.work)
    @rule(choice=st.randoms(use_true_random=False))
    def an_instance_dies(self, choice) -> None:
        self.waiting += self.work.pop(choice.choice(list(self.work)))  # asked again elsewhere
        self.act()

    @rule(passed_s=st.floats(0.1, 30) | st.floats(30, 300))
    def time_passes(self, passed_s: float) -> None:
        self.now_s += passed_s
        self.act()

    @invariant()
    def never_more_than_the_maximum(self) -> None:
        assert len(self.starting) + len(self.work) <= self.model.max_instances

    @invariant()
    def no_instance_with_work_is_ended(self) -> None:
        assert not self.ended_with_work

    @invariant()
    def waiting_requests_have_a_start_under_way_below_the_maximum(self) -> None:
        if self.waiting and len(self.starting) + len(self.work) < self.model.max_instances:
            assert self.starting

    @invariant()
    def the_minimum_is_ready_or_starting(self) -> None:
        assert len(self.starting) + len(self.work) >= self.model.min_warm

    @invariant()
    def a_request_that_is_expected_finds_an_instance_or_its_start(self) -> None:
        if self.quiet is not None and self.quiet.expects:
            assert self.starting or self.work

    @invariant()
    def nothing_above_the_minimum_waits_for_a_request_that_is_not_expected(self) -> None:
        if self.quiet is not None and not self.quiet.expects and not self.starting:
            assert len(self.work) <= self.model.min_warm

    @invariant()
    def no_instance_has_more_than_it_may(self) -> None:
        assert all(0 <= count <= self.model.max_concurrency for count in self.work.values())


TestPolicy = PolicyMachine.TestCase
TestPolicy.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
