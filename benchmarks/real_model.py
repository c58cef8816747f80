"""SmolLM2-135M-Instruct for benchmarks: bf16 weights, the same with columns in another order, and texts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import torch
from benchmarks.processes import environment
from benchmarks.report import note
from safetensors.torch import load_file, save_file
from torch import Tensor

DEMO = Path(__file__).resolve().parent.parent / "demo"
HELD_OUT_SHARE = 0.02
CALIBRATION_CHARACTERS = 120_000

Tensors = dict[str, Tensor]


class Texts(NamedTuple):
    held_out: Path
    calibration: Path


def prepare(folder: Path, *, shuffled: bool) -> Path:
    """The model's directory below `folder`, downloaded and converted the first time."""
    target = folder / "plain"
    if (target / "model.safetensors").exists():
        return target
    shutil.rmtree(target, ignore_errors=True)
    gguf = subprocess.run(
        [sys.executable, DEMO / "smollm2.py"],
        check=True,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
    ).stdout.strip()
    note("converting the model to bf16")
    packed = folder / "from-gguf"
    for command in (["pack", gguf, packed, "--dequantize", "--force"], ["unpack", packed, target]):
        subprocess.run(
            [sys.executable, "-m", "teneral", *map(str, command), "--quiet"],
            check=True,
            env=environment(),
            stdout=subprocess.DEVNULL,
        )
    shutil.rmtree(packed)
    if shuffled:
        config = json.loads((target / "config.json").read_text())
        tensors = load_file(target / "model.safetensors")
        save_file(shuffle(tensors, config), target / "shuffled.unfinished")
        (target / "shuffled.unfinished").rename(target / "model.safetensors")
    return target


def shuffle(tensors: Tensors, config: dict[str, int]) -> Tensors:
    """A Llama of the same function whose columns are in another order: hidden states, the MLPs' inner states, values
    within heads, and groups of heads. Sums have the same terms in another order.
    """
    chance = torch.Generator().manual_seed(0)
    hidden, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    num_groups = config["num_key_value_heads"]
    group_heads = config["num_attention_heads"] // num_groups

    def order(count: int) -> Tensor:
        return torch.randperm(count, generator=chance)

    outer = order(hidden)
    found: Tensors = {}
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): tensor
            for name, tensor in tensors.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        groups, inside = order(num_groups), order(inner)
        queries = _blocks(groups, group_heads * head_dim)
        keys = _blocks(groups, head_dim)
        value = [group * head_dim + order(head_dim) for group in range(num_groups)]
        values = torch.cat([value[group] for group in groups])
        attended = torch.cat(
            [
                (group * group_heads + head - group) * head_dim + value[group]
                for group in groups.tolist()
                for head in range(group_heads)
            ]
        )
        rows = {
            "self_attn.q_proj": queries,
            "self_attn.k_proj": keys,
            "self_attn.v_proj": values,
            "mlp.gate_proj": inside,
            "mlp.up_proj": inside,
            "self_attn.o_proj": outer,
            "mlp.down_proj": outer,
        }
        columns = {"self_attn.o_proj": attended, "mlp.down_proj": inside}
        for name, tensor in own.items():
            matrix = name.removesuffix(".weight")
            is_norm = matrix not in rows
            moved = tensor[outer] if is_norm else tensor[rows[matrix]][:, columns.get(matrix, outer)]
            found[f"model.layers.{layer}.{name}"] = moved.contiguous()
    found["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:, outer].contiguous()
    found["model.norm.weight"] = tensors["model.norm.weight"][outer].contiguous()
    missing = tensors.keys() - found.keys()
    if missing:
        raise SystemExit(f"tensors of no known use: {', '.join(sorted(missing))}")
    return found


def _blocks(order: Tensor, size: int) -> Tensor:
    """The places of blocks of `size` rows, in this order."""
    return torch.cat([int(block) * size + torch.arange(size) for block in order])


def write_texts(folder: Path) -> Texts:
    """Docstrings of Python's standard library: those that the demo's model was not trained on, and some others."""
    texts = Texts(folder / "held-out.txt", folder / "calibration.txt")
    if all(path.exists() for path in texts):
        return texts
    sys.path.insert(0, str(DEMO))
    from train_model import corpus

    documents = corpus()
    order = torch.randperm(len(documents), generator=torch.Generator().manual_seed(1)).tolist()
    num_seen = len(order) * 98 // 100
    texts.held_out.write_text("\n\n".join(documents[place] for place in order[num_seen:]))
    seen = "\n\n".join(documents[place] for place in order[:num_seen])
    texts.calibration.write_text(seen[:CALIBRATION_CHARACTERS])
    return texts
