"""Plans against reality: the predictions of `teneral pool plan`, and the figures of `teneral pool run`.

    python -m benchmarks.pool_plan [--prompts] [--seconds 50] [--only PATTERN] [--save]

Synthetic traces × pools, `--seconds` each, replayed against real pools; the figures that the plan needs are measured
before, by `teneral pool measure`, and the front's time, which is added to a request's. Compared are cold share, the
first token's median and 99th percentile, and instance-seconds: medians of the errors over all runs. Figures are
measured again after the replays: a plan cannot know how far the machine's own speed went meanwhile.

- By default the demo's model in a store at `--rate-mb-s` (10**6 bytes a second for all starts together; 0: from the
  local disk): most of what it tests are starts. Pools that end idle instances after seconds meet as many cold starts in
  a minute as usual ones do in an hour: a start of the demo model takes less than one.
- With `--prompts` some layers of `--like` on the local disk, and prompts of hundreds of tokens: instances are busy.

Then the speed of the search: 100,000 requests × 60 pools on one core. Wants a machine that does nothing else, for 17
minutes, or 6. The cores that other processes use during a replay are reported, and the plan gets the rest.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import statistics
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from benchmarks.pool import _packed_demo
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.store import StoreProcess, prepare
from tests.support.pool_runs import PoolRun

from teneral.handlers.pool.file import parse_pool
from teneral.handlers.pool.measure import OtherWork, measure
from teneral.infra.plan.instance_model import Profile, profile_of, read_profiles
from teneral.infra.plan.outcome import Outcome, Price
from teneral.infra.plan.simulate import simulate
from teneral.infra.plan.trace import ArrivedRequest, in_order, synthesize


class Case(NamedTuple):
    """Traces and pools by name, the keys of all pools, and the longest prompt and answer of a request, in tokens."""

    traces: dict[str, str]
    pools: dict[str, str]
    common: str
    max_prompt: int
    max_output: int


STARTS = Case(
    traces={
        "poisson, slow": "poisson:rate=0.3,prompt=64,output=32",
        "poisson, fast": "poisson:rate=3,prompt=64,output=48",
        "bursts": "bursty:rate=4,on=4,off=10,prompt=64,output=48",
        "hard bursts": "bursty:rate=12,on=2,off=16,prompt=64,output=32",
    },
    pools={
        "zero": "min_warm = 0\nbuffer = 0\nidle_timeout_s = 4",
        "zero, buffer": "min_warm = 0\nbuffer = 1\nidle_timeout_s = 4",
        "one warm": "min_warm = 1\nbuffer = 0\nidle_timeout_s = 3",
        "zero, long": "min_warm = 0\nbuffer = 0\nidle_timeout_s = 16",
    },
    common="max_instances = 4\ntarget_concurrency = 4\nmax_concurrency = 8\n",
    max_prompt=320,
    max_output=160,  # the model's context has 512
)
PROMPTS = Case(
    traces={
        "poisson, slow": "poisson:rate=0.3,prompt=300,output=16",
        "poisson, fast": "poisson:rate=1.5,prompt=300,output=16",
        "bursts": "bursty:rate=4,on=4,off=10,prompt=200,output=16",
    },
    pools={
        "one warm": "min_warm = 1\nbuffer = 0\nidle_timeout_s = 30",
        "zero": "min_warm = 0\nbuffer = 0\nidle_timeout_s = 4",
    },
    common='max_instances = 2\ntarget_concurrency = 4\nmax_concurrency = 8\nserve = { kv_bytes = "64MiB" }\n',
    max_prompt=1000,
    max_output=100,
)
PROMPT_TOKENS = range(300, 3000)
FRONT_REQUESTS = 20
SETTLE_S = 3.0  # until standby processes are there again, and the machine is quiet
GOALS = {"cold_share": 0.03, "p50": 0.30, "p99": 0.30, "instance_s": 0.10, "search_s": 60.0}


def main() -> None:
    parser = new_parser(__doc__, rounds=1)
    parser.add_argument("--seconds", type=float, default=50.0, help="seconds of each trace")
    parser.add_argument("--standby", type=int, default=2)
    parser.add_argument("--rate-mb-s", type=float, default=10.0)
    parser.add_argument("--prompts", action="store_true", help="a larger model, with longer prompts")
    parser.add_argument("--layers", type=int, default=4, help="of the larger model")
    options = parser.parse_args()
    case = PROMPTS if options.prompts else STARTS
    rate_mb_s = 0.0 if options.prompts else options.rate_mb_s
    report = begin(
        "pool_plan",
        seconds=options.seconds,
        standby=options.standby,
        rate_mb_s=rate_mb_s,
        goals=GOALS,
        **({"variant": "prompts", "model": f"{options.like}-{options.layers}"} if options.prompts else {}),
    )
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="teneral-plan-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        source = stack.enter_context(_source(options, folder, rate_mb_s))
        files = {
            pool: _file(source, case.common, settings, options.standby)
            for pool, settings in case.pools.items()
        }
        profile = _measured(folder, files["one warm"])
        if rate_mb_s:
            profile = profile_of({"link_bytes_s": 1e6 * rate_mb_s}, "--rate-mb-s", profile)
        report["front_s"] = front_s = _front_s(folder, files["one warm"])
        profile = profile_of({"overhead_s": profile.overhead_s + front_s}, "the front", profile)
        report["profile"] = profile.as_json()
        for pool, file in files.items():
            traces = {
                trace: _requests(case, spec, options.seconds)
                for trace, spec in case.traces.items()
                if options.only is None or re.search(options.only, f"{trace}; {pool}")
            }
            real = _replay(folder, file, traces, options.seconds) if traces else {}
            for trace, requests in traces.items():
                plan = _plan(file, requests, profile, options.seconds, real[trace]["other_cores"])
                runs.append(
                    {
                        "run": f"{trace}; {pool}",
                        "requests": len(requests),
                        "real": real[trace],
                        "plan": plan,
                    }
                )
        report["profile_after"] = _measured(folder, files["one warm"]).as_json()
    report["results"] = runs
    report["search"] = _search_speed()
    finish(report, render(report), save=options.save)


@contextmanager
def _source(options: Namespace, folder: Path, rate_mb_s: float) -> Iterator[str]:
    """The model's address. While it is open, the store is there, where there is a rate."""
    if options.prompts:
        root = options.work / f"{options.like}-{options.layers}"
        prepare(options.like, root, num_layers=options.layers)
        yield str(root / "models" / "plain")
        return
    packed = _packed_demo(folder / "store" / "models")
    if not rate_mb_s:
        yield str(packed)
        return
    with StoreProcess(folder / "store", rate_mb_s=rate_mb_s) as store:
        os.environ.update(store.environment())
        yield "s3://models/demo"


def _file(source: str, common: str, settings: str, standby: int) -> str:
    model = f'[models.m]\nsource = "{source}"\n{common}{settings}\n'
    return f'version = 1\n{model}[node]\nmemory = "6GiB"\nstandby = {standby}\n'


def _measured(folder: Path, file: str) -> Profile:
    (folder / "measure.toml").write_text(file)
    measure(str(folder / "measure.toml"), num_starts=7, output=str(folder / "measured.json"))
    return read_profiles(folder / "measured.json")["m"]


def _front_s(folder: Path, file: str) -> float:
    """Time that the front adds to the first token of an idle instance: medians of requests in turns."""
    times: dict[int, list[float]] = {}
    with PoolRun(folder, file, "--log-level", "warning") as pool:
        pool.complete("m")
        ports = (int(pool.instances("m")[0]["url"].rpartition(":")[2]), pool.port)
        time.sleep(SETTLE_S)
        for port in ports * FRONT_REQUESTS:
            time.sleep(0.2)
            answer = asyncio.run(_ask_all(port, [ArrivedRequest(0.0, "m", 64, 1)]))
            times.setdefault(port, []).append(answer[0][0])
    direct_s, front_s = (statistics.median(times[port]) for port in ports)
    return max(0.0, front_s - direct_s)


def _requests(case: Case, spec: str, seconds: float) -> list[ArrivedRequest]:
    """Of the trace, the first at 0, within the model's context."""
    requests = in_order(synthesize(f"{spec},duration={seconds:g},seed=7", model="m"))
    return [
        each._replace(
            prompt_tokens=min(each.prompt_tokens, case.max_prompt),
            output_tokens=min(each.output_tokens, case.max_output),
        )
        for each in requests
    ]


def _plan(
    file: str, requests: list[ArrivedRequest], profile: Profile, seconds: float, other_cores: float
) -> dict[str, float]:
    """Other processes have what they used beyond what they did while this was measured, up to a fair half."""
    model = parse_pool(file).models["m"]
    all_cores = os.cpu_count() or 1
    cores = all_cores - min(all_cores / 2, max(0.0, other_cores - profile.other_cores))
    return _figures(simulate(requests, {"m": model}, {"m": profile}, cores=cores, until_s=seconds)["m"])


def _figures(outcome: Outcome) -> dict[str, float]:
    p50_s, p99_s = outcome.percentiles(50, 99)
    return {
        "cold_share": outcome.cold_share,
        "p50_s": p50_s,
        "p99_s": p99_s,
        "instance_s": outcome.instance_s,
    }


def _replay(
    folder: Path, file: str, traces: dict[str, list[ArrivedRequest]], seconds: float
) -> dict[str, dict[str, float]]:
    """The traces against one real pool, each from when its standby processes and warm instances are there."""
    results = {}
    with PoolRun(folder, file, "--model-control", "--log-level", "warning") as pool:
        pool.complete("m")
        for trace, requests in traces.items():
            note(f"{trace}; {' '.join(file.split())}")
            pool.ask("POST", "/v1/pool/m/sleep")
            while pool.pool()["models"]["m"]["state"] != "asleep":
                time.sleep(0.1)
            if "min_warm = 1" in file:
                pool.complete("m")
            time.sleep(SETTLE_S)
            others = OtherWork()
            with _Instances(pool) as instances:
                answers = asyncio.run(_ask_all(pool.port, requests))
                time.sleep(max(0.0, seconds - instances.age_s))
            results[trace] = _real_figures(answers, instances.instance_s)
            results[trace]["other_cores"] = round(others.cores(), 2)
    return results


def _real_figures(answers: list[tuple[float, str]], instance_s: float) -> dict[str, Any]:
    times = sorted(first_s for first_s, _ in answers)
    return {
        "cold_share": sum(start != "warm" for _, start in answers) / len(answers),
        "p50_s": times[round(0.5 * (len(times) - 1))],
        "p99_s": times[round(0.99 * (len(times) - 1))],
        "instance_s": instance_s,
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


async def _ask_all(port: int, requests: list[ArrivedRequest]) -> list[tuple[float, str]]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        began_s = time.monotonic()

        async def one(number: int, request: ArrivedRequest) -> tuple[float, str]:
            await asyncio.sleep(max(0.0, began_s + request.t_s - time.monotonic()))
            return await _ask(session, port, request, number)

        return await asyncio.gather(*(one(*numbered) for numbered in enumerate(requests)))


async def _ask(
    session: aiohttp.ClientSession, port: int, request: ArrivedRequest, number: int
) -> tuple[float, str]:
    """Time to the first token, and what the request waited for."""
    chance = random.Random(f"{time.monotonic_ns()} {number}")
    body = {
        "model": "m",
        "prompt": chance.choices(PROMPT_TOKENS, k=max(1, request.prompt_tokens)),
        "max_tokens": max(1, request.output_tokens),
        "temperature": 0,
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
        return first_s, answer.headers.get("x-teneral-start", "direct")


def _search_speed() -> dict[str, float]:
    requests = synthesize("bursty:rate=60,on=40,off=60,duration=4200,seed=1", model="m")[:100_000]
    from teneral.handlers.pool.values import Model
    from teneral.infra.plan.search import search

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
            [
                run["run"],
                str(run["requests"]),
                *pairs,
                f"{real['instance_s']:.0f} / {plan['instance_s']:.0f}",
                f"{real['other_cores']:.2f}",
            ]
        )
    columns = [
        "trace; pool: real / planned",
        "requests",
        "cold",
        "p50 s",
        "p99 s",
        "instance-s",
        "others' cores",
    ]
    lines = [title(report, "pool plans", f"{report['seconds']:g} s each"), table(columns, rows)]
    if report["results"]:
        errors, goals = _errors(report["results"]), report["goals"]
        lines.append(
            "median errors: "
            + ", ".join(f"{key} {error:.3f} (goal {goals[key]})" for key, error in errors.items())
        )
    before, after = report["profile"], report["profile_after"]
    lines.append(
        "figures after the replays, relative to those before: "
        + ", ".join(
            f"{name} {after[key] / before[key]:.2f}x"
            for name, key in (("prompts' tokens/s", "prefill_tokens_s"), ("starts", "start_s"))
        )
    )
    search = report["search"]
    lines.append(
        f"search: {search['requests']:,} requests × {search['pools']} pools in {search['seconds']:.1f} CPU-s "
        f"(goal {report['goals']['search_s']:g})"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
