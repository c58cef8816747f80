"""Children of AWS Batch's array jobs: each does its share without a flag."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.batch_jobs import prompts, read_records, write_lines

from teneral.cli import run as teneral
from teneral.handlers.batch.spec import Share, share_of
from teneral.loader.errors import UsageError

FLAGS = ["--loader", "thread", "--threads", "1", "--log-level", "error", "--part-lines", "2"]


def child(index: object, size: object) -> dict[str, str]:
    return {"AWS_BATCH_JOB_ARRAY_INDEX": str(index), "AWS_BATCH_JOB_ARRAY_SIZE": str(size)}


def test_a_child_s_share_is_its_index_of_the_array_s_size() -> None:
    assert share_of(child(0, 2)) == Share(0, 2)
    assert share_of(child(9_999, 10_000)) == Share(9_999, 10_000)


def test_any_other_process_has_none() -> None:
    assert share_of({}) is None
    assert share_of({"AWS_BATCH_JOB_ID": "id", "AWS_BATCH_JOB_ARRAY_SIZE": "4"}) is None  # of the parent


@pytest.mark.parametrize(
    "environment", [child(4, 4), child("x", 4), child(-1, 4), child(0, ""), child(0, 20_000)]
)
def test_invalid_variables_are_named(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError, match="AWS_BATCH_JOB_ARRAY_INDEX") as caught:
        share_of(environment)
    assert "--worker" in caught.value.hint


def test_the_children_of_an_array_job_do_the_whole_together(
    decoder_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given, output = write_lines(tmp_path / "in.jsonl", prompts(8)), tmp_path / "out.jsonl"
    reports = []
    for index in (1, 0):
        for name, value in child(index, 2).items():
            monkeypatch.setenv(name, value)
        assert teneral(["batch", str(decoder_dir), str(given), str(output), *FLAGS]) == 0
        reports.append(json.loads(capsys.readouterr().out))
    assert [(report["status"], report["run_records"]) for report in reports] == [
        ("share_done", 4),
        ("complete", 4),
    ]
    assert len(read_records(output)) == 8


def test_a_child_may_do_all_of_an_input_of_its_own(
    decoder_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in child(1, 2).items():
        monkeypatch.setenv(name, value)
    given, output = write_lines(tmp_path / "in.jsonl", prompts(4)), tmp_path / "out.jsonl"
    assert teneral(["batch", str(decoder_dir), str(given), str(output), "--worker", "0/1", *FLAGS]) == 0
    assert json.loads(capsys.readouterr().out)["status"] == "complete"
