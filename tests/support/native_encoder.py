"""Weights of transformers' encoders as an executor takes them, and texts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.support.native_decoder import OpenGate, tensor_of
from tests.support.tiny_models import config_json, tensors_of

from teneral.runtime.models.encoder_config import EncoderConfig
from teneral.runtime.models.encoder_weights import EncoderLayerWeights, EncoderWeights
from teneral.runtime.models.executor import TextBatch
from teneral.runtime.models.matrices import DenseMatrix, LayerNormWeights, StoredProjection
from teneral.runtime.models.spec import EncoderSpec
from teneral.runtime.tensors import DType

_HEADS = {"bert": ("pooler.dense", "classifier"), "roberta": ("classifier.dense", "classifier.out_proj")}


def encoder_spec_of(model: Any, dtype: DType, **files: Any) -> EncoderSpec:
    """`files` are those of `EncoderConfig.from_json`."""
    return EncoderSpec.of(EncoderConfig.from_json(config_json(model), **files), dtype)


def encoder_weights_of(model: Any) -> EncoderWeights:
    """Those of a transformers model, each matrix by itself; with its head where it is a classifier."""
    tensors = {
        name.removeprefix("bert.").removeprefix("roberta."): tensor
        for name, tensor in tensors_of(model).items()
    }

    def projection(*names: str) -> StoredProjection:
        return StoredProjection(
            tuple(
                DenseMatrix(tensor_of(tensors[f"{name}.weight"]), tensor_of(tensors[f"{name}.bias"]))
                for name in names
            )
        )

    def norm(name: str) -> LayerNormWeights:
        return LayerNormWeights(tensor_of(tensors[f"{name}.weight"]), tensor_of(tensors[f"{name}.bias"]))

    def layer(index: int) -> EncoderLayerWeights:
        root = f"encoder.layer.{index}."
        return EncoderLayerWeights(
            qkv=projection(*(f"{root}attention.self.{one}" for one in ("query", "key", "value"))),
            output=projection(f"{root}attention.output.dense"),
            attention_norm=norm(f"{root}attention.output.LayerNorm"),
            up=projection(f"{root}intermediate.dense"),
            down=projection(f"{root}output.dense"),
            mlp_norm=norm(f"{root}output.LayerNorm"),
            gate=OpenGate(),
        )

    is_classifier = "Classification" in type(model).__name__
    dense, scores = _HEADS["bert" if model.config.model_type == "bert" else "roberta"]
    return EncoderWeights(
        words=tensor_of(tensors["embeddings.word_embeddings.weight"]),
        positions=tensor_of(tensors["embeddings.position_embeddings.weight"]),
        types=tensor_of(tensors["embeddings.token_type_embeddings.weight"]),
        norm=norm("embeddings.LayerNorm"),
        layers=tuple(layer(index) for index in range(model.config.num_hidden_layers)),
        entry_gate=OpenGate(),
        dense=projection(dense) if is_classifier else None,
        scores=projection(scores) if is_classifier else None,
        head_gate=OpenGate(),
    )


def text_batch(texts: Sequence[Sequence[int]]) -> TextBatch:
    starts = np.cumsum([0, *map(len, texts)], dtype=np.int64)
    return TextBatch(np.array([token for text in texts for token in text], np.int64), starts)
