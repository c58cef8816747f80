"""What `scripts/gpu-check` runs: the tests that need a device, then each benchmark, within a time.

    python -m benchmarks.gpu.check [--out DIR] [--only NAME ...] [--seconds N]

Each step is a process of its own with a limit of its own, so that one that hangs or ends badly takes nothing from the
others; what a step has written by then is kept. The result is one JSON file, and a table of the claims of docs/gpu.md:
each with what was measured here and the goal. The exit status is 0 only when all steps ran and all claims hold.

Needs no network, and no package beyond those that `scripts/gpu-wheels` fetches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, machine, versions

PACKAGES = (
    "torch",
    "triton",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-nvcomp-cu13",
    "transformers",
    "numpy",
    "zstandard",
)
TAIL_CHARS = 4_000  # of a step's output, in the result
KILL_AFTER_S = 10.0
NO_DEVICE = 2  # the exit status of a benchmark that finds none


@dataclass(frozen=True, slots=True)
class StepPlan:
    """`command` runs in the repository's root; '{json}' in it is where the step writes what it has measured."""

    name: str
    command: tuple[str, ...]
    limit_s: float


def _benchmark(name: str, limit_s: float) -> StepPlan:
    return StepPlan(name, (sys.executable, "-m", f"benchmarks.gpu.{name}", "--json", "{json}"), limit_s)


STEPS = (
    StepPlan(
        "tests",
        (
            sys.executable,
            *[
                "-m",
                "pytest",
                "-q",
                "-m",
                "gpu",
                "-p",
                "no:cacheprovider",
                "tests/loader/device",
                "tests/runtime/cuda",
            ],
        ),
        120.0,
    ),
    _benchmark("merge", 40.0),
    _benchmark("stream", 40.0),
    _benchmark("attention", 50.0),
    _benchmark("prefix", 50.0),
    _benchmark("decode", 100.0),
    _benchmark("cold_start", 170.0),
)


def main() -> int:
    options = _options()
    unknown = set(options.only) - {step.name for step in STEPS}
    if unknown:
        raise SystemExit(
            f"no such step: {', '.join(sorted(unknown))}; there are {', '.join(s.name for s in STEPS)}"
        )
    out: Path = options.out
    out.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + options.seconds
    report: dict[str, Any] = {
        "benchmark": "gpu_check",
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "versions": versions(PACKAGES),
        "device": _device(),
        "steps": {},
    }
    path = out / f"gpu-check-{report['date'][:10]}-{_slug(report['device'])}.json"
    for step in STEPS:
        if not options.only or step.name in options.only:
            limit_s = min(step.limit_s, end_s - time.monotonic())
            report["steps"][step.name] = run_step(step, limit_s)
            path.write_text(
                json.dumps(report, indent=2) + "\n"
            )  # after each: what comes later may not end well
    print("\n" + claims_table(report["steps"]))
    print(f"\nkept in {path}")
    return 0 if all_well(report["steps"]) else 1


def run_step(step: StepPlan, limit_s: float) -> dict[str, Any]:
    """What became of it: `outcome` (ok, failed, no device, too long, no time), `seconds`, its last output, its JSON."""
    if limit_s <= 0:
        return {"outcome": "no time", "seconds": 0.0, "output": ""}
    print(f"== {step.name}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        command = [part.replace("{json}", str(result)) for part in step.command]
        began_s = time.monotonic()
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        outcome = None
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            outcome = "too long"
            os.killpg(process.pid, signal.SIGTERM)
            try:
                output, _ = process.communicate(timeout=KILL_AFTER_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
        seconds = time.monotonic() - began_s
        print(output, end="", flush=True)
        outcome = outcome or {0: "ok", NO_DEVICE: "no device"}.get(process.returncode, "failed")
        told = {"outcome": outcome, "exit_status": process.returncode, "seconds": round(seconds, 1)}
        measured = json.loads(result.read_text()) if result.exists() else None
        return {**told, "output": output[-TAIL_CHARS:], "measured": measured}


def claims_table(steps: dict[str, Any]) -> str:
    """Markdown. A step's claims are the `claims` of its JSON: name, value, goal, holds."""
    lines = ["| claim | measured | goal | |", "|---|---:|---:|---|"]
    for name, step in steps.items():
        claims = (step.get("measured") or {}).get("claims", [])
        for claim in claims:
            mark = "holds" if claim["holds"] else "missed"
            lines.append(f"| {claim['name']} | {claim['value']} | {claim['goal']} | {mark} |")
        if step["outcome"] != "ok" or not claims:
            lines.append(f"| {name} | {step['outcome']} in {step['seconds']:.0f} s | ok | |")
    return "\n".join(lines)


def all_well(steps: dict[str, Any]) -> bool:
    claims = [claim for step in steps.values() for claim in (step.get("measured") or {}).get("claims", [])]
    return all(step["outcome"] == "ok" for step in steps.values()) and all(claim["holds"] for claim in claims)


def claim(name: str, value: float, goal: float, *, unit: str = "", at_most: bool = False) -> dict[str, Any]:
    """For a benchmark's JSON: what was measured beside its goal, which is the least that will do, or the most."""
    holds = value <= goal if at_most else value >= goal
    bound = "≤" if at_most else "≥"
    return {"name": name, "value": f"{value:.3g}{unit}", "goal": f"{bound} {goal:g}{unit}", "holds": holds}


def _device() -> str:
    """What nvidia-smi calls it, with its driver."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return found.stdout.strip()


def _slug(device: str) -> str:
    words = device.split(",", maxsplit=1)[0].lower().replace("nvidia", "").split()
    return "-".join(words) or "none"


def _options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=RESULTS, help="folder for the results (default: %(default)s)"
    )
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="some steps (default: all)")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all of it (default: %(default)s)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
