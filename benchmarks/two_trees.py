"""Cold starts of this tree and of another checkout of Teneral, in turns: whether a change of the code costs time.

    git worktree add /tmp/before COMMIT && (cd /tmp/before && python build_native.py)
    python -m benchmarks.two_trees /tmp/before [--rounds 10] [--rate-mb-s 200] [--save]

For each tree: the time from exec to the first request at the store and to the first for weights (as
`benchmarks.first_range`, packed, s3://), and to the first token (as `benchmarks.cold_start`, packed). Both trees run in
this Python with its packages, and serve one artifact, packed by this tree. The two take turns at going first.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import cold_starts
from benchmarks.first_range import Way, start_once
from benchmarks.report import begin, finish, median, new_parser, note, table, title
from benchmarks.store import StoreProcess, prepare, store_variables, warm
from tests.support.store_server import StoreServer

MODEL = "s3://models/packed"
BEFORE, AFTER = "before", "after"


def main() -> None:
    parser = new_parser(__doc__, rounds=10)
    parser.add_argument("before", type=Path, help="a checkout of the other commit, its native core built")
    parser.add_argument("--rate-mb-s", type=float, default=200.0)
    parser.add_argument("--latency-ms", type=float, default=15.0)
    options = parser.parse_args()
    if not (options.before / "src" / "teneral").is_dir():
        parser.error(f"{options.before} is no checkout of Teneral")
    root = options.work / options.like / "store"
    prepare(options.like, root)
    trees = {BEFORE: options.before.resolve(), AFTER: Path(__file__).resolve().parent.parent}
    report = begin(
        "two_trees",
        model=options.like,
        rate_mb_s=options.rate_mb_s,
        latency_ms=options.latency_ms,
        rounds=options.rounds,
        commits={name: _commit(tree) for name, tree in trees.items()},
    )
    report["results"] = measure(root, trees, options.rate_mb_s, options.latency_ms, options.rounds)
    finish(report, render(report), save=options.save)


def measure(
    root: Path, trees: dict[str, Path], rate_mb_s: float, latency_ms: float, rounds: int
) -> dict[str, dict[str, Any]]:
    """Medians over the rounds, for each tree."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with (
        StoreServer(root, rate_mb_s=rate_mb_s, latency_ms=latency_ms) as logged,
        StoreProcess(root, rate_mb_s=rate_mb_s, latency_ms=latency_ms) as store,
    ):

        def first_range(code: dict[str, str]) -> dict[str, float]:
            return start_once(Way(MODEL, logged, store_variables(logged.url) | code))

        def first_token(code: dict[str, str]) -> dict[str, float]:
            warm(root)
            started = cold_starts.serve(MODEL, variables=store.environment() | code)
            return {"first_token_s": started.first_token_s}

        ways: tuple[Callable[[dict[str, str]], dict[str, float]], ...] = (first_range, first_token)
        for number in range(rounds + 1):
            for way in ways:
                for name in list(trees) if number % 2 else list(reversed(trees)):
                    sample = way({"PYTHONPATH": str(trees[name] / "src")})
                    if not number:
                        continue  # it writes the bytecode
                    if way is first_range:
                        samples[name].append(sample)
                    else:
                        samples[name][-1] |= sample
                        note(f"round {number}: {name:8} {sample['first_token_s']:.2f} s")
    return {name: summary(rows) for name, rows in samples.items()}


def summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    figures = ("first_s", "weights_s", "first_token_s")
    return {
        **{figure: median(rows, figure) for figure in figures},
        "all": {figure: [round(row[figure], 4) for row in rows] for figure in figures},
    }


def _commit(tree: Path) -> str:
    return subprocess.check_output(["git", "-C", tree, "rev-parse", "--short", "HEAD"], text=True).strip()


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    columns = ["from exec, ms", "first request", "first for weights", "first token"]
    rows = [
        [f"{name} ({report['commits'][name]})"]
        + [f"{1000 * row[figure]:.0f}" for figure in ("first_s", "weights_s", "first_token_s")]
        for name, row in report["results"].items()
    ]
    link = f"{report['rate_mb_s']:g} MB/s, {report['latency_ms']:g} ms to the first byte"
    words = [report["model"], link, f"medians of {report['rounds']} rounds, in turns"]
    return "\n".join([title(report, *words), table(columns, rows)])


if __name__ == "__main__":
    main()
