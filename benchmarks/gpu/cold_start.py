"""From starting a process to its first token on a GPU, with the model's files in the page cache.

    python -m benchmarks.gpu.cold_start [--like llama-3.1-8b] [--layers N] [--rounds 3] [--json FILE] [--work DIR]

`teneral serve` on the packed model, on the plain one, and on the packed one by a process of a standby pool; on both
by the path without torch; and transformers on the plain one, straight to the device. With torch the goal is what no
process that computes with it can do without, importing it and making a context, and half a second; both are measured
in the same run, and so is the time that the pinned rate of the bus takes for the bytes that must cross it. Without
torch it is 1 s.
The model is written and packed first, and kernels are compiled, as for an image: that is not counted. It needs four
times the model's weights on the disk.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cold_starts, peer_environment
from benchmarks.gpu import ceilings, prepare
from benchmarks.gpu.check import claim
from benchmarks.processes import RunError
from benchmarks.report import machine, note, table, versions
from benchmarks.store import prepare as prepare_store

GOAL_S = 0.5  # beyond importing torch and making a context
DIRECT = ("--backend", "direct")
DIRECT_GOAL_S = 1.0  # without torch
COPY_BYTES = 1 << 30
NUM_COPIES = 5


def main() -> int:
    options = _options()
    try:
        rate = pinned_bytes_s()
    except RuntimeError as error:
        note(f"no device: {error}")
        return 2
    root = prepare.store_of(options.work, options.like, options.layers)
    prepare_store(options.like, root, num_layers=options.layers)
    kernels = prepare.kernels_of(options.work)
    prepare.compile_kernels(root, kernels)
    own_s = ceilings.start_s()
    plain, packed = root / "models" / "plain", root / "models" / "packed"
    sizes = {"plain": _size(plain, "*.safetensors"), "packed": _size(packed, "*")}
    peers = peer_environment.find(options.work)
    serve = partial(cold_starts.serve, variables={}, wants_timeline=True)
    flags = ("--device", "cuda", "--kernel-dir", str(kernels))
    systems: dict[str, Callable[[], cold_starts.ColdStart]] = {
        "teneral": lambda: serve(str(packed), *flags),
        "teneral, plain files": lambda: serve(str(plain), *flags),
        "teneral, standby": lambda: from_standby(partial(serve, str(packed), *flags), options.work),
        "teneral, direct": lambda: serve(str(packed), *flags, *DIRECT),
        "teneral, direct, plain files": lambda: serve(str(plain), *flags, *DIRECT),
        "transformers": lambda: cold_starts.peer("local-cuda", str(plain), peers=peers, variables={}),
    }
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    report: dict[str, Any] = {
        "benchmark": "gpu_cold_start",
        "model": options.like,
        "layers": options.layers,
        "machine": machine(),
        "versions": versions(),
        "pinned_bytes_s": rate,
        "bytes": sizes,
        "seconds": seconds,
        "failed": {},
        "timelines": [],  # of each of ours: how long context, libraries and kernels took
        **own_s,
        "claims": [],
    }
    measure(systems, report, options)
    is_plain = {"teneral, plain files", "teneral, direct, plain files", "transformers"}
    floors = {name: sizes["plain" if name in is_plain else "packed"] / rate for name in systems}
    medians = {name: statistics.median(each) for name, each in seconds.items() if each}
    if "teneral" in medians:
        goal_s = round(sum(own_s.values()) + GOAL_S, 2)
        report["claims"] = [claim("cold start on a GPU", medians["teneral"], goal_s, unit=" s", at_most=True)]
    report["claims"] += [
        claim(f"cold start on a GPU: {name}", medians[name], DIRECT_GOAL_S, unit=" s", at_most=True)
        for name in medians
        if "direct" in name
    ]
    _keep(options.json, report)
    rows = [
        [name, f"{median:.2f}", f"{floors[name]:.2f}", f"{median / floors[name]:.2f}x"]
        for name, median in medians.items()
    ]
    print(f"pinned copies to the device: {rate / 1e9:.1f} GB/s; {sizes} bytes; page cache warm")
    print(table(["exec → first token", "s", "floor, s", "of the floor"], rows))
    return 0 if "teneral" in medians else 1


def measure(
    systems: dict[str, Callable[[], cold_starts.ColdStart]],
    report: dict[str, Any],
    options: argparse.Namespace,
) -> None:
    """Start all in turns; what has failed once is not started again. The report is kept after each."""
    for _ in range(options.rounds):
        for name, start in systems.items():
            if name in report["failed"]:
                continue
            try:
                cold_start = start()
                report["seconds"][name].append(cold_start.first_token_s)
                if cold_start.timeline is not None:
                    report["timelines"].append({"system": name, **cold_start.timeline})
            except RunError as error:
                report["failed"][name] = str(error)[-2_000:]
                note(f"{name}: {error}")
            _keep(options.json, report)


def from_standby(serve: Callable[..., cold_starts.ColdStart], folder: Path) -> cold_starts.ColdStart:
    """A start by a process that waits, with torch imported. How it came to wait is not counted."""
    try:
        with cold_starts.StandbyPool(folder) as pool:
            return serve(pool=pool)
    except SystemExit as error:  # it has not begun
        raise RunError(str(error)) from error


def pinned_bytes_s() -> float:
    """Bytes a second from pinned memory to the device, the best of several copies. RuntimeError without a device."""
    import torch  # only here: nothing else of this process computes

    if not torch.cuda.is_available():
        raise RuntimeError("torch sees no CUDA device")
    host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda")
    best_s = float("inf")
    for _ in range(NUM_COPIES):
        torch.cuda.synchronize()
        began_s = time.perf_counter()
        device.copy_(host, non_blocking=True)
        torch.cuda.synchronize()
        best_s = min(best_s, time.perf_counter() - began_s)
    return COPY_BYTES / best_s


def _keep(path: Path | None, report: dict[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps(report, indent=2) + "\n")


def _size(folder: Path, pattern: str) -> int:
    return sum(path.stat().st_size for path in folder.rglob(pattern) if path.is_file())


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    prepare.arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
