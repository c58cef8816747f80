"""A decoder's weights, taken out of `Weights` by their names in the checkpoint, with the gates of its layers.

Building a model takes every tensor that it needs, and finds out which are left over, before any content has arrived.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from ..tensors import DType, Tensor
from ..weights import Weights
from .decoder_config import DecoderConfig, LatentAttention, LayerRotary
from .matrices import (
    CrossAttentionWeights,
    DecoderLayerWeights,
    DecoderWeights,
    DeltaNetWeights,
    ExpertWeights,
    JoinedMixtureWeights,
    LaurelWeights,
    LayerInputWeights,
    LayerNormWeights,
    MambaWeights,
    Projection,
    StreamWeights,
)
from .parameters import Parameters, stored_dtype
from .projections import take_embeddings, take_linear, take_qkv, take_stacked

if TYPE_CHECKING:
    from ..weights import ExpertGate
    from .experts_config import Experts
    from .layer_inputs_config import LayerInputs, Streams

QUERY_UP = "self_attn.q_b_proj"  # of latents with queries of a low rank
INPUT_EMBEDDINGS = "embed_tokens_per_layer"
_LAYER = re.compile(r"(?:.*?\.)?(?:layers|h)\.[0-9]+\.")
# What some checkpoints have and models compute by themselves, or not at all: scales of keys, values and inputs
# in 8 bits, which are not rounded.
_WITHOUT_EFFECT = (
    *("rotary_emb.inv_freq", ".k_scale", ".v_scale", ".input_scale", ".activation_scale"),
    *("attention.bias", "attention.masked_bias", "attn.bias", "attn.masked_bias"),  # masks of old checkpoints
)


def take_decoder(config: DecoderConfig, weights: Weights) -> tuple[DecoderWeights, DType]:
    """All of the decoder's weights, and what most of those that are no integers are stored in. Raises `ModelError` when
    a tensor is missing or does not fit `config`.
    """
    names, roots = config.model_names, config.roots
    root = next((each for each in roots if f"{each}{names.embeddings}.weight" in weights), roots[-1])
    stored = _stored_dtype(config, weights, f"{root}{names.embeddings}")

    made: list[Parameters] = []

    def parameters(prefix: str, *, inputs_first: bool = False) -> Parameters:
        made.append(Parameters(weights, prefix, config.quantization, inputs_first=inputs_first))
        return made[-1]

    entry = parameters(root)
    embeddings = take_embeddings(entry, names.embeddings, config.vocab_size, config.hidden_size)
    positions = None
    if names.positions is not None:
        positions = entry.take(f"{names.positions}.weight", config.rope.max_context, config.hidden_size)
    inputs = {} if config.layer_inputs is None else _take_inputs(config, config.layer_inputs, entry)
    stream_inputs = _take_stream_ends(config, entry, "altup_projections")
    tables = (names.embeddings, *([INPUT_EMBEDDINGS] if inputs else []))
    entry_gate = entry.row_gate(*(f"{table}.weight" for table in tables))
    of_layers = [
        parameters(f"{root}{names.layers}.{index}.", inputs_first=config.inputs_first)
        for index in range(config.num_layers)
    ]
    layers = tuple(_take_layer(config, index, own) for index, own in enumerate(of_layers))
    final = parameters("")
    stream_outputs = _take_stream_ends(config, final, f"{root}altup_unembed_projections")
    norm = final.take_norm(f"{root}{names.final_norm}.weight", config.hidden_size)
    norm_bias = _take_bias(final, f"{root}{names.final_norm}", config)
    head_name = _head_name(config, weights, f"{root}{names.embeddings}")
    head = take_linear(final, head_name, config.hidden_size, config.vocab_size, bias=config.head_bias)
    if config.quantization is not None and config.quantization.method != "teneral":
        _check_none_left(config, weights, of_layers, made)
    taken = DecoderWeights(
        embeddings=embeddings,
        layers=layers,
        norm=norm,
        norm_bias=norm_bias,
        positions=positions,
        **inputs,
        stream_inputs=stream_inputs,
        stream_outputs=stream_outputs,
        head=head,
        entry_gate=entry_gate,
        head_gate=final.gate(),
        head_strips=final.strips(f"{head_name}.weight"),
        all_gate=weights.gate(weights.names()),
        size_bytes=sum(weights.tensor(name).size_bytes for name in weights.names()),
    )
    return taken, stored


def _take_inputs(config: DecoderConfig, inputs: LayerInputs, parameters: Parameters) -> dict[str, Any]:
    """Fields of `DecoderWeights`: what the inputs of all layers are made of."""
    size, projection = config.num_layers * inputs.size, "per_layer_model_projection"
    return {
        "input_embeddings": take_embeddings(parameters, INPUT_EMBEDDINGS, inputs.vocab_size, size),
        "input_projection": take_linear(parameters, projection, config.hidden_size, size, bias=False),
        "input_norm": parameters.take_norm("per_layer_projection_norm.weight", inputs.size),
    }


def _take_stream_ends(config: DecoderConfig, parameters: Parameters, name: str) -> tuple[Projection, ...]:
    """A matrix for each stream of x but the first."""
    num, size = 0 if config.streams is None else config.streams.num - 1, config.hidden_size
    return tuple(take_linear(parameters, f"{name}.{number}", size, size, bias=False) for number in range(num))


def _take_layer(config: DecoderConfig, index: int, parameters: Parameters) -> DecoderLayerWeights:
    mixer = _take_mixer(config, index, parameters) if config.has_mixer(index) else {}
    mixture = config.experts if config.experts is not None and config.experts.layers[index] else None
    mlp = _take_mlp_parts(config, index, mixture, parameters) if config.has_mlp(index) else {}
    inputs = None
    if config.layer_inputs is not None:
        inputs = _take_layer_inputs(parameters, config.hidden_size, config.layer_inputs.size)
    streams = (
        None if config.streams is None else _take_streams(parameters, config.hidden_size, config.streams)
    )
    laurel = _take_laurel(config, parameters) if config.laurel_rank else None
    scalar = parameters.take_norm("layer_scalar", 1) if config.has_layer_scalars else None
    cross = None if config.speech is None else _take_cross_attention(config, parameters)
    router_gate = parameters.gate() if mixture else None
    experts, expert_gate = _take_experts(config, mixture, parameters) if mixture else ((), None)
    return DecoderLayerWeights(
        **mixer,
        **mlp,
        experts=experts,
        router_gate=router_gate,
        expert_gate=expert_gate,
        inputs=inputs,
        scalar=scalar,
        streams=streams,
        laurel=laurel,
        cross=cross,
        gate=parameters.gate(),
    )


def _take_mixer(config: DecoderConfig, index: int, parameters: Parameters) -> dict[str, Any]:
    """Fields of `DecoderLayerWeights` about attention, and what is in its place or parallel to it."""
    names, hidden_size = config.names, config.hidden_size
    taken = {
        "attention_norm": _take_norm(parameters, names.attention_norm, hidden_size),
        "attention_norm_bias": _take_bias(parameters, names.attention_norm, config),
    }
    if config.is_mamba(index):
        taken |= _take_mamba(config, parameters)
    if config.convolves(index):
        taken |= _take_convolution(config, parameters)
    elif config.is_delta_net(index):
        taken |= _take_delta_net(config, parameters)
    elif config.attends(index):
        taken |= _take_attention(config, index, parameters)
    if config.unit_qk_norm and config.layer_rotary[index] is not LayerRotary.NONE:
        from .converted import ones  # few models have such norms

        taken["query_norm"] = taken["key_norm"] = ones(config.head_dim)
    num_attended = config.num_heads * config.head_dim
    taken["attention_inner_norm"] = _take_norm(parameters, names.attention_inner_norm, num_attended)
    taken["attention_output_norm"] = _take_norm(parameters, names.attention_output_norm, hidden_size)
    return taken


def _take_mlp_parts(
    config: DecoderConfig, index: int, mixture: Experts | None, parameters: Parameters
) -> dict[str, Any]:
    """Fields of `DecoderLayerWeights` about the MLP, or all of a mixture but its experts."""
    names, hidden_size, inner_size = (
        config.names,
        config.hidden_size,
        config.shape_of(index).intermediate_size,
    )
    taken: dict[str, Any] = {}
    own: ExpertWeights | None = None
    if mixture is None:
        own = _take_mlp(config, parameters, inner_size, "", names.gate_up, names.down, bias=config.mlp_bias)
    else:
        bias = mixture.has_bias
        taken["router"] = take_linear(parameters, names.router, hidden_size, mixture.num, bias=bias)
        if mixture.has_shared_gate:
            taken["shared_gate"] = take_linear(parameters, names.shared_gate, hidden_size, 1, bias=False)
        if mixture.has_correction:
            taken["correction"] = parameters.take_norm(names.expert_correction, mixture.num)
        if mixture.joins_mlp:
            taken["joined_mixture"] = _take_joined_mixture(parameters, hidden_size, mixture)
        if mixture.shared_size:
            shared = (names.shared_expert, names.expert_gate_up, names.expert_down)
            shared_size = inner_size if mixture.joins_mlp else mixture.shared_size
            own = _take_mlp(config, parameters, shared_size, *shared, bias=config.mlp_bias)
    if own is not None:
        taken |= {"gate_up": own.gate_up, "down": own.down}
    return taken | {
        "mlp_norm": _take_norm(parameters, names.mlp_norm, hidden_size),
        "mlp_norm_bias": _take_bias(parameters, names.mlp_norm, config),
        "mlp_inner_norm": _take_norm(parameters, names.mlp_inner_norm, inner_size),
        "mlp_output_norm": _take_norm(parameters, names.mlp_output_norm, hidden_size),
    }


def _take_layer_inputs(parameters: Parameters, hidden_size: int, size: int) -> LayerInputWeights:
    return LayerInputWeights(
        take_linear(parameters, "per_layer_input_gate", hidden_size, size, bias=False),
        take_linear(parameters, "per_layer_projection", size, hidden_size, bias=False),
        parameters.take_norm("post_per_layer_input_norm.weight", hidden_size),
    )


def _take_streams(parameters: Parameters, hidden_size: int, streams: Streams) -> StreamWeights:
    num = streams.num
    return StreamWeights(
        parameters.take_norm("altup.router_norm.weight", hidden_size),
        parameters.take("altup.modality_router.weight", num, hidden_size),
        parameters.take("altup.prediction_coefs.weight", num * num, num),
        parameters.take("altup.correction_coefs.weight", num, num),
        parameters.take_norm("altup.correct_output_scale", hidden_size) if streams.has_scales else None,
    )


def _take_laurel(config: DecoderConfig, parameters: Parameters) -> LaurelWeights:
    hidden_size, rank = config.hidden_size, config.laurel_rank
    return LaurelWeights(
        take_linear(parameters, "laurel.linear_left", hidden_size, rank, bias=False),
        take_linear(parameters, "laurel.linear_right", rank, hidden_size, bias=False),
        parameters.take_norm("laurel.post_laurel_norm.weight", hidden_size),
    )


def _take_joined_mixture(parameters: Parameters, hidden_size: int, mixture: Experts) -> JoinedMixtureWeights:
    return JoinedMixtureWeights(
        parameters.take_norm("router.scale", hidden_size),
        parameters.take_norm("pre_feedforward_layernorm_2.weight", hidden_size),
        parameters.take_norm("post_feedforward_layernorm_2.weight", hidden_size),
        parameters.take_norm("post_feedforward_layernorm_1.weight", hidden_size),
        parameters.take_norm("router.per_expert_scale", mixture.num),
    )


def _take_attention(config: DecoderConfig, index: int, parameters: Parameters) -> dict[str, Any]:
    """Likewise, about attention alone."""
    if config.latent is not None:
        return _take_latent_attention(config, config.latent, parameters)
    names, hidden_size, shape = config.names, config.hidden_size, config.shape_of(index)
    query_size, key_size = config.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    norms = (query_size, key_size) if config.joint_qk_norm else (shape.head_dim, shape.head_dim)
    sizes, has_keys, value_norm = config.qkv_sizes(index), shape.keys_of == index, None
    qkv = _sized(names.qkv[: len(sizes)], sizes)
    if config.unit_value_norm and has_keys:
        from .converted import ones  # few models have such norms

        value_norm = ones(shape.head_dim)
    return {
        "qkv": take_stacked(parameters, qkv, hidden_size, bias=config.qkv_bias)
        if config.key_bias
        else take_qkv(parameters, qkv, hidden_size),
        "query_norm": _take_norm(parameters, names.query_norm, norms[0]) if config.qk_norm else None,
        "key_norm": _take_norm(parameters, names.key_norm, norms[1]) if config.qk_norm and has_keys else None,
        "value_norm": value_norm,
        "output": take_linear(parameters, names.output, query_size, hidden_size, bias=config.output_bias),
        "sinks": parameters.take_norm("self_attn.sinks", config.num_heads) if config.has_sinks else None,
    }


def _take_cross_attention(config: DecoderConfig, parameters: Parameters) -> CrossAttentionWeights:
    names, hidden_size = config.names, config.hidden_size
    query, *keys = names.cross_qkv
    return CrossAttentionWeights(
        LayerNormWeights(
            parameters.take_norm(f"{names.cross_norm}.weight", hidden_size),
            _take_bias(parameters, names.cross_norm, config),
        ),
        take_linear(parameters, query, hidden_size, hidden_size, bias=True),
        take_qkv(parameters, [(name, hidden_size) for name in keys], hidden_size),
        take_linear(parameters, names.cross_output, hidden_size, hidden_size, bias=True),
    )


def _take_latent_attention(
    config: DecoderConfig, latent: LatentAttention, parameters: Parameters
) -> dict[str, Any]:
    """The same of attention over latents."""
    names, hidden_size, num_heads, rank = (
        config.names,
        config.hidden_size,
        config.num_heads,
        latent.query_rank,
    )
    query_size = num_heads * (latent.plain_dim + config.rope.rotary_dim)
    down = _sized(names.qkv, (rank or query_size, config.head_dim))
    up_size = num_heads * (latent.plain_dim + latent.value_dim)
    up, value_size = "self_attn.kv_b_proj", num_heads * latent.value_dim
    return {
        "qkv": take_stacked(parameters, down, hidden_size, bias=False),
        "query_norm": _take_norm(parameters, names.query_norm, rank) if rank else None,
        "key_norm": _take_norm(parameters, names.key_norm, latent.rank),
        "query_up": take_linear(parameters, QUERY_UP, rank, query_size, bias=False) if rank else None,
        "key_value_up": take_linear(parameters, up, latent.rank, up_size, bias=False),
        "output": take_linear(parameters, names.output, value_size, hidden_size, bias=False),
    }


def _take_convolution(config: DecoderConfig, parameters: Parameters) -> dict[str, Any]:
    """The same of a layer that convolves in place of attending."""
    convolutions, hidden_size = config.convolutions, config.hidden_size
    assert convolutions is not None
    before, taps, after = config.names.convolution
    bias = convolutions.has_bias
    return {
        "qkv": take_linear(parameters, before, hidden_size, 3 * hidden_size, bias=bias),
        "convolution": parameters.take(f"{taps}.weight", hidden_size, 1, convolutions.size),
        "convolution_bias": parameters.take_norm(f"{taps}.bias", hidden_size) if bias else None,
        "output": take_linear(parameters, after, hidden_size, hidden_size, bias=bias),
    }


def _take_delta_net(config: DecoderConfig, parameters: Parameters) -> dict[str, Any]:
    """The same of a gated delta net."""
    nets, hidden_size = config.delta_nets, config.hidden_size
    assert nets is not None
    prefix = config.names.delta_net
    inputs = [f"{prefix}{name}" for name in config.names.delta_net_inputs]
    return {
        "qkv": take_stacked(parameters, _sized(inputs, nets.projected), hidden_size, bias=False),
        "delta_net": DeltaNetWeights(
            parameters.take(f"{prefix}conv1d.weight", nets.num_channels, 1, nets.convolution_size),
            parameters.take_norm(f"{prefix}A_log", nets.num_value_heads),
            parameters.take_norm(f"{prefix}dt_bias", nets.num_value_heads),
            parameters.take_norm(f"{prefix}norm.weight", nets.value_size),
        ),
        "output": take_linear(parameters, f"{prefix}out_proj", nets.num_values, hidden_size, bias=False),
    }


def _take_mamba(config: DecoderConfig, parameters: Parameters) -> dict[str, Any]:
    """The same of a Mamba-2 layer, in place of attention or parallel to it."""
    mamba, hidden_size, prefix = config.mamba, config.hidden_size, config.names.mamba
    assert mamba is not None
    channels, num_values, sizes = mamba.num_channels, mamba.num_values, (hidden_size, mamba.projected)
    return {
        "mamba": MambaWeights(
            take_linear(parameters, f"{prefix}in_proj", *sizes, bias=mamba.has_bias),
            take_linear(parameters, f"{prefix}out_proj", num_values, hidden_size, bias=mamba.has_output_bias),
            parameters.take(f"{prefix}conv1d.weight", channels, 1, mamba.convolution_size),
            parameters.take_norm(f"{prefix}conv1d.bias", channels) if mamba.has_convolution_bias else None,
            parameters.take_norm(f"{prefix}A_log", mamba.num_heads),
            parameters.take_norm(f"{prefix}dt_bias", mamba.num_heads),
            parameters.take_norm(f"{prefix}D", mamba.num_heads),
            parameters.take_norm(f"{prefix}norm.weight", num_values) if mamba.has_norm else None,
        )
    }


def _take_experts(
    config: DecoderConfig, mixture: Experts, parameters: Parameters
) -> tuple[tuple[ExpertWeights, ...], ExpertGate | None]:
    """The experts, and the gate for some of them: None where all are needed at once."""
    names = config.names
    stacked = names.stacked_experts
    down = f"{stacked}{names.stacked_down}"
    if stacked is not None and any(f"{down}{kind}" in parameters for kind in ("", "_blocks")):
        from .stacked_experts import stacked_gate, take_stacked_experts  # of few families

        is_alternating, hidden_size = names.stacked_alternating, config.hidden_size
        both = (f"{stacked}{names.stacked_gate_up}", down)
        taken = take_stacked_experts(parameters, both, mixture, hidden_size, is_alternating=is_alternating)
        return taken, stacked_gate(parameters, both, mixture, hidden_size, is_alternating=is_alternating)
    experts: list[ExpertWeights] = []
    starts: list[int] = []
    for number in range(mixture.num):
        starts.append(parameters.num_taken)
        prefix = names.expert.format(number)
        # Of one that `pack --quantize` took from a tensor with the inputs first, gates and ups are one matrix.
        is_joined = f"{prefix}gate_up_proj.weight" in parameters
        experts.append(
            _take_mlp(
                config,
                parameters,
                mixture.size,
                prefix,
                ("gate_up_proj",) if is_joined else names.expert_gate_up,
                names.expert_down,
                bias=mixture.has_bias or config.mlp_bias,
            )
        )
    return tuple(experts), parameters.expert_gate(starts)


def _take_mlp(
    config: DecoderConfig,
    parameters: Parameters,
    inner_size: int,
    prefix: str,
    gate_up: Sequence[str],
    down: str,
    *,
    bias: bool,
) -> ExpertWeights:
    hidden_size = config.hidden_size
    sizes = (inner_size,) * (2 if config.gated_mlp else 1)
    names = _sized([f"{prefix}{name}" for name in gate_up], sizes)
    return ExpertWeights(
        take_stacked(parameters, names, hidden_size, bias=bias),
        take_linear(parameters, f"{prefix}{down}", inner_size, hidden_size, bias=bias),
    )


def _check_none_left(
    config: DecoderConfig, weights: Weights, layers: Sequence[Parameters], taken: Sequence[Parameters]
) -> None:
    """Raises `ModelError` for a tensor of a layer that nothing computes with: tools of quantisation move scales into
    tensors of their own, without which the others would mean something else.
    """
    prefixes = {parameters.prefix for parameters in layers}
    used = {name for parameters in taken for name in parameters.taken}
    of_keys = (*config.names.qkv[1:], config.names.key_norm)  # which layers that read others' have in vain
    in_vain = tuple(
        f"{parameters.prefix}{name}."
        for index, parameters in enumerate(layers)
        if config.shape_of(index).keys_of != index
        for name in of_keys
    )
    for name in sorted(set(weights.names()) - used):
        layer = _LAYER.match(name)
        is_unused = name.endswith(_WITHOUT_EFFECT) or name.startswith(in_vain)
        if layer is not None and layer[0] in prefixes and not is_unused:
            raise ModelError(
                f"the quantised checkpoint has a tensor {name}, which is of no known use",
                hint="Pack the original model with `teneral pack --quantize int8` or `int4`.",
            )


def _take_norm(parameters: Parameters, name: str | None, size: int) -> Tensor | None:
    return None if name is None else parameters.take_norm(f"{name}.weight", size)


def _take_bias(parameters: Parameters, norm: str | None, config: DecoderConfig) -> Tensor | None:
    if norm is None or not config.norm_bias:
        return None
    return parameters.take_norm(f"{norm}.bias", config.hidden_size)


def _sized(names: Sequence[str], sizes: Sequence[int]) -> list[tuple[str, int]]:
    """Matrices with their numbers of rows: one that is stored by itself has all of them."""
    return list(zip(names, sizes, strict=True)) if len(names) > 1 else [(names[0], sum(sizes))]


def _stored_dtype(config: DecoderConfig, weights: Weights, embeddings: str) -> DType:
    """The dtype of config.json for integer embeddings; else that of most weights, but for scales of bitsandbytes."""
    if config.quantization is not None and config.quantization.method == "bitsandbytes":
        return weights.tensor(f"{embeddings}.weight").dtype
    is_blocks = len(weights.tensor(f"{embeddings}.weight").shape) == 3
    if f"{embeddings}.weight_scale" in weights or is_blocks:
        return DType.of_label(config.dtype or "bfloat16")  # a name that was checked
    return stored_dtype(weights, f"{embeddings}.weight")


def _head_name(config: DecoderConfig, weights: Weights, embeddings: str) -> str:
    """The head's matrix. Where a config says "tied" and the checkpoint holds another head, that counts, as it does for
    transformers; with equal bytes it makes no difference. Next to a tower, some files have it in the language model.
    """
    heads = (config.model_names.head, f"language_model.{config.model_names.head}")
    head = next(
        (each for each in heads if f"{each}.weight" in weights or f"{each}.qweight" in weights), heads[0]
    )
    if not config.tie_word_embeddings or f"{head}.qweight" in weights:
        return head
    own, shared = f"{head}.weight", f"{embeddings}.weight"
    if own not in weights or shared not in weights:
        return embeddings
    return embeddings if weights.tensor(own).is_at(weights.tensor(shared)) else head
