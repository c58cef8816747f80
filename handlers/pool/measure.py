"""`teneral pool measure`: starts instances of each model here, and writes the figures that `teneral pool plan` reads.

A start is what it adds to the first token of a request that waits for it, in time and CPU time: instances are ready
before all of their weights are there. Starts are medians of several, taken over from a standby process where the file
keeps any. Speeds are those of an instance that has the machine to itself, without look-ahead: what that brings depends
on the texts.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import aiohttp

from ...loader.errors import TeneralError, UnavailableError, UsageError
from ...runtime.config import ServeConfig
from ..standby.handover import ask_status
from .file import read_pool
from .memory import process_tree, tree_pss_bytes
from .process import ServerProcess, StandbyChild, inherited_environment, instance_config, start_server
from .repository import Release, ReleaseRepository
from .values import Model, Pool

SCHEMA = 1
BATCHES = (1, 2, 4, 8)
OUTPUT_TOKENS = 48
FIRST_PROMPT_WORDS = 4  # of the request that waits for a start
PROMPT_WORDS = (128, 64, 32, 16)  # of the long prompt: the first that fits the model's context
REPEATS = 5
BATCH_REPEATS = 3
MAX_COLD_STARTS = 3
MIN_PROMPT_S = (
    0.1  # a shorter prompt says nothing of the cores: processor time is counted in hundredths of a second
)
MAX_OTHER_CORES = 0.2  # beyond it figures are those of a busy machine
MIN_GAIN = 0.95  # of a batch, relative to a smaller one
PAUSE_S = 0.2  # between requests: one that finds its instance idle takes longer than one of a queue
MAX_TAKEN = 4
TAKEN_S = 0.05  # until the pool knows that a process was taken: one that is killed before counts as failed
BASE_POLL_S = 0.1
REFILL_S = 4.0  # until another standby process is there, and the machine is quiet again


def measure(file: str, *, num_starts: int = 5, output: str | None = None) -> int:
    """Measure all models of the file, one after the other. Blocks. Returns 0.

    Writes `output`, by default `pool.measured.json` in the file's folder.
    """
    if not 1 <= num_starts <= 1000:
        raise UsageError("--starts must be from 1 to 1000", key="starts")
    pool = read_pool(file)
    figures = asyncio.run(_measure_all(pool, num_starts))
    path = Path(output) if output is not None else pool.folder / "pool.measured.json"
    document = {"schema": SCHEMA, "cores": os.cpu_count(), "models": figures}
    path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"{path}: {len(figures)} models measured, {num_starts} starts each")
    return 0


async def _measure_all(pool: Pool, num_starts: int) -> dict[str, dict[str, Any]]:
    environment = dict(os.environ)
    repository = ReleaseRepository(pool.folder)
    with tempfile.TemporaryDirectory(prefix="teneral-measure-") as folder:
        standby = None
        if pool.node.standby:
            standby = StandbyChild(Path(folder), pool)
            standby.start()
        try:
            base = await asyncio.to_thread(repository.standby_base, pool.node)
            if standby is not None and base is not None:
                await _wait_base(standby)
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
                figures = {}
                for model in pool:
                    releases, _ = await asyncio.to_thread(repository.releases, model)
                    config = instance_config(pool, model, releases[-1], Path(folder), environment)
                    run = _Measurement(
                        model, releases[-1], config, standby, inherited_environment(environment), session
                    )
                    others = OtherWork()
                    figures[model.name] = found = await run.figures(num_starts, pool.node.standby)
                    found["other_cores"] = round(others.cores(), 2)
                    for warning in doubts(found["other_cores"], found.get("decode_tokens_s", {})):
                        print(f"teneral: warning: {model.name}: {warning}", file=sys.stderr)
                    if base is not None and base.revision == releases[-1].revision:
                        figures[model.name]["bytes"] = 0  # its weights are there
                return figures
        finally:
            if standby is not None:
                await standby.end()


async def _wait_base(standby: StandbyChild) -> None:
    """Wait until its processes have their base. Raises `UnavailableError` where the pool ends, or loads no base."""
    status: dict[str, Any] = {}
    while standby.runs and not status.get("bytes"):
        await asyncio.sleep(BASE_POLL_S)
        with suppress(UnavailableError):  # it imports yet
            status = (await asyncio.to_thread(ask_status, standby.socket_path))["base"]
    if not standby.runs:
        raise UnavailableError("the standby pool ended before it had its base", hint="Its log says why.")


class _Measurement:
    """The measurements of one model."""

    def __init__(
        self,
        model: Model,
        release: Release,
        config: ServeConfig,
        standby: StandbyChild | None,
        environment: dict[str, str],
        session: aiohttp.ClientSession,
    ) -> None:
        self._model = model
        self._release = release
        # Look-ahead would decode these prompts of one word several times as fast as others.
        self._config = config.replace(kv_snapshot=None, prefix_cache=False, look_ahead=0)
        self._standby = standby
        self._environment = environment
        self._session = session
        self._number = 0

    async def figures(self, num_starts: int, num_standby: int) -> dict[str, Any]:
        """The figures that `infra.plan.instance_model.Profile` reads, and some for people."""
        starts: list[float] = []
        ready: list[float] = []
        cpu: list[float] = []
        peak_bytes = 0
        speeds: dict[str, Any] = {}
        await self._start_once()  # a standby pool may be importing yet, files may not be in memory
        for number in range(num_starts):
            await self._wait_standby()
            began_s = time.monotonic()
            process = await start_server(self._config, standby=self._standby, environment=self._environment)
            before_s = tree_cpu_s(process.pid)  # a standby process has used some while it waited
            try:
                await process.wait_ready(self._session, self._model.ready_path)
                ready.append(time.monotonic() - began_s)
                with suppress(TeneralError):  # an encoder is ready when it is
                    await self._complete(process, FIRST_PROMPT_WORDS, 1)
                starts.append(time.monotonic() - began_s)
                cpu.append(tree_cpu_s(process.pid) - before_s)
                print(
                    f"{self._model.name}: start {number + 1} of {num_starts}: {starts[-1]:.3f} s ({process.kind})",
                    file=sys.stderr,
                )
                if number == num_starts - 1:
                    speeds = await self._speeds(process)
                peak_bytes = max(peak_bytes, await asyncio.to_thread(tree_pss_bytes, process.pid))
            finally:
                await process.end(1.0)
        warm_s = speeds.pop("warm_s", 0.0)
        refill = {}
        if 0 < num_standby <= MAX_TAKEN:  # more are enough for any burst that the machine could start at once
            refill["refill_s"] = round(await self._refill_s(num_standby), 4)
        cold = (
            {} if self._standby is None else await self._cold_start(min(num_starts, MAX_COLD_STARTS), warm_s)
        )
        return {
            "start_s": round(max(1e-4, statistics.median(starts) - warm_s), 4),
            "ready_share": round(
                min(1.0, statistics.median(ready) / max(1e-4, statistics.median(starts) - warm_s)), 3
            ),
            "start_cpu_s": round(max(0.0, statistics.median(cpu) - warm_s), 4),
            "bytes": self._release.stored_bytes,
            "standby": num_standby,
            **refill,
            **cold,
            "peak_mb": round(peak_bytes / 1e6, 1),
            "starts_s": [round(each, 4) for each in starts],
            **speeds,
        }

    async def _cold_start(self, num_starts: int, warm_s: float) -> dict[str, float]:
        """The start without a standby process: medians."""
        runs = []
        for _ in range(num_starts):
            began_s = time.monotonic()
            process = await start_server(self._config, standby=None, environment=self._environment)
            try:
                await process.wait_ready(self._session, self._model.ready_path)
                with suppress(TeneralError):
                    await self._complete(process, FIRST_PROMPT_WORDS, 1)
                runs.append((time.monotonic() - began_s, tree_cpu_s(process.pid)))
            finally:
                await process.end(1.0)
        start_s, cpu_s = (statistics.median(figures) - warm_s for figures in zip(*runs, strict=True))
        return {"cold_start_s": round(max(1e-4, start_s), 4), "cold_start_cpu_s": round(max(0.0, cpu_s), 4)}

    async def _start_once(self) -> None:
        process = await start_server(self._config, standby=self._standby, environment=self._environment)
        try:
            await process.wait_ready(self._session, self._model.ready_path)
        finally:
            await process.end(1.0)

    async def _refill_s(self, num_standby: int) -> float:
        """Time until a standby process that was taken has been replaced: the longest hand-over, when one more is taken
        in a row than there are. The servers are killed as they begin.
        """
        await self._wait_standby()
        longest_s, taken = 0.0, []
        try:
            for _ in range(num_standby + 1):
                began_s = time.monotonic()
                taken.append(
                    await start_server(self._config, standby=self._standby, environment=self._environment)
                )
                longest_s = max(longest_s, time.monotonic() - began_s)
            await asyncio.sleep(TAKEN_S)
        finally:
            for process in taken:
                process.signal(signal.SIGKILL)
                await process.ended.wait()
        return longest_s

    async def _wait_standby(self) -> None:
        """Wait for a standby process: starts are measured one by one, each with one ready."""
        if self._standby is not None:
            await asyncio.sleep(REFILL_S)

    async def _speeds(self, process: ServerProcess) -> dict[str, Any]:
        with suppress(TeneralError):
            return await self._decoder_speeds(process)
        return {}  # an encoder: its requests have no tokens to generate

    async def _decoder_speeds(self, process: ServerProcess) -> dict[str, Any]:
        long = await self._longest(process)
        short = long // 8
        await self._complete(process, short, OUTPUT_TOKENS)  # pages are touched
        _, warm_s, _ = await self._first_token(process, FIRST_PROMPT_WORDS)
        few, short_s, short_ratios = await self._first_token(process, short)
        cpu_s = tree_cpu_s(process.pid)
        many, long_s, long_ratios = await self._first_token(process, long)
        cpu_s = tree_cpu_s(process.pid) - cpu_s
        per_token_s = max(1e-7, (long_s - short_s) / max(1, many - few))
        overhead_s = max(0.0, short_s - few * per_token_s)
        cores = max(1.0, cpu_s / (REPEATS * long_s)) if long_s >= MIN_PROMPT_S else 1.0
        rates: dict[str, float] = {}
        for batch in BATCHES:
            if batch > self._model.max_concurrency:
                break
            times = []
            for _ in range(BATCH_REPEATS):
                cpu_s, began_s = tree_cpu_s(process.pid), time.monotonic()
                await asyncio.gather(*(self._complete(process, short, OUTPUT_TOKENS) for _ in range(batch)))
                times.append(time.monotonic() - began_s)
                cores = max(cores, (tree_cpu_s(process.pid) - cpu_s) / times[-1])
            seconds = statistics.median(times)
            # On a busy machine the other requests may have taken longer than these: at most half is not decoding.
            decoding_s = max(seconds / 2, seconds - overhead_s - batch * few * per_token_s)
            rates[str(batch)] = round(batch * (OUTPUT_TOKENS - 1) / decoding_s, 2)
        return {
            "prefill_tokens_s": round(1 / per_token_s, 1),
            "overhead_s": round(overhead_s, 5),
            "warm_s": warm_s,
            "decode_tokens_s": rates,
            "overhead_ratios": short_ratios,
            "prompt_ratios": long_ratios,
            "work_cores": round(min(cores, os.cpu_count() or 1), 2),
        }

    async def _first_token(self, process: ServerProcess, num_words: int) -> tuple[int, float, list[float]]:
        """Tokens of the prompt, the median seconds to the first token of an idle instance, and single ones' ratios to
        it. Prompts differ by a few tokens.
        """
        runs = []
        for _ in range(REPEATS):
            await asyncio.sleep(PAUSE_S)
            runs.append(await self._complete(process, num_words, 1))
        median_s = statistics.median(seconds for _, seconds in runs)
        ratios = [round(seconds / median_s, 3) for _, seconds in runs]
        return round(statistics.median(tokens for tokens, _ in runs)), median_s, ratios

    async def _longest(self, process: ServerProcess) -> int:
        """Words of the longest prompt that the model takes. Raises `TeneralError` where it takes none."""
        for words in PROMPT_WORDS[:-1]:
            with suppress(TeneralError):
                await self._complete(process, words, 1)
                return words
        await self._complete(process, PROMPT_WORDS[-1], 1)
        return PROMPT_WORDS[-1]

    async def _complete(self, process: ServerProcess, num_words: int, num_tokens: int) -> tuple[int, float]:
        """Tokens of the prompt, and seconds. No two prompts begin alike."""
        self._number += 1
        prompt = f"{self._number} " + " ".join(f"word{self._number}" for _ in range(num_words))
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True}
        headers = {} if self._config.api_key is None else {"Authorization": f"Bearer {self._config.api_key}"}
        began_s = time.monotonic()
        async with self._session.post(f"{process.url}/v1/completions", json=body, headers=headers) as answer:
            result = await answer.json()
            if answer.status != 200:
                raise TeneralError(str(result.get("error", result)))
        return int(result["usage"]["prompt_tokens"]), time.monotonic() - began_s


class OtherWork:
    """The other work of this machine while this value lives."""

    def __init__(self) -> None:
        self._began_s = time.monotonic()
        self._busy_s = machine_cpu_s()
        self._own_s = tree_cpu_s(os.getpid())

    def cores(self) -> float:
        """Cores that other processes have used since, on average; 0 where the system does not say."""
        others_s = machine_cpu_s() - self._busy_s - (tree_cpu_s(os.getpid()) - self._own_s)
        return max(0.0, others_s / max(1e-3, time.monotonic() - self._began_s))


def doubts(other_cores: float, rates: Mapping[str, float]) -> Iterator[str]:
    """Reasons to doubt the figures. `rates` are tokens/s by batch, in the order of the batches."""
    if other_cores > MAX_OTHER_CORES:
        yield (
            f"other processes used {other_cores:.1f} of {os.cpu_count()} cores meanwhile: "
            "these are not the figures of this machine; measure again when it is idle"
        )
    for (few, less), (many, more) in itertools.pairwise(rates.items()):
        if more < MIN_GAIN * less:
            yield (
                f"{more:,.0f} tokens/s in batches of {many} are fewer than {less:,.0f} in batches of {few}: "
                "measure again"
            )


def machine_cpu_s() -> float:
    """Processor time that the machine has used, all processes together; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        user, nice, system, _idle, _wait, irq, soft_irq = map(
            int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:8]
        )
        return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")
    return 0.0


def tree_cpu_s(pid: int) -> float:
    """CPU time that a process and its descendants have used, those that have ended and were waited for included."""
    ticks = 0
    for each in process_tree(pid):
        with suppress(OSError, ValueError, IndexError):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")
