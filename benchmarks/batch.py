"""Repeated kills of a batch job: equality of its output with that of an undisturbed job, and their cost in time.

    python -m benchmarks.batch [--prompts 10000] [--kills 20] [--model demo/model]

Every worker is `teneral batch` in a process of its own, which is ended by SIGKILL at a random moment within its share
of the parts; the next one goes on. Answers are greedy, so that both outputs can be compared byte by byte. A worker's
time to its first part holds the start of Python, torch's import, the load, and that part; it comes once for each kill.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.report import begin, finish, note, table, title

POLL_S = 0.005
DEMO_MODEL = Path(__file__).parent.parent / "demo" / "model"


def main() -> int:
    options = _options()
    report = begin("batch", prompts=options.prompts, kills=options.kills, model=options.model.name)
    with tempfile.TemporaryDirectory(prefix="teneral-batch-") as folder:
        given = Path(folder) / "in.jsonl"
        _write_prompts(given, options.prompts, options.max_tokens)
        note(f"{options.prompts} prompts, undisturbed")
        whole = Path(folder) / "whole.jsonl"
        report["undisturbed"] = _undisturbed(options, given, whole)
        note(f"the same, killed {options.kills} times")
        killed = Path(folder) / "killed.jsonl"
        report["killed"] = _killed(options, given, killed)
        report["same_bytes"] = whole.read_bytes() == killed.read_bytes()
        report["different_records"] = _count_different(whole, killed)
        ids = [json.loads(line)["custom_id"] for line in killed.open()]
        report["each_id_once"] = sorted(ids) == sorted(f"p{number}" for number in range(options.prompts))
    finish(report, render(report), save=options.save)
    return 0 if report["each_id_once"] and report["same_bytes"] else 1


def _write_prompts(path: Path, count: int, max_tokens: int) -> None:
    """Short, of different lengths, and no two alike."""
    chance = random.Random(1)
    words = (
        "the",
        "of",
        "list",
        "number",
        "time",
        "model",
        "wing",
        "insect",
        "code",
        "test",
        "data",
        "value",
        "end",
    )
    with path.open("w") as file:
        for number in range(count):
            text = " ".join(chance.choices(words, k=chance.randrange(3, 16)))
            line = {
                "custom_id": f"p{number}",
                "prompt": f"{number} {text}",
                "max_tokens": max_tokens,
                "temperature": 0,
            }
            file.write(json.dumps(line) + "\n")


def _start(options: argparse.Namespace, given: Path, output: Path) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "teneral", "batch", str(options.model), str(given), str(output)]
    command += ["--quiet", "--log-level", "error", "--compute-dtype", options.compute_dtype]
    return subprocess.Popen(command, stdout=subprocess.PIPE)


def _undisturbed(options: argparse.Namespace, given: Path, output: Path) -> dict[str, Any]:
    """One worker, to the end."""
    began_s, before = time.perf_counter(), _count(output)
    worker = _start(options, given, output)
    first_s = _wait_for_part(worker, output, before + 1) - began_s
    report, _ = worker.communicate()
    if worker.returncode:
        raise SystemExit(f"the worker ended with {worker.returncode}")
    return {
        "s": time.perf_counter() - began_s,
        "first_part_s": first_s,
        "parts": json.loads(report)["parts"],
    }


def _killed(options: argparse.Namespace, given: Path, output: Path) -> dict[str, Any]:
    """Many workers, each killed at a random moment about when it has done its share."""
    chance = random.Random(2)
    began_s, first_part_s = time.perf_counter(), 0.0
    share = max(1, -(-options.prompts // 64) // (options.kills + 1))
    for _ in range(options.kills):
        start_s, before = time.perf_counter(), _count(output)
        worker = _start(options, given, output)
        first_part_s += _wait_for_part(worker, output, before + 1) - start_s
        _wait_for_part(worker, output, before + chance.randrange(share) + 1)
        time.sleep(chance.random() * 0.1)
        worker.send_signal(signal.SIGKILL)
        worker.communicate()
        if output.exists():
            raise SystemExit("the job was complete before all kills: give more prompts")
    last = _undisturbed(options, given, output)
    first_part_s += last["first_part_s"]
    return {"s": time.perf_counter() - began_s, "first_part_s": first_part_s, "parts": last["parts"]}


def _wait_for_part(worker: subprocess.Popen[bytes], output: Path, number: int) -> float:
    """The time at which `number` parts are visible, or the worker has ended."""
    while _count(output) < number and worker.poll() is None:
        time.sleep(POLL_S)
    return time.perf_counter()


def _count(output: Path) -> int:
    """The parts that are visible."""
    parts = output.with_name(output.name + ".parts") / "parts"
    return sum(path.suffix == ".jsonl" for path in parts.iterdir()) if parts.exists() else 0


def _count_different(one: Path, other: Path) -> int:
    with one.open() as first, other.open() as second:
        return sum(left != right for left, right in zip(first, second, strict=True))


def render(report: Mapping[str, Any]) -> str:
    rows = []
    for name in ("undisturbed", "killed"):
        row = report[name]
        rows.append(
            [
                name if name == "undisturbed" else f"killed {report['kills']} times",
                f"{row['s']:.1f}",
                f"{row['first_part_s']:.1f}",
                f"{report['prompts'] / (row['s'] - row['first_part_s']):.0f}",
                f"{row['parts']}",
            ]
        )
    same = "the same bytes" if report["same_bytes"] else f"{report['different_records']} records differ"
    once = "each custom_id once" if report["each_id_once"] else "NOT each custom_id once"
    words = [report["model"], f"{report['prompts']} prompts", same, once]
    columns = ["run", "s", "of it to first parts, s", "answers/s in the rest", "parts"]
    return "\n".join([title(report, *words), table(columns, rows)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=10_000)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--max-tokens", type=int, default=4)
    parser.add_argument("--model", type=Path, default=DEMO_MODEL)
    parser.add_argument(
        "--compute-dtype",
        default="float32",
        help="in bfloat16 the other sequences of a batch may change a sequence's last bits (default: float32)",
    )
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
