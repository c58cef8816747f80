"""The cost of an invocation that does nothing, over HTTP and on AWS Lambda, and of AWS's own runtime for Python.

    python -m benchmarks.invocation [--rounds 5] [--requests 300] [--save]

*Lambda*: `teneral serve --handler` and `awslambdaric`, each on the same fake Runtime API in this process. An invocation
counts from the moment at which it is handed out until its answer has arrived, and the pause from there until the next
one is asked for. The function returns what it was given; `awslambdaric` runs a plain one only.

*HTTP*: `POST /invoke` of the same function, on one connection.

All run side by side in each round, and one after the other: the machine does nothing else for them.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

from benchmarks.overhead import MODEL, request_times_s
from benchmarks.report import begin, finish, note, table, title
from benchmarks.server import Server
from tests.support.fake_runtime_api import FakeRuntimeApi
from tests.support.lambda_rig import runtime_process

HANDLERS = """
def handle(event, context):
    return event

async def handle_async(event, context):
    return event
"""
EVENT = {"name": "someone"}
WARM_UP = 30


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=300, help="requests in each round")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    options = parser.parse_args()
    report = begin(
        "invocation",
        rounds=options.rounds,
        requests=options.requests,
        awslambdaric=version("awslambdaric"),
    )
    report["invocations"] = measure(options.rounds, options.requests)
    finish(report, render(report), save=options.save)


def measure(rounds: int, num_requests: int) -> dict[str, dict[str, float]]:
    """Milliseconds, by what was invoked."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "mine.py").write_text(HANDLERS)
        model = str(MODEL.absolute())
        ours = ("teneral", "serve", model, "--handler")
        lambdas = {
            "Lambda: awslambdaric": stack.enter_context(_runtime(folder, "awslambdaric", "mine.handle")),
            "Lambda: teneral": stack.enter_context(_runtime(folder, *ours, "mine.handle")),
            "Lambda: teneral, async": stack.enter_context(_runtime(folder, *ours, "mine.handle_async")),
        }
        server = stack.enter_context(Server(model, "--handler", f"{folder}/mine.py:handle")).wait_ready()
        rows: dict[str, Callable[[], list[tuple[float, float]]]] = {
            name: lambda api=api: lambda_times_s(api, num_requests)  # type: ignore[misc]
            for name, api in lambdas.items()
        }
        rows["HTTP: teneral, /invoke"] = lambda: [
            (time_s, 0.0) for time_s in request_times_s(server, "POST", "/invoke", num_requests)
        ]
        samples: dict[str, list[tuple[float, float]]] = {name: [] for name in rows}
        for number in range(rounds):
            for name, once in rows.items():
                samples[name] += once()
            note(f"round {number + 1}")
    return {name: _quantiles_ms(times) for name, times in samples.items()}


@contextmanager
def _runtime(folder: Path, *arguments: str) -> Iterator[FakeRuntimeApi]:
    with FakeRuntimeApi() as api, runtime_process(api, *arguments, folder=folder):
        for _ in range(WARM_UP):
            api.invoke(EVENT)
        yield api


def lambda_times_s(api: FakeRuntimeApi, count: int) -> list[tuple[float, float]]:
    """Of invocations one after the other: from when each was handed out until it was answered, and from there until the
    next was asked for. Raises `SystemExit` for any other answer than the event.
    """
    times = []
    for _ in range(count):
        outcome = api.invoke(EVENT)
        if outcome.json != EVENT:
            raise SystemExit(f"an invocation came to {outcome.body!r}")
        while api.num_polling == 0:
            time.sleep(0)
        times.append((outcome.answered_s - outcome.handed_out_s, time.monotonic() - outcome.answered_s))
    return times


def _quantiles_ms(times_s: list[tuple[float, float]]) -> dict[str, float]:
    whole, pauses = ([1000 * time_s for time_s in column] for column in zip(*times_s, strict=True))
    centiles = statistics.quantiles(whole, n=100)
    return {
        "p50_ms": centiles[49],
        "p90_ms": centiles[89],
        "p99_ms": centiles[98],
        "pause_p50_ms": statistics.median(pauses),
    }


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    base = report["invocations"]["Lambda: awslambdaric"]["p50_ms"]
    rows = [
        [
            name,
            *(f"{row[key]:.2f}" for key in ("p50_ms", "p90_ms", "p99_ms")),
            f"{row['pause_p50_ms']:.2f}" if row["pause_p50_ms"] else "",
            f"{row['p50_ms'] / base:.2f}x",
        ]
        for name, row in report["invocations"].items()
    ]
    columns = ["ms", "p50", "p90", "p99", "then until the next, p50", "relative to awslambdaric"]
    return "\n".join(
        [
            title(report, "invocation", f"{report['rounds']} rounds of {report['requests']}"),
            table(columns, rows),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
