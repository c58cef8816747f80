"""/v1/load_lora_adapter with an address that does not answer: each way out of it ends the load."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest
from tests.support.adapters import save_adapter
from tests.support.http_server import Server, running_server
from tests.support.inspection import is_reading_adapters
from tests.support.load import patience_s
from tests.support.ports import free_port
from tests.support.tiny_models import save_tiny, tiny_model

from teneral.runtime.adapters.registry import AdapterRegistry
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base")
    save_adapter(folder / "good", tiny_model("llama"))
    return save_tiny("llama", folder / "base")


@pytest.fixture
def silent() -> Iterator[str]:
    """An address whose host accepts connections and says nothing."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/adapter"


def serving(base: Path, **settings: Any) -> Any:
    config = ServeConfig(
        model=str(base),
        name="base",
        model_control=True,
        kv_bytes=1 << 22,
        backend="native",
        loader="thread",
    )
    return running_server(Instance(config), **settings)


def registry_of(server: Server) -> AdapterRegistry:
    registry = server.instance.adapters
    assert isinstance(registry, AdapterRegistry)
    return registry


async def until(condition: Any) -> None:
    async with asyncio.timeout(patience_s(20)):
        while not condition():
            await asyncio.sleep(0.01)


async def begin_load(server: Server, address: str, name: str = "a") -> asyncio.Task[Any]:
    await server.get("/readyz")
    task = asyncio.create_task(server.post(LOAD, {"lora_name": name, "lora_path": address}))
    await until(lambda: server.instance.adapters is not None and registry_of(server).is_registered(name))
    await until(lambda: is_reading_adapters(registry_of(server)))
    return task


def is_over(server: Server) -> bool:
    """Nothing of the load is left: neither its name, nor its reads."""
    registry = registry_of(server)
    statistics = registry.statistics()
    return not (registry.is_registered("a") or statistics.loading or is_reading_adapters(registry))


async def test_a_second_load_and_an_unload_tell_the_truth(base: Path, silent: str) -> None:
    async with serving(base) as server:
        first = await begin_load(server, silent)
        again = await server.post(LOAD, {"lora_name": "a", "lora_path": silent})
        assert (again.status, "is being loaded" in again.error["message"]) == (400, True)
        assert (await server.post(UNLOAD, {"lora_name": "a"})).status == 200
        ended = await asyncio.wait_for(first, patience_s(10))
        assert (ended.status, "was unloaded" in ended.error["message"]) == (503, True)
        await until(lambda: is_over(server))
        good = {"lora_name": "a", "lora_path": str(base.parent / "good")}
        assert (await server.post(LOAD, good)).status == 200
        answer = await server.post("/v1/completions", {"model": "a", "prompt": [1], "max_tokens": 1})
        assert answer.status == 200
        registry_of(server).check_integrity()


async def test_a_load_in_place_of_one_under_way_ends_it(base: Path, silent: str) -> None:
    async with serving(base) as server:
        first = await begin_load(server, silent)
        good = {"lora_name": "a", "lora_path": str(base.parent / "good"), "load_inplace": True}
        assert (await server.post(LOAD, good)).status == 200
        assert (await asyncio.wait_for(first, patience_s(10))).status == 503
        assert registry_of(server).is_registered("a")


async def test_a_client_that_leaves_ends_its_load(base: Path, silent: str) -> None:
    async with serving(base) as server:
        first = await begin_load(server, silent)
        first.cancel()
        await until(lambda: is_over(server))
        assert registry_of(server).statistics().failures_total == 0


async def test_more_loads_than_threads_end_when_their_clients_leave(base: Path, silent: str) -> None:
    async with serving(base) as server:
        loads = [await begin_load(server, silent, f"a{number}") for number in range(7)]
        for load in loads:
            load.cancel()
        await until(lambda: registry_of(server).statistics().loading == 0)
        good = {"lora_name": "a", "lora_path": str(base.parent / "good")}
        assert (await asyncio.wait_for(server.post(LOAD, good), patience_s(10))).status == 200


def test_a_signal_ends_a_server_whose_adapter_does_not_come(base: Path, silent: str) -> None:
    port = free_port()
    command = [
        *(sys.executable, "-m", "teneral", "serve", str(base), "--model-control"),
        *("--host", "127.0.0.1", "--port", str(port), "--drain-timeout-s", "1", "--log-level", "error"),
        *("--loader", "thread", "--kv-bytes", "4MiB"),
    ]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            statuses: list[int] = []

            def load() -> None:
                while True:
                    connection = HTTPConnection("127.0.0.1", port, timeout=patience_s(60))
                    try:
                        body = json.dumps({"lora_name": "a", "lora_path": silent})
                        connection.request("POST", LOAD, body, {"Content-Type": "application/json"})
                        statuses.append(connection.getresponse().status)
                        return
                    except ConnectionRefusedError:
                        time.sleep(0.05)
                    finally:
                        connection.close()

            asking = threading.Thread(target=load)
            asking.start()
            deadline_s = time.monotonic() + patience_s(60)
            while not _is_being_loaded(port):
                assert time.monotonic() < deadline_s
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(timeout=patience_s(20)) == 0
            asking.join()
            assert statuses == [503]
        finally:
            process.kill()


def _is_being_loaded(port: int) -> bool:
    connection = HTTPConnection("127.0.0.1", port, timeout=patience_s(60))
    try:
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
    except OSError:
        return False
    finally:
        connection.close()
    return "teneral_adapters_loading 1.0" in lines
