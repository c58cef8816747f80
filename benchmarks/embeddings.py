"""An encoder's batching: texts a second and the time of each, for one, 8 or 64 callers with one text at a time.

    python -m benchmarks.embeddings [--like minilm] [--callers 1 8 64] [--max-delay-ms 0 5] [--rounds 3] [--save]

The real embedder over an encoder's shape, without HTTP: each caller asks again as soon as it has its answer, for a text
of another length. Settings take turns. *Padding* is computed in addition to the texts' own tokens.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.report import begin, finish, machine, new_parser, note, table, title
from benchmarks.store import prepare
from benchmarks.tasks import random_prompt

from teneral.runtime.config import ServeConfig
from teneral.runtime.engine.embedder import Embedder
from teneral.runtime.instance.instance import Instance

NUM_TEXTS = 512
WARM_UP_S = 0.5
TIMEOUT_S = 60.0


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.set_defaults(like="minilm")
    parser.add_argument("--callers", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--max-delay-ms", type=float, nargs="+", default=[0.0, 5.0])
    parser.add_argument(
        "--lengths", type=int, nargs=2, default=[4, 256], help="range of the texts' tokens: from, to"
    )
    parser.add_argument("--seconds", type=float, default=3.0, help="seconds of each measurement")
    options = parser.parse_args()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    report = begin(
        "embeddings",
        model=options.like,
        rounds=options.rounds,
        seconds=options.seconds,
        lengths=options.lengths,
    )
    model = Encoder(root / "models" / "packed", *options.lengths)
    samples: dict[tuple[int, float], list[dict[str, float]]] = {}
    for number in range(options.rounds):
        for callers in options.callers:
            for delay_ms in options.max_delay_ms:
                row = model.measure(callers, delay_ms, options.seconds)
                samples.setdefault((callers, delay_ms), []).append(row)
                note(f"round {number + 1}: {callers} callers, {delay_ms:g} ms: {row['texts_s']:.0f} texts/s")
    model.close()
    report["results"] = [
        {
            "callers": callers,
            "max_delay_ms": delay_ms,
            **{key: statistics.median(row[key] for row in rows) for key in rows[0]},
        }
        for (callers, delay_ms), rows in samples.items()
    ]
    finish(report, render(report), save=options.save)


class Encoder:
    """The model, and texts for it. `close` it."""

    def __init__(self, address: Path, shortest: int, longest: int) -> None:
        self._instance = Instance(ServeConfig(model=str(address), threads=machine()["cores"])).start()
        self._instance.embedder.result(TIMEOUT_S)
        if not self._instance.wait_exact():
            raise SystemExit(f"{address} could not be loaded: {self._instance.failure}")
        self._model = CountingModel(self._instance)
        chance = random.Random(0)
        # Of each order of magnitude as many.
        lengths = [round(shortest * (longest / shortest) ** chance.random()) for _ in range(NUM_TEXTS)]
        self._texts = [random_prompt(chance, length) for length in lengths]

    def close(self) -> None:
        self._instance.close()

    def measure(self, num_callers: int, max_delay_ms: float, seconds: float) -> dict[str, float]:
        embedder = Embedder(self._model, max_queued=num_callers, max_delay_s=max_delay_ms / 1000)
        embedder.start()
        try:
            asyncio.run(self._ask(embedder, num_callers, WARM_UP_S))
            before, self._model.padded = embedder.statistics(), 0
            times_s = asyncio.run(self._ask(embedder, num_callers, seconds))
            after = embedder.statistics()
        finally:
            embedder.stop()
        num_tokens = after.tokens_total - before.tokens_total
        return {
            "texts_s": len(times_s) / seconds,
            "p50_ms": 1000 * statistics.median(times_s),
            "p99_ms": 1000 * sorted(times_s)[int(0.99 * (len(times_s) - 1))],
            "texts_a_batch": len(times_s) / (after.batches_total - before.batches_total),
            "padding": self._model.padded / num_tokens - 1,
        }

    async def _ask(self, embedder: Embedder, num_callers: int, seconds: float) -> list[float]:
        end_s = time.monotonic() + seconds
        times_s: list[float] = []
        chance = random.Random(0)

        async def caller() -> None:
            while (start_s := time.monotonic()) < end_s:
                await asyncio.wrap_future(embedder.embed([chance.choice(self._texts)]))
                if (ended_s := time.monotonic()) < end_s:
                    times_s.append(ended_s - start_s)

        await asyncio.gather(*(caller() for _ in range(num_callers)))
        return times_s


class CountingModel:
    """The instance's encoder; `padded` counts tokens that were computed, padding included."""

    def __init__(self, instance: Instance) -> None:
        self._model = instance.embedder.result()._model  # there is no other way to have a second one over it
        self.config = self._model.config
        self.padded = 0

    def embed(self, token_lists: Sequence[Sequence[int]], type_lists: Any = None) -> torch.Tensor:
        self.padded += len(token_lists) * max(map(len, token_lists))
        return self._model.embed(token_lists, type_lists)


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    base = {row["callers"]: row for row in reversed(report["results"])}
    rows = [
        [
            f"{row['callers']}",
            f"{row['max_delay_ms']:g}",
            f"{row['texts_s']:,.0f}",
            f"{row['texts_s'] / base[row['callers']]['texts_s']:.2f}x",
            f"{row['p50_ms']:.1f}, {row['p99_ms']:.1f}",
            f"{row['texts_a_batch']:.1f}",
            f"{row['padding']:.0%}",
        ]
        for row in report["results"]
    ]
    low, high = report["lengths"]
    words = [
        report["model"],
        f"texts of {low} to {high} tokens",
        f"medians of {report['rounds']} rounds of {report['seconds']:g} s",
    ]
    columns = [
        "callers",
        "delay up to, ms",
        "texts/s",
        "relative to the first",
        "ms: p50, p99",
        "texts a batch",
        "padding",
    ]
    return "\n".join([title(report, *words), table(columns, rows)])


if __name__ == "__main__":
    main()
