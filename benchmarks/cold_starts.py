"""One cold start, from starting a process to its first token.

Of Teneral, the token comes over HTTP, from a request that is sent as soon as the port is open: as the one that woke the
container would be. Of the peers it is printed by the process that made it (`peers/first_token.py`), which spares them a
server. What happened before the process was started (packing, a standby pool) is not part of it.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Self

from benchmarks.peer_environment import PROGRAMS, PeerEnvironment
from benchmarks.processes import MemoryWatch, RunError, environment

PROMPT = "The quick brown fox jumps over the lazy dog, and then " * 3
RUN_TIMEOUT_S = 180.0
POOL_TIMEOUT_S = 60.0
PORT_POLL_S = 0.002


@dataclass(frozen=True)
class ColdStart:
    """`peak_rss_bytes` is of the process that was started; `peak_pss_bytes` of all that belong to it, if watched."""

    first_token_s: float
    peak_rss_bytes: int
    peak_pss_bytes: int | None


def serve(
    model: str,
    *flags: str,
    variables: Mapping[str, str],
    watch: bool = False,
    pool: StandbyPool | None = None,
    settle_s: float = 0.0,
) -> ColdStart:
    """`teneral serve MODEL`, and one request; it ends `settle_s` after the answer. With `pool`, a process of it serves.
    Raises `RunError`.
    """
    port = _free_port()
    command = [sys.executable, "-m", "teneral", "serve", model, *flags]
    command += ["--host", "127.0.0.1", "--port", str(port), "--name", "model", "--log-level", "error"]
    command += ["--standby-socket", pool.path] if pool else []
    roots = [pool.process_id] if pool else []
    with _started(command, variables, roots, watch=watch) as run:
        connection = _connect(port, run.process)
        connection.request("POST", "/v1/completions", json.dumps(_request()), _JSON)
        response = connection.getresponse()
        for line in response:
            if line.startswith(b"data: "):
                break
        else:
            raise RunError(f"{model}: {response.status} without a token")
        run.first_token_s = run.elapsed_s()
        response.read()
        time.sleep(settle_s)
        run.process.terminate()
    return run.result()


def peer(
    way: str, model: str, *, peers: PeerEnvironment, variables: Mapping[str, str], watch: bool = False
) -> ColdStart:
    """A peer's way, as `peers/first_token.py` names it. Raises `RunError`."""
    command = [str(peers.python), str(PROGRAMS / "first_token.py"), way, model, PROMPT]
    with _started(command, variables, [], watch=watch) as run:
        assert run.process.stdout is not None
        if not any(line.startswith(b"TOKEN") for line in run.process.stdout):
            raise RunError(f"{way} ended without a token")
        run.first_token_s = run.elapsed_s()
    return run.result()


class StandbyPool:
    """`teneral standby` with one process that waits, as a context manager."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder / f"standby-{os.getpid()}.socket")
        command = [sys.executable, "-m", "teneral", "standby", self.path]
        self._process = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE)
        self.process_id = self._process.pid
        assert self._process.stderr is not None
        with _killed_after(POOL_TIMEOUT_S, self._process):
            self._process.stderr.readline()  # says that it is ready
        if self._process.poll() is not None:
            raise SystemExit("the standby pool did not start")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait()


class _Run:
    """A process from its start to its end."""

    def __init__(
        self, process: subprocess.Popen[bytes], started_s: float, memory: MemoryWatch | None
    ) -> None:
        self.process = process
        self.first_token_s: float | None = None
        self.peak_rss_bytes = 0
        self._started_s = started_s
        self._memory = memory

    def elapsed_s(self) -> float:
        return time.monotonic() - self._started_s

    def result(self) -> ColdStart:
        if self.first_token_s is None:
            raise RunError("ended without a token")
        watched = self._memory.peak_bytes if self._memory else None
        return ColdStart(self.first_token_s, self.peak_rss_bytes, watched)


@contextmanager
def _started(
    command: Sequence[str], variables: Mapping[str, str], roots: Sequence[int], *, watch: bool
) -> Iterator[_Run]:
    """The process, which has ended when this does. `RunError`s get its last words."""
    with tempfile.TemporaryFile() as said:
        started_s = time.monotonic()
        process = subprocess.Popen(command, env=environment(variables), stdout=subprocess.PIPE, stderr=said)
        memory = MemoryWatch(process.pid, *roots) if watch else None
        run = _Run(process, started_s, memory)
        try:
            with _killed_after(RUN_TIMEOUT_S, process), memory or nullcontext():
                yield run
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
                run.peak_rss_bytes = usage.ru_maxrss * 1024
        except (RunError, OSError, http.client.HTTPException) as error:
            raise RunError(f"{error}\n{_last_words(said)}") from error
        finally:
            if process.returncode is None:
                process.kill()
                process.wait()


@contextmanager
def _killed_after(timeout_s: float, process: subprocess.Popen[bytes]) -> Iterator[None]:
    timer = threading.Timer(timeout_s, process.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _last_words(said: IO[bytes], max_bytes: int = 2000) -> str:
    size_bytes = said.seek(0, os.SEEK_END)
    said.seek(max(0, size_bytes - max_bytes))
    return re.sub(r"[^\n]*\r", "", said.read().decode(errors="replace"))  # progress bars


def _connect(port: int, process: subprocess.Popen[bytes]) -> http.client.HTTPConnection:
    while process.poll() is None:
        try:
            sock = socket.create_connection(("127.0.0.1", port), timeout=RUN_TIMEOUT_S)
        except ConnectionRefusedError:
            time.sleep(PORT_POLL_S)
            continue
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.sock = sock
        return connection
    raise RunError(f"the server ended with {process.returncode}")


_JSON = {"content-type": "application/json"}


def _request() -> dict[str, object]:
    return {
        "model": "model",
        "prompt": PROMPT,
        "max_tokens": 1,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
