"""Answers from the draft tier, and those of peers: from starting a process to its first token, and to its sixteenth.

    python -m benchmarks.draft [--rates 50 100 200 400] [--rounds 1] [--only PATTERN] [--model FOLDER] [--save]

The systems are `teneral serve` on one packed artifact, sending drafted tokens, sending exact ones while it drafts ahead
(the default), and without use of the draft; transformers after a download by boto3, and transformers fed by
runai-model-streamer (`peers/first_token.py`). All read from the same server in one run, in turns, and generate the same
number of tokens, greedily. "Wire" is the transfer time of the needed bytes at that rate: the draft's for a run that
sends drafts, all bytes for the others. The store counts the bytes that it had sent when the first token came.

Further tables have the load's predictions, on which it chose the first tier, and the measured times; the peak memory
with and without drafting, as in `benchmarks.memory`, over the slowest link; and the speed of refining weights in
memory, as in `benchmarks.decode`.

The weights of `--like` are random numbers in a real model's shape: times and bytes are those of a real one. They are
scaled such that greedy drafts are accepted about as far as the demo model's are (22 of 32 tokens, where the demo has
20, says `teneral eval-draft`); what is accepted here says nothing about a real model of that size. `--model` takes a
model of one's own: a folder of safetensors, which is packed, or an artifact in a folder.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cold_starts, decode, memory, peer_environment, predictions
from benchmarks.cold_start import BASE, PEERS
from benchmarks.cold_starts import ColdStart
from benchmarks.peer_environment import PeerEnvironment
from benchmarks.processes import RunError
from benchmarks.report import begin, finish, new_parser, note, plain, table, title
from benchmarks.rounds import Start, Turns, failures, selected
from benchmarks.store import StoreProcess, draft_bytes, folder_of, prepare, prepare_own, stored_bytes

DRAFT = "teneral, drafts sent"
AHEAD = "teneral, exact, drafts ahead"
WITHOUT = "teneral, exact, no draft"
MODES = {
    DRAFT: ["--first-token", "draft"],
    AHEAD: ["--first-token", "exact", "--draft-ahead"],
    WITHOUT: ["--first-token", "exact", "--no-draft-ahead"],
}
COMPARED = (BASE, "runai-model-streamer")
PACKED_URL = "s3://models/packed"
MIB = 1024 * 1024
REFINED_MB = 256  # of weights, in memory
REFINE_ROUNDS = 5
RESIDUAL_SCALE = 0.02
RANDOM_WEIGHTS = (
    f"random numbers, with layers that add little (residual scale {RESIDUAL_SCALE}), so that draft and exact weights "
    "agree about as often as those of a small trained model; what is accepted says nothing about a real one"
)


def main() -> None:
    options = _options()
    root = _prepared(options)
    peers = peer_environment.find(options.work)
    stored = stored_bytes(root) | {"draft": draft_bytes(root)}
    report = begin(
        "draft",
        model=options.model.resolve().name if options.model else f"{options.like}-agreeing",
        weights="of a model of one's own" if options.model else RANDOM_WEIGHTS,
        latency_ms=options.latency_ms,
        rounds=options.rounds,
        num_tokens=options.tokens,
        peers=peers.versions,
        stored_bytes=stored,
    )
    setting = Setting(root, peers, stored, options)
    report["results"] = [setting.measure(rate_mb_s) for rate_mb_s in options.rates]
    report["memory"] = setting.weigh(min(options.rates))
    report["refine"] = refine_speed()
    report["failed"] = setting.failed
    report["left_out"] = setting.left_out
    finish(report, render(report), save=options.save)


@dataclass
class Setting:
    """The model, and all systems that serve it."""

    root: Path
    peers: PeerEnvironment
    stored: dict[str, int]
    options: argparse.Namespace
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def left_out(self) -> list[str]:
        """A line for each peer that cannot take part."""
        if not self.stored["plain"]:
            return [f"{name} (there is no plain form of an artifact)" for name in COMPARED]
        missing = {name: self.peers.lacks(*PEERS[name][2]) for name in COMPARED}
        return [
            f"{name} ({', '.join(lacking)} not installed)" for name, lacking in missing.items() if lacking
        ]

    def measure(self, rate_mb_s: float) -> dict[str, Any]:
        """All of them over a link of this rate."""
        with self._store(rate_mb_s) as store:
            turns = Turns(selected(self._systems(store), self.options.only), self.failed)
            samples = turns.run(self.options.rounds, f"{rate_mb_s:g} MB/s, ")
        wire_s = {way: size_bytes / rate_mb_s / 1e6 for way, size_bytes in self.stored.items()}
        systems = {name: summary(rows) for name, rows in samples.items()}
        return {"rate_mb_s": rate_mb_s, "wire_s": wire_s, "systems": systems}

    def weigh(self, rate_mb_s: float) -> dict[str, Any]:
        """The most memory of each mode over a link of this rate: medians of the rounds, in turns."""
        weight_bytes = memory.weight_bytes_of(str(self.root / "models" / "packed"))
        modes = selected(MODES, self.options.only)
        peaks: dict[str, list[float]] = {name: [] for name in modes}
        with self._store(rate_mb_s) as store:
            for name, flags in list(modes.items()) * self.options.rounds:
                serve = partial(
                    cold_starts.serve,
                    PACKED_URL,
                    *flags,
                    "--kv-bytes",
                    str(memory.KV_BYTES),
                    variables=store.environment(),
                    num_tokens=self.options.tokens,
                )
                try:
                    parts = memory.peak_parts(serve, weight_bytes=weight_bytes)
                except RunError as error:
                    self.failed[name] = str(error)
                    continue
                peaks[name].append(sum(parts.values()) / MIB)
                note(f"memory: {name:32} {peaks[name][-1]:6.0f} MiB")
        peak_mib = {name: statistics.median(rows) for name, rows in peaks.items() if rows}
        return {"rate_mb_s": rate_mb_s, "peak_mib": peak_mib}

    def _store(self, rate_mb_s: float) -> StoreProcess:
        return StoreProcess(self.root, rate_mb_s=rate_mb_s, latency_ms=self.options.latency_ms)

    def _systems(self, store: StoreProcess) -> dict[str, Start]:
        asked = {
            "variables": store.environment(),
            "num_tokens": self.options.tokens,
            "counter": store.sent_bytes,
        }

        def serve(flags: Sequence[str]) -> Start:
            return lambda watch: cold_starts.serve(
                PACKED_URL, *flags, wants_timeline=True, watch=watch, **asked
            )

        def peer(name: str) -> Start:
            way, model, _ = PEERS[name]
            return lambda watch: cold_starts.peer(way, model, peers=self.peers, watch=watch, **asked)

        out = {line.partition(" (")[0] for line in self.left_out}
        systems = {name: serve(flags) for name, flags in MODES.items()}
        return systems | {name: peer(name) for name in COMPARED if name not in out}


def summary(samples: Sequence[ColdStart]) -> dict[str, Any]:
    """Medians, each token's for itself; the prediction is that of the round in the middle."""
    answers = [sample.answer for sample in samples]
    middle = sorted(samples, key=lambda sample: sample.first_token_s)[len(samples) // 2]
    times_s = [
        statistics.median(times) for times in zip(*(each.token_times_s for each in answers), strict=True)
    ]
    sent = [sample.sent_bytes for sample in samples if sample.sent_bytes is not None]
    return {
        "first_token_s": times_s[0],
        "last_token_s": times_s[-1],
        "token_times_s": [round(time_s, 4) for time_s in times_s],
        "all_s": [round(sample.first_token_s, 3) for sample in samples],
        "num_drafted": statistics.median(each.num_drafted for each in answers),
        "num_accepted": statistics.median(each.num_accepted for each in answers),
        "num_rejected": statistics.median(each.num_rejected for each in answers),
        "sent_bytes": statistics.median(sent) if sent else None,
        "prediction": plain(predictions.of_timeline(middle.timeline)) if middle.timeline else None,
    }


def refine_speed() -> dict[str, float]:
    """GB/s of weights, by the number of threads: one, and as many as there are cores."""
    note("refining weights in memory")
    model = decode.Model(max(1, int(REFINED_MB * 1e6) // (2 * decode.SEGMENT_ELEMENTS)))
    return {
        str(threads): statistics.median(
            model.measure(decode.WORK["refine"], threads)["weights_gb_s"] for _ in range(REFINE_ROUNDS)
        )
        for threads in sorted({1, len(os.sched_getaffinity(0))})
    }


def wire_s(link: dict[str, Any], name: str) -> float:
    """Seconds on the wire of the bytes that a system needs for its first token."""
    way = "draft" if name == DRAFT else "packed" if name in MODES else "plain"
    return float(link["wire_s"][way])


def render(report: dict[str, Any]) -> str:
    """The report as tables for people."""
    plain_mb, packed_mb, draft_mb = (
        report["stored_bytes"][way] / 1e6 for way in ("plain", "packed", "draft")
    )
    sizes = f"{report['model']} ({plain_mb:.0f} MB, packed {packed_mb:.0f} MB, of which the draft {draft_mb:.0f} MB)"
    parts = [
        title(report, sizes, f"{report['latency_ms']:g} ms to the first byte"),
        f"weights: {report['weights']}\n",
        f"exec → first token and token {report['num_tokens']} in seconds, medians of {report['rounds']} rounds\n",
        *(f"{_times(link, report['num_tokens'])}\n" for link in report["results"]),
        "the load's predictions and the measured times; seconds since it began\n",
        f"{_predictions(report['results'])}\n",
        _memory(report["memory"]),
        _refine(report["refine"]),
        failures(report["failed"], report["left_out"]),
    ]
    return "\n".join(parts)


def _times(link: dict[str, Any], num_tokens: int) -> str:
    rows = []
    for name, row in link["systems"].items():
        limit_s, sent_bytes = wire_s(link, name), row["sent_bytes"]
        rows.append(
            [
                name,
                f"{row['first_token_s']:.2f}",
                f"{row['first_token_s'] / limit_s:.2f} x {limit_s:.2f} s",
                f"{row['last_token_s']:.2f}",
                "–" if sent_bytes is None else f"{sent_bytes / 1e6:,.0f}",
                f"{row['num_drafted']:.0f}",
                f"{row['num_accepted']:.0f}, {row['num_rejected']:.0f}",
            ]
        )
    columns = [
        f"{link['rate_mb_s']:g} MB/s",
        "first token",
        "relative to the wire",
        f"token {num_tokens}",
        "MB sent by the first",
        "drafted",
        "proposals accepted, rejected",
    ]
    return table(columns, rows)


def _predictions(links: Sequence[dict[str, Any]]) -> str:
    rows = [
        [
            f"{link['rate_mb_s']:g} MB/s, {name}",
            found["decision"],
            _predicted_and_measured(found["draft_s"], found["draft_came_s"]),
            _predicted_and_measured(found["exact_s"], found["exact_came_s"]),
            _predicted_and_measured(found["token_s"], found["draft_step_s"] or None),
            f"{_or_dash(found['num_proposals'], '.0f')}, {found['num_draft_steps']}",
            f"{found['refine_wait_s']:.2f}",
        ]
        for link in links
        for name, row in link["systems"].items()
        if (found := row["prediction"]) and found["decision"] != predictions.UNDECIDED
    ]
    columns = [
        "",
        "decided",
        "draft complete",
        "exact complete",
        "a token",
        "proposals: room for, passes made",
        "waited for refining",
    ]
    return table(columns, rows)


def _predicted_and_measured(predicted: float | None, came: float | None) -> str:
    return f"{_or_dash(predicted)}, came {_or_dash(came)}"


def _or_dash(value: float | None, form: str = ".2f") -> str:
    return "–" if value is None else format(value, form)


def _memory(weighed: dict[str, Any]) -> str:
    peaks = weighed["peak_mib"]
    base = peaks.get(WITHOUT)
    extra = {name: peak - base for name, peak in peaks.items() if base is not None and name != WITHOUT}
    figures = [
        f"{name} {peaks[name]:,.0f} MiB" + (f" ({extra[name]:+,.0f})" if name in extra else "")
        for name in peaks
    ]
    return f"memory at its peak at {weighed['rate_mb_s']:g} MB/s: {'; '.join(figures) or 'not looked at'}\n"


def _refine(speeds: dict[str, float]) -> str:
    figures = [f"{speed:.1f} GB/s of weights on {threads} threads" for threads, speed in speeds.items()]
    return f"refining in memory: {', '.join(figures)}"


def _prepared(options: argparse.Namespace) -> Path:
    root: Path
    if options.model:
        root = folder_of(options.model, options.work) / "store"
        prepare_own(options.model, root)
    else:
        root = options.work / f"{options.like}-agreeing" / "store"
        prepare(options.like, root, residual_scale=RESIDUAL_SCALE)
    return root


def _options() -> argparse.Namespace:
    parser = new_parser(__doc__, rounds=1)
    parser.add_argument("--rates", type=_rate, nargs="+", default=[50, 100, 200, 400], help="MB/s")
    parser.add_argument("--latency-ms", type=float, default=15.0)
    parser.add_argument("--tokens", type=int, default=16, help="tokens of each answer")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="a model's folder, in place of --like")
    return parser.parse_args()


def _rate(text: str) -> float:
    value = float(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("a draft is of use on a link with a limit: more than 0 MB/s")
    return value


if __name__ == "__main__":
    main()
