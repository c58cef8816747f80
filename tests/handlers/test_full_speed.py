"""The server's own start, and a structured answer's first text, come before the model's build."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path
from typing import Any

import pytest
from tests.support.http_server import running_server
from tests.support.instances import StagedInstance, TinyParts
from tests.support.load import patience_s

from teneral.handlers.app import create_app
from teneral.handlers.http import server as http_server
from teneral.handlers.http.service import SERVICE

WAIT_S = patience_s(30)


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> TinyParts:
    return TinyParts.make("llama", tmp_path_factory.mktemp("model"))


class ServerFirst(StagedInstance):
    def __init__(self, parts: TinyParts, **settings: Any) -> None:
        super().__init__(parts, **settings)
        self.full_speed.clear()


async def until_full_speed(instance: StagedInstance) -> None:
    assert await asyncio.to_thread(instance.full_speed.wait, WAIT_S)


async def test_a_server_without_clients_leaves_the_cores_at_once(parts: TinyParts) -> None:
    async with running_server(ServerFirst(parts)) as server:
        await until_full_speed(server.instance)


async def test_a_client_of_the_backlog_is_given_time_to_be_read(
    parts: TinyParts, monkeypatch: pytest.MonkeyPatch
) -> None:
    delays_s: list[float] = []
    instance = ServerFirst(parts)
    app = create_app(instance)
    with instance, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        with socket.create_connection(listener.getsockname()):
            stop = asyncio.Event()
            loop = asyncio.get_running_loop()
            call_later = loop.call_later

            def note(delay_s: float, callback: Any, *args: Any, **kwargs: Any) -> Any:
                if callback == instance.full_speed.set:
                    delays_s.append(delay_s)
                return call_later(delay_s, callback, *args, **kwargs)

            monkeypatch.setattr(loop, "call_later", note)
            task = asyncio.create_task(http_server.serve(app, listener, stop=stop))
            await until_full_speed(instance)
            stop.set()
            await task
    assert delays_s == [http_server.FIRST_REQUESTS_S]


async def test_a_request_that_needs_the_model_asks_for_it(parts: TinyParts) -> None:
    instance = ServerFirst(parts)
    service = create_app(instance)[SERVICE]
    with instance:
        assert await service.ready(instance.text_settings) == parts.settings
        assert not instance.full_speed.is_set(), "the settings are there without the model"
        waiting = asyncio.ensure_future(service.ready(instance.tokenizer))
        await until_full_speed(instance)
        instance.let_in()
        await waiting


def test_a_closed_instance_holds_nothing_up(parts: TinyParts, tmp_path: Path) -> None:
    instance = ServerFirst(parts)
    instance.close()
    assert instance.full_speed.is_set()
