"""A pool's front in the test's own process, in front of an instance that is a server of the test."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from teneral.handlers.http.listening import listen
from teneral.handlers.pool import run
from teneral.handlers.pool.deployment import Deployment, Server
from teneral.handlers.pool.file import read_pool
from teneral.handlers.pool.process import ServerProcess
from teneral.handlers.pool.repository import Release
from teneral.handlers.pool.supervisor import Supervisor
from teneral.runtime.config import ServeConfig

from .inspection import forget, supervisor_of

POOL = """
version = 1
[models.m]
source = "nowhere"
max_instances = 1
max_concurrency = 1
target_concurrency = 1
queue_timeout_s = 0.2
request_timeout_s = 1
"""
BODY = {"model": "m", "prompt": "a"}


class Process(ServerProcess):
    """An instance in the test's process: only its end is noted."""

    ends = 0

    async def end(self, drain_s: float) -> None:
        self.ends += 1


class Rig:
    """A pool with one model and one instance, whose answers `handle` gives."""

    def __init__(self, supervisor: Supervisor, deployment: Deployment, process: Process, port: int) -> None:
        self.supervisor = supervisor
        self.deployment = deployment
        self.process = process
        self.port = port
        self.writers: list[asyncio.StreamWriter] = []  # keep their connections open
        self.client = aiohttp.ClientSession(f"http://127.0.0.1:{port}")

    @property
    def server(self) -> Server:
        return self.deployment.servers["m#1"]

    async def connect(self, data: bytes) -> asyncio.StreamReader:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        writer.write(data)
        self.writers.append(writer)
        return reader


@asynccontextmanager
async def running(
    folder: Path,
    handle: Any,
    config: ServeConfig | None = None,
    environment: Mapping[str, str] | None = None,
    **options: Any,
) -> AsyncIterator[Rig]:
    """`environment` and `options` are those of the command."""
    (folder / "pool.toml").write_text(POOL)
    flags = run.RunOptions(file=str(folder / "pool.toml"), **options)
    runner = run.PoolRunner(read_pool(flags.file), flags, folder, environment or {})
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", handle)
    sock = listen("127.0.0.1", 0)
    async with TestServer(app) as instance:
        task = asyncio.create_task(runner.serve(sock))
        while supervisor_of(runner) is None:
            await asyncio.sleep(0.01)
        state = supervisor_of(runner).models["m"]
        state.update(state.model, [(Release(None, "/m", "1", 0), config or ServeConfig(model="/m"))])
        deployment = state.targets()[0]
        assert instance.port is not None
        process = Process(os.getpid(), instance.port, "standby")
        now_s = asyncio.get_running_loop().time()
        deployment.servers["m#1"] = Server("m#1", deployment, process, 0.1, now_s, 0.0)
        rig = Rig(supervisor_of(runner), deployment, process, sock.getsockname()[1])
        try:
            async with rig.client:
                yield rig
        finally:
            for writer in rig.writers:
                writer.close()
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            forget(process)


async def answer(_: web.Request) -> web.StreamResponse:
    return web.json_response({"choices": []})
