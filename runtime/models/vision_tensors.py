"""A vision tower's tensors in a checkpoint, by the names that its config has.

Every tensor is looked up and checked; no content is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..tensors import DType, Tensor
from ..weights import Weights
from .converted import ones, transposed
from .encoder import take_layer_norm
from .encoder_weights import EncoderLayerWeights, EncoderWeights
from .fields import Norm
from .matrices import DenseMatrix, LayerNormWeights, Projection
from .parameters import Parameters
from .projections import take_linear, take_stacked
from .vision import DeepConnector, VisionFactory, VisionTower, VisionWeights, spec_of
from .vision_config import VisionConfig

_BOUNDS = ("input_min", "input_max", "output_min", "output_max")  # of a layer's matrix, by its name


def build_vision(
    config: VisionConfig, weights: Weights, factory: VisionFactory, *, dtype: DType, hidden_size: int
) -> VisionTower:
    """The tower whose rows a decoder of this dtype and `hidden_size` takes. Every tensor is looked up and checked; no
    content is read. Raises `ModelError`.
    """
    taken = take_vision(config, weights, hidden_size)
    return VisionTower(config, dtype, taken, factory.vision(spec_of(config, dtype), taken))


def take_vision(config: VisionConfig, weights: Weights, hidden_size: int) -> VisionWeights:
    """All of the tower's weights, and the connector to rows of `hidden_size`. Raises `ModelError` when a tensor is
    missing or does not fit `config`.
    """
    width, size, names = config.hidden_size, config.patch_size, config.names
    matrix_name = f"{names.patches}.weight"
    root = next((each for each in config.roots if f"{each}{matrix_name}" in weights), config.roots[0])
    entry = Parameters(weights, root)
    frames = () if config.num_frames == 1 else (config.num_frames,)
    shape = (3 * size**2,) if config.channels_last else (3, *frames, size, size)
    patches = entry.take(matrix_name, width, *shape)
    has_bias = config.norm is Norm.LAYER and names.class_row is None
    bias = entry.take(f"{names.patches}.bias", width) if has_bias else None
    matrix = DenseMatrix(Tensor(patches.dtype, patches.array.reshape(width, -1)), bias)
    positions = None
    if names.positions is not None:
        axes = (2, config.axis_positions) if config.axis_positions else (config.num_positions,)
        axes = axes[::-1] if config.axes_alternate else axes
        table = entry.take(names.positions, *axes, width)
        positions = Tensor(table.dtype, table.array.reshape(-1, width))
    class_row = None if names.class_row is None else entry.take(names.class_row, width)
    entry_norms = tuple(
        take_layer_norm(entry, name, length) if name else None
        for name, length in zip(names.entry_norms, (3 * size**2, width, width), strict=False)
    )
    entry_gate = entry.row_gate(matrix_name)
    layers = tuple(
        _take_layer(config, Parameters(weights, f"{root}{names.layer.format(index)}"))
        for index in range(config.num_layers)
    )
    last = Parameters(weights, "")
    final_norm = None if names.final_norm is None else _take_norm(config, last, f"{root}{names.final_norm}")
    norm, connector, output = _take_connector(config, last, hidden_size)
    standard = None
    if config.standardizes:
        standard = (last.take(f"{root}std_bias", width), last.take(f"{root}std_scale", width))
    mark = None
    if config.marks:
        mark = last.take(next((each for each in config.marks if each in last), config.marks[0]), hidden_size)
    deep = tuple(
        _take_deep(config, last, f"{root}{names.deep.format(number)}", hidden_size)
        for number in range(len(config.deep_layers))
    )
    encoder = EncoderWeights(
        words=matrix.weight,
        positions=positions,
        types=None,
        norm=None,
        layers=layers,
        entry_gate=entry_gate,
        final_norm=final_norm,
        head_gate=last.gate(),
    )
    return VisionWeights(
        encoder,
        matrix,
        connector,
        connector_norm=norm,
        class_row=class_row,
        entry_norms=entry_norms,
        entry_norm_eps=config.entry_norm_eps,
        mean_scale=config.mean_scale or 1.0,
        mean_standard=standard,
        connector_output=output,
        mark=mark,
        deep=deep,
    )


def _take_connector(
    config: VisionConfig, parameters: Parameters, hidden_size: int
) -> tuple[Tensor | None, Projection, Projection | None]:
    """The norm of a token's mean, where there is one, the matrix, and what follows it."""
    width, names, joined = config.hidden_size, config.connectors, config.hidden_size * config.square**2
    if config.names.connector:
        inner, output = config.names.connector
        prefix = next((each for each in names if f"{each}{inner}.weight" in parameters), names[0])
        between, bias = config.connector_width or joined, config.connector_bias
        first = take_linear(parameters, f"{prefix}{inner}", joined, between, bias=bias)
        return None, first, take_linear(parameters, f"{prefix}{output}", between, hidden_size, bias=bias)
    if not config.averages:
        return None, take_linear(parameters, names[0], joined, hidden_size, bias=False), None
    if config.mean_scale is not None:
        name = next((each for each in names if f"{each}.weight" in parameters), names[0])
        unit = Tensor(DType.F32, np.zeros(width, np.float32))  # 1 + which are its weights
        return unit, take_linear(parameters, name, width, hidden_size, bias=False), None
    norm = "mm_soft_emb_norm.weight"
    prefix = next((each for each in names if f"{each}{norm}" in parameters), names[0])
    weight = parameters.take(f"{prefix}mm_input_projection_weight", width, hidden_size)
    taken = parameters.take_norm(f"{prefix}{norm}", width)
    return taken, transposed([weight], [None], parameters.gate()), None


def _take_deep(config: VisionConfig, parameters: Parameters, prefix: str, hidden_size: int) -> DeepConnector:
    joined, (inner, output) = config.hidden_size * config.square**2, config.names.connector
    return DeepConnector(
        norm=take_layer_norm(parameters, f"{prefix}norm", joined),
        inner=take_linear(parameters, f"{prefix}{inner}", joined, joined, bias=True),
        output=take_linear(parameters, f"{prefix}{output}", joined, hidden_size, bias=True),
    )


def _take_layer(config: VisionConfig, parameters: Parameters) -> EncoderLayerWeights:
    width, inner, names, bias = config.hidden_size, config.intermediate_size, config.names, config.has_biases
    qkv = [(name + names.matrix, 3 * width // len(names.qkv)) for name in names.qkv]
    up = [(name + names.matrix, inner) for name in names.up]
    norms: dict[str, Any] = {}
    if names.output_norms is not None:
        for key, name in zip(("attention_output_norm", "mlp_output_norm"), names.output_norms, strict=True):
            norms[key] = parameters.take_norm(f"{name}.weight", width)
    if names.head_norms is not None:
        head_dim = width // config.num_heads
        for key, name in zip(("query_norm", "key_norm"), names.head_norms, strict=True):
            norms[key] = parameters.take_norm(f"{name}.weight", head_dim)
        norms["value_norm"] = ones(head_dim)
    bounded = (*names.qkv, names.output, *names.up, names.down) if config.is_bounded else ()
    return EncoderLayerWeights(
        qkv=take_stacked(parameters, qkv, width, bias=bias),
        output=take_linear(parameters, names.output + names.matrix, width, width, bias=bias),
        attention_norm=_take_norm(config, parameters, names.attention_norm),
        up=take_stacked(parameters, up, width, bias=bias),
        down=take_linear(parameters, names.down + names.matrix, inner, width, bias=bias),
        mlp_norm=_take_norm(config, parameters, names.mlp_norm),
        bounds=tuple(parameters.take(f"{name}.{kind}") for name in bounded for kind in _BOUNDS),
        gate=parameters.gate(),
        **norms,
    )


def _take_norm(config: VisionConfig, parameters: Parameters, name: str) -> LayerNormWeights:
    if config.norm is Norm.LAYER:
        return take_layer_norm(parameters, name, config.hidden_size)
    return LayerNormWeights(parameters.take_norm(f"{name}.weight", config.hidden_size), None)
