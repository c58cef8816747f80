"""The server that a Ray replica owns, without Ray: starting, answering, sleeping, ending; the policy."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.support.tiny_models import save_tiny

from teneral.handlers.contrib.ray.policy import desired
from teneral.handlers.contrib.ray.replica import Replica, ReplicaServer, child_environment
from teneral.loader.errors import LoadError, UsageError

DEMO = Path(__file__).parents[3] / "demo" / "model"
pytestmark = pytest.mark.timeout(300)


def settings(**more):
    environment = {"TENERAL_MODEL": str(DEMO), "TENERAL_NAME": "demo", "TENERAL_DRAIN_TIMEOUT_S": "5"}
    return {
        "environment": environment, "secrets": {}, "ready_path": "/readyz", "drain_s": 5.0, "idle_timeout_s": 0.5,
        "sleep": True, **more,
    }  # fmt: skip


async def ask(replica, body=b'{"prompt": "def f", "max_tokens": 3, "stream": true}'):
    pieces = replica.request("POST", "/v1/completions", [("Content-Type", "application/json")], body)
    status, headers = await anext(pieces)
    return status, dict(headers), b"".join([piece async for piece in pieces])


@pytest.mark.slow
async def test_a_model_sleeps_wakes_for_a_request_and_sleeps_again():
    import asyncio

    replica = Replica(settings())
    await replica.prepare()
    try:
        assert not replica.statistics()["awake"]
        await replica.check_health()
        status, headers, text = await ask(replica)
        assert status == 200
        assert "text/event-stream" in headers["Content-Type"]
        assert text.endswith(b"data: [DONE]\n\n")
        await replica.check_health()
        for _ in range(600):
            if not replica.statistics()["awake"]:
                break
            await asyncio.sleep(0.1)
        assert not replica.statistics()["awake"]
        first, second = await asyncio.gather(ask(replica), ask(replica))
        assert (first[0], second[0], replica.statistics()["starts"]) == (200, 200, 2)
    finally:
        await replica.close()
    assert not replica.statistics()["awake"]


@pytest.mark.slow
async def test_a_client_that_goes_away_while_the_model_wakes_leaves_the_start_to_others(tmp_path):
    import asyncio

    save_tiny("llama", tmp_path)
    environment = {"TENERAL_MODEL": str(tmp_path), "TENERAL_KV_BYTES": "8MiB"}
    replica = Replica(settings(environment=environment, idle_timeout_s=300))
    await replica.prepare()
    try:
        gone = asyncio.create_task(ask(replica))
        await asyncio.sleep(0.1)  # its process has been started, and does not listen yet
        late = asyncio.create_task(ask(replica))
        await asyncio.sleep(0.1)
        gone.cancel()
        assert (await late)[0] == 200
        assert (await ask(replica))[0] == 200
        assert replica.statistics()["starts"] == 1
    finally:
        await replica.close()


async def test_a_server_that_cannot_start_is_an_error_and_leaves_no_process():
    server = ReplicaServer({"TENERAL_MODEL": "/nowhere/model"}, ready_path="/readyz", drain_s=1)

    async def begin():
        await server.start()
        await server.wait_ready(60)

    with pytest.raises(LoadError):
        await begin()
    await server.end()
    assert not server.is_running


def test_a_secret_that_this_node_lacks_is_named():
    with pytest.raises(UsageError, match="MY_KEY"):
        Replica(settings(secrets={"TENERAL_API_KEY": "MY_KEY"}))


def test_the_child_does_not_see_rays_variables():
    outer = {"RAY_ADDRESS": "x", "OMP_NUM_THREADS": "1", "PATH": "/bin", "AWS_REGION": "eu-central-1"}
    made = child_environment(outer, {"TENERAL_MODEL": "m"})
    assert made == {
        "PATH": "/bin", "AWS_REGION": "eu-central-1",
        "TENERAL_MODEL": "m", "TENERAL_HOST": "127.0.0.1", "TENERAL_PORT": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("requests", "buffer", "wanted"), [(0, 2, 1), (1, 0, 1), (9, 0, 3), (9, 2, 5), (1000, 2, 8)]
)
def test_replicas_are_requests_over_the_target_and_the_buffer_while_busy(requests, buffer, wanted):
    context = SimpleNamespace(
        config=SimpleNamespace(get_target_ongoing_requests=lambda: 4),
        total_num_requests=requests,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
        policy_state={},
    )
    assert desired(context, buffer=buffer)[0] == wanted
    assert math.ceil(requests / 4) + (buffer if requests else 0) >= wanted or wanted == 1
