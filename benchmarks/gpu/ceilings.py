"""Ceilings of the machine itself: no part of Teneral is faster.

    python -m benchmarks.gpu.ceilings [--json FILE]

A copy on the device; copies to it from pinned memory of CUDA's and from a pinned memory file, as the loader's ring is
one; products of large matrices; and, in processes of their own, importing torch and making a context.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
from typing import Any

from benchmarks.gpu import model_8b
from benchmarks.report import table

COPY_BYTES = 256 << 20
GEMM_SIZES = ((1, 4096, 4096), (64, 14_336, 4096), (2048, 14_336, 4096), (8192, 8192, 8192))
ROUNDS = 3
START = """
import time
begun_s = time.time()
import torch
imported_s = time.time()
torch.empty(1, device="cuda")
print(imported_s - begun_s, time.time() - imported_s)
"""


def main() -> int:
    options = model_8b.parse(__doc__)
    if not model_8b.require_device():
        return 2
    measured: dict[str, Any] = {"copy_bytes_s": model_8b.copy_bytes_s()}
    measured["pinned_bytes_s"] = from_torch()
    model_8b.keep(options.json, "ceilings", measured, [])
    measured["memory_file_bytes_s"] = from_memory_file()
    measured["gemm_flop_s"] = {
        f"{rows}x{num_out}x{num_in}": gemm(rows, num_out, num_in) for rows, num_out, num_in in GEMM_SIZES
    }
    model_8b.keep(options.json, "ceilings", measured, [])
    measured |= start_s()
    model_8b.keep(options.json, "ceilings", measured, [])
    rows = [
        ["copy on the device, read and written", f"{measured['copy_bytes_s'] / 1e9:,.0f} GB/s"],
        ["copy to it, pinned", f"{measured['pinned_bytes_s'] / 1e9:.1f} GB/s"],
        ["copy to it, a pinned memory file", f"{(measured['memory_file_bytes_s'] or 0) / 1e9:.1f} GB/s"],
        *(
            [f"product {name}", f"{each / 1e12:.1f} TFLOP/s"]
            for name, each in measured["gemm_flop_s"].items()
        ),
        ["import torch", f"{measured['import_torch_s']:.2f} s"],
        ["context", f"{measured['context_s']:.2f} s"],
    ]
    print(table(["", ""], rows))
    return 0


def from_torch() -> float:
    import torch

    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    return COPY_BYTES / model_8b.device_s(lambda: device.copy_(host, non_blocking=True))


def from_memory_file() -> float | None:
    """The speed from shared memory that is pinned in place, like the loader's ring. None where it cannot be pinned."""
    import cupy

    from teneral.loader.memory.arena import map_bytes

    runtime = cupy.cuda.runtime
    ring = map_bytes(COPY_BYTES, what="a benchmark's ring")
    import numpy as np

    address = int(np.frombuffer(ring, np.uint8).ctypes.data)
    try:
        runtime.hostRegister(address, COPY_BYTES, 1)
    except runtime.CUDARuntimeError as error:
        print(f"a memory file cannot be pinned here: {error}")
        return None
    device = cupy.empty(COPY_BYTES, cupy.uint8)
    begin, end = cupy.cuda.Event(), cupy.cuda.Event()
    best_ms = float("inf")
    stream = cupy.cuda.Stream(non_blocking=True)
    for _ in range(10):
        begin.record(stream)
        runtime.memcpyAsync(device.data.ptr, address, COPY_BYTES, runtime.memcpyHostToDevice, stream.ptr)
        end.record(stream)
        end.synchronize()
        best_ms = min(best_ms, cupy.cuda.get_elapsed_time(begin, end))
    runtime.hostUnregister(address)
    return COPY_BYTES / best_ms * 1e3


def gemm(rows: int, num_out: int, num_in: int) -> float:
    import torch

    x = torch.randn((rows, num_in), dtype=torch.bfloat16, device="cuda")
    weight = torch.randn((num_out, num_in), dtype=torch.bfloat16, device="cuda")
    return 2 * rows * num_out * num_in / model_8b.device_s(lambda: torch.nn.functional.linear(x, weight))


def start_s() -> dict[str, float]:
    """Medians of fresh processes. The floor of a cold start: nothing computes before."""
    found = []
    for _ in range(ROUNDS):
        done = subprocess.run(
            [sys.executable, "-c", START],
            capture_output=True,
            text=True,
            check=True,
            timeout=60,
            env=os.environ,
        )
        found.append([float(each) for each in done.stdout.split()])
    names = ("import_torch_s", "context_s")
    return {name: statistics.median(each[place] for each in found) for place, name in enumerate(names)}


if __name__ == "__main__":
    model_8b.leave(main())
