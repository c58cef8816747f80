"""The expectations of a pool's clients, whatever happens to its instances, its versions, its store and its clock:
random histories in virtual time.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Iterator
from typing import NamedTuple

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.virtual_pool import (
    CRASHES,
    DAMAGED,
    GOOD,
    NEVER,
    SLOW,
    UNREADABLE,
    WEIGHT_BYTES,
    Request,
    StoredVersion,
    VirtualPool,
    VirtualProcess,
)

from teneral.handlers.pool.deployment import FailingError
from teneral.handlers.pool.process import (
    HUNG_S,
    MAX_SILENT_POLLS,
    MAX_STALLED_S,
    OVERHEAD_BYTES,
    PROBE_S,
    READY_POLL_S,
)
from teneral.handlers.pool.values import Model, Versions

NEED_BYTES = WEIGHT_BYTES + (1 << 20) + OVERHEAD_BYTES
ROOM = 8  # instances: more than the pool may have
HEALTHS = st.sampled_from([GOOD, GOOD, GOOD, SLOW, DAMAGED, CRASHES, NEVER, UNREADABLE])
PICKS = st.integers(0, 1 << 16)
VERSIONS = st.sampled_from([Versions(), Versions(), Versions(latest=2), Versions(latest=None)])
MAX_IN_FLIGHT = 8
HUNG_START_S = 2 * READY_POLL_S * MAX_SILENT_POLLS


class Release(NamedTuple):
    version: int
    revision: int


class PoolMachine(RuleBasedStateMachine):
    """A pool of a model with versions, m, and one without, n. `serving` are releases that requests without a version
    may rely on: they were ready once, and nothing that was ready has replaced them.
    """

    @initialize(
        min_warm=st.integers(0, 1),
        max_instances=st.integers(1, 2),
        num_fit=st.sampled_from([1, 2, ROOM, ROOM, ROOM]),
        versions=VERSIONS,
    )
    def begin(self, min_warm: int, max_instances: int, num_fit: int, versions: Versions) -> None:
        self.m = Model("m", "/m/{version}", versions, min_warm=min_warm, max_instances=max_instances)
        self.n = Model("n", "/n", max_instances=1, idle_timeout_s=20.0)
        self.has_room = num_fit == ROOM
        self.pool = VirtualPool([self.m, self.n], memory_bytes=num_fit * NEED_BYTES)
        self.listed = {Release(1, 0)}
        self.serving: set[Release] = set()
        self.excused_s = 0.0  # until when a start that hangs excuses failures
        self.jumped_s = self.file_changed_s = 0.0
        self.checked: set[int] = set()

    @property
    def now_s(self) -> float:
        return self.pool.loop.now_s

    # what happens

    @rule(what=st.sampled_from(["new", "new", "new", "replaced", "withdrawn"]), pick=PICKS, health=HEALTHS)
    def the_store_changes(self, what: str, pick: int, health: str) -> None:
        versions = self.pool.store.versions
        if what == "new" or not versions:
            versions[max(versions, default=0) + 1] = StoredVersion(0, health, self.now_s)
        else:
            number, entry = self.chosen(pick, versions.items())
            del versions[number]
            if what == "replaced":
                versions[number] = StoredVersion(entry.revision + 1, health, self.now_s)
        self.reload()

    @precondition(lambda self: self.pool.machine.running)
    @rule(
        what=st.sampled_from(["hangs", "hangs", "crashes", "late"]), pick=PICKS, latency_s=st.floats(0.01, 4)
    )
    def an_instance_fails(self, what: str, pick: int, latency_s: float) -> None:
        process = self.chosen(pick, self.pool.machine.running)
        if what == "late":
            process.latency_s = latency_s
        else:
            if what == "hangs" and not process.was_ready:
                self.excused_s = self.now_s + HUNG_START_S + 10
            self.pool.act(process.hang if what == "hangs" else process.crash)

    @rule(
        what=st.sampled_from(["reload", "file", "sleep", "store", "clock"]),
        seconds=st.floats(1, 300),
        min_warm=st.integers(0, 1),
        versions=VERSIONS,
        has_n=st.booleans(),
    )
    def an_operator_or_the_machine_acts(
        self, what: str, seconds: float, min_warm: int, versions: Versions, has_n: bool
    ) -> None:
        if what == "reload":
            self.reload()
        elif what == "file":
            most = self.m.max_instances
            self.m = Model("m", "/m/{version}", versions, min_warm=min_warm, max_instances=most)
            self.pool.reload([self.m, self.n] if has_n else [self.m])
            self.file_changed_s = self.now_s
            self.note_listing()
            self.pool.run(0.01)  # what is cancelled gives back what it has
        elif what == "sleep":
            supervisor = self.pool.supervisor
            self.pool.act(lambda: supervisor.sleep(supervisor.models["m"]))
        elif what == "store":  # is away
            self.pool.store.away_until_s = self.now_s + seconds
        else:  # the clock jumps
            self.pool.loop.now_s += 3 * seconds
            self.jumped_s = self.now_s
            self.pool.run(0.01)

    @rule(
        work_s=st.floats(0.05, 20),
        patience_s=st.sampled_from([1e6, 1e6, 3.0]),
        name=st.sampled_from(["m", "m", "m", "n"]),
    )
    def a_request_comes(self, work_s: float, patience_s: float, name: str) -> None:
        if len(self.in_flight) < MAX_IN_FLIGHT:
            self.pool.ask(name, None, work_s, patience_s)

    @precondition(lambda self: self.pool.store.versions)
    @rule(pick=PICKS)
    def a_request_names_a_version(self, pick: int) -> None:
        number, _ = self.chosen(pick, self.pool.store.versions.items())
        if len(self.in_flight) < MAX_IN_FLIGHT:
            self.pool.ask("m", number, 1.0, 1e6)

    @rule(seconds=st.floats(0.6, 12))
    def seconds_pass(self, seconds: float) -> None:
        self.pool.run(seconds)
        state = self.pool.supervisor.models["m"]
        for deployment in state.targets():
            if not state.asleep and deployment.scaled.min_warm and self.has_room:
                is_due = self.now_s >= deployment.retry_at_s + 0.5
                assert deployment.servers or deployment.starting or not is_due, "min_warm is not restored"

    @rule(seconds=st.floats(12, 120))
    def minutes_pass(self, seconds: float) -> None:
        self.pool.run(seconds)

    # what clients may expect

    @invariant()
    def a_request_without_a_version_is_answered_by_any_version_that_was_ever_ready(self) -> None:
        for request in self.over():
            may_fail = request.version is not None or request.gave_up
            if may_fail or request.failure is None or not self.has_room or request.losses > 1:
                continue
            since_s = request.began_s
            if max(self.pool.store.away_until_s, self.jumped_s, self.excused_s) >= since_s:
                continue
            if request.model == "n":
                state = self.pool.supervisor.models.get("n")
                is_served = state is not None and state.targets() and self.file_changed_s < since_s
                assert not is_served, f"n can answer, but: {request.failure!r}"
                continue
            sound = [
                release
                for release in self.serving
                if (entry := self.pool.store.versions.get(release.version)) is not None
                and entry.revision == release.revision
                and entry.health == GOOD
                and entry.changed_s < since_s
                and self.ready_at_s[release] < since_s
                and not self.was_backing_off(release, since_s)
            ]
            assert not sound, f"{sound} can answer, but: {request.failure!r}"

    @invariant()
    def no_client_waits_on_a_hung_instance_longer_than_the_probes_need(self) -> None:
        for process in self.pool.machine.running:
            if process.hung_s is None or not process.was_ready:
                continue
            for began_s in process.asks.values():
                since_s = max(began_s, process.hung_s, self.jumped_s)
                assert self.now_s - since_s <= HUNG_S + 1.0, "it hangs, and a client waits on it"

    @invariant()
    def every_request_is_over_in_time(self) -> None:
        for request in self.in_flight:
            if request.began_s > self.jumped_s:
                assert self.now_s - request.began_s <= 3 * 60 + 300 + 10 + 1

    @invariant()
    def no_place_is_lost(self) -> None:
        for deployment in self.pool.deployments():
            for server in deployment.servers.values():
                assert isinstance(server.process, VirtualProcess)
                assert server.in_work == len(server.process.asks)
            waiting = [waiter for waiter in deployment.waiting if not waiter.future.done()]
            assert len(waiting) <= len(self.in_flight)

    @invariant()
    def no_memory_is_lost(self) -> None:
        assert self.pool.budget.charged_bytes <= self.pool.budget.limit_bytes
        num_running = len(self.pool.machine.running)
        num_reserved = self.pool.budget.charged_bytes // NEED_BYTES
        num_starting = sum(len(deployment.starting) for deployment in self.pool.deployments())
        assert num_running <= num_reserved <= num_running + num_starting

    @invariant()
    def no_instance_that_answers_is_killed(self) -> None:
        assert not [p for p in self.pool.machine.processes if p.wrongly_killed]

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        self.pool.close()
        assert not self.pool.machine.running, "a process is left"
        assert self.pool.budget.charged_bytes == 0, "memory is lost"

    # the machine's own record

    @property
    def in_flight(self) -> list[Request]:
        return [request for request in self.pool.requests if not request.is_over]

    def over(self) -> list[Request]:
        """Requests that have ended and were not looked at."""
        self.note_ready()
        found = [r for r in self.pool.requests if r.is_over and id(r) not in self.checked]
        self.checked |= {id(request) for request in found}
        return found

    def reload(self) -> None:
        self.note_ready()
        self.pool.reload()
        self.note_listing()
        self.pool.run(0.01)

    def note_listing(self) -> None:
        state = self.pool.supervisor.models["m"]
        self.listed = {
            Release(d.release.version, int(d.release.revision))
            for d in state.deployments()
            if d.release.version in state.versions and d.release.version is not None and not d.retired
        }
        self.note_ready()

    def was_backing_off(self, release: Release, since_s: float) -> bool:
        """Its starts have failed for other reasons, such as a store that was away."""
        return any(
            deployment.retry_at_s >= since_s and deployment.failures
            for deployment in self.pool.deployments()
            if (deployment.release.version, deployment.release.revision)
            == (release.version, str(release.revision))
        )

    ready_at_s: dict[Release, float]

    def note_ready(self) -> None:
        """Versions that have become ready serve; those that they replace do not any more."""
        if not hasattr(self, "ready_at_s"):
            self.ready_at_s = {}
        for deployment in self.pool.deployments():
            number = deployment.release.version
            if number is not None and deployment.servers and not deployment.retired:
                release = Release(number, int(deployment.release.revision))
                self.ready_at_s.setdefault(release, self.now_s)
                self.serving.add(release)
        if self.listed & self.serving:
            self.serving &= self.listed

    def chosen(self, pick: int, among):  # type: ignore[no-untyped-def]
        found = list(among)
        return found[pick % len(found)]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    """A record a decision would be most of the time."""
    caplog.set_level(logging.CRITICAL, logger="teneral.pool")


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=50, stateful_step_count=30, deadline=None)


@pytest.fixture
def pool() -> Iterator[VirtualPool]:
    models = [Model("m", "/m/{version}", min_warm=1, max_instances=1), Model("n", "/n", max_instances=1)]
    pool = VirtualPool(models, memory_bytes=ROOM * NEED_BYTES)
    pool.run(5.0)
    yield pool
    pool.close()
    assert not pool.machine.running


@pytest.mark.parametrize("third", [GOOD, DAMAGED])
def test_a_version_that_cannot_start_does_not_displace_the_one_that_serves_when_another_appears(
    pool: VirtualPool, third: str
) -> None:
    pool.store.versions[2] = StoredVersion(0, DAMAGED, pool.loop.now_s)
    pool.reload()
    pool.run(20.0)
    assert pool.supervisor.is_warm, "the probe of the whole pool is not about a version that nothing needs"
    pool.store.versions[3] = StoredVersion(0, third, pool.loop.now_s)
    pool.reload()
    request = pool.ask("m", None, 1.0, 1e6)
    pool.run(1.1)
    assert (request.failure, request.answered_by) == (None, "m@1")
    pool.run(30.0)
    request = pool.ask("m", None, 1.0, 1e6)
    pool.run(1.1)
    assert (request.failure, request.answered_by) == (None, "m@3" if third == GOOD else "m@1")


def test_a_new_version_of_a_sleeping_model_that_cannot_start_leaves_requests_to_the_old_one(
    pool: VirtualPool,
) -> None:
    pool.act(lambda: pool.supervisor.sleep(pool.supervisor.models["m"]))
    pool.run(1.0)
    pool.store.versions[2] = StoredVersion(0, DAMAGED, pool.loop.now_s)
    pool.reload()
    request = pool.ask("m", None, 1.0, 1e6)
    pool.run(30.0)
    assert (request.failure, request.answered_by) == (None, "m@1")


def test_a_request_that_names_a_version_is_answered_by_no_other(pool: VirtualPool) -> None:
    pool.store.versions[2] = StoredVersion(0, DAMAGED, pool.loop.now_s)
    pool.reload()
    request = pool.ask("m", 2, 1.0, 1e6)
    pool.run(30.0)
    assert isinstance(request.failure, FailingError)


def test_a_hung_instance_is_replaced_although_its_clients_give_up_first(pool: VirtualPool) -> None:
    pool.machine.running[0].hang()
    patient = pool.ask("m", None, 1.0, 1e6)
    for _ in range(9):
        assert pool.ask("m", None, 1.0, 3.0).failure is None
        pool.run(3.1)
    pool.run(HUNG_S - 9 * 3.1 + 5.0)
    assert pool.machine.running[0].hung_s is None
    assert (patient.failure, patient.answered_by) == (None, "m@1")


def test_clients_that_leave_do_not_count_as_answers(pool: VirtualPool) -> None:
    pool.ask("m", None, 20.0, 1.0)
    pool.run(2.0)
    deployment = pool.supervisor.models["m"].targets()[0]
    assert (deployment.answers, deployment.errors) == (0, 0)
    assert next(iter(deployment.servers.values())).in_work == 0


def test_a_client_that_leaves_as_its_turn_comes_does_not_count_either(pool: VirtualPool) -> None:
    deployment = pool.supervisor.models["m"].targets()[0]
    (server,) = deployment.servers.values()
    while not deployment.waiting:
        waiting = pool.ask("m", None, 5.0, 60.0)
    num_in_work = server.in_work

    def both() -> None:
        server.in_work += 1
        deployment.waiting.popleft().future.set_result(server)
        assert waiting.task is not None
        waiting.task.cancel()

    pool.act(both)
    pool.run(1.0)
    assert (deployment.answers, server.served, server.in_work) == (0, 0, num_in_work)


def test_a_start_that_hangs_is_given_up(pool: VirtualPool) -> None:
    request = pool.ask("n", None, 1.0, 1e6)
    starting = pool.machine.running[-1]
    starting.hang()
    pool.run(HUNG_START_S + 1.0)
    assert starting.ended.is_set()
    assert request.is_over, "503 after queue_timeout_s"
    request = pool.ask("n", None, 1.0, 1e6)
    pool.run(10.0)
    assert (request.failure, request.answered_by) == (None, "n")


def test_a_start_that_answers_and_gets_no_further_is_given_up(pool: VirtualPool) -> None:
    pool.store.versions[2] = StoredVersion(0, NEVER, pool.loop.now_s)
    pool.reload()
    pool.run(1.0)
    starting = pool.machine.running[-1]
    pool.run(MAX_STALLED_S - 10.0)
    starting.progress = {"fraction": 0.5}
    pool.run(MAX_STALLED_S - 20.0)
    assert not starting.ended.is_set(), "it has come further"
    pool.run(40.0)
    assert starting.ended.is_set()
    (second,) = pool.supervisor.models["m"].targets()
    assert "its load got no further for 900 s" in second.reason


def test_a_busy_machine_or_a_clock_that_jumps_ends_no_instance(pool: VirtualPool) -> None:
    pool.machine.running[0].latency_s = PROBE_S - 0.5
    for _ in range(20):
        pool.loop.now_s += 100.0
        pool.run(7.0)
    assert [process.wrongly_killed for process in pool.machine.processes] == [False]


def test_a_start_that_was_cancelled_leaves_no_process_when_the_pool_ends(pool: VirtualPool) -> None:
    pool.store.versions[2] = StoredVersion(0, NEVER, pool.loop.now_s)
    pool.reload()
    pool.run(1.0)
    pool.machine.running[-1].hang()
    pool.store.versions[3] = StoredVersion(0, NEVER, pool.loop.now_s)
    pool.reload()  # the fixture looks at what is left


def test_a_version_that_was_rolled_back_stays_so_when_the_store_is_away(pool: VirtualPool) -> None:
    pool.store.versions[2] = StoredVersion(0, GOOD, pool.loop.now_s)
    pool.reload()
    pool.run(5.0)
    state = pool.supervisor.models["m"]
    (second,) = state.targets()
    assert state.reject(second, "too many errors")
    pool.act(lambda: pool.supervisor.look_again(state))
    pool.run(5.0)
    pool.store.away_until_s = pool.loop.now_s + 10.0
    pool.reload()
    pool.run(20.0)
    pool.reload()
    pool.run(10.0)
    assert [deployment.name for deployment in state.targets()] == ["m@1"]
    del pool.store.versions[1]
    pool.reload()
    assert not state.rejected, "there is nothing else"


def test_a_model_that_is_taken_out_while_its_versions_are_looked_for_serves_none(pool: VirtualPool) -> None:
    state = pool.supervisor.models["m"]
    pool.file = dataclasses.replace(pool.file, models={})

    async def both() -> None:
        reloading = asyncio.create_task(pool.reloader.reload())
        await asyncio.sleep(0)
        looking = pool.supervisor.look_again(state)
        assert looking is not None
        await asyncio.gather(reloading, looking)

    pool.call(both())
    assert not state.targets()
    pool.run(10.0)
    assert not any(deployment.servers for deployment in state.deployments())


def test_idle_instances_give_way_to_others_on_their_device_alone() -> None:
    def model(name: str, device: str, percent: int) -> Model:
        serve = {"device": device, "device_percent": percent}
        return Model(name, f"/{name}", max_instances=1, idle_timeout_s=1e6, serve=serve)

    models = [
        model("a", "cuda:0", 60),
        model("b", "cuda", 50),
        model("c", "cuda:0", 40),
        model("d", "cuda:1", 90),
    ]
    pool = VirtualPool(models, memory_bytes=ROOM * NEED_BYTES)
    try:
        for name in "acd":
            pool.ask(name, None, 1.0, 1e6)
        pool.run(20.0)
        assert pool.budget.shares() == {"cuda:0": 100, "cuda:1": 90}
        busy = pool.ask("a", None, 40.0, 1e6)
        pool.run(1.0)
        late = pool.ask("b", None, 1.0, 1e6)
        pool.run(30.0)
        assert not late.is_over, "c alone is not enough, and a is at work"
        assert pool.budget.shares() == {"cuda:0": 60, "cuda:1": 90}
        pool.run(60.0)
        assert (busy.failure, late.failure, late.answered_by) == (None, None, "b")
        assert pool.budget.shares() == {"cuda:0": 50, "cuda:1": 90}, "a gave way, and d had no reason to"
    finally:
        pool.close()
    assert not pool.budget.shares()
