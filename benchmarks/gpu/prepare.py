"""The model of the cold starts, written and packed in the background of other steps, and its kernels.

    python -m benchmarks.gpu.prepare [--like llama-3.1-8b] [--layers N] [--work DIR] [--json FILE]

Does nothing where it is there already. Takes the lowest priority: what is measured meanwhile comes first.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

WORK = Path(tempfile.gettempdir()) / "teneral-bench"
LIKE = "llama-3.1-8b"


def store_of(work: Path, like: str, layers: int | None) -> Path:
    """The folder in which `benchmarks.store.prepare` keeps this model."""
    return work / f"{like}-{layers or 'all'}" / "store"


def kernels_of(work: Path) -> Path:
    """The folder for `--kernel-dir`: kernels of the loader and of generation, as an image would bring them along."""
    return work / "kernels"


def compile_kernels(root: Path, folder: Path) -> None:
    """For the device at hand and the model, once. Raises CalledProcessError."""
    if folder.exists():
        return
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    capability = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    architecture = capability.replace(".", "")
    unfinished = folder.with_suffix(".unfinished")
    run = [sys.executable, "-m"]
    subprocess.run([*run, "teneral.loader.device.compile", unfinished, architecture], check=True)
    config = root / "models" / "plain" / "config.json"
    options = ["--arch", architecture, "--config", config]
    subprocess.run([*run, "teneral.runtime.backends.cuda.compile", unfinished, *options], check=True)
    direct = "teneral.runtime.backends.cuda.direct.compile"
    subprocess.run([*run, direct, unfinished, architecture], check=True)
    unfinished.rename(folder)


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--like", default=LIKE, help="a shape of `teneral synth`")
    parser.add_argument(
        "--layers", type=int, default=None, help="number of layers, in place of the real model's"
    )
    parser.add_argument("--work", type=Path, default=WORK)
    parser.add_argument("--json", type=Path, default=None)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments(parser)
    options = parser.parse_args()
    from benchmarks.store import prepare

    os.nice(19)
    begun_s = time.monotonic()
    root = store_of(options.work, options.like, options.layers)
    prepare(options.like, root, num_layers=options.layers)
    compile_kernels(root, kernels_of(options.work))
    if options.json is not None:
        seconds = round(time.monotonic() - begun_s, 1)
        options.json.write_text(
            json.dumps({"benchmark": "gpu_model", "seconds": seconds, "claims": []}) + "\n"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
