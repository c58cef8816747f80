"""One step of `scripts/gpu-check`: a process group with a time limit, which ends with its parent.

A step that hangs in the driver can ignore SIGTERM, and a call that runs past its machine's limit is killed with no
warning: so the group gets SIGKILL after a moment, and its first process the parent's death as a signal.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from .steps import StepPlan

KILL_AFTER_S = 5.0
NO_DEVICE = 2  # the exit status of a benchmark that finds none
TAIL_CHARS = 6_000  # of a step's output, in the result
PR_SET_PDEATHSIG = 1


class StepProcess:
    """A step that has begun. Its output goes to a file, so nothing waits for a pipe that a grandchild holds."""

    def __init__(self, step: StepPlan, out: Path, *, is_dry: bool = False) -> None:
        self.step = step
        self._json, self._junit, self._log = (
            out / f"{step.name}.{kind}" for kind in ("measured.json", "junit.xml", "log")
        )
        places = {"{json}": str(self._json), "{junit}": str(self._junit)}
        command = [places.get(part, part) for part in (step.dry if is_dry else step.command)]
        self._begun_s = time.monotonic()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent,  # noqa: PLW1509 - the parent has one thread
            )

    def wait(self, limit_s: float) -> str | None:
        """How it ended early; None: by itself. Ends all of it after `limit_s`."""
        try:
            self._process.wait(max(0.0, limit_s))
        except subprocess.TimeoutExpired:
            self.end()
            return "too long"
        self.end()  # what it has left behind
        return None

    def end(self) -> None:
        for number, wait_s in ((signal.SIGTERM, KILL_AFTER_S), (signal.SIGKILL, KILL_AFTER_S)):
            try:
                os.killpg(self._process.pid, number)
                self._process.wait(wait_s)
            except ProcessLookupError:
                self._process.poll()
                return
            except subprocess.TimeoutExpired:  # a process in the driver is past all signals: go on without it
                continue

    def result(self, early: str | None, *, has_device: bool) -> dict[str, Any]:
        """`outcome` (ok, failed, skipped, no device, too long), seconds, tests, its last output, what it measured."""
        status = self._process.returncode
        outcome = early or {0: "ok", NO_DEVICE: "no device"}.get(-1 if status is None else status, "failed")
        tests = count_tests(self._junit)
        if outcome == "ok" and has_device and tests.get("skipped"):
            outcome = "skipped"  # a device is here: a test that needs one has no reason
        return {
            "outcome": outcome,
            "exit_status": status,
            "seconds": round(time.monotonic() - self._begun_s, 1),
            "tests": tests,
            "output": self._log.read_text(errors="replace")[-TAIL_CHARS:],
            "measured": _read_json(self._json),
        }


def count_tests(junit: Path) -> dict[str, int]:
    """Of a JUnit report; nothing where there is none, or one that was not finished."""
    try:
        suites = ElementTree.parse(junit).getroot().iter("testsuite")
    except (OSError, ElementTree.ParseError):
        return {}
    found = dict.fromkeys(("tests", "failures", "errors", "skipped"), 0)
    for suite in suites:
        for name in found:
            found[name] += int(suite.get(name, 0))
    return found


def missing_program(command: Sequence[str]) -> str | None:
    """The program that the command begins with, where this machine lacks it."""
    from shutil import which

    return None if which(command[0]) else command[0]


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):  # absent, or cut off in the middle
        return None


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
