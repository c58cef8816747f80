"""An encoder's weights out of a model's tensors, by the names that its family has for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..dtypes import DType
from ..errors import ModelError
from ..weights import Weights
from .encoder_config import EncoderConfig
from .matrices import DenseMatrix, EncoderLayerWeights, EncoderWeights, LayerNormWeights, Projection
from .parameters import Parameters, check_computable
from .pooling_config import DENSE_WEIGHTS, Dense
from .projections import take_linear, take_stacked

DenseTensors = Mapping[str, Weights]  # the weights of each folder with a Dense module


def take_encoder(
    config: EncoderConfig, weights: Weights, dense: DenseTensors | None = None
) -> tuple[EncoderWeights, DType]:
    """All of the encoder's weights, with a classifier's head where `config` has labels, and what they are stored in.
    Raises `ModelError` when a tensor is missing or does not fit `config`.
    """
    names, hidden_size = config.names, config.hidden_size
    root = _root(config, weights)
    word_name = f"{root}{names.words}.weight"
    word_embeddings = weights.tensor(word_name)
    check_computable(word_name, word_embeddings)
    stored = word_embeddings.dtype
    entry = Parameters(weights, root, stored)
    words = entry.take(f"{names.words}.weight", config.vocab_size, hidden_size)
    positions = types = relative = relative_norm = None
    if config.max_positions:
        positions = entry.take(f"{names.positions}.weight", config.max_positions, hidden_size)
    if config.type_vocab_size:
        types = entry.take(f"{names.types}.weight", config.type_vocab_size, hidden_size)
    if config.position_bias is not None:
        relative = entry.take(f"{names.relative}.weight", config.position_bias.num_buckets, config.num_heads)
    if config.disentangled is not None:
        relative = entry.take(f"{names.relative}.weight", 2 * config.disentangled.span, hidden_size)
        if names.relative_norm:
            relative_norm = _take_layer_norm(entry, names.relative_norm, hidden_size)
    norm = _take_layer_norm(entry, names.norm, hidden_size, bias=config.has_norm_bias)
    entry_gate = entry.row_gate(f"{names.words}.weight")
    layers = tuple(
        _take_layer(config, Parameters(weights, root + names.layer.format(index), stored), index)
        for index in range(config.num_layers)
    )
    last = Parameters(weights, "", stored)
    final_norm = head_dense = head_norm = scores = None
    if names.final_norm:
        final_norm = _take_layer_norm(last, root + names.final_norm, hidden_size, bias=config.has_norm_bias)
    if config.labels:
        head_dense = take_linear(last, names.dense, hidden_size, hidden_size, bias=config.has_head_bias)
        if config.has_head_norm:
            head_norm = _take_layer_norm(last, names.head_norm, hidden_size, bias=config.has_norm_bias)
        scores = take_linear(last, names.scores, hidden_size, len(config.labels), bias=True)
    taken = EncoderWeights(
        words=words,
        positions=positions,
        types=types,
        norm=norm,
        layers=layers,
        entry_gate=entry_gate,
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
    if not config.has_pre_norm or index:
        attention_norm = _take_layer_norm(
            parameters, names.attention_norm, hidden_size, bias=config.has_norm_bias
        )
    up_size = inner_size * (2 if config.is_gated else 1)
    return EncoderLayerWeights(
        qkv=_take_equal(parameters, names.qkv, hidden_size, 3 * hidden_size, bias=config.has_qkv_bias),
        output=output,
        attention_norm=attention_norm,
        up=_take_equal(parameters, names.up, hidden_size, up_size, bias=config.has_mlp_bias),
        down=take_linear(parameters, names.down, inner_size, hidden_size, bias=config.has_mlp_bias),
        mlp_norm=_take_layer_norm(parameters, names.mlp_norm, hidden_size, bias=config.has_norm_bias),
        gate=parameters.gate(),
    )


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
    stored = own.tensor("linear.weight").dtype
    check_computable(f"{layer.folder}/linear.weight", own.tensor("linear.weight"))
    parameters = Parameters(own, "", stored)
    weight = parameters.take("linear.weight", layer.num_out, layer.num_in)
    return DenseMatrix(weight, parameters.take("linear.bias", layer.num_out) if layer.has_bias else None)


def _take_layer_norm(
    parameters: Parameters, name: str, hidden_size: int, *, bias: bool = True
) -> LayerNormWeights:
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
