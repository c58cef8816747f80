"""A language model on Lambda: from starting the function's process to its first token, and after a freeze.

    python -m benchmarks.stories.aws_lambda [--rate 200] [--rounds 5] [--only PATTERN] [--save]

The process is started as Lambda starts it, against a Runtime API in this process; the model lies in an S3 store that
gives --rate MB/s, with 15 ms to the first byte. The invocation is an event of a function URL that asks for a streamed
completion. It is handed out with the process's first poll, which Lambda calls the end of the init phase.

    init         starting the process → it asks for its first invocation
    first token  starting the process → the first token
    warm         handing out an invocation to the same process → its first token
    frozen       the same after the process was stopped for --frozen seconds, as Lambda stops one between invocations

The peer is transformers under AWS's own `awslambdaric`, which reads the model with boto3 while it is imported and
answers in one piece; one token is asked of it.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.cold_starts import PROMPT
from benchmarks.processes import MemoryWatch, RunError, environment
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.rounds import selected
from benchmarks.store import StoreProcess, prepare, stored_bytes, warm
from benchmarks.stories import model_and_where
from tests.support.fake_runtime_api import FakeRuntimeApi, Outcome

NAME = "stories.aws_lambda"
EXACT, DRAFT, PEER = "teneral", "teneral, first_token: draft", "transformers after boto3, awslambdaric"
PEERS = Path(__file__).parent.parent / "peers"
NUM_WARM = 3
POLL_S = 0.0005
TIMEOUT_S = 120.0


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--rate", type=float, default=200.0, help="of the store, in 10**6 bytes a second")
    parser.add_argument("--latency-ms", type=float, default=15.0)
    parser.add_argument(
        "--frozen", type=float, default=5.0, metavar="S", help="how long the process is stopped"
    )
    options = parser.parse_args()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    report = begin(
        NAME,
        model=options.like,
        rounds=options.rounds,
        rate_mb_s=options.rate,
        latency_ms=options.latency_ms,
        frozen_s=options.frozen,
    )
    with StoreProcess(root, rate_mb_s=options.rate, latency_ms=options.latency_ms) as store:
        report["results"] = measure(store, root, options)
    report["stored_bytes"] = stored_bytes(root)["packed"]
    finish(report, render(report), save=options.save)


def measure(store: StoreProcess, root: Path, options: Any) -> dict[str, dict[str, Any]]:
    teneral = ["teneral", "serve", "s3://models/packed", "--name", "model", "--log-level", "error"]
    systems = {
        EXACT: partial(_ours, [*teneral, "--lambda-streaming"], options.frozen),
        DRAFT: partial(_ours, [*teneral, "--lambda-streaming", "--first-token", "draft"], options.frozen),
        PEER: _peer,
    }
    systems = selected(systems, options.only)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in systems}
    for number in range(options.rounds + 1):  # the last round is watched, and not timed
        for name, run in systems.items():
            warm(root)
            sample = run(store.environment(), watch=number == options.rounds)
            samples[name].append(sample)
            shown = ", ".join(f"{key} {value:.3f}" for key, value in sample.items())
            note(f"round {number + 1}: {name}: {shown}")
    return {name: _summary(rows) for name, rows in samples.items()}


def _summary(rows: list[dict[str, float]]) -> dict[str, Any]:
    *timed, watched = rows
    medians = {key: statistics.median(row[key] for row in timed) for key in timed[0] if key != "peak_bytes"}
    return {
        **medians,
        "all_s": [round(row["first_token_s"], 3) for row in timed],
        "peak_bytes": watched["peak_bytes"],
    }


def _ours(
    command: list[str], frozen_s: float, variables: Mapping[str, str], *, watch: bool
) -> dict[str, float]:
    with FakeRuntimeApi() as api, _process(api, command, variables, watch=watch) as run:
        found = {"init_s": run.until_polled(api)}
        found["first_token_s"] = run.first_token_s(api.submit(_url_event()), run.started_s)
        found["warm_s"] = statistics.median(run.warm_s(api) for _ in range(NUM_WARM))
        os.killpg(run.process.pid, signal.SIGSTOP)
        time.sleep(frozen_s)
        os.killpg(run.process.pid, signal.SIGCONT)
        found["frozen_s"] = run.warm_s(api)
        found["peak_bytes"] = run.peak_bytes
    return found


def _peer(variables: Mapping[str, str], *, watch: bool) -> dict[str, float]:
    command = ["awslambdaric", "lambda_transformers.handle"]
    with FakeRuntimeApi() as api, _process(api, command, variables, watch=watch, folder=PEERS) as run:
        found = {"init_s": run.until_polled(api)}
        event = {"prompt": PROMPT, "max_tokens": 1}
        outcome = api.submit(event).wait()
        if outcome.kind != "response":
            raise RunError(f"the invocation failed: {outcome.body[:500]!r}")
        found["first_token_s"] = outcome.answered_s - run.started_s
        warm_ones = [api.invoke(event) for _ in range(NUM_WARM)]
        found["warm_s"] = statistics.median(one.answered_s - one.handed_out_s for one in warm_ones)
        found["peak_bytes"] = run.peak_bytes
    return found


class _Function:
    """The function's process, from its start on."""

    def __init__(
        self, process: subprocess.Popen[bytes], started_s: float, memory: MemoryWatch | None
    ) -> None:
        self.process = process
        self.started_s = started_s
        self._memory = memory

    @property
    def peak_bytes(self) -> float:
        return float(self._memory.peak_bytes) if self._memory else 0.0

    def until_polled(self, api: FakeRuntimeApi) -> float:
        """Seconds from the start until it asks for its first invocation. Raises `RunError`."""
        while not api.polled.wait(POLL_S):
            if self.process.poll() is not None or time.monotonic() - self.started_s > TIMEOUT_S:
                raise RunError(f"the function ended with {self.process.returncode}, or asked for nothing")
        return time.monotonic() - self.started_s

    def first_token_s(self, outcome: Outcome, since_s: float) -> float:
        """Of a streamed answer: until its first event with text. Waits for the end. Raises `RunError`."""
        if not outcome.done.wait(TIMEOUT_S) or outcome.kind != "response":
            raise RunError(f"the invocation failed: {outcome.body[:500]!r}")
        for piece, arrived_s in zip(outcome.pieces, outcome.piece_times_s, strict=True):
            if b"data: {" in piece:
                return arrived_s - since_s
        raise RunError(f"the answer has no text: {outcome.body[:500]!r}")

    def warm_s(self, api: FakeRuntimeApi) -> float:
        outcome = api.submit(_url_event())
        found = self.first_token_s(outcome, 0.0)
        return found - outcome.handed_out_s


@contextmanager
def _process(
    api: FakeRuntimeApi,
    command: list[str],
    variables: Mapping[str, str],
    *,
    watch: bool,
    folder: Path | None = None,
) -> Iterator[_Function]:
    """In a session of its own, so that all of it can be stopped; killed in the end."""
    given = environment(
        {**variables, "AWS_LAMBDA_RUNTIME_API": api.address, "STORY_MODEL": "s3://models/plain"}
    )
    with tempfile.TemporaryFile() as log:
        started_s = time.monotonic()
        process = subprocess.Popen(
            [sys.executable, "-m", *command],
            env=given,
            cwd=folder,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        memory = MemoryWatch(process.pid) if watch else None
        try:
            with memory or nullcontext():
                yield _Function(process, started_s, memory)
        except RunError as error:
            log.seek(0)
            raise SystemExit(f"{error}\n{log.read().decode(errors='replace')[-2000:]}") from error
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _url_event() -> dict[str, Any]:
    """A function URL's event in payload format 2.0."""
    body = {
        "model": "model",
        "prompt": PROMPT,
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    return {
        "version": "2.0",
        "routeKey": "$default",
        "rawPath": "/v1/completions",
        "rawQueryString": "",
        "headers": {"content-type": "application/json", "host": "abcdefgh.lambda-url.eu-central-1.on.aws"},
        "requestContext": {"http": {"method": "POST", "path": "/v1/completions", "sourceIp": "127.0.0.1"}},
        "body": json.dumps(body),
        "isBase64Encoded": False,
    }


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for people."""
    words = [f"{report['model']} at {report['rate_mb_s']:g} MB/s", f"medians of {report['rounds']} rounds"]
    return "\n".join([title(report, "A language model on Lambda", *words), _table(report)])


def section(report: Mapping[str, Any]) -> str:
    """The figures of docs/stories/lambda.md."""
    return f"{model_and_where(report)}\n\n{_table(report)}\n"


def _table(report: Mapping[str, Any]) -> str:
    keys = ("init_s", "first_token_s", "warm_s", "frozen_s")
    rows = [
        [
            name,
            *(f"{row[key]:.2f} s" if key in row else "–" for key in keys),
            f"{row['peak_bytes'] / 1e6:,.0f} MB",
        ]
        for name, row in report["results"].items()
    ]
    frozen = f"after {report['frozen_s']:g} s frozen"
    return table(["", "start → init done", "start → token", "warm", frozen, "peak memory"], rows)


if __name__ == "__main__":
    main()
