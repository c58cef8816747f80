"""Decoding alone: GB/s of weights, CPU seconds a GB and context switches, on one thread and on more.

    python -m benchmarks.decode [--threads 1 2] [--weights-mb 256] [--kinds dense half 2:4] [--rounds 7] [--save]

Kinds of weights are `dense`; `half` and `2:4`, pruned by magnitude; `random`, of which half is zero at random
places; `negative`, the same with the signs that `w * mask` leaves. All but the first are stored sparse.
Normally distributed bf16 weights are packed in memory, and each thread decodes a share of the segments into a
slab that is larger than the caches and has all its pages: neither network, verification nor page faults are
measured here (`benchmarks.load` has them all). Measurements take turns, since machines are noisy: trust the
ratios. *Voluntary* context switches are waits for the GIL. GB are 10^9 bytes.
"""

from __future__ import annotations

import argparse
import random
import resource
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.report import begin, finish, median, table, title

from teneral.loader.format import codec
from teneral.loader.format.fill import Scratch, decode_planes
from teneral.loader.format.manifest import Encoding, Plane, Segment, Tensor, Tier, align
from teneral.loader.tools.pack.prune import prune_two_of_four

GB = 1e9
SEGMENT_ELEMENTS = 4 * 1024 * 1024
WORK = {"draft": (Tier.DRAFT,), "refine": (Tier.REFINE,), "both": (Tier.DRAFT, Tier.REFINE)}

Bytes = npt.NDArray[np.uint8]
StoredSegment = tuple[Segment, memoryview]


def main() -> None:
    options = _options()
    report = begin("decode", rounds=options.rounds)
    num_segments = max(1, int(options.weights_mb * 1e6) // (2 * SEGMENT_ELEMENTS))
    models = {kind: Model(num_segments, kind) for kind in options.kinds}
    cases = [(kind, name, threads) for kind in models for threads in options.threads for name in WORK]
    samples: dict[tuple[str, str, int], list[dict[str, float]]] = {case: [] for case in cases}
    for _ in range(options.rounds):
        for kind, name, threads in random.sample(cases, len(cases)):
            samples[kind, name, threads].append(models[kind].measure(WORK[name], threads))
    report["weight_bytes"] = next(iter(models.values())).weight_bytes
    report["results"] = [
        {
            "weights": kind,
            "work": name,
            "threads": threads,
            "stored_ratio": models[kind].stored_ratio,
            **{key: median(rows, key) for key in rows[0]},
        }
        for (kind, name, threads), rows in samples.items()
    ]
    finish(report, render(report), save=options.save)


def render(report: dict[str, Any]) -> str:
    """The report as a table for people."""
    rows = [
        [
            row["weights"],
            f"{row['stored_ratio']:.3f}",
            row["work"],
            str(row["threads"]),
            f"{row['weights_gb_s']:.2f}",
            f"{row['cpu_s_a_gb']:.3f}",
            f"{row['voluntary_switches_a_gb']:.0f}, {row['forced_switches_a_gb']:.0f}",
        ]
        for row in report["results"]
    ]
    switches = "context switches a GB: voluntary, forced"
    columns = ["weights", "of bf16", "work", "threads", "weights GB/s", "CPU-s a GB", switches]
    words = [
        f"{report['weight_bytes'] / 1e6:.0f} MB of bf16 weights",
        f"medians of {report['rounds']} rounds",
    ]
    return "\n".join([title(report, *words), table(columns, rows)])


class Model:
    """Segments of one tensor, packed in memory, and the slab that they decode into."""

    def __init__(self, num_segments: int, kind: str = "dense") -> None:
        rng = np.random.default_rng(0)
        count = num_segments * SEGMENT_ELEMENTS
        self.weight_bytes = 2 * count
        encoding = Encoding.BF16_3 if kind == "dense" else Encoding.BF16_3.sparse
        assert encoding is not None
        self._tensor = Tensor(0, "w", "BF16", (count,), 0, encoding, 0)
        self._slab: Bytes = np.full(self.weight_bytes, 1, np.uint8)
        self._stored: dict[Tier, list[StoredSegment]] = {tier: [] for tier in Tier}
        for start in range(0, count, SEGMENT_ELEMENTS):
            floats = rng.standard_normal(SEGMENT_ELEMENTS, np.float32) * np.float32(0.02)
            words = (floats.view("<u4") >> 16).astype("<u2")
            _prune(words, kind, rng)
            data = words.view(np.uint8)
            values = codec.num_values(encoding, data)
            for tier, planes in codec.encode_segment("BF16", encoding, data).items():
                self._stored[tier].append(_store(start, planes, values))
        stored_bytes = sum(len(part) for segments in self._stored.values() for _, part in segments)
        self.stored_ratio = stored_bytes / self.weight_bytes
        self.measure((Tier.DRAFT,), 1)  # a later tier is decoded over the one before

    def measure(self, tiers: tuple[Tier, ...], num_threads: int) -> dict[str, float]:
        """Decode everything once."""
        threads = [
            threading.Thread(target=self._decode, args=(tiers, number, num_threads))
            for number in range(num_threads)
        ]
        before, start_s = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        elapsed_s, after = time.monotonic() - start_s, resource.getrusage(resource.RUSAGE_SELF)
        gb = self.weight_bytes / GB
        return {
            "weights_gb_s": gb / elapsed_s,
            "cpu_s_a_gb": (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / gb,
            "voluntary_switches_a_gb": (after.ru_nvcsw - before.ru_nvcsw) / gb,
            "forced_switches_a_gb": (after.ru_nivcsw - before.ru_nivcsw) / gb,
        }

    def _decode(self, tiers: tuple[Tier, ...], first: int, step: int) -> None:
        scratch = Scratch()
        for tier in tiers:
            for segment, stored in self._stored[tier][first::step]:
                out = self._slab[2 * segment.start : 2 * (segment.start + segment.count)]
                decode_planes(self._tensor, segment, tier, stored, out, scratch)


def _prune(words: npt.NDArray[np.uint16], kind: str, rng: np.random.Generator) -> None:
    if kind == "half":
        magnitudes = words & np.uint16(0x7FFF)
        words[magnitudes < np.median(magnitudes)] = 0
    elif kind == "2:4":
        prune_two_of_four(words)
    elif kind in ("random", "negative"):
        words[rng.random(words.size) < 0.5] &= np.uint16(0x8000 if kind == "negative" else 0)


def _store(start: int, coded: list[codec.CodedPlane], values: int | None) -> StoredSegment:
    """A segment that has a part to itself."""
    part, planes = bytearray(), []
    for plane_codec, stored in coded:
        part += bytes(align(len(part), 8) - len(part))
        planes.append(Plane(plane_codec, len(part), len(stored)))
        part += stored
    return Segment(0, start, SEGMENT_ELEMENTS, tuple(planes), values), memoryview(part)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--weights-mb", type=float, default=256.0)
    parser.add_argument(
        "--kinds", nargs="+", choices=("dense", "half", "2:4", "random", "negative"), default=["dense"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    return parser.parse_args()


if __name__ == "__main__":
    main()
