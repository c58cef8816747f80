"""The gain of a cached prefix: time to the first token after a long prefix, by where its keys and values are.

    python -m benchmarks.prefix [--tokens 1000] [--rounds 3] [--only PATTERN] [--save]

Real servers generate one token over HTTP, after a prefix of random tokens and some more that are new each time:

    new               no request had the prefix before
    in the pool       the same server had a request with it just before
    in host memory    and then more others than the pool holds, so that it was evicted: `--kv-host-bytes`
    on disk           the same with `--kv-disk-dir`
    restarted         the server had two requests with it and ended, and another one was started; the request comes
                      once all weights are loaded
    snapshot          the same with `--kv-snapshot`
    exec, restarted   from starting that other process, with a request as soon as its port is open
    exec, snapshot    the same with `--kv-snapshot`

Rows take turns, each round with a prefix of its own. *Found* are the cached tokens of
the prompt, by the server's count. Rows without a setting in this version are omitted and named.
"""

from __future__ import annotations

import json
import random
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.answers import Answer
from benchmarks.processes import RunError
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.rounds import failures, selected
from benchmarks.server import Server
from benchmarks.store import prepare
from benchmarks.tasks import random_prompt

NEW = "new"
POOL = "in the pool"
SUFFIX_TOKENS = 28  # the prompt's own, behind the prefix
POOL_PREFIXES = 3  # that a small pool can hold
SPILL_BYTES = 1 << 30
SPILL_S = 0.5  # to bring away what the pool has given up


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, default=1000, help="tokens of the prefix")
    options = parser.parse_args()
    folder = options.work / options.like
    prepare(options.like, folder / "store")
    model = folder / "store" / "models" / "packed"
    report = begin("prefix", model=options.like, rounds=options.rounds, prefix_tokens=options.tokens)
    small_pool = POOL_PREFIXES * (options.tokens + 2 * SUFFIX_TOKENS) * kv_token_bytes(folder / "store")
    scratch = folder / "kv"
    bench = Bench(str(model), options.tokens, small_pool, scratch)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        bench.disk.mkdir(parents=True, exist_ok=True)
        bench.measure(selected(bench.rows(stack), options.only), options.rounds)
    report["results"] = {
        name: {
            "first_token_s": statistics.median(answer.token_times_s[0] for answer in rows),
            "all_s": [round(answer.token_times_s[0], 3) for answer in rows],
            "found_tokens": statistics.median(answer.num_cached for answer in rows),
        }
        for name, rows in bench.samples.items()
        if rows
    }
    report["failed"] = bench.failed
    finish(report, render(report), save=options.save)


def kv_token_bytes(root: Path) -> int:
    """Bytes of one token in the KV pool, in bf16."""
    config = json.loads((root / "models" / "plain" / "config.json").read_text())
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return int(2 * config["num_hidden_layers"] * config["num_key_value_heads"] * head_dim * 2)


@dataclass
class Bench:
    model: str
    num_tokens: int
    small_pool_bytes: int
    scratch: Path
    chance: random.Random = field(default_factory=lambda: random.Random(0))
    samples: dict[str, list[Answer]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def disk(self) -> Path:
        return self.scratch / "disk"

    def rows(self, stack: ExitStack) -> dict[str, Callable[[], Answer]]:
        """How each row is measured once. Servers are started when they are first needed, and end with `stack`."""
        small = ("--kv-bytes", str(self.small_pool_bytes))
        disk = ("--kv-disk-bytes", str(SPILL_BYTES), "--kv-disk-dir", str(self.disk))
        hot = self._kept(stack)
        host = self._kept(stack, *small, "--kv-host-bytes", str(SPILL_BYTES))
        spilled = self._kept(stack, *small, *disk)
        snapshot = ("--kv-snapshot", str(self.scratch / "snapshot"))
        return {
            NEW: lambda: self._ask(hot(), self._words(self.num_tokens)),
            POOL: lambda: self._again(hot(), num_others=0),
            "in host memory": lambda: self._again(host(), num_others=POOL_PREFIXES + 1),
            "on disk": lambda: self._again(spilled(), num_others=POOL_PREFIXES + 1),
            "restarted": lambda: self._restarted(wait=True),
            "snapshot": lambda: self._restarted(*snapshot, wait=True),
            "exec, restarted": lambda: self._restarted(wait=False),
            "exec, snapshot": lambda: self._restarted(*snapshot, wait=False),
        }

    def measure(self, rows: dict[str, Callable[[], Answer]], rounds: int) -> None:
        """Rounds in turns, into `samples`. A row that fails is omitted from then on, with its reason."""
        for number in range(rounds):
            for name, once in rows.items():
                if name in self.failed:
                    continue
                try:
                    answer = once()
                except RunError as error:
                    self.failed[name] = str(error)
                    self.samples.pop(name, None)
                    note(f"{name} failed, and is left out: {error}")
                    continue
                self.samples.setdefault(name, []).append(answer)
                note(
                    f"round {number + 1}: {name:16} {answer.token_times_s[0]:.2f} s, {answer.num_cached} found"
                )

    def _kept(self, stack: ExitStack, *flags: str) -> Callable[[], Server]:
        servers: list[Server] = []

        def server() -> Server:
            if not servers:
                started = stack.enter_context(Server(self.model, *flags)).wait_ready()
                self._ask(started, self._words(self.num_tokens))  # what is slow the first time
                servers.append(started)
            return servers[0]

        return server

    def _again(self, server: Server, *, num_others: int) -> Answer:
        prefix = self._words(self.num_tokens)
        self._ask(server, prefix)
        for _ in range(num_others):
            self._ask(server, self._words(self.num_tokens))
        if num_others:
            time.sleep(SPILL_S)
        return self._ask(server, prefix)

    def _restarted(self, *flags: str, wait: bool) -> Answer:
        prefix = self._words(self.num_tokens)
        shutil.rmtree(self.scratch / "snapshot", ignore_errors=True)
        with Server(self.model, *flags) as server:
            self._ask(server.wait_ready(), prefix)
            self._ask(server, prefix)  # so that it is worth keeping
        with Server(self.model, *flags) as server:
            if wait:
                self._ask(server.wait_ready(), self._words(2 * SUFFIX_TOKENS))
                return self._ask(server, prefix)
            return self._ask(server, prefix, since_s=server.started_s)

    def _words(self, count: int) -> list[int]:
        return random_prompt(self.chance, count)

    def _ask(self, server: Server, prefix: Sequence[int], *, since_s: float | None = None) -> Answer:
        return server.complete([*prefix, *self._words(SUFFIX_TOKENS)], 1, since_s=since_s)


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    results = report["results"]
    base = results.get(NEW)
    rows = []
    for name, row in results.items():
        ratio = f"{row['first_token_s'] / base['first_token_s']:.3f}x" if base and row is not base else "–"
        spread = f"{min(row['all_s']):.2f}–{max(row['all_s']):.2f}"
        rows.append([name, f"{row['first_token_s']:.3f}", spread, ratio, f"{row['found_tokens']:,.0f}"])
    words = [
        report["model"],
        f"a prefix of {report['prefix_tokens']:,} tokens and {SUFFIX_TOKENS} more",
        f"medians of {report['rounds']} rounds",
    ]
    columns = ["the prefix", "first token, s", "from–to", f"relative to {NEW}", "found tokens"]
    return "\n".join([title(report, *words), table(columns, rows), failures(report["failed"])])


if __name__ == "__main__":
    main()
