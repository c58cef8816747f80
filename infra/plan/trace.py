"""Traces of arrivals: readers of recorded ones, synthetic ones, and the requests that they are made of.

Recorded formats, by their first line: JSON lines or CSV with `t,model,prompt_tokens,output_tokens` (seconds from any
origin); Azure LLM 2023 (`TIMESTAMP,ContextTokens,GeneratedTokens`); Azure Functions 2021
(`app,func,end_timestamp,duration`), whose durations stand for the work. Synthetic ones:

    poisson:rate=2,duration=3600
    bursty:rate=5,on=40,off=860,duration=21600           bursts of 40 s on average, 900 s apart (two-state Markov)
    diurnal:rate=1,peak=10,period=86400,duration=86400

All of these take `prompt`, `output` (mean tokens, geometric), `seed` and `model`.
"""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ...loader.errors import UsageError

MAX_REQUESTS = 5_000_000
MAX_FILE_BYTES = 1 << 30
MAX_TOKENS = 10_000_000
_DEFAULTS: dict[str, dict[str, float]] = {
    "poisson": {"rate": 1.0},
    "bursty": {"rate": 5.0, "on": 40.0, "off": 860.0, "base": 0.0},
    "diurnal": {"rate": 1.0, "peak": 10.0, "period": 86_400.0},
}
_COMMON = {"duration": 3600.0, "prompt": 256.0, "output": 64.0, "seed": 0.0}


class ArrivedRequest(NamedTuple):
    """One arrival. `work_s` is its whole time at an instance that does nothing else, where a trace gives that; None: it
    follows from its tokens.
    """

    t_s: float
    model: str
    prompt_tokens: int
    output_tokens: int
    work_s: float | None = None


def read_trace(path: str | Path, *, model: str) -> list[ArrivedRequest]:
    """The requests of a file in order of time, the first at 0. `model` is that of those which name none.

    Raises `UsageError` naming the line that cannot be read.
    """
    try:
        size_bytes = Path(path).stat().st_size
        if size_bytes > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes", key="trace")
        text = Path(path).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the trace {path}: {error}", key="trace") from error
    requests: list[ArrivedRequest] = []
    for number, request in _requests(text, model, str(path)):
        if not all(map(math.isfinite, (request.t_s, request.work_s or 0.0))) or (request.work_s or 0.0) < 0:
            raise UsageError(f"{path}:{number}: times must be finite", key="trace")
        if not all(0 <= tokens <= MAX_TOKENS for tokens in (request.prompt_tokens, request.output_tokens)):
            raise UsageError(f"{path}:{number}: tokens must be from 0 to {MAX_TOKENS:,}", key="trace")
        requests.append(request)
        if len(requests) > MAX_REQUESTS:
            raise UsageError(f"{path} has more than {MAX_REQUESTS:,} requests", key="trace")
    if not requests:
        raise UsageError(f"{path} has no requests", key="trace")
    return in_order(requests)


def in_order(requests: Iterable[ArrivedRequest]) -> list[ArrivedRequest]:
    """Sorted by time, the first at 0."""
    ordered = sorted(requests, key=lambda request: request.t_s)
    origin_s = ordered[0].t_s if ordered else 0.0
    return [request._replace(t_s=request.t_s - origin_s) for request in ordered]


def _requests(text: str, model: str, path: str) -> Iterator[tuple[int, ArrivedRequest]]:
    first = text.lstrip()[:1]
    if first == "{":
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield number, _guarded(lambda line=line: _from_json(line, model), path, number)  # type: ignore[misc]
        return
    rows = csv.reader(io.StringIO(text))
    header = [name.strip() for name in next(rows, [])]
    read = _READERS.get(frozenset(header))
    if read is None:
        raise UsageError(
            f"{path}: unknown columns {', '.join(header[:8])}",
            key="trace",
            hint="Give t,model,prompt_tokens,output_tokens; or a trace of Azure's, LLM 2023 or Functions 2021.",
        )
    for number, row in enumerate(rows, 2):
        if row:
            values = dict(zip(header, row, strict=False))
            yield number, _guarded(lambda values=values: read(values, model), path, number)  # type: ignore[misc]


def _guarded(make: Callable[[], ArrivedRequest], path: str, number: int) -> ArrivedRequest:
    try:
        return make()
    except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(f"{path}:{number}: not a request: {error}", key="trace") from error


def _from_json(line: str, model: str) -> ArrivedRequest:
    value = json.loads(line)
    return ArrivedRequest(
        float(value["t"]),
        str(value.get("model", model)),
        int(value["prompt_tokens"]),
        int(value["output_tokens"]),
    )


def _plain(row: dict[str, str], model: str) -> ArrivedRequest:
    return ArrivedRequest(
        float(row["t"]), row.get("model") or model, int(row["prompt_tokens"]), int(row["output_tokens"])
    )


def _azure_llm(row: dict[str, str], model: str) -> ArrivedRequest:
    text = row["TIMESTAMP"]
    head, _, fraction = text.partition(".")
    seconds = datetime.fromisoformat(head).timestamp() + float(f"0.{fraction.rstrip('Z') or 0}")
    return ArrivedRequest(seconds, model, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def _azure_functions(row: dict[str, str], model: str) -> ArrivedRequest:
    duration_s = float(row["duration"])
    return ArrivedRequest(float(row["end_timestamp"]) - duration_s, model, 0, 0, duration_s)


_READERS: dict[frozenset[str], Callable[[dict[str, str], str], ArrivedRequest]] = {
    frozenset({"t", "model", "prompt_tokens", "output_tokens"}): _plain,
    frozenset({"t", "prompt_tokens", "output_tokens"}): _plain,
    frozenset({"TIMESTAMP", "ContextTokens", "GeneratedTokens"}): _azure_llm,
    frozenset({"app", "func", "end_timestamp", "duration"}): _azure_functions,
}


def synthesize(spec: str, *, model: str) -> list[ArrivedRequest]:
    """The requests of a spec. The same spec gives the same requests. Raises `UsageError`."""
    kind, _, rest = spec.partition(":")
    if kind not in _DEFAULTS:
        raise UsageError(
            f"unknown kind of arrivals {kind!r}", key="synthetic", hint="Give poisson:, bursty: or diurnal:."
        )
    values = {**_COMMON, **_DEFAULTS[kind]}
    for item in filter(None, rest.split(",")):
        name, _, text = item.partition("=")
        if name == "model":
            model = text
            continue
        try:
            value = float(text) if name in values else math.nan
        except ValueError:
            value = math.nan
        if not 0 <= value < math.inf:
            known = ", ".join((*values, "model"))
            raise UsageError(f"{spec}: cannot read {item!r}", key="synthetic", hint=f"Known: {known}.")
        values[name] = value
    if _highest_rate(values) * values["duration"] > MAX_REQUESTS:
        raise UsageError(f"{spec}: that is more than {MAX_REQUESTS:,} requests", key="synthetic")
    rng = random.Random(int(values["seed"]))  # noqa: S311 - arrivals are no secret
    return [
        ArrivedRequest(t_s, model, _tokens(rng, values["prompt"]), _tokens(rng, values["output"]))
        for t_s in _times(kind, values, rng)
    ]


def _tokens(rng: random.Random, mean: float) -> int:
    return 0 if mean <= 0 else max(1, math.ceil(rng.expovariate(1 / mean)))


def _highest_rate(values: dict[str, float]) -> float:
    """Requests a second."""
    return max(values["rate"], values.get("peak", 0.0), values.get("base", 0.0))


def _times(kind: str, values: dict[str, float], rng: random.Random) -> list[float]:
    """By thinning: candidates at the highest rate, each kept with the share of the rate at its time."""
    highest = _highest_rate(values)
    if highest <= 0:
        return []
    times: list[float] = []
    t_s = rng.expovariate(highest)
    is_on, changes_at_s = False, 0.0
    while t_s < values["duration"]:
        if kind == "bursty":
            while t_s >= changes_at_s:
                is_on = not is_on
                mean_s = max(1e-6, values["on"] if is_on else values["off"])
                changes_at_s += rng.expovariate(1 / mean_s)
            rate = values["rate"] if is_on else values["base"]
        elif kind == "diurnal":
            wave = (1 - math.cos(2 * math.pi * t_s / max(1e-6, values["period"]))) / 2
            rate = values["rate"] + (values["peak"] - values["rate"]) * wave
        else:
            rate = values["rate"]
        if rng.random() * highest < rate:
            times.append(t_s)
        t_s += rng.expovariate(highest)
    return times
