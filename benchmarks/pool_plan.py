"""Plans against reality: the predictions of `teneral pool plan`, and the figures of `teneral pool run`.

    python -m benchmarks.pool_plan [--seconds 120] [--only PATTERN] [--save]

Four synthetic traces × four pools of the demo model, `--seconds` each, replayed against real pools; the figures that
the plan needs are measured before, by `teneral pool measure`. Compared are cold share, the first token's median and
99th percentile, and instance-seconds: medians of the errors over all runs. Then the speed of the search: 100,000
requests × 60 pools on one core. Wants a machine that does nothing else.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import statistics
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.pool import _packed_demo
from benchmarks.report import begin, finish, new_parser, note, table, title
from tests.support.pool_runs import PoolRun

from teneral.handlers.pool.file import parse_pool
from teneral.handlers.pool.measure import measure
from teneral.infra.plan.instance_model import Profile, read_profiles
from teneral.infra.plan.simulate import Outcome, simulate
from teneral.infra.plan.trace import Request, in_order, synthesize

TRACES = {
    "poisson, slow": "poisson:rate=0.15,prompt=64,output=32",
    "poisson, fast": "poisson:rate=1.5,prompt=64,output=48",
    "bursts": "bursty:rate=3,on=8,off=22,prompt=64,output=48",
    "hard bursts": "bursty:rate=8,on=4,off=36,prompt=64,output=32",
}
POOLS = {
    "zero": "min_warm = 0\nbuffer = 0\nidle_timeout_s = 10",
    "zero, buffer": "min_warm = 0\nbuffer = 1\nidle_timeout_s = 10",
    "one warm": "min_warm = 1\nbuffer = 0\nidle_timeout_s = 5",
    "zero, long": "min_warm = 0\nbuffer = 0\nidle_timeout_s = 40",
}
COMMON = "max_instances = 4\ntarget_concurrency = 4\nmax_concurrency = 8\n"
GOALS = {"cold_share": 0.03, "p50": 0.15, "p99": 0.30, "instance_s": 0.10, "search_s": 60.0}


def main() -> None:
    parser = new_parser(__doc__, rounds=1)
    parser.add_argument("--seconds", type=float, default=120.0, help="seconds of each trace")
    parser.add_argument("--standby", type=int, default=2)
    options = parser.parse_args()
    report = begin("pool_plan", seconds=options.seconds, standby=options.standby, goals=GOALS)
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="teneral-plan-bench-") as name:
        folder = Path(name)
        demo = _packed_demo(folder)
        (folder / "measure.toml").write_text(_file(demo, "", options.standby))
        measure(str(folder / "measure.toml"), num_starts=7, output=str(folder / "measured.json"))
        profile = read_profiles(folder / "measured.json")["m"]
        report["profile"] = profile.as_json()
        for trace, spec in TRACES.items():
            requests = synthesize(f"{spec},duration={options.seconds:g},seed=7", model="m")
            for pool, settings in POOLS.items():
                label = f"{trace}; {pool}"
                if options.only is None or re.search(options.only, label):
                    note(label)
                    runs.append(
                        {"run": label, **_compare(folder, demo, settings, requests, profile, options)}
                    )
    report["results"] = runs
    report["search"] = _search_speed()
    finish(report, render(report), save=options.save)


def _file(demo: Path, settings: str, standby: int) -> str:
    model = f'[models.m]\nsource = "{demo}"\n{COMMON}{settings}\n'
    return f'version = 1\n{model}[node]\nmemory = "6GiB"\nstandby = {standby}\n'


def _compare(
    folder: Path, demo: Path, settings: str, requests: list[Request], profile: Profile, options: Any
) -> dict[str, Any]:
    file = _file(demo, settings, options.standby)
    real = _replay(folder, file, requests, options.seconds)
    model = parse_pool(file).models["m"]
    outcome = simulate(
        in_order(requests),
        {"m": model},
        {"m": profile},
        cores=float(os.cpu_count() or 1),
        until_s=options.seconds,
    )["m"]
    return {"requests": len(requests), "real": real, "plan": _figures(outcome)}


def _figures(outcome: Outcome) -> dict[str, float]:
    return {
        "cold_share": outcome.cold_share,
        "p50_s": outcome.percentile(50),
        "p99_s": outcome.percentile(99),
        "instance_s": outcome.instance_s,
    }


def _replay(folder: Path, file: str, requests: list[Request], seconds: float) -> dict[str, float]:
    """The trace against a real pool, from when its standby processes and warm instances are there."""
    origin_s = requests[0].t_s if requests else 0.0
    with PoolRun(folder, file, "--model-control", "--log-level", "warning") as pool:
        pool.complete("m")
        pool.ask("POST", "/v1/pool/m/sleep")
        while pool.pool()["models"]["m"]["state"] != "asleep":
            time.sleep(0.1)
        time.sleep(5.0)
        if "min_warm = 1" in file:
            pool.complete("m")
            time.sleep(5.0)
        with _Instances(pool) as instances:
            answers = asyncio.run(_ask_all(pool.port, [(r.t_s - origin_s, r) for r in requests]))
            time.sleep(max(0.0, seconds - instances.age_s))
    times = sorted(first_s for first_s, _ in answers)
    return {
        "cold_share": sum(start != "warm" for _, start in answers) / len(answers),
        "p50_s": times[len(times) // 2],
        "p99_s": times[round(0.99 * (len(times) - 1))],
        "instance_s": instances.instance_s,
    }


class _Instances:
    """Counts instance-seconds, starting ones included, by looking ten times a second."""

    def __init__(self, pool: PoolRun) -> None:
        self.instance_s = 0.0
        self._pool = pool
        self._began_s = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._began_s

    def __enter__(self) -> _Instances:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _watch(self) -> None:
        last_s = time.monotonic()
        while not self._stop.wait(0.1):
            versions = self._pool.pool()["models"]["m"]["versions"]
            count = sum(len(version["instances"]) + version["starting"] for version in versions)
            now_s = time.monotonic()
            self.instance_s += count * (now_s - last_s)
            last_s = now_s


async def _ask_all(port: int, timed: list[tuple[float, Request]]) -> list[tuple[float, str]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began_s = time.monotonic()

        async def one(at_s: float, request: Request) -> tuple[float, str]:
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            return await _ask(session, port, request)

        return await asyncio.gather(*(one(at_s, request) for at_s, request in timed))


async def _ask(session: aiohttp.ClientSession, port: int, request: Request) -> tuple[float, str]:
    """Time to the first token, and what the request waited for."""
    prompt = f"{time.monotonic_ns()} " + "word " * max(1, request.prompt_tokens // 2)
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": max(1, request.output_tokens),
        "stream": True,
        "ignore_eos": True,
    }
    asked_s = time.monotonic()
    async with session.post(
        f"http://127.0.0.1:{port}/v1/completions",
        data=json.dumps(body),
        headers={"content-type": "application/json"},
    ) as answer:
        answer.raise_for_status()
        first_s = 0.0
        async for line in answer.content:
            if line.startswith(b"data:") and not first_s:
                first_s = time.monotonic() - asked_s
        return first_s, answer.headers["x-teneral-start"]


def _search_speed() -> dict[str, float]:
    requests = synthesize("bursty:rate=60,on=40,off=60,duration=4200,seed=1", model="m")[:100_000]
    from teneral.handlers.pool.values import Model
    from teneral.infra.plan.search import Price, search

    profile = Profile(start_s=1.0, prefill_tokens_s=5000, decode_tokens_s=((1, 100.0), (8, 400.0)))
    began_s = time.process_time()
    choices = search(requests, Model("m", "/m", max_instances=6), profile, Price())
    return {"requests": len(requests), "pools": len(choices), "seconds": time.process_time() - began_s}


def _errors(runs: list[dict[str, Any]]) -> dict[str, float]:
    """Medians over the runs: of the cold share's difference, and of the others' relative ones."""

    def relative(key: str) -> float:
        return float(
            statistics.median(abs(run["plan"][key] / max(1e-9, run["real"][key]) - 1) for run in runs)
        )

    return {
        "cold_share": statistics.median(
            abs(run["plan"]["cold_share"] - run["real"]["cold_share"]) for run in runs
        ),
        "p50": relative("p50_s"),
        "p99": relative("p99_s"),
        "instance_s": relative("instance_s"),
    }


def render(report: dict[str, Any]) -> str:
    rows = []
    for run in report["results"]:
        real, plan = run["real"], run["plan"]
        pairs = [f"{real[key]:.3f} / {plan[key]:.3f}" for key in ("cold_share", "p50_s", "p99_s")]
        rows.append(
            [run["run"], str(run["requests"]), *pairs, f"{real['instance_s']:.0f} / {plan['instance_s']:.0f}"]
        )
    columns = ["trace; pool: real / planned", "requests", "cold", "p50 s", "p99 s", "instance-s"]
    lines = [title(report, "pool plans", f"{report['seconds']:g} s each"), table(columns, rows)]
    if report["results"]:
        errors, goals = _errors(report["results"]), report["goals"]
        lines.append(
            "median errors: "
            + ", ".join(f"{key} {error:.3f} (goal {goals[key]})" for key, error in errors.items())
        )
    search = report["search"]
    lines.append(
        f"search: {search['requests']:,} requests × {search['pools']} pools in {search['seconds']:.1f} CPU-s "
        f"(goal {report['goals']['search_s']:g})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
