"""A pool whose instances are killed: requests over six models with memory for three, and a `kill -9` every 5 s.

    python -m benchmarks.pool_kills [--requests 10000] [--kill-every-s 5] [--save]

Tiny packed models with different random weights, so that an answer of another model is seen; the most wanted ones
change every 20 s, so that all six are swapped. Every answer is one of: right, refused with a status and a code, ended
by a stream's error event, wrong (another text, another model's name), or lost in silence (a connection or a stream that
ends without any of these, or no answer within the time). Memory is measured from outside, as PSS of all processes but
the front, four times a second. Counts, not times, so a busy machine will do:
about eight minutes on two free cores, fifteen on busy ones.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
from benchmarks.report import begin, finish, note, table, title
from tests.support.pool_runs import PoolRun
from tests.support.tiny_models import save_tiny

from teneral import cli
from teneral.handlers.pool.memory import tree_pss_bytes
from teneral.handlers.pool.process import OVERHEAD_BYTES

NUM_MODELS = 6
NUM_FIT = 3
KV_MIB = 8
STANDBY = 2
STANDBY_MIB = 180  # for both, as measured; less than an instance
NUM_PROMPTS = 8
WEIGHTS = (40, 25, 15, 10, 6, 4)  # of the models, the most wanted first
ROTATE_S = 20.0
STREAM_SHARE = 0.3
SAMPLE_S = 0.25
CLIENT_TIMEOUT_S = 200.0  # beyond the pool's own limits: what takes longer is lost
GOALS = {"lost": 0, "wrong": 0, "over_budget": 1.02}
RIGHT, REFUSED, STREAM_ERROR, WRONG, LOST = "right", "refused", "stream error", "wrong", "lost"


def main() -> None:
    options = _options()
    report = begin(
        "pool_kills",
        requests=options.requests,
        kill_every_s=options.kill_every_s,
        models=NUM_MODELS,
        models_that_fit=NUM_FIT,
        clients=options.clients,
        seed=options.seed,
        goals=GOALS,
    )
    with tempfile.TemporaryDirectory(prefix="teneral-kills-bench-") as name:
        folder = Path(name)
        file = _pool_file(folder)
        with PoolRun(folder, file, "--log-level", "error") as pool:
            report["results"] = asyncio.run(_Run(pool, options).run())
            report["results"]["exit_status"] = pool.end()
    finish(report, render(report), save=options.save)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--kill-every-s", type=float, default=5.0)
    parser.add_argument("--clients", type=int, default=24, help="concurrent clients")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    return parser.parse_args()


def _pool_file(folder: Path) -> str:
    """A pool of `NUM_MODELS` models and memory for `NUM_FIT` of them, with all standby processes."""
    tables, weights_bytes = "", 0
    for number in range(NUM_MODELS):
        plain, packed = folder / f"plain-{number}", folder / f"m{number}"
        save_tiny("llama", plain, seed=number + 1)
        weights_bytes = (plain / "model.safetensors").stat().st_size
        if cli.run(["pack", str(plain), str(packed), "--quiet"]) != 0:
            raise SystemExit("a model could not be packed")
        tables += f'[models.m{number}]\nsource = "{packed}"\nmax_instances = 2\nqueue_timeout_s = 120\n'
    need_mib = (weights_bytes + OVERHEAD_BYTES) / 2**20 + KV_MIB
    node = f'[node]\nmemory = "{int(NUM_FIT * need_mib) + STANDBY_MIB}MiB"\nstandby = {STANDBY}\n'
    serve = f'[defaults.serve]\nkv_bytes = "{KV_MIB}MiB"\nthreads = 1\n'
    return f"version = 1\n{serve}{tables}{node}"


class _Run:
    """One run: clients, the killer, and the memory's watcher, on one event loop."""

    def __init__(self, pool: PoolRun, options: argparse.Namespace) -> None:
        self._pool = pool
        self._options = options
        self._url = f"http://127.0.0.1:{pool.port}"
        self._rng = random.Random(options.seed)
        self._left = options.requests
        self._began_s = 0.0
        self._expected: dict[tuple[str, str], str] = {}
        self._outcomes: Counter[str] = Counter()
        self._codes: Counter[str] = Counter()
        self._by_model: Counter[str] = Counter()
        self._examples: list[str] = []
        self._kills = self._most_instances = 0
        self._most_used_bytes = 0
        self._most_reserved_bytes = 0
        self._budget_bytes = 0

    async def run(self) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=CLIENT_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
            self._session = session
            for model in range(NUM_MODELS):
                for prompt in range(NUM_PROMPTS):
                    await self._learn(f"m{model}", f"a b c {prompt} " * 3)
            note("every model has answered")
            self._began_s = time.monotonic()
            watchers = [asyncio.create_task(each) for each in (self._kill(), self._watch(), self._progress())]
            await asyncio.gather(*(self._client() for _ in range(self._options.clients)))
            seconds = time.monotonic() - self._began_s
            for watcher in watchers:
                watcher.cancel()
            await asyncio.gather(*watchers, return_exceptions=True)
            after = Counter(
                [await self._ask(f"m{model}", "a b c 0 " * 3, False) for model in range(NUM_MODELS)]
            )
            state = await self._state()
        return {
            "seconds": round(seconds, 1),
            "requests": self._outcomes.total(),
            "outcomes": dict(self._outcomes),
            "codes": dict(self._codes),
            "by_model": dict(sorted(self._by_model.items())),
            "kills": self._kills,
            "budget_bytes": self._budget_bytes,
            "most_used_bytes": self._most_used_bytes,
            "most_reserved_bytes": self._most_reserved_bytes,
            "most_instances": self._most_instances,
            "answers_after": dict(after),
            "counts": state["counts"],
            "examples": self._examples,
        }

    # requests

    async def _client(self) -> None:
        while self._left > 0:
            self._left -= 1
            rotation = int((time.monotonic() - self._began_s) / ROTATE_S)
            rank = self._rng.choices(range(NUM_MODELS), WEIGHTS)[0]
            model = f"m{(rank + rotation) % NUM_MODELS}"
            prompt = f"a b c {self._rng.randrange(NUM_PROMPTS)} " * 3
            outcome = await self._ask(model, prompt, self._rng.random() < STREAM_SHARE)
            self._outcomes[outcome] += 1
            self._by_model[model] += 1

    async def _learn(self, model: str, prompt: str) -> None:
        async with self._session.post(f"{self._url}/v1/completions", json=_body(model, prompt)) as answer:
            answer.raise_for_status()
            self._expected[model, prompt] = (await answer.json())["choices"][0]["text"]

    async def _ask(self, model: str, prompt: str, stream: bool) -> str:
        """The outcome. Everything that is not one of the others is lost."""
        body = {**_body(model, prompt), "stream": stream}
        try:
            async with self._session.post(f"{self._url}/v1/completions", json=body) as answer:
                data = await answer.read()
                if answer.status != 200:
                    code = json.loads(data)["error"]["code"]
                    self._codes[f"{answer.status} {code}"] += 1
                    return REFUSED
                served_by = answer.headers.get("x-teneral-model")
        except (OSError, aiohttp.ClientError, TimeoutError, ValueError, LookupError) as error:
            self._examples.append(f"{LOST}: {model}: {error!r}"[:300])
            return LOST
        text, ended = _streamed(data) if stream else (json.loads(data)["choices"][0]["text"], "done")
        expected = self._expected[model, prompt]
        if ended == "error" and expected.startswith(text):
            self._codes["stream instance_lost"] += 1
            return STREAM_ERROR
        outcome = LOST if not ended else RIGHT if (served_by, text) == (model, expected) else WRONG
        if outcome != RIGHT:
            self._examples.append(f"{outcome}: {model}: {served_by} {text!r}, not {expected!r}"[:300])
        return outcome

    # in parallel with the clients

    async def _state(self) -> dict[str, Any]:
        async with self._session.get(f"{self._url}/v1/pool") as answer:
            return dict(await answer.json())

    async def _kill(self) -> None:
        """A ready instance each time, one with requests where there is any."""
        while True:
            await asyncio.sleep(self._options.kill_every_s)
            instances = _instances(await self._state())
            busy = [each for each in instances if each["in_work"]] or instances
            if busy:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(self._rng.choice(busy)["process"], signal.SIGKILL)
                    self._kills += 1

    async def _watch(self) -> None:
        while True:
            state = await self._state()
            memory = state["memory"]
            used = await asyncio.to_thread(_used_bytes, self._pool.process.pid)
            self._budget_bytes = memory["budget_bytes"]
            self._most_used_bytes = max(self._most_used_bytes, used)
            self._most_reserved_bytes = max(self._most_reserved_bytes, memory["reserved_bytes"])
            self._most_instances = max(self._most_instances, len(_instances(state)))
            await asyncio.sleep(SAMPLE_S)

    async def _progress(self) -> None:
        while True:
            await asyncio.sleep(30)
            note(f"{time.monotonic() - self._began_s:.0f} s: {dict(self._outcomes)}, {self._kills} kills")


def _body(model: str, prompt: str) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}


def _streamed(data: bytes) -> tuple[str, str]:
    """The text of a stream, and how it ended: done, error or '' when it says neither."""
    text = ""
    for line in data.split(b"\n"):
        if not line.startswith(b"data: "):
            continue
        if line == b"data: [DONE]":
            return text, "done"
        piece = json.loads(line[6:])
        if "error" in piece:
            return text, "error"
        text += "".join(choice["text"] for choice in piece["choices"])
    return text, ""


def _instances(state: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        each
        for model in state["models"].values()
        for version in model["versions"]
        for each in version["instances"]
    ]


def _used_bytes(front: int) -> int:
    """PSS of all processes of the pool but the front itself."""
    children = Path(f"/proc/{front}/task")
    found: set[int] = set()
    with contextlib.suppress(OSError):
        for task in children.iterdir():
            with contextlib.suppress(OSError):
                found |= set(map(int, (task / "children").read_text().split()))
    return sum(map(tree_pss_bytes, found))


def render(report: dict[str, Any]) -> str:
    results, goals = report["results"], report["goals"]
    outcomes = results["outcomes"]
    share, reserved = (
        results[f"most_{kind}_bytes"] / max(1, results["budget_bytes"]) for kind in ("used", "reserved")
    )
    rows = [
        ["requests", f"{results['requests']:,}", "–"],
        ["kills", f"{results['kills']}", f"every {report['kill_every_s']:g} s"],
        ["right", f"{outcomes.get(RIGHT, 0):,}", "–"],
        ["refused, with a status and a code", str(outcomes.get(REFUSED, 0)), "–"],
        ["streams ended by an error event", str(outcomes.get(STREAM_ERROR, 0)), "–"],
        ["wrong", str(outcomes.get(WRONG, 0)), str(goals["wrong"])],
        ["lost in silence", str(outcomes.get(LOST, 0)), str(goals["lost"])],
        ["most memory in use (PSS), of the budget", f"{share:.3f}", f"≤ {goals['over_budget']}"],
        ["most memory reserved, of the budget", f"{reserved:.3f}", f"≤ {goals['over_budget']}"],
        ["most instances at once", str(results["most_instances"]), f"≤ {report['models_that_fit']}"],
        [
            "models that answer right afterwards",
            str(results["answers_after"].get(RIGHT, 0)),
            str(report["models"]),
        ],
    ]
    head = title(report, "pool whose instances are killed", f"{results['seconds']:g} s")
    lines = [head, table(["what", "here", "goal"], rows)]
    lines += [f"refusals: {results['codes']}", f"starts and evictions: {results['counts']}"]
    return "\n".join([*lines, *results["examples"][:5]])


if __name__ == "__main__":
    main()
