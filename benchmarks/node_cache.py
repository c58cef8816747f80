"""The node cache: its cost to the load that fills it, and its gain for the next one.

    python -m benchmarks.node_cache [--like qwen2.5-0.5b] [--rates 0 200] [--rounds 5] [--save]

Four loads of the packed artifact over HTTP take turns, each a process of its own: without a cache, with an empty one,
with a full one whose files are in the page cache, and with a full one whose files have to come from the disk. The
store is another process. Rate 0 means unthrottled. GB are 10^9 bytes. Trust the ratios.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.report import begin, finish, plain, table, title
from benchmarks.store import prepare

KINDS = ("without", "filling", "warm", "from disk")
LATENCY_MS = 5.0  # to the first byte


def main() -> None:
    options = _options()
    if options.child:
        print(json.dumps(_load(options.child, options.cache)))
        return
    root = Path(options.work) / options.like / "store"
    prepare(options.like, root)
    report = begin("node_cache", model=options.like, latency_ms=LATENCY_MS, rounds=options.rounds)
    report["results"] = [_measure(root, rate_mb_s, options) for rate_mb_s in options.rates]
    finish(report, render(report), save=options.save)


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    rows = []
    for result in report["results"]:
        without, rate_mb_s = result["without"], result["rate_mb_s"]
        for kind in KINDS:
            row = result[kind]
            did = row["cache"] or {}
            rows.append(
                [
                    f"{rate_mb_s:g} MB/s" if rate_mb_s else "unthrottled",
                    kind,
                    f"{row['elapsed_s']:.2f}",
                    f"{row['elapsed_s'] / without['elapsed_s']:.2f}x",
                    f"{row['cpu_s']:.2f}",
                    f"{row['cpu_s'] / without['cpu_s']:.2f}x",
                    str(did.get("num_written", "")),
                    str(did.get("num_dropped", "")),
                    f"{did.get('read_bytes', 0) / row['stored_bytes']:.0%}",
                ]
            )
    columns = ["store", "cache", "s", "relative to none", "CPU-s", "relative to none"]
    columns += ["parts written", "dropped", "read from disk"]
    words = [
        report["model"],
        f"{report['latency_ms']:g} ms to the first byte",
        f"medians of {report['rounds']} rounds",
    ]
    return "\n".join([title(report, *words), table(columns, rows)])


def _measure(root: Path, rate_mb_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, by what the cache held."""
    command = [sys.executable, "-m", "tests.support.store_server", "--root", str(root)]
    command += ["--latency-ms", str(LATENCY_MS)]
    command += ["--rate-mb-s", str(rate_mb_s)] if rate_mb_s else []
    cache = Path(options.work) / "node-cache"
    rows: dict[str, list[dict[str, Any]]] = {kind: [] for kind in KINDS}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as store:
        assert store.stdout is not None
        try:
            url = f"{store.stdout.readline().strip()}/models/packed"
            for _ in range(options.rounds):
                shutil.rmtree(cache, ignore_errors=True)
                rows["without"].append(_run(url, None))
                rows["filling"].append(_run(url, cache))
                while _run(url, cache)["cache"]["num_misses"]:
                    pass  # what was dropped while the store was fast
                rows["warm"].append(_run(url, cache))
                _drop_from_memory(cache)
                rows["from disk"].append(_run(url, cache))
        finally:
            store.terminate()
    return {"rate_mb_s": rate_mb_s, **{kind: _median(rows[kind]) for kind in KINDS}}


def _run(url: str, cache: Path | None) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.node_cache", "--child", url]
    command += ["--cache", str(cache)] if cache else []
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    row: dict[str, Any] = json.loads(output)
    return row


def _load(url: str, cache: str | None) -> dict[str, Any]:
    from teneral.loader.artifact import open_artifact
    from teneral.loader.load.load import WeightLoad
    from teneral.loader.load.options import LoadOptions
    from teneral.loader.sources.open import open_source

    source = open_source(url)
    manifest = open_artifact(source)
    cpu_s, start_s = time.process_time(), time.monotonic()
    with WeightLoad(source, manifest, options=LoadOptions(cache_dir=cache)) as load:
        load.start()
        for group in manifest.groups:
            load.wait(group.index)
        elapsed_s, spent_s = time.monotonic() - start_s, time.process_time() - cpu_s
        load.join()
        load.join_cache()
        figures = plain(load.statistics())
    source.close()
    return figures | {"elapsed_s": elapsed_s, "cpu_s": spent_s}


def _drop_from_memory(cache: Path) -> None:
    for path in cache.glob("*/*"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of median time, with the median CPU time, and everybody's times."""
    rows = sorted(rows, key=lambda row: row["elapsed_s"])
    cpu_s = statistics.median(row["cpu_s"] for row in rows)
    return rows[len(rows) // 2] | {"cpu_s": cpu_s, "all_s": [round(row["elapsed_s"], 3) for row in rows]}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--like", default="qwen2.5-0.5b", help="a shape of `teneral synth`")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 200.0], help="MB/s, 0 for no limit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "teneral-bench"))
    parser.add_argument("--child", metavar="URL", help=argparse.SUPPRESS)
    parser.add_argument("--cache", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
