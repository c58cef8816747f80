"""Fake command-line tools on a PATH of their own: each records its calls, and answers or fails as a test says.

The PATH holds these and the few real programs that a script of ours may use, so that a tool that is not faked is
missing, whatever this machine has.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support.load import patience_s

# Programs that every Unix has.
REAL_PROGRAMS = (
    "bash", "sh", "env", "cat", "cp", "cut", "dirname", "git", "grep", "head", "id", "kill", "mkdir", "mktemp", "rm",
    "sed", "seq", "sleep", "sort", "tail", "tr", "true",
)  # fmt: skip
PROGRAM = """#!{python} -IS
import json, os, re, stat, sys, time
called = [os.path.basename(sys.argv[0]), *sys.argv[1:]]
piped = sys.stdin.read() if stat.S_ISFIFO(os.fstat(0).st_mode) else ""
with open({log!r}, "a") as file:
    file.write(json.dumps([called, piped]) + "\\n")
with open({log!r}) as file:
    before = [json.loads(line)[0] for line in file][:-1]
for pattern, stdout, stderr, status, times, behind in json.load(open({rules!r})):
    if re.search(pattern, " ".join(called)):
        if times and sum(bool(re.search(pattern, " ".join(each))) for each in before) >= times:
            continue
        while behind not in "\\n".join(" ".join(json.loads(line)[0]) for line in open({log!r})):
            time.sleep(0.02)
        sys.stdout.write(stdout)
        sys.stderr.write(stderr)
        sys.exit(status)
"""


class Call(NamedTuple):
    """One call of a fake: the program and its arguments, and what came through a pipe."""

    words: list[str]
    piped: str

    @property
    def line(self) -> str:
        return " ".join(self.words)


class FakeTools:
    """A folder of fakes. A call succeeds and prints nothing unless a rule says otherwise."""

    def __init__(self, folder: Path, *programs: str) -> None:
        self.bin, self._log, self._rules = folder / "bin", folder / "calls.jsonl", folder / "rules.json"
        self.bin.mkdir(parents=True)
        self._log.touch()
        self._rules.write_text("[]")
        for name in REAL_PROGRAMS:
            if path := shutil.which(name):
                (self.bin / name).symlink_to(path)
        for name in programs:
            path = self.bin / name
            path.write_text(PROGRAM.format(python=sys.executable, log=str(self._log), rules=str(self._rules)))
            path.chmod(0o755)

    def answer(
        self,
        pattern: str,
        stdout: str = "",
        *,
        stderr: str = "",
        status: int = 0,
        times: int = 0,
        behind: str = "",
    ) -> None:
        """Set the answer of calls whose line fits. Later rules go first; `times` bounds the calls of a rule. The answer
        waits for a call whose line has the text `behind`.
        """
        rules = json.loads(self._rules.read_text())
        self._rules.write_text(json.dumps([[pattern, stdout, stderr, status, times, behind], *rules]))

    def calls(self, pattern: str = "") -> list[Call]:
        """All calls so far, in order, that have the text in their line."""
        found = [Call(*json.loads(line)) for line in self._log.read_text().splitlines()]
        return [call for call in found if pattern in call.line]

    def forget(self) -> None:
        self._log.write_text("")

    def run(
        self, command: Sequence[str | Path], *, cwd: Path, **variables: str
    ) -> subprocess.CompletedProcess[str]:
        """The command with the fakes on its PATH, and of the environment nothing else."""
        given: Mapping[str, str] = {
            "PATH": str(self.bin),
            "HOME": str(cwd),
            "TMPDIR": os.environ.get("TMPDIR", "/tmp"),
            **variables,
        }
        return subprocess.run(
            [str(word) for word in command],
            env=dict(given),
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=patience_s(60),
        )
