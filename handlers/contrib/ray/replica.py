"""A replica of one model: a proxy for a `teneral serve` of its own, which it puts to sleep and
wakes.

Ray starts a replica in four seconds, but a server is woken from the node's standby pool in a third
of a second, so models scale to zero and replicas stay. A sleeping model is an ended process; its KV
snapshot, if any, survives.

The server is a child process that knows nothing of Ray: Ray's own variables are hidden from it, as
its thread counts and temporary folders are for Ray's workers. The child ends with its owner, even
if that is killed.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from ....loader.errors import LoadError, UsageError
from ...http.limits import OWN_HEADERS

# Variables of Ray, and those that it sets for its workers.
HIDDEN = re.compile(r"RAY_.*|OMP_NUM_THREADS|MKL_NUM_THREADS|OPENBLAS_NUM_THREADS|CUDA_VISIBLE_DEVICES_RAY")
LISTENING = re.compile(rb"http://\S*?:(\d+)")
# Until it reports its address, which does not include the load.
SERVER_START_S = 60.0
READY_POLL_S = 0.01
LOG_S = 0.5  # for the last lines of an ended server's log
# After the requests: the KV snapshot, and the process's own end.
END_S = 5.0
# Loading may take any time.
START_S = 3600.0


class ReplicaServer:
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
        try:
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
            self.port = await asyncio.wait_for(self._read_port(self._process), SERVER_START_S)
        except BaseException:
            await self.end(drain_s=0)
            raise
        finally:
            self.is_changing = False
        self._log = asyncio.create_task(self._pass_on(self._process))
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


class Replica:
    """Constructed when requests may come: at `ready_when`, or at once for a model that sleeps.

    `settings`: environment (TENERAL_*), secrets (setting → variable), ready_path, drain_s, idle_timeout_s, sleep.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        environment = {**settings["environment"], **_secrets(settings.get("secrets", {}))}
        self._server = ReplicaServer(
            environment, ready_path=settings["ready_path"], drain_s=settings["drain_s"]
        )
        self._waking = asyncio.Lock()
        self._waits: set[asyncio.Task[None]] = set()  # for the server's start
        self._in_work = 0
        self._last_used = time.monotonic()
        self._session: aiohttp.ClientSession | None = None
        self._idle: asyncio.Task[None] | None = None
        self._starts = 0
        self._start_s = 0.0

    async def check_health(self) -> None:
        """Ray ends this replica if it raises. A model that sleeps, wakes or goes to sleep is
        healthy.
        """
        if self._server.is_changing:
            return
        if self._server.port and not self._server.is_running:
            raise RuntimeError("the server ended by itself")
        if self._server.is_running and await self._server.get("/livez") != 200:
            raise RuntimeError("the server does not answer at /livez")

    async def prepare(self) -> None:
        """Ray calls this once, before the first request."""
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=5)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False)
        if self._settings["sleep"]:
            self._idle = asyncio.create_task(self._put_to_sleep())
        else:
            await self._wake()
            await self._server.wait_ready(START_S)

    async def request(
        self, method: str, path: str, headers: list[tuple[str, str]], body: bytes
    ) -> AsyncIterator[Any]:
        """The server's answer: first (status, headers), then its pieces as they arrive.

        Cancelled when the client disconnects.
        """
        self._in_work += 1
        try:
            await self._wake()
            assert self._session is not None
            url = f"http://127.0.0.1:{self._server.port}{path}"
            kept = [(name, value) for name, value in headers if name.lower() not in OWN_HEADERS]
            async with self._session.request(
                method, url, headers=kept, data=body, allow_redirects=False
            ) as answer:
                shown = [
                    (name, value) for name, value in answer.headers.items() if name.lower() not in OWN_HEADERS
                ]
                yield answer.status, shown
                async for piece in answer.content.iter_any():
                    yield piece
        finally:
            self._in_work -= 1
            self._last_used = time.monotonic()

    def statistics(self) -> dict[str, Any]:
        """The state for tests and people."""
        return {
            "awake": self._server.is_running,
            "port": self._server.port,
            "in_work": self._in_work,
            "starts": self._starts,
            "start_s": self._start_s,
        }

    async def close(self) -> None:
        """End the server. Running requests have `drain_s`."""
        if self._idle is not None:
            self._idle.cancel()
        await self._server.end()
        if self._session is not None:
            await self._session.close()

    async def _wake(self) -> None:
        """Have the server started. Requests may be sent as soon as it listens: they wait there for
        the layers that they need. A client that disconnects meanwhile does not end the start, for
        which others may wait.
        """
        if self._server.is_running and not self._server.is_changing:
            return
        start = asyncio.create_task(self._start_server())
        self._waits.add(start)
        start.add_done_callback(self._waits.discard)
        await asyncio.shield(start)

    async def _start_server(self) -> None:
        async with self._waking:
            if not self._server.is_running:
                if self._server.port:
                    await self._server.end()  # one that ended by itself
                self._start_s = await self._server.start()
                self._starts += 1

    async def _put_to_sleep(self) -> None:
        idle_s = float(self._settings["idle_timeout_s"])
        while True:
            await asyncio.sleep(max(0.05, min(1.0, idle_s / 4)))
            quiet_s = time.monotonic() - self._last_used
            if self._server.is_running and not self._in_work and quiet_s >= idle_s:
                async with self._waking:
                    if not self._in_work:
                        await self._server.end()


def _secrets(names: Mapping[str, str]) -> dict[str, str]:
    """The secret settings from this process's environment, by the variables in the pool file."""
    missing = sorted(name for name in names.values() if name not in os.environ)
    if missing:
        raise UsageError(
            f"the variable {missing[0]} is not set on this node",
            key=missing[0],
            hint="Set it where Ray's workers run.",
        )
    return {setting: os.environ[name] for setting, name in names.items()}
