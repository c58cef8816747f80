"""The processes of a pool: `teneral serve` on a loopback port, adopted from a standby process or
started anew, and the standby pool itself.

Each is watched by its pidfd, so a signal never reaches another process that has reused its number.
Linux only.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from ...loader.errors import TeneralError
from ...loader.process.helper import ProcessContext
from ...runtime.config import ServeConfig
from ..http.sockets import listen
from ..standby.handover import Channel, HandoverError, Order

HOST = "127.0.0.1"
STANDBY_ANSWER_S = 5.0  # for a standby process that is still being forked: far less than a start without one
STANDBY_RESTART_S = 10.0
STANDBY_IMPORT_S = (
    300.0  # of a pool that has not answered yet: a start without it would import the same, in parallel
)
READY_POLL_S = 30.0  # an instance holds the answer to `/readyz` back until it is ready, for so long
CONNECT_RETRY_S = 0.02
KILL_AFTER_S = 3.0  # beyond the time to drain
logger = logging.getLogger("teneral.pool")
PACKAGE = __name__.partition(".handlers.")[0]


class StartError(TeneralError):
    """An instance ended, or failed, before it was ready."""


class Process:
    """A process that runs. `ended` is set when it has."""

    def __init__(self, pid: int, *, popen: subprocess.Popen[bytes] | None = None) -> None:
        """Call it on the event loop. Raises `ProcessLookupError` when there is no such process."""
        self.pid = pid
        self.ended = asyncio.Event()
        self._popen = popen
        self._on_end: list[Callable[[], object]] = []
        self._pidfd = os.pidfd_open(pid)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._pidfd, self._ended)

    def when_ended(self, callback: Callable[[], object]) -> None:
        """Have it called on the event loop, once."""
        if self.ended.is_set():
            callback()
        else:
            self._on_end.append(callback)

    def signal(self, number: int) -> None:
        """Does nothing when the process has ended."""
        if not self.ended.is_set():
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def end(self, drain_s: float) -> None:
        """SIGTERM, and SIGKILL when that is not enough. Returns when it has ended."""
        self.signal(signal.SIGTERM)
        try:
            async with asyncio.timeout(drain_s + KILL_AFTER_S):
                await self.ended.wait()
        except TimeoutError:
            self.signal(signal.SIGKILL)
            await self.ended.wait()

    def _ended(self) -> None:
        self._loop.remove_reader(self._pidfd)
        os.close(self._pidfd)
        if self._popen is not None:
            self._popen.wait()
        self.ended.set()
        for callback in self._on_end:
            callback()


class ServerProcess(Process):
    """One instance. `kind` is standby or cold: how it was started."""

    def __init__(
        self,
        pid: int,
        port: int,
        kind: str,
        *,
        channel: Channel | None = None,
        popen: subprocess.Popen[bytes] | None = None,
    ) -> None:
        super().__init__(pid, popen=popen)
        self.port = port
        self.kind = kind
        self.url = f"http://{HOST}:{port}"
        if channel is not None:  # a standby's server drains when its client's end is closed
            self.when_ended(channel.close)

    async def wait_ready(self, session: aiohttp.ClientSession, ready_path: str) -> None:
        """Return when it is ready as `ready_path` asks. Raises `StartError` when it fails or ends before."""
        separator = "&" if "?" in ready_path else "?"
        url = f"{self.url}{ready_path}{separator}wait_s={READY_POLL_S:g}"
        reason = ""
        while not self.ended.is_set():
            try:
                async with session.get(url, timeout=aiohttp.ClientTimeout(total=READY_POLL_S + 30)) as answer:
                    if answer.status == 200:
                        return
                    report: dict[str, Any] = json.loads(await answer.read())
                    reason = str(report.get("error", ""))
                    if report.get("state") in ("failed", "draining"):
                        break
            except (aiohttp.ClientError, ConnectionError, TimeoutError, ValueError):
                await asyncio.sleep(CONNECT_RETRY_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_AFTER_S):
                await self.ended.wait()
        raise StartError(reason or "the process ended while it started", hint="See the end of its log.")


async def start_server(
    config: ServeConfig, *, standby: StandbyPool | None, environment: Mapping[str, str]
) -> ServerProcess:
    """An instance of this configuration, from a standby process where there is one. Raises `StartError`."""
    with listen(HOST, 0) as listener:
        port = int(listener.getsockname()[1])
        config = config.replace(host=HOST, port=port)
        if standby is not None and standby.runs:
            taken = await asyncio.to_thread(_hand_over, standby, config, listener, environment)
            if taken is not None:
                pid, channel = taken
                try:
                    return ServerProcess(pid, port, "standby", channel=channel)
                except ProcessLookupError as error:
                    channel.close()
                    raise StartError("the standby process ended at once") from error
        command = [sys.executable, "-m", f"{PACKAGE}.handlers.serve"]
        try:
            # On the event loop's thread: the child ends when the thread that started it does.
            popen = subprocess.Popen(
                [*command, str(listener.fileno()), str(os.getpid())],
                stdin=subprocess.PIPE,
                stdout=2,
                env=dict(environment),
                pass_fds=(listener.fileno(),),
            )
        except OSError as error:
            raise StartError(f"no process can be started: {error.strerror}") from error
    assert popen.stdin is not None
    with suppress(BrokenPipeError), popen.stdin:
        popen.stdin.write(json.dumps(config.as_dict()).encode())
    return ServerProcess(popen.pid, port, "cold", popen=popen)


def _hand_over(
    standby: StandbyPool, config: ServeConfig, listener: socket.socket, environment: Mapping[str, str]
) -> tuple[int, Channel] | None:
    """The process that took the order, and the channel that keeps it alive. None where none did in time. Blocks."""
    deadline_s = time.monotonic() + (STANDBY_ANSWER_S if standby.has_answered else STANDBY_IMPORT_S)
    channel = None
    while channel is None:
        channel = _connect(standby.socket_path)
        if channel is None and (time.monotonic() > deadline_s or not standby.runs):
            return None
        if channel is None:
            time.sleep(CONNECT_RETRY_S)
    try:
        null = os.open(os.devnull, os.O_RDWR)
        try:
            context = ProcessContext(dict(environment), os.getcwd())
            channel.settimeout(max(0.1, deadline_s - time.monotonic()))
            channel.send_order(Order(config, context, time.monotonic(), (null, 2, 2), listener.fileno()))
        finally:
            os.close(null)
        pid = int(channel.receive()["process"])
        channel.send({"go": True})
        channel.settimeout(None)
        standby.has_answered = True
        return pid, channel
    except (HandoverError, KeyError, TypeError, ValueError):
        channel.close()
        return None


def _connect(path: str) -> Channel | None:
    sock = socket.socket(socket.AF_UNIX)
    try:
        sock.settimeout(1.0)
        sock.connect(path)
        return Channel(sock)
    except (OSError, HandoverError):
        sock.close()
        return None


class StandbyPool:
    """`teneral standby` as a child of the supervisor. Started again where it ends by itself."""

    def __init__(self, folder: Path, num_processes: int, memory_bytes: int) -> None:
        self.socket_path = str(folder / "standby.sock")
        self.process: Process | None = None
        self.started_at_s = 0.0
        self.has_answered = False  # since it was started
        self._num_processes = num_processes
        self._memory_bytes = memory_bytes

    @property
    def runs(self) -> bool:
        return self.process is not None and not self.process.ended.is_set()

    def start(self) -> None:
        """Call it on the event loop's thread, with which the pool ends. Does nothing soon after the last time."""
        if self.process is not None and time.monotonic() - self.started_at_s < STANDBY_RESTART_S:
            return
        if self.process is not None:
            logger.warning("the standby pool has ended; another one is started")
        arguments = [str(os.getpid()), self.socket_path, "--processes", str(self._num_processes)]
        if self._memory_bytes:
            arguments += ["--memory", str(self._memory_bytes)]
        popen = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.handlers.standby.server_pool", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
        self.process = Process(popen.pid, popen=popen)
        self.started_at_s = time.monotonic()
        self.has_answered = False

    async def end(self) -> None:
        if self.process is not None:
            await self.process.end(1.0)
