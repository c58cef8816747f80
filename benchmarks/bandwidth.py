"""What this machine reads from memory, in GB/s: the sum over integers that no cache holds, by torch, and by a loop that
asks memory ahead, as the kernels do.

    python -m benchmarks.bandwidth < TASK      TASK is {"threads": N}

It prints {"gb_s": …} as JSON: the best of some passes over a gigabyte, in either way.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable

import numba
import numpy as np
import torch

from teneral.runtime.kernels.vectors import fetch_ahead

SIZE_BYTES = 1 << 30
PASSES = 7
AHEAD = 512  # integers: 4 KiB
LINE = 8  # integers in a cache line


def main() -> None:
    threads = json.load(sys.stdin)["threads"]
    torch.set_num_threads(threads)
    numba.set_num_threads(min(threads, numba.config.NUMBA_NUM_THREADS))
    numbers = torch.ones(SIZE_BYTES // 8, dtype=torch.int64)  # writing them brings the pages
    array = numbers.numpy()
    ways: list[Callable[[], object]] = [numbers.sum, lambda: total(array, threads)]
    for read in ways:
        read()
    print(json.dumps({"gb_s": max(read_rate(read) for read in ways * PASSES)}))


@numba.njit(parallel=True, nogil=True)
def total(numbers: np.ndarray, threads: int) -> int:
    """What they add up to."""
    share = numbers.size // threads // LINE * LINE
    totals = np.zeros((threads, LINE), np.int64)
    for thread in numba.prange(threads):
        sums = np.zeros(LINE, np.int64)
        for place in range(thread * share, (thread + 1) * share, LINE):
            fetch_ahead(numbers, place + AHEAD)
            for i in range(LINE):
                sums[i] += numbers[place + i]
        totals[thread] = sums
    return int(totals.sum())


def read_rate(read: Callable[[], object]) -> float:
    start_s = time.monotonic()
    read()
    return SIZE_BYTES / (time.monotonic() - start_s) / 1e9


if __name__ == "__main__":
    main()
