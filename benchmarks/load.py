"""Loading alone: GB/s of weights and CPU seconds a GB, without a model, torch or a server.

    python -m benchmarks.load [--like qwen2.5-0.5b] [--rates 0 200] [--rounds 3] [--save]

`WeightLoad` loads the packed artifact and the plain safetensors over HTTP, each against a bare read of the same bytes
with as many connections into reused buffers, which is the floor for the network's share. The store is a process of
its own (its CPU is not counted), every run is one too, and runs take turns, since machines are noisy: trust the
ratios. Rate 0 means unthrottled. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.report import begin, finish, plain, table, title
from benchmarks.store import prepare

GB = 1e9
MODELS = ("packed", "plain")
WORK = ("load", "read")
READ_BYTES = 4 * 1024 * 1024  # a range of the bare read


def main() -> None:
    options = _options()
    if options.child:
        run = _load if options.child == "load" else _read
        print(json.dumps(run(options.url, options.connections)))
        return
    root = Path(options.work) / options.like / "store"
    prepare(options.like, root)
    report = begin(
        "load",
        model=options.like,
        latency_ms=options.latency_ms,
        connections=options.connections,
        connection_rate_mb_s=options.connection_rate_mb_s,
        rounds=options.rounds,
    )
    report["results"] = [_measure(root, rate_mb_s, options) for rate_mb_s in options.rates]
    finish(report, render(report), save=options.save)
    if options.json:
        print(json.dumps(report, indent=2))


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    how = f"up to {report['connections']} connections, {report['latency_ms']:g} ms to the first byte"
    if report["connection_rate_mb_s"]:
        how += f", {report['connection_rate_mb_s']:g} MB/s a connection"
    columns = [
        "store",
        "model",
        "s",
        "weights GB/s",
        "CPU-s a GB of weights",
        "relative to a bare read: time, CPU",
        "relative to the wire",
        "extra MB",
        "connections, ranges",
    ]
    rows = []
    for result in report["results"]:
        rate_mb_s = result["rate_mb_s"]
        for model in MODELS:
            load, read = result[model]["load"], result[model]["read"]
            wire_s = load["stored_bytes"] / (rate_mb_s * 1e6) if rate_mb_s else 0.0
            weights_gb = load["weight_bytes"] / GB
            cells = [
                f"{rate_mb_s:g} MB/s" if rate_mb_s else "unthrottled",
                model,
                f"{load['elapsed_s']:.2f}",
                f"{weights_gb / load['elapsed_s']:.2f}",
                f"{load['cpu_s'] / weights_gb:.2f}",
                f"{load['elapsed_s'] / read['elapsed_s']:.2f}x, {load['cpu_s'] / read['cpu_s']:.1f}x",
                f"{load['elapsed_s'] / wire_s:.3f} x {wire_s:.2f} s" if wire_s else "–",
                f"{(load['peak_bytes'] - load['weight_bytes']) / 1e6:.0f}",
                f"{load['statistics']['link']['connections']}, {load['statistics']['num_reads']} of "
                f"{load['statistics']['link']['mean_range_bytes'] / 1e6:.1f} MB",
            ]
            rows.append(cells)
    words = [report["model"], how, f"medians of {report['rounds']} rounds"]
    return "\n".join([title(report, *words), table(columns, rows)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--like", default="qwen2.5-0.5b", help="a shape of `teneral synth`")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.0, 200.0], help="MB/s, 0 for no limit")
    parser.add_argument("--latency-ms", type=float, default=5.0)
    parser.add_argument(
        "--connection-rate-mb-s", type=float, default=0.0, help="rate of each connection, 0 for no limit"
    )
    parser.add_argument(
        "--connections", type=int, default=32, help="most connections of a load; all of a bare read"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print the report as JSON too")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    parser.add_argument("--work", default=os.path.join(tempfile.gettempdir(), "teneral-bench"))
    parser.add_argument("--child", choices=WORK, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    return parser.parse_args()


def _measure(root: Path, rate_mb_s: float, options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the rounds, by model and kind of work."""
    command = [sys.executable, "-m", "tests.support.store_server", "--root", str(root)]
    command += ["--latency-ms", str(options.latency_ms)]
    command += ["--rate-mb-s", str(rate_mb_s)] if rate_mb_s else []
    if options.connection_rate_mb_s:
        command += ["--connection-rate-mb-s", str(options.connection_rate_mb_s)]
    store = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert store.stdout is not None
    try:
        url = store.stdout.readline().strip()
        samples: dict[tuple[str, str], list[dict[str, Any]]] = {
            (model, work): [] for model in MODELS for work in WORK
        }
        for _ in range(options.rounds):
            for (model, work), rows in samples.items():
                rows.append(_run_child(work, f"{url}/models/{model}", options.connections))
    finally:
        store.terminate()
        store.wait()
    return {
        "rate_mb_s": rate_mb_s,
        **{model: {work: _median(samples[model, work]) for work in WORK} for model in MODELS},
    }


def _run_child(work: str, url: str, connections: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.load", "--child", work, "--url", url]
    output = subprocess.run(
        [*command, "--connections", str(connections)], check=True, stdout=subprocess.PIPE, text=True
    ).stdout
    sample: dict[str, Any] = json.loads(output)
    return sample


def _median(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The row of median time, with everybody's times."""
    rows = sorted(rows, key=lambda row: row["elapsed_s"])
    middle = dict(rows[len(rows) // 2])
    middle["cpu_s"] = statistics.median(row["cpu_s"] for row in rows)
    return middle | {"all_s": [round(row["elapsed_s"], 3) for row in rows]}


def _load(url: str, connections: int) -> dict[str, Any]:
    """Load everything, as a server would."""
    from teneral.loader.artifact import open_artifact
    from teneral.loader.load.load import LoadOptions, WeightLoad
    from teneral.loader.sources.open import open_source

    source = open_source(url)
    manifest = open_artifact(source)
    before_bytes = _resident_bytes("VmRSS")
    cpu_s, start_s = time.process_time(), time.monotonic()
    with WeightLoad(source, manifest, options=LoadOptions(connections=connections)) as load:
        load.start()
        load.wait(0)
        first_s = time.monotonic() - start_s
        for group in range(len(manifest.groups)):
            load.wait(group)
        elapsed_s = time.monotonic() - start_s
        spent_s = time.process_time() - cpu_s
        load.join()
    source.close()
    return {
        "elapsed_s": elapsed_s,
        "first_group_s": first_s,
        "cpu_s": spent_s,
        "peak_bytes": _resident_bytes("VmHWM") - before_bytes,
        "weight_bytes": manifest.weight_bytes,
        "stored_bytes": sum(part.size_bytes for part in manifest.parts),
        "statistics": plain(load.statistics()),
    }


def _read(url: str, connections: int) -> dict[str, Any]:
    """Read the same bytes and do nothing with them: the least that their way over the network costs."""
    from teneral.loader.artifact import open_artifact
    from teneral.loader.sources.open import open_source

    source = open_source(url)
    manifest = open_artifact(source)
    stored_bytes = sum(part.size_bytes for part in manifest.parts)
    reads = deque(
        (manifest.blobs[part.blob].name, part.offset_bytes + start, min(READ_BYTES, part.size_bytes - start))
        for part in manifest.parts
        for start in range(0, part.size_bytes, READ_BYTES)
    )

    def work() -> None:
        buffer = memoryview(bytearray(READ_BYTES))
        while True:
            try:
                name, start, size_bytes = reads.popleft()
            except IndexError:
                return
            source.read_into(name, start, buffer[:size_bytes])

    threads = [threading.Thread(target=work) for _ in range(connections)]
    cpu_s, start_s = time.process_time(), time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    elapsed_s = time.monotonic() - start_s
    source.close()
    return {"elapsed_s": elapsed_s, "cpu_s": time.process_time() - cpu_s, "stored_bytes": stored_bytes}


def _resident_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii")
    found = re.search(rf"{field}:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


if __name__ == "__main__":
    main()
