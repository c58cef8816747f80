"""`teneral.asgi_app` with a real instance of a tiny model, and an ASGI server that is the test."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny

import teneral
from teneral.handlers.asgi import AsgiApp

WAIT_S = patience_s(60)
JSON = (b"content-type", b"application/json")
LONG = {"prompt": "Hello", "max_tokens": 480, "ignore_eos": True, "stream": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asgi")
    save_tiny("qwen2", folder / "model")
    (folder / "function_of_the_app.py").write_text(
        "def handler(event, context):\n    yield event\n    yield 'again'\n"
    )
    return folder


@pytest.fixture
async def app(folder: Path) -> AsyncIterator[AsgiApp]:
    app = teneral.asgi_app(
        folder / "model", name="tiny", threads=1, handler=f"{folder}/function_of_the_app.py:handler"
    )
    yield app
    await app.aclose()


class Exchange:
    """One request as an ASGI server sends it, and the messages of its answer. A client `leaves` when that is set."""

    def __init__(
        self,
        app: AsgiApp,
        path: str,
        body: object = None,
        *,
        headers: Iterable[tuple[bytes, bytes]] = (),
        pieces: Iterable[bytes] | None = None,
        **scope: Any,
    ) -> None:
        if pieces is None:
            pieces = [b"" if body is None else json.dumps(body).encode()]
        raw_path, _, query = path.partition("?")
        self.scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "GET" if body is None and pieces == [b""] else "POST",
            "path": raw_path,
            "raw_path": raw_path.encode(),
            "query_string": query.encode(),
            "root_path": "",
            "headers": [(b"host", b"localhost:8000"), *([] if body is None else [JSON]), *headers],
            **scope,
        }
        *parts, last = pieces
        self.pieces = [(part, True) for part in parts] + [(last, False)]
        self.leaves = asyncio.Event()
        self.messages: list[dict[str, Any]] = []
        self.arrived = asyncio.Event()  # a piece of the answer
        self.task = asyncio.create_task(app(self.scope, self._receive, self._send))  # type: ignore[arg-type]

    async def _receive(self) -> dict[str, Any]:
        if self.pieces:
            part, more = self.pieces.pop(0)
            return {"type": "http.request", "body": part, "more_body": more}
        await self.leaves.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        self.messages.append(message)
        if message.get("body"):
            self.arrived.set()

    async def answer(self) -> tuple[int, bytes]:
        await asyncio.wait_for(self.task, WAIT_S)
        assert self.messages[0]["type"] == "http.response.start"
        assert [message["more_body"] for message in self.messages[1:]][-1:] == [False]
        return self.messages[0]["status"], b"".join(message["body"] for message in self.messages[1:])

    def header(self, name: bytes) -> list[bytes]:
        return [value for key, value in self.messages[0]["headers"] if key == name]


async def test_it_has_the_servers_routes_without_a_lifespan(app: AsgiApp) -> None:
    status, body = await Exchange(app, "/v1/models").answer()
    assert (status, json.loads(body)["data"][0]["id"]) == (200, "tiny")
    chat = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 3}
    exchange = Exchange(app, "/v1/chat/completions", chat, headers=[(b"x-request-id", b"mine")])
    status, body = await exchange.answer()
    assert (status, json.loads(body)["usage"]["completion_tokens"]) == (200, 3)
    assert exchange.header(b"x-request-id") == [b"mine"]
    assert exchange.header(b"server") == exchange.header(b"date") == exchange.header(b"connection") == []


async def test_a_stream_arrives_in_pieces_and_ends(app: AsgiApp) -> None:
    status, body = await Exchange(app, "/v1/completions", {**LONG, "max_tokens": 4}).answer()
    assert status == 200
    assert body.endswith(b"data: [DONE]\n\n")
    status, body = await Exchange(app, "/invoke", {"a": 1}).answer()
    assert [json.loads(line) for line in body.splitlines()] == [{"a": 1}, "again"]


async def test_a_client_that_disconnects_cancels_its_generation(app: AsgiApp) -> None:
    exchange = Exchange(app, "/v1/completions", LONG)
    await asyncio.wait_for(exchange.arrived.wait(), WAIT_S)
    exchange.leaves.set()
    await asyncio.wait_for(exchange.task, WAIT_S)
    for _ in range(1000):
        _, metrics = await Exchange(app, "/metrics").answer()
        if b'route="/v1/completions",status="499"' in metrics:
            break
        await asyncio.sleep(0.01)
    else:
        pytest.fail("the generation went on")


async def test_a_server_that_cancels_the_call_cancels_its_generation(app: AsgiApp) -> None:
    exchange = Exchange(app, "/v1/completions", LONG)
    await asyncio.wait_for(exchange.arrived.wait(), WAIT_S)
    exchange.task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await exchange.task


async def test_a_body_in_pieces_and_one_that_never_ends(app: AsgiApp) -> None:
    data = json.dumps({"prompt": "Hello", "max_tokens": 2}).encode()
    exchange = Exchange(app, "/v1/completions", pieces=[data[:5], b"", data[5:]], headers=[JSON])
    assert (await exchange.answer())[0] == 200
    gone = Exchange(app, "/v1/completions", pieces=[data[:5], b""], headers=[JSON])
    gone.pieces[-1] = (b"", True)  # more is to come
    gone.leaves.set()
    await asyncio.wait_for(gone.task, WAIT_S)
    assert gone.messages == []


async def test_limits_are_the_servers(folder: Path) -> None:
    app = teneral.asgi_app(folder / "model", max_body_bytes=1000, api_key="secret")
    async with app.lifespan():
        key = (b"authorization", b"Bearer secret")
        big = Exchange(app, "/v1/completions", pieces=[b"x" * 600] * 4, headers=[JSON, key])
        assert (await big.answer())[0] == 413
        assert (await Exchange(app, "/v1/models").answer())[0] == 401
        assert (await Exchange(app, "/v1/models", headers=[key]).answer())[0] == 200
        assert (await Exchange(app, "/livez").answer())[0] == 200


async def test_pages_of_other_origins_and_names_are_refused_as_at_a_port(app: AsgiApp) -> None:
    body = {"prompt": "Hello", "max_tokens": 1}
    other = Exchange(app, "/v1/completions", body, headers=[(b"origin", b"http://other.example")])
    assert (await other.answer())[0] == 403
    exchange = Exchange(app, "/livez", headers=[])
    renamed = Exchange(app, "/livez")
    renamed.scope["headers"] = [(b"host", b"other.example")]
    assert (await exchange.answer())[0] == 200
    status, answer = await renamed.answer()
    assert (status, json.loads(answer)["error"]["code"]) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    ("root_path", "path", "status"),
    [
        ("", "/livez", 200),
        ("/llm", "/llm/livez", 200),
        ("/llm", "/livez", 200),  # as servers sent it before the specification was clear
        ("/llm", "/llm", 200),
        ("/my models", "/my%20models/livez", 200),
        ("/llm", "/llmx/livez", 404),
        ("/llm", "/llm//livez", 404),
        ("/llm", "/llm/../livez", 404),
        ("", "/x/../livez", 404),
        ("", "//livez", 404),
        ("", "/v1/models/tiny?x=1", 200),
        ("", "/%6civez", 200),
    ],
)
async def test_a_mount_point_is_taken_off_and_the_rest_is_literal(
    app: AsgiApp, root_path: str, path: str, status: int
) -> None:
    assert (await Exchange(app, path, root_path=root_path).answer())[0] == status


async def test_a_scope_without_a_raw_path_is_enough(app: AsgiApp) -> None:
    assert (await Exchange(app, "/llm/v1/models/tiny", root_path="/llm", raw_path=None).answer())[0] == 200


async def test_a_lifespan_starts_and_closes_the_model(folder: Path) -> None:
    app = teneral.asgi_app(folder / "model", name="tiny")
    events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
    sent: asyncio.Queue[Any] = asyncio.Queue()
    task = asyncio.create_task(app({"type": "lifespan"}, events.get, sent.put))  # type: ignore[arg-type]
    for event in ("startup", "shutdown"):
        events.put_nowait({"type": f"lifespan.{event}"})
        assert await asyncio.wait_for(sent.get(), WAIT_S) == {"type": f"lifespan.{event}.complete"}
        if event == "startup":
            assert (await Exchange(app, "/v1/models").answer())[0] == 200
    await task


async def test_a_start_that_is_impossible_fails_the_lifespan(folder: Path) -> None:
    app = teneral.asgi_app(folder / "model", handler="nowhere.py:handler")
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "lifespan"}, receive, send)
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "nowhere.py" in sent[0]["message"]
    await app.aclose()


async def test_a_model_that_is_not_there_is_an_answer(tmp_path: Path) -> None:
    app = teneral.asgi_app(tmp_path / "nowhere")
    async with app.lifespan():
        status, body = await Exchange(app, "/v1/completions", {"prompt": "Hello"}).answer()
        assert (status >= 500, b"nowhere" in body) == (True, True)


async def test_an_engine_is_shared_and_stays_open(folder: Path) -> None:
    async with teneral.AsyncEngine(folder / "model", name="tiny") as engine:
        app = teneral.asgi_app(engine)
        async with app.lifespan():
            assert (await Exchange(app, "/v1/models").answer())[0] == 200
        assert (await engine.generate("Hello", max_tokens=1)).usage.completion_tokens == 1
        with pytest.raises(teneral.UsageError, match="no settings of its own"):
            teneral.asgi_app(engine, name="other")


def test_it_serves_one_event_loop_after_another(folder: Path) -> None:
    app = teneral.asgi_app(folder / "model", name="tiny")

    async def status() -> int:
        return (await Exchange(app, "/livez").answer())[0]

    assert [asyncio.run(status()), asyncio.run(status())] == [200, 200]
    asyncio.run(app.aclose())


@pytest.mark.parametrize(
    ("settings", "text"), [({"port": 80}, "port has no effect"), ({"max_runing": 1}, "Did you mean max_run")]
)
def test_settings_are_checked_at_once(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(teneral.UsageError, match=text):
        teneral.asgi_app("model", **settings)


async def test_a_websocket_is_closed(app: AsgiApp) -> None:
    sent: list[Any] = []

    async def receive() -> dict[str, Any]:
        return {"type": "websocket.connect"}

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "websocket"}, receive, send)
    assert sent[0]["type"] == "websocket.close"
