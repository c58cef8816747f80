"""The reports of benchmarks, printed and saved."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from benchmarks import __main__ as index
from benchmarks import readme, report
from benchmarks.processes import MemoryWatch, environment, tree_bytes

ROOT = Path(__file__).parent.parent.parent
HOLD = "data = bytearray(b'x') * ({} << 20); print('held', flush=True); input()"


def test_a_report_says_where_when_and_how() -> None:
    head = report.begin("some_benchmark", model="some-shape")
    assert head["command"].startswith("python -m benchmarks.some_benchmark")
    assert head["model"] == "some-shape"
    assert {"name", "cores", "cpu", "memory_gib", "kernel", "python"} == set(head["machine"])
    assert head["versions"]["numpy"]
    assert head["load_average"] >= 0
    assert head["date"].endswith("UTC")


def test_a_kept_command_names_no_folder_of_one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["x", "--work", "/somewhere", "--rounds", "3"])
    assert report.begin("starts")["command"] == "python -m benchmarks.starts --rounds 3"


def test_a_kept_result_is_found_again_and_the_latest_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    for model, date in (("early", "2026-01-02 03:04 UTC"), ("late", "2026-01-02 03:05 UTC")):
        report.finish({**report.begin("x"), "model": model, "date": date}, "a table", save=True)
    assert report.newest("x")["model"] == "late"
    assert capsys.readouterr().out == "a table\na table\n"
    with pytest.raises(SystemExit, match=r"python -m benchmarks\.y --save"):
        report.newest("y")


def test_nothing_is_kept_unasked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "RESULTS", tmp_path / "results")
    report.finish(report.begin("x"), "a table", save=False)
    assert not (tmp_path / "results").exists()


def test_measured_processes_may_write_bytecode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    assert "PYTHONDONTWRITEBYTECODE" not in environment()
    assert environment({"A": "b"})["A"] == "b"


def test_memory_is_that_of_a_process_and_its_children_together() -> None:
    child = [sys.executable, "-c", HOLD.format(24)]
    parent = f"import subprocess; subprocess.run({child!r})"
    with subprocess.Popen(
        [sys.executable, "-c", parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"held\n"
        assert tree_bytes([process.pid]) >= 24 << 20
        process.communicate(b"\n")
    assert tree_bytes([process.pid]) == 0


def test_the_peak_outlives_the_process() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", HOLD.format(24)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        with MemoryWatch(process.pid) as memory:
            while memory.peak_bytes == 0:
                time.sleep(0.01)
            process.communicate(b"\n")
    assert memory.peak_bytes >= 24 << 20


def test_every_benchmark_of_the_index_can_be_started() -> None:
    for name in index.BENCHMARKS:
        assert (ROOT / "benchmarks" / f"{name.replace('.', '/')}.py").is_file(), name


def test_an_unknown_benchmark_is_refused_by_name() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "cold_sart"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "cold_sart" in done.stderr
    assert "cold_start" in done.stderr


def test_a_page_keeps_all_but_its_figures() -> None:
    text = "before\n<!-- figures -->\nold\n<!-- /figures -->\nafter\n"
    filled = "before\n<!-- figures -->\nnew\n<!-- /figures -->\nafter\n"
    assert readme.filled(text, "figures", "new\n") == filled
    for mark in ("figures", "benchmark"):
        with pytest.raises(SystemExit, match=f"has no <!-- {mark} -->"):
            readme.filled("nothing", mark, "new\n")


def test_the_readme_s_table_names_a_peer_and_a_day_in_each_row() -> None:
    rows = readme.figures().splitlines()[2:]
    assert len(rows) == 6
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert all(cells)
        assert cells[3].startswith("20")


def test_the_readme_s_figures_are_those_of_the_result() -> None:
    result: dict[str, Any] = json.loads(json.dumps(report.begin("cold_start", model="a-shape", rounds=3)))
    result |= {
        "latency_ms": 15.0,
        "stored_bytes": {"plain": 1_000_000_000, "packed": 660_000_000},
        "memory": {"teneral, packed": {"peak_pss_mb": 1234.5}},
        "results": [
            {"rate_mb_s": 100.0, "wire_s": {"plain": 10.0, "packed": 6.6}, "systems": {}},
            {
                "rate_mb_s": 200.0,
                "wire_s": {"plain": 5.0, "packed": 3.3},
                "systems": {
                    "teneral, packed": {"first_token_s": 3.63},
                    "transformers after boto3": {"first_token_s": 14.52},
                },
            },
        ],
    }
    text = readme.cold_start(result)
    assert "| `teneral serve`, packed | 3.63 | 1.10 x 3.30 s | 4.0x | 1,234 |" in text
    assert "| transformers after boto3 | 14.52 | 2.90 x 5.00 s | – | – |" in text
