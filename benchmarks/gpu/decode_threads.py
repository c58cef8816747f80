"""The host's part of a load onto a GPU: parts become images, by 1, 4, 8 and 16 threads, with nothing behind the ring.

    python -m benchmarks.gpu.decode_threads [--json FILE]

Needs no device. Each image's room is given back as soon as it is whole, as by a device that is infinitely fast.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from benchmarks.gpu import model_8b
from benchmarks.gpu.planes import coded_parts
from benchmarks.report import table

THREADS = (1, 4, 8, 16)
ELEMENTS = 16 << 20  # of a part, as the packer makes them
NUM_PARTS = 2  # coded once each; threads take them in turns
MIN_S = 2.0
GOAL_BYTES_S = 15e9  # of weights, the claim for 16 cores and a ring of 128 MiB


def main() -> int:
    options = model_8b.parse(__doc__)
    made = coded_parts(ELEMENTS, NUM_PARTS)
    measured: dict[str, Any] = {"weights_bytes_s": {}}
    for num_threads in THREADS:
        measured["weights_bytes_s"][num_threads] = rate(made, num_threads)
        model_8b.keep(options.json, "decode_threads", measured, [])
    rows = [[str(num), f"{each / 1e9:.1f}"] for num, each in measured["weights_bytes_s"].items()]
    print(table(["threads", "GB/s of weights, drafts"], rows))
    return 0


def rate(made: Any, num_threads: int) -> float:
    """Bytes a second of bf16 weights whose draft became images."""
    from teneral.loader.device.ring import DEFAULT_BYTES, ImageRing
    from teneral.loader.device.sink import ImageSink, SentImage
    from teneral.loader.format.manifest import Tier
    from teneral.loader.memory.arena import map_bytes
    from teneral.loader.process.cpu import quick_turns
    from teneral.loader.timeline import Timeline

    ring = ImageRing(map_bytes(DEFAULT_BYTES, what="a benchmark's ring"))

    def send(image: SentImage) -> None:
        ring.give_back(image.offset_bytes)

    sink = ImageSink(made.manifest, ring, send, timeline=Timeline())
    part, stored = made.parts[Tier.DRAFT][0], memoryview(made.stored[Tier.DRAFT])
    sink.deliver(part, stored)  # touches the ring, and imports
    begun_s = time.monotonic()

    def work(_: int) -> int:
        num = 0
        while time.monotonic() - begun_s < MIN_S:
            sink.deliver(part, stored)
            num += 1
        return num

    with quick_turns(), ThreadPoolExecutor(num_threads) as pool:
        num_parts = sum(pool.map(work, range(num_threads)))
    return num_parts * ELEMENTS * 2 / (time.monotonic() - begun_s)


if __name__ == "__main__":
    model_8b.leave(main())
