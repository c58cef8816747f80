"""A decoder as the core reads it: records of its sizes, choices and weights, and tables of its rotation.

It does not know when weights are there, nor what becomes of the records.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ...models.matrices import (
    DecoderLayerWeights,
    DeltaNetWeights,
    JoinedMixtureWeights,
    MambaWeights,
    StreamWeights,
)
from ...models.rotary import TurnTable
from ...models.spec import DecoderSpec, KVPlace
from ...tensors import DType
from . import arrays, records
from .operations import ACTIVATIONS, NORMS, ROTARIES
from .weights import vector_of

if TYPE_CHECKING:
    from .weights import ProjectionParts


def model_record(spec: DecoderSpec, layers: Any) -> records.DecoderRecord:
    """`layers` are the records of its layers, which may still be empty."""
    return records.DecoderRecord(
        layers=layers,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_heads=spec.num_heads,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        rotary_dim=spec.rotary.dim,
        local_rotary_dim=0 if spec.local_rotary is None else spec.local_rotary.dim,
        num_layers=spec.num_layers,
        layer_input_size=0 if spec.layer_inputs is None else spec.layer_inputs.size,
        laurel_rank=spec.laurel_rank,
        num_streams=0 if spec.streams is None else spec.streams.num,
        active_stream=0 if spec.streams is None else spec.streams.active,
        norm_eps=spec.norm_eps,
        attention_scale=spec.attention_scale,
        score_cap=spec.score_cap or 0.0,
        residual_scale=spec.residual_scale,
        mlp_residual_scale=spec.residual_scale * spec.mlp_output_scale,
        gate_scale=spec.gate_scale,
        attention_output_scale=spec.attention_output_scale,
        activation=ACTIVATIONS[spec.activation],
        dtype=arrays.dtype_of(np.empty(0, spec.dtype.numpy)),
        plain_mlp=not spec.gated_mlp,
        norm=NORMS[spec.norm],
        joint_norms=spec.joint_head_norms,
        late_norms=spec.late_head_norms,
        wide_turns=spec.wide_rotary,
        interleaved=spec.rotary.interleaved,
        parallel=spec.is_parallel,
        bidirectional=spec.is_bidirectional,
        convolution_size=0 if spec.convolutions is None else spec.convolutions.size,
        gated_attention=spec.gated_attention,
        rounds_inputs=spec.rounds_inputs,
        interleaved_qkv=spec.interleaved_qkv,
        chunked_windows=spec.chunked_windows,
        ends_in_windows=spec.windowed_images,
        source_len=spec.source_len,
        **_mixture(spec),
        **_latent(spec),
        **_delta_nets(spec),
        **_mamba(spec),
    )


# Of a layer, by the names that weights and records have in common.
_VECTORS = (
    "attention_norm query_norm key_norm attention_output_norm mlp_norm mlp_output_norm attention_norm_bias "
    "mlp_norm_bias attention_inner_norm mlp_inner_norm sinks correction convolution convolution_bias value_norm scalar"
)


def layer_record(
    spec: DecoderSpec,
    index: int,
    layer: DecoderLayerWeights,
    parts: Mapping[str, ProjectionParts],
    place: KVPlace,
    state_first: int,
) -> records.DecoderLayerRecord:
    """Without experts. `parts` are the layer's projections, by the record's names; `state_first` is the number of a
    sequence's state at which the layer's part begins.
    """
    shape = spec.layer_shapes[index]
    return records.DecoderLayerRecord(
        **{name: vector_of(getattr(layer, name)) for name in _VECTORS.split()},
        input_norm=vector_of(None if layer.inputs is None else layer.inputs.norm),
        laurel_norm=vector_of(None if layer.laurel is None else layer.laurel.norm),
        cuts_gates=spec.gate_cuts[index] is not None,
        gate_cut=spec.gate_cuts[index] or 0.0,
        cross_norm=vector_of(None if layer.cross is None else layer.cross.norm.weight),
        cross_norm_bias=vector_of(None if layer.cross is None else layer.cross.norm.bias),
        **_joined_mixture(layer.joined_mixture),
        **_vectors("delta", layer.delta_net, "taps log bias norm"),
        **_vectors("stream", layer.streams, "norm router predictions corrections scale"),
        **_vectors("mamba", layer.mamba, "taps taps_bias log step_bias skip norm"),
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        reads_keys=shape.keys_of != index,
        keys_are_values=shape.keys_are_values,
        pool=place.group,
        kv_layer=place.layer,
        state_first=state_first,
        window=spec.windows[index] or 0,
        rotary=ROTARIES[spec.layer_rotary[index]],
        scales_queries=spec.scales_queries(index),
        **{name: part.record for name, part in parts.items()},
    )


def _latent(spec: DecoderSpec) -> dict[str, float]:
    """Fields of the record about latents."""
    latent = spec.latent
    if latent is None:
        return {}
    return {
        "latent_rank": latent.rank,
        "query_rank": latent.query_rank,
        "plain_dim": latent.plain_dim,
        "value_dim": latent.value_dim,
        "latent_norm_eps": latent.norm_eps,
    }


def _delta_nets(spec: DecoderSpec) -> dict[str, int]:
    """Fields of the record about delta nets."""
    nets = spec.delta_nets
    if nets is None:
        return {}
    return {
        "delta_key_heads": nets.num_key_heads,
        "delta_value_heads": nets.num_value_heads,
        "delta_key_size": nets.key_size,
        "delta_value_size": nets.value_size,
        "delta_convolution_size": nets.convolution_size,
        "delta_order": nets.order,
    }


def _mamba(spec: DecoderSpec) -> dict[str, Any]:
    """Fields of the record about Mamba-2 layers."""
    mamba = spec.mamba
    if mamba is None:
        return {}
    return {
        "mamba_heads": mamba.num_heads,
        "mamba_groups": mamba.num_groups,
        "mamba_head_dim": mamba.head_dim,
        "mamba_state_size": mamba.state_size,
        "mamba_convolution_size": mamba.convolution_size,
        "mamba_scales": mamba.scales,
        "mamba_output_scale": mamba.output_scale,
    }


def _vectors(
    prefix: str, weights: DeltaNetWeights | MambaWeights | StreamWeights | None, names: str
) -> dict[str, records.Vector]:
    """The same of a layer's record: these of its vectors."""
    if weights is None:
        return {}
    return {f"{prefix}_{name}": vector_of(getattr(weights, name)) for name in names.split()}


def _joined_mixture(weights: JoinedMixtureWeights | None) -> dict[str, records.Vector]:
    """Fields of a layer's record about a mixture that joins the MLP."""
    if weights is None:
        return {}
    return {
        "router_norm": vector_of(weights.router_norm),
        "expert_norm": vector_of(weights.expert_norm),
        "expert_output_norm": vector_of(weights.expert_output_norm),
        "shared_output_norm": vector_of(weights.mlp_output_norm),
        "expert_factors": vector_of(weights.expert_factors),
    }


def _mixture(spec: DecoderSpec) -> dict[str, float]:
    """Fields of the record about experts."""
    experts = spec.experts
    if experts is None:
        return {}
    from ...models.experts_config import ExpertShares  # of few models

    return {
        "num_experts": experts.num,
        "num_experts_used": experts.num_used,
        "expert_size": experts.size,
        "shared_size": experts.shared_size,
        "num_expert_groups": experts.num_groups,
        "num_expert_groups_used": experts.num_groups_used,
        "expert_sigmoid": experts.shares is ExpertShares.SIGMOID,
        "expert_scores_wide": experts.wide_scores,
        "expert_sum_eps": experts.sum_eps,
        "expert_factor": experts.factor,
        "expert_weights_sum_to_1": experts.sum_to_1,
        "expert_weights_rounded": experts.rounds_weights,
        "experts_weigh_inputs": experts.weighs_inputs,
        "swiglu_alpha": 0.0 if experts.swiglu is None else experts.swiglu.alpha,
        "swiglu_limit": 0.0 if experts.swiglu is None else experts.swiglu.limit,
    }


def turn_tables(spec: DecoderSpec) -> tuple[TurnTable, TurnTable | None]:
    """A decoder's main table, and the local one where it has one."""
    dtype = DType.F32 if spec.wide_rotary else spec.dtype
    local = spec.local_rotary
    return TurnTable(spec.rotary, dtype), None if local is None else TurnTable(local, dtype)
