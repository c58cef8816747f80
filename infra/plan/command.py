"""`teneral pool plan`: a pool file, a trace and measured figures become cold share, first-token times and cost."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path

from ...handlers.pool.file import read_pool
from ...handlers.pool.values import Pool
from ...loader.errors import UsageError
from .arrivals import synthesize
from .cost import Price, parse_price
from .instance_model import Profile, parse_assumptions, profile_of, read_profiles
from .report import Plan, page
from .search import search, try_out
from .trace import Request, in_order, read_trace

DEFAULT_MEASURED = "pool.measured.json"


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The command's flags."""

    file: str = "pool.toml"
    trace: str | None = None
    synthetic: tuple[str, ...] = ()
    measured: str | None = None
    assume: tuple[str, ...] = field(default_factory=tuple)
    price: str | None = None
    platform_s: float | None = None
    cores: float | None = None
    as_json: bool = False
    html: str | None = None


def plan(options: PlanOptions) -> int:
    """Prints the plans of the models that the trace names. Returns 0; raises `TeneralError`."""
    pool = read_pool(options.file)
    requests = _requests(pool, options)
    profiles = _profiles(pool, options)
    price = parse_price(options.price)
    plans = []
    for name in pool.models:
        own = in_order(request for request in requests if request.model == name)
        if own:
            plans.append(_plan(pool, name, own, profiles[name], price, options.cores))
    if not plans:
        named = sorted({request.model for request in requests})
        raise UsageError(
            f"the trace names no model of {options.file}: {', '.join(named[:5])}",
            key="trace",
            hint=f"Models: {', '.join(pool.models)}.",
        )
    if options.html is not None:
        Path(options.html).write_text(page(plans), encoding="utf-8")
    if options.as_json:
        json.dump({"schema": 1, "plans": [each.as_json() for each in plans]}, sys.stdout, indent=2)
        print()
    else:
        print("\n\n".join(each.render() for each in plans))
    return 0


def _plan(
    pool: Pool, name: str, requests: list[Request], profile: Profile, price: Price, cores: float | None
) -> Plan:
    model = pool.models[name]
    return Plan(
        model=model,
        profile=profile,
        num_requests=len(requests),
        duration_s=requests[-1].t_s,
        as_written=try_out(requests, model, profile, price, cores),
        choices=search(requests, model, profile, price, cores),
        ttft_p99_s=pool.slo.ttft_p99_s,
        price=price,
    )


def _requests(pool: Pool, options: PlanOptions) -> list[Request]:
    """Of the trace and the synthetic arrivals. Those that name no model are the first one's."""
    first = next(iter(pool.models))
    requests: list[Request] = []
    if options.trace is not None:
        requests += read_trace(options.trace, model=first)
    for spec in options.synthetic:
        requests += synthesize(spec, model=first)
    if not requests:
        raise UsageError(
            "no arrivals were given", key="trace", hint="Give --trace FILE or --synthetic bursty:…."
        )
    return in_order(requests)


def _profiles(pool: Pool, options: PlanOptions) -> dict[str, Profile]:
    measured: dict[str, Profile] = {}
    path = options.measured or str(pool.folder / DEFAULT_MEASURED)
    if options.measured is not None or Path(path).exists():
        measured = read_profiles(path)
    assumed: dict[str, object] = dict(parse_assumptions(list(options.assume)))
    if options.platform_s is not None:
        assumed["platform_s"] = options.platform_s
    profiles = {}
    for name in pool.models:
        if name not in measured and not assumed:
            raise UsageError(
                f"nothing is known of how {name} starts and answers",
                key="measured",
                hint=f"Measure it: teneral pool measure {options.file}. Or give --assume start_s=1 and so on.",
            )
        profiles[name] = profile_of(assumed, "--assume", measured.get(name))
    return profiles
