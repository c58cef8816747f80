"""A fleet of nodes: where instances are placed, how fast a platform begins them, and where a start's bytes come from.

Ways of the weights: `store`, every start reads the store; `cache`, the first start on a node reads it, and leaves the
bytes there for those after it; `peers`, the first one in a zone reads it, and each node that has the bytes, or receives
them, forwards them to two others of its zone. Teneral has node caches; peers are on paper only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

from ...loader.errors import UsageError

WAYS = ("store", "cache", "peers")
FORWARDS = 2  # nodes that a node with the bytes sends them to
PIECE_BYTES = 8 << 20  # received before a node forwards it
MAX_NODES = 1000
MAX_PER_NODE = 1000


class Scaling(NamedTuple):
    """A platform's pace. It decides every `tick_s` seconds, and every `zero_tick_s` while it has no instance (0: at
    once), and begins at most `burst` starts at once and `per_s` a second after them (0: as many as it wants).
    """

    tick_s: float = 0.0
    zero_tick_s: float = 0.0
    burst: int = 0
    per_s: float = 0.0

    def next_tick_s(self, now_s: float, present: int) -> float:
        """Time of the next decision, `now_s` included. The clock's first one is after half a period, so that a request
        at 0 waits for it as long as others do in the mean.
        """
        period_s = self.tick_s if present else self.zero_tick_s
        if not period_s:
            return now_s
        return (math.ceil(now_s / period_s - 0.5 - 1e-9) + 0.5) * period_s


_AT_ONCE = Scaling()
SCALING = {  # by platform; docs/scale.md has the sources
    "pool": _AT_ONCE,
    "lambda": Scaling(burst=1000, per_s=100.0),
    "knative": Scaling(tick_s=2.0),
    "keda": Scaling(tick_s=15.0, zero_tick_s=30.0),
}


@dataclass(frozen=True, slots=True)
class Fleet:
    """`per_node` instances fit on each of the nodes, which are spread over the zones. `node_bytes_s` is the rate of a
    node's link, in bytes a second; `weights` one of `WAYS`.
    """

    nodes: int
    per_node: int = 1
    zones: int = 1
    node_bytes_s: float = math.inf
    weights: str = "store"
    scaling: Scaling = _AT_ONCE

    @property
    def places(self) -> int:
        """Instances that fit."""
        return self.nodes * self.per_node

    @property
    def peer_bytes_s(self) -> float:
        """The rate at which a node receives from another one."""
        return self.node_bytes_s / FORWARDS


_COUNTS = {"nodes": MAX_NODES, "per_node": MAX_PER_NODE, "zones": MAX_NODES, "burst": 1_000_000}
_SECONDS = ("tick_s", "zero_tick_s", "per_s")


def parse_fleet(text: str) -> Fleet:
    """Of `nodes=100,per_node=10,zones=3,weights=cache,node_bytes_s=1.25e9,scaling=knative`. Raises `UsageError`."""
    values: dict[str, Any] = {}
    scaling = Scaling()
    for item in filter(None, text.split(",")):
        name, _, value = item.partition("=")
        try:
            if name == "scaling":
                scaling = SCALING[value]
            elif name == "weights":
                values[name] = WAYS[WAYS.index(value)]
            elif name in _COUNTS:
                number = int(value)
                if not 1 <= number <= _COUNTS[name]:
                    raise ValueError
                values[name] = number
            elif name in _SECONDS or name == "node_bytes_s":
                values[name] = float(value)
                if not (0 if name in _SECONDS else 1) <= values[name] < 1e15:
                    raise ValueError
            else:
                raise KeyError
        except (KeyError, ValueError):
            known = f"nodes, per_node, zones, node_bytes_s, weights ({', '.join(WAYS)})"
            raise UsageError(
                f"--fleet {text}: cannot read {item!r}",
                key="fleet",
                hint=f"Known: {known}, scaling ({', '.join(SCALING)}), burst, {', '.join(_SECONDS)}.",
            ) from None
    pace = {name: values.pop(name) for name in ("burst", *_SECONDS) if name in values}
    scaling = scaling._replace(**pace)
    if "nodes" not in values:
        raise UsageError(f"--fleet {text}: has no nodes", key="fleet", hint="Such as nodes=100,per_node=10.")
    if bool(scaling.burst) != bool(scaling.per_s):
        raise UsageError(f"--fleet {text}: burst and per_s are given together", key="fleet")
    fleet = Fleet(**values, scaling=scaling)
    if fleet.zones > fleet.nodes:
        raise UsageError(f"--fleet {text}: more zones than nodes", key="fleet")
    return fleet


class ByteSource(Enum):
    """Sources of a start's bytes."""

    STORE = "store"
    NODE = "node"
    PEER = "peer"


class Site:
    """A node or a zone: the models whose bytes are there, and the starts that wait for those on the way."""

    def __init__(self, number: int, zone: Site | None = None) -> None:
        self.number = number
        self.zone = zone
        self.instances: dict[str, int] = {}
        self.total = 0
        self.holds: set[str] = set()
        self.waiting: dict[str, list[tuple[Any, ByteSource]]] = {}


class Nodes:
    """The nodes while a simulation runs. Values named `instance` are the caller's."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        zones = [Site(number) for number in range(fleet.zones)]
        self._nodes = [Site(number, zones[number % fleet.zones]) for number in range(fleet.nodes)]

    def place(self, model: str) -> Site:
        """Take a place: in the zone with fewest instances of the model; there on a node that has its bytes, or the
        emptiest. The caller sees to it that there is one.
        """

        def order(node: Site) -> tuple[int, bool, int, int]:
            assert node.zone is not None
            return node.zone.instances.get(model, 0), model not in node.holds, node.total, node.number

        node = min((each for each in self._nodes if each.total < self.fleet.per_node), key=order)
        self._count(node, model, 1)
        return node

    def leave(self, node: Site, model: str) -> None:
        self._count(node, model, -1)

    def _count(self, node: Site, model: str, number: int) -> None:
        for site in (node, node.zone):
            assert site is not None
            site.total += number
            site.instances[model] = site.instances.get(model, 0) + number

    def fetch(self, node: Site, model: str, instance: Any) -> ByteSource | None:
        """The source that the start reads; None: it waits for one that reads the same, and `loaded` returns it then."""
        if self.fleet.weights == "store":
            return ByteSource.STORE
        if model in node.holds:
            return ByteSource.NODE
        if model in node.waiting:
            node.waiting[model].append((instance, ByteSource.NODE))
            return None
        node.waiting[model] = []
        if self.fleet.weights == "cache":
            return ByteSource.STORE
        zone = node.zone
        assert zone is not None
        if model in zone.holds:
            return ByteSource.PEER
        if model in zone.waiting:
            zone.waiting[model].append((instance, ByteSource.PEER))
            return None
        zone.waiting[model] = []
        return ByteSource.STORE

    def loaded(self, node: Site, model: str) -> Iterator[tuple[Any, ByteSource]]:
        """Note that the bytes are on the node. Yields the starts that waited for them."""
        for site in (node, node.zone):
            assert site is not None
            if model not in site.holds:
                site.holds.add(model)
                yield from site.waiting.pop(model, ())


class FleetFetch(NamedTuple):
    """All places of a fleet started at once: the bytes that the store gives, and the time of all bytes on the links.

    None where a rate is unknown.
    """

    weights: str
    store_bytes: int
    seconds: float | None


def fetch_all(fleet: Fleet, size_bytes: int, store_bytes_s: float) -> list[FleetFetch]:
    """A row for each way of the weights, `size_bytes` for each instance."""
    return [_fetch(replace(fleet, weights=weights), size_bytes, store_bytes_s) for weights in WAYS]


def _fetch(fleet: Fleet, size_bytes: int, store_bytes_s: float) -> FleetFetch:
    copies = {"store": fleet.places, "cache": fleet.nodes, "peers": fleet.zones}[fleet.weights]
    given = copies * size_bytes
    if math.isinf(store_bytes_s) or math.isinf(fleet.node_bytes_s):
        return FleetFetch(fleet.weights, given, None)
    if fleet.weights != "peers":
        on_node = size_bytes * (fleet.per_node if fleet.weights == "store" else 1)
        return FleetFetch(fleet.weights, given, max(given / store_bytes_s, on_node / fleet.node_bytes_s))
    in_zone = math.ceil(fleet.nodes / fleet.zones)
    forwards = min(FORWARDS, in_zone - 1)  # of the node that reads the store
    rate = min(store_bytes_s / fleet.zones, fleet.node_bytes_s / max(1, forwards))
    depth = math.ceil(math.log2(in_zone + 1)) - 1  # of a full binary tree of the zone's nodes
    return FleetFetch(fleet.weights, given, (size_bytes + depth * min(PIECE_BYTES, size_bytes)) / rate)
