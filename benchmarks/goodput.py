"""Goodput under too much load: requests answered in time, at 1, 2, 5 and 10 times the load that saturates the server.

    python -m benchmarks.goodput [--factors 0.5 1 2 5 10] [--seconds 30] [--within 2 3] [--save]

The clients ask a real server over HTTP. First one request at a time, for the fastest answer; then as many clients as
there are places, each asking again at once, for the server's capacity. Then requests come at random times (a Poisson
process), at multiples of that rate, whether or not earlier ones were answered. All are alike but for their tokens.

The server is started with `--max-wait-s`. Another one, with only those clients, first measures the time to a first
token without a queue; the rest of the smallest `--within` is for waiting. `--no-max-wait` omits the bound.

An answer is in time if its first token, and its others on average, took at most `--within` times the median of those
clients' answers: the speed of a server that is full, and no more than full. The promise is that excess requests are
refused at once, with 429 and Retry-After, and that goodput stays at 90 % of its peak.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.server import Server, completion
from benchmarks.store import prepare
from benchmarks.tasks import random_prompt

ALONE_REQUESTS = 8
WARM_UP_REQUESTS = 2
TIMEOUT_S = 300.0
MAX_REQUESTS = 5_000  # of one level
PROMISE = 0.9
RAMP_SHARE = 0.25
QUANTILES = {"p50": 0.5, "p99": 0.99}
DATA = b"data: "


@dataclass(frozen=True, slots=True)
class Outcome:
    """`times_s` are those of its tokens, from when it was sent; empty for one that was refused."""

    sent_s: float
    status: int
    ended_s: float
    times_s: tuple[float, ...] = ()
    retry_after: bool = False

    @property
    def first_s(self) -> float:
        return self.times_s[0]

    @property
    def token_s(self) -> float:
        """The mean time between tokens."""
        return (self.times_s[-1] - self.times_s[0]) / max(1, len(self.times_s) - 1)


@dataclass(frozen=True, slots=True)
class Window:
    """When answers count that end then: from when the server has filled up until the last request."""

    start_s: float
    end_s: float

    @classmethod
    def from_now(cls, seconds: float) -> Window:
        now_s = time.monotonic()
        return cls(now_s + RAMP_SHARE * seconds, now_s + seconds)

    def rate(self, outcomes: Iterable[Outcome]) -> float:
        """The number of these that ended, a second."""
        num = sum(self.start_s < outcome.ended_s <= self.end_s for outcome in outcomes)
        return num / (self.end_s - self.start_s)


def main() -> None:
    options = _options()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    report = begin(
        "goodput",
        model=options.like,
        seconds=options.seconds,
        prompt_tokens=options.prompt,
        answer_tokens=options.tokens,
        max_running=options.max_running,
        max_queued=options.max_queued,
        within=options.within,
        promise=PROMISE,
    )
    model = str(root / "models" / "packed")
    flags = ["--max-running", str(options.max_running), "--max-queued", str(options.max_queued)]
    flags += ["--no-prefix-cache"]
    max_wait_s: float | None = None
    if options.max_wait:
        with Server(model, *flags) as server:
            server.wait_ready()
            first_s = asyncio.run(Load(server.url, options).first_s_when_full())
        max_wait_s = time_to_wait_s(options.within, first_s)
        flags += ["--max-wait-s", str(max_wait_s)]
        note(f"a first token takes {1000 * first_s:.0f} ms when full: --max-wait-s {max_wait_s:.3f}")
    report["max_wait_s"] = max_wait_s
    with Server(model, *flags) as server:
        server.wait_ready()
        report |= asyncio.run(Load(server.url, options).measure())
    finish(report, render(report), save=options.save)


def _options() -> argparse.Namespace:
    parser = new_parser(__doc__, rounds=1)
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 1, 2, 5, 10])
    parser.add_argument(
        "--within",
        type=float,
        nargs="+",
        default=[2, 3],
        help="factors of the time of a full server within which an answer is in time",
    )
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds of each level")
    parser.add_argument("--prompt", type=int, default=32, help="tokens of each prompt")
    parser.add_argument("--tokens", type=int, default=32, help="tokens of each answer")
    parser.add_argument("--max-running", type=int, default=8)
    parser.add_argument("--max-queued", type=int, default=1)
    parser.add_argument(
        "--no-max-wait", dest="max_wait", action="store_false", help="start the server without --max-wait-s"
    )
    return parser.parse_args()


class Load:
    """The clients of the server at `url`."""

    def __init__(self, url: str, options: argparse.Namespace) -> None:
        self._url = f"{url}/v1/completions"
        self._options = options
        self._chance = random.Random(0)

    async def first_s_when_full(self) -> float:
        """The time to the first token with as many clients as places, so that no request waits for one."""
        async with _session() as session:
            for _ in range(WARM_UP_REQUESTS + ALONE_REQUESTS):
                await self.ask(session)
            outcomes, _ = await self.closed_loop(session, self._options.max_running)
        return statistics.median(outcome.first_s for outcome in outcomes)

    async def measure(self) -> dict[str, Any]:
        options = self._options
        async with _session() as session:
            for _ in range(WARM_UP_REQUESTS):
                await self.ask(session)
            alone = [await self.ask(session) for _ in range(ALONE_REQUESTS)]
            first_s = statistics.median(outcome.first_s for outcome in alone)
            token_s = statistics.median(outcome.token_s for outcome in alone)
            note(f"alone: first token {1000 * first_s:.0f} ms, then one every {1000 * token_s:.0f} ms")
            outcomes, window = await self.closed_loop(session, options.max_running)
            capacity = window.rate(outcomes)
            full_first_s = statistics.median(outcome.first_s for outcome in outcomes)
            full_token_s = statistics.median(outcome.token_s for outcome in outcomes)
            note(f"with {options.max_running} clients: {capacity:.2f} requests/s")
            levels = []
            for factor in options.factors:
                outcomes, window = await self.open_loop(session, factor * capacity)
                levels.append(
                    {"factor": factor, **level(outcomes, window, options.within, full_first_s, full_token_s)}
                )
                note(f"{factor:g}x: {levels[-1]}")
        return {
            "alone": {"first_s": first_s, "token_s": token_s},
            "full": {"first_s": full_first_s, "token_s": full_token_s},
            "capacity_requests_s": capacity,
            "levels": levels,
        }

    async def closed_loop(
        self, session: aiohttp.ClientSession, num_clients: int
    ) -> tuple[list[Outcome], Window]:
        """The answers, when each client asks again as soon as it has its own."""
        window = Window.from_now(self._options.seconds)
        outcomes: list[Outcome] = []

        async def client() -> None:
            while time.monotonic() < window.end_s:
                outcomes.append(await self.ask(session))

        await asyncio.gather(*(client() for _ in range(num_clients)))
        return [outcome for outcome in outcomes if outcome.times_s], window

    async def open_loop(self, session: aiohttp.ClientSession, rate: float) -> tuple[list[Outcome], Window]:
        """`rate` requests a second for some time, and what became of each."""
        start_s = time.monotonic()
        window = Window.from_now(self._options.seconds)
        at_s = 0.0
        tasks: list[asyncio.Task[Outcome]] = []
        while len(tasks) < MAX_REQUESTS:
            at_s += self._chance.expovariate(rate)
            if at_s > self._options.seconds:
                break
            await asyncio.sleep(start_s + at_s - time.monotonic())
            tasks.append(asyncio.create_task(self.ask(session)))
        return list(await asyncio.gather(*tasks)), window

    async def ask(self, session: aiohttp.ClientSession) -> Outcome:
        body = completion(random_prompt(self._chance, self._options.prompt), self._options.tokens)
        data = json.dumps(body)
        sent_s = time.monotonic()
        times_s: list[float] = []
        async with session.post(
            self._url, data=data, headers={"content-type": "application/json"}
        ) as response:
            async for line in response.content:
                times_s += [time.monotonic() - sent_s] * (line.startswith(DATA) and b'"tokens"' in line)
            refused = "Retry-After" in response.headers
            return Outcome(sent_s, response.status, time.monotonic(), tuple(times_s), refused)


def _session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout)


def time_to_wait_s(within: Sequence[float], first_s: float) -> float:
    """How long a request may wait for its place, if its first token, which takes so long from then on, is to be in time
    by the strictest of these.
    """
    return max(0.0, min(within) - 1) * first_s


def level(
    outcomes: Sequence[Outcome], window: Window, within: Sequence[float], first_s: float, token_s: float
) -> dict[str, Any]:
    """Outcomes of the requests of one level. Counts are of all, rates of those that ended within the window."""
    answered = [outcome for outcome in outcomes if outcome.status == 200 and outcome.times_s]
    refused = [outcome for outcome in outcomes if outcome.status == 429]

    def in_time(factor: float) -> list[Outcome]:
        return [
            outcome
            for outcome in answered
            if outcome.first_s <= factor * first_s and outcome.token_s <= factor * token_s
        ]

    return {
        "requests": len(outcomes),
        "answered": len(answered),
        "refused": len(refused),
        "otherwise": len(outcomes) - len(answered) - len(refused),
        "refused_without_retry_after": sum(not outcome.retry_after for outcome in refused),
        "refusal_ms": quantiles(1000 * (outcome.ended_s - outcome.sent_s) for outcome in refused),
        "first_s": quantiles(outcome.first_s for outcome in answered),
        "token_s": quantiles(outcome.token_s for outcome in answered),
        "answers_s": window.rate(answered),
        "goodput_s": {f"{factor:g}": window.rate(in_time(factor)) for factor in within},
    }


def quantiles(values: Iterable[float]) -> dict[str, float]:
    """The median and the 99th centile; nothing of nothing."""
    ordered = sorted(values)
    if not ordered:
        return {}
    return {name: ordered[math.ceil(share * len(ordered)) - 1] for name, share in QUANTILES.items()}


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for people."""
    factors = [f"{factor:g}" for factor in report["within"]]
    peaks = {factor: max(row["goodput_s"][factor] for row in report["levels"]) for factor in factors}
    rows = []
    for row in report["levels"]:
        cells = [f"{row['factor']:g}x", f"{row['requests']}", f"{row['answered']}", f"{row['refused']}"]
        cells += [_pair(row["refusal_ms"]), _pair(row["first_s"]), f"{row['answers_s']:.2f}"]
        for factor in factors:
            share = row["goodput_s"][factor] / peaks[factor] if peaks[factor] else 0.0
            cells.append(f"{row['goodput_s'][factor]:.2f} ({share:.0%})")
        rows.append(cells)
    alone, full = report["alone"], report["full"]
    words = [
        report["model"],
        f"{report['prompt_tokens']} + {report['answer_tokens']} tokens",
        f"{report['max_running']} running and {report['max_queued']} waiting at most" + _waiting(report),
        f"saturated at {report['capacity_requests_s']:.2f} requests/s",
        f"alone {1000 * alone['first_s']:.0f} ms to the first token and {1000 * alone['token_s']:.0f} ms a token",
        f"full {1000 * full['first_s']:.0f} and {1000 * full['token_s']:.0f} ms",
        f"promise: {report['promise']:.0%} of the peak",
    ]
    columns = [
        "load",
        "requests",
        "answered",
        "refused",
        "refused after, ms: p50, p99",
        "first token, s",
        "answers/s",
    ]
    columns += [f"within {factor}x (of the peak)" for factor in factors]
    lines = [title(report, *words), table(columns, rows)]
    bad = sum(row["refused_without_retry_after"] for row in report["levels"])
    other = sum(row["otherwise"] for row in report["levels"])
    if bad or other:
        lines.append(f"\n{bad} refused without Retry-After, {other} neither answered nor refused")
    return "\n".join(lines)


def _waiting(report: Mapping[str, Any]) -> str:
    max_wait_s = report["max_wait_s"]
    return "" if max_wait_s is None else f" for {1000 * max_wait_s:.0f} ms"


def _pair(values: Mapping[str, float]) -> str:
    return ", ".join(f"{value:.3g}" for value in values.values()) or "–"


if __name__ == "__main__":
    main()
