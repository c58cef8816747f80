"""LoRA adapters as PEFT saves them, with random weights, and the models that they come to when they are merged."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from teneral.loader.sources.open import open_source
from teneral.runtime.adapters.load import open_adapter
from teneral.runtime.adapters.loaded import LoadedAdapter
from teneral.runtime.models.decoder_config import DecoderConfig

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")

# As Unsloth writes them.
UNSLOTH = (
    r"(?:.*?(?:language|text).*?(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense).*?"
    r"(?:q_proj|v_proj|down_proj).*?)|(?:\bmodel\.layers\.[\d]{1,}\."
    r"(?:self_attn|attention|attn|mlp|feed_forward|ffn|dense)\.(?:(?:q_proj|v_proj|down_proj)))"
)

# Sets of modules that adapters are trained for, with more of what PEFT lets one choose.
SETS: dict[str, dict[str, Any]] = {
    "queries and values": {"target_modules": ["q_proj", "v_proj"]},
    "attention": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"], "r": 4, "lora_alpha": 16},
    "mlp": {"target_modules": ["gate_proj", "up_proj", "down_proj"]},
    "all linear": {"target_modules": "all-linear", "use_rslora": True},
    "up only": {"target_modules": ["mlp.up_proj"], "r": 3},
    "one layer": {"target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [1]},
    "patterns": {
        "target_modules": list(ALL),
        "rank_pattern": {"q_proj": 2, "layers.1.mlp.down_proj": 12},
        "alpha_pattern": {"k_proj": 1},
    },
    "expression": {"target_modules": UNSLOTH, "exclude_modules": r".*layers\.1\.mlp.*"},
    "excluded": {"target_modules": list(ALL), "exclude_modules": ["o_proj", "layers.2.mlp.up_proj"]},
    "patterns of expressions": {
        "target_modules": list(ALL),
        "rank_pattern": {r"layers\.[12]\..*\.[qv]_proj": 5, r"(?:gate|up)_proj": 3},
        "alpha_pattern": {r"^model\.layers\.\d+\.self_attn\.k_proj": 2},
    },
}


def adapter_config(**options: Any) -> dict[str, Any]:
    """An adapter_config.json of PEFT 0.17, with these options in place of its defaults."""
    return {
        "alpha_pattern": {},
        "auto_mapping": None,
        "base_model_name_or_path": "base",
        "bias": "none",
        "corda_config": None,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": None,
        "loftq_config": {},
        "lora_alpha": 8,
        "lora_bias": False,
        "lora_dropout": 0.05,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "peft_type": "LORA",
        "qalora_group_size": 16,
        "r": 8,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
    } | options


def linears_of(model: Any) -> dict[str, Any]:
    """The linear modules of a transformers model's layers, by their full names."""
    from transformers.pytorch_utils import Conv1D

    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear | Conv1D) and (".layers." in name or ".h." in name)
    }


def targeted(config: dict[str, Any], name: str) -> bool:
    """PEFT's decision whether the adapter changes this module."""

    def fits(modules: Any) -> bool:
        if isinstance(modules, str):
            return re.fullmatch(modules, name) is not None
        return any(name == each or name.endswith(f".{each}") for each in modules or ())

    layers = config["layers_to_transform"]
    if layers is not None and int(name.split(".layers.")[1].split(".", maxsplit=1)[0]) not in layers:
        return False
    targets = config["target_modules"]
    return (targets == "all-linear" or fits(targets)) and not fits(config["exclude_modules"])


def rank_and_factor(config: dict[str, Any], name: str) -> tuple[int, float]:
    def of(pattern: str, default: Any) -> Any:
        found = (value for key, value in config[pattern].items() if re.match(rf"(.*\.)?({key})$", name))
        return next(found, default)

    rank, alpha = of("rank_pattern", config["r"]), of("alpha_pattern", config["lora_alpha"])
    return rank, alpha / (math.sqrt(rank) if config["use_rslora"] else rank)


def make_tensors(
    model: Any,
    config: dict[str, Any],
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
) -> dict[str, torch.Tensor]:
    """By their names in adapter_model.safetensors."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, module in linears_of(model).items():
        if not targeted(config, name):
            continue
        rank, _ = rank_and_factor(config, name)
        num_in, num_out = module.weight.shape if ".h." in name else reversed(module.weight.shape)
        for side, shape in (("A", (rank, num_in)), ("B", (num_out, rank))):
            numbers = torch.randn(shape, generator=generator) * size
            tensors[f"base_model.model.{name}.lora_{side}.weight"] = numbers.to(dtype)
    return tensors


def save_adapter(
    folder: Path,
    model: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    size: float = 0.3,
    **options: Any,
) -> Path:
    """Writes an adapter of this model as PEFT does, and returns the folder."""
    config = adapter_config(**options)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))
    tensors = make_tensors(model, config, seed=seed, dtype=dtype, size=size)
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder


def load_adapter(folder: Path, base: DecoderConfig) -> LoadedAdapter:
    """The adapter in this folder, complete."""
    with closing(open_source(str(folder))) as source:
        opened = open_adapter(source, "", base, max_bytes=1 << 24)
        adapter = LoadedAdapter(folder.name, str(folder))
        weights = opened.plan.allocate()
        adapter.begin(weights)
        adapter.finish(opened.read(weights, adapter.note_layer), None)
    return adapter


def merged(model: Any, folder: Path) -> Any:
    """The model with W + factor · B A in place of each W, in fp32."""
    from safetensors.torch import load_file

    config = json.loads((folder / "adapter_config.json").read_text())
    tensors = load_file(folder / "adapter_model.safetensors")
    both = copy.deepcopy(model).float()
    for name, module in linears_of(both).items():
        if targeted(config, name):
            a, b = (tensors[f"base_model.model.{name}.lora_{side}.weight"].float() for side in "AB")
            with torch.no_grad():
                more = rank_and_factor(config, name)[1] * (b @ a)
                module.weight += more.T if ".h." in name else more
    return both


def greedy(model: Any, prompt: Sequence[int], num_tokens: int) -> list[int]:
    """The tokens that transformers chooses, each from the whole context."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            logits = model(torch.tensor([tokens])).logits[0, -1]
            tokens.append(int(np.argmax(logits.float().numpy())))
    return tokens[len(prompt) :]
