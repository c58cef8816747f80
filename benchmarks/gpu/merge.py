"""The kernels that merge planes into weights, alone: bytes read and written a second, relative to a copy's.

    python -m benchmarks.gpu.merge [--elements N] [--json FILE]

Each merges N elements (default: 512 Mi, which no cache holds) in one launch, and as many as a part has at most (16 Mi).
What the quick kernels have written is compared, bit for bit, with what numpy makes of the same planes, some frames of
it. Everything lies on the device already.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.gpu.check import claim
from benchmarks.gpu.planes import empty_parts, open_device
from benchmarks.report import machine, table, versions
from tests.support.image_programs import run_launch

from teneral.loader.device.image import PartImage, pack_tables, plan_image, slab_starts
from teneral.loader.format.manifest import FRAME_ELEMENTS

GOAL = 0.8
ROUNDS = 20
COPY_BYTES = 2 << 30
RANDOM_BYTES = (32 << 20) + 1000  # so that planes do not repeat each other
PART_ELEMENTS = 16 << 20
CASES = (("BF16", "bf16.3", 2), ("BF16", "bf16.4", 2), ("F32", "f32.7", 4))  # dtype, encoding, bytes a word
QUICK = "bf16.3"
MAX_GENERAL_ELEMENTS = 128 << 20


def main() -> int:
    options = _options()
    device = open_device()
    if device is None:
        return 2
    import cupy

    copy = copy_rate(cupy)
    cupy.get_default_memory_pool().free_all_blocks()
    rows: list[dict[str, Any]] = []
    for dtype, encoding, word_bytes in CASES:
        most = options.elements if encoding == QUICK else min(options.elements, MAX_GENERAL_ELEMENTS)
        for count in dict.fromkeys((most, min(most, PART_ELEMENTS))):
            rows += measure(cupy, device, dtype, encoding, word_bytes, count, copy)
            cupy.get_default_memory_pool().free_all_blocks()
    claims = [
        claim(f"{row['kernel']}, of the bandwidth of a copy on the device", row["of_copy"], GOAL)
        for row in rows
        if row["encoding"] == QUICK and row["elements"] == options.elements
    ]
    print(f"a copy on the device: {copy / 1e9:,.0f} GB/s, read and written")
    print(
        table(
            ["kernel", "encoding", "elements", "GB/s", "of a copy", "µs"],
            [
                [
                    *(row["kernel"], row["encoding"], f"{row['elements']:,}", f"{row['bytes_s'] / 1e9:,.0f}"),
                    *(f"{row['of_copy']:.2f}", f"{row['seconds'] * 1e6:,.1f}"),
                ]
                for row in rows
            ],
        )
    )
    if options.json is not None:
        report = {
            "benchmark": "gpu_merge",
            "machine": machine(),
            "versions": versions(("cupy-cuda13x", "cupy-cuda12x", "numpy")),
            "copy_bytes_s": copy,
            "kernels": rows,
            "claims": claims,
        }
        options.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def measure(
    cupy: Any, device: Any, dtype: str, encoding: str, word_bytes: int, count: int, copy: float
) -> list[dict[str, Any]]:
    """Each tier's kernel over one part of that number of elements."""
    made = empty_parts(dtype, encoding, count)
    starts, weights_bytes = slab_starts(made.manifest.groups)
    weights = cupy.zeros(weights_bytes, cupy.uint8)
    found = []
    for tier, (part,) in made.parts.items():
        plan = plan_image(made.manifest, part, starts)
        (launch,) = plan.launches
        image = random_bytes(cupy, plan.size_bytes)
        table_bytes = bytearray(plan.planes[0][0].offset_bytes)
        pack_tables(plan, made.manifest, part, starts, memoryview(table_bytes))
        image[: len(table_bytes)] = cupy.asarray(np.frombuffer(table_bytes, np.uint8))
        before = _ends(weights, word_bytes)
        place = placer(device, launch, image, weights)
        place()
        if not is_right(plan, image, before, _ends(weights, word_bytes), count, word_bytes):
            raise SystemExit(f"{launch.kernel} gave other weights than numpy")
        seconds = least_s(cupy, place)
        planes_bytes = sum(plane.size_bytes for plane in plan.planes[0])
        is_first = tier is next(iter(made.parts))
        moved_bytes = planes_bytes + count * word_bytes * (
            1 if is_first else 2
        )  # refining reads what it replaces
        found.append(
            {
                "kernel": launch.kernel,
                "encoding": encoding,
                "tier": tier.name.lower(),
                "elements": count,
                "seconds": seconds,
                "bytes_s": moved_bytes / seconds,
                "of_copy": moved_bytes / seconds / copy,
            }
        )
        del image
    return found


def random_bytes(cupy: Any, size_bytes: int) -> Any:
    """Any bytes, over and over: made on the host, so that nothing is compiled for it."""
    some = cupy.asarray(np.random.default_rng(0).integers(0, 256, RANDOM_BYTES, dtype=np.uint8))
    made = cupy.zeros(size_bytes, cupy.uint8)
    for begin in range(0, size_bytes, RANDOM_BYTES):
        piece = made[begin : begin + RANDOM_BYTES]
        piece[:] = some[: piece.size]
    return made


def placer(device: Any, launch: Any, image: Any, weights: Any) -> Callable[[], None]:
    """A launch of the kernel like that of `CudaDevice`, on the current stream."""
    from teneral.loader.device.cuda import BLOCKS_PER_FRAME, MAX_GRID_Y, THREADS

    grid = (BLOCKS_PER_FRAME, min(launch.num_frames, MAX_GRID_Y))
    numbers = (np.uint32(launch.table_bytes), np.uint32(launch.num_frames))
    arguments = (np.uint64(image.data.ptr), *numbers, np.uint64(weights.data.ptr), np.uint64(0))
    kernel = device._kernels[launch.kernel]
    return lambda: kernel(grid, (THREADS,), arguments)


def _ends(weights: Any, word_bytes: int) -> tuple[np.ndarray, np.ndarray]:
    """The first and the last frame of the weights."""
    frame_bytes = FRAME_ELEMENTS * word_bytes
    return weights[:frame_bytes].get(), weights[-frame_bytes:].get()


def is_right(
    plan: PartImage,
    image: Any,
    before: tuple[np.ndarray, np.ndarray],
    after: tuple[np.ndarray, np.ndarray],
    count: int,
    word_bytes: int,
) -> bool:
    """True if the first and the last frame are what numpy makes of the same planes and of what was there."""
    (launch,) = plan.launches
    last = count // FRAME_ELEMENTS - 1
    for number, was, became in ((0, before[0], after[0]), (last, before[1], after[1])):
        pieces = [
            image[begin : begin + size].get()
            for plane in plan.planes[0]
            for size in [plane.size_bytes * FRAME_ELEMENTS // count]
            for begin in [plane.offset_bytes + number * size]
        ]
        recipe = image[launch.table_bytes : launch.table_bytes + 96].get()
        if not np.array_equal(by_numpy(launch, recipe, pieces, was), became):
            return False
    return True


def by_numpy(launch: Any, recipe: np.ndarray, pieces: list[np.ndarray], was: np.ndarray) -> np.ndarray:
    """One frame, by an image of its own: the recipe, a table of one frame, and its planes."""
    frame = np.zeros(12, "<u4")
    frame[2] = FRAME_ELEMENTS
    frame[4 : 4 + len(pieces)] = recipe.size + 48 + np.cumsum([0, *(piece.size for piece in pieces[:-1])])
    weights = was.copy()
    alone = launch._replace(table_bytes=0, num_frames=1)
    run_launch(alone, np.concatenate([recipe, frame.view(np.uint8), *pieces]), weights)
    return weights


def copy_rate(cupy: Any) -> float:
    """Bytes read and written a second by a copy on the device, the best of several."""
    source = cupy.zeros(COPY_BYTES, cupy.uint8)
    target = cupy.empty_like(source)
    return 2 * COPY_BYTES / least_s(cupy, lambda: cupy.copyto(target, source))


def least_s(cupy: Any, work: Callable[[], None]) -> float:
    """Seconds on the device, the least of several."""
    best_ms = float("inf")
    for _ in range(ROUNDS):
        begin, end = cupy.cuda.Event(), cupy.cuda.Event()
        begin.record()
        work()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, cupy.cuda.get_elapsed_time(begin, end))
    return best_ms / 1e3


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--elements", type=int, default=512 << 20, help="elements, in whole frames (default: %(default)s)"
    )
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    options = parser.parse_args()
    options.elements = max(FRAME_ELEMENTS, options.elements - options.elements % FRAME_ELEMENTS)
    return options


if __name__ == "__main__":
    sys.exit(main())
