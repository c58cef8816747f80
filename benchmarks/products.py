"""Products of the native core and of torch: GFLOP/s and GB/s of weights, by dtype and number of rows.

    python -m benchmarks.products [--threads N] [--rounds 9] [--cpu-time] [--pairs] [--save]

The shape is a gate and up projection of a 0.5B model, as many layers of it as no cache holds. torch multiplies bf16 by
bf16; integers have no product of the same meaning there, and are compared with its bf16. The ways take turns; figures
are the best of some rounds. `--cpu-time` counts CPU time of one thread each: for machines whose cores others use, too.
`TENERAL_ISA` names another library. `--pairs` measures products of bf16 twice: with the processor's instruction for
pairs, and by fused products of the same bits.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from benchmarks.report import begin, finish, note, table, title

from teneral.loader.native.library import Library, library
from teneral.runtime.backends.native import arrays
from teneral.runtime.backends.native.products import Products, Weight

NUM_IN, NUM_OUT = 896, 2 * 4864
LAYERS = 6
ROWS = (1, 4, 8, 16, 49, 128, 512)
TORCH = "torch bf16"
FUSED = ", fused"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--cpu-time", action="store_true", help="CPU time of one thread in place of time")
    parser.add_argument("--pairs", action="store_true", help="with and without the instruction for pairs")
    parser.add_argument("--save", action="store_true", help="keep the result under benchmarks/results/")
    options = parser.parse_args()
    loaded = library()
    if loaded is None:
        raise SystemExit("there is no native library: python build_native.py")
    threads = 1 if options.cpu_time else options.threads
    torch.set_num_threads(threads)
    loaded.functions.tn_set_threads(threads)
    report = begin(
        "products",
        variant="-".join(["pairs"] * options.pairs + [loaded.isa.replace("_", "-")]),
        isa=loaded.isa,
        threads=threads,
        shape=[NUM_IN, NUM_OUT],
        cpu_time=options.cpu_time,
    )
    clock = time.thread_time if options.cpu_time else time.perf_counter
    report["gflop_s"] = measure(loaded, options.rounds, clock, with_pairs=options.pairs)
    finish(report, render(report), save=options.save)


def make_weights(rng: np.random.Generator) -> dict[str, Weight]:
    values = rng.standard_normal((NUM_OUT, NUM_IN), np.float32)
    levels = rng.integers(-127, 128, values.shape).astype(np.int8)
    nibbles = rng.integers(0, 256, (NUM_OUT, NUM_IN // 2)).astype(np.uint8)

    def scale(group_size: int) -> Any:
        return arrays.to_bf16(rng.random((NUM_OUT, NUM_IN // group_size), np.float32))

    return {
        "bf16": Weight(arrays.to_bf16(values)),
        "fp32": Weight(values),
        "int8": Weight(levels, scale=scale(NUM_IN)),
        "int8 g128": Weight(levels, scale=scale(128)),
        "int4 g64": Weight(nibbles, scale=scale(64)),
        "mxfp4": Weight(nibbles, scale=rng.integers(118, 130, (NUM_OUT, NUM_IN // 32)).astype(np.uint8)),
    }


def measure(
    library: Library, rounds: int, clock: Callable[[], float], *, with_pairs: bool
) -> dict[str, dict[str, float]]:
    """GFLOP/s by number of rows and way."""
    products, set_fused = Products(library), library.functions.tn_set_fused_pairs
    rng = np.random.default_rng(0)
    layers = [make_weights(rng) for _ in range(LAYERS)]
    in_torch = [torch.randn(NUM_OUT, NUM_IN, dtype=torch.bfloat16) for _ in range(LAYERS)]
    found: dict[str, dict[str, float]] = {}
    for rows in ROWS:
        x = rng.standard_normal((rows, NUM_IN), np.float32)
        in_bf16, out = arrays.to_bf16(x), np.empty((rows, NUM_OUT), np.float32)
        torch_x = torch.from_numpy(in_bf16.view(np.int16)).view(torch.bfloat16)

        def native(way: str, x: Any = x, in_bf16: Any = in_bf16, out: Any = out) -> None:
            name = way.removesuffix(FUSED)
            if with_pairs:
                set_fused(way != name)
            for layer in layers:
                products.linear(x if name == "fp32" else in_bf16, layer[name], out)

        def peer(torch_x: torch.Tensor = torch_x) -> None:
            for weight in in_torch:
                torch.nn.functional.linear(torch_x, weight)

        ways: dict[str, Callable[[], None]] = {TORCH: peer}
        names = [*layers[0], *(f"{name}{FUSED}" for name in layers[0] if with_pairs and name != "fp32")]
        ways |= {name: lambda name=name, run=native: run(name) for name in sorted(names)}  # type: ignore[misc]
        best = dict.fromkeys(ways, float("inf"))
        for _ in range(rounds + 1):
            for name, run in ways.items():
                start_s = clock()
                run()
                best[name] = min(best[name], clock() - start_s)
        flop = 2 * rows * NUM_IN * NUM_OUT * LAYERS
        found[str(rows)] = {name: flop / time_s / 1e9 for name, time_s in best.items()}
        note(f"{rows} rows")
    return found


def render(report: dict[str, Any]) -> str:
    names = list(next(iter(report["gflop_s"].values())))
    lines = [
        [rows, *(f"{values[name]:.0f} ({values[name] / values[TORCH]:.2f})" for name in names)]
        for rows, values in report["gflop_s"].items()
    ]
    words = "products, GFLOP/s (and times torch's bf16)", report["isa"], f"threads {report['threads']}"
    return title(report, *words) + "\n" + table(["rows", *names], lines)


if __name__ == "__main__":
    main()
