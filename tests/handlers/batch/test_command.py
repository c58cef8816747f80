"""`teneral batch`: exit codes, what it prints, and what it does without a model."""

from __future__ import annotations

import io
import json
import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
from tests.support.batch_jobs import prompts, read_records, write_lines
from tests.support.tiny_models import save_tiny

from teneral.cli import run as teneral
from teneral.handlers.batch.command import exit_code
from teneral.handlers.batch.progress import JobProgress, ProgressLines, ProgressMeter, render
from teneral.handlers.batch.spec import JobReport, Status
from teneral.loader.errors import LoadError, NoSpaceError, TeneralError, UnavailableError

FLAGS = ["--loader", "thread", "--threads", "1", "--log-level", "error"]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    save_tiny("llama", folder / "plain")
    assert teneral(["pack", str(folder / "plain"), str(folder / "tiny"), "--quiet"]) == 0
    return folder / "tiny"


def test_a_job_prints_its_report_and_needs_no_weights_when_it_was_done(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(10))
    own = shutil.copytree(artifact, tmp_path / "tiny")
    job = ["batch", str(own), str(given), str(tmp_path / "out.jsonl"), *FLAGS]
    capsys.readouterr()
    assert teneral(job) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["status"], report["records_done"], report["run_records"]) == ("complete", 10, 10)
    assert len(read_records(tmp_path / "out.jsonl")) == 10

    for path in own.rglob("*"):
        if path.is_file() and path.name != "manifest.json":
            path.unlink()
    assert teneral(job) == 0
    again = json.loads(capsys.readouterr().out)
    assert (again["status"], again["run_records"], again["key"]) == ("complete", 0, report["key"])


def test_another_model_at_the_same_address_is_refused(
    artifact: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = write_lines(tmp_path / "in.jsonl", prompts(3))
    own = shutil.copytree(artifact, tmp_path / "tiny")
    job = ["batch", str(own), str(given), str(tmp_path / "out"), "--quiet", *FLAGS]
    assert teneral(job) == 0
    save_tiny("llama", tmp_path / "plain", seed=1)
    assert teneral(["pack", str(tmp_path / "plain"), str(own), "--quiet", "--force"]) == 0
    assert teneral(job) == 6
    assert "holds the job of another model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--worker", "4/4"],
        ["--deadline-s", "0"],
        ["--deadline-s", "nan"],
        ["--max-lines", "0"],
        ["--part-lines", "0"],
    ],
)
def test_invalid_flags_are_refused(
    tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    job = ["batch", str(tmp_path / "model"), str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *flags]
    assert teneral(job) == 2


def test_what_is_worth_another_run_has_codes_that_say_so() -> None:
    codes = {
        (Status.COMPLETE, None): 0,
        (Status.SHARE_DONE, None): 0,
        (Status.INCOMPLETE, "deadline"): 75,
        (Status.INCOMPLETE, "draining"): 75,
        (Status.INCOMPLETE, "stop"): 143,
    }
    for (status, stopped_by), code in codes.items():
        assert exit_code(JobReport(status=status, output="o", key="k", stopped_by=stopped_by)) == code


@pytest.mark.parametrize(
    "error",
    [
        UnavailableError("the store is down"),
        NoSpaceError("the store is full"),
        LoadError("the loader was killed"),
    ],
)
def test_an_error_after_which_a_job_goes_on_has_the_code_for_another_run(
    error: TeneralError, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("teneral.handlers.batch.command.finish_computed", fail)
    job = ["batch", str(tmp_path / "model"), str(tmp_path / "in.jsonl"), str(tmp_path / "out"), *FLAGS]
    assert teneral(job) == 75
    assert error.message in capsys.readouterr().err


def test_the_pages_retry_strategy_for_aws_batch_agrees_with_its_exit_codes() -> None:
    page = (Path(__file__).parents[3] / "docs" / "batch.md").read_text()
    rows = re.findall(r"^\| ([\d, to]+) \|.*\| (goes on|fails again)[^|]*\|$", page, re.MULTILINE)
    conditions = re.search(r'"evaluateOnExit": (\[.*?\])\}', page, re.DOTALL)
    assert conditions is not None
    strategy = json.loads(conditions[1])
    assert len(strategy) <= 5, "AWS Batch takes no more"

    def action(code: int) -> str:
        for each in strategy:
            pattern = each.get("onExitCode", "*" if "onReason" in each else "none")
            if fnmatch(str(code), pattern):
                return str(each["action"])
        return "RETRY"

    expected = {"goes on": "RETRY", "fails again": "EXIT"}
    codes = {
        code: expected[meaning]
        for given, meaning in rows
        for low, _, high in (each.partition(" to ") for each in given.split(", "))
        for code in range(int(low), int(high or low) + 1)
    }
    assert {75, 143, 137, 2, 16} <= codes.keys()
    interactive = {130}  # Ctrl-C does not reach a job of AWS Batch
    assert {code: action(code) for code in codes if code not in interactive} == {
        code: meaning for code, meaning in codes.items() if code not in interactive
    }


# what is shown


def progress_of(records: int, done: int, **fields: float) -> JobProgress:
    values = {
        "parts": 4,
        "parts_done": 1,
        "run_records": done,
        "run_failed": 0,
        "run_tokens": 500,
        "run_s": 10.0,
    }
    return JobProgress(records=records, records_done=done, **{**values, **fields})  # type: ignore[arg-type]


def test_a_line_says_how_far_the_job_is() -> None:
    line = render(progress_of(200, 50, run_failed=3))
    assert " 25%  50 of 200  3 errors  50 tokens/s  30 s left" in line
    assert len(render(progress_of(10**6, 10**5), width=60)) <= 60
    assert render(ProgressMeter().view()) == "batch  reading the input"
    assert "100%" in render(progress_of(0, 0))


def test_where_there_is_no_terminal_a_line_of_json_comes_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    stream = io.StringIO()
    with ProgressLines(stream=stream) as lines:
        for tick in range(31):
            clock[0] = tick * ProgressLines.plain_line_s / 10
            lines.update(progress_of(200, tick))
    printed = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["records_done"] for line in printed] == [10, 20, 30]
    assert printed[0] == {
        "event": "progress",
        "records_done": 10,
        "records": 200,
        "parts_done": 1,
        "parts": 4,
        "failed": 0,
        "tokens_per_s": 50.0,
        "elapsed_s": 10.0,
    }


def test_quiet_is_quiet_and_a_closed_stream_stops_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with ProgressLines(stream=stream, quiet=True) as lines:
        lines.update(progress_of(200, 1))
    assert stream.getvalue() == ""
    lines = ProgressLines(stream=stream)
    stream.close()
    monkeypatch.setattr(ProgressLines, "plain_line_s", 0.0)
    lines.update(progress_of(200, 1))


def test_a_report_says_what_there_is() -> None:
    report = JobReport(
        status=Status.INCOMPLETE, output="out/", key="k", records=1000, records_done=640, parts=16, parts_done=10,
        stopped_by="deadline", run_records=640, run_tokens=5000, run_s=90.0,
    )  # fmt: skip
    assert report.render().splitlines() == [
        "out/  incomplete (deadline)",
        "  640 of 1,000 records in 10 of 16 parts",
        "  640 computed in 1:30 min, 5,000 tokens generated",
    ]
    assert json.loads(json.dumps(report.as_json()))["status"] == "incomplete"
