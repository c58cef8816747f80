"""A replica of one model: a proxy for a server of its own, which it puts to sleep and wakes.

Ray starts a replica in four seconds, but a server is woken from the node's standby pool in a third
of a second, so models scale to zero and replicas stay. A sleeping model is an ended process; its KV
snapshot, if any, survives.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from typing import Any

import aiohttp

from ....loader.errors import UsageError
from .server import ServerProcess

# Loading may take any time.
START_S = 3600.0
# Of one connection, not of a message: a proxy sets its own.
HOP_HEADERS = frozenset(
    {"connection", "keep-alive", "te", "trailer", "transfer-encoding", "upgrade", "host", "content-length"}
)


class Replica:
    """Constructed when requests may come: at `ready_when`, or at once for a model that sleeps.

    `settings`: environment (TENERAL_*), secrets (setting → variable), ready_path, drain_s, idle_timeout_s, sleep.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = dict(settings)
        environment = {**settings["environment"], **_secrets(settings.get("secrets", {}))}
        self._server = ServerProcess(
            environment, ready_path=settings["ready_path"], drain_s=settings["drain_s"]
        )
        self._waking = asyncio.Lock()
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
            kept = [(name, value) for name, value in headers if name.lower() not in HOP_HEADERS]
            async with self._session.request(
                method, url, headers=kept, data=body, allow_redirects=False
            ) as answer:
                shown = [
                    (name, value) for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS
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
        """Start the server. Requests may be sent as soon as it listens: they wait there for the
        layers that they need.
        """
        if self._server.is_running:
            return
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
