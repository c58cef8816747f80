"""Peak memory of a cold start in addition to its weights: the memory of loading and serving themselves.

    python -m benchmarks.memory [--like qwen2.5-0.5b] [--rate-mb-s 0 200] [--rounds 3] [--only PATTERN] [--save]

Watched are the server and every process that belongs to it, from its start to its first token, together: the sum of
the proportional set sizes of their anonymous and shared memory, in which memory that they share counts once. (Pages of
program files are left out: the system drops them when it needs room.) Taken off are the weights themselves, and what a
process takes that has imported all that the server imports and has no model. The KV pool takes memory only as it is
written, and is counted with the rest. *serving* is the same some seconds after an answer, of the packed model in a
local folder. `--only serving` measures nothing else; no other program's load changes it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from benchmarks.cold_starts import serve
from benchmarks.processes import Sampler, environment
from benchmarks.report import begin, finish, median, new_parser, note, table, title
from benchmarks.server import Server
from benchmarks.store import MODELS, StoreProcess, prepare

MIB = 1024 * 1024
SERVING = "serving"
GOAL_MIB = 256
SAMPLE_PERIOD_S = 0.03
KV_BYTES = 64 * MIB
GOAL_SERVING_MB = 120
REST_S = 4.0  # until a server has returned its start's memory
WITHOUT_MODEL = """
import sys
import teneral.handlers.serve, teneral.handlers.http.server, teneral.runtime.instance
import teneral.runtime.engine.engine, teneral.runtime.models.build, teneral.runtime.weights
import teneral.runtime.text.remote
print("ready", flush=True)
sys.stdin.read()
"""


def main() -> None:
    options = _options()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    report = begin("memory", model=options.like, rounds=options.rounds, kv_mib=KV_BYTES // MIB)
    weight_bytes = weight_bytes_of(str(root / "models" / "packed"))
    report["weights_mib"] = weight_bytes / MIB
    report["without_model_mib"] = _bytes_without_model() / MIB
    report["runs"] = []
    if not options.only or re.search(options.only, SERVING):
        report["serving_mb"] = _serving_mb(root / "models" / "packed", weight_bytes)
    if options.only == SERVING:
        options.rate_mb_s = []
    for rate_mb_s in options.rate_mb_s:
        with StoreProcess(root, rate_mb_s=rate_mb_s, latency_ms=options.latency_ms) as store:
            samples: dict[str, list[dict[str, float]]] = {model: [] for model in MODELS}
            for _ in range(options.rounds):
                for model, rows in samples.items():
                    if options.only and not re.search(options.only, model):
                        continue
                    rows.append({"peak_mib": _peak_mib(model, store, weight_bytes)})
        for model, rows in samples.items():
            if rows:
                run = {"rate_mb_s": rate_mb_s, "model": model, "peak_mib": median(rows, "peak_mib")}
                report["runs"].append(run | {"all_mib": [round(row["peak_mib"]) for row in rows]})
    finish(report, render(report), save=options.save)


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    base_mib = report["weights_mib"] + report["without_model_mib"]
    rows = [
        [
            f"{run['rate_mb_s']:g} MB/s" if run["rate_mb_s"] else "unthrottled",
            run["model"],
            f"{run['peak_mib']:,.0f}",
            f"{report['weights_mib']:,.0f}",
            f"{report['without_model_mib']:,.0f}",
            f"{run['peak_mib'] - base_mib:,.0f}",
        ]
        for run in report["runs"]
    ]
    columns = [
        "store",
        "model",
        "peak, MiB",
        "weights",
        "the process without a model",
        f"in addition ({GOAL_MIB} allowed)",
    ]
    head = title(
        report, f"{report['model']}, a KV pool of up to {report['kv_mib']} MiB", f"{report['rounds']} rounds"
    )
    text = f"{head}\n{table(columns, rows)}" if rows else head
    if "serving_mb" in report:
        text += f"\nserving, in addition to the weights: {report['serving_mb']:.0f} MB ({GOAL_SERVING_MB} allowed)"
    return text


def _options() -> argparse.Namespace:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument(
        "--rate-mb-s", type=float, nargs="+", default=[0.0, 200.0], help="rates of the store, 0 for no limit"
    )
    parser.add_argument("--latency-ms", type=float, default=15.0)
    return parser.parse_args()


class Watch(Sampler):
    """The most memory that this process's descendants had together while it was open, by what they are."""

    def __init__(self, *, but: set[int], weight_bytes: int) -> None:
        """`but` are the processes that do not count."""
        super().__init__(SAMPLE_PERIOD_S)
        self.peak: dict[str, int] = {}
        self._weight_bytes = weight_bytes
        self._but = but

    def look(self) -> None:
        now = held_bytes(descendants(os.getpid()) - self._but)
        # Processes are looked at one after the other: pages that two of them map just then are counted twice.
        now["shared"] = min(now.get("shared", 0), self._weight_bytes)
        if sum(now.values()) > sum(self.peak.values()):
            self.peak = now


def descendants(pid: int) -> set[int]:
    found: set[int] = set()
    todo = [pid]
    while todo:
        with suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{todo.pop()}/task").iterdir():
                with suppress(FileNotFoundError, ProcessLookupError):
                    todo += map(int, (task / "children").read_text().split())
        found.update(todo)
    return found


def held_bytes(pids: Iterable[int]) -> dict[str, int]:
    """Anonymous memory by process, and the memory that is shared, which is the weights' alone."""
    held: Counter[str] = Counter()
    for pid in pids:
        with suppress(FileNotFoundError, ProcessLookupError):
            fields = dict(re.findall(r"(Pss_\w+):\s+(\d+) kB", Path(f"/proc/{pid}/smaps_rollup").read_text()))
            held["shared"] += int(fields.get("Pss_Shmem", 0)) * 1024
            held[f"process {pid}"] += int(fields.get("Pss_Anon", 0)) * 1024
    return dict(held)


def peak_parts(run: Callable[[], object], *, weight_bytes: int) -> dict[str, int]:
    """The bytes that the processes which `run` starts held together at their most, by what they are."""
    with Watch(but=descendants(os.getpid()), weight_bytes=weight_bytes) as watch:
        run()
    return watch.peak


def _peak_mib(model: str, store: StoreProcess, weight_bytes: int) -> float:
    def run() -> None:
        serve(f"s3://models/{model}", "--kv-bytes", str(KV_BYTES), variables=store.environment())

    peak = peak_parts(run, weight_bytes=weight_bytes)
    peak_mib = sum(peak.values()) / MIB
    parts = ", ".join(f"{name} {size_bytes / MIB:,.0f}" for name, size_bytes in sorted(peak.items()))
    note(f"{model}: {peak_mib:,.0f} MiB at most: {parts}")
    return peak_mib


def _serving_mb(model: Path, weight_bytes: int) -> float:
    """MB (10**6 bytes) in addition to the weights after an answer."""
    with Server(str(model)) as server:
        server.wait_ready()
        server.complete([1, 2, 3], 4)
        time.sleep(REST_S)
        held = held_bytes({server.pid} | descendants(server.pid))
    parts = ", ".join(f"{name} {size_bytes / 1e6:,.0f}" for name, size_bytes in held.items())
    note(f"serving, weights {weight_bytes / 1e6:,.0f} MB: {parts}")
    return (sum(held.values()) - weight_bytes) / 1e6


def _bytes_without_model() -> int:
    """The memory of all imports of a server, and nothing else."""
    command = [sys.executable, "-c", WITHOUT_MODEL]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment()
    ) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        if process.stdout.readline().strip() != "ready":
            raise SystemExit("the server's modules could not be imported")
        size_bytes = sum(held_bytes([process.pid]).values())
        process.stdin.close()
    return size_bytes


def weight_bytes_of(folder: str) -> int:
    from teneral.loader.artifact import open_artifact
    from teneral.loader.sources.open import open_source

    return open_artifact(open_source(folder)).weight_bytes


if __name__ == "__main__":
    main()
