"""Synthetic traces: `poisson:`, `bursty:` (a two-state Markov-modulated Poisson process) and `diurnal:`.

    poisson:rate=2,duration=3600
    bursty:rate=5,on=40,off=860,duration=21600           bursts of 40 s on average, 900 s apart
    diurnal:rate=1,peak=10,period=86400,duration=86400

All take `prompt`, `output` (mean tokens, geometric), `seed` and `model`.
"""

from __future__ import annotations

import math
import random

from ...loader.errors import UsageError
from .trace import MAX_REQUESTS, Request

_DEFAULTS: dict[str, dict[str, float]] = {
    "poisson": {"rate": 1.0},
    "bursty": {"rate": 5.0, "on": 40.0, "off": 860.0, "base": 0.0},
    "diurnal": {"rate": 1.0, "peak": 10.0, "period": 86_400.0},
}
_COMMON = {"duration": 3600.0, "prompt": 256.0, "output": 64.0, "seed": 0.0}


def synthesize(spec: str, *, model: str) -> list[Request]:
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
            values[name] = float(text) if name in values else math.nan
        except ValueError:
            values[name] = math.nan
        if not math.isfinite(values[name]) or values[name] < 0:
            known = ", ".join((*values, "model"))
            raise UsageError(f"{spec}: cannot read {item!r}", key="synthetic", hint=f"Known: {known}.")
    if max(values["rate"], values.get("peak", 0.0)) * values["duration"] > MAX_REQUESTS:
        raise UsageError(f"{spec}: that is more than {MAX_REQUESTS:,} requests", key="synthetic")
    rng = random.Random(int(values["seed"]))  # noqa: S311 - arrivals are no secret
    return [
        Request(t_s, model, _tokens(rng, values["prompt"]), _tokens(rng, values["output"]))
        for t_s in _times(kind, values, rng)
    ]


def _tokens(rng: random.Random, mean: float) -> int:
    return 0 if mean <= 0 else max(1, math.ceil(rng.expovariate(1 / mean)))


def _times(kind: str, values: dict[str, float], rng: random.Random) -> list[float]:
    """By thinning: candidates at the highest rate, each kept with the share of the rate at its time."""
    highest = max(values["rate"], values.get("peak", 0.0), values.get("base", 0.0))
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
