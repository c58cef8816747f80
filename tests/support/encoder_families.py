"""Tiny encoders of the newer families with random weights, made by transformers, and their files as it saves them."""

from __future__ import annotations

import functools
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from tests.support.tiny_models import VOCAB_SIZE, save_tiny, transformers

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
_DISENTANGLED = {
    "relative_attention": True,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "position_biased_input": False,
    "type_vocab_size": 0,
}
LONG = 600  # tokens: several chunks of keys
# The settings of one config.json each, and its `model_type`
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "distilbert": (
        "distilbert",
        {
            "vocab_size": VOCAB_SIZE,
            "dim": 64,
            "hidden_dim": 96,
            "n_layers": 4,
            "n_heads": 4,
            "max_position_embeddings": 96,
        },
    ),
    "camembert": (
        "camembert",
        {**_COMMON, "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 98},
    ),
    "electra": ("electra", {**_COMMON, "embedding_size": 64, "type_vocab_size": 2}),
    "electra-small": ("electra", {**_COMMON, "embedding_size": 40, "type_vocab_size": 2}),
    "albert": ("albert", {**_COMMON, "embedding_size": 32, "num_hidden_groups": 2, "hidden_act": "gelu_new"}),
    "xlm-roberta-xl": (
        "xlm-roberta-xl",
        {**_COMMON, "type_vocab_size": 1, "pad_token_id": 1, "max_position_embeddings": 98},
    ),
    "mpnet": ("mpnet", {**_COMMON, "max_position_embeddings": 202}),  # beyond the largest distance
    "modernbert": (
        "modernbert",
        {**_COMMON, "local_attention": 12, "pad_token_id": 0, "max_position_embeddings": LONG},
    ),
    "modernbert-biased": (
        "modernbert",
        {
            **_COMMON,
            "local_attention": 8,
            "global_attn_every_n_layers": 2,
            "pad_token_id": 0,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "classifier_pooling": "mean",
            "classifier_activation": "relu",
        },
    ),
    "nomic_bert": ("nomic_bert", {**_COMMON}),
    "deberta": (
        "deberta",
        {
            **_COMMON,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "max_relative_positions": 24,
            "position_biased_input": False,
        },
    ),
    "deberta-v3": (
        "deberta-v2",
        {
            **_COMMON,
            **_DISENTANGLED,
            "position_buckets": 16,
            "max_relative_positions": 48,
            "max_position_embeddings": LONG,
        },
    ),
    "deberta-v2": (  # without buckets, with positions and token types
        "deberta-v2",
        {
            **_COMMON,
            **_DISENTANGLED,
            "max_relative_positions": 24,
            "norm_rel_ebd": "none",
            "position_biased_input": True,
            "type_vocab_size": 2,
            "pooler_hidden_act": "tanh",
        },
    ),
}


class TinyEncoder(NamedTuple):
    """A model of transformers, and what its folder holds."""

    oracle: Any
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


@functools.cache
def tiny_encoder(
    variant: str, dtype: torch.dtype = torch.float32, *, labels: int = 0, seed: int = 0
) -> TinyEncoder:
    """With `labels`, a classifier. No weight is left at 0 or 1, so that none can be forgotten unseen."""
    with tempfile.TemporaryDirectory() as directory:
        oracle = save_encoder(variant, Path(directory), dtype, labels=labels, seed=seed)
        config = json.loads((Path(directory) / "config.json").read_text())
        return TinyEncoder(oracle, config, load_file(Path(directory) / "model.safetensors"))


def save_encoder(
    variant: str, directory: Path, dtype: torch.dtype = torch.float32, *, labels: int = 0, seed: int = 0
) -> Any:
    """Writes config.json and model.safetensors; returns the model."""
    family, settings = VARIANTS[variant]
    if labels:
        settings = {**settings, "num_labels": labels}
    config = transformers.AutoConfig.for_model(family, **settings)
    kind = transformers.AutoModelForSequenceClassification if labels else transformers.AutoModel
    try:
        oracle = kind.from_config(config, attn_implementation="eager")
    except ValueError:  # some families have no other
        oracle = kind.from_config(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(1.0 + 0.2 * noise if is_scale else 0.15 * noise)
    oracle = oracle.to(dtype).eval()
    oracle.save_pretrained(directory)
    return oracle


class SavedSentenceModel(NamedTuple):
    """The modules of a sentence-transformers folder: a transformer, a layer behind the mean of its states, or none."""

    oracle: Any
    dense: torch.nn.Linear | None

    @torch.no_grad()
    def embed(self, tokens: list[int]) -> torch.Tensor:
        """At unit length, (columns,) fp32."""
        row = self.oracle(input_ids=torch.tensor([tokens])).last_hidden_state[0].float().mean(0)
        if self.dense is not None:
            row = torch.tanh(self.dense(row))
        return row / row.norm()


def save_sentence_model(variant: str, directory: Path, *, dense: int = 0) -> SavedSentenceModel:
    """A folder with a tokenizer. Embeddings are means, behind which there may be a layer to `dense` columns."""
    save_tiny("bert", directory)
    oracle = save_encoder(variant, directory)
    kinds = ["Transformer", "Pooling", *(["Dense"] if dense else []), "Normalize"]
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"a.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    _write(directory / "modules.json", modules)
    _write(directory / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    if not dense:
        return SavedSentenceModel(oracle, None)
    torch.manual_seed(5)
    layer = torch.nn.Linear(oracle.config.hidden_size, dense)
    _write(
        directory / "2_Dense" / "config.json",
        {
            "in_features": layer.in_features,
            "out_features": dense,
            "bias": True,
            "activation_function": "torch.nn.modules.activation.Tanh",
        },
    )
    tensors = {"linear.weight": layer.weight.detach(), "linear.bias": layer.bias.detach()}
    save_file(tensors, directory / "2_Dense" / "model.safetensors")
    return SavedSentenceModel(oracle, layer)


def _write(path: Path, data: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(data))
