"""The three calls of `scripts/gpu-check` on a machine with a GPU, of nine minutes each.

    python -m benchmarks.gpu.check A|B|C [--out DIR] [--only NAME ...] [--began SECONDS] [--dry-run]

A: ceilings of the machine, the tests that need a device, one load under memcheck, merging, streaming, parts as
stored. B: generating. C: cold starts and loads, with peers. `steps.py` lists the steps of each.

Results go to --out, to $OUT where that is set, each as soon as there is something: a step's own file while it measures,
a summary after each step. The time is counted from --began, the epoch's seconds at which the script was started. The
exit status is 0 only when all steps ran and all claims hold; where nvidia-smi names a device, a skipped test fails.
With --dry-run nothing is measured: each step shows that it can begin, without a device.

Needs no network, and no package beyond those that `scripts/gpu-wheels` fetches.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.report import RESULTS, machine, versions

from .step_process import StepProcess, missing_program
from .steps import CALLS, StepPlan

PACKAGES = (
    "torch",
    "triton",
    "cupy-cuda13x",
    "cupy-cuda12x",
    "nvidia-libnvcomp-cu13",
    "transformers",
    "numpy",
    "zstandard",
)
SECONDS = 540.0  # of the ten minutes that a machine gives a call: what is left brings the results back
SPARE_S = 3.0


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    steps = CALLS[options.call]
    unknown = set(options.only) - {step.name for step in steps}
    if unknown:
        known = ", ".join(step.name for step in steps)
        raise SystemExit(f"no such step in {options.call}: {', '.join(sorted(unknown))}; there are {known}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what has begun is ended
    check = Check(options)
    try:
        for step in steps:
            if not options.only or step.name in options.only:
                check.run(step)
    finally:
        check.end()
    return check.report()


class Check:
    """One call: its steps' results so far, and what runs in the background."""

    def __init__(self, options: argparse.Namespace) -> None:
        # The clock of the script's start is the wall's; all else is measured on the monotonic clock.
        self._end_s = time.monotonic() + options.seconds - (time.time() - options.began)
        self._is_dry = options.dry_run
        self._out: Path = options.out / f"gpu-check-{options.call}"
        self._out.mkdir(parents=True, exist_ok=True)
        self._background: list[StepProcess] = []
        self.steps: dict[str, Any] = {}
        device = device_name()
        self._has_device = device != "none"
        self._summary = {
            "benchmark": f"gpu_check_{options.call}",
            "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
            "machine": machine(),
            "versions": versions(PACKAGES),
            "device": device,
            "is_dry": self._is_dry,
            "steps": self.steps,
        }

    @property
    def left_s(self) -> float:
        return self._end_s - time.monotonic() - SPARE_S

    def run(self, step: StepPlan) -> None:
        print(f"== {step.name}", flush=True)
        missing = missing_program(step.command)
        if missing is not None and not self._is_dry:
            return self._keep(step, {"outcome": f"left out: no {missing}", "seconds": 0.0, "output": ""})
        if step.waits and not self._is_dry:
            self.end(for_s=self.left_s - step.limit_s / 2)
        if self.left_s <= 0:
            return self._keep(step, {"outcome": "no time", "seconds": 0.0, "output": ""})
        process = StepProcess(step, self._out, is_dry=self._is_dry)
        if step.in_background and not self._is_dry:
            self._background.append(process)
            return None
        # A step's own limit is for measuring: that it can begin depends on the machine's load, too.
        early = process.wait(self.left_s if self._is_dry else min(step.limit_s, self.left_s))
        return self._keep(step, process.result(early, has_device=self._has_device and not self._is_dry))

    def end(self, *, for_s: float = 0.0) -> None:
        """Wait so long for what runs in the background, end it, and keep its results."""
        while self._background:
            process = self._background.pop(0)
            early = process.wait(max(0.0, min(for_s, self.left_s)))
            self._keep(process.step, process.result(early, has_device=self._has_device))

    def report(self) -> int:
        print("\n" + claims_table(self.steps))
        print(f"\nkept in {self._out}")
        return 0 if all_well(self.steps) else 1

    def _keep(self, step: StepPlan, result: dict[str, Any]) -> None:
        print(result["output"], end="", flush=True)
        print(f"== {step.name}: {result['outcome']} in {result['seconds']:.0f} s", flush=True)
        self.steps[step.name] = result
        path = self._out / "summary.json"
        part = path.with_suffix(".part")
        part.write_text(json.dumps(self._summary, indent=2) + "\n")
        part.replace(path)  # whole, whenever this is killed


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
    return all(is_well(step) for step in steps.values()) and all(claim["holds"] for claim in claims)


def is_well(step: dict[str, Any]) -> bool:
    """Also of one that a program is missing for: it is named, and nothing is known of it."""
    return step["outcome"] == "ok" or step["outcome"].startswith("left out")


def claim(name: str, value: float, goal: float, *, unit: str = "", at_most: bool = False) -> dict[str, Any]:
    """A measured value and its goal, the least or the most allowed, for a benchmark's JSON."""
    holds = value <= goal if at_most else value >= goal
    bound = "≤" if at_most else "≥"
    return {"name": name, "value": f"{value:.3g}{unit}", "goal": f"{bound} {goal:g}{unit}", "holds": holds}


def device_name() -> str:
    """The device's name in nvidia-smi, with its driver; "none" where it names no device."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        found = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return "none"
    return found.stdout.strip() or "none"


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = Path(os.environ["OUT"]) if os.environ.get("OUT") else RESULTS
    parser.add_argument("call", choices=sorted(CALLS))
    parser.add_argument("--out", type=Path, default=out, help="folder for the results (default: %(default)s)")
    parser.add_argument("--only", nargs="*", default=[], metavar="NAME", help="steps to run (default: all)")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help="time limit of all steps (default: %(default)s)"
    )
    parser.add_argument(
        "--began", type=float, default=time.time(), help="start of the time limit (default: now)"
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="show that each step can begin, without a device"
    )
    return parser.parse_args(arguments)


if __name__ == "__main__":
    raise SystemExit(main())
