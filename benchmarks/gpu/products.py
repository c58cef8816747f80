"""Products of few rows: Teneral's kernels and torch's, for the matrices of usual models.

    python -m benchmarks.gpu.products [--json FILE]

Of bf16 weights torch and the kernel for single rows; of integers of 8 and 4 bits, in groups of 128, the kernels for few
rows. Matrices of a shape take turns, more of them than fit into the device's cache, in a recorded graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.gpu import model_8b
from benchmarks.gpu.check import claim
from benchmarks.report import table

CACHE_BYTES = 256 << 20  # more than the cache of any device meant
GROUP_SIZE = 128
ROWS = (1, 16, 64)
QWEN_05B = ((1152, 896), (896, 896), (9728, 896), (896, 4864))
LLAMA_8B = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128_256, 4096))


def main() -> int:
    options = model_8b.parse(__doc__)
    if not model_8b.require_device():
        return 2
    measured: dict[str, dict[str, float]] = {}
    for num_out, num_in in (*QWEN_05B, *LLAMA_8B):
        measured[f"{num_out}x{num_in}"] = times_us(num_out, num_in)
        model_8b.keep(options.json, "products", {"us": measured}, [])
    slowest = min(each["torch bf16, 1"] / each["kernel bf16, 1"] for each in measured.values())
    claims = [claim("a single row by the kernel, relative to torch, at its worst", slowest, 1.0, unit="x")]
    model_8b.keep(options.json, "products", {"us": measured}, claims)
    names = list(next(iter(measured.values())))
    rows = [[shape, *(f"{each[name]:.1f}" for name in names)] for shape, each in measured.items()]
    print("µs a product; of how many rows")
    print(table(["out x in", *names], rows))
    return 0


def times_us(num_out: int, num_in: int) -> dict[str, float]:
    """By kernel, dtype and number of rows."""
    import torch

    from teneral.runtime.backends.cuda.products import CudaProducts
    from teneral.runtime.backends.cuda.warm_up import open_launcher
    from teneral.runtime.backends.torch.layers import Linear, QuantizedLinear

    launch, _ = open_launcher(torch.device("cuda:0"), None)
    products = CudaProducts(launch, "bf16", rows_by_kernel=True)

    def took_us(matrices: list[Any], num_rows: int, product: Callable[[Any, Any], object]) -> float:
        x = torch.randn((num_rows, num_in), dtype=torch.bfloat16, device="cuda")
        work = model_8b.recorded(lambda: [product(matrix, x) for matrix in matrices])
        return model_8b.device_s(work) / len(matrices) * 1e6

    found: dict[str, float] = {}
    num = max(2, -(-CACHE_BYTES // (num_out * num_in * 2)))
    floats = torch.randn((num, num_out, num_in), dtype=torch.bfloat16, device="cuda")
    plain = [Linear(matrix) for matrix in floats]
    found["kernel bf16, 1"] = took_us(plain, 1, products)
    for num_rows in ROWS:
        found[f"torch bf16, {num_rows}"] = took_us(plain, num_rows, Linear.__call__)
    for bits, dtype in ((8, torch.int8), (4, torch.uint8)):
        num = max(2, -(-CACHE_BYTES // (num_out * num_in * bits // 8)))
        low, high, width = (-128, 128, num_in) if bits == 8 else (0, 256, num_in // 2)
        levels = torch.randint(low, high, (num, num_out, width), dtype=dtype, device="cuda")
        scale = torch.rand((num_out, num_in // GROUP_SIZE), device="cuda").to(torch.bfloat16) / 100
        integers = [QuantizedLinear(matrix, scale) for matrix in levels]
        for num_rows in ROWS:
            found[f"int{bits}, {num_rows}"] = took_us(integers, num_rows, products)
    return found


if __name__ == "__main__":
    model_8b.leave(main())
