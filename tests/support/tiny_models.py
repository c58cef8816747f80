"""Tiny models of every family with random weights, made by transformers: the oracle's side of a comparison.

`save_tiny` writes a directory as Hugging Face does, with a byte-level tokenizer; `tiny_model` gives the
model object. All random numbers come from a fixed seed. Importing this module imports transformers.
"""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tests.support import gemma4

with warnings.catch_warnings():
    # transformers' own deprecations while it is imported are not ours to answer for
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformers

from teneral.runtime.models.decoder_config import FAMILY_MODULES

transformers.utils.logging.disable_progress_bar()

# With recurrent states, or layers that differ in their heads, which only the native core computes.
_STATEFUL = (
    *("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
    *("granitemoehybrid", "bamba", "falcon_h1", "nemotron_h"),
)
NATIVE_ONLY = (*_STATEFUL, "gemma3n_text", "gemma4_text", "gemma4_unified_text")
# Of which files have the fields of a text_config
WITH_TEXT_CONFIG = ("llama4", "gemma3n")
# So that a new family is in every test of all of them, but for those of which transformers has no model.
DECODERS = tuple(
    family
    for family in FAMILY_MODULES
    if family in transformers.CONFIG_MAPPING and family not in (*NATIVE_ONLY, *WITH_TEXT_CONFIG)
)
# Without those that are computed as another one is: for tests that take long.
DISTINCT_DECODERS = tuple(family for family in DECODERS if family != "glm4_moe_lite")
# For tests of the native core.
DISTINCT_NATIVE = (*DISTINCT_DECODERS, *_STATEFUL, "gemma3n_text", "gemma4_text")
ENCODERS = ("bert", "roberta", "xlm-roberta")
FAMILIES = DECODERS + ENCODERS

# ids 256 to 259 of a decoder's tokenizer
SPECIAL_TOKENS = ("<|end|>", "<|start|>", "<|user|>", "<|assistant|>")
# ids 0 to 4 of an encoder's
ENCODER_SPECIAL_TOKENS = ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

VOCAB_SIZE = 320  # more than the tokenizers know, as real models have

_DECODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": None,
}
_ENCODER = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
_SHARED_GATE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
}
_DELTA_NETS: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
    "mamba_chunk_size": 16,
}
_LATENTS: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 64,
    "q_lora_rank": 64,
    "qk_nope_head_dim": 20,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
}
LATENT_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 64,
}
# Names of transformers' Granite, and those of its checkpoints
_ROUTER = ("block_sparse_moe.router.weight", "block_sparse_moe.router.layer.weight")
_LINEARS = (
    _ROUTER,
    ("block_sparse_moe.experts.gate_up_proj", "block_sparse_moe.input_linear.weight"),
    ("block_sparse_moe.experts.down_proj", "block_sparse_moe.output_linear.weight"),
)
_HEADS = {"gpt_neox": "embed_out"}  # of checkpoints whose head is not called lm_head
# Small numbers, so that caps and multipliers show; windows that a prompt of a few dozen tokens goes beyond
_OF_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3": {"head_dim": 32},
    "llama4_text": {
        "head_dim": 16,
        "intermediate_size_mlp": 128,
        "num_local_experts": 4,
        "moe_layers": [0, 1],
        "no_rope_layer_interval": 2,
        "attention_chunk_size": 12,
        "floor_scale": 8,
        "attn_scale": 0.5,
    },
    "mistral": {"sliding_window": None},
    "gemma2": {
        "head_dim": 32,
        "sliding_window": 12,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 3.0,
        "final_logit_softcapping": 8.0,
    },
    "gemma3_text": {
        "head_dim": 32,
        "sliding_window": 12,
        "query_pre_attn_scalar": 24,
        "sliding_window_pattern": 2,
    },
    **gemma4.SETTINGS,
    "granite": {
        "attention_multiplier": 0.125,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 2.0,
    },
    "granitemoehybrid": {
        **_MAMBA,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "intermediate_size": 64,
        "num_local_experts": 6,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 96,
        "attention_multiplier": 0.125,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 2.0,
    },
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_MAMBA,
        "mamba_d_ssm": 96,
        "attention_in_multiplier": 1.25,
        "attention_out_multiplier": 0.75,
        "key_multiplier": 0.5,
        "ssm_in_multiplier": 1.5,
        "ssm_out_multiplier": 0.6,
        "ssm_multipliers": [0.8, 0.7, 1.2, 0.9, 0.6],
        "mlp_multipliers": [0.8, 0.5],
        "embedding_multiplier": 3.0,
        "lm_head_multiplier": 0.4,
    },
    "nemotron_h": {
        "num_hidden_layers": 6,
        "layer_types": ["linear_attention", "full_attention", "moe", "mlp", "linear_attention", "moe"],
        "head_dim": 32,
        "mamba_num_heads": 8,
        "mamba_head_dim": 12,
        "n_groups": 2,
        "ssm_state_size": 16,
        "chunk_size": 16,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "moe_shared_expert_intermediate_size": 96,
        "routed_scaling_factor": 2.5,
        "n_group": 2,
    },
    "lfm2": {"full_attn_idxs": [1], "block_auto_adjust_ff_dim": False},
    "starcoder2": {"sliding_window": 12},
    "stablelm": {"use_qkv_bias": True},
    "gpt2": {"num_key_value_heads": 4, "n_inner": 128},
    "gpt_neox": {"num_key_value_heads": 4, "rotary_pct": 0.5},
    "olmo3": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {
                "rope_type": "yarn",
                "rope_theta": 5e5,
                "factor": 8.0,
                "original_max_position_embeddings": 64,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        },
    },
    "exaone4": {
        "sliding_window": 12,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "bitnet": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "ernie4_5": {"head_dim": 24},
    "hunyuan_v1_dense": {"head_dim": 16},
    "ernie4_5_moe": {"moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48},
    "lfm2_moe": {
        "layer_types": ["conv", "full_attention", "conv"],
        "num_dense_layers": 1,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "routed_scaling_factor": 1.5,
    },
    "glm4_moe": {
        "head_dim": 24,
        "first_k_dense_replace": 1,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 2.0,
        "use_qk_norm": True,
    },
    "qwen3_5_text": _DELTA_NETS,
    "qwen3_5_moe_text": {**_DELTA_NETS, **_SHARED_GATE},
    "qwen3_next": {**_DELTA_NETS, **_SHARED_GATE},
    "smollm3": {"no_rope_layer_interval": 2},
    "ministral": {"head_dim": 16, "sliding_window": 12},
    "glm": {"head_dim": 24},
    "glm4": {"head_dim": 24},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": _SHARED_GATE,
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
    },
    "olmoe": {"num_experts": 5, "num_experts_per_tok": 3},
    "cohere": {"logit_scale": 0.25},
    "gpt_oss": {
        "head_dim": 16,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": 12,
        "swiglu_limit": 1.5,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 8.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 64,
        },
    },
    "cohere2": {"logit_scale": 0.25, "sliding_window": 12, "sliding_window_pattern": 2},
    "deepseek_v2": {
        **_LATENTS,
        "q_lora_rank": None,
        "topk_method": "group_limited_greedy",
        "rope_parameters": {**LATENT_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
    },
    "deepseek_v3": {
        **_LATENTS,
        "routed_scaling_factor": 2.5,
        "rope_parameters": {**LATENT_YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    },
    "glm4_moe_lite": {**_LATENTS, "rope_interleave": False},
}


def tiny_config(family: str, **overrides: Any) -> transformers.PretrainedConfig:
    """transformers' config of a model of a few thousand weights; `overrides` are keys of its config.json."""
    base = _DECODER if family in FAMILY_MODULES else _ENCODER
    settings = {**base, **_OF_FAMILY.get(family, {}), **overrides}
    if "layer_types" in settings:
        settings["layer_types"] = settings["layer_types"][: settings["num_hidden_layers"]]
    return transformers.AutoConfig.for_model(family, **settings)


def tiny_model(family: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A transformers model. No weight is left at 0 or 1, so that none can be forgotten unseen."""
    config = tiny_config(family, **overrides)
    factory = transformers.AutoModelForCausalLM if family in FAMILY_MODULES else transformers.AutoModel
    model = factory.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in _weights_of(model).items():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = ("norm" in name.lower() and name.endswith("weight")) or name.endswith("layer_scalar")
            # Wide enough that logits differ clearly, so that equal greedy tokens say something.
            parameter.copy_(1.0 + 0.2 * noise if is_scale else 0.15 * noise)
    return model.to(dtype).eval()


def _weights_of(model: Any) -> dict[str, torch.Tensor]:
    """Parameters, and the buffers that a checkpoint has: corrections of routers, and scalars of layers."""
    buffers = {name: each for name, each in model.named_buffers() if name.endswith(("_bias", "layer_scalar"))}
    return {**dict(model.named_parameters()), **buffers}


def save_tiny(
    family: str, directory: Path, *, seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
) -> Path:
    """Writes config.json, model.safetensors and tokenizer files into `directory`, and returns it.

    The directory is made if missing. A decoder's tokenizer is byte-level, a byte a token, with a chat
    template; its end-of-sequence token is 256.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tiny_model(family, seed=seed, dtype=dtype, **overrides).save_pretrained(directory)
    if family in FAMILY_MODULES:
        _save_decoder_tokenizer(directory)
    else:
        _save_encoder_tokenizer(directory)
    return directory


def tensors_of(model: Any) -> dict[str, torch.Tensor]:
    """The model's weights by their names in a checkpoint; a tied head is left out, as it is there."""
    tied = getattr(model.config, "tie_word_embeddings", False)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    if tied:
        state.pop("lm_head.weight", None)
    head = _HEADS.get(model.config.model_type, "lm_head")
    state = {name.replace("lm_head", head): tensor for name, tensor in state.items()}
    return _with_experts_apart(state, model.config.model_type)


def tensors_in_rows(model: Any) -> dict[str, torch.Tensor]:
    """The same with all experts of a layer in one tensor each, as transformers and Granite's checkpoints have them."""
    state = dict(model.state_dict())
    for own, stored in _LINEARS:
        state = {name.replace(own, stored): tensor for name, tensor in state.items()}
    return state


def with_tensors(model: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """The model with these weights, named as `tensors_of` names them, in fp32. Every one of its own is replaced."""
    parts = _parts_of_experts(model.config.model_type)
    other = copy.deepcopy(model).float()
    head = _HEADS.get(model.config.model_type, "lm_head")
    left = {name.replace(head, "lm_head"): tensor for name, tensor in tensors.items()}
    with torch.no_grad():
        for name, parameter in _weights_of(other).items():
            own = "mlp" if parts is None else parts.own_block
            layer, is_of_experts, which = name.partition(f".{own}.experts.")
            if not is_of_experts or parts is None:
                prefix = "mlp" if parts is None else parts.block
                name = name.replace(f".{own}.gate.weight", f".{prefix}.gate.weight")
                name = name.replace(*_ROUTER)
                parameter.copy_(left.pop(name.replace(".gate.moe_statics.", ".moe_statics.")))
                continue
            names = (parts.down,) if which == "down_proj" else parts.gate_up
            for number in range(len(parameter)):
                prefix = f"{layer}.{parts.block}.experts.{number}"
                rows = torch.cat([left.pop(f"{prefix}.{part}.weight") for part in names])
                parameter[number].copy_(rows.T if parts.has_inputs_first else rows)
    assert not left, f"the model has no {sorted(left)}"
    return other


class _ExpertParts(NamedTuple):
    """Names of a checkpoint's experts."""

    block: str
    gate_up: tuple[str, ...]
    down: str
    own_block: str = "mlp"  # of transformers' model
    has_inputs_first: bool = False  # likewise


def _parts_of_experts(family: str) -> _ExpertParts | None:
    """None where a checkpoint has them as transformers does."""
    if family in ("gpt_oss", "gemma4_text"):
        return None
    if family == "mixtral":
        return _ExpertParts("block_sparse_moe", ("w1", "w3"), "w2")
    if family == "llama4_text":
        names = ("gate_proj", "up_proj")
        return _ExpertParts(
            "feed_forward", names, "down_proj", own_block="feed_forward", has_inputs_first=True
        )
    if family == "granitemoehybrid":
        block = "block_sparse_moe"
        return _ExpertParts(block, ("input_linear",), "output_linear", own_block=block)
    if family == "nemotron_h":
        return _ExpertParts("mixer", ("up_proj",), "down_proj", own_block="mixer")
    if family == "lfm2_moe":
        return _ExpertParts("feed_forward", ("w1", "w3"), "w2", own_block="feed_forward")
    return _ExpertParts("mlp", ("gate_proj", "up_proj"), "down_proj")


def _with_experts_apart(state: dict[str, torch.Tensor], family: str) -> dict[str, torch.Tensor]:
    """Experts as checkpoints have them; transformers holds all of a layer in one tensor."""
    parts = _parts_of_experts(family)
    if parts is None:
        return state
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        layer, is_of_experts, which = name.partition(f".{parts.own_block}.experts.")
        if not is_of_experts:
            name = name.replace(f".{parts.own_block}.gate.weight", f".{parts.block}.gate.weight")
            apart[name.replace(".gate.moe_statics.", ".moe_statics.").replace(*_ROUTER)] = tensor
            continue
        for number, matrix in enumerate(tensor):
            names = (parts.down,) if which == "down_proj" else parts.gate_up
            matrix = matrix.T.contiguous() if parts.has_inputs_first else matrix
            for part, rows in zip(names, matrix.chunk(len(names)), strict=True):
                apart[f"{layer}.{parts.block}.experts.{number}.{part}.weight"] = rows.clone()
    return apart


def config_json(model: Any) -> dict[str, Any]:
    """The model's config as its config.json says it."""
    return {**json.loads(model.config.to_json_string(use_diff=True)), "architectures": [type(model).__name__]}


def _save_decoder_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": "<|start|>",
            "eos_token": "<|end|>",
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _save_encoder_tokenizer(directory: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*ENCODER_SPECIAL_TOKENS, *alphabet]
    tokenizer = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ENCODER_SPECIAL_TOKENS])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 1), ("[SEP]", 2)]
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_input_names": ["input_ids", "token_type_ids", "attention_mask"],
            "pad_token": "[PAD]",
            "cls_token": "[CLS]",
            "sep_token": "[SEP]",
            "unk_token": "[UNK]",
        },
    )


def _write_json(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=2))
