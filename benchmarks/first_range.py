"""Time from exec of a cold process to its first request at the store, and to the first for weights.

    python -m benchmarks.first_range [--rounds 10] [--only PATTERN] [--save]

`teneral serve` is started, and killed once the store has seen a request for weights. One clock times the start of the
process and the store's requests. The first request is for the manifest, or of a plain checkpoint for a header or a
list; requests for weights are ranges of a blob, or of a plain checkpoint's file behind its header, which is the first
range there. Credentials are in the environment, but for one row where a service on this machine hands them out, as
container platforms do. The goal is 100 ms.
"""

from __future__ import annotations

import json
import os
import random
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.processes import environment
from benchmarks.report import begin, finish, median, new_parser, note, table, title
from benchmarks.rounds import selected
from benchmarks.store import prepare, store_variables, without_key
from tests.support.store_certificate import write_certificate
from tests.support.store_conversation import LogEntry
from tests.support.store_server import StoreServer

LIMIT_S = 20.0
POLL_S = 0.01
SETTLE_S = 0.3  # in which the store and the system are done with the last process
GONE_S = 5.0  # in which all of its helpers end
GOAL_S = 0.1


def main() -> None:
    parser = new_parser(__doc__, rounds=10)
    parser.add_argument("--rate-mb-s", type=float, default=200.0)
    parser.add_argument("--latency-ms", type=float, default=15.0)
    options = parser.parse_args()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    report = begin(
        "first_range",
        model=options.like,
        rate_mb_s=options.rate_mb_s,
        latency_ms=options.latency_ms,
        rounds=options.rounds,
        goal_s=GOAL_S,
    )
    report["results"] = measure(root, options.rate_mb_s, options.latency_ms, options.rounds, options.only)
    finish(report, render(report), save=options.save)


def measure(
    root: Path, rate_mb_s: float, latency_ms: float, rounds: int, only: str | None
) -> dict[str, dict[str, Any]]:
    """Medians over the rounds, in turns."""
    secret = write_certificate(root.parent / "store.pem")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(secret)
    with (
        StoreServer(root, rate_mb_s=rate_mb_s, latency_ms=latency_ms) as store,
        StoreServer(root, rate_mb_s=rate_mb_s, latency_ms=latency_ms, tls=context) as secure,
        role_service() as role,
    ):
        variables = store_variables(store.url)
        trust = dict.fromkeys(("SSL_CERT_FILE", "AWS_CA_BUNDLE"), str(without_key(secret)))
        # Empty is as good as none.
        nameless = dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "")
        under_role = {**variables, **nameless, "AWS_CONTAINER_CREDENTIALS_FULL_URI": role}
        ways = {
            "packed, s3://": Way("s3://models/packed", store, variables),
            "packed, s3://, a container's role": Way("s3://models/packed", store, under_role),
            "packed, s3://, TLS": Way("s3://models/packed", secure, store_variables(secure.url) | trust),
            "packed, http://": Way(f"{store.url}/models/packed", store, variables),
            "plain, s3://": Way("s3://models/plain", store, variables),
            "plain, http://": Way(f"{store.url}/models/plain", store, variables),
        }
        samples: dict[str, list[dict[str, float]]] = {name: [] for name in selected(ways, only)}
        for number in range(rounds):
            for name in random.sample(
                list(samples), len(samples)
            ):  # none always comes behind the same other one
                samples[name].append(start_once(ways[name]))
                note(f"round {number + 1}: {name:34} {1000 * samples[name][-1]['weights_s']:.0f} ms")
    return {
        name: {
            "first_s": median(rows, "first_s"),
            "range_s": median(rows, "range_s"),
            "weights_s": median(rows, "weights_s"),
            "worst_weights_s": max(row["weights_s"] for row in rows),
            "all_weights_s": [round(row["weights_s"], 4) for row in rows],
        }
        for name, rows in samples.items()
    }


class Way(NamedTuple):
    """A model in a store, and the settings of the process that serves it."""

    address: str
    store: StoreServer
    variables: dict[str, str]


@contextmanager
def role_service() -> Iterator[str]:
    """The address of a service that hands out a role's credentials, as a container's platform does."""
    answer = {"AccessKeyId": "benchmark", "SecretAccessKey": "benchmark", "Token": "role"}
    answer["Expiration"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + 6 * 3600))
    body = json.dumps(answer).encode()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/role"
    finally:
        server.shutdown()
        server.server_close()


def start_once(way: Way) -> dict[str, float]:
    """Seconds from exec to the first request, to the first for a range, and to the first for weights."""
    store = way.store
    store.clear_log()
    before = store.num_connections  # what the last process had on its way is not this one's
    program = Path(sys.executable).with_name("teneral")  # as an image starts it
    command = [str(program), "serve", way.address, "--host", "127.0.0.1", "--port", "0"]
    started_s = time.monotonic()
    process = subprocess.Popen(
        command,
        env=environment(way.variables),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        while time.monotonic() < started_s + LIMIT_S:
            own = [entry for entry in store.log() if entry.connection > before]
            entries = sorted(own, key=lambda entry: entry.received_s)
            ranges = [entry for entry in entries if entry.start is not None]
            weights = next((entry for entry in ranges if _is_for_weights(entry)), None)
            if weights is not None:
                return {
                    "first_s": entries[0].received_s - started_s,
                    "range_s": ranges[0].received_s - started_s,
                    "weights_s": weights.received_s - started_s,
                }
            time.sleep(POLL_S)
    finally:
        _end(process)
        store.drop_connections()
        time.sleep(SETTLE_S)
    raise SystemExit(f"{way.address}: no weights were asked for within {LIMIT_S:g} s")


def _end(process: subprocess.Popen[bytes]) -> None:
    """End it and its helpers, and wait until none of them is there: they would make the next start slower."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    ends_s = time.monotonic() + GONE_S
    with suppress(ProcessLookupError):
        while time.monotonic() < ends_s:
            os.killpg(process.pid, 0)
            time.sleep(POLL_S)


def _is_for_weights(entry: LogEntry) -> bool:
    is_blob = "/blobs/" in entry.key and "/files/" not in entry.key
    return entry.start is not None and (is_blob or (entry.key.endswith(".safetensors") and entry.start > 0))


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    link = f"{report['rate_mb_s']:g} MB/s, {report['latency_ms']:g} ms to the first byte"
    columns = [
        "exec → request, ms",
        "first of all",
        "first range",
        "first for weights",
        "worst",
        "relative to the goal of 100 ms",
    ]
    rows = [
        [
            name,
            f"{1000 * row['first_s']:.0f}",
            f"{1000 * row['range_s']:.0f}",
            f"{1000 * row['weights_s']:.0f}",
            f"{1000 * row['worst_weights_s']:.0f}",
            f"{row['weights_s'] / report['goal_s']:.2f}x",
        ]
        for name, row in report["results"].items()
    ]
    words = [report["model"], link, f"medians of {report['rounds']} rounds"]
    return "\n".join([title(report, *words), table(columns, rows)])


if __name__ == "__main__":
    main()
