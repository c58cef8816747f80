"""Loading at full speed, Teneral and its peers: GB/s of weights and CPU seconds a GB, without a model or a server.

    python -m benchmarks.throughput [--over http tls file] [--rounds 3] [--only PATTERN] [--save]

Compared are Teneral's ways (`own_load.py`) on the packed artifact and on plain safetensors with runai-model-streamer,
tensorizer and `safetensors.torch.load_file` (`peers/load_tensors.py`), from an S3 store without a limit over plain HTTP
and over TLS, and from files in the page cache. Every run is a process of its own, and runs take turns. The store is a
process too, on the same cores; its CPU time is not counted, that of all helpers is. Peers' imports are over before
their clock starts; that of Teneral's loader's own process is in its time. A standby's imports and its memory are from
before (docs/standby.md): where all others take theirs from the system while the clock runs, it shows what that costs.

A second table shows what a load and `import torch` cost each other. Peers have no such line: they need torch first. GB
are 10^9 bytes. Peak memory is of one more run, as the sum of all processes' proportional set sizes, torch included
where a way imports it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import peer_environment
from benchmarks.cold_start import PEERS, left_out
from benchmarks.peer_environment import PROGRAMS, PeerEnvironment
from benchmarks.processes import MemoryWatch, RunError, environment
from benchmarks.report import begin, finish, median, new_parser, note, table, title
from benchmarks.rounds import failures, selected
from benchmarks.store import StoreProcess, prepare, warm

GB = 1e9
OVER = {"http": "S3 over HTTP", "tls": "S3 over TLS", "file": "local files"}
RUN_TIMEOUT_S = 180.0
BASE = "runai-model-streamer"
ALONE = "import torch"


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--over", nargs="+", choices=OVER, default=list(OVER))
    parser.add_argument("--latency-ms", type=float, default=5.0)
    options = parser.parse_args()
    root = options.work / options.like / "store"
    peers = peer_environment.find(options.work)
    prepare(options.like, root)
    peer_environment.make_tensorized(peers, root)
    report = begin(
        "throughput",
        model=options.like,
        latency_ms=options.latency_ms,
        rounds=options.rounds,
        peers=peers.versions,
    )
    report["results"] = {}
    report["failed"] = {}
    for over in options.over:
        with _place(over, root, options.latency_ms) as (base, variables):
            commands = selected(_commands(over, base, peers), options.only)
            runs = Runs(over, root, commands, environment(variables), report["failed"])
            report["results"][over] = runs.measure(options.rounds)
    report["left_out"] = left_out(peers)
    finish(report, render(report), save=options.save)


@contextmanager
def _place(over: str, root: Path, latency_ms: float) -> Iterator[tuple[str, dict[str, str]]]:
    """The address of the models, and the variables that clients need."""
    if over == "file":
        yield str(root / "models"), {}
        return
    with StoreProcess(root, latency_ms=latency_ms, tls=over == "tls") as store:
        yield "s3://models", store.environment()


def _commands(over: str, base: str, peers: PeerEnvironment) -> dict[str, list[str]]:
    own = [sys.executable, "-m", "benchmarks.own_load"]
    other = [str(peers.python), str(PROGRAMS / "load_tensors.py")]
    commands = {}
    for model in ("packed", "plain"):
        address = f"{base}/{model}"
        commands[f"teneral, {model}, own process"] = [*own, "process", address]
        commands[f"teneral, {model}, standby with memory"] = [*own, "standby", address]
        commands[f"teneral, {model}, threads"] = [*own, "threads", address]
        commands[f"teneral.load_file, {model}"] = [*own, "load_file", address]
    plain_file = f"{base}/plain/model.safetensors"
    if not peers.lacks(*PEERS[BASE][2]):
        commands[BASE] = [*other, "runai", plain_file]
    if not peers.lacks("tensorizer"):
        commands["tensorizer"] = [*other, "tensorizer", f"{base}/tensorized/model.tensors"]
    if over == "file":
        commands["safetensors.torch.load_file"] = [*other, "safetensors", plain_file]
    else:
        commands[ALONE] = [*own, "torch", ""]
        for way, words in (("process", "own process"), ("threads", "threads")):
            for model in ("packed", "plain"):
                commands[f"{ALONE} during {model}, {words}"] = [*own, f"{way}+torch", f"{base}/{model}"]
    return commands


@dataclass
class Runs:
    """All commands over one kind of connection."""

    over: str
    root: Path
    commands: Mapping[str, list[str]]
    environment: Mapping[str, str]
    failed: dict[str, str]

    def measure(self, rounds: int) -> dict[str, dict[str, Any]]:
        samples: dict[str, list[dict[str, Any]]] = {name: [] for name in self.commands}
        for number in range(rounds):
            for name, rows in samples.items():
                row = self._run(name, watch=False)
                if row:
                    rows.append(row)
                    times = ", ".join(f"{key} {row[key]:.2f}" for key in row if key.endswith("_s"))
                    note(f"{self.over}, round {number + 1}: {name:40} {times}")
        results = {name: _medians(rows) for name, rows in samples.items() if rows}
        for name, result in results.items():
            if not name.startswith(ALONE):
                result["peak_pss_mb"] = self._run(name, watch=True).get("peak_pss_mb")
        return results

    def _run(self, name: str, *, watch: bool) -> dict[str, Any]:
        key = f"{name} ({OVER[self.over]})"
        if key in self.failed:
            return {}
        warm(self.root)
        try:
            return run(self.commands[name], self.environment, watch=watch)
        except RunError as error:
            self.failed[key] = str(error)
            note(f"{key} failed, and is left out: {error}")
            return {}


def run(command: list[str], variables: Mapping[str, str], *, watch: bool) -> dict[str, Any]:
    """The report of one process about its load, with its peak memory if watched. Raises `RunError`."""
    with subprocess.Popen(
        command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        memory = MemoryWatch(process.pid) if watch else None
        try:
            with memory or nullcontext():
                output, log = process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            process.kill()
            raise RunError(f"not done after {RUN_TIMEOUT_S:g} s") from error
    if process.returncode:
        raise RunError(f"ended with {process.returncode}: {log[-1000:]}")
    row: dict[str, Any] = json.loads(output.splitlines()[-1])
    return row | ({"peak_pss_mb": memory.peak_bytes / 1e6} if memory else {})


def _medians(rows: list[dict[str, Any]]) -> dict[str, Any]:
    result: dict[str, Any] = {key: median(rows, key) for key in rows[0]}
    if "weight_bytes" in result:
        gb = result["weight_bytes"] / GB
        result["gb_s"] = gb / result["elapsed_s"]
        result["cpu_s_a_gb"] = result["cpu_s"] / gb
        result["all_s"] = [round(row["elapsed_s"], 3) for row in rows]
    return result


def render(report: dict[str, Any]) -> str:
    """The report as tables for people."""
    parts = [title(report, report["model"], f"medians of {report['rounds']} rounds")]
    for over, results in report["results"].items():
        base = results.get(BASE)
        rows = [_row(name, row, base) for name, row in results.items() if not name.startswith(ALONE)]
        columns = [OVER[over], "GB/s", "CPU-s a GB", f"speed relative to {BASE}", "CPU time", "peak MB"]
        parts += [table(columns, rows), ""]
    imports = [row for over, results in report["results"].items() for row in import_during(over, results)]
    if imports:
        columns = [
            "at the same time",
            "import torch, s",
            "relative to the import alone",
            "load, GB/s",
            "relative to the load alone",
        ]
        parts += [table(columns, imports), ""]
    parts.append(failures(report["failed"], report["left_out"]))
    return "\n".join(parts)


def _row(name: str, row: dict[str, Any], base: dict[str, Any] | None) -> list[str]:
    ratios = ["–", "–"]
    if base and row is not base:
        ratios = [f"{row['gb_s'] / base['gb_s']:.1f}x", f"{row['cpu_s_a_gb'] / base['cpu_s_a_gb']:.2f}x"]
    peak = f"{row['peak_pss_mb']:,.0f}" if row.get("peak_pss_mb") else "–"
    return [name, f"{row['gb_s']:.2f}", f"{row['cpu_s_a_gb']:.2f}", *ratios, peak]


def import_during(over: str, results: dict[str, dict[str, Any]]) -> Iterable[list[str]]:
    """One row a way to load: what it and an `import torch` cost each other."""
    alone = results.get(ALONE)
    for name, row in results.items():
        if alone is None or not name.startswith(f"{ALONE} during "):
            continue
        quiet = results.get(f"teneral, {name.removeprefix(f'{ALONE} during ')}")
        yield [
            f"{name.removeprefix(f'{ALONE} during ')}, {OVER[over]}",
            f"{row['import_s']:.2f}",
            f"{row['import_s'] / alone['import_s']:.2f}x",
            f"{row['gb_s']:.2f}",
            f"{row['gb_s'] / quiet['gb_s']:.2f}x" if quiet else "–",
        ]


if __name__ == "__main__":
    main()
