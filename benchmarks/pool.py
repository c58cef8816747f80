"""One machine's pool: waking a sleeping model, the front's cost, the KV cache after a sleep, and starts in a burst.

    python -m benchmarks.pool [--rounds 20] [--like qwen2.5-0.5b] [--only PATTERN] [--save]

Everything runs through `teneral pool run` with standby processes and models on the local disk, files in the page cache.
`swap` is from a request to a sleeping model to its first token, for the demo model and the one of `--like`; `front` a
warm request through the pool and straight to its instance, in turns, and the front's CPU a piece of a stream; `kv` the
first token of a conversation of 1,000 tokens with the one of `--like`, packed, when it is new and when the model has
slept; `burst` compares simultaneous requests to three sleeping models with a request to one. If `vllm-router` is on
the path, it is measured in turns in front of the same instance.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import shutil
import socket
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.store import prepare, warm
from benchmarks.tasks import random_prompt
from tests.support.pool_runs import PoolRun

DEMO = Path(__file__).parent.parent / "demo" / "model"
QUIET_S = 4.0  # until taken standby processes have been replaced
FRONT_REQUESTS = 300
STREAM_TOKENS = 200
CONVERSATION_TOKENS = 1000
GOALS = {
    "swap_demo_p95_s": 0.5,
    "swap_like_p95_s": 1.2,
    "front_p50_ms": 1.0,
    "front_p99_ms": 3.0,
    "cores_at_2000": 0.5,
    "kv": 0.15,
    "burst": 2.0,
}


def main() -> None:
    parser = new_parser(__doc__, rounds=20)
    options = parser.parse_args()
    report = begin("pool", model=options.like, rounds=options.rounds, goals=GOALS)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="teneral-bench-pool-") as folder:
        demo = _packed_demo(Path(folder))
        parts: dict[str, Callable[[], Any]] = {
            "swap demo": lambda: swap(Path(folder), demo, options.rounds),
            "swap like": lambda: swap(
                Path(folder), _like(options), max(5, options.rounds // 4), memory="1100MiB"
            ),
            "front": lambda: front(Path(folder), demo),
            "kv": lambda: kv(Path(folder), _like(options, "packed"), max(3, options.rounds // 4)),
            "burst": lambda: burst(Path(folder), demo, max(3, options.rounds // 4)),
        }
        for name, run in parts.items():
            if options.only is None or re.search(options.only, name):
                note(name)
                results[name] = run()
    report["results"] = results
    finish(report, render(report), save=options.save)


def _packed_demo(folder: Path) -> Path:
    from teneral import cli

    if cli.run(["pack", str(DEMO), str(folder / "demo"), "--quiet"]) != 0:
        raise SystemExit("the demo model could not be packed")
    return folder / "demo"


def _like(options: Any, form: str = "plain") -> Path:
    root = options.work / options.like / "store"
    prepare(options.like, root)
    warm(root)
    return Path(root) / "models" / form


@contextlib.contextmanager
def running(
    folder: Path, models: dict[str, Path], *, standby: int, memory: str = "0", more: str = ""
) -> Iterator[PoolRun]:
    """A pool of these models, when each has answered once and the standby processes are there."""
    tables = "".join(f'[models.{name}]\nsource = "{path}"\n{more}' for name, path in models.items())
    size = f'standby_memory = "{memory}"\n' if memory != "0" else ""
    node = f'[node]\nmemory = "{_node_mib()}MiB"\nstandby = {standby}\n{size}'
    with PoolRun(folder, f"version = 1\n{tables}{node}", "--model-control", "--log-level", "warning") as pool:
        for name in models:
            first_token_s(pool.port, name)
        time.sleep(QUIET_S)
        yield pool


def _node_mib() -> int:
    return int(0.9 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**20)


def first_token_s(
    port: int, model: str, prompt: str | list[int] = "Return a list of the", max_tokens: int = 2, **more: Any
) -> float:
    """From the request to the first piece of its stream. Raises SystemExit for an answer that is an error."""
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        **more,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=120)
    with contextlib.closing(connection):
        began_s = time.monotonic()
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            raise SystemExit(f"{answer.status} {answer.read()[:500]!r}")
        line = answer.readline()
        while not line.startswith(b"data:"):
            if not line:
                raise SystemExit("a stream ended before its first piece")
            line = answer.readline()
        seconds = time.monotonic() - began_s
        answer.read()
    return seconds


def sleep(pool: PoolRun, name: str) -> None:
    """Put it to sleep, and wait until it is and the standby pool is full again."""
    pool.ask("POST", f"/v1/pool/{name}/sleep")
    while pool.pool()["models"][name]["state"] != "asleep":
        time.sleep(0.05)
    time.sleep(QUIET_S)


def spread(seconds: list[float]) -> dict[str, float]:
    ordered = sorted(seconds)
    return {
        "p50_s": statistics.median(ordered),
        "p95_s": ordered[round(0.95 * (len(ordered) - 1))],
        "p99_s": ordered[round(0.99 * (len(ordered) - 1))],
        "most_s": ordered[-1],
    }


def swap(folder: Path, model: Path, rounds: int, memory: str = "0") -> dict[str, Any]:
    with running(folder, {"m": model}, standby=2, memory=memory) as pool:
        times = []
        for _ in range(rounds):
            sleep(pool, "m")
            times.append(first_token_s(pool.port, "m"))
        return {
            **spread(times),
            "all_s": [round(each, 4) for each in times],
            "starts": pool.pool()["counts"]["starts"],
        }


def front(folder: Path, model: Path) -> dict[str, Any]:
    with running(folder, {"m": model}, standby=1, more="min_warm = 1\nmax_instances = 1\n") as pool:
        direct = int(pool.instances("m")[0]["url"].rpartition(":")[2])
        ports = {"direct": direct, "pool": pool.port}
        with _router(direct) as router:
            if router is not None:
                ports["vllm-router"] = router
            times: dict[str, list[float]] = {name: [] for name in ports}
            connections = {
                name: http.client.HTTPConnection("127.0.0.1", port) for name, port in ports.items()
            }
            for _ in range(FRONT_REQUESTS):
                for name, connection in connections.items():
                    times[name].append(_one(connection))
            result: dict[str, Any] = {name: spread(seconds) for name, seconds in times.items()}
        cpu_s = own_cpu_s(pool.process.pid)
        began_s = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            pieces = sum(threads.map(lambda _: _pieces(pool.port), range(8)))
        seconds = time.monotonic() - began_s
        cpu_s = own_cpu_s(pool.process.pid) - cpu_s
        result["stream"] = {
            "pieces_s": pieces / seconds,
            "cpu_us_a_piece": 1e6 * cpu_s / pieces,
            "cores_at_2000": 2000 * cpu_s / pieces,
        }
        return result


@contextlib.contextmanager
def _router(port: int) -> Iterator[int | None]:
    """`vllm-router` in front of the instance, where it is installed."""
    command = shutil.which("vllm-router")
    if command is None:
        yield None
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = int(probe.getsockname()[1])
    process = subprocess.Popen(
        [command, "--worker-urls", f"http://127.0.0.1:{port}", "--port", str(own)], stdout=2
    )
    try:
        for _ in range(300):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", own)):
                break
            time.sleep(0.1)
        yield own
    finally:
        process.terminate()
        process.wait()


def _one(connection: http.client.HTTPConnection) -> float:
    body = json.dumps({"model": "m", "prompt": "a", "max_tokens": 1, "temperature": 0})
    began_s = time.monotonic()
    connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
    connection.getresponse().read()
    return time.monotonic() - began_s


def _pieces(port: int) -> int:
    body = {"model": "m", "prompt": "a", "max_tokens": STREAM_TOKENS, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    with contextlib.closing(connection):
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        return connection.getresponse().read().count(b"data:")


def own_cpu_s(pid: int) -> float:
    """Of this process alone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kv(folder: Path, model: Path, rounds: int) -> dict[str, Any]:
    """First tokens of conversations of 1,000 tokens: new, and when the model has slept in between."""
    with running(folder, {"m": model}, standby=2) as pool:
        new, kept = [], []
        for number in range(rounds):
            prompt = random_prompt(random.Random(number), CONVERSATION_TOKENS)
            session: dict[str, Any] = {"teneral": {"session": f"s{number}"}}
            new.append(first_token_s(pool.port, "m", prompt, **session))
            sleep(pool, "m")
            pool.ask("POST", "/v1/pool/m/wake")
            time.sleep(1.0)
            kept.append(first_token_s(pool.port, "m", [*prompt, *prompt[:8]], **session))
        ratio = statistics.median(kept) / statistics.median(new)
        return {"new": spread(new), "kept": spread(kept), "ratio": ratio}


def burst(folder: Path, model: Path, rounds: int) -> dict[str, Any]:
    names = ("a", "b", "c")
    with running(folder, dict.fromkeys(names, model), standby=3) as pool:
        alone, slowest = [], []
        for _ in range(rounds):
            for name in names:
                sleep(pool, name)
            alone.append(first_token_s(pool.port, "a"))
            sleep(pool, "a")
            with ThreadPoolExecutor(3) as threads:
                slowest.append(max(threads.map(lambda name: first_token_s(pool.port, name), names)))
        ratio = statistics.median(slowest) / statistics.median(alone)
        return {"alone": spread(alone), "slowest_of_3": spread(slowest), "ratio": ratio}


def render(report: dict[str, Any]) -> str:
    results, goals = report["results"], report["goals"]
    rows = []
    for name, key in (("swap demo", "swap_demo_p95_s"), ("swap like", "swap_like_p95_s")):
        if name in results:
            row = results[name]
            rows.append(
                [
                    f"{name}: request → first token",
                    f"p50 {row['p50_s']:.2f}, p95 {row['p95_s']:.2f} s",
                    f"p95 ≤ {goals[key]} s",
                ]
            )
    if "front" in results:
        row = results["front"]
        for name in [name for name in row if name not in ("direct", "stream")]:
            half = 1e3 * (row[name]["p50_s"] - row["direct"]["p50_s"])
            most = 1e3 * (row[name]["p99_s"] - row["direct"]["p99_s"])
            rows.append(
                [
                    f"{name} over direct, warm",
                    f"p50 {half:.2f}, p99 {most:.2f} ms",
                    f"≤ {goals['front_p50_ms']:g}, ≤ {goals['front_p99_ms']:g} ms",
                ]
            )
        rows.append(
            [
                "front's cores at 2,000 pieces/s",
                f"{row['stream']['cores_at_2000']:.2f}",
                f"≤ {goals['cores_at_2000']}",
            ]
        )
    if "kv" in results:
        rows.append(
            [
                "conversation's first token after a sleep, relative to new",
                f"{results['kv']['ratio']:.2f}x",
                f"≤ {goals['kv']}x",
            ]
        )
    if "burst" in results:
        rows.append(
            [
                "slowest of 3 starts at once, relative to one alone",
                f"{results['burst']['ratio']:.2f}x",
                f"≤ {goals['burst']:g}x",
            ]
        )
    return "\n".join(
        [title(report, "pool", f"{report['rounds']} rounds"), table(["what", "here", "goal"], rows)]
    )


if __name__ == "__main__":
    main()
