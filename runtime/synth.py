"""Models of real architectures' shapes with random weights and a made-up tokenizer: for load tests
and benchmarks, where only the bytes matter.

The weights are distributed like trained ones, so that they compress alike: normal, with a separate
scale for every output channel, and a few outlier input channels. The output of such a model is
noise. The same name and seed give the same bytes.

The tokenizer is a byte-level BPE of any vocabulary size, made without text. Its merges join any
two, then any three, common characters, so every text becomes tokens of up to three characters and
decodes to itself; its file is as large, and loads as slowly, as a real tokenizer of the same size.
"""

from __future__ import annotations

import itertools
import json
import math
import shutil
import string
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers.pre_tokenizers import ByteLevel

from ..loader.errors import UsageError
from ..loader.format.manifest import tensor_bytes
from ..loader.format.safetensors import SafetensorsWriter, TensorSpec
from ..loader.tools.progress_bar import TransferProgress

SPACE = "Ġ"  # a space in byte-level tokenizers
COMMON = SPACE + string.ascii_letters + string.digits
END = "<|end|>"
START_TURN = "<|turn|>"

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    + START_TURN
    + "{{ message['role'] }}\n{{ message['content'] }}"
    + END
    + "\n{% endfor %}{% if add_generation_prompt %}"
    + START_TURN
    + "assistant\n{% endif %}"
)
BLOCK_ELEMENTS = 1 << 22
MAX_SHARD_BYTES = 5 * 10**9
OUTLIER_SHARE = 0.002  # of the input channels
OUTLIER_FACTOR = 6.0
_RESIDUAL_OUTPUTS = (".o_proj.weight", ".down_proj.weight", ".output.dense.weight")
CHANNEL_SPREAD = 0.3  # standard deviation of the logarithm of a channel's scale

_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def tokenizer_files(vocab_size: int, *, encoder: bool) -> dict[str, Any]:
    """`tokenizer.json` and `tokenizer_config.json` as JSON values, and under "special_ids" the ids
    for config.json.
    """
    specials = ["[PAD]", "[CLS]", "[SEP]"] if encoder else [END, START_TURN]
    words = list(specials) if encoder else []
    words += sorted(ByteLevel.alphabet())
    merges = list(itertools.islice(_merges(), vocab_size - len(words) - (0 if encoder else len(specials))))
    words += [left + right for left, right in merges]
    if not encoder:
        words += specials
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": ids[word], "content": word, "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
            for word in specials
        ],
        "normalizer": None,
        "pre_tokenizer": _byte_level(),
        "post_processor": _cls_and_sep(ids) if encoder else None,
        "decoder": _byte_level(),
        "model": {
            "type": "BPE",
            **dict.fromkeys(("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix")),
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": ids,
            "merges": [f"{left} {right}" for left, right in merges],
        },
    }
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
    }
    if encoder:
        settings |= {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
        special_ids = {"pad_token_id": ids["[PAD]"]}
    else:
        settings |= {"eos_token": END, "chat_template": CHAT_TEMPLATE}
        special_ids = {"eos_token_id": ids[END]}
    return {"tokenizer.json": tokenizer, "tokenizer_config.json": settings, "special_ids": special_ids}


def _merges() -> Any:
    """Pairs of common characters, then any pair with a third."""
    pairs = [left + right for left, right in itertools.product(COMMON, COMMON)]
    yield from itertools.product(COMMON, COMMON)
    yield from itertools.product(pairs, COMMON)


def _byte_level() -> dict[str, Any]:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}


def _cls_and_sep(ids: dict[str, int]) -> dict[str, Any]:
    def special(name: str) -> dict[str, Any]:
        return {"SpecialToken": {"id": name, "type_id": 0}}

    def sequence(name: str) -> dict[str, Any]:
        return {"Sequence": {"id": name, "type_id": 0}}

    return {
        "type": "TemplateProcessing",
        "single": [special("[CLS]"), sequence("A"), special("[SEP]")],
        "pair": [special("[CLS]"), sequence("A"), special("[SEP]"), sequence("B"), special("[SEP]")],
        "special_tokens": {
            name: {"id": name, "ids": [ids[name]], "tokens": [name]} for name in ("[CLS]", "[SEP]")
        },
    }


def _decoder(model_type: str, architecture: str, **values: Any) -> dict[str, Any]:
    common = {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "initializer_range": 0.02,
    }
    return common | values


# Shapes as published by their makers.
SHAPES: dict[str, dict[str, Any]] = {
    "qwen2.5-0.5b": _decoder(
        "qwen2", "Qwen2ForCausalLM", vocab_size=151936, hidden_size=896, intermediate_size=4864, num_hidden_layers=24,
        num_attention_heads=14, num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-6,
        rope_theta=1e6, tie_word_embeddings=True, use_sliding_window=False,
    ),
    "qwen3-0.6b": _decoder(
        "qwen3", "Qwen3ForCausalLM", vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, rms_norm_eps=1e-6,
        rope_theta=1e6, tie_word_embeddings=True, attention_bias=False, use_sliding_window=False,
    ),
    "llama-3.2-1b": _decoder(
        "llama", "LlamaForCausalLM", vocab_size=128256, hidden_size=2048, intermediate_size=8192, num_hidden_layers=16,
        num_attention_heads=32, num_key_value_heads=8, head_dim=64, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=5e5, rope_scaling=_LLAMA3_ROPE | {"factor": 32.0}, tie_word_embeddings=True,
    ),
    "llama-3.1-8b": _decoder(
        "llama", "LlamaForCausalLM", vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
        num_attention_heads=32, num_key_value_heads=8, head_dim=128, max_position_embeddings=131072, rms_norm_eps=1e-5,
        rope_theta=5e5, rope_scaling=_LLAMA3_ROPE | {"factor": 8.0}, tie_word_embeddings=False,
    ),
    "minilm": {
        "architectures": ["BertModel"], "model_type": "bert", "vocab_size": 30522, "hidden_size": 384,
        "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536, "hidden_act": "gelu",
        "max_position_embeddings": 512, "type_vocab_size": 2, "layer_norm_eps": 1e-12, "torch_dtype": "float32",
        "initializer_range": 0.02, "pad_token_id": 0,
    },
}  # fmt: skip

_SENTENCE_FILES: dict[str, Any] = {
    "modules.json": [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
        {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ],
    "1_Pooling/config.json": {"word_embedding_dimension": 384, "pooling_mode_mean_tokens": True},
}


@dataclass(frozen=True, slots=True)
class SynthResult:
    directory: Path
    num_weights: int
    size_bytes: int

    def render(self) -> str:
        return f"wrote {self.num_weights:,} weights, {self.size_bytes / 1e6:,.0f} MB, to {self.directory}"


def synthesize(
    like: str,
    directory: str | Path,
    *,
    seed: int = 0,
    num_layers: int | None = None,
    residual_scale: float = 1.0,
    progress: Callable[[TransferProgress], None] | None = None,
) -> SynthResult:
    """Write a model directory, as a whole or not at all. `progress` is called after every block.

    `residual_scale` is applied to each layer's contribution to its input. With random weights of
    scale 1 the next token is almost random, and a draft of the model seldom agrees with it; the
    smaller the scale, the more the embeddings decide, and the more often both agree, as trained
    models do.

    Raises `UsageError` for an unknown shape, a number of layers or a scale out of range, or an
    existing directory. Peak memory: about 64 MiB.
    """
    if like not in SHAPES:
        raise UsageError(f"there is no shape {like!r}", key="like", hint=f"Known are {', '.join(SHAPES)}.")
    if not 0 < residual_scale <= 1:
        raise UsageError(
            f"the residual scale is {residual_scale}, but must be above 0, up to 1", key="residual_scale"
        )
    config = dict(SHAPES[like])
    if num_layers is not None:
        if not 1 <= num_layers <= config["num_hidden_layers"]:
            raise UsageError(
                f"{like} has 1 to {config['num_hidden_layers']} layers, not {num_layers}", key="layers"
            )
        config["num_hidden_layers"] = num_layers
    target = Path(directory)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise UsageError(f"{target} exists already", key="directory", hint="Choose a new or empty directory.")
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        specs = tensor_specs(config)
        size_bytes = _write_weights(specs, unfinished, seed, residual_scale, progress)
        files = tokenizer_files(config["vocab_size"], encoder=config["model_type"] == "bert")
        files["config.json"] = config | files.pop("special_ids")
        for name, value in (files | (_SENTENCE_FILES if config["model_type"] == "bert" else {})).items():
            path = unfinished / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                json.dumps(value, indent=None if name == "tokenizer.json" else 2, ensure_ascii=False) + "\n"
            )
        if target.exists():
            target.rmdir()
        unfinished.rename(target)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise
    return SynthResult(target, sum(math.prod(spec.shape) for spec in specs), size_bytes)


def tensor_specs(config: dict[str, Any]) -> list[TensorSpec]:
    """Names, dtypes and shapes of a checkpoint with this config.json, in the order of its layers."""
    make = _bert_shapes if config["model_type"] == "bert" else _decoder_shapes
    dtype = {"bfloat16": "BF16", "float32": "F32"}[config["torch_dtype"]]
    return [TensorSpec(name, dtype, shape) for name, shape in make(config)]


def _decoder_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim", hidden // heads)
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", (hidden,)
        for name, rows in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
            yield f"{prefix}.self_attn.{name}.weight", (rows * head_dim, hidden)
            if config["model_type"] == "qwen2":
                yield f"{prefix}.self_attn.{name}.bias", (rows * head_dim,)
        if config["model_type"] == "qwen3":
            yield f"{prefix}.self_attn.q_norm.weight", (head_dim,)
            yield f"{prefix}.self_attn.k_norm.weight", (head_dim,)
        yield f"{prefix}.self_attn.o_proj.weight", (hidden, heads * head_dim)
        yield f"{prefix}.post_attention_layernorm.weight", (hidden,)
        yield f"{prefix}.mlp.gate_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.up_proj.weight", (inner, hidden)
        yield f"{prefix}.mlp.down_proj.weight", (hidden, inner)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def _bert_shapes(config: dict[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]

    def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (rows, columns)
        yield f"{name}.bias", (rows,)

    def norm(name: str) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield f"{name}.weight", (hidden,)
        yield f"{name}.bias", (hidden,)

    yield "embeddings.word_embeddings.weight", (config["vocab_size"], hidden)
    yield "embeddings.position_embeddings.weight", (config["max_position_embeddings"], hidden)
    yield "embeddings.token_type_embeddings.weight", (config["type_vocab_size"], hidden)
    yield from norm("embeddings.LayerNorm")
    for layer in range(config["num_hidden_layers"]):
        prefix = f"encoder.layer.{layer}"
        for name in ("query", "key", "value"):
            yield from linear(f"{prefix}.attention.self.{name}", hidden, hidden)
        yield from linear(f"{prefix}.attention.output.dense", hidden, hidden)
        yield from norm(f"{prefix}.attention.output.LayerNorm")
        yield from linear(f"{prefix}.intermediate.dense", inner, hidden)
        yield from linear(f"{prefix}.output.dense", hidden, inner)
        yield from norm(f"{prefix}.output.LayerNorm")
    yield from linear("pooler.dense", hidden, hidden)


def _write_weights(
    specs: list[TensorSpec],
    directory: Path,
    seed: int,
    residual_scale: float,
    progress: Callable[[TransferProgress], None] | None,
) -> int:
    """Write one file, or shards with their index. Returns the bytes of tensor content."""
    shards = _shards(specs)
    total_bytes = sum(_size(spec) for spec in specs)
    done_bytes, index, where = 0, 0, {}
    for number, shard in enumerate(shards, 1):
        name = (
            f"model-{number:05}-of-{len(shards):05}.safetensors" if len(shards) > 1 else "model.safetensors"
        )
        with (directory / name).open("wb") as file:
            writer = SafetensorsWriter(file, shard, {"format": "pt"})
            for spec in shard:
                where[spec.name] = name
                scale = residual_scale if spec.name.endswith(_RESIDUAL_OUTPUTS) else 1.0
                for block in _content(spec, np.random.default_rng([seed, index]), scale):
                    writer.write(block)
                    done_bytes += len(block)
                    if progress is not None:
                        progress(TransferProgress(done_bytes, total_bytes))
                index += 1
            writer.finish()
    if len(shards) > 1:
        table = {"metadata": {"total_size": total_bytes}, "weight_map": where}
        (directory / "model.safetensors.index.json").write_text(json.dumps(table, indent=2) + "\n")
    return total_bytes


def _shards(specs: list[TensorSpec]) -> list[list[TensorSpec]]:
    shards: list[list[TensorSpec]] = [[]]
    filled_bytes = 0
    for spec in specs:
        if shards[-1] and filled_bytes + _size(spec) > MAX_SHARD_BYTES:
            shards.append([])
            filled_bytes = 0
        shards[-1].append(spec)
        filled_bytes += _size(spec)
    return shards


def _content(spec: TensorSpec, random: np.random.Generator, scale: float) -> Iterator[memoryview]:
    """A tensor's bytes in blocks of whole rows. 1-D weights are near 1, biases near 0, as in
    trained models.
    """
    if len(spec.shape) == 1:
        centre = 1.0 if spec.name.endswith("weight") else 0.0
        yield _stored(spec.dtype, centre + 0.05 * random.standard_normal(spec.shape, dtype=np.float32))
        return
    rows, columns = spec.shape
    std = scale / math.sqrt(columns)
    scales = std * np.exp(CHANNEL_SPREAD * random.standard_normal((rows, 1), dtype=np.float32))
    inputs = np.ones(columns, dtype=np.float32)
    inputs[random.choice(columns, max(1, int(OUTLIER_SHARE * columns)), replace=False)] = OUTLIER_FACTOR
    step = max(1, BLOCK_ELEMENTS // columns)
    for row in range(0, rows, step):
        block = random.standard_normal((min(step, rows - row), columns), dtype=np.float32)
        block *= scales[row : row + step]
        block *= inputs
        yield _stored(spec.dtype, block)


def _stored(dtype: str, values: npt.NDArray[np.float32]) -> memoryview:
    """Little-endian bytes; bf16 by rounding to nearest even."""
    if dtype == "F32":
        return values.reshape(-1).view(np.uint8).data
    bits = values.reshape(-1).view(np.uint32)
    bits += 0x7FFF + ((bits >> 16) & 1)
    return (bits >> 16).astype(np.uint16).view(np.uint8).data


def _size(spec: TensorSpec) -> int:
    return tensor_bytes(spec.dtype, spec.shape)
