"""The stretching of the rotary embedding that a GGUF file says, as config.json says it: by a factor, YaRN, Llama 3.1's
frequencies, and LongRoPE's factors, which are tensors of the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from .family import Family
from .fields import GgufFields
from .reader import GgufFile, GgufTensor
from .settings import MAX_CONTEXT

HINT = "Pack the original model, as Hugging Face has it."

Table = Callable[[GgufTensor], list[float]]  # the content of a small tensor

_ROPE_FREQUENCIES = "rope_freqs.weight"
_ROPE_FACTORS = ("rope_factors_long.weight", "rope_factors_short.weight")
ROPE_TENSORS = (_ROPE_FREQUENCIES, *_ROPE_FACTORS)  # which become settings


def rope_scaling(
    file: GgufFile,
    fields: GgufFields,
    own: str,
    config: dict[str, Any],
    family: Family,
    read_table: Table,
) -> dict[str, Any] | None:
    turned = round(config.get("partial_rotary_factor", 1.0) * config["head_dim"])
    if _ROPE_FREQUENCIES in file.tensors:
        tensor = file.tensors[_ROPE_FREQUENCIES]
        if tensor.type.name != "F32" or tensor.shape != (config["head_dim"] // 2,):
            raise fields.wrong(f"{_ROPE_FREQUENCIES} must be {config['head_dim'] // 2} numbers of F32")
        return _llama3_scaling(fields, read_table(tensor), config)
    if family.model_type == "phi3" and any(name in file.tensors for name in _ROPE_FACTORS):
        return _longrope_scaling(file, fields, own, turned, read_table)
    kind = fields.text(own + "rope.scaling.type", "none")
    if kind == "none":
        return None
    factor = fields.shortest(own + "rope.scaling.factor", 1e-3, 1e6, 1.0)
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = fields.integer(own + "rope.scaling.original_context_length", 1, MAX_CONTEXT)
        yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        if f"{own}rope.scaling.yarn_log_multiplier" in fields:  # a tenth of DeepSeek's
            scale = float(
                str(np.float32(10 * fields.number(f"{own}rope.scaling.yarn_log_multiplier", 0.0, 1e5)))
            )
            yarn |= {"mscale": scale, "mscale_all_dim": scale}
        return yarn | ({"truncate": False} if family.model_type == "gpt_oss" else {})
    raise fields.wrong(
        f"the rotary embedding is stretched by {kind[:40]!r}, which is not supported", hint=HINT
    )


def proportional_rope(
    file: GgufFile, fields: GgufFields, own: str, config: dict[str, Any], read_table: Table
) -> dict[str, Any]:
    """Gemma 4's: without a window the first frequencies turn, and the others are divided by a huge number."""
    num = config["global_head_dim"] // 2
    tensor = file.tensors.get(_ROPE_FREQUENCIES)
    if tensor is None or tensor.type.name != "F32" or tensor.shape != (num,):
        raise fields.wrong(f"{_ROPE_FREQUENCIES} must be {num} numbers of F32")
    if (kind := fields.text(own + "rope.scaling.type", "none")) != "none":
        raise fields.wrong(
            f"the rotary embedding is stretched by {kind[:40]!r}, which is not supported", hint=HINT
        )
    divisors = read_table(tensor)
    turning = divisors.count(1.0)
    if divisors[:turning] != [1.0] * turning or any(each < 1e20 for each in divisors[turning:]):
        raise fields.wrong(f"{_ROPE_FREQUENCIES} is not what Gemma 4 has", hint=HINT)
    whole = {"rope_type": "proportional", "partial_rotary_factor": turning / num}
    base = fields.shortest(f"{own}rope.freq_base_swa", 2.0, 1e12, 10_000.0)
    return {
        "full_attention": whole | {"rope_theta": config.pop("rope_theta")},
        "sliding_attention": {"rope_type": "default", "rope_theta": base},
    }


def _longrope_scaling(
    file: GgufFile, fields: GgufFields, own: str, turned: int, read_table: Table
) -> dict[str, Any]:
    """Both sets of factors, and the multiplier of scores at stretched positions."""
    factors = []
    for name in _ROPE_FACTORS:
        tensor = file.tensors.get(name)
        if tensor is None or tensor.type.name != "F32" or tensor.shape != (turned // 2,):
            raise fields.wrong(f"{name} must be {turned // 2} numbers of F32")
        factors.append(read_table(tensor))
    scaling: dict[str, Any] = {"rope_type": "longrope", "long_factor": factors[0], "short_factor": factors[1]}
    if f"{own}rope.scaling.attn_factor" in fields:
        scaling["attention_factor"] = fields.shortest(f"{own}rope.scaling.attn_factor", 0.0, 1e6)
    return scaling


def _llama3_scaling(fields: GgufFields, divisors: list[float], config: dict[str, Any]) -> dict[str, Any]:
    """The parameters of Llama 3.1's stretching, or Llama 4's, that give these divisors of the frequencies."""
    for high in (4.0, 1.0):
        found = {
            "rope_type": "llama3",
            "factor": float(str(np.float32(max(divisors)))),
            "low_freq_factor": 1.0,
            "high_freq_factor": high,
            "original_max_position_embeddings": 8192,
        }
        if np.allclose(_llama3_divisors(found, config), divisors, rtol=1e-4):
            return found
    raise fields.wrong(f"{_ROPE_FREQUENCIES} is not what Llama 3.1 has", hint=HINT)


def _llama3_divisors(scaling: dict[str, Any], config: dict[str, Any]) -> list[float]:
    """The divisor of each frequency: 1 of short waves, the factor of long ones, and between them a
    mixture.
    """
    divisors = []
    for index in range(config["head_dim"] // 2):
        wave = 2 * math.pi * config["rope_theta"] ** (2 * index / config["head_dim"])
        share = scaling["original_max_position_embeddings"] / wave - scaling["low_freq_factor"]
        between = scaling["high_freq_factor"] - scaling["low_freq_factor"]
        share = min(1.0, max(0.0, share / between)) if between else float(share > 0)
        divisors.append(1 / ((1 - share) / scaling["factor"] + share))
    return divisors
