"""Copies of requests: which are made, how many at a time, and how answers are compared. The shadow is a real server."""

from __future__ import annotations

import asyncio
import dataclasses
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tests.support.inspection import copies_of, forget

from teneral.handlers.pool.deployment import Server
from teneral.handlers.pool.file import parse_pool
from teneral.handlers.pool.memory import Budget
from teneral.handlers.pool.metrics import PoolMetrics
from teneral.handlers.pool.process import Machine, ServerProcess
from teneral.handlers.pool.repository import Release
from teneral.handlers.pool.shadow import MAX_BODY_BYTES, MAX_IN_WORK, Seen, Shadows
from teneral.handlers.pool.supervisor import Supervisor
from teneral.handlers.pool.versions import ModelState
from teneral.runtime.config import ServeConfig

POOL = """
version = 1
[models.m]
source = "/models/{version}"
versions = [1, 2]
traffic = { "1" = 100 }
shadow = { version = 2, percent = 100 }
"""


def answer(finish_reason: str = "stop", tokens: int = 4) -> dict[str, Any]:
    return {"choices": [{"finish_reason": finish_reason}], "usage": {"completion_tokens": tokens}}


class Rig:
    """A pool whose second version is the server below; `gate` holds its answers back."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.reply: dict[str, Any] = answer()
        self.status = 200
        self.gate = asyncio.Event()
        self.gate.set()
        self.pool = parse_pool(POOL)
        self.state = ModelState(self.pool.models["m"])
        releases = [Release(number, f"/models/{number}", str(number), 0) for number in (1, 2)]
        self.state.update(self.state.model, [(each, ServeConfig(model=each.address)) for each in releases])
        self.supervisor = Supervisor(
            self.pool, {"m": self.state}, Budget(0), PoolMetrics(), Machine(None, {})
        )
        self.shadows = Shadows(self.supervisor)

    @property
    def counts(self) -> dict[str, Any]:
        return self.supervisor.metrics.counts()

    async def handle(self, request: web.Request) -> web.Response:
        self.asked.append((request.path, await request.read()))
        await self.gate.wait()
        return web.json_response(self.reply, status=self.status)

    async def copy(
        self, path: str = "/v1/completions", body: bytes = b"{}", seen: bytes | None = None
    ) -> None:
        """Copy a request that was answered in half a second, and wait for what comes of it."""
        first = next(iter(self.state.targets()))
        whole = web.json_response(answer()).body if seen is None else seen
        assert isinstance(whole, bytes)
        self.shadows.copy(path, body, first, {}, Seen(200, whole, 0.5))
        if self.gate.is_set():
            await self.copied()

    async def copied(self) -> None:
        """Wait until no copy is in work."""
        await asyncio.gather(*copies_of(self.shadows))


@asynccontextmanager
async def running() -> AsyncIterator[Rig]:
    rig = Rig()
    app = web.Application()
    app.router.add_post("/{path:.*}", rig.handle)
    async with TestServer(app) as server:
        second = next(d for d in rig.state.deployments() if d.release.version == 2)
        assert server.port is not None
        process = ServerProcess(os.getpid(), server.port, "standby")
        second.servers["m@2#1"] = Server("m@2#1", second, process, 0.1, 0.0, 0.0)
        try:
            yield rig
        finally:
            rig.gate.set()
            await rig.shadows.close()
            forget(process)


@pytest.mark.parametrize(
    ("reply", "status", "outcome"),
    [
        (answer(), 200, "same"),
        (answer("length"), 200, "different"),
        ({"error": {}}, 400, "different"),
        ({"error": {}}, 500, "error"),
    ],
)
async def test_status_and_finish_reason_are_compared(
    reply: dict[str, Any], status: int, outcome: str
) -> None:
    async with running() as rig:
        rig.reply, rig.status = reply, status
        await rig.copy(body=b'{"a": 1}')
        assert rig.asked == [("/v1/completions", b'{"a": 1}')]
        assert rig.counts["shadow"] == {outcome: 1}


async def test_tokens_a_second_of_both_sides_are_counted() -> None:
    async with running() as rig:
        rig.reply = answer(tokens=6)
        await rig.copy()
        await rig.copy()
        speeds = rig.counts["shadow_tokens_s"]
        assert speeds["answer"] == 8.0
        assert speeds["copy"] > 0
        await rig.copy(seen=b'{"data": []}')  # embeddings have none
        assert rig.counts["shadow_tokens_s"]["answer"] == 8.0


async def test_functions_and_large_bodies_are_never_copied() -> None:
    async with running() as rig:
        for path in ("/invoke", "/invocations", "/events", "/"):
            await rig.copy(path)
        await rig.copy(body=b"x" * (MAX_BODY_BYTES + 1))
        assert rig.asked == []
        assert rig.counts["shadow"] == {}


async def test_copies_beyond_two_in_work_are_dropped() -> None:
    async with running() as rig:
        rig.gate.clear()
        for _ in range(MAX_IN_WORK + 3):
            await rig.copy()
            await asyncio.sleep(0.05)
        assert rig.counts["shadow"] == {"dropped": 3}
        rig.gate.set()
        await rig.copied()
        assert rig.counts["shadow"] == {"dropped": 3, "same": MAX_IN_WORK}


async def test_a_share_of_requests_is_copied() -> None:
    async with running() as rig:
        shadow = rig.state.model.shadow
        assert shadow is not None
        model = dataclasses.replace(rig.state.model, shadow=dataclasses.replace(shadow, percent=30))
        for deployment in rig.state.deployments():
            deployment.model = model
        for _ in range(20):
            await rig.copy()
        assert rig.counts["shadow"] == {"same": 6}
