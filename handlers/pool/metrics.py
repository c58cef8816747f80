"""The metrics of a pool, for Prometheus. Counters are kept here; gauges are read from the
supervisor's state.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...runtime.metrics import Histogram

if TYPE_CHECKING:
    from prometheus_client.core import Metric


class Gauges(NamedTuple):
    """Rows of one scrape: labels and value."""

    instances: Iterable[tuple[tuple[str, str, str], float]]  # model, version, state
    desired: Iterable[tuple[tuple[str], float]]
    waiting: Iterable[tuple[tuple[str], float]]
    memory_bytes: Iterable[tuple[tuple[str], float]]  # budget, used, reserved


class PoolMetrics:
    """Counts of one pool. Used on the event loop only."""

    def __init__(self) -> None:
        self._requests: Counter[tuple[str, ...]] = Counter()
        self._request_seconds: dict[str, Histogram] = {}
        self._starts: Counter[tuple[str, ...]] = Counter()
        self._start_seconds: dict[tuple[str, str], Histogram] = {}
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

    def render(self, gauges: Gauges) -> bytes:
        """The exposition text."""
        from prometheus_client import CollectorRegistry, generate_latest  # 60 ms, for the first scrape
        from prometheus_client.registry import Collector

        metrics = self

        class PoolSnapshot(Collector):
            def collect(self) -> Iterator[Metric]:
                yield from metrics._counters()
                yield from metrics._histograms()
                yield from metrics._gauges(gauges)

        registry = CollectorRegistry(auto_describe=False)
        registry.register(PoolSnapshot())
        return generate_latest(registry)

    def _counters(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily

        rows: list[tuple[str, str, tuple[str, ...], Mapping[tuple[str, ...], float]]] = [
            ("teneral_requests", "Requests by model and status.", ("model", "status"), self._requests),
            (
                "teneral_starts",
                "Starts of instances by kind (cold, standby) and outcome.",
                ("model", "kind", "outcome"),
                self._starts,
            ),
            (
                "teneral_cold_requests",
                "Requests that waited for an instance.",
                ("model",),
                _keyed(self._cold_requests),
            ),
            ("teneral_pool_deaths", "Instances that ended by themselves.", ("model",), _keyed(self._deaths)),
            (
                "teneral_pool_evictions",
                "Instances that gave way to another model's (idle, or fairness: no more requests while at work).",
                ("reason",),
                _keyed(self._evictions),
            ),
            ("teneral_shadow", "Copies of requests by outcome.", ("outcome",), _keyed(self._shadow)),
            (
                "teneral_shadow_tokens",
                "Tokens of compared pairs, by side: answer or copy.",
                ("side",),
                _keyed(self._shadow_tokens),
            ),
            (
                "teneral_shadow_seconds",
                "Time that these tokens took.",
                ("side",),
                _keyed(self._shadow_seconds),
            ),
        ]
        for name, help_text, labels, counts in rows:
            family = CounterMetricFamily(name, help_text, labels=labels)
            for key, count in counts.items():
                family.add_metric(key, count)
            yield family

    def _histograms(self) -> Iterator[Metric]:
        from prometheus_client.core import HistogramMetricFamily

        requests = HistogramMetricFamily(
            "teneral_request_seconds", "From a request's arrival to its response's end.", labels=("model",)
        )
        for model, histogram in self._request_seconds.items():
            requests.add_metric((model,), histogram.cumulative(), histogram.sum)
        starts = HistogramMetricFamily(
            "teneral_start_seconds",
            "From the beginning of a start until it is ready.",
            labels=("model", "kind"),
        )
        for key, histogram in self._start_seconds.items():
            starts.add_metric(key, histogram.cumulative(), histogram.sum)
        waits = HistogramMetricFamily("teneral_pool_wait_seconds", "Wait of requests for an instance.")
        waits.add_metric((), self._wait_seconds.cumulative(), self._wait_seconds.sum)
        return iter((requests, starts, waits))

    def _gauges(self, gauges: Gauges) -> Iterator[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        for name, help_text, labels, rows in (
            (
                "teneral_pool_instances",
                "Instances by state.",
                ("model", "version", "state"),
                gauges.instances,
            ),
            ("teneral_pool_desired", "Instances that the policy wants.", ("model",), gauges.desired),
            ("teneral_pool_waiting", "Requests that wait for an instance.", ("model",), gauges.waiting),
            (
                "teneral_pool_memory_bytes",
                "Memory of the pool: its budget, used as measured, and reserved.",
                ("kind",),
                gauges.memory_bytes,
            ),
        ):
            family = GaugeMetricFamily(name, help_text, labels=labels)
            for key, value in rows:
                family.add_metric(key, value)
            yield family


def _keyed(counts: Mapping[str, float]) -> dict[tuple[str, ...], float]:
    return {(key,): count for key, count in counts.items()}
