"""Memory bandwidth of this machine in GB/s: a sum over integers that fit in no cache, by torch.

    python -m benchmarks.bandwidth < TASK      TASK is {"threads": N}

It prints {"gb_s": …} as JSON: the best of some passes over a gigabyte.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import torch

SIZE_BYTES = 1 << 30
PASSES = 7


def main() -> None:
    threads = json.load(sys.stdin)["threads"]
    torch.set_num_threads(threads)
    numbers = torch.ones(SIZE_BYTES // 8, dtype=torch.int64)  # writing them brings the pages
    numbers.sum()
    print(json.dumps({"gb_s": max(read_rate(numbers.sum) for _ in range(PASSES))}))


def read_rate(read: Callable[[], object]) -> float:
    start_s = time.monotonic()
    read()
    return SIZE_BYTES / (time.monotonic() - start_s) / 1e9


if __name__ == "__main__":
    main()
