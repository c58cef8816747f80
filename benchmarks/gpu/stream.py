"""Images from a ring in host memory to weights on the device: bytes a second, relative to the pinned rate of the bus.

    python -m benchmarks.gpu.stream [--gib N] [--json FILE]

The ring is filled once, and its images are placed over and over, as in a load: several in flight, each after
the one before. Without nvCOMP the ring holds decompressed planes (the work of a load's other cores is not timed); with
nvCOMP installed it holds exponents as they are stored. The pinned rate is that of copies from the same
ring, in pieces of the same size, and nothing else. *Weights appear* counts words once they are exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.gpu.check import claim
from benchmarks.gpu.planes import Parts, coded_parts, open_device
from benchmarks.report import machine, note, table, versions

from teneral.loader.device.base import Placed
from teneral.loader.device.image import PartImage, plan_image, slab_starts
from teneral.loader.device.ring import DEFAULT_BYTES
from teneral.loader.device.sink import fill_image
from teneral.loader.format.manifest import Tier, align
from teneral.loader.memory.arena import map_bytes

STREAM_GOAL, APPEAR_GOAL = 0.85, 1.4
PART_ELEMENTS = 54 << 16  # an image of 5 MiB, as a load makes them
TOGETHER = 4  # images placed at a time
ROUNDS = 3
PAGE_BYTES = 4096


def main() -> int:
    options = _options()
    device = open_device()
    if device is None:
        return 2
    made = coded_parts(PART_ELEMENTS, max(1, (options.gib << 30) // (2 * PART_ELEMENTS)))
    _, weights_bytes = slab_starts(made.manifest.groups)
    ring = map_bytes(DEFAULT_BYTES, what="the ring of images")
    device.reserve(weights_bytes, ring)
    if not device.statistics().is_pinned:
        note("the ring could not be pinned here: all rates are those of pageable memory")
    rates: dict[str, dict[str, float]] = {}
    for path in ("host", "device") if device.decompresses else ("host",):
        rates[path] = best_of(device, ring, made, weights_bytes, coded=path == "device")
    if "device" not in rates:
        note("nvCOMP is not installed: that weights appear faster than the bus is not measured")
    claims = [
        claim(
            f"bytes to the device, {path} path, of the pinned rate",
            rate["stream"] / rate["pinned"],
            STREAM_GOAL,
        )
        for path, rate in rates.items()
    ]
    if "device" in rates:
        appear = rates["device"]["weights"] / rates["device"]["pinned"]
        claims.append(
            claim("weights appear, device path, over the pinned rate", appear, APPEAR_GOAL, unit="x")
        )
    rows = [
        [
            *(path, *(f"{rate[key] / 1e9:.1f}" for key in ("pinned", "stream", "weights"))),
            *(f"{rate[key] / rate['pinned']:.2f}" for key in ("stream", "weights")),
        ]
        for path, rate in rates.items()
    ]
    print(
        table(["path", "pinned, GB/s", "sent", "weights appear", "sent / pinned", "weights / pinned"], rows)
    )
    statistics = device.statistics()
    device.close()
    if options.json is not None:
        report = {
            "benchmark": "gpu_stream",
            "machine": machine(),
            "versions": versions(("cupy-cuda13x", "cupy-cuda12x", "nvidia-libnvcomp-cu13")),
            "gib": options.gib,
            "rates_bytes_s": rates,
            "device": statistics._asdict(),
            "claims": claims,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def best_of(
    device: Any, ring: memoryview, made: Parts, weights_bytes: int, *, coded: bool
) -> dict[str, float]:
    """Bytes a second: pinned copies, what was sent, and weights that became exact; the best round of each."""
    slots = fill_ring(ring, made, coded=coded)
    rounds = [place_all(device, slots, made, coded=coded) for _ in range(ROUNDS)]
    seconds, sent_bytes = min(rounds)
    piece_bytes = max(image.sent_bytes for image, _ in slots[Tier.DRAFT])
    return {
        "pinned": pinned_rate(device, piece_bytes, len(ring)),
        "stream": sent_bytes / seconds,
        "weights": weights_bytes / seconds,
    }


def fill_ring(ring: memoryview, made: Parts, *, coded: bool) -> dict[Tier, list[tuple[PartImage, int]]]:
    """Images of the first parts in as many places as there are, half as many again for drafts; with their offsets."""
    starts, _ = slab_starts(made.manifest.groups)
    slots: dict[Tier, list[tuple[PartImage, int]]] = {tier: [] for tier in made.parts}
    at = 0
    while True:
        for tier, parts in made.parts.items():
            image = plan_image(made.manifest, parts[0], starts, coded=coded)
            if at + image.size_bytes > len(ring):
                return slots
            out = ring[at : at + image.size_bytes]
            fill_image(image, made.manifest, parts[0], starts, memoryview(made.stored[tier]), out)
            slots[tier].append((image, at))
            at = align(at + image.size_bytes, PAGE_BYTES)


def place_all(
    device: Any, slots: dict[Tier, list[tuple[PartImage, int]]], made: Parts, *, coded: bool
) -> tuple[float, int]:
    """Seconds, and bytes that were sent. All parts go where the first one goes; each waits for its place in the
    ring."""
    on_their_way: deque[Any] = deque()
    num_slots = sum(map(len, slots.values()))
    sent_bytes = 0
    together: dict[Tier, list[Placed]] = {tier: [] for tier in made.parts}
    begun_s = time.perf_counter()
    for number in range(len(made.parts[Tier.DRAFT])):
        for tier in made.parts:
            together[tier].append(Placed(*slots[tier][number % len(slots[tier])]))
            if len(together[tier]) == TOGETHER:
                if len(on_their_way) * TOGETHER >= num_slots - len(made.parts) * TOGETHER:
                    on_their_way.popleft().wait()
                on_their_way.append(device.place(together[tier]))
                sent_bytes += sum(each.image.sent_bytes for each in together[tier])
                together[tier] = []
    for rest in together.values():
        if rest:
            on_their_way.append(device.place(rest))
            sent_bytes += sum(each.image.sent_bytes for each in rest)
    while on_their_way:
        on_their_way.popleft().wait()
    return time.perf_counter() - begun_s, sent_bytes


def pinned_rate(device: Any, piece_bytes: int, ring_bytes: int) -> float:
    """Copies from the ring to the device's, and nothing else: bytes a second, the best of several."""
    import cupy

    runtime, best_s, pieces = cupy.cuda.runtime, float("inf"), ring_bytes // piece_bytes
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        for _ in range(8):
            for number in range(pieces):
                at = number * piece_bytes
                to, source = device._ring_memory.ptr + at, device._ring_address + at
                runtime.memcpyAsync(to, source, piece_bytes, runtime.memcpyHostToDevice, stream.ptr)
        stream.synchronize()
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 8 * pieces * piece_bytes / best_s


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, default=16, help="GiB of weights (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
