"""`teneral pool plan`: a pool file, a trace and measured figures become cold share, first-token times, instances over
time and cost, as text, JSON and a page; on one host, in a fleet, or with a machine for each instance.
"""

from __future__ import annotations

import html
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...handlers.pool.file import read_pool
from ...handlers.pool.values import Model, Pool
from ...loader.errors import UsageError
from .fleet import FleetFetch, fetch_all, parse_fleet
from .instance_model import Profile, parse_assumptions, profile_of, read_profiles
from .outcome import Price, parse_price
from .search import Host, PoolChoice, cheapest, pareto, search, three_ways, try_out
from .trace import ArrivedRequest, in_order, read_trace, synthesize

DEFAULT_MEASURED = "pool.measured.json"
MILLION = 1_000_000
PARTS_OF_TIME = 24  # of the instances over time


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """One model's: the pool as the file has it, and the grid or, where `ways` has any, the ways to keep capacity."""

    model: Model
    profile: Profile
    num_requests: int
    duration_s: float
    as_written: PoolChoice
    choices: list[PoolChoice]
    ttft_p99_s: float | None  # the objective
    price: Price
    ways: dict[str, PoolChoice]
    fetches: list[FleetFetch]  # of a fleet
    places: int

    @property
    def advice(self) -> PoolChoice | None:
        """The cheapest pool that meets the objective."""
        return None if self.ttft_p99_s is None else cheapest(self.choices, self.ttft_p99_s)

    def as_json(self) -> dict[str, Any]:
        advice = self.advice
        return {
            "model": self.model.name,
            "requests": self.num_requests,
            "duration_s": round(self.duration_s, 3),
            "profile": self.profile.as_json(),
            "as_written": {**_row(self.as_written), "instances": self._instances},
            "ways": {name: _way(choice, self.num_requests) for name, choice in self.ways.items()},
            "all_at_once": [{"instances": self.places, **fetch._asdict()} for fetch in self.fetches],
            "pareto": [_row(choice) for choice in pareto(self.choices)],
            "objective_ttft_p99_s": self.ttft_p99_s,
            "cheapest": None if advice is None else _row(advice),
            "cost_unit": self.price.unit,
        }

    @property
    def _instances(self) -> list[int]:
        return self.as_written.outcome.over_time(self.duration_s, PARTS_OF_TIME)

    def render(self) -> str:
        lines = [
            f"{self.model.name}: {self.num_requests:,} requests in {self.duration_s:,.0f} s",
            _HEADER.format(cost=self.price.unit),
            _line(self.as_written, "as written"),
            *(_line(choice, "") for choice in pareto(self.choices)),
            f"  instances over time, as written: {' '.join(map(str, self._instances))}",
        ]
        if self.ways:
            lines += [_WAYS_HEADER, *(_way_line(*way, self.num_requests) for way in self.ways.items())]
            if unpriced := self._unpriced:
                lines.append(f"  not in the cost, for want of a price: {unpriced}")
            if "cold" not in self.ways:
                lines.append("  no row for cold: --assume cold_start_s=, or measure again")
        if self.fetches:
            lines.append(
                f"  {self.places:,} starts at once: bytes from the store, and time of all bytes on the links"
            )
            lines += map(_fetch_line, self.fetches)
        if self.ttft_p99_s is not None:
            advice = self.advice
            cheapest = "none of these pools" if advice is None else advice.settings
            lines.append(f"cheapest with a first token's p99 of at most {self.ttft_p99_s:g} s: {cheapest}")
        return "\n".join(lines)

    @property
    def _unpriced(self) -> str:
        prices = {"standby processes": self.price.standby_per_hour, "the store's bytes": self.price.per_gb}
        return ", ".join(name for name, price in prices.items() if price is None)


_HEADER = "  {:>10} {:>7} {:>6}  {:>7} {:>8} {:>8} {:>11} {:>7} {{cost:>11}}".format(
    "min_warm", "buffer", "idle s", "cold", "p50 s", "p99 s", "instance-h", "refused"
)


def _line(choice: PoolChoice, mark: str) -> str:
    model, outcome = choice.model, choice.outcome
    kept = "hybrid" if model.policy == "hybrid" else f"{model.idle_timeout_s:g}"
    row = (
        f"  {model.min_warm:>10} {model.buffer:>7} {kept:>6}  {100 * outcome.cold_share:>6.2f}%"
        f" {choice.ttft_p50_s:>8.3f} {choice.ttft_p99_s:>8.3f} {outcome.instance_s / 3600:>11.3f}"
        f" {outcome.refused:>7} {choice.cost:>11.4f}"
    )
    return f"{row}  {mark}".rstrip()


_WAYS_HEADER = "  {:>10} {:>9} {:>7} {:>8} {:>8} {:>11} {:>9} {:>9} {:>9} {:>14}".format(
    "kept", "instances", "cold", "p50 s", "p99 s", "instance-h", "standby-h", "store GB", "cost", "a million"
)


def _way_line(name: str, choice: PoolChoice, num_requests: int) -> str:
    outcome = choice.outcome
    return (
        f"  {name:>10} {outcome.most:>9,} {100 * outcome.cold_share:>6.2f}% {choice.ttft_p50_s:>8.3f}"
        f" {choice.ttft_p99_s:>8.3f} {outcome.instance_s / 3600:>11.3f} {choice.standby_s / 3600:>9.2f}"
        f" {outcome.store_bytes / 1e9:>9.1f} {choice.cost:>9.4f} {choice.cost / num_requests * MILLION:>14.4f}"
    )


def _way(choice: PoolChoice, num_requests: int) -> dict[str, Any]:
    cost = choice.cost / num_requests * MILLION
    return {**_row(choice), "standby_s": round(choice.standby_s, 1), "cost_of_a_million": round(cost, 6)}


def _fetch_line(fetch: FleetFetch) -> str:
    time = "" if fetch.seconds is None else f" {fetch.seconds:>10,.1f} s"
    return f"  {fetch.weights:>10} {fetch.store_bytes / 1e9:>12,.1f} GB{time}"


def _row(choice: PoolChoice) -> dict[str, Any]:
    model, outcome = choice.model, choice.outcome
    return {
        "min_warm": model.min_warm,
        "buffer": model.buffer,
        "idle_timeout_s": model.idle_timeout_s,
        "policy": model.policy,
        "cold_share": round(outcome.cold_share, 5),
        "ttft_p50_s": round(choice.ttft_p50_s, 4),
        "ttft_p99_s": round(choice.ttft_p99_s, 4),
        "instance_s": round(outcome.instance_s, 1),
        "busy_s": round(outcome.busy_s, 1),
        "starts": outcome.starts,
        "most_instances": outcome.most,
        "store_bytes": outcome.store_bytes,
        "peer_bytes": outcome.peer_bytes,
        "refused": outcome.refused,
        "cost": round(choice.cost, 6),
    }


def page(plans: list[ModelPlan]) -> str:
    """A self-contained page: for each model its table, and the grid by cost and p99."""
    parts = [
        f"<h2>{html.escape(plan.model.name)}</h2>{_picture(plan)}<pre>{html.escape(plan.render())}</pre>"
        for plan in plans
    ]
    return (
        "<!doctype html><meta charset=utf-8><title>Pool plan</title>"
        "<style>body{font:15px system-ui;margin:2em auto;max-width:60em}circle{fill:#888}.front{fill:#06c}"
        ".written{fill:#c30}</style><h1>Pool plan</h1>"
        "<p>Each dot is a pool: cost to the right, the first token's p99 upwards. Blue: no other is better in both. "
        "Red: as the file has it.</p>" + "".join(parts)
    )


def _picture(plan: ModelPlan) -> str:
    front = {id(choice) for choice in pareto(plan.choices)}
    dots = [(choice, "front" if id(choice) in front else "") for choice in plan.choices]
    dots.append((plan.as_written, "written"))
    most_cost = max(choice.cost for choice, _ in dots) or 1.0
    most_s = max(choice.ttft_p99_s for choice, _ in dots) or 1.0
    circles = "".join(
        f'<circle class="{kind}" r="4" cx="{40 + 540 * choice.cost / most_cost:.1f}" '
        f'cy="{250 - 230 * choice.ttft_p99_s / most_s:.1f}"><title>{html.escape(choice.settings)}: '
        f"{choice.cost:.4g} {html.escape(plan.price.unit)}, p99 {choice.ttft_p99_s:.3g} s</title></circle>"
        for choice, kind in dots
    )
    return (
        f'<svg viewBox="0 0 620 280" width="620" role="img"><line x1="40" y1="250" x2="600" y2="250" stroke="#444"/>'
        f'<line x1="40" y1="10" x2="40" y2="250" stroke="#444"/>{circles}'
        f'<text x="600" y="270" text-anchor="end">{most_cost:.4g} {html.escape(plan.price.unit)}</text>'
        f'<text x="44" y="14">{most_s:.3g} s</text></svg>'
    )


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The command's flags."""

    file: str = "pool.toml"
    trace: str | None = None
    synthetic: tuple[str, ...] = ()
    measured: str | None = None
    assume: tuple[str, ...] = field(default_factory=tuple)
    price: str | None = None
    standby_price: str | None = None
    store_price: str | None = None
    ways: bool = False
    fleet: str | None = None
    platform_s: float | None = None
    cores: float | None = None
    as_json: bool = False
    html: str | None = None


def plan(options: PlanOptions) -> int:
    """Prints the plans of the models that the trace names. Returns 0; raises `TeneralError`."""
    pool = read_pool(options.file)
    requests = _requests(pool, options)
    profiles = _profiles(pool, options)
    price = parse_price(options.price, options.standby_price, options.store_price)
    host = _host(options)
    plans = []
    for name in pool.models:
        own = in_order(request for request in requests if request.model == name)
        if own:
            plans.append(_plan(pool, name, own, profiles[name], price, host, ways=options.ways))
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


def _host(options: PlanOptions) -> Host:
    if options.fleet is not None and options.cores is not None:
        raise UsageError("--fleet and --cores exclude each other: --cores is one host", key="fleet")
    return Host(options.cores, None if options.fleet is None else parse_fleet(options.fleet))


def _plan(
    pool: Pool,
    name: str,
    requests: list[ArrivedRequest],
    profile: Profile,
    price: Price,
    host: Host,
    *,
    ways: bool,
) -> ModelPlan:
    model, fleet = pool.models[name], host.fleet
    if fleet is not None and model.max_instances > fleet.places:
        raise UsageError(
            f"{name}: max_instances is {model.max_instances}, and the fleet has room for {fleet.places}",
            key="fleet",
            hint="Give --fleet more nodes, or a larger per_node.",
        )
    return ModelPlan(
        model=model,
        profile=profile,
        num_requests=len(requests),
        duration_s=requests[-1].t_s,
        as_written=try_out(requests, model, profile, price, host),
        choices=[] if ways else search(requests, model, profile, price, host),
        ttft_p99_s=None if ways else pool.slo.ttft_p99_s,
        price=price,
        ways=three_ways(requests, model, profile, price, host) if ways else {},
        fetches=[] if fleet is None else fetch_all(fleet, profile.bytes, profile.link_bytes_s),
        places=0 if fleet is None else fleet.places,
    )


def _requests(pool: Pool, options: PlanOptions) -> list[ArrivedRequest]:
    """Of the trace and the synthetic arrivals. Those that name no model are the first one's."""
    first = next(iter(pool.models))
    requests: list[ArrivedRequest] = []
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
