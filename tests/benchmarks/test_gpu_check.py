"""`scripts/gpu-check` without a device: every step can begin, results are kept at once, and what hangs is ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from benchmarks.gpu import check as check_module
from benchmarks.gpu.check import main
from benchmarks.gpu.step_process import StepProcess, count_tests
from benchmarks.gpu.steps import CALLS, StepPlan
from tests.support.load import patience_s

ROOT = Path(__file__).parents[2]
SLEEP = "import time; time.sleep(600)"


def step(name: str, code: str, limit_s: float = 60.0, **options: bool) -> StepPlan:
    command = (sys.executable, "-c", code, "{json}", "{junit}")
    return StepPlan(name, command, limit_s, command, **options)


def run(monkeypatch: pytest.MonkeyPatch, out: Path, *steps: StepPlan, device: str = "none", **options: str):
    monkeypatch.setitem(CALLS, "A", steps)
    monkeypatch.setattr(check_module, "device_name", lambda: device)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    status = main(["A", "--out", str(out), *(part for pair in options.items() for part in pair)])
    return status, json.loads((out / "gpu-check-A" / "summary.json").read_text())["steps"]


@pytest.mark.slow
@pytest.mark.parametrize("call", sorted(CALLS))
def test_every_step_of_a_call_can_begin(call: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [str(ROOT / "scripts" / "gpu-check"), call, "--dry-run", "--seconds", str(patience_s(400))],
        env={**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=patience_s(400),
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads((tmp_path / f"gpu-check-{call}" / "summary.json").read_text())
    assert {name: found["outcome"] for name, found in summary["steps"].items()} == {
        step.name: "ok" for step in CALLS[call]
    }


def test_results_are_there_as_soon_as_they_are_had(tmp_path: Path) -> None:
    code = "import sys, time; open(sys.argv[1], 'w').write('{\"claims\": [], \"half\": 1}'); time.sleep(600)"
    process = StepProcess(step("slow", code), tmp_path)
    until_s = time.monotonic() + patience_s(20)
    while not (tmp_path / "slow.measured.json").exists() and time.monotonic() < until_s:
        time.sleep(0.02)
    early = process.wait(0.2)
    result = process.result(early, has_device=False)
    assert (result["outcome"], result["measured"]) == ("too long", {"claims": [], "half": 1})


def test_a_step_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    code = (
        "import signal, subprocess, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        f"child = subprocess.Popen([sys.executable, '-c', {SLEEP!r}]);"
        "print(child.pid, flush=True); child.wait()"
    )
    process = StepProcess(step("hangs", code), tmp_path)
    log = tmp_path / "hangs.log"
    until_s = time.monotonic() + patience_s(20)
    while not log.read_text().strip() and time.monotonic() < until_s:
        time.sleep(0.02)
    assert process.wait(0.1) == "too long"
    child = int(log.read_text())
    assert_gone(child)


def test_steps_die_with_the_script_that_began_them(tmp_path: Path) -> None:
    """Its machine may kill it with no warning."""
    code = (
        "import os, sys, time; from pathlib import Path;"
        "from benchmarks.gpu.step_process import StepProcess; from benchmarks.gpu.steps import StepPlan;"
        f"command = (sys.executable, '-c', {SLEEP!r});"
        f"process = StepProcess(StepPlan('s', command, 9.0, command), Path({str(tmp_path)!r}));"
        "print(process._process.pid, flush=True); time.sleep(600)"
    )
    script = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert script.stdout is not None
    child = int(script.stdout.readline())
    script.kill()
    script.wait()
    script.stdout.close()
    assert_gone(child)


def assert_gone(pid: int) -> None:
    until_s = time.monotonic() + patience_s(20)
    while time.monotonic() < until_s:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return
        except OSError:
            return
        time.sleep(0.02)
    pytest.fail(f"process {pid} is still there")


JUNIT = '<testsuites><testsuite tests="3" failures="0" errors="0" skipped="1"/></testsuites>'


@pytest.mark.parametrize(("device", "outcome"), [("NVIDIA H200, 141 GB", "skipped"), ("none", "ok")])
def test_a_skipped_test_is_a_failure_where_there_is_a_device(monkeypatch, tmp_path, device, outcome) -> None:
    code = f"import sys; open(sys.argv[2], 'w').write({JUNIT!r})"
    status, steps = run(monkeypatch, tmp_path, step("tests", code), device=device)
    assert steps["tests"]["outcome"] == outcome
    assert steps["tests"]["tests"]["skipped"] == 1
    assert (status == 0) == (outcome == "ok")
    assert count_tests(tmp_path / "absent.xml") == {}


def test_time_counts_from_the_scripts_start(monkeypatch, tmp_path) -> None:
    late = {"--began": str(time.time() - 1_000)}
    status, steps = run(monkeypatch, tmp_path, step("late", "print(1)"), **late)
    assert (status, steps["late"]["outcome"]) == (1, "no time")


def test_a_trial_of_a_step_has_all_of_the_calls_time(monkeypatch, tmp_path) -> None:
    slow = step("slow", "import time; time.sleep(1)", 0.05)
    monkeypatch.setitem(CALLS, "A", (slow,))
    assert main(["A", "--out", str(tmp_path), "--dry-run"]) == 0
    assert main(["A", "--out", str(tmp_path)]) == 1


def test_a_step_that_needs_the_model_waits_for_what_prepares_it(monkeypatch, tmp_path) -> None:
    made = tmp_path / "made"
    prepare = f"import time; time.sleep(1); open({str(made)!r}, 'w').close()"
    status, steps = run(
        monkeypatch,
        tmp_path,
        step("model", prepare, in_background=True),
        step("meanwhile", f"import os; assert not os.path.exists({str(made)!r})"),
        step("needs", f"open({str(made)!r})", waits=True),
    )
    assert {name: each["outcome"] for name, each in steps.items()} == dict.fromkeys(steps, "ok")
    assert status == 0


def test_a_failed_step_takes_nothing_from_the_others(monkeypatch, tmp_path) -> None:
    status, steps = run(monkeypatch, tmp_path, step("bad", "raise SystemExit(3)"), step("good", "print(7)"))
    assert [each["outcome"] for each in steps.values()] == ["failed", "ok"]
    assert status == 1
