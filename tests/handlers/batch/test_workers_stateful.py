"""Workers of one job in virtual time: started, stopped, killed and paused at any moment, with clocks
that differ and jump, and a store that is away or loses its answers.

The jobs, their workers and the end of the job are the real ones; only the answers are sleeps.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.batch_jobs import config_of
from tests.support.inspection import run_job_at
from tests.support.memory_store import MemoryStore
from tests.support.virtual_loop import LaterError, VirtualLoop, World

from teneral.handlers.batch import job
from teneral.handlers.batch.answers import Record
from teneral.handlers.batch.input import Line
from teneral.handlers.batch.parts import Input, Places
from teneral.handlers.batch.progress import ProgressMeter
from teneral.handlers.batch.spec import JobReport, JobSpec, Status
from teneral.handlers.function.lifetime import Lifetime
from teneral.loader.errors import AlreadyExistsError, UnavailableError
from teneral.loader.sources.base import ObjectInfo

OUTAGE_S = 60.0  # that the client of the store bridges
PART_LINES = 4
MAX_OPEN_LINES = 2 * PART_LINES  # a worker's open parts
MAX_JOB_S = 2_000.0


class SharedStore(MemoryStore):
    """The store, as one process reaches it."""

    def attach(self, cluster: Cluster) -> SharedStore:
        other = SharedStore()
        other._url, other._objects = self._url, self._objects
        other._cluster = cluster
        return other

    _cluster: Cluster | None = None
    is_process_dead = False
    loses_next_answer = False

    def _check_open(self, name: str) -> None:
        super()._check_open(name)
        if self.is_process_dead:
            raise UnavailableError("this process is dead")
        if self._cluster is not None and (away_since_s := self._cluster.away_since_s) is not None:
            if self._cluster.world.now_s - away_since_s > OUTAGE_S:
                raise UnavailableError("the store is away")
            raise LaterError(1.0)

    def put(self, name: str, data: bytes, **conditions: Any) -> ObjectInfo:
        info = super().put(name, data, **conditions)
        if self.loses_next_answer and any(conditions.values()):
            self.loses_next_answer = False
            raise AlreadyExistsError("the client tried it again, and the first attempt is there", name=name)
        return info


class VirtualLifetime(Lifetime):
    """Its deadline is on its loop's clock."""

    def __init__(self, loop: VirtualLoop, timeout_s: float) -> None:
        super().__init__(None)
        self._loop, self._ends_s = loop, loop.time() + timeout_s

    def remaining_s(self) -> float:
        return max(0.0, self._ends_s - self._loop.time())


class Process:
    """A worker's process."""

    def __init__(self, cluster: Cluster, *, timeout_s: float, ahead_s: float, rate: float) -> None:
        self.loop = cluster.world.loop(ahead_s=ahead_s, rate=rate)
        self.lifetime = VirtualLifetime(self.loop, timeout_s)
        self.stores = [store.attach(cluster) for store in (cluster.given, cluster.work, cluster.final)]
        given, work, final = self.stores
        places = Places(
            Input(given, "in.jsonl", "s3://bucket/in.jsonl", None), "out.jsonl", work, final, "out.jsonl"
        )
        spec = JobSpec(input="in.jsonl", output="out.jsonl", part_lines=PART_LINES, model_identity="m")
        host: Any = SimpleNamespace(
            config=config_of("model", max_running=2, max_queued=4), digest=None, answers=cluster
        )
        self.task = self.loop.create_task(run_job_at(places, spec, host, self.lifetime, ProgressMeter()))

    @property
    def is_running(self) -> bool:
        return not self.task.done()

    def kill(self) -> None:
        """End the worker like kill -9: nothing more is written."""
        for store in self.stores:
            store.is_process_dead = True
        self.loop.is_paused = False
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        while asyncio.all_tasks(self.loop):
            self.loop.jump(1e6)
            self.loop.run_ready()


class Cluster:
    """The processes, the store, and a count of the work."""

    def __init__(self, num_lines: int, line_s: float) -> None:
        self.world = World()
        self.given, self.work, self.final = SharedStore(), SharedStore(), SharedStore()
        lines = [json.dumps({"prompt": "a", "custom_id": number}) for number in range(num_lines)]
        self.given.put("in.jsonl", "".join(line + "\n" for line in lines).encode())
        self.line_s = line_s
        self.num_lines = num_lines
        self.away_since_s: float | None = None
        self.computed: Counter[int] = Counter()
        self.processes: list[Process] = []
        self.reports: list[JobReport] = []

    def start(self, *, timeout_s: float = math.inf, ahead_s: float = 0.0, rate: float = 1.0) -> Process:
        process = Process(self, timeout_s=timeout_s, ahead_s=ahead_s, rate=rate)
        self.processes.append(process)
        return process

    async def one(self, line: Line) -> Record:
        self.computed[line.number] += 1
        await asyncio.sleep(self.line_s)
        return Record(json.dumps({"custom_id": line.custom_id, "text": "a"}).encode() + b"\n", False, 1)

    def end(self, process: Process) -> None:
        self.processes.remove(process)
        self.world.close(process.loop)

    def collect(self, *, may_fail: bool = False) -> None:
        """Take away the processes that have ended. Raises the error of one that failed."""
        for process in [each for each in self.processes if not each.is_running]:
            self.end(process)
            try:
                self.reports.append(process.task.result())
            except UnavailableError:
                assert may_fail

    @property
    def num_computed(self) -> int:
        return sum(self.computed.values())

    def answers(self) -> list[int]:
        data, _ = self.final.read("out.jsonl", max_bytes=1 << 20)
        return [json.loads(line)["custom_id"] for line in data.splitlines()]

    def check_end(self) -> None:
        assert self.answers() == list(range(self.num_lines))
        assert {info.name.partition("/")[0] for info in self.work.list()} <= {
            "job.json",
            "manifest.json",
            "parts",
        }


@pytest.fixture(autouse=True, scope="module")
def _simulated_answers() -> Any:
    """Answers come from the host of the test, and its model's digest is known at once."""

    @asynccontextmanager
    async def answering(
        host: Any, index: object, *, window: int, files: object = None
    ) -> AsyncIterator[Cluster]:
        yield host.answers

    def known(function: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function())
        return future

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "answering", answering)
        patch.setattr(job, "_in_daemon", known)
        yield


@pytest.mark.parametrize(("num_workers", "num_lines"), [(2, 120), (3, 60), (5, 200)])
@pytest.mark.parametrize("delay_s", [0.0, 7.3])
def test_workers_of_one_job_compute_each_line_once(num_workers: int, num_lines: int, delay_s: float) -> None:
    """Also those that began together, whose parts take the same time."""
    cluster = Cluster(num_lines, line_s=3.0)
    for _ in range(num_workers):
        cluster.start()
        cluster.world.advance(delay_s)
    cluster.world.advance(MAX_JOB_S, until=lambda: not any(each.is_running for each in cluster.processes))
    cluster.collect()
    cluster.check_end()
    assert [report.status for report in cluster.reports] == [Status.COMPLETE] * num_workers
    assert cluster.num_computed == num_lines
    if not delay_s:
        fair = num_lines / num_workers + MAX_OPEN_LINES
        assert max(report.run_records for report in cluster.reports) <= fair


def test_the_part_of_a_killed_worker_is_taken_over_soon() -> None:
    cluster = Cluster(PART_LINES, line_s=100.0)
    first = cluster.start()
    cluster.world.advance(10)
    first.kill()
    cluster.end(first)
    second = cluster.start()
    cluster.world.advance(10)
    assert cluster.num_computed == 4, "it may still be at work"
    cluster.world.advance(20)
    assert cluster.num_computed == 8
    cluster.world.advance(200)
    assert not second.is_running
    cluster.collect()
    cluster.check_end()


@pytest.mark.parametrize("event", ["jump", "outage", "pause of the observer"])
def test_a_claim_does_not_expire_by_a_clock_or_by_the_store(event: str) -> None:
    cluster = Cluster(PART_LINES, line_s=200.0)
    cluster.start()
    cluster.world.advance(10)
    observer = cluster.start()
    for _ in range(5):
        cluster.world.advance(4)
        if event == "jump":
            observer.loop.jump(1e5)
        elif event == "outage":
            cluster.away_since_s = cluster.world.now_s
            cluster.world.advance(OUTAGE_S / 2)
            cluster.away_since_s = None
        else:
            observer.loop.is_paused = True
            cluster.world.advance(20)
            observer.loop.is_paused = False
    cluster.world.advance(500, until=lambda: not any(each.is_running for each in cluster.processes))
    cluster.collect()
    cluster.check_end()
    assert cluster.num_computed == PART_LINES


class JobMachine(RuleBasedStateMachine):
    """Random histories of workers: each answer is visible once, the job ends, and work is repeated only for
    workers that were killed, stopped or paused.
    """

    @initialize(num_lines=st.integers(1, 60), line_s=st.sampled_from([0.1, 1.0, 3.0, 20.0]))
    def begin(self, num_lines: int, line_s: float) -> None:
        self.cluster = Cluster(num_lines, line_s)
        self.num_disturbed = 0
        self.was_long_away = False
        self.parts: dict[str, bytes] = {}

    @rule(
        timeout_s=st.sampled_from([math.inf, math.inf, 30.0, 90.0]),
        ahead_s=st.sampled_from([0.0, 1e6]),
        rate=st.sampled_from([1.0, 1.0, 0.8, 1.25]),
    )
    @precondition(lambda self: len(self.cluster.processes) < 4)
    def start(self, timeout_s: float, ahead_s: float, rate: float) -> None:
        if timeout_s < math.inf:
            self.num_disturbed += 1
        self.cluster.start(timeout_s=timeout_s, ahead_s=ahead_s, rate=rate)

    @rule(seconds=st.sampled_from([0.01, 0.07, 0.3, 1.0, 4.0, 11.0, 40.0]))
    def advance(self, seconds: float) -> None:
        self.cluster.world.advance(seconds)
        self.cluster.collect(may_fail=self.was_long_away)

    @precondition(lambda self: self.cluster.processes)
    @rule(data=st.data())
    def kill(self, data: st.DataObject) -> None:
        process = self.draw(data)
        self.num_disturbed += 1
        process.kill()
        self.cluster.end(process)

    @precondition(lambda self: self.cluster.processes)
    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.num_disturbed += 1
        self.draw(data).lifetime.cancel()

    @precondition(lambda self: self.cluster.processes)
    @rule(data=st.data(), seconds=st.sampled_from([1.0, 10.0, 60.0]))
    def pause(self, data: st.DataObject, seconds: float) -> None:
        process = self.draw(data)
        self.num_disturbed += 1
        process.loop.is_paused = True
        self.cluster.world.advance(seconds)
        process.loop.is_paused = False
        self.cluster.collect(may_fail=self.was_long_away)

    @precondition(lambda self: self.cluster.processes)
    @rule(data=st.data(), seconds=st.sampled_from([5.0, 100.0, 1e5]))
    def jump(self, data: st.DataObject, seconds: float) -> None:
        """The clock of one process: nothing of others expires by it."""
        process = self.draw(data)
        if process.lifetime.remaining_s() < math.inf:
            return
        process.loop.jump(seconds)

    @rule(seconds=st.sampled_from([2.0, 30.0, 100.0]))
    def lose_store(self, seconds: float) -> None:
        self.cluster.away_since_s = self.cluster.world.now_s
        if seconds > OUTAGE_S:
            self.was_long_away = True
            self.num_disturbed += len(self.cluster.processes)
        self.cluster.world.advance(seconds)
        self.cluster.away_since_s = None
        self.cluster.collect(may_fail=self.was_long_away)

    @precondition(lambda self: self.cluster.processes)
    @rule(data=st.data())
    def lose_an_answer(self, data: st.DataObject) -> None:
        for store in self.draw(data).stores:
            store.loses_next_answer = True

    @invariant()
    def parts_never_change(self) -> None:
        for info in self.cluster.work.list("parts/"):
            data, _ = self.cluster.work.read(info.name, max_bytes=1 << 20)
            assert self.parts.setdefault(info.name, data) == data

    @invariant()
    def work_is_repeated_for_disturbed_workers_only(self) -> None:
        repeated = self.cluster.num_computed - len(self.cluster.computed)
        assert repeated <= self.num_disturbed * MAX_OPEN_LINES

    def draw(self, data: st.DataObject) -> Process:
        return data.draw(st.sampled_from(self.cluster.processes))

    def teardown(self) -> None:
        """A job ends while a worker is there that nothing disturbs."""
        cluster = getattr(self, "cluster", None)
        if cluster is None:
            return
        try:
            cluster.start()
            cluster.world.advance(
                MAX_JOB_S, until=lambda: not any(each.is_running for each in cluster.processes)
            )
            assert not any(each.is_running for each in cluster.processes), "the job does not end"
            cluster.collect(may_fail=self.was_long_away)
            cluster.check_end()
            self.parts_never_change()
            self.work_is_repeated_for_disturbed_workers_only()
        finally:
            for process in list(cluster.processes):
                process.kill()
                cluster.end(process)


TestJobs = JobMachine.TestCase
TestJobs.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
