"""Ray Serve: waking a sleeping model, the cost of the ingress and the proxy for a warm request, and prefix affinity.

    .conformance-ray/bin/python -m benchmarks.ray_serve [--rounds 12] [--save]

For an environment that has Ray (`scripts/conformance-ray` makes one); elsewhere it says so and ends. Everything runs
under a real Ray on this machine, with the demo model and a standby pool. `sleeping` is from a request to a model whose
server has ended, to the first piece of its stream; `warm` the same request through Ray and straight to the replica's
server, in turns; `affinity` the requests of 8 prefixes to 2 replicas that found their prefix in the KV pool, of those
that could.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.report import begin, finish, new_parser, note, table, title, versions

if TYPE_CHECKING:
    from collections.abc import Iterator

DEMO = Path(__file__).parent.parent / "demo" / "model"
GOALS = {"sleeping_s": 1.0, "warm_over_direct_p50_ms": 10.0, "affinity_share": 0.95}
STANDBY = 2
IDLE_S = 1.5
QUIET_S = 4.0  # until another standby process is there
WARM_REQUESTS = 150
PREFIXES, TURNS = 8, 6
WAIT_S = 300.0
POOL = f"""
version = 1
[models.sleeper]
source = "{DEMO}"
min_warm = 0
max_instances = 1
idle_timeout_s = {IDLE_S}
[models.pair]
source = "{DEMO}"
min_warm = 2
max_instances = 2
[instance]
image = "teneral:1"
cpu = 0.1
memory = "256MiB"
[node]
standby = {STANDBY}
"""


def main() -> None:
    try:
        import ray
    except ImportError:
        note("skipped: needs Ray, and scripts/conformance-ray makes an environment that has it")
        return
    options = new_parser(__doc__, rounds=12).parse_args()
    report = begin("ray_serve", rounds=options.rounds, goals=GOALS)
    report["versions"] = versions(("ray", "aiohttp", "numpy"))
    with (
        tempfile.TemporaryDirectory(prefix="teneral-ray-bench-") as folder,
        standby_pool(Path(folder)) as path,
    ):
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        port = free_port()
        deploy(port, path)
        results: dict[str, Any] = {}
        note("sleeping")
        results["sleeping_s"] = sleeping(port, options.rounds)
        note("warm")
        results["warm_ms"] = warm(port)
        note("affinity")
        results["affinity"] = affinity(port)
    report["results"] = results
    finish(report, render(report), save=options.save)


@contextmanager
def standby_pool(folder: Path) -> Iterator[Path]:
    path = folder / "standby.sock"
    command = [sys.executable, "-m", "teneral", "standby", str(path), "--processes", str(STANDBY)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        yield path
    finally:
        process.terminate()
        process.wait(30)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def deploy(port: int, standby: Path) -> None:
    """The configuration of `teneral pool render ray`, on one address and with this run's standby pool."""
    import yaml
    from ray import serve

    from teneral.handlers.contrib.ray import app
    from teneral.handlers.pool.file import parse_pool
    from teneral.infra.render.render import render

    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    for application in yaml.safe_load(render(parse_pool(POOL), "ray").stream())["applications"]:
        if settings := application["args"].get("settings"):
            settings["environment"]["TENERAL_STANDBY_SOCKET"] = str(standby)
        built = getattr(app, application["import_path"].rpartition(":")[2])(application["args"])
        options = dict(application["deployments"][0])
        del options["name"]
        first = built._bound_deployment
        bound = first.options(**options).bind(*first.init_args, **first.init_kwargs)
        serve.run(bound, name=application["name"], route_prefix=application["route_prefix"])


def statistics_of(model: str) -> dict[str, Any]:
    from ray import serve

    handle = serve.get_deployment_handle("Replica", app_name=model)
    found: dict[str, Any] = handle.statistics.remote().result(timeout_s=60)
    return found


def ask(port: int, model: str, prompt: str = "def f", *, stream: bool = False, max_tokens: int = 2) -> Any:
    """Seconds to the first line of the body, and the body."""
    body = {"model": model, "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "stream": stream}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_S)
    began_s = time.monotonic()
    connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
    response = connection.getresponse()
    first = response.readline()
    seconds = time.monotonic() - began_s
    data = first + response.read()
    connection.close()
    if response.status != 200:
        raise SystemExit(f"{model}: {response.status} {data[:300]!r}")
    return seconds, data


def sleeping(port: int, rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        deadline = time.monotonic() + WAIT_S
        while statistics_of("sleeper")["awake"] and time.monotonic() < deadline:
            time.sleep(0.2)
        time.sleep(QUIET_S)
        found.append(ask(port, "sleeper", stream=True)[0])
    return found


def warm(port: int) -> dict[str, list[float]]:
    ask(port, "sleeper")
    direct = int(statistics_of("sleeper")["port"])
    found: dict[str, list[float]] = {"through Ray": [], "direct": []}
    for _ in range(WARM_REQUESTS):
        for name, where in (("through Ray", port), ("direct", direct)):
            found[name].append(1000 * ask(where, "sleeper", max_tokens=1)[0])
    return found


def affinity(port: int) -> dict[str, int]:
    """Requests that found at least half of their prompt in the pool of the replica that they came to."""
    hits = 0
    for turn in range(TURNS):
        for prefix in range(PREFIXES):
            _, data = ask(port, "pair", f"# file {prefix}: " + "read, sort and print. " * 12 + f"def f{turn}")
            usage = json.loads(data)["usage"]
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
            hits += cached >= usage["prompt_tokens"] / 2
    return {"hits": hits, "possible": PREFIXES * (TURNS - 1), "requests": PREFIXES * TURNS}


def render(report: dict[str, Any]) -> str:
    results = report["results"]
    woken, ms, found = sorted(results["sleeping_s"]), results["warm_ms"], results["affinity"]
    through, direct = (statistics.median(ms[name]) for name in ("through Ray", "direct"))
    rows = [
        (
            "sleeping → first piece, s: median",
            f"{statistics.median(woken):.2f}",
            f"≤ {GOALS['sleeping_s']:g}",
        ),
        ("sleeping → first piece, s: slowest", f"{woken[-1]:.2f}", ""),
        ("warm, ms: through Ray, p50", f"{through:.1f}", ""),
        ("warm, ms: direct, p50", f"{direct:.1f}", ""),
        ("warm, ms: over direct, p50", f"{through - direct:.1f}", f"≤ {GOALS['warm_over_direct_p50_ms']:g}"),
        ("prefix found, of those possible", f"{found['hits']} of {found['possible']}", "≥ 95 %"),
    ]
    return f"{title(report, 'Ray Serve', 'demo model')}\n{table(('', 'measured', 'goal'), rows)}"


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "120")
    main()
