"""The edge of a pool's port: ids, keys, names, the shape of each error, log lines and metrics."""

from __future__ import annotations

import asyncio
import functools
import io
import json
import logging
import re
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families
from tests.support.pool_front import BODY, Rig, running

from teneral.handlers.http.limits import Limits
from teneral.handlers.pool import front, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are watched as Linux does it")
MINE = {"x-request-id": "mine"}
JSON = {"Content-Type": "application/json"}
EVIL = "https://evil.example"
KEYED = {"environment": {"TENERAL_API_KEY": "right"}}
KEY_MESSAGE = "the API key is missing or wrong: send it as 'Authorization: Bearer KEY'"


class Seen(NamedTuple):
    status: int
    code: str | None
    message: str
    headers: dict[str, str]  # names in lower case, without those of every answer


async def ask(rig: Rig, method: str, path: str, **request: Any) -> Seen:
    request["headers"] = {**MINE, **request.get("headers", {})}
    async with rig.client.request(method, path, **request) as received:
        text = await received.read()
        headers = {name.lower(): value for name, value in received.headers.items()}
    assert headers.pop("server") == "teneral"
    assert headers.pop("x-request-id") == "mine"
    assert int(headers.pop("openai-processing-ms")) >= 0
    error = json.loads(text)["error"] if received.status >= 400 else {}
    if isinstance(error, str):  # KServe's
        error = {"message": error}
    for name in ("content-length", "date", "content-type"):
        headers.pop(name, None)
    return Seen(received.status, error.get("code"), error.get("message", ""), headers)


async def instance(request: web.Request) -> web.StreamResponse:
    """Answers with the id that it was sent, hangs, or ends its connection."""
    if "hang" in request.headers:
        await asyncio.sleep(3)
    if "lose" in request.headers:
        assert request.transport is not None
        request.transport.abort()
    return web.json_response({"id": request.headers["x-request-id"]}, headers={"openai-processing-ms": "7"})


@pytest.fixture
def access(caplog: pytest.LogCaptureFixture) -> Iterator[list[logging.LogRecord]]:
    """The access log's records so far."""
    found: list[logging.LogRecord] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            found.append(record)

    logger, handler = logging.getLogger("teneral.pool.access"), Handler()
    caplog.set_level(logging.INFO, "teneral.pool.access")
    logger.addHandler(handler)
    yield found
    logger.removeHandler(handler)


@pytest.mark.parametrize(
    ("method", "path", "request_", "expected"),
    [
        ("POST", "/v1/completions", {"headers": {"Host": "evil.example"}}, (403, "host_not_allowed")),
        ("GET", "/v1/models", {"headers": {"Host": "evil.example"}}, (403, "host_not_allowed")),
        ("POST", "/v1/completions", {"headers": {"Origin": EVIL}}, (403, "origin_not_allowed")),
        ("GET", "/v1/models", {"headers": {"Origin": EVIL}}, (403, "origin_not_allowed")),
        ("POST", "/v1/pool/m/sleep", {}, (403, "forbidden")),
        ("GET", "/nowhere", {}, (404, "unknown_url")),
        ("GET", "/v1/models/x", {}, (404, "model_not_found")),
        ("POST", "/v1/completions", {"json": {"model": "x"}}, (404, "model_not_found")),
        ("POST", "/v2/models/x/infer", {"json": {}}, (404, None)),
        ("GET", "/v1/completions", {}, (405, "method_not_allowed", {"allow": "POST"})),
        ("POST", "/v1/completions", {"data": b"{", "headers": JSON}, (400, None)),
        ("POST", "/v1/completions", {"data": b"x" * ((8 << 20) + 1)}, (413, "request_too_large")),
        (
            "POST",
            "/v1/completions",
            {"data": b"x", "headers": {"Content-Encoding": "br"}},
            (415, "unsupported_encoding", {"accept-encoding": "gzip, deflate, zstd"}),
        ),
        (
            "POST",
            "/v1/completions",
            {"json": BODY, "headers": {"lose": "1"}},
            (502, "instance_lost", {"retry-after": "1"}),
        ),
        ("POST", "/v1/completions", {"json": BODY, "headers": {"hang": "1"}}, (504, "request_timeout")),
    ],
)
async def test_each_error_has_its_status_code_and_headers(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    request_: dict[str, Any],
    expected: tuple[Any, ...],
) -> None:
    monkeypatch.setattr(front, "UPSTREAM_GRACE_S", 0.1)
    if "data" in request_:
        request_ = {**request_, "data": io.BytesIO(request_["data"])}
    async with running(tmp_path, instance) as rig:
        seen = await ask(rig, method, path, **request_)
    status, code, *headers = expected
    assert (seen.status, seen.code) == (status, code)
    assert seen.headers == (headers[0] if headers else {})


async def test_a_pool_without_room_or_at_its_end_says_when_to_retry(tmp_path: Path) -> None:
    again = {"retry-after": "1"}
    at_its_end = {**again, "connection": "close"}
    async with running(tmp_path, instance) as rig:
        lease = await rig.supervisor.acquire(rig.deployment)
        assert lease is not None
        busy = await ask(rig, "POST", "/v1/completions", json=BODY)
        assert busy == (503, "no_instance", "no instance of 'm' was free within 0.2 s", again)
        rig.supervisor.release(lease)
        rig.supervisor.draining = True
        draining = await ask(rig, "POST", "/v1/completions", json=BODY)
        assert draining == (503, "draining", "the pool is shutting down", at_its_end)


async def test_bodies_are_bounded_together_and_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = functools.partial(Limits, body_timeout_s=0.1)
    monkeypatch.setattr(run, "Limits", few)
    monkeypatch.setattr(run, "MAX_BODIES_BYTES", 40)

    async def slow() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.sleep(0.5)
        yield b"}"

    async with running(tmp_path, instance) as rig:
        for _ in range(3):  # each gives its memory back
            assert (await ask(rig, "POST", "/v1/completions", json=BODY)).status == 200
        full = await ask(rig, "POST", "/v1/completions", json={**BODY, "suffix": "x" * 40})
        assert (full.status, full.headers) == (503, {"retry-after": "1"})
        late = await ask(rig, "POST", "/v1/completions", data=slow())
        assert (late.status, late.code) == (408, "request_timeout")


async def test_with_a_key_only_probes_and_the_page_are_open(tmp_path: Path) -> None:
    async with running(tmp_path, instance, **KEYED) as rig:
        for method, path in (
            ("POST", "/v1/completions"),
            ("POST", "/v2/models/m/infer"),
            ("POST", "/v1/messages"),
            ("GET", "/v1/models"),
            ("GET", "/v1/models/m"),
            ("GET", "/v1/pool"),
            ("GET", "/metrics"),
            ("GET", "/openapi.json"),
            ("GET", "/nowhere"),
            ("GET", "/v1/completions"),
            ("POST", "/v1/pool/m/sleep"),
        ):
            body = {"json": BODY} if method == "POST" else {}
            seen = await ask(rig, method, path, **body)
            assert (seen.status, seen.message) == (401, KEY_MESSAGE), path
            assert seen.headers["www-authenticate"] == "Bearer"
        for path in ("/", "/livez", "/readyz", "/v2/models/m/ready", "/v2/health/ready"):
            assert (await ask(rig, "GET", path)).status == 200, path
        bearer = {"Authorization": "Bearer right"}
        assert (await ask(rig, "GET", "/v1/models", headers=bearer)).status == 200
        assert (await ask(rig, "POST", "/v1/completions", json=BODY, headers=bearer)).status == 200


@pytest.mark.parametrize("given", ["mine", "has space"])
async def test_an_instance_gets_the_id_of_the_answer(tmp_path: Path, given: str) -> None:
    async with running(tmp_path, instance) as rig:
        headers = {"x-request-id": given}
        async with rig.client.post("/v1/completions", json=BODY, headers=headers) as received:
            request_id = received.headers["x-request-id"]
            assert (await received.json())["id"] == request_id
            assert received.headers["x-teneral-model"] == "m"
    assert request_id == "mine" if given == "mine" else request_id.startswith("req_")


async def test_a_request_is_one_line_with_its_model_and_without_its_query(
    tmp_path: Path, access: list[logging.LogRecord]
) -> None:
    async with running(tmp_path, instance) as rig:
        await ask(rig, "POST", "/v1/completions?token=secret", json=BODY)
        await ask(rig, "POST", "/v1/messages", json={"model": "x"})
        await ask(rig, "GET", "/v1/models", headers={"Host": "evil.example"})
        for path in ("/livez", "/readyz", "/v1/pool"):  # which probes and the console read every second
            await ask(rig, "GET", path)
    fields = [record.fields for record in access]  # type: ignore[attr-defined]
    shown = [(each["path"], each["status"], each.get("model"), each["request_id"]) for each in fields]
    assert shown == [
        ("/v1/completions", 200, "m", "mine"),
        ("/v1/messages", 404, "unknown", "mine"),
        ("/v1/models", 403, None, "mine"),
    ]
    assert all(each["bytes"] and 0 < each["duration_s"] < 60 for each in fields)
    line = r"POST /v1/completions 200 \d+ bytes \d+\.\d ms mine model m"
    assert re.fullmatch(line, access[0].getMessage())


async def test_requests_for_models_are_counted_by_model_and_status(tmp_path: Path) -> None:
    async with running(tmp_path, instance) as rig:
        await ask(rig, "POST", "/v1/completions", json=BODY)
        await ask(rig, "POST", "/v1/completions", json={"model": "x"})
        await ask(rig, "GET", "/nowhere")
        async with rig.client.get("/metrics") as received:
            families = list(text_string_to_metric_families(await received.text()))
    assert {(family.name, family.type) for family in families} == {
        ("teneral_requests", "counter"),
        ("teneral_request_seconds", "histogram"),
        ("teneral_starts", "counter"),
        ("teneral_start_seconds", "histogram"),
        ("teneral_cold_requests", "counter"),
        ("teneral_pool_deaths", "counter"),
        ("teneral_pool_evictions", "counter"),
        ("teneral_pool_wait_seconds", "histogram"),
        ("teneral_pool_instances", "gauge"),
        ("teneral_pool_desired", "gauge"),
        ("teneral_pool_waiting", "gauge"),
        ("teneral_pool_memory_bytes", "gauge"),
        ("teneral_pool_device_percent", "gauge"),
        ("teneral_shadow", "counter"),
        ("teneral_shadow_tokens", "counter"),
        ("teneral_shadow_seconds", "counter"),
    }
    requests = next(family for family in families if family.name == "teneral_requests")
    counts = {tuple(sample.labels.values()): sample.value for sample in requests.samples}
    assert counts == {("m", "200"): 1.0, ("unknown", "404"): 1.0}
