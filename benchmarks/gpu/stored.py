"""Parts as they are stored, from a ring in host memory to exact weights on the device, which verifies, decodes and
merges them: bytes a second, relative to the pinned rate of the bus; and each kernel alone.

    python -m benchmarks.gpu.stored [--gib N] [--json FILE]

The ring is filled once, with parts of 16 Mi elements, as the packer makes them, and they are placed over and over, as
in a load: several in flight. *Weights* counts words once they are exact. The first part's are compared, and the word of
every image says that it was right. Reading files is not timed (`load_only` has that).
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gpu.check import claim
from benchmarks.gpu.merge import least_s
from benchmarks.gpu.planes import Parts, coded_parts, open_device
from benchmarks.report import machine, note, table, versions
from blake3 import blake3

from teneral.loader.device.base import Placed
from teneral.loader.device.image import slab_starts
from teneral.loader.device.stored import StoredImage, max_stored_bytes, max_tables_bytes, write_tables
from teneral.loader.format.manifest import Part, Tier, align
from teneral.loader.memory.arena import map_bytes

APPEAR_GOAL_BYTES_S, STREAM_GOAL = 60e9, 0.85
PART_ELEMENTS = 16 << 20
RING_BYTES = 512 << 20
ROUNDS = 3
PAGE_BYTES = 4096


def main() -> int:
    options = _options()
    device = open_device()
    if device is None:
        return 2
    made = with_digests(coded_parts(PART_ELEMENTS, max(1, (options.gib << 30) // (2 * PART_ELEMENTS))))
    _, weights_bytes = slab_starts(made.manifest.groups)
    ring = map_bytes(RING_BYTES, what="the ring of images")
    device.reserve(weights_bytes, ring, slot_bytes=slot_bytes(made))
    if not device.statistics().is_pinned:
        note("the ring could not be pinned here: all rates are those of pageable memory")
    slots = fill_ring(ring, made)
    seconds, sent_bytes = min(place_all(device, ring, slots, made) for _ in range(ROUNDS))
    is_right = has_right_weights(device)
    pinned = pinned_rate(device, max(placed.image.sent_bytes for placed in slots[Tier.DRAFT]))
    kernels = kernels_alone(device, slots[Tier.DRAFT][0])
    rates = {"pinned": pinned, "sent": sent_bytes / seconds, "weights": weights_bytes / seconds}
    claims = [
        claim("parts as stored: the weights are exact", float(is_right), 1.0),
        claim(
            "parts as stored: bytes to the device, of the pinned rate", rates["sent"] / pinned, STREAM_GOAL
        ),
        claim("parts as stored: weights appear, GB/s", rates["weights"] / 1e9, APPEAR_GOAL_BYTES_S / 1e9),
    ]
    print(table(["", "GB/s"], [[name, f"{rate / 1e9:.1f}"] for name, rate in {**rates, **kernels}.items()]))
    statistics = device.statistics()
    device.close()
    if options.json is not None:
        report = {
            "benchmark": "gpu_stored",
            "machine": machine(),
            "versions": versions(("cupy-cuda13x", "cupy-cuda12x", "numpy", "blake3")),
            "gib": options.gib,
            "rates_bytes_s": rates,
            "kernels_bytes_s": kernels,
            "device": statistics._asdict(),
            "claims": claims,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0 if is_right else 1


def with_digests(made: Parts) -> Parts:
    """The same, as a packer leaves them: a device verifies them."""
    digests = {tier: blake3(stored).digest() for tier, stored in made.stored.items()}
    parts = tuple(part._replace(digest=digests[part.tier]) for part in made.manifest.parts)
    by_tier = {tier: tuple(part for part in parts if part.tier is tier) for tier in made.parts}
    return Parts(made.manifest._replace(parts=parts), by_tier, made.stored)


def slot_bytes(made: Parts) -> int:
    return align(max(max_stored_bytes(part) for part in made.manifest.parts), PAGE_BYTES)


def fill_ring(ring: memoryview, made: Parts) -> dict[Tier, list[Placed]]:
    """The first part of each tier, with its tables, as often as there is room."""
    slots: dict[Tier, list[Placed]] = {tier: [] for tier in made.parts}
    starts, _ = slab_starts(made.manifest.groups)
    at = 0
    while True:
        for tier, parts in made.parts.items():
            begin, tables = at, align(at + parts[0].size_bytes, PAGE_BYTES)
            at = align(tables + max_tables_bytes(parts[0]), PAGE_BYTES)
            if at > len(ring):
                return slots
            slots[tier].append(place_in_ring(ring, made, parts[0], starts, begin, tables))


def place_in_ring(
    ring: memoryview, made: Parts, part: Part, starts: list[int], begin: int, tables: int
) -> Placed:
    stored = ring[begin : begin + part.size_bytes]
    stored[:] = made.stored[part.tier]
    room = ring[tables : tables + max_tables_bytes(part)]
    image = write_tables(made.manifest, part, starts, stored, room)
    if image is None:
        raise SystemExit("the packer's frames are none that a device decodes")
    return Placed(image, begin, tables)


def place_all(
    device: Any, ring: memoryview, slots: dict[Tier, list[Placed]], made: Parts
) -> tuple[float, int]:
    """Seconds, and bytes that were sent. All parts go where the first one goes, and wait for a place in the ring."""
    on_their_way: deque[tuple[Any, Placed]] = deque()
    num_slots, sent_bytes = sum(map(len, slots.values())), 0
    begun_s = time.perf_counter()
    for number in range(len(made.parts[Tier.DRAFT])):
        for tier in made.parts:
            if len(on_their_way) >= num_slots - len(made.parts):
                wait(ring, *on_their_way.popleft())
            placed = slots[tier][number % len(slots[tier])]
            on_their_way.append((device.place([placed]), placed))
            sent_bytes += placed.image.sent_bytes
    while on_their_way:
        wait(ring, *on_their_way.popleft())
    return time.perf_counter() - begun_s, sent_bytes


def wait(ring: memoryview, ticket: Any, placed: Placed) -> None:
    """Ends the program where the device has found the image wrong."""
    ticket.wait()
    image = placed.image
    assert isinstance(image, StoredImage)
    begin = placed.tables_offset_bytes + image.wrong_begin - image.tables_begin
    if any(ring[begin : begin + 4]):
        raise SystemExit(f"the device found an image wrong: {bytes(ring[begin : begin + 4]).hex()}")


def has_right_weights(device: Any) -> bool:
    """True if the first part's are those that were packed (`planes.coded_parts`)."""
    floats = np.random.default_rng(0).standard_normal(PART_ELEMENTS, dtype=np.float32) * np.float32(0.02)
    return bool(
        np.array_equal(
            device.read_back(0, 2 * PART_ELEMENTS).view("<u2"), (floats.view("<u4") >> 16).astype("<u2")
        )
    )


def pinned_rate(device: Any, piece_bytes: int) -> float:
    """Copies from the ring to a slot, and nothing else: bytes a second, the best of several."""
    import cupy

    runtime, best_s, num = cupy.cuda.runtime, float("inf"), RING_BYTES // piece_bytes
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(ROUNDS):
        begun_s = time.perf_counter()
        for number in range(8 * num):
            source = device._ring_address + number % num * piece_bytes
            to = device._slots[0].address
            runtime.memcpyAsync(to, source, piece_bytes, runtime.memcpyHostToDevice, stream.ptr)
        stream.synchronize()
        best_s = min(best_s, time.perf_counter() - begun_s)
    return 8 * num * piece_bytes / best_s


def kernels_alone(device: Any, placed: Placed) -> dict[str, float]:
    """Two kernels over one draft part on an idle device: bytes of the part a second, and decoded bytes."""
    import cupy

    from teneral.loader.device.cuda import HASH_THREADS, LANES, ROOT_THREADS
    from teneral.loader.device.stored import DECODE_KERNEL, HASH_KERNEL, ROOT_KERNEL, num_blocks

    image, at = placed.image, device._slots[0].address
    assert isinstance(image, StoredImage)
    device._num_images = 0  # so that the next image goes to the first slot, and stays there
    device.place([placed]).wait()
    kernels, num_frames = device._kernels, image.decode.num_frames
    part_bytes, word = np.uint32(image.part_bytes), np.uint64(at + image.wrong_begin)
    nodes, digest = np.uint64(at + image.nodes_begin), np.uint64(at + image.tables_begin)

    def verify() -> None:
        grid = (num_blocks(image.part_bytes),)
        kernels[HASH_KERNEL](grid, (HASH_THREADS,), (np.uint64(at), part_bytes, nodes))
        kernels[ROOT_KERNEL]((1,), (ROOT_THREADS,), (nodes, part_bytes, digest, word))

    def decode() -> None:
        arguments = (np.uint64(at), np.uint32(image.decode.table_bytes), np.uint32(num_frames), word)
        kernels[DECODE_KERNEL]((num_frames,), (LANES,), arguments)

    return {
        "verifying one part, alone": image.part_bytes / least_s(cupy, verify),
        f"decoding its {num_frames} frames, alone": PART_ELEMENTS / least_s(cupy, decode),
    }


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gib", type=int, default=16, help="GiB of weights (default: %(default)s)")
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
