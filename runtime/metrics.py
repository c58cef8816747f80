"""The metrics of an instance, for Prometheus.

Counting is plain arithmetic under a lock. `prometheus_client` is needed only to write the text, so
it is imported at the first scrape and not on the way to the first token. Gauges are not stored:
they are read from the instance's statistics at each scrape. This module does not know the source of
requests.
"""

from __future__ import annotations

import bisect
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from .state import State

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    from ..loader.load.accounting import LoadStatistics

T = TypeVar("T")
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
SECONDS_BUCKETS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)
TOKEN_BUCKETS = (1.0, 4.0, 16.0, 64.0, 256.0, 1024.0, 4096.0, 16384.0, 65536.0, 262144.0)


class Histogram:
    """Counts of observations up to each bound, their number and their sum. Not thread-safe by itself."""

    def __init__(self, bounds: Sequence[float] = SECONDS_BUCKETS) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last one is for values above all bounds
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect.bisect_left(self._bounds, value)] += count
        self._sum += value * count

    @property
    def sum(self) -> float:
        return self._sum

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), the last with the bound '+Inf': the exposition
        form.
        """
        total, rows = 0, []
        for bound, count in zip([*map(str, self._bounds), "+Inf"], self._counts, strict=True):
            total += count
            rows.append((bound, float(total)))
        return rows


class Families(Protocol):
    """Counts that become families of metrics."""

    def families(self) -> Iterator[Metric]: ...


class Metrics:
    """All counters, updated from any thread. `render` gives the exposition text."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, ...], int] = {}
        self._request_seconds: dict[str, Histogram] = {}
        self._first_token_seconds = Histogram()
        self._inter_token_seconds = Histogram()
        self._queue_seconds = Histogram()
        self._generation_seconds = Histogram()
        self._sequence_prompt_tokens = Histogram(TOKEN_BUCKETS)
        self._sequence_generated_tokens = Histogram(TOKEN_BUCKETS)
        self._starts: dict[tuple[str, ...], int] = {}
        self._start_seconds: dict[str, Histogram] = {}
        self._cold_requests = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0

    def request_ended(self, route: str, status: int, seconds: float) -> None:
        """Count a request. `route` is a pattern, never a client's text: each value is a time
        series.
        """
        key = (route, str(status))
        with self._lock:
            self._requests[key] = self._requests.get(key, 0) + 1
            self._request_seconds.setdefault(route, Histogram()).observe(seconds)

    def start_ended(self, kind: str, outcome: str, seconds: float) -> None:
        """Count a start. `kind` is cold, standby, reload or switch; `outcome` ok, when requests can be
        answered, or failed.
        """
        with self._lock:
            self._starts[kind, outcome] = self._starts.get((kind, outcome), 0) + 1
            if outcome == "ok":
                self._start_seconds.setdefault(kind, Histogram()).observe(seconds)

    def cold_request(self) -> None:
        """Count a request that arrived before any could be answered."""
        with self._lock:
            self._cold_requests += 1

    def prompt_taken(self, num_tokens: int) -> None:
        with self._lock:
            self._prompt_tokens += num_tokens

    def first_token(self, seconds: float) -> None:
        """`seconds` from the arrival of the request."""
        with self._lock:
            self._first_token_seconds.observe(seconds)

    def tokens_generated(self, num_tokens: int, seconds: float | None) -> None:
        """Count tokens of one step of one sequence, `seconds` after the previous ones; None for the
        first ones.
        """
        with self._lock:
            self._generated_tokens += num_tokens
            if seconds is not None:
                self._inter_token_seconds.observe(seconds / num_tokens, num_tokens)

    def sequence_ended(
        self, *, queued_s: float, generated_s: float, prompt_tokens: int, generated_tokens: int
    ) -> None:
        """A sequence that came to an end of its own. `queued_s` is its wait for the engine's first step, `generated_s`
        the time from its first token to its last.
        """
        with self._lock:
            self._queue_seconds.observe(queued_s)
            self._generation_seconds.observe(generated_s)
            self._sequence_prompt_tokens.observe(prompt_tokens)
            self._sequence_generated_tokens.observe(generated_tokens)

    def render(self, statistics: Mapping[str, Any], others: Families | None = None) -> bytes:
        """The exposition text, with every number in `statistics` named by its path, and with the
        families of `others`. The first call imports the client.
        """
        from prometheus_client import ProcessCollector  # lazy: 60 ms that a cold start cannot afford

        process = ProcessCollector(registry=None)
        more = () if others is None else others.families()
        return exposition((*self._families(), *_from_statistics(statistics), *process.collect(), *more))

    def _families(self) -> Iterator[Metric]:
        yield _build_info()
        with self._lock:
            families = [
                counter(
                    "teneral_requests",
                    "Requests by route and status; 499: the client went away.",
                    self._requests,
                    ("route", "status"),
                ),
                histogram(
                    "teneral_request_seconds",
                    "From a request's arrival to its response's end.",
                    self._request_seconds,
                    ("route",),
                ),
                histogram(
                    "teneral_first_token_seconds",
                    "From a request's arrival to the first token of each sequence.",
                    self._first_token_seconds,
                ),
                histogram(
                    "teneral_inter_token_seconds",
                    "Between the tokens of a sequence.",
                    self._inter_token_seconds,
                ),
                counter(
                    "teneral_starts",
                    "Starts by kind (cold, standby, reload, switch) and outcome.",
                    self._starts,
                    ("kind", "outcome"),
                ),
                histogram(
                    "teneral_start_seconds",
                    "From the beginning of a start until requests can be answered.",
                    self._start_seconds,
                    ("kind",),
                ),
                counter(
                    "teneral_cold_requests",
                    "Requests that arrived while nothing could be answered yet.",
                    self._cold_requests,
                ),
                counter("teneral_prompt_tokens", "Tokens of prompts taken.", self._prompt_tokens),
                counter("teneral_generated_tokens", "Tokens generated.", self._generated_tokens),
                *self._families_of_sequences(),
            ]
        yield from families

    def _families_of_sequences(self) -> list[Metric]:
        return [
            histogram("teneral_queue_seconds", "A sequence's wait for its first step.", self._queue_seconds),
            histogram(
                "teneral_generation_seconds",
                "From a sequence's first token to its last.",
                self._generation_seconds,
            ),
            histogram(
                "teneral_sequence_prompt_tokens",
                "Tokens in the prompt of a sequence.",
                self._sequence_prompt_tokens,
            ),
            histogram(
                "teneral_sequence_generated_tokens",
                "Tokens generated by a sequence.",
                self._sequence_generated_tokens,
            ),
        ]


# By the values of its labels; a text for one label, and a value alone without any.
Labelled: TypeAlias = T | Mapping[str, T] | Mapping[tuple[str, ...], T]


def counter(name: str, help_text: str, counted: Labelled[float], labels: tuple[str, ...] = ()) -> Metric:
    """A family of one number, or of one for each combination of label values."""
    from prometheus_client.core import CounterMetricFamily

    return _filled(CounterMetricFamily(name, help_text, labels=labels), counted)


def gauge(name: str, help_text: str, measured: Labelled[float], labels: tuple[str, ...] = ()) -> Metric:
    """A family of one gauge, or of one for each combination of label values."""
    from prometheus_client.core import GaugeMetricFamily

    return _filled(GaugeMetricFamily(name, help_text, labels=labels), measured)


def histogram(
    name: str, help_text: str, observed: Labelled[Histogram], labels: tuple[str, ...] = ()
) -> Metric:
    """A family of one histogram, or of one for each combination of label values."""
    from prometheus_client.core import HistogramMetricFamily

    family = HistogramMetricFamily(name, help_text, labels=labels)
    for values, each in _rows(observed):
        family.add_metric(values, each.cumulative(), each.sum)
    return family


def _filled(family: CounterMetricFamily | GaugeMetricFamily, counted: Labelled[float]) -> Metric:
    for values, count in _rows(counted):
        family.add_metric(values, count)
    return family


def _rows(labelled: Labelled[T]) -> Iterator[tuple[tuple[str, ...], T]]:
    if not isinstance(labelled, Mapping):
        yield (), labelled
        return
    for values, each in labelled.items():
        yield (values,) if isinstance(values, str) else values, each


def exposition(families: Iterable[Metric]) -> bytes:
    """The text of metric families for Prometheus. The first call imports the client."""
    from prometheus_client import generate_latest
    from prometheus_client.registry import Collector

    class Snapshot(Collector):
        def collect(self) -> Iterable[Metric]:
            return families

    return generate_latest(Snapshot())


def _build_info() -> Metric:
    import platform

    from prometheus_client.core import InfoMetricFamily

    from .. import __version__

    value = {"version": __version__, "python": platform.python_version()}
    return InfoMetricFamily("teneral_build", "1, with the versions that run as labels.", value)


def _from_statistics(statistics: Mapping[str, Any]) -> Iterator[Metric]:
    """Each number is a gauge named by its path; one whose name ends in `_total` is a counter, and so is each
    below such a name, help_text apart by the label `kind`.
    """
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    state = GaugeMetricFamily("teneral_state", "1 for the state that the instance is in.", labels=("state",))
    for each in State:
        state.add_metric((str(each),), float(statistics.get("state") == each))
    yield state
    counters: dict[str, CounterMetricFamily] = {}
    for path, value in numbers_in(statistics):
        if path in _PROPOSAL_COUNTERS:
            name, help_text, labels = _PROPOSAL_COUNTERS[path]
            family = counters.setdefault(name, CounterMetricFamily(name, help_text, labels=tuple(labels)))
            family.add_metric(tuple(labels.values()), value)
            continue
        depth = next((depth for depth, name in enumerate(path, 1) if name.endswith("_total")), None)
        name = re.sub(r"\W", "_", "_".join(("teneral", *path[:depth])))
        help_text = f"Statistics of the instance: {'.'.join(path[:depth])}."
        if depth is None:
            yield GaugeMetricFamily(name, help_text, value)
            continue
        kinds = (".".join(path[depth:]),) if path[depth:] else ()
        if name not in counters:
            counters[name] = CounterMetricFamily(name, help_text, labels=("kind",) * len(kinds))
        counters[name].add_metric(kinds, value)
    yield from counters.values()


_PROPOSALS = ("teneral_proposals", "Tokens that the draft proposed, by the verdict of the exact weights.")
_LOOK_AHEAD = (
    "teneral_look_ahead_tokens",
    "Tokens that look-ahead proposed, by the verdict of the step that verified them.",
)
# Path in the statistics → name, help, labels. These are for people's dashboards: outcomes next to
# each other, under one name.
_PROPOSAL_COUNTERS: dict[tuple[str, ...], tuple[str, str, dict[str, str]]] = {
    ("engine", "drafted_tokens_total"): (
        "teneral_drafted_tokens",
        "Tokens given out that weights chose which were not exact yet.",
        {},
    ),
    ("engine", "accepted_proposals_total"): (*_PROPOSALS, {"outcome": "accepted"}),
    ("engine", "rejected_proposals_total"): (*_PROPOSALS, {"outcome": "rejected"}),
    ("engine", "accepted_look_ahead_total"): (*_LOOK_AHEAD, {"outcome": "accepted"}),
    ("engine", "rejected_look_ahead_total"): (*_LOOK_AHEAD, {"outcome": "rejected"}),
}


def on_the_wire(load: LoadStatistics, share: float) -> LoadStatistics:
    """A load's statistics with what crossed the network in place of what its source made of that:
    `share` bytes for each.
    """
    link = load.link
    return load._replace(
        stored_bytes=round(load.stored_bytes * share),
        fetch=load.fetch._replace(size_bytes=round(load.fetch.size_bytes * share)),
        link=link._replace(
            rate_bytes_per_s=link.rate_bytes_per_s * share,
            connection_bytes_per_s=link.connection_bytes_per_s * share,
            smallest_range_bytes=round(link.smallest_range_bytes * share),
            mean_range_bytes=round(link.mean_range_bytes * share),
            largest_range_bytes=round(link.largest_range_bytes * share),
        ),
    )


def numbers_in(value: Any, path: tuple[str, ...] = ()) -> Iterable[tuple[tuple[str, ...], float]]:
    """Every number in nested mappings, structs and named tuples, with its path. Texts, lists and None
    are left out.
    """
    if isinstance(value, Struct):
        value = asdict(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from numbers_in(item, (*path, str(name)))
    elif isinstance(value, int | float):
        yield path, float(value)
