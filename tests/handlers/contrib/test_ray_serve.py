"""Under Ray Serve itself: `scripts/conformance-ray`, which runs this in an environment that has Ray."""

from __future__ import annotations

import json
import os
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from tests.support.infra_validators import read_documents
from tests.support.pool_files import pool_files, render_text
from tests.support.ray_environment import leave_out_test_settings

ray = pytest.importorskip("ray", reason="needs Ray: scripts/conformance-ray")

from ray import serve  # noqa: E402
from ray.serve.schema import ServeDeploySchema  # noqa: E402
from starlette.requests import Request  # noqa: E402

from teneral.handlers.contrib.ray.app import (  # noqa: E402
    MAX_BODY_BYTES,
    Ingress,
    _answer,
    chosen,
    session_key,
)
from teneral.handlers.pool.file import parse_pool, read_pool  # noqa: E402
from teneral.handlers.pool.protocols import StreamEnd  # noqa: E402
from teneral.infra.render.render import render  # noqa: E402

ROOT = Path(__file__).parents[3]
DEMO = ROOT / "demo" / "model"
PORT = 18765
POOLS = int(os.environ.get("TENERAL_TEST_POOLS", "20"))
POOL = f"""
version = 1
[models.sleeper]
source = "{DEMO}"
min_warm = 0
max_instances = 1
idle_timeout_s = 2
[models.warm]
source = "{DEMO}"
min_warm = 2
max_instances = 2
buffer = 0
[models.twice]
source = "{DEMO}"
min_warm = 0
buffer = 1
[instance]
image = "teneral:1"
cpu = 0.1
memory = "256MiB"
"""
pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("file", ["infra/examples/reference.pool.toml", None])
def test_rays_own_schema_takes_the_configuration(file):
    pool = read_pool(ROOT / file) if file else parse_pool(POOL)
    document = yaml.safe_load(render(pool, "ray").stream())
    ServeDeploySchema.model_validate(document)
    (service,) = [dict(each.body) for each in render(pool, "kuberay").documents]
    ServeDeploySchema.model_validate(yaml.safe_load(service["spec"]["serveConfigV2"]))


@pytest.mark.parametrize("platform", ["ray", "kuberay"])
def test_rays_own_schema_takes_random_pools(platform):
    @settings(
        max_examples=POOLS,
        deadline=None,
        suppress_health_check=list(HealthCheck),
        derandomize=True,
        database=None,
    )
    @given(pool_files(platform))
    def check(text):
        (body,) = [dict(each.body) for each in render_text(text, platform).documents]
        if platform == "kuberay":
            (body,) = read_documents(body["spec"]["serveConfigV2"])
        ServeDeploySchema.model_validate(body)

    check()


@pytest.fixture(scope="module")
def running():
    leave_out_test_settings()
    for attempt in range(5):  # a raylet has 30 s to start, which a busy machine does not always give it
        try:
            ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
            break
        except Exception:
            ray.shutdown()
            if attempt == 4:
                raise
    config = yaml.safe_load(render(parse_pool(POOL), "ray").stream())
    config["http_options"] = {"host": "127.0.0.1", "port": PORT}
    serve.start(http_options=config["http_options"], proxy_location="HeadOnly")
    for application in config["applications"]:
        deploy(application)
    yield config
    serve.shutdown()
    ray.shutdown()


def deploy(application):
    """One application of the file, as Ray's controller builds it, but without its dashboard."""
    from importlib import import_module

    module, _, name = application["import_path"].partition(":")
    built = getattr(import_module(module), name)(application["args"])
    deployment = dict(application["deployments"][0])
    deployment.pop("name")
    bound = built._bound_deployment.options(**deployment)
    built = bound.bind(*built._bound_deployment.init_args, **built._bound_deployment.init_kwargs)
    serve.run(built, name=application["name"], route_prefix=application["route_prefix"])


def ask(model, prompt="def f", **more):
    body = json.dumps({"model": model, "prompt": prompt, "max_tokens": 4, **more}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/completions", body, {"content-type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as response:
        first = response.readline()
        seconds = time.monotonic() - began
        return response.status, first + response.read(), seconds


def statistics(model):
    handle = serve.get_deployment_handle("Replica", app_name=model)
    return handle.statistics.remote().result(timeout_s=60)


def test_a_sleeping_model_wakes_answers_and_sleeps(running):
    status, text, seconds = ask("sleeper", stream=True)
    assert status == 200
    assert b"data: {" in text
    assert text.endswith(b"data: [DONE]\n\n")
    print(f"sleeping model, request to the first piece: {seconds:.2f} s")
    deadline = time.monotonic() + 60
    while statistics("sleeper")["awake"] and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not statistics("sleeper")["awake"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"http://127.0.0.1:{PORT}/favicon.ico", timeout=60)
    assert caught.value.code == 404
    status, _, seconds = ask("sleeper")
    print(f"the same again: {seconds:.2f} s")
    assert status == 200
    assert statistics("sleeper")["starts"] == 2
    _, _, seconds = ask("sleeper")
    print(f"warm: {seconds * 1000:.0f} ms")


def test_the_ingress_names_models_and_refuses_others(running):
    with urllib.request.urlopen(f"http://127.0.0.1:{PORT}/v1/models", timeout=60) as response:
        assert [each["id"] for each in json.load(response)["data"]] == ["sleeper", "warm", "twice"]
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask("other")
    assert caught.value.code == 404
    assert json.load(caught.value)["error"]["code"] == "model_not_found"
    with pytest.raises(urllib.error.HTTPError) as caught:
        ask("warm:legal")
    assert caught.value.code == 404
    assert "no adapters" in json.load(caught.value)["error"]["message"], "of the instance"


def test_prompts_that_begin_alike_go_to_one_replica(running):
    for prefix in range(6):
        for turn in range(3):
            assert ask("warm", prompt=f"# file {prefix}\n" * 40 + f"def f{turn}")[0] == 200
    hits = 0
    for _ in range(40):  # the handle spreads these over both replicas
        hits = max(hits, statistics("warm")["in_work"])
    assert statistics("warm")["awake"]


async def test_the_ingress_reads_no_more_of_a_body_than_it_takes():
    read_bytes = 0

    async def receive():
        nonlocal read_bytes
        read_bytes += 1 << 20
        return {"type": "http.request", "body": bytes(1 << 20), "more_body": True}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    answer = await Ingress({"m": {"m": 100}})(Request(scope, receive))
    assert (answer.status_code, read_bytes) == (413, MAX_BODY_BYTES + (1 << 20))


@pytest.mark.parametrize("body", [b'{"model":' * 100_000, b"[", b"\xff"])
async def test_the_ingress_refuses_what_it_cannot_read(body):
    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    assert (await Ingress({"m": {}, "n": {}})(Request(scope, receive))).status_code == 404


async def test_errors_have_the_shape_of_the_requested_protocol():
    async def receive():
        return {"type": "http.request", "body": b'{"model": "other"}', "more_body": False}

    async def ask(path):
        scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": []}
        answer = await Ingress({"m": {}, "n": {}})(Request(scope, receive))
        assert (answer.status_code, answer.headers["content-type"][:16]) == (404, "application/json")
        return json.loads(answer.body)

    assert (await ask("/v1/messages"))["error"]["type"] == "not_found_error"
    assert (await ask("/v1/chat/completions"))["error"]["code"] == "model_not_found"
    assert isinstance((await ask("/v2/models/other/infer"))["error"], str)


class LostPieces:
    """A replica's answer, a stream that breaks off after one event."""

    def __init__(self):
        self._left = [(200, [("Content-Type", "text/event-stream")]), b'data: {"sequence_number":4}\n\n']

    def __aiter__(self):
        return self

    async def __anext__(self):
        if not self._left:
            raise ConnectionError
        return self._left.pop(0)

    def cancel(self):
        pass


@pytest.mark.parametrize(
    ("path", "kind", "key"),
    [
        ("/v1/messages", b"event: error\n", "error"),
        ("/v1/responses", b"event: error\n", "sequence_number"),
        ("/v1/completions", b"", "error"),
    ],
)
async def test_a_lost_stream_ends_as_its_protocol_has_it(path, kind, key):
    answer = await _answer(LostPieces(), StreamEnd(path, "req_1"))
    *_, last = [piece async for piece in answer.body_iterator]
    assert last.startswith(kind + b"data: ")
    event = json.loads(last.removeprefix(kind + b"data: "))
    assert key in event
    assert event.get("sequence_number", 5) == 5


def test_any_text_of_jsons_has_a_key():
    for fields in ({"prompt": "\ud800"}, {"user": "\ud800"}, {"teneral": {"cache_salt": "\udfff"}}):
        assert session_key(None, fields)


def test_versions_share_keys_by_their_weights():
    weights = {"m-v7": 90, "m-v8": 10}
    counts = {"m-v7": 0, "m-v8": 0}
    for number in range(2000):
        counts[chosen(weights, session_key(None, {"prompt": f"{number}"}))] += 1
    assert 0.07 < counts["m-v8"] / 2000 < 0.13
    assert chosen({"a": 0, "b": 100}, "x") == "b"
    moved = sum(
        chosen(weights, f"{number}") != chosen({"m-v7": 80, "m-v8": 20}, f"{number}")
        for number in range(2000)
    )
    assert 0.06 < moved / 2000 < 0.14
