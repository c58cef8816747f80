"""`teneral standby` and `teneral serve` as real processes, and what can be seen of them in /proc (Linux)."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Self

from tests.support.load import patience_s
from tests.support.ports import free_port

WAIT_S = patience_s(90)  # for what takes a second or two where nothing else runs


def until(condition: Callable[[], bool], what: str) -> None:
    """Returns when it holds; fails, saying what was waited for, when that takes too long."""
    until_s = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until_s, f"not within {WAIT_S:.0f} s: {what}"
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    """Of all its threads; none when it has ended."""
    found: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            found += map(int, (task / "children").read_text().split())
    return found


def descendants(pid: int) -> list[int]:
    return [number for child in children(pid) for number in (child, *descendants(child))]


def runs(pid: int) -> bool:
    """True while it exists, and is more than an uncollected exit status."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def num_threads(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/task").iterdir()))


def command_line(pid: int) -> list[str]:
    """Empty when it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().split("\0")[:-1]
    except OSError:
        return []


def waiting_processes(pool_pid: int) -> list[int]:
    """The pool's processes that have no order: its children in its own session."""
    return [child for child in children(pool_pid) if _session(child) == _session(pool_pid)]


def _session(pid: int) -> int | None:
    """The session that a process is in; None when it has ended."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


Environment = Mapping[str, str | None]  # what is different in it; None: not there


def _changed(environment: Environment) -> dict[str, str]:
    return {name: value for name, value in (os.environ | environment).items() if value is not None}


class Pool:
    """`teneral standby` with two processes. Ends with its context."""

    def __init__(self, folder: Path, *flags: str, environment: Environment | None = None) -> None:
        """Returns once they are forked, or it has ended; `stderr_text` is what it wrote until then."""
        self.path = folder / "standby.sock"
        command = [sys.executable, "-m", "teneral", "standby", str(self.path), "--processes", "2", *flags]
        self.process = subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=_changed(environment or {})
        )
        assert self.process.stderr is not None
        self.stderr_text = ""
        while "standby processes at" not in self.stderr_text and (line := self.process.stderr.readline()):
            self.stderr_text += line

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def waiting(self) -> list[int]:
        return waiting_processes(self.process.pid)

    def wait_full(self) -> list[int]:
        """Once there are two of them again."""
        until_s = time.monotonic() + WAIT_S
        while len(waiting := self.waiting()) < 2:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        return waiting

    def stop(self) -> None:
        self.process.terminate()
        self.process.wait(WAIT_S)
        assert self.process.stderr is not None
        if not self.process.stderr.closed:
            self.stderr_text += self.process.stderr.read()
            self.process.stderr.close()
        assert "Exception ignored" not in self.stderr_text
        assert "Traceback" not in self.stderr_text


class Server:
    """`teneral serve` that names a pool's socket. Is killed at the end of its context, if it has not ended."""

    def __init__(
        self, model: Path | str, socket_path: Path, *flags: str, environment: Environment | None = None
    ) -> None:
        self.port = free_port()
        command = [
            sys.executable,
            "-m",
            "teneral",
            "serve",
            str(model),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        self.process = subprocess.Popen(
            [*command, "--standby-socket", str(socket_path), "--name", "tiny", *flags],
            stderr=subprocess.PIPE,
            text=True,
            env=_changed(environment or {}),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(WAIT_S)
        assert self.process.stderr is not None
        self.process.stderr.close()

    def get(self, path: str, body: dict[str, Any] | None = None) -> tuple[int, Any]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        until_s = time.monotonic() + WAIT_S
        while True:
            try:
                connection.connect()
                break
            except ConnectionRefusedError:
                assert self.process.poll() is None, self.process.communicate()[1]
                assert time.monotonic() < until_s
                time.sleep(0.01)
        with contextlib.closing(connection):
            if body is None:
                connection.request("GET", path)
            else:
                connection.request("POST", path, json.dumps(body), {"content-type": "application/json"})
            answer = connection.getresponse()
            return answer.status, json.loads(answer.read())

    def complete(self) -> str:
        status, answer = self.get(
            "/v1/completions", {"model": "tiny", "prompt": "a b c", "max_tokens": 4, "temperature": 0}
        )
        assert status == 200, answer
        return str(answer["choices"][0]["text"])

    def marks(self) -> set[str]:
        return {span["name"] for span in self.get("/timeline")[1]["spans"] if span["lane"] == "process"}

    def end(self, number: int = signal.SIGTERM) -> tuple[int, str]:
        self.process.send_signal(number)
        _, log = self.process.communicate(timeout=WAIT_S)
        return self.process.returncode, log

    def end_well(self, number: int = signal.SIGTERM) -> str:
        """Ends it, with status 0. Returns its log."""
        status, log = self.end(number)
        assert status == 0, log
        return log
