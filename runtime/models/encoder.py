"""BERT-type encoders (BERT, RoBERTa, XLM-RoBERTa): texts as tokens in, one embedding a text out, or a row of scores.

Texts of about the same length share a batch. As with decoders, building reads no tensor's content, and each layer of a
forward pass first waits at its own gate. A classifier's head sees the state of a text's first token; its scores are
logits, label by label: what they mean, one label of several or each by itself, is for their reader to know. One text at
a time is scored: pairs of texts, as rerankers take them, are not. It knows no text and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from ..dtypes import DType
from ..errors import ContextLengthError, RequestError
from ..weights import Weights
from .config import EncoderConfig
from .executor import ComputeDtype, EncoderExecutor, TextBatch
from .matrices import EncoderLayerWeights, EncoderWeights, LayerNormWeights
from .parameters import Parameters, check_computable
from .projections import take_linear, take_stacked
from .spec import EncoderSpec

MAX_BATCH_TOKENS = 8_192  # of one batch, as if padded: bounds the memory of activations whatever is asked for

# Where each family keeps the two layers of a classifier's head; BERT's first one is its pooler's.
_HEADS = {"bert": ("bert.pooler.dense", "classifier")}
_HEADS_OF_OTHERS = ("classifier.dense", "classifier.out_proj")


class Encoder:
    """A model and its weights. One forward pass at a time; the caller sees to it."""

    def __init__(
        self,
        config: EncoderConfig,
        spec: EncoderSpec,
        weights: EncoderWeights,
        executor: EncoderExecutor,
        computes: ComputeDtype,
    ) -> None:
        self.config = config
        self.spec = spec
        self.computes = computes
        self.weights = weights
        self.executor = executor
        self.num_columns = spec.num_columns  # of what `embed` gives

    @property
    def dtype(self) -> DType:
        """Of activations."""
        return self.spec.dtype

    @property
    def device(self) -> str:
        return self.weights.device

    def embed(self, token_lists: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        """One row a text, (N, num_columns): its embedding, or a classifier's scores, in the order of the texts.

        Tokens include the special ones. Blocks until the weights are there, layer by layer, and raises the
        load's error if they will not be. Raises `ContextLengthError` or `RequestError` for a text that is
        too long, is empty, or has an unknown token.
        """
        for position, tokens in enumerate(token_lists):
            self._check(tokens, position)
        rows = np.empty((len(token_lists), self.num_columns), np.float32)
        for batch in batches_by_length([len(tokens) for tokens in token_lists]):
            rows[batch] = self._embed_batch([token_lists[index] for index in batch])
        return rows

    def _embed_batch(self, token_lists: Sequence[Sequence[int]]) -> npt.NDArray[np.float32]:
        tokens = np.array([token for tokens in token_lists for token in tokens], dtype=np.int64)
        starts = np.zeros(len(token_lists) + 1, dtype=np.int64)
        np.cumsum([len(tokens) for tokens in token_lists], out=starts[1:])
        batch, weights, executor = TextBatch(tokens, starts), self.weights, self.executor
        weights.entry_gate(tokens)
        x = executor.embed(batch)
        if executor.runs_layers_together and all(layer.gate.opens(0.0) for layer in weights.layers):
            x = executor.layers(batch, 0, len(weights.layers), x)
        else:
            for index, layer in enumerate(weights.layers):
                layer.gate()
                x = executor.layers(batch, index, index + 1, x)
        if weights.head_gate is not None:
            weights.head_gate()
        return executor.finish(batch, x)

    def _check(self, tokens: Sequence[int], position: int) -> None:
        limit = self.config.max_tokens
        if not tokens:
            raise RequestError(f"input {position} has no tokens", param="input")
        if len(tokens) > limit:
            raise ContextLengthError(
                f"input {position} has {len(tokens)} tokens, but this model takes up to {limit}",
                param="input",
            )
        if min(tokens) < 0 or max(tokens) >= self.config.vocab_size:
            raise RequestError(
                f"input {position} has a token outside the vocabulary of {self.config.vocab_size}",
                param="input",
            )


def take_encoder(config: EncoderConfig, weights: Weights) -> tuple[EncoderWeights, DType]:
    """All of the encoder's weights, with a classifier's head where `config` has labels, and what they are stored in.
    Raises `ModelError` when a tensor is missing or does not fit `config`.
    """
    root = _root(weights)
    word_name = f"{root}embeddings.word_embeddings.weight"
    word_embeddings = weights.tensor(word_name)
    check_computable(word_name, word_embeddings)
    stored, hidden_size = word_embeddings.dtype, config.hidden_size
    entry = Parameters(weights, f"{root}embeddings.", stored)
    words = entry.take("word_embeddings.weight", config.vocab_size, hidden_size)
    positions = entry.take("position_embeddings.weight", config.max_positions, hidden_size)
    types = entry.take("token_type_embeddings.weight", config.type_vocab_size, hidden_size)
    norm = _take_layer_norm(entry, "LayerNorm", config)
    entry_gate = entry.row_gate("word_embeddings.weight")
    layers = tuple(
        _take_layer(config, Parameters(weights, f"{root}encoder.layer.{index}.", stored))
        for index in range(config.num_layers)
    )
    dense = scores = head_gate = None
    if config.labels:
        head = Parameters(weights, "", stored)
        dense_name, scores_name = _HEADS.get(config.family, _HEADS_OF_OTHERS)
        dense = take_linear(head, dense_name, hidden_size, hidden_size, bias=True)
        scores = take_linear(head, scores_name, hidden_size, len(config.labels), bias=True)
        head_gate = head.gate()
    taken = EncoderWeights(words, positions, types, norm, layers, entry_gate, dense, scores, head_gate)
    return taken, stored


def _take_layer(config: EncoderConfig, parameters: Parameters) -> EncoderLayerWeights:
    hidden_size, inner_size = config.hidden_size, config.intermediate_size
    names = [f"attention.self.{part}" for part in ("query", "key", "value")]
    qkv = take_stacked(parameters, [(name, hidden_size) for name in names], hidden_size, bias=True)
    output = take_linear(parameters, "attention.output.dense", hidden_size, hidden_size, bias=True)
    attention_norm = _take_layer_norm(parameters, "attention.output.LayerNorm", config)
    up = take_linear(parameters, "intermediate.dense", hidden_size, inner_size, bias=True)
    down = take_linear(parameters, "output.dense", inner_size, hidden_size, bias=True)
    mlp_norm = _take_layer_norm(parameters, "output.LayerNorm", config)
    return EncoderLayerWeights(qkv, output, attention_norm, up, down, mlp_norm, parameters.gate())


def batches_by_length(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the texts in batches of similar length.

    A batch has at most MAX_BATCH_TOKENS tokens, padding included, or is a single text.
    """
    batches: list[list[int]] = []
    # Longest first: the first of a batch is then the length that the others are padded to.
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        batch = batches[-1] if batches else None
        if batch is None or lengths[batch[0]] * (len(batch) + 1) > MAX_BATCH_TOKENS:
            batches.append([index])
        else:
            batch.append(index)
    return batches


def _root(weights: Weights) -> str:
    """What stands before the encoder's own names: nothing, or its name within a model with a head."""
    for root in ("", "bert.", "roberta."):
        if f"{root}embeddings.word_embeddings.weight" in weights:
            return root
    return ""


def _take_layer_norm(parameters: Parameters, name: str, config: EncoderConfig) -> LayerNormWeights:
    # Checkpoints that were converted from TensorFlow call the two gamma and beta.
    weight, bias = ("gamma", "beta") if f"{name}.gamma" in parameters else ("weight", "bias")
    return LayerNormWeights(
        parameters.take_norm(f"{name}.{weight}", config.hidden_size),
        parameters.take_norm(f"{name}.{bias}", config.hidden_size),
    )
