"""Scale to zero on Kubernetes: from the request that wakes a model to its first token, by the rendered documents.

    python -m benchmarks.stories.kubernetes [--rate 200] [--rounds 5] [--only PATTERN] [--save]

`examples/scale_to_zero.toml` is rendered for Knative, and for a Deployment that KEDA scales. Their container is started
here as a process, with the arguments and the environment of the document; the model lies in an S3 store that gives
--rate MB/s, with 15 ms to the first byte. The request waits where the platform would hold it until the container is
ready: Knative's activator asks the readiness path every 200 ms; of a Deployment the kubelet asks the startup probe and
then the readiness probe, at the periods of the document. What is not here: scheduling, the pull of the image, the
creation of the container, and the network between them.

    ready     starting the container → its probes succeed, and the request is sent to it
    token     starting the container → the first token
    warm      a second request, to its first token
    end       SIGTERM → the process has ended, as when the platform scales down
"""

from __future__ import annotations

import http.client
import json
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import answers
from benchmarks.cold_starts import PROMPT
from benchmarks.processes import RunError, environment
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.rounds import selected
from benchmarks.server import free_port
from benchmarks.store import StoreProcess, prepare, stored_bytes, warm
from benchmarks.stories import model_and_where

from teneral.handlers.pool.file import parse_pool
from teneral.infra.render.render import render as render_pool

NAME = "stories.kubernetes"
POOL = Path(__file__).parents[2] / "examples" / "scale_to_zero.toml"
ACTIVATOR_S = 0.2  # between two probes of Knative's activator
TIMEOUT_S = 120.0


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--rate", type=float, default=200.0, help="of the store, in 10**6 bytes a second")
    parser.add_argument("--latency-ms", type=float, default=15.0)
    options = parser.parse_args()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    facts = {"rate_mb_s": options.rate, "latency_ms": options.latency_ms}
    report = begin(NAME, model=options.like, rounds=options.rounds, **facts)
    with StoreProcess(root, rate_mb_s=options.rate, latency_ms=options.latency_ms) as store:
        report["results"] = measure(store, root, options)
    report["stored_bytes"] = stored_bytes(root)["packed"]
    finish(report, render(report), save=options.save)


def measure(store: StoreProcess, root: Path, options: Any) -> dict[str, dict[str, Any]]:
    text = POOL.read_text(encoding="utf-8")
    exact = text.replace("min_warm = 0 ", 'ready_when = "exact"\nmin_warm = 0 ')
    systems = {
        "Knative": container_of(text, "knative"),
        'Knative, ready_when = "exact"': container_of(exact, "knative"),
        "Deployment and KEDA": container_of(text, "kubernetes"),
    }
    systems = selected(systems, options.only)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for number in range(options.rounds):
        for name, container in systems.items():
            warm(root)
            sample = wake(container, store.environment())
            samples[name].append(sample)
            note(
                f"round {number + 1}: {name}: "
                + ", ".join(f"{key} {value:.3f}" for key, value in sample.items())
            )
    return {
        name: {
            **{key: statistics.median(row[key] for row in rows) for key in rows[0]},
            "all_s": [round(row["token_s"], 3) for row in rows],
        }
        for name, rows in samples.items()
    }


def container_of(pool: str, platform: str) -> dict[str, Any]:
    """The container of the pool's one model, as the platform's document has it."""
    for document in render_pool(parse_pool(pool, POOL.name), platform).documents:
        template = document.body.get("spec", {}).get("template", {})
        if containers := template.get("spec", {}).get("containers"):
            (container,) = containers
            return dict(container)
    raise SystemExit(f"no document for {platform} has a container")


def wake(container: Mapping[str, Any], variables: Mapping[str, str]) -> dict[str, float]:
    """From zero to one and back. Raises SystemExit where the container does not get ready, or does not end."""
    port = free_port()
    given = {item["name"]: item["value"] for item in container.get("env", ()) if "value" in item}
    with tempfile.TemporaryFile() as log:
        started_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", "teneral", *container["args"], "--host", "127.0.0.1"],
            env=environment({**variables, **given, "PORT": str(port)}),
            stdout=log,
            stderr=log,
        )
        try:
            _until_ready(container, port, process, started_s)
            found = {"ready_s": time.monotonic() - started_s}
            found["token_s"] = _first_token_s(port, started_s)
            found["warm_s"] = _first_token_s(port, time.monotonic())
            asked_s = time.monotonic()
            process.send_signal(signal.SIGTERM)
            process.wait(TIMEOUT_S)
            found["end_s"] = time.monotonic() - asked_s
        except (RunError, OSError, subprocess.TimeoutExpired) as error:
            log.seek(0)
            raise SystemExit(f"{error}\n{log.read().decode(errors='replace')[-2000:]}") from error
        finally:
            process.kill()
            process.wait()
    return found


def _until_ready(
    container: Mapping[str, Any], port: int, process: subprocess.Popen[bytes], started_s: float
) -> None:
    """Wait like the platform: a Deployment has a startup probe, a Knative Service has none."""
    if (startup := container.get("startupProbe")) is None:
        _probe(container["readinessProbe"], ACTIVATOR_S, port, process, started_s)
        return
    _probe(startup, startup["periodSeconds"], port, process, started_s)
    ready = container["readinessProbe"]
    _probe(ready, ready["periodSeconds"], port, process, time.monotonic())


def _probe(
    probe: Mapping[str, Any], period_s: float, port: int, process: subprocess.Popen[bytes], first_s: float
) -> None:
    """Until it succeeds: at once, then once a period. Raises `RunError`."""
    for number in range(int(TIMEOUT_S / period_s)):
        time.sleep(max(0.0, first_s + number * period_s - time.monotonic()))
        if process.poll() is not None:
            raise RunError(f"the container ended with {process.returncode}")
        if _status(port, probe["httpGet"]["path"]) == http.HTTPStatus.OK:
            return
    raise RunError(f"not ready after {TIMEOUT_S:g} s")


def _status(port: int, path: str) -> int:
    with _connection(port) as connection:
        try:
            connection.request("GET", path)
            return connection.getresponse().status
        except OSError:
            return 0


def _first_token_s(port: int, since_s: float) -> float:
    body = {"model": "chat", "prompt": PROMPT, "max_tokens": 2, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "logprobs": 0, "stream_options": {"include_usage": True}}
    with _connection(port) as connection:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != http.HTTPStatus.OK:
            raise RunError(f"{response.status} {response.read(500)!r}")
        return answers.of_stream(response, lambda: time.monotonic() - since_s, lambda: None).token_times_s[0]


@contextmanager
def _connection(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=TIMEOUT_S)
    try:
        yield connection
    finally:
        connection.close()


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for people."""
    words = [f"{report['model']} at {report['rate_mb_s']:g} MB/s", f"medians of {report['rounds']} rounds"]
    return "\n".join([title(report, "Scale to zero on Kubernetes", *words), _table(report)])


def section(report: Mapping[str, Any]) -> str:
    """The figures of docs/stories/scale-to-zero.md."""
    return f"{model_and_where(report)}\n\n{_table(report)}\n"


def _table(report: Mapping[str, Any]) -> str:
    keys = ("ready_s", "token_s", "warm_s", "end_s")
    rows = [[name, *(f"{row[key]:.2f} s" for key in keys)] for name, row in report["results"].items()]
    return table(["", "start → ready", "start → token", "a warm request", "SIGTERM → ended"], rows)


if __name__ == "__main__":
    main()
