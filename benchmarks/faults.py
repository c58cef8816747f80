"""Loading through faults: the extra time over a clean load, and the extra requests and bytes at the store.

    python -m benchmarks.faults [--like qwen2.5-0.5b] [--rate-mb-s 200] [--rounds 3] [--save]

Every run is a process of its own that loads the packed artifact with `WeightLoad` over HTTP, from a store that is a
process of its own with faults at random (a new seed each round); wrong bytes come regularly, so that every round has
some and no part is wrong twice by chance. Runs take turns, the clean one among them. Requests and bytes are what the
store counted, held against the clean run. The last column is one run without hedging: what time limits alone achieve.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import begin, finish, median, table, title
from benchmarks.store import prepare

CLEAN = "none"
FAULTS: dict[str, list[str]] = {  # flags of the store server
    CLEAN: [],
    "1 % of ranges stall for ever": ["--stall-share", "0.01"],
    "5 % of ranges stall for ever": ["--stall-share", "0.05"],
    "2 % of first bytes take 2 s": ["--late-share", "0.02"],
    "5 % of bodies are cut": ["--cut-share", "0.05"],
    "1 % of ranges trickle at 10 kB/s": ["--trickle-share", "0.01"],
    "one connection at 500 kB/s": ["--slow-connections", "1"],
    "one connection dead after its first range": ["--dead-connections", "1"],
    "every connection capped at 30 MB/s": ["--connection-rate-mb-s", "30"],
    "5 % of answers are 503": ["--busy-share", "0.05"],
    "nothing but 503 for 1 s": ["--storm-s", "1"],
    "one range in 80 with a flipped bit": ["--flip-every", "80"],
    "one range in 80 with another's bytes": ["--swap-every", "80"],
    "stalls, late, cuts, trickles, 503: 1 % each": [
        "--stall-share", "0.01", "--late-share", "0.01", "--cut-share", "0.01", "--trickle-share", "0.01",
        "--busy-share", "0.01",
    ],
}  # fmt: skip
TIME_LIMIT_S = 60.0  # of one run; a trickle without a time limit may never end


def main() -> None:
    options = _options()
    if options.child:
        print(json.dumps(_load(options.url, options.connections, hedges=not options.no_hedges)))
        return
    root = Path(options.work) / options.like / "store"
    prepare(options.like, root)
    report = begin(
        "faults",
        model=options.like,
        rate_mb_s=options.rate_mb_s,
        latency_ms=options.latency_ms,
        connections=options.connections,
        rounds=options.rounds,
    )
    samples: dict[str, list[dict[str, Any]]] = {name: [] for name in FAULTS}
    for number in range(options.rounds):
        for name, rows in samples.items():
            rows.append(_run(root, name, seed=number, hedges=True, options=options))
    unhedged = {name: _run(root, name, seed=0, hedges=False, options=options) for name in FAULTS}
    report["results"] = {
        name: {"runs": samples[name], "without_hedging": unhedged[name], "flags": FAULTS[name]}
        for name in FAULTS
    }
    finish(report, render(report), save=options.save)


def render(report: dict[str, Any]) -> str:
    """The report as a table for people: medians, and ratios to the clean load of the same report."""
    link = f"{report['rate_mb_s']:g} MB/s, {report['latency_ms']:g} ms to the first byte"
    columns = ["fault", "s", "of a clean load", "worst round", "requests", "bytes", "hedges (won)", "retries"]
    columns += ["throttled", "parts fetched again", "hedging off"]
    rows = []
    clean = report["results"][CLEAN]["runs"]
    clean_s, clean_requests, clean_bytes = (
        median(clean, key) for key in ("elapsed_s", "store_requests", "store_bytes")
    )
    for name, result in report["results"].items():
        runs = [run for run in result["runs"] if "error" not in run]
        refused = len(result["runs"]) - len(runs)
        if not runs:
            rows.append([name, "refused", *[""] * (len(columns) - 2)])
            continue
        off = result["without_hedging"]
        cells = [
            name + (f" ({refused} refused)" if refused else ""),
            f"{median(runs, 'elapsed_s'):.2f}",
            f"{median(runs, 'elapsed_s') / clean_s:.2f}x",
            f"{max(run['elapsed_s'] for run in runs) / clean_s:.2f}x",
            f"{median(runs, 'store_requests') / clean_requests:.3f}x",
            f"{median(runs, 'store_bytes') / clean_bytes:.3f}x",
            f"{median(runs, 'hedges'):g} ({median(runs, 'hedges_won'):g})",
            f"{median(runs, 'retries'):g}",
            f"{median(runs, 'throttled'):g}",
            f"{median(runs, 'num_refetched_parts'):g}",
            off["error"] if "error" in off else f"{off['elapsed_s'] / clean_s:.2f}x",
        ]
        rows.append(cells)
    words = [
        report["model"],
        link,
        f"{report['connections']} connections",
        f"medians of {report['rounds']} rounds",
    ]
    return "\n".join([title(report, *words), table(columns, rows)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--like", default="qwen2.5-0.5b", help="a shape of `teneral synth`")
    parser.add_argument("--rate-mb-s", type=float, default=200.0)
    parser.add_argument("--latency-ms", type=float, default=15.0)
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "teneral-bench"))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-hedges", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(root: Path, name: str, *, seed: int, hedges: bool, options: argparse.Namespace) -> dict[str, Any]:
    """One load from a store with this fault; {"error": …} where there was none, or no end."""
    store = [sys.executable, "-m", "tests.support.store_server", "--root", str(root), "--totals"]
    store += ["--latency-ms", str(options.latency_ms), "--rate-mb-s", str(options.rate_mb_s)]
    store += ["--seed", str(seed), *FAULTS[name]]
    with subprocess.Popen(store, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = f"{server.stdout.readline().strip()}/models/packed"
            command = [sys.executable, "-m", "benchmarks.faults", "--child", "--url", url]
            command += ["--connections", str(options.connections), *([] if hedges else ["--no-hedges"])]
            done = subprocess.run(
                command, check=True, stdout=subprocess.PIPE, text=True, timeout=TIME_LIMIT_S
            )
            sample: dict[str, Any] = json.loads(done.stdout)
        except subprocess.TimeoutExpired:
            sample = {"error": f"not done after {TIME_LIMIT_S:g} s"}
        finally:
            server.terminate()
        totals = json.loads(server.stdout.readline())
    return sample | {"store_requests": totals["requests"], "store_bytes": totals["sent_bytes"]}


def _load(url: str, connections: int, *, hedges: bool) -> dict[str, Any]:
    """Load everything, as a server would."""
    from teneral.loader.artifact import open_artifact
    from teneral.loader.errors import TeneralError
    from teneral.loader.load.load import LoadOptions, WeightLoad
    from teneral.loader.sources.base import SourceOptions
    from teneral.loader.sources.http.source import HttpSource

    source = HttpSource(url, SourceOptions() if hedges else SourceOptions(hedge_after_s=0))
    manifest = open_artifact(source)
    start_s = time.monotonic()
    try:
        with WeightLoad(source, manifest, options=LoadOptions(connections=connections)) as load:
            load.start()
            for group in range(len(manifest.groups)):
                load.wait(group)
            elapsed_s = time.monotonic() - start_s
            load.join()
    except TeneralError as error:
        return {"error": type(error).__name__, "message": str(error)}
    refetched = load.statistics().num_refetched_parts
    return {"elapsed_s": elapsed_s, "num_refetched_parts": refetched, **source.statistics()._asdict()}


if __name__ == "__main__":
    main()
