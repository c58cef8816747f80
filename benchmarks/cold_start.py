"""Cold starts of Teneral and its peers: from starting a process to its first token, with the model in an S3 store
behind links of known rates.

    python -m benchmarks.cold_start [--rates 50 100 200 400 800 0] [--rounds 1] [--only PATTERN] [--save]

Compared are `teneral serve` on the packed artifact (also with `--trim-imports`, and from a standby process) and on the
plain safetensors; transformers after boto3 has downloaded the files, which is what people write today; and transformers
fed by runai-model-streamer and by tensorizer, as their documentation says (`peers/first_token.py`). All read from the
same server in one run, in turns. Everything but Teneral's packed artifact reads the same number of bytes; "wire" is the
time that a way's own bytes take at that rate. Rate 0 is a link without a limit.

Peak memory is of one more run each at the fastest rate: the sum of all processes' proportional set sizes, for a standby
with its pool.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import cold_starts, peer_environment
from benchmarks.peer_environment import PeerEnvironment
from benchmarks.report import begin, finish, new_parser, table, title
from benchmarks.rounds import Start, Turns, failures, selected
from benchmarks.store import StoreProcess, prepare, stored_bytes, warm

BASE = "transformers after boto3"
PACKED = "teneral, packed"
PLAIN = "teneral, plain safetensors"
TRIMMED = "teneral, packed, trimmed torch"
STANDBY = "teneral, packed, standby"
PEERS = {  # name: way, model, what has to be installed
    BASE: ("boto3", "s3://models/plain", ["transformers", "boto3"]),
    "runai-model-streamer": (
        "runai",
        "s3://models/plain",
        ["runai-model-streamer", "runai-model-streamer-s3"],
    ),
    "tensorizer": ("tensorizer", "s3://models/tensorized", ["tensorizer"]),
}


def main() -> None:
    parser = new_parser(__doc__, rounds=1)
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[50, 100, 200, 400, 800, 0], help="MB/s, 0 for no limit"
    )
    parser.add_argument("--latency-ms", type=float, default=15.0)
    options = parser.parse_args()
    root = options.work / options.like / "store"
    peers = peer_environment.find(options.work)
    prepare(options.like, root)
    peer_environment.make_tensorized(peers, root)
    stored = stored_bytes(root)
    report = begin(
        "cold_start",
        model=options.like,
        latency_ms=options.latency_ms,
        rounds=options.rounds,
        peers=peers.versions,
        stored_bytes=stored,
    )
    with cold_starts.StandbyPool(options.work) as pool:
        links = [Link(peers, pool, root, rate_mb_s, options.latency_ms) for rate_mb_s in options.rates]
        report["results"] = [link.measure(options.rounds, options.only, stored) for link in links]
        report["memory"] = max(links, key=lambda link: link.speed_mb_s).weigh(options.only)
    report["failed"] = {name: reason for link in links for name, reason in link.failed.items()}
    report["left_out"] = left_out(peers)
    finish(report, render(report), save=options.save)


@dataclass
class Link:
    """All systems over a link of one rate."""

    peers: PeerEnvironment
    pool: cold_starts.StandbyPool
    root: Path
    rate_mb_s: float
    latency_ms: float

    def __post_init__(self) -> None:
        self.failed: dict[str, str] = {}

    @property
    def speed_mb_s(self) -> float:
        return self.rate_mb_s or float("inf")

    def measure(self, rounds: int, only: str | None, stored: dict[str, int]) -> dict[str, Any]:
        label = f"{self.rate_mb_s:g} MB/s, " if self.rate_mb_s else "unthrottled, "
        wire_s = {way: size / self.speed_mb_s / 1e6 for way, size in stored.items()}
        systems = self._with_store(only, lambda turns: turns.time(rounds, label))
        return {"rate_mb_s": self.rate_mb_s, "wire_s": wire_s, "systems": systems}

    def weigh(self, only: str | None) -> dict[str, Any]:
        return self._with_store(only, Turns.weigh)

    def _with_store(self, only: str | None, do: Callable[[Turns], dict[str, Any]]) -> dict[str, Any]:
        with StoreProcess(self.root, rate_mb_s=self.rate_mb_s, latency_ms=self.latency_ms) as store:
            systems = selected(self._systems(store.environment()), only)
            return do(Turns(systems, self.failed, before=lambda: warm(self.root)))

    def _systems(self, variables: dict[str, str]) -> dict[str, Start]:
        def serve(model: str, *flags: str, pool: cold_starts.StandbyPool | None = None) -> Start:
            return lambda watch: cold_starts.serve(model, *flags, variables=variables, watch=watch, pool=pool)

        def peer(way: str, model: str) -> Start:
            return lambda watch: cold_starts.peer(
                way, model, peers=self.peers, variables=variables, watch=watch
            )

        packed = "s3://models/packed"
        return {
            PACKED: serve(packed),
            TRIMMED: serve(packed, "--trim-imports"),
            STANDBY: serve(packed, pool=self.pool),
            PLAIN: serve("s3://models/plain"),
            **{
                name: peer(way, model)
                for name, (way, model, packages) in PEERS.items()
                if not self.peers.lacks(*packages)
            },
        }


def left_out(peers: PeerEnvironment) -> list[str]:
    """A line for each peer that is not installed."""
    return [
        f"{name} ({', '.join(lacking)} not installed)"
        for name, (_, _, packages) in PEERS.items()
        if (lacking := peers.lacks(*packages))
    ]


def render(report: dict[str, Any]) -> str:
    """The report as tables for people."""
    links = report["results"]
    names = list(dict.fromkeys(name for link in links for name in link["systems"]))
    rates = [f"{link['rate_mb_s']:g} MB/s" if link["rate_mb_s"] else "no limit" for link in links]
    plain_mb, packed_mb = (report["stored_bytes"][way] / 1e6 for way in ("plain", "packed"))
    words = f"{report['latency_ms']:g} ms to the first byte"
    parts = [
        title(report, f"{report['model']} ({plain_mb:.0f} MB, packed {packed_mb:.0f} MB)", words),
        f"exec → first token in seconds, medians of {report['rounds']} rounds; (relative to the wire's time)\n",
        table(["", *rates], [[name, *(_time(link, name) for link in links)] for name in names]),
        f"\nhow much sooner than {BASE}, and peak memory\n",
        table(
            ["", *rates, "MB"],
            [[name, *(_sooner(link, name) for link in links), _memory(report, name)] for name in names],
        ),
        failures(report["failed"], report["left_out"]),
    ]
    return "\n".join(parts)


def _time(link: dict[str, Any], name: str) -> str:
    if name not in link["systems"]:
        return "–"
    first_token_s = link["systems"][name]["first_token_s"]
    wire_s = link["wire_s"]["packed" if "packed" in name else "plain"]
    return f"{first_token_s:.2f} ({first_token_s / wire_s:.2f}x)" if wire_s else f"{first_token_s:.2f}"


def _sooner(link: dict[str, Any], name: str) -> str:
    if name == BASE or not {name, BASE} <= set(link["systems"]):
        return "–"
    return f"{link['systems'][BASE]['first_token_s'] / link['systems'][name]['first_token_s']:.1f}x"


def _memory(report: dict[str, Any], name: str) -> str:
    peak = report["memory"].get(name)
    return f"{peak['peak_pss_mb']:,.0f}" if peak else "–"


if __name__ == "__main__":
    main()
