"""What this machine reads from memory, in GB/s: the sum over integers that no cache holds.

    python -m benchmarks.bandwidth < TASK      TASK is {"threads": N}

It prints {"gb_s": …} as JSON: the best of some passes over a gigabyte.
"""

from __future__ import annotations

import json
import sys
import time

import torch

SIZE_BYTES = 1 << 30
PASSES = 7


def main() -> None:
    torch.set_num_threads(json.load(sys.stdin)["threads"])
    numbers = torch.ones(SIZE_BYTES // 8, dtype=torch.int64)  # writing them brings the pages
    numbers.sum()
    print(json.dumps({"gb_s": max(read_rate(numbers) for _ in range(PASSES))}))


def read_rate(numbers: torch.Tensor) -> float:
    start_s = time.monotonic()
    numbers.sum()
    return numbers.nbytes / (time.monotonic() - start_s) / 1e9


if __name__ == "__main__":
    main()
