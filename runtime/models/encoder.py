"""Encoders: one embedding, or one row of scores, for each text of tokens; and their weights, by each
family's names.

Texts of about the same length share a batch. As with decoders, building reads no tensor's content,
and each layer of a forward pass first waits at its own gate. A classifier's scores are logits,
label by label (`score_functions.py` makes probabilities of them). A pair of texts, as rerankers
take them, is one text whose tokens have types. It knows no text and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ..errors import ContextLengthError, ModelError, RequestError
from ..tensors import DType
from ..weights import Weights
from .encoder_config import EncoderConfig
from .encoder_weights import EncoderLayerWeights, EncoderWeights
from .executor import ComputeDtype, EncoderExecutor, TextBatch
from .matrices import DenseMatrix, LayerNormWeights, Projection, StoredProjection
from .parameters import Parameters, stored_dtype
from .pooling_config import DENSE_WEIGHTS, Dense
from .projections import take_linear, take_stacked
from .spec import EncoderSpec

MAX_BATCH_TOKENS = 8_192  # of one batch, as if padded: bounds the memory of activations
DenseTensors = Mapping[str, Weights]  # the weights of each folder with a Dense module


class Encoder:
    """A model and its weights. Not thread-safe: the caller runs one forward pass at a time."""

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
        self.num_columns = spec.num_columns  # of the result of `embed`

    @property
    def dtype(self) -> DType:
        """Of activations."""
        return self.spec.dtype

    @property
    def device(self) -> str:
        return self.weights.device

    def embed(
        self, token_lists: Sequence[Sequence[int]], type_lists: Sequence[Sequence[int] | None] | None = None
    ) -> npt.NDArray[np.float32]:
        """One row for each text, (N, num_columns): its embedding, or a classifier's scores.

        Tokens include the special ones. `type_lists` has a type for each token of a pair of texts,
        None for a single text; models without a table of types ignore it. Blocks until the weights
        arrive, layer by layer, and raises the load's error if they never do. Raises
        `ContextLengthError` or `RequestError` for a text that is too long, is empty, or has an
        unknown token or type.
        """
        for position, tokens in enumerate(token_lists):
            check_text(tokens, position, max_tokens=self.config.max_tokens, vocab_size=self.config.vocab_size)
        type_lists = type_lists or [None] * len(token_lists)
        for position, (tokens, types) in enumerate(zip(token_lists, type_lists, strict=True)):
            self._check_types(tokens, types, position)
        rows = np.empty((len(token_lists), self.num_columns), np.float32)
        for batch in batches_by_length([len(tokens) for tokens in token_lists]):
            rows[batch] = self._embed_batch(
                [token_lists[index] for index in batch], [type_lists[index] for index in batch]
            )
        return rows

    def _embed_batch(
        self, token_lists: Sequence[Sequence[int]], type_lists: Sequence[Sequence[int] | None]
    ) -> npt.NDArray[np.float32]:
        tokens = np.array([token for tokens in token_lists for token in tokens], dtype=np.int64)
        starts = np.zeros(len(token_lists) + 1, dtype=np.int64)
        np.cumsum([len(tokens) for tokens in token_lists], out=starts[1:])
        types: npt.NDArray[np.int64] | None = None
        if any(type_lists):
            types = np.zeros(len(tokens), dtype=np.int64)
            for own, start in zip(type_lists, starts.tolist(), strict=False):
                types[start : start + len(own or ())] = own or ()
        batch, weights, executor = TextBatch(tokens, starts, types), self.weights, self.executor
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

    def _check_types(self, tokens: Sequence[int], types: Sequence[int] | None, position: int) -> None:
        if types is None:
            return
        table = self.weights.types
        most = max(types) if table is None else table.array.shape[0] - 1
        if len(types) != len(tokens) or not 0 <= min(types) <= max(types) <= most:
            raise RequestError(
                f"input {position} has a token type that the model does not have", param="input"
            )


def check_text(tokens: Sequence[int], position: int, *, max_tokens: int, vocab_size: int) -> None:
    """Raise `RequestError` or `ContextLengthError` for a text, the input at `position`, that a model cannot take."""
    if not tokens:
        raise RequestError(f"input {position} has no tokens", param="input")
    if len(tokens) > max_tokens:
        raise ContextLengthError(
            f"input {position} has {len(tokens)} tokens, but this model takes up to {max_tokens}",
            param="input",
        )
    if min(tokens) < 0 or max(tokens) >= vocab_size:
        raise RequestError(
            f"input {position} has a token outside the vocabulary of {vocab_size}", param="input"
        )


def batches_by_length(lengths: Sequence[int], max_tokens: int = MAX_BATCH_TOKENS) -> list[list[int]]:
    """Indices of the texts in batches of similar length.

    A batch has at most `max_tokens` tokens, padding included, or is a single text.
    """
    batches: list[list[int]] = []
    # Longest first: the first of a batch is then the length that the others are padded to.
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        batch = batches[-1] if batches else None
        if batch is None or lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            batches.append([index])
        else:
            batch.append(index)
    return batches


def take_encoder(
    config: EncoderConfig, weights: Weights, dense: DenseTensors | None = None
) -> tuple[EncoderWeights, DType]:
    """All of the encoder's weights, with a classifier's head where `config` has labels, and what most are stored in.
    Raises `ModelError` when a tensor is missing or does not fit `config`.
    """
    names, hidden_size = config.names, config.hidden_size
    root = _root(config, weights)
    stored = stored_dtype(weights, f"{root}{names.words}.weight")
    entry = Parameters(weights, root)
    embedding_size = config.embedding_size or hidden_size
    words = entry.take(f"{names.words}.weight", config.vocab_size, embedding_size)
    positions = types = relative = relative_norm = projection = None
    if config.max_positions:
        positions = entry.take(f"{names.positions}.weight", config.max_positions, embedding_size)
    if config.type_vocab_size:
        types = entry.take(f"{names.types}.weight", config.type_vocab_size, embedding_size)
    if config.position_bias is not None:
        relative = entry.take(f"{names.relative}.weight", config.position_bias.num_buckets, config.num_heads)
    if config.disentangled is not None:
        relative = entry.take(f"{names.relative}.weight", 2 * config.disentangled.span, hidden_size)
        if names.relative_norm:
            relative_norm = take_layer_norm(entry, names.relative_norm, hidden_size)
    norm = None
    if names.norm:
        norm = take_layer_norm(entry, names.norm, embedding_size, bias=config.has_norm_bias)
    if config.embedding_size is not None:
        projection = take_linear(entry, names.projection, embedding_size, hidden_size, bias=True)
    entry_gate = entry.row_gate(f"{names.words}.weight")
    num_own = config.num_layer_groups or config.num_layers
    own_layers = [
        _take_layer(config, Parameters(weights, root + names.layer.format(index)), index)
        for index in range(num_own)
    ]
    layers = tuple(own_layers[index * num_own // config.num_layers] for index in range(config.num_layers))
    last = Parameters(weights, "")
    final_norm = head_dense = head_norm = scores = None
    if names.final_norm:
        final_norm = take_layer_norm(last, root + names.final_norm, hidden_size, bias=config.has_norm_bias)
    if config.labels:
        head_dense = take_linear(last, names.dense, hidden_size, hidden_size, bias=config.has_head_bias)
        if config.has_head_norm:
            head_norm = take_layer_norm(last, names.head_norm, hidden_size, bias=config.has_norm_bias)
        scores = take_linear(last, names.scores, hidden_size, len(config.labels), bias=True)
    taken = EncoderWeights(
        words=words,
        positions=positions,
        types=types,
        norm=norm,
        layers=layers,
        entry_gate=entry_gate,
        projection=projection,
        relative=relative,
        relative_norm=relative_norm,
        final_norm=final_norm,
        dense=head_dense,
        head_norm=head_norm,
        scores=scores,
        sentence=tuple(take_dense(layer, dense or {}) for layer in config.dense),
        head_gate=last.gate() if final_norm is not None or config.labels else None,
    )
    return taken, stored


def _take_layer(config: EncoderConfig, parameters: Parameters, index: int) -> EncoderLayerWeights:
    names, hidden_size, inner_size = config.names, config.hidden_size, config.intermediate_size
    output = take_linear(parameters, names.output, hidden_size, hidden_size, bias=config.has_output_bias)
    attention_norm = None
    if not config.has_pre_norm or index or not names.norm:
        attention_norm = take_layer_norm(
            parameters, names.attention_norm, hidden_size, bias=config.has_norm_bias
        )
    up_size = inner_size * (2 if config.is_gated else 1)
    if config.has_interleaved_qkv:
        qkv = _take_interleaved(parameters, names.qkv[0], hidden_size, config.num_heads)
    else:
        qkv = _take_equal(parameters, names.qkv, hidden_size, 3 * hidden_size, bias=config.has_qkv_bias)
    return EncoderLayerWeights(
        qkv=qkv,
        position_qk=_take_position_qk(parameters, names.position_qk, hidden_size),
        output=output,
        attention_norm=attention_norm,
        up=_take_equal(parameters, names.up, hidden_size, up_size, bias=config.has_mlp_bias),
        down=take_linear(parameters, names.down, inner_size, hidden_size, bias=config.has_mlp_bias),
        mlp_norm=take_layer_norm(parameters, names.mlp_norm, hidden_size, bias=config.has_norm_bias),
        gate=parameters.gate(),
    )


def _take_interleaved(parameters: Parameters, name: str, hidden_size: int, num_heads: int) -> Projection:
    """Views of the rows of `name`.weight: a matrix of each head's queries, then keys, then values."""
    size = hidden_size // num_heads
    weight = parameters.take(f"{name}.weight", 3 * hidden_size, hidden_size)
    heads = replace(weight, array=weight.array.reshape((3 * num_heads, size, hidden_size)))
    parts = []
    for place, kind in enumerate(("q_bias", None, "v_bias")):
        bias = None
        if kind is not None:
            own = parameters.take(f"{name.rpartition('.')[0]}.{kind}", hidden_size)
            bias = replace(own, array=own.array.reshape((num_heads, size)))
        parts += [
            DenseMatrix(heads.part(3 * head + place), None if bias is None else bias.part(head))
            for head in range(num_heads)
        ]
    return StoredProjection(tuple(parts))


def _take_position_qk(parameters: Parameters, names: Sequence[str], hidden_size: int) -> Projection | None:
    """Of positions: queries, which have a bias, and keys, which have none."""
    if not names:
        return None
    parts = [
        take_linear(parameters, name, hidden_size, hidden_size, bias=has_bias)
        for name, has_bias in zip(names, (True, False), strict=True)
    ]
    return StoredProjection(tuple(matrix for part in parts for matrix in part.matrices()))


def _take_equal(
    parameters: Parameters, names: Sequence[str], num_in: int, num_out: int, *, bias: bool
) -> Projection:
    """One projection to `num_out`, of which each name has an equal share."""
    return take_stacked(parameters, [(name, num_out // len(names)) for name in names], num_in, bias=bias)


def take_dense(layer: Dense, weights: DenseTensors) -> DenseMatrix:
    """The matrix of one layer. Raises `ModelError` where it is missing or does not fit."""
    own = weights.get(layer.folder)
    if own is None:
        raise ModelError(
            f"modules.json has a Dense module in {layer.folder}, but there is no {layer.folder}/{DENSE_WEIGHTS}",
            hint="Save the model with sentence-transformers 2.3 or later, which writes safetensors.",
        )
    parameters = Parameters(own, "")
    weight = parameters.take("linear.weight", layer.num_out, layer.num_in)
    return DenseMatrix(weight, parameters.take("linear.bias", layer.num_out) if layer.has_bias else None)


def take_layer_norm(
    parameters: Parameters, name: str, hidden_size: int, *, bias: bool = True
) -> LayerNormWeights:
    """The norm `name` of rows of `hidden_size`. Raises `ModelError` where it is missing or does not fit."""
    # Checkpoints that were converted from TensorFlow call the two gamma and beta.
    weight_name, bias_name = ("gamma", "beta") if f"{name}.gamma" in parameters else ("weight", "bias")
    return LayerNormWeights(
        parameters.take_norm(f"{name}.{weight_name}", hidden_size),
        parameters.take_norm(f"{name}.{bias_name}", hidden_size) if bias else None,
    )


def _root(config: EncoderConfig, weights: Weights) -> str:
    """The prefix of the encoder's names: nothing, or its own name within a model with a head."""
    roots = config.names.roots
    return next((root for root in roots if f"{root}{config.names.words}.weight" in weights), roots[0])
