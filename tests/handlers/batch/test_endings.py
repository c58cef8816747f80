"""How a worker ends before its job does: deadlines, SIGTERM, a full disk, an instance that fails."""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given as given_values
from hypothesis import settings
from hypothesis import strategies as st
from tests.support.batch_jobs import (
    Workers,
    config_of,
    num_parts,
    prompts,
    read_records,
    wait_until,
    write_lines,
)
from tests.support.instances import StagedInstance, SteeredModel, TinyParts
from tests.support.tiny_disk import tiny_disk

from teneral.cli_report import exit_code
from teneral.handlers.batch.index import INDEX_NAME
from teneral.handlers.batch.job import arun_job
from teneral.handlers.batch.parts import plan_order
from teneral.handlers.batch.progress import JobProgress
from teneral.handlers.batch.spec import JobReport, JobSpec, ModelBrokenError, Share, Status
from teneral.handlers.batch.worker import MIN_MARGIN_S, PartPace
from teneral.handlers.function.lifetime import Lifetime
from teneral.loader.errors import NoSpaceError, UnavailableError
from teneral.runtime.instance.instance import Instance

Run = Callable[..., JobReport]


def ids(count: int) -> list[str]:
    return [f"id-{number}" for number in range(count)]


# pure decisions


def test_a_part_is_begun_while_it_is_likely_to_be_done() -> None:
    pace = PartPace()
    assert pace.has_time(MIN_MARGIN_S + 1)
    assert not pace.has_time(MIN_MARGIN_S)
    for _ in range(20):
        pace.note(4.0)
    assert pace.has_time(MIN_MARGIN_S + 5.1)
    assert not pace.has_time(MIN_MARGIN_S + 4.9)
    assert pace.has_time(float("inf"))


def test_one_slow_part_among_many_does_not_decide() -> None:
    pace = PartPace()
    for number in range(32):
        pace.note(100.0 if number == 5 else 1.0)
    assert pace.expected_s() == 1.0
    pace.note(50.0)
    assert pace.expected_s() == 50.0


@given_values(st.integers(0, 40), st.sets(st.integers(0, 40)), st.integers(1, 7), st.integers(0, 39))
@settings(deadline=None)
def test_shares_together_are_all_that_is_missing(
    num_parts: int, done: set[int], count: int, start: int
) -> None:
    orders = [plan_order(num_parts, frozenset(done), Share(index, count), start) for index in range(count)]
    assert sorted(number for order in orders for number in order) == sorted(set(range(num_parts)) - done)
    assert all(order == sorted(order, key=lambda number: (number < start, number)) for order in orders)


# deadlines


def test_a_job_that_has_no_time_does_nothing_and_says_so(run: Run, tmp_path: Path) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(20))
    report = run(given, tmp_path / "out", timeout_s=1.0, part_lines=4)
    assert (report.status, report.stopped_by, report.run_records) == (Status.INCOMPLETE, "deadline", 0)
    assert run(given, tmp_path / "out").status is Status.COMPLETE


def test_records_finished_before_a_stop_are_kept(run: Run, tmp_path: Path, staged: StagedInstance) -> None:
    """Even those of a part that takes longer than the time left: otherwise such a job would never end."""
    lines = [*prompts(20), {"prompt": "ab", "max_tokens": 400, "ignore_eos": True, "custom_id": "long"}]
    given = write_lines(tmp_path / "in.jsonl", lines)
    lifetime = Lifetime(None)

    def stop(progress: JobProgress) -> None:
        if progress.run_records >= 8:
            lifetime.cancel()

    spec: dict[str, Any] = {"part_lines": 21, "model_identity": "m"}
    # The long record takes at least 8 s, forty times as long as the interval of progress reports.
    staged.model.step_s = 0.02
    report = _stopped(staged, given, tmp_path / "out", lifetime, stop, **spec)
    staged.model.step_s = 0.0
    assert (report.status, report.stopped_by, report.parts_done) == (Status.INCOMPLETE, "stop", 0)
    kept = (tmp_path / "out" / "partial" / "000000.jsonl").read_bytes().count(b"\n") + 1
    assert kept == report.run_records
    rest = run(given, tmp_path / "out", host=staged, **spec)
    assert rest.run_records == 21 - kept
    assert [record["custom_id"] for record in read_records(tmp_path / "out")] == [*ids(20), "long"]
    assert run(given, tmp_path / "undisturbed", host=staged, **spec).records == 21
    assert read_records(tmp_path / "out") == read_records(tmp_path / "undisturbed")
    assert not (tmp_path / "out" / "partial").exists()


@pytest.mark.parametrize(
    "damage", [b"", b"junk", b'[1,false,0,{"custom_id":', b'[99,false,0,{"custom_id":"x"}]']
)
def test_what_is_kept_of_a_part_and_damaged_is_computed_again(
    run: Run, tmp_path: Path, damage: bytes
) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(6))
    run(given, tmp_path / "out")
    whole = read_records(tmp_path / "out")
    (tmp_path / "out" / "manifest.json").unlink()
    (tmp_path / "out" / "parts" / "000000.jsonl").unlink()
    (tmp_path / "out" / "partial").mkdir()
    (tmp_path / "out" / "partial" / "000000.jsonl").write_bytes(damage)
    assert run(given, tmp_path / "out").run_records == 6
    assert read_records(tmp_path / "out") == whole


def _stopped(
    host: Instance, given: Path, output: Path, lifetime: Lifetime, on_progress: Any, **fields: Any
) -> JobReport:
    import asyncio

    spec = JobSpec(input=str(given), output=str(output), drain_s=0.0, **fields)
    return asyncio.run(arun_job(spec, host, lifetime=lifetime, on_progress=on_progress))


# trouble


def test_a_full_disk_ends_the_job_and_leaves_what_is_whole(run: Run, tmp_path: Path) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(300, max_tokens=1))
    with tiny_disk(tmp_path / "disk", 48 << 10) as disk:
        with pytest.raises(NoSpaceError):
            run(given, disk / "out", part_lines=4)
        assert num_parts(disk / "out") > 0
        assert {path.name for path in (disk / "out").iterdir()} <= {"claims", "parts", "partial", INDEX_NAME}


class Poisonable(SteeredModel):
    """Breaks in every step in which a certain token takes part."""

    poison = -1

    def forward(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self.poison in batch.tokens.tolist():
            raise RuntimeError("poisoned")
        return super().forward(batch, *args, **kwargs)


@pytest.fixture(scope="module")
def staged_parts(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[TinyParts]:
    parts = TinyParts.make("llama", tmp_path_factory.mktemp("staged"))
    yield parts
    parts.tokenizer.close()


@pytest.fixture
def staged(staged_parts: TinyParts) -> Iterator[StagedInstance]:
    with StagedInstance(staged_parts) as host:
        host.model = Poisonable(staged_parts.model)
        yield host.let_in()


@pytest.mark.parametrize("is_openai", [False, True])
def test_a_line_that_breaks_the_model_is_an_error_and_its_neighbours_are_not(
    run: Run, tmp_path: Path, staged: StagedInstance, is_openai: bool
) -> None:
    lines: list[dict[str, Any]] = prompts(12)
    lines[5]["prompt"] = "~"
    if is_openai:
        lines = [
            {"custom_id": line.pop("custom_id"), "url": "/v1/completions", "method": "POST", "body": line}
            for line in lines
        ]
    staged.model.poison = staged.tokenizer.result().encode("~")[-1]
    report = run(write_lines(tmp_path / "in.jsonl", lines), tmp_path / "out", host=staged, model_identity="m")
    assert report.failed == 1
    poisoned = read_records(tmp_path / "out")[5]
    if is_openai:
        assert poisoned["response"]["status_code"] == 503
    else:
        assert poisoned["error"]["code"] == "failed"


@pytest.mark.parametrize("is_openai", [False, True])
def test_no_line_is_blamed_for_a_model_that_is_broken(
    run: Run, tmp_path: Path, staged: StagedInstance, is_openai: bool
) -> None:
    lines: list[dict[str, Any]] = prompts(3)
    if is_openai:
        lines = [{"url": "/v1/completions", "body": {"prompt": "ab", "max_tokens": 1}}]
    given = write_lines(tmp_path / "in.jsonl", lines)
    staged.model.failure = RuntimeError("broken")
    with pytest.raises(ModelBrokenError, match="has stopped answering") as caught:
        run(given, tmp_path / "out", host=staged, model_identity="m")
    assert exit_code(caught.value) == 75
    assert num_parts(tmp_path / "out") == 0
    staged.model.failure = None
    assert run(given, tmp_path / "out", host=staged, model_identity="m").failed == 0


def test_an_instance_that_must_end_gives_the_job_back(
    run: Run, tmp_path: Path, staged: StagedInstance
) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(20, max_tokens=60))
    staged.model.step_s = 0.005

    def drain(progress: JobProgress) -> None:
        staged.engine.result().drain(0.0)

    report = run(given, tmp_path / "out", host=staged, model_identity="m", on_progress=drain)
    assert (report.status, report.stopped_by) == (Status.INCOMPLETE, "draining")


def test_an_instance_that_cannot_load_ends_the_job_with_its_error(run: Run, tmp_path: Path) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(3))
    config = config_of("http://127.0.0.1:9/model", read_timeout_s=0.2, outage_s=0.0)
    with Instance(config) as host, pytest.raises(UnavailableError):
        run(given, tmp_path / "out", host=host)
    assert not (tmp_path / "out").exists()


# signals


def test_sigterm_ends_a_worker_and_the_next_one_goes_on(workers: Workers, tmp_path: Path) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(400, max_tokens=16))
    job = {"input": str(given), "output": str(tmp_path / "out.jsonl"), "part_lines": 8}
    pid = workers.start(**job, drain_s=0.1)
    wait_until(lambda: num_parts(tmp_path / "out.jsonl.parts") >= 3)
    os.kill(pid, signal.SIGTERM)
    workers.wait(pid, status=lambda code: code == 143)
    assert not (tmp_path / "out.jsonl").exists()
    workers.wait(workers.start(**job))
    assert [record["custom_id"] for record in read_records(tmp_path / "out.jsonl")] == ids(400)


def test_the_deadline_has_an_exit_code_of_its_own(workers: Workers, tmp_path: Path) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(4))
    job = {"input": str(given), "output": str(tmp_path / "out")}
    workers.wait(workers.start(**job, deadline_s=0.5), status=lambda code: code == 75)
    workers.wait(workers.start(**job))
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_bytes())
    assert (manifest["records"], manifest["failed"]) == (4, 0)


# kill -9


def test_a_job_that_is_killed_twenty_times_ends_as_if_it_had_not_been(
    workers: Workers, tmp_path: Path
) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(400, max_tokens=6))
    job = {"input": str(given), "part_lines": 4}
    workers.wait(workers.start(**job, output=str(tmp_path / "undisturbed.jsonl")))
    job["output"] = str(tmp_path / "killed.jsonl")
    work = tmp_path / "killed.jsonl.parts"
    chance = random.Random(7)
    for _ in range(20):
        before = num_parts(work)
        pid = workers.start(**job)
        wanted = before + chance.choice((0, 1, 1, 2, 2, 3))
        wait_until(lambda wanted=wanted: num_parts(work) >= wanted)
        workers.kill(pid)
        assert not (tmp_path / "killed.jsonl").exists(), "it was killed too late to say anything"
    workers.wait(workers.start(**job))
    assert (tmp_path / "killed.jsonl").read_bytes() == (tmp_path / "undisturbed.jsonl").read_bytes()
    assert [record["custom_id"] for record in read_records(tmp_path / "killed.jsonl")] == ids(400)


def test_two_workers_at_once_one_of_them_killed_do_each_line_once(workers: Workers, tmp_path: Path) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(300, max_tokens=6))
    job = {"input": str(given), "output": str(tmp_path / "out.jsonl"), "part_lines": 4}
    first, second, third = (workers.start(**job) for _ in range(3))
    wait_until(lambda: num_parts(tmp_path / "out.jsonl.parts") >= 10)
    workers.kill(second)
    workers.wait(first)
    workers.wait(third)
    assert [record["custom_id"] for record in read_records(tmp_path / "out.jsonl")] == ids(300)
    parts = tmp_path / "out.jsonl.parts" / "parts"
    whole = b"".join((parts / f"{number:06}.jsonl").read_bytes() for number in range(75))
    assert (tmp_path / "out.jsonl").read_bytes() == whole
