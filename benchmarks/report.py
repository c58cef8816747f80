"""A benchmark's report: a table, and JSON with the facts needed to judge its figures."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import re
import shlex
import statistics
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

RESULTS = Path(__file__).parent / "results"
# A load average from which on a page says that the machine had other work: a benchmark before this one leaves 2 to 3.
BUSY = 4.0
PACKAGES = ("torch", "transformers", "numpy", "zstandard", "blake3", "boto3", "safetensors")


def new_parser(description: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark over a model has."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--like", default="qwen2.5-0.5b", help="a shape of `teneral synth`")
    parser.add_argument("--rounds", type=int, default=rounds)
    parser.add_argument("--only", help="run only the systems that match this pattern")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path(tempfile.gettempdir()) / "teneral-bench",
        help="folder for models and the peers' environment (default: %(default)s)",
    )
    return parser


def begin(benchmark: str, **facts: Any) -> dict[str, Any]:
    """The head of a report: how, when and where. `facts` are the benchmark's options."""
    return {
        "benchmark": benchmark,
        "command": shlex.join(["python", "-m", f"benchmarks.{benchmark}", *_arguments(sys.argv[1:])]),
        "settings": {name: os.environ[name] for name in sorted(os.environ) if name.startswith("TENERAL_")},
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "machine": machine(),
        "versions": versions(),
        "load_average": os.getloadavg()[0],
        **facts,
    }


def _arguments(given: list[str]) -> list[str]:
    """All but the folder to work in, which is one machine's own and changes no figure."""
    kept = list(given)
    while "--work" in kept:
        place = kept.index("--work")
        del kept[place : place + 2]
    return kept


def machine() -> dict[str, Any]:
    cores = len(os.sched_getaffinity(0))
    return {
        "name": f"{cores}-core-{platform.machine()}",
        "cores": cores,
        "cpu": _cpu_model(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def versions(packages: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Of those that are installed here."""
    found = {}
    for name in packages:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def title(report: Mapping[str, Any], *words: str) -> str:
    """The line above a table: what the benchmark did, where and when."""
    where = f"{report['machine']['name']} ({report['machine']['cpu']}), {report['date']}"
    return f"{', '.join(words)}\n{where}, load average {report['load_average']:.1f} when it began\n"


def where(report: Mapping[str, Any], *notes: str) -> str:
    """The machine, the command and the day, for a sentence in a page."""
    at = report["machine"]
    rounds = f"medians of {report['rounds']} rounds in turns" if report["rounds"] > 1 else "one round"
    how = f"`{report['command']}`; {rounds}, {report['date'][:10]}"
    if report["load_average"] >= BUSY:
        notes = (*notes, f"other work on the machine, load average {report['load_average']:.1f}")
    return f"on {at['cores']} cores ({at['cpu']}) without a GPU ({'; '.join([how, *notes])})"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """In Markdown, the first column to the left and the others to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def finish(report: Mapping[str, Any], rendered: str, *, save: bool) -> None:
    """Print the table; with `save`, keep the JSON under `results/`, by benchmark, variant, model, day, machine and
    processor.
    """
    print(rendered)
    if not save:
        return
    RESULTS.mkdir(exist_ok=True)
    labels = [
        report["benchmark"].replace("_", "-"),
        report.get("variant"),
        report.get("model"),
        report["date"][:10],
    ]
    processor = re.sub(r"[^a-z0-9]+", "-", report["machine"]["cpu"].lower()).strip("-")[:40]
    stem = "-".join(filter(None, [*labels, report["machine"]["name"], processor]))
    path = RESULTS / f"{stem}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"\nkept in {path}", file=sys.stderr)


def newest(benchmark: str, variant: str = "") -> dict[str, Any]:
    """The latest result of a benchmark that was kept. Raises SystemExit when there is none."""
    reports = [json.loads(path.read_text()) for path in RESULTS.glob("*.json")]
    reports = [report for report in reports if report["benchmark"] == benchmark and "versions" in report]
    reports = [report for report in reports if report.get("variant", "") == variant]
    if not reports:
        raise SystemExit(f"no result of {benchmark}: python -m benchmarks.{benchmark} --save")
    latest: dict[str, Any] = max(reports, key=lambda report: report["date"])
    return latest


def median(rows: Iterable[Mapping[str, Any]], key: str) -> float:
    return float(statistics.median(row[key] for row in rows))


def note(line: str) -> None:
    """Report progress on standard error, apart from the results."""
    print(line, file=sys.stderr, flush=True)


def _cpu_model() -> str:
    found = re.search(r"model name\s*:\s*(.+)", Path("/proc/cpuinfo").read_text())
    return found[1].strip() if found else platform.processor()


def plain(value: Any) -> Any:
    """The value with structs, dataclasses and named tuples in it as dictionaries, for JSON."""
    if isinstance(value, msgspec.Struct):
        return {name: plain(item) for name, item in msgspec.structs.asdict(value).items()}
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(item) for name, item in value._asdict().items()}
    return value
