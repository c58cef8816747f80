"""Two raylets on one machine, one of which is killed under load: `scripts/conformance-ray`."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
import yaml

ray = pytest.importorskip("ray", reason="needs Ray: scripts/conformance-ray")

from ray import serve  # noqa: E402
from ray.cluster_utils import Cluster  # noqa: E402
from tests.support.ray_environment import leave_out_test_settings  # noqa: E402

from teneral.handlers.contrib.ray.app import app, ingress  # noqa: E402
from teneral.handlers.pool.file import parse_pool  # noqa: E402
from teneral.infra.render.render import render  # noqa: E402

DEMO = Path(__file__).parents[3] / "demo" / "model"
PORT = 18766
CLIENTS = 12
POOL = f"""
version = 1
[models.pair]
source = "{DEMO}"
min_warm = 2
max_instances = 2
[models.pair.serve]
threads = 1
[instance]
image = "teneral:1"
cpu = 0.5
memory = "256MiB"
"""
pytestmark = pytest.mark.timeout(900)


def started(start):
    """The result of `start`. A raylet has 30 s for it, which a busy machine does not always give it."""
    for attempt in range(5):
        try:
            return start()
        except Exception:
            if attempt == 4:
                raise
    raise AssertionError


def new_cluster():
    cluster = Cluster(shutdown_at_exit=False)
    try:
        cluster.add_node(num_cpus=2, include_dashboard=False)
    except Exception:
        cluster.shutdown()
        raise
    return cluster


@pytest.fixture
def nodes():
    """Serve on two raylets, a replica on each; gives the cluster and the node that is not the head."""
    leave_out_test_settings()
    cluster = started(new_cluster)
    try:
        other = started(lambda: cluster.add_node(num_cpus=2))
        deploy(cluster)
        yield cluster, other
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


def deploy(cluster):
    ray.init(address=cluster.address, log_to_driver=False)
    serve.start(http_options={"host": "127.0.0.1", "port": PORT}, proxy_location="HeadOnly")
    config = yaml.safe_load(render(parse_pool(POOL), "ray").stream())
    for application in config["applications"]:
        built = (app if application["name"] != "ingress" else ingress)(application["args"])
        options = dict(application["deployments"][0])
        del options["name"]
        if options.pop("autoscaling_config", None):
            options |= {"num_replicas": 2, "max_replicas_per_node": 1}
        bound = built._bound_deployment.options(**options)
        arguments = built._bound_deployment.init_args, built._bound_deployment.init_kwargs
        serve.run(
            bound.bind(*arguments[0], **arguments[1]),
            name=application["name"],
            route_prefix=application["route_prefix"],
        )


def stream_outcome(number, begun):
    """The end of one stream, as its client sees it."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=300)
    body = {
        "model": "pair",
        "prompt": f"# {number}\ndef f",
        "max_tokens": 400,
        "stream": True,
        "ignore_eos": True,
    }
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            return f"status {response.status}"
        data = response.read(1)
        begun.set()
        data += response.read()
    except (http.client.HTTPException, ConnectionError):
        return "broken"
    finally:
        connection.close()
    if data.endswith(b"data: [DONE]\n\n"):
        return "done"
    return "error event" if b'"instance_lost"' in data else "silent"


def test_no_stream_is_lost_in_silence_when_a_node_is_killed(nodes):
    cluster, other = nodes
    before, after = Counter(), Counter()
    killed, stop = threading.Event(), threading.Event()
    begun = [threading.Event() for _ in range(CLIENTS)]

    def client(number):
        turn = 0
        while not stop.is_set():
            began_after = killed.is_set()
            outcome = stream_outcome(f"{number}.{turn}", begun[number])
            (after if began_after else before)[outcome] += 1
            turn += 1

    threads = [threading.Thread(target=client, args=(number,)) for number in range(CLIENTS)]
    for thread in threads:
        thread.start()
    for event in begun:
        assert event.wait(300)
    cluster.remove_node(other, allow_graceful=False)
    killed.set()
    deadline = time.monotonic() + 120
    while after["done"] < 3 * CLIENTS and time.monotonic() < deadline:
        time.sleep(0.2)
    stop.set()
    for thread in threads:
        thread.join(300)
    print(f"begun before the kill: {dict(before)}; after it: {dict(after)}")
    assert before["silent"] + after["silent"] == 0
    assert after["done"] >= 3 * CLIENTS
    while (
        len([node for node in ray.nodes() if node["Alive"]]) > 1
    ):  # Ray counts a node until its checks have failed
        assert time.monotonic() < deadline
        time.sleep(0.2)
