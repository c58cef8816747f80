"""The metrics of a pool, for Prometheus. Counters are kept here; gauges are read from the
supervisor's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...runtime.metrics import Families, Histogram, counter, exposition, gauge, histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Gauges(NamedTuple):
    """The values of one scrape, by their labels."""

    instances: Mapping[tuple[str, ...], float]  # model, version, state
    desired: Mapping[str, float]  # model
    waiting: Mapping[str, float]  # model
    memory_bytes: Mapping[str, float]  # budget, used, reserved
    device_percent: Mapping[str, float]  # reserved, by device


class PoolMetrics:
    """Counts of one pool. Used on the event loop only."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._request_seconds: dict[str, Histogram] = {}
        self._starts: Counter[tuple[str, ...]] = Counter()
        self._start_seconds: dict[tuple[str, ...], Histogram] = {}
        self._wait_seconds = Histogram()
        self._cold_requests: Counter[str] = Counter()
        self._deaths: Counter[str] = Counter()
        self._evictions: Counter[str] = Counter()
        self._shadow: Counter[str] = Counter()
        self._shadow_tokens: Counter[str] = Counter()  # of both sides: answer, copy
        self._shadow_seconds: dict[str, float] = {}

    def request_ended(self, model: str, status: int, seconds: float) -> None:
        self._requests[model, str(status)] += 1
        self._request_seconds.setdefault(model, Histogram()).observe(seconds)

    def started(self, model: str, kind: str, outcome: str, seconds: float) -> None:
        self._starts[model, kind, outcome] += 1
        if outcome == "ok":
            self._start_seconds.setdefault((model, kind), Histogram()).observe(seconds)

    def waited(self, seconds: float) -> None:
        self._wait_seconds.observe(seconds)

    def cold_request(self, model: str) -> None:
        self._cold_requests[model] += 1

    def died(self, model: str) -> None:
        self._deaths[model] += 1

    def evicted(self, reason: str) -> None:
        self._evictions[reason] += 1

    def shadowed(self, outcome: str) -> None:
        self._shadow[outcome] += 1

    def shadow_speed(self, side: str, num_tokens: int, seconds: float) -> None:
        """Of one compared pair, `side` is answer or copy."""
        self._shadow_tokens[side] += num_tokens
        self._shadow_seconds[side] = self._shadow_seconds.get(side, 0.0) + seconds

    def counts(self) -> dict[str, Any]:
        """For tests and `/v1/pool`."""
        return {
            "starts": {"/".join(key): count for key, count in self._starts.items()},
            "cold_requests": dict(self._cold_requests),
            "deaths": dict(self._deaths),
            "evictions": dict(self._evictions),
            "shadow": dict(self._shadow),
            "shadow_tokens_s": {
                side: round(count / max(1e-6, self._shadow_seconds[side]), 2)
                for side, count in self._shadow_tokens.items()
            },
        }

    def render(self, gauges: Gauges, others: Families | None = None) -> bytes:
        """The exposition text, with the families of `others`."""
        return exposition((*self._families(gauges), *(() if others is None else others.families())))

    def _families(self, gauges: Gauges) -> Iterator[Metric]:
        yield counter(
            "teneral_requests", "Requests by model and status.", self._requests, ("model", "status")
        )
        yield counter(
            "teneral_starts",
            "Starts of instances by kind (cold, standby) and outcome.",
            self._starts,
            ("model", "kind", "outcome"),
        )
        yield counter(
            "teneral_cold_requests", "Requests that waited for an instance.", self._cold_requests, ("model",)
        )
        yield counter("teneral_pool_deaths", "Instances that ended by themselves.", self._deaths, ("model",))
        yield counter(
            "teneral_pool_evictions",
            "Instances that gave way to another model's (idle, or fairness: no more requests while at work).",
            self._evictions,
            ("reason",),
        )
        yield counter("teneral_shadow", "Copies of requests by outcome.", self._shadow, ("outcome",))
        yield counter(
            "teneral_shadow_tokens",
            "Tokens of compared pairs, by side: answer or copy.",
            self._shadow_tokens,
            ("side",),
        )
        yield counter(
            "teneral_shadow_seconds", "Time that these tokens took.", self._shadow_seconds, ("side",)
        )
        yield histogram(
            "teneral_request_seconds",
            "From a request's arrival to its response's end.",
            self._request_seconds,
            ("model",),
        )
        yield histogram(
            "teneral_start_seconds",
            "From the beginning of a start until it is ready.",
            self._start_seconds,
            ("model", "kind"),
        )
        yield histogram("teneral_pool_wait_seconds", "Wait of requests for an instance.", self._wait_seconds)
        yield gauge(
            "teneral_pool_instances",
            "Instances by state.",
            gauges.instances,
            ("model", "version", "state"),
        )
        yield gauge("teneral_pool_desired", "Instances that the policy wants.", gauges.desired, ("model",))
        yield gauge("teneral_pool_waiting", "Requests that wait for an instance.", gauges.waiting, ("model",))
        yield gauge(
            "teneral_pool_memory_bytes",
            "Memory of the pool: its budget, used as measured, and reserved.",
            gauges.memory_bytes,
            ("kind",),
        )
        yield gauge(
            "teneral_pool_device_percent",
            "Percent of a GPU's memory that instances with a share of it have.",
            gauges.device_percent,
            ("device",),
        )
