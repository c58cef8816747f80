"""One `teneral serve` as a child process: start, readiness, end. Knows nothing of Ray.

Ray's own variables are hidden from the child: its thread counts and temporary folders are for Ray's
workers. The child ends with its owner, even if that is killed.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import Mapping

from ....loader.errors import LoadError

# Variables of Ray, and those that it sets for its workers.
HIDDEN = re.compile(r"RAY_.*|OMP_NUM_THREADS|MKL_NUM_THREADS|OPENBLAS_NUM_THREADS|CUDA_VISIBLE_DEVICES_RAY")
LISTENING = re.compile(rb"http://\S*?:(\d+)")
# Until it reports its address, which does not include the load.
START_S = 60.0
READY_POLL_S = 0.01
LOG_S = 0.5  # for the last lines of an ended server's log
# After the requests: the KV snapshot, and the process's own end.
END_S = 5.0


class ServerProcess:
    """A server that is stopped, starting, or running at `port`. For one event loop."""

    def __init__(self, environment: Mapping[str, str], *, ready_path: str, drain_s: float) -> None:
        self._environment = dict(environment)
        self._ready_path = ready_path
        self._drain_s = drain_s
        self._process: asyncio.subprocess.Process | None = None
        self._log: asyncio.Task[None] | None = None
        self.port = 0
        self.is_changing = False  # starting or ending

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def start(self) -> float:
        """Start it and wait until it reports its address; requests may be sent from then on.
        Returns the seconds.

        Raises `LoadError` if it ends before that.
        """
        began = time.monotonic()
        self.is_changing = True
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "teneral",
            "serve",
            env=child_environment(os.environ, self._environment),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )
        try:
            self.port = await asyncio.wait_for(self._read_port(self._process), START_S)
        except (TimeoutError, LoadError):
            await self.end(drain_s=0)
            raise
        self._log = asyncio.create_task(self._pass_on(self._process))
        self.is_changing = False
        return time.monotonic() - began

    async def wait_ready(self, timeout_s: float) -> None:
        """Wait until the ready path answers 200. Raises `LoadError` if the process ends, or at the
        time limit.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.is_running:
                raise LoadError("the server ended before it was ready", hint="Its log says why.")
            if await self.get(self._ready_path) == 200:
                return
            if time.monotonic() > deadline:
                raise LoadError(f"the server was not ready within {timeout_s:g} s")
            await asyncio.sleep(READY_POLL_S)

    async def get(self, path: str) -> int:
        """The status of a GET without a body; 0 without an answer."""
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return 0
        try:
            writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
            status = (await asyncio.wait_for(reader.readline(), 5.0)).split()
            return int(status[1]) if len(status) > 1 else 0
        except (OSError, TimeoutError, ValueError):
            return 0
        finally:
            writer.close()

    async def end(self, *, drain_s: float | None = None) -> None:
        """Send SIGTERM, wait for running requests, and send SIGKILL if necessary."""
        process = self._process
        if process is None:
            return
        self.is_changing = True
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            allowed_s = self._drain_s if drain_s is None else drain_s
            try:
                await asyncio.wait_for(process.wait(), allowed_s + END_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        log, self._process, self._log, self.port = self._log, None, None, 0
        self.is_changing = False
        # A helper that is still ending may hold its other end open.
        if log is not None:
            await asyncio.wait([log], timeout=LOG_S)
            log.cancel()

    async def _read_port(self, process: asyncio.subprocess.Process) -> int:
        assert process.stdout is not None
        while line := await process.stdout.readline():
            _write(line)
            if match := LISTENING.search(line):
                return int(match[1])
        raise LoadError("the server ended before it listened", hint="Its log says why.")

    async def _pass_on(self, process: asyncio.subprocess.Process) -> None:
        """Forward its log to the owner's."""
        assert process.stdout is not None
        while data := await process.stdout.read(1 << 16):
            _write(data)


def child_environment(outer: Mapping[str, str], settings: Mapping[str, str]) -> dict[str, str]:
    """The child's environment: this process's without Ray's variables, with the model's settings
    and a port of its own.
    """
    kept = {name: value for name, value in outer.items() if not HIDDEN.fullmatch(name)}
    return {**kept, **settings, "TENERAL_HOST": "127.0.0.1", "TENERAL_PORT": "0"}


def _end_with_parent() -> None:
    """Have the child get SIGTERM when the thread that started it ends."""
    import ctypes

    ctypes.CDLL(None).prctl(1, signal.SIGTERM, 0, 0, 0)


def _write(data: bytes) -> None:
    sys.stderr.write(data.decode(errors="replace"))
    sys.stderr.flush()
