"""Products with one row: Teneral's kernel and torch's, for the matrices of usual models.

    python -m benchmarks.gpu.products [--json FILE]

Matrices of a shape take turns, more of them than fit into the device's cache, in a recorded graph. Shapes for which the
kernel is faster by a tenth belong in the table in `runtime/backends/cuda/decoder.py`.
"""

from __future__ import annotations

from benchmarks.gpu import model_8b
from benchmarks.report import table

CACHE_BYTES = 128 << 20  # more than the cache of any device meant
MIN_GAIN = 1.1
SHAPES = (
    *((1152, 896), (896, 896), (9728, 896), (896, 4864)),  # Qwen2.5-0.5B
    *((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)),  # Llama-3.1-8B
    *((128_256, 4096), (151_936, 896)),  # heads
)


def main() -> int:
    options = model_8b.parse(__doc__)
    if not model_8b.require_device():
        return 2
    measured = {f"{num_out}x{num_in}": times(num_out, num_in) for num_out, num_in in SHAPES}
    model_8b.keep(options.json, "products", measured, [])
    rows = [
        [
            name,
            f"{each['kernel_us']:.1f}",
            f"{each['torch_us']:.1f}",
            "kernel" if is_better(each) else "torch",
        ]
        for name, each in measured.items()
    ]
    print(table(["out x in", "kernel, µs", "torch, µs", "for the table"], rows))
    return 0


def is_better(each: dict[str, float]) -> bool:
    return each["torch_us"] > MIN_GAIN * each["kernel_us"]


def times(num_out: int, num_in: int) -> dict[str, float]:
    import torch

    from teneral.runtime.backends.cuda.decoder import RowProducts
    from teneral.runtime.backends.cuda.warm_up import open_launcher

    num = max(2, -(-CACHE_BYTES // (num_out * num_in * 2)))
    matrices = torch.randn((num, num_out, num_in), dtype=torch.bfloat16, device="cuda")
    row = torch.randn((1, num_in), dtype=torch.bfloat16, device="cuda")
    out = row.new_empty((1, num_out))
    launch, _ = open_launcher(torch.device("cuda:0"), None)
    products = RowProducts(launch, "bf16", by_kernel=True)

    def by_kernel() -> None:
        for matrix in matrices:
            products.run(matrix, row, out)

    def by_torch() -> None:
        for matrix in matrices:
            torch.nn.functional.linear(row, matrix)

    by = {"kernel_us": by_kernel, "torch_us": by_torch}
    return {name: model_8b.device_s(model_8b.recorded(work)) / num * 1e6 for name, work in by.items()}


if __name__ == "__main__":
    model_8b.leave(main())
