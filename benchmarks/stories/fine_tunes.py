"""A thousand fine-tunes on one warm base: the first tokens of requests that name them, and what memory that takes.

    python -m benchmarks.stories.fine_tunes [--names 1000] [--requests 600] [--rank 4] [--budget 256] [--rate 200]
                                            [--rounds 3] [--save]

A base lies in a local folder, --names adapters of rank --rank, each with weights of its own, in an S3 store that gives
--rate MB/s. Requests choose their adapter by Zipf's law (the n-th most popular one is asked for 1/n as often), 4 at a
time, from one warm server that holds at most --budget MiB of adapters. A request is *new* where its adapter had to be
read, *there* where it was in memory.

    start → token     a cold process, base and adapter from the store, first token of a request for the adapter
    the base alone    the same for a request of the base

and of the warm server: the median and the 95th percentile of both kinds, loads, evictions and memory.
"""

from __future__ import annotations

import http.client
import json
import random
import re
import statistics
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import cold_starts
from benchmarks.adapters import write_adapter
from benchmarks.processes import tree_bytes
from benchmarks.report import begin, finish, new_parser, note, table, title, where
from benchmarks.server import Server
from benchmarks.store import StoreProcess, prepare, warm
from benchmarks.tasks import random_prompt

NAME = "stories.fine_tunes"
AT_ONCE = 4
PROMPT_TOKENS = 32
MIB = 1 << 20


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--names", type=int, default=1000)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--rank", type=int, default=4)
    parser.add_argument("--budget", type=int, default=256, help="--adapters-bytes, in MiB")
    parser.add_argument("--rate", type=float, default=200.0, help="of the store, in 10**6 bytes a second")
    options = parser.parse_args()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    base = root / "models" / "plain"
    names = [f"rank{options.rank}-{number:04}" for number in range(options.names)]
    note(f"writing {len(names)} adapters")
    sizes = [write_adapter(root / "adapters" / name, base, options.rank) for name in names]
    facts = {
        "rate_mb_s": options.rate,
        "names": len(names),
        "rank": options.rank,
        "adapter_bytes": max(sizes),
    }
    facts |= {"budget_bytes": options.budget * MIB, "requests": options.requests}
    report = begin(NAME, model=options.like, rounds=options.rounds, **facts)
    with StoreProcess(root, rate_mb_s=options.rate) as store:
        flags = ("--adapters", "s3://adapters/{name}", "--adapters-bytes", f"{options.budget}MiB")
        report["cold"] = cold(store, root, names, options.rounds)
        with Server(str(base), *flags, variables=store.environment()) as server:
            server.wait_ready()
            report["warm"] = warm_requests(server, names, options.requests)
    finish(report, render(report), save=options.save)


def cold(store: StoreProcess, root: Path, names: list[str], rounds: int) -> dict[str, float]:
    """Seconds from a process's start to the first token, of the base and of an adapter."""
    flags = ("--adapters", "s3://adapters/{name}")
    times: dict[str, list[float]] = {"base": [], "adapter": []}
    for number in range(rounds):
        for row, asked in (("base", "model"), ("adapter", f"model:{names[-1 - number]}")):
            warm(root)
            start = cold_starts.serve(
                "s3://models/packed", *flags, variables=store.environment(), asked=asked
            )
            times[row].append(start.first_token_s)
            note(f"round {number + 1}: cold {row}: {start.first_token_s:.2f} s")
    return {row: statistics.median(values) for row, values in times.items()}


def warm_requests(server: Server, names: list[str], count: int) -> dict[str, Any]:
    """First tokens and counts of requests by Zipf's law."""
    chance = random.Random(0)
    weights = [1 / (place + 1) for place in range(len(names))]
    wanted = chance.choices(names, weights, k=count)
    prompts = [random_prompt(chance, PROMPT_TOKENS) for _ in wanted]
    server.complete(prompts[0], 8)
    bare = statistics.median(
        server.complete(random_prompt(chance, PROMPT_TOKENS), 1).token_times_s[0] for _ in range(20)
    )
    before = tree_bytes([server.pid])
    peak = 0

    def ask(job: tuple[str, list[int]]) -> tuple[str, float]:
        name, prompt = job
        return name, server.complete(prompt, 1, model=f"model:{name}").token_times_s[0]

    alone: dict[str, list[float]] = {"new": [], "there": []}
    # One at a time first: a first token with company waits for the company's steps, too.
    for name, prompt in zip(wanted[:100], prompts[:100], strict=True):
        counted = _metrics(server)["misses_total"]
        _, first_s = ask((name, prompt))
        alone["new" if _metrics(server)["misses_total"] > counted else "there"].append(first_s)
    began_s = time.monotonic()
    with ThreadPoolExecutor(AT_ONCE) as threads:
        answers = list(threads.map(ask, zip(wanted[100:], prompts[100:], strict=True)))
        peak = tree_bytes([server.pid])
    seconds = time.monotonic() - began_s
    counts = _metrics(server)
    if counts["failures_total"]:
        raise SystemExit(f"{counts['failures_total']:g} adapters could not be loaded")
    return {
        "base_s": bare,
        "alone": {kind: _spread(times) for kind, times in alone.items()},
        "requests_s": len(answers) / seconds,
        "together": _spread([first_s for _, first_s in answers]),
        "names": len(set(wanted)),
        "counts": counts,
        "memory_bytes": before,
        "memory_after_bytes": peak,
    }


def _spread(times_s: list[float]) -> dict[str, float]:
    ordered = sorted(times_s)
    most = ordered[round(0.95 * (len(ordered) - 1))]
    return {"count": len(ordered), "p50_s": statistics.median(ordered), "p95_s": most}


def _metrics(server: Server) -> dict[str, float]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    try:
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
    finally:
        connection.close()
    return {
        name: float(value)
        for name, value in re.findall(r"^teneral_adapters_(\w+)\S* (\S+)$", text, re.MULTILINE)
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for people."""
    words = [report["model"], f"{report['names']:,} adapters of {report['adapter_bytes'] / 1e6:.1f} MB"]
    return "\n".join(
        [title(report, "A thousand fine-tunes", *words), _table(report), json.dumps(report["warm"]["counts"])]
    )


def section(report: Mapping[str, Any]) -> str:
    """The figures of docs/stories/fine-tunes.md."""
    results, counts = report["warm"], report["warm"]["counts"]
    each, together = report["adapter_bytes"] / 1e6, report["names"] * report["adapter_bytes"] / 1e9
    before, after = (results[key] / 1e6 for key in ("memory_bytes", "memory_after_bytes"))
    sentences = [
        f"{report['names']:,} adapters of rank {report['rank']} ({each:.1f} MB each, {together:.1f} GB together),",
        f"a base of the shape of {report['model']} with random weights, a store of {report['rate_mb_s']:g} MB/s,",
        f"{where(report)}:\n\n{_table(report)}\n",
        f"The {report['requests']:,} requests named {results['names']:,} adapters: {counts['hits_total']:,.0f} found",
        f"theirs in memory, {counts['misses_total']:,.0f} had it read, {counts['evictions_total']:,.0f} adapters",
        f"made way. The server had {before:,.0f} MB before the first and {after:,.0f} MB after the last,",
        f"with a budget of {report['budget_bytes'] / MIB:g} MiB for adapters.\n",
    ]
    return "\n".join(sentences)


def _table(report: Mapping[str, Any]) -> str:
    warm_, cold_ = report["warm"], report["cold"]
    rows = [
        ["cold server, the base", f"{cold_['base']:.2f} s", "–"],
        ["cold server, an adapter with its base", f"{cold_['adapter']:.2f} s", "–"],
        ["warm server, the base", f"{warm_['base_s']:.3f} s", "–"],
    ]
    names = {"new": "warm server, an adapter that is read", "there": "warm server, an adapter in memory"}
    rows += [
        [names[kind], f"{spread['p50_s']:.3f} s", f"{spread['p95_s']:.3f} s"]
        for kind, spread in warm_["alone"].items()
    ]
    together = warm_["together"]
    label = f"warm server, {AT_ONCE} requests at a time ({warm_['requests_s']:.1f} a second)"
    rows.append([label, f"{together['p50_s']:.3f} s", f"{together['p95_s']:.3f} s"])
    return table(["request → first token (cold: start → token)", "median", "95th percentile"], rows)


if __name__ == "__main__":
    main()
