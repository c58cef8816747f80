"""The ingress of Ray's applications, without Ray: its modules are replaced by the little that an answer takes."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

NAME = "teneral.handlers.contrib.ray.app"


class Response:
    """Starlette's, as far as the ingress uses it."""

    def __init__(self, content: Any = b"", status_code: int = 200, headers: Any = ()) -> None:
        self.content, self.status_code = content, status_code
        self.raw_headers = [(name.lower().encode(), value.encode()) for name, value in dict(headers).items()]


def module(name: str, **names: Any) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(names)
    return made


class Pieces:
    """A replica's answer, as Ray hands it on."""

    def __init__(self, *pieces: Any) -> None:
        self._pieces = iter(pieces)

    def __aiter__(self) -> Pieces:
        return self

    async def __anext__(self) -> Any:
        for piece in self._pieces:
            return piece
        raise StopAsyncIteration

    def cancel(self) -> None:
        pass


@pytest.fixture
def ingress(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module `app`; set `answer` on it to what the replica answers."""
    remote = SimpleNamespace(remote=lambda *asked: Pieces(*found.answer))
    handle = SimpleNamespace(options=lambda **options: remote)
    serve = module("ray.serve", get_deployment_handle=lambda *names, **more: handle)
    stubs = {
        "ray": module("ray", serve=serve),
        "ray.serve": serve,
        "ray.exceptions": module("ray.exceptions", RayError=type("RayError", (Exception,), {})),
        "ray.serve.exceptions": module(
            "ray.serve.exceptions",
            BackPressureError=type("BackPressureError", (Exception,), {}),
            RayServeException=type("RayServeException", (Exception,), {}),
        ),
        "ray.serve.handle": module("ray.serve.handle", DeploymentHandle=object),
        "starlette": module("starlette"),
        "starlette.requests": module("starlette.requests", Request=object),
        "starlette.responses": module(
            "starlette.responses", JSONResponse=Response, Response=Response, StreamingResponse=Response
        ),
    }
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    found: Any = importlib.import_module(NAME)
    yield found
    del sys.modules[NAME]


async def headers_of(app: Any, body: bytes) -> list[tuple[str, str]]:
    async def stream() -> Any:
        yield body

    request = SimpleNamespace(
        method="POST",
        headers={"x-request-id": "mine"},
        url=SimpleNamespace(path="/v1/completions", query=""),
        stream=stream,
    )
    response = await app.Ingress({"m": {"m": 1}})(request)
    return [(name.decode(), value.decode()) for name, value in response.raw_headers]


@pytest.mark.parametrize("kind", ["application/json", "text/event-stream"])
async def test_an_answer_leaves_its_id_to_ray_which_sets_it_too(ingress: Any, kind: str) -> None:
    headers = [("Content-Type", kind), ("X-Request-Id", "mine"), ("x-teneral-model", "m")]
    ingress.answer = ((200, headers), b"{}")
    assert await headers_of(ingress, b'{"model": "m"}') == [("content-type", kind), ("x-teneral-model", "m")]


async def test_a_refusal_leaves_its_id_to_ray_too(ingress: Any) -> None:
    assert "x-request-id" not in dict(await headers_of(ingress, b'{"model": "another"}'))
