"""Files in the page cache → all weights on the device, and nothing computed: Teneral and other loaders.

    python -m benchmarks.gpu.load_only [--like llama-3.1-8b] [--layers N] [--rounds 3] [--json FILE] [--work DIR]

A process for each run; a rate is the bytes of the plain weights over the time from the end of its imports and the
creation of the context until the device has all of them. The next column has the time from the process's start.
Loaders that are not installed are named and omitted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.gpu import model_8b, prepare
from benchmarks.report import machine, note, table, versions
from benchmarks.store import prepare as prepare_store

PEERS = ("safetensors", "fastsafetensors", "instanttensor", "runai-model-streamer")
PACKED = ("teneral", "teneral, parts as stored")  # others read plain files
TIMEOUT_S = 60.0

PROLOGUE = """
import sys, time
started_s = time.time()
import glob, torch
folder, = sys.argv[1:]
files = sorted(glob.glob(folder + "/*.safetensors"))
device = torch.device("cuda:0")
torch.empty(1, device=device)
kept = {}
"""
EPILOGUE = """
torch.cuda.synchronize()
ended_s = time.time()
size = sum(each.nbytes for each in kept.values()) if kept else size
print(f"result {size} {ended_s - begun_s} {ended_s - started_s}")
"""
TENERAL = """
from teneral.loader.device.cuda import CudaDevice
from teneral.loader.load.device_load import DeviceLoad
from teneral.loader.load.launch import Task, launch
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.base import SourceOptions
from teneral.loader.timeline import Timeline
begun_s = time.time()
timeline = Timeline()
task = Task(folder, None, SourceOptions(), LoadOptions(), timeline.started_at, device="cuda:0")
task = task._replace(as_stored={as_stored})
with DeviceLoad.follow(launch(task), lambda: CudaDevice(0, timeline=timeline), timeline=timeline) as load:
    assert load.wait_done(60.0)
    size = sum(tensor.size_bytes for tensor in load.manifest.tensors)
"""
PROGRAMS = {
    "teneral": TENERAL.format(as_stored=False),
    "teneral, parts as stored": TENERAL.format(as_stored=True),
    "teneral, plain files, parts as stored": TENERAL.format(as_stored=True),
    "safetensors": """
from safetensors.torch import load_file
begun_s = time.time()
for file in files:
    kept.update(load_file(file, device="cuda:0"))
""",
    "fastsafetensors": """
from fastsafetensors import fastsafe_open
begun_s = time.time()
with fastsafe_open(filenames=files, nogds=True, device="cuda:0") as opened:
    for name in opened.keys():
        kept[name] = opened.get_tensor(name).clone()
""",
    "instanttensor": """
from instanttensor import safe_open
begun_s = time.time()
with safe_open(files, framework="pt", device=0) as opened:
    for name, tensor in opened.tensors():
        kept[name] = tensor.clone()
""",
    "runai-model-streamer": """
from runai_model_streamer import SafetensorsStreamer
begun_s = time.time()
with SafetensorsStreamer() as streamer:
    streamer.stream_files(files)
    for name, tensor in streamer.get_tensors():
        kept[name] = tensor.to(device)
""",
}


def main() -> int:
    options = _options()
    if not model_8b.require_device():
        return 2
    root = prepare.store_of(options.work, options.like, options.layers)
    prepare_store(options.like, root, num_layers=options.layers)
    folders = {name: root / "models" / ("packed" if name in PACKED else "plain") for name in PROGRAMS}
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in PROGRAMS}
    failed: dict[str, str] = {}
    report: dict[str, Any] = {
        "benchmark": "gpu_load_only",
        "model": options.like,
        "machine": machine(),
        "versions": versions(PEERS),
        "runs": runs,
        "failed": failed,
        "claims": [],
    }
    for _ in range(options.rounds):
        for name, program in PROGRAMS.items():
            if name not in failed:
                try:
                    runs[name].append(run(program, folders[name]))
                except (subprocess.SubprocessError, RuntimeError) as error:
                    failed[name] = str(error)[-2_000:]
                    note(f"{name}: {failed[name]}")
                if options.json is not None:
                    options.json.write_text(json.dumps(report, indent=2) + "\n")
    rows = [
        [
            name,
            *(
                f"{statistics.median(each[key] for each in found):.2f}"
                for key in ("gb_s", "load_s", "whole_s")
            ),
        ]
        for name, found in runs.items()
        if found
    ]
    print(table(["load only", "GB/s of weights", "s", "s, from the start"], rows))
    return 0 if runs["teneral"] else 1


def run(program: str, folder: Path) -> dict[str, float]:
    command = [sys.executable, "-c", PROLOGUE + program + EPILOGUE, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("result ")]
    if done.returncode or not lines:
        raise RuntimeError(f"it ended with status {done.returncode}: {done.stderr[-1_500:]}")
    size_bytes, load_s, whole_s = map(float, lines[-1][1:])
    return {"gb_s": size_bytes / load_s / 1e9, "load_s": load_s, "whole_s": whole_s}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    prepare.arguments(parser)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
