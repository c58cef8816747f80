"""The processes of a pool on one machine, Linux only: `teneral serve` on a loopback port, adopted
from a standby process or started anew, and the standby pool itself.

Each process is watched by its pidfd, so a signal never reaches another process that has reused its
number. Its configuration comes from the pool file and the environment. Used on the event loop only.
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
from ...loader.native.library import ISA_VARIABLE
from ...loader.process.cpu import available_cores
from ...loader.process.helper import ProcessContext
from ...runtime.config import PREFIX, ServeConfig
from ..http.listening import listen
from ..standby.handover import Channel, HandOver, HandoverError
from .keys import PATH_SETTINGS
from .memory import tree_pss_bytes
from .repository import Release, absolute
from .values import Code, Model, Pool, PoolNode

# Of a server, in addition to its weights and KV pool.
OVERHEAD_BYTES = 250 << 20
# Of an instance whose model does not say: a share of what is free would take all of it.
DEFAULT_KV_BYTES = 256 << 20


def instance_config(
    pool: Pool,
    model: Model,
    release: Release,
    state_folder: Path,
    environment: Mapping[str, str],
    *,
    log_format: str = "text",
) -> ServeConfig:
    """Settings of a release's instances. What was computed is kept below `state_folder` when one ends; logs have
    `log_format` unless the file says another.

    Raises `PoolFileError` where a secret's variable is not set.
    """
    settings = model.serve_settings()
    for name in PATH_SETTINGS & settings.keys():
        settings[name] = absolute(pool.folder, settings[name])
    file = str(settings.get("handler", "")).rpartition(":")[0]
    if file.endswith(".py") or "/" in file:
        settings["handler"] = absolute(pool.folder, settings["handler"])
    for name, variable in model.secrets.items():
        if not environment.get(variable):
            place = ("models", model.name, "serve", f"{name}_env")
            raise pool.error(Code.E2, f"names the variable {variable}, which is not set", *place)
        settings[name] = environment[variable]
    if release.base is not None:
        settings["base"] = release.base
    settings.setdefault("log_format", log_format)
    if model.device_share is None:
        settings.setdefault("kv_bytes", DEFAULT_KV_BYTES)
    version = "" if release.version is None else f"@{release.version}"
    settings.setdefault("kv_snapshot_sessions", True)
    settings.setdefault("kv_snapshot", str(state_folder / "kv" / f"{model.name}{version}"))
    return ServeConfig(model=release.address, platform="http", **settings)


def inherited_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of instances: everything except server settings, which come from the file. `TENERAL_ISA` is none,
    and of the processor.
    """
    return {
        name: value
        for name, value in environment.items()
        if not name.startswith(PREFIX) or name == ISA_VARIABLE
    }


HOST = "127.0.0.1"
STANDBY_ANSWER_S = 5.0  # for a standby process that is still being forked: far less than a start without one
STANDBY_RESTART_S = 10.0
# Of a pool that has not answered yet: a start without it would import the same, in parallel.
STANDBY_IMPORT_S = 300.0
# An instance holds the answer to `/readyz` back for this time, until it is ready. One that has not answered after twice
# that, this many times in a row, hangs.
READY_POLL_S = 10.0
MAX_SILENT_POLLS = 3
# A start that answers, and whose load gets no further for so long, has failed: platforms' longest start, too.
MAX_STALLED_S = 900.0
# The period of probes of a ready instance, and the time limit of each. One that misses this many in a row hangs. A
# single one is missed on a busy machine, and when the clock jumps.
PROBE_S = 5.0
MAX_MISSED_PROBES = 5
HUNG_S = PROBE_S * (1 + MAX_MISSED_PROBES)  # the time in which it is found
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

    async def get(self, session: aiohttp.ClientSession, path: str, *, limit_s: float) -> tuple[int, bytes]:
        """Status and body of its answer. Raises `TimeoutError`, or `ConnectionError` where it cannot be asked."""
        try:
            async with session.get(
                f"{self.url}{path}", timeout=aiohttp.ClientTimeout(total=limit_s)
            ) as answer:
                return answer.status, await answer.read()
        except TimeoutError:
            raise
        except aiohttp.ClientError as error:
            raise ConnectionError(str(error)) from error

    async def wait_ready(self, session: aiohttp.ClientSession, ready_path: str) -> None:
        """Return when it is ready as `ready_path` asks. Raises `StartError` when it fails or ends before, or its load
        gets no further for `MAX_STALLED_S`.
        """
        loop = asyncio.get_running_loop()
        progress, progressed_s = None, loop.time()
        separator = "&" if "?" in ready_path else "?"
        path = f"{ready_path}{separator}wait_s={READY_POLL_S:g}"
        reason, silent = "", 0
        while not self.ended.is_set():
            try:
                status, body = await self.get(session, path, limit_s=2 * READY_POLL_S)
                silent = 0
                if status == 200:
                    return
                report: dict[str, Any] = json.loads(body)
                reason = str(report.get("error", ""))
                if report.get("state") in ("failed", "draining"):
                    break
                if report.get("progress") != progress:
                    progress, progressed_s = report.get("progress"), loop.time()
                elif loop.time() - progressed_s >= MAX_STALLED_S:
                    raise StartError(f"its load got no further for {MAX_STALLED_S:g} s: see its log")
            except TimeoutError:
                silent += 1
                if silent == MAX_SILENT_POLLS:
                    self.signal(signal.SIGKILL)
                    raise StartError(
                        f"it hung while it started: no answer for {2 * READY_POLL_S * silent:g} s"
                    ) from None
            except (ConnectionError, ValueError):
                await asyncio.sleep(CONNECT_RETRY_S)
        with suppress(TimeoutError):
            async with asyncio.timeout(KILL_AFTER_S):
                await self.ended.wait()
        raise StartError(reason or "the process ended while it started", hint="See the end of its log.")

    async def wait_hung(self, session: aiohttp.ClientSession) -> None:
        """Return when it hangs: when it has left `MAX_MISSED_PROBES` probes in a row without an answer.

        One that refuses connections drains, or ends: that is no hang.
        """
        loop = asyncio.get_running_loop()
        missed = 0
        while missed < MAX_MISSED_PROBES:
            due_s = loop.time() + PROBE_S
            try:
                await self.get(session, "/livez", limit_s=PROBE_S)
                missed = 0
            except TimeoutError:
                missed += 1
            except ConnectionError:
                pass
            await asyncio.sleep(max(0.0, due_s - loop.time()))


async def start_server(
    config: ServeConfig, *, standby: StandbyChild | None, environment: Mapping[str, str]
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
    standby: StandbyChild, config: ServeConfig, listener: socket.socket, environment: Mapping[str, str]
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
            channel.send_order(HandOver(config, context, time.monotonic(), (null, 2, 2), listener.fileno()))
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


class Machine:
    """The machine of a pool: starts its instances, and measures them. Tests replace it."""

    def __init__(self, standby: StandbyChild | None, environment: Mapping[str, str]) -> None:
        """`environment` is that of the instances."""
        self.standby = standby
        self._environment = environment
        self._session: aiohttp.ClientSession | None = None

    @property
    def num_cores(self) -> int:
        return available_cores()

    async def start(self, config: ServeConfig) -> ServerProcess:
        """An instance that has begun to start. Raises `StartError`."""
        return await start_server(config, standby=self.standby, environment=self._environment)

    async def measure(self, processes: Mapping[str, int]) -> dict[str, int]:
        """Memory in bytes by key, of processes by their ids."""
        return await asyncio.to_thread(
            lambda: {key: tree_pss_bytes(process_id) for key, process_id in processes.items()}
        )

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @property
    def session(self) -> aiohttp.ClientSession:
        """For probes."""
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        return self._session


class StandbyChild:
    """`teneral standby` as a child of the supervisor. Started again where it ends by itself."""

    def __init__(self, folder: Path, pool: Pool) -> None:
        """Its socket lies in `folder`; `pool.node` says what it holds."""
        self.socket_path = str(folder / "standby.sock")
        self.process: Process | None = None
        self.started_at_s = 0.0
        self.has_answered = False  # since it was started
        self._flags = standby_flags(pool)

    @property
    def runs(self) -> bool:
        return self.process is not None and not self.process.ended.is_set()

    def start(self) -> None:
        """Call it on the event loop's thread, with which the pool ends. Does nothing soon after the last time."""
        if self.process is not None and time.monotonic() - self.started_at_s < STANDBY_RESTART_S:
            return
        if self.process is not None:
            logger.warning("the standby pool has ended; another one is started")
        arguments = [str(os.getpid()), self.socket_path, *self._flags]
        popen = subprocess.Popen(
            [sys.executable, "-m", f"{PACKAGE}.handlers.standby.server_pool", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=2,
        )
        self.process = Process(popen.pid, popen=popen)
        self.started_at_s = time.monotonic()
        self.has_answered = False

    def reload(self) -> None:
        """Have it load what lies at its base's address now."""
        if self.process is not None:
            self.process.signal(signal.SIGHUP)

    async def end(self) -> None:
        if self.process is not None:
            await self.process.end(1.0)


def standby_bytes(node: PoolNode, base: Release | None) -> int:
    """Memory of the waiting processes, and of the base that they share."""
    base_bytes = 0 if base is None else base.weight_bytes
    return node.standby * node.standby_memory_bytes + base_bytes


def standby_flags(pool: Pool) -> list[str]:
    """The flags of `teneral standby` for the file's `[node]`."""
    node = pool.node
    flags = ["--processes", str(node.standby)]
    if node.standby_memory_bytes:
        flags += ["--memory", str(node.standby_memory_bytes)]
    if node.standby_base is not None:
        flags += ["--base", absolute(pool.folder, node.standby_base)]
        for name, value in node.standby_store.items():
            flag = f"--{name.replace('_', '-')}"
            flags += [flag, str(value)] if not isinstance(value, bool) else [flag] if value else []
    return flags
