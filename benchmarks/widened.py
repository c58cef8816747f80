"""The demo's model with wider rows: what the kernels for integers need, which take inputs in groups of 128.

    python -m benchmarks.widened DIRECTORY [--model demo/model]

Rows of 192 numbers become rows of 256, and 6 heads 8. In every 64 columns 48 are the model's and 16 are zeros, so that
every group has its share of numbers; the new heads' outputs are multiplied by zeros. Norms take the zeros into account,
by a factor that is rounded to bf16: but for that, the model says what it said before.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

RUN, FULL = 64, 48  # of so many columns, so many are the model's
HEADS, FULL_HEADS = 4, 3  # of those that share keys and values


def widen(model: Path, directory: Path) -> None:
    """Write the directory. `model` has a hidden size of a multiple of 48, as wide as its heads
    together, which share keys and values by three."""
    config = json.loads((model / "config.json").read_text())
    hidden, head_dim = config["hidden_size"], config["head_dim"]
    columns = _places(hidden, FULL, RUN)
    attended = _places(config["num_attention_heads"] * head_dim, FULL_HEADS * head_dim, HEADS * head_dim)
    tensors = {}
    for name, narrow in load_file(model / "model.safetensors").items():
        if narrow.ndim == 1:
            tensors[name] = _spread(narrow.float() * math.sqrt(FULL / RUN), 0, columns).to(narrow.dtype)
            continue
        places = attended if "o_proj" in name else columns
        wide = _spread(narrow, 1, places) if narrow.shape[1] == hidden else narrow
        if "q_proj" in name:
            wide = _spread(wide, 0, attended)
        elif "o_proj" in name or "down_proj" in name:
            wide = _spread(wide, 0, columns)
        tensors[name] = wide
    config["hidden_size"] = hidden * RUN // FULL
    config["num_attention_heads"] = config["num_attention_heads"] * HEADS // FULL_HEADS
    config["rms_norm_eps"] *= FULL / RUN
    directory.mkdir(parents=True, exist_ok=True)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, directory)


def _places(size: int, full: int, run: int) -> torch.Tensor:
    """Where each of `size` numbers comes to lie, and as the last one how many places there are."""
    numbers = torch.arange(size + 1)
    return numbers // full * run + numbers % full


def _spread(tensor: torch.Tensor, dim: int, places: torch.Tensor) -> torch.Tensor:
    """Zeros in between, along a dimension."""
    shape = list(tensor.shape)
    shape[dim] = int(places[-1])
    return torch.zeros(shape, dtype=tensor.dtype).index_copy_(dim, places[:-1], tensor)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    parser.add_argument("--model", type=Path, default=Path("demo/model"))
    options = parser.parse_args()
    widen(options.model, options.directory)


if __name__ == "__main__":
    main()
