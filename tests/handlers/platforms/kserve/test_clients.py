"""tritonclient against a real server.

It brings along gevent, which must not be in the environment of other tests, so it has its own, which
scripts/conformance-kserve makes; TENERAL_KSERVE_CLIENTS names its Python. Elsewhere these tests are skipped.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_server import Server, running_server
from tests.support.tiny_models import save_tiny

from teneral.handlers.function.handler import Handler
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance

CLIENTS = os.environ.get("TENERAL_KSERVE_CLIENTS", "")
ROOT = Path(__file__).parents[4]
CALLS = ROOT / "tests" / "support" / "triton_calls.py"

pytestmark = [
    pytest.mark.skipif(not CLIENTS, reason="needs tritonclient: run scripts/conformance-kserve"),
    pytest.mark.slow,
]


def serving(tmp_path: Path, family: str, handler: Any = None, **settings: Any) -> Any:
    model = save_tiny(family, tmp_path)
    config = ServeConfig(model=str(model), name="org/tiny", kv_bytes=4 << 20, threads=1, **settings)
    return running_server(Instance(config), handler=None if handler is None else Handler(handler))


async def run(*command: str) -> None:
    """Raises when it fails; its output is visible with -s."""
    process = await asyncio.create_subprocess_exec(
        CLIENTS, *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    print(output.decode())
    assert process.returncode == 0, output.decode()


async def is_ready(server: Server) -> None:
    while (await server.get("/readyz")).json["state"] != "ready":
        await asyncio.sleep(0.01)


async def test_tritonclient_and_a_decoder(tmp_path: Path, one_thread: None) -> None:
    async with serving(tmp_path, "llama", model_control=True) as server:
        body = {"prompt": "Once", "max_tokens": 5, "temperature": 0, "ignore_eos": True}
        expected = (await server.post("/v1/completions", body)).json["choices"][0]["text"]
        host, port = server.address
        await run(str(CALLS), "decoder", f"{host}:{port}", "org/tiny", expected)


async def test_tritonclient_and_an_encoder(tmp_path: Path, one_thread: None) -> None:
    async with serving(tmp_path, "bert") as server:
        await is_ready(server)
        host, port = server.address
        await run(str(CALLS), "encoder", f"{host}:{port}", "org/tiny")


async def test_tritonclient_and_a_function(tmp_path: Path, one_thread: None) -> None:
    def handler(event: Any, context: Any) -> Any:
        return event if "x" in event else {"size": len(event["image"][0])}

    async with serving(tmp_path, "llama", handler) as server:
        await is_ready(server)
        host, port = server.address
        await run(str(CALLS), "function", f"{host}:{port}", "org/tiny")
