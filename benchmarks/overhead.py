"""The cost of the engine and the server without a model.

    python -m benchmarks.overhead [--rounds 5] [--requests 500] [--save]

*A step*: the real engine over a decoder whose logits are ready, so that what is left of a step is deciding, reserving
blocks, building the batch, choosing tokens and sending them. With a small vocabulary it is all but the choice of
tokens, with a large one that as well (greedy, of fp32 logits). The decoder's own time is subtracted.

*An invocation*: `teneral serve --handler` with a function that returns its event, over HTTP, on one connection, one
request after the other; compared with /livez, which does nothing, and a bare aiohttp server with one route, the cost of
the library. The goal is 1 ms at the median.

*A trace*: processor time of the server for the same invocation with a `traceparent` that says "not sampled", with
`--otel` and without, in turns. The goal is 50 µs of difference.
"""

from __future__ import annotations

import argparse
import http.client
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.report import begin, finish, note, table, title
from benchmarks.server import HOST, Program, Server
from benchmarks.tasks import random_prompt

from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.batch import StepBatch
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.text.tokenizer import TextTokenizer

MODEL = Path(__file__).parent.parent / "demo" / "model"
BATCHES = (1, 8, 32)
FEW_TOKENS = 1_000
VOCABULARIES = {"without choosing": FEW_TOKENS, "choosing of 151,936": 151_936}
PROMPT_TOKENS = 16
BLOCK_BYTES = 64
KV_BYTES = 4096 * BLOCK_BYTES
TIMEOUT_S = 120.0
GOAL_MS = 1.0
HANDLER = "def handle(event, context):\n    return event\n"
UNSAMPLED = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00"}
TRACE_GOAL_US = 50.0
ASYNC_HANDLER = f"async {HANDLER}"
BODY = b'{"name": "someone"}'
BARE = """
from aiohttp import web
async def answer(request):
    return web.json_response(await request.json())
app = web.Application()
app.add_routes([web.post("/invoke", answer)])
web.run_app(app, host="{host}", port={port}, print=None, access_log=None)
"""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=300, help="steps in each round")
    parser.add_argument("--requests", type=int, default=500, help="requests in each round")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    options = parser.parse_args()
    report = begin("overhead", rounds=options.rounds, requests=options.requests, goal_ms=GOAL_MS)
    report["steps"] = measure_steps(options.rounds, options.steps)
    report["invocations"] = measure_invocations(options.rounds, options.requests)
    report["traces"] = measure_traces(options.rounds, 4 * options.requests)
    finish(report, render(report), save=options.save)


# -- a step ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class NoLimits:
    vocab_size: int
    max_context: int = 4096


class NoPool:
    """Of a model that reads no keys and values."""

    def copy_tokens(self, source: int, target: int, num_tokens: int) -> None:
        pass


class NoModel:
    """A decoder that has its logits before it is asked."""

    def __init__(self, vocab_size: int) -> None:
        self.config = NoLimits(vocab_size)
        generator = np.random.default_rng(0)
        self._logits = generator.standard_normal((max(BATCHES), vocab_size), dtype=np.float32)
        self._logits[:, max(VOCABULARIES["without choosing"], 1) :] -= (
            10.0  # so that there is text for what is chosen
        )

    def kv_block_bytes(self, block_size: int) -> int:
        return BLOCK_BYTES

    def new_kv(self, num_blocks: int, block_size: int) -> NoPool:
        return NoPool()

    def forward(self, batch: StepBatch, kv: Any, *, on_layer: Any = None) -> np.ndarray:
        return self._logits[: len(batch.logit_rows)]


def measure_steps(rounds: int, num_steps: int) -> dict[str, dict[str, Any]]:
    """Milliseconds of a step outside its forward pass, by vocabulary and batch: medians over the rounds."""
    tokenizer = TextTokenizer.from_files(
        lambda name: path.read_bytes() if (path := MODEL / name).exists() else None
    )
    samples: dict[str, dict[int, list[float]]] = {
        name: {size: [] for size in BATCHES} for name in VOCABULARIES
    }
    models = {name: NoModel(vocab_size) for name, vocab_size in VOCABULARIES.items()}
    for number in range(-1, rounds):  # the first is not counted
        for name, model in models.items():
            for size in BATCHES:
                time_s = step_s(model, tokenizer, size, num_steps)
                if number >= 0:
                    samples[name][size].append(1000 * time_s)
        note(f"round {number + 1}: steps")
    return {
        name: {
            str(size): {"median_ms": statistics.median(times), "all_ms": [round(time, 4) for time in times]}
            for size, times in by_size.items()
        }
        for name, by_size in samples.items()
    }


def step_s(model: NoModel, tokenizer: TextTokenizer, batch_size: int, num_steps: int) -> float:
    """Seconds of a step that gives `batch` sequences a token, without its forward pass."""
    chance = random.Random(0)
    engine = Engine(
        model,
        tokenizer,
        options=EngineOptions(kv_bytes=KV_BYTES, max_running=max(BATCHES)),
        make_backend=host_backend,
    )
    generations = [
        engine.submit(
            GenerationRequest(
                f"{number}",
                tuple(token % FEW_TOKENS for token in random_prompt(chance, PROMPT_TOKENS)),
                max_tokens=num_steps + 1,
                sampling=SamplingParams(temperature=0),
                ignore_eos=True,
            )
        )
        for number in range(batch_size)
    ]
    engine.start()  # with all of them there: the first step is that of their prompts
    try:
        timings = [generation.result(TIMEOUT_S).timings for generation in generations]
        totals = engine.statistics()
    finally:
        engine.stop()
    first_s = max(timing.first_token_s or 0.0 for timing in timings)
    last_s = min(timing.finished_s or 0.0 for timing in timings)
    return (last_s - first_s) / num_steps - totals.forward_s_total / totals.steps_total


# -- an invocation -----------------------------------------------------------------------------------------------------


def measure_invocations(rounds: int, num_requests: int) -> dict[str, dict[str, Any]]:
    """Milliseconds from sending a request to having its answer."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "plain.py").write_text(HANDLER)
        (folder / "asynchronous.py").write_text(ASYNC_HANDLER)
        plain, asynchronous = (
            stack.enter_context(Server(str(MODEL), "--handler", f"{folder / name}.py:handle")).wait_ready()
            for name in ("plain", "asynchronous")
        )
        bare = stack.enter_context(
            Program(lambda port: [sys.executable, "-c", BARE.format(host=HOST, port=port)])
        )
        rows: dict[str, Callable[[], list[float]]] = {
            "/invoke, async function": lambda: request_times_s(asynchronous, "POST", "/invoke", num_requests),
            "/invoke, function": lambda: request_times_s(plain, "POST", "/invoke", num_requests),
            "/livez": lambda: request_times_s(plain, "GET", "/livez", num_requests),
            "bare aiohttp": lambda: request_times_s(bare, "POST", "/invoke", num_requests),
        }
        samples: dict[str, list[float]] = {name: [] for name in rows}
        for number in range(rounds):
            for name, once in rows.items():
                samples[name] += once()
            note(f"round {number + 1}: invocations")
    return {name: _quantiles_ms(times) for name, times in samples.items()}


def measure_traces(rounds: int, num_requests: int) -> dict[str, list[float]]:
    """Microseconds of processor time an invocation, in user and kernel mode, of the whole server."""
    samples: dict[str, list[float]] = {"without --otel": [], "--otel, not sampled": []}
    with ExitStack() as stack:
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "asynchronous.py"
        file.write_text(ASYNC_HANDLER)
        servers = {
            name: stack.enter_context(Server(str(MODEL), "--handler", f"{file}:handle", *flags)).wait_ready()
            for name, flags in zip(samples, ((), ("--otel",)), strict=True)
        }
        for number in range(-1, rounds):  # the first is not counted
            for name, server in servers.items():
                before_s = _processor_s(server.pid)
                times = request_times_s(server, "POST", "/invoke", num_requests, UNSAMPLED)
                if number >= 0:
                    samples[name].append(1e6 * (_processor_s(server.pid) - before_s) / (len(times) * 1.1))
            note(f"round {number + 1}: traces")
    return samples


def _processor_s(process_id: int) -> float:
    """Of all threads so far; the kernel counts in hundredths of a second."""
    fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def request_times_s(
    server: Program, method: str, path: str, count: int, headers: Mapping[str, str] = {}
) -> list[float]:
    """Of `count` requests on one connection, after a few that are not counted. Raises `SystemExit` on any other answer
    than 200.
    """
    connection = server.connect()
    times = []
    for number in range(-count // 10, count):
        start_s = time.monotonic()
        body = BODY if method == "POST" else None
        connection.request(method, path, body, {"content-type": "application/json", **headers})
        response = connection.getresponse()
        response.read()
        if response.status != http.client.OK:
            raise SystemExit(f"{path}: {response.status}")
        if number >= 0:
            times.append(time.monotonic() - start_s)
    connection.close()
    return times


def _quantiles_ms(times_s: list[float]) -> dict[str, float]:
    centiles = statistics.quantiles(times_s, n=100)
    return {"p50_ms": 1000 * centiles[49], "p90_ms": 1000 * centiles[89], "p99_ms": 1000 * centiles[98]}


def render(report: dict[str, Any]) -> str:
    """The report as tables for people."""
    steps = [
        [name, *(f"{by_size[str(size)]['median_ms']:.3f}" for size in BATCHES)]
        for name, by_size in report["steps"].items()
    ]
    base = report["invocations"]["bare aiohttp"]["p50_ms"]
    invocations = [
        [
            name,
            *(f"{row[key]:.2f}" for key in ("p50_ms", "p90_ms", "p99_ms")),
            f"{row['p50_ms'] / base:.2f}x",
            f"{row['p50_ms'] / report['goal_ms']:.2f}x",
        ]
        for name, row in report["invocations"].items()
    ]
    traces = [[name, f"{statistics.median(times):.0f}"] for name, times in report["traces"].items()]
    pairs = zip(*report["traces"].values(), strict=True)
    difference = statistics.median(own - other for other, own in pairs)
    traces.append([f"difference; the goal is {TRACE_GOAL_US:g}", f"{difference:+.0f}"])
    columns = [
        "HTTP, ms",
        "p50",
        "p90",
        "p99",
        "relative to bare aiohttp",
        f"relative to the goal of {report['goal_ms']:g} ms",
    ]
    return "\n".join(
        [
            title(report, "overhead", f"medians of {report['rounds']} rounds"),
            table(["a step without a model, ms", *(f"batch {size}" for size in BATCHES)], steps),
            "",
            table(columns, invocations),
            "",
            table(["processor time of an invocation", "µs"], traces),
        ]
    )


if __name__ == "__main__":
    main()
