"""The features of decoders that the native core implements, and its refusals of all others, by name."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ...models.executor import SIZES, Accepts, any_of, one_of, refusal_of, refusal_of_formats
from ...models.matrices import DecoderWeights
from ...models.spec import DecoderSpec
from ...tensors import DType
from .operations import (
    ACTIVATIONS,
    DELTA_KEY_STEP,
    MAMBA_STATE_STEP,
    MAX_CONVOLUTION,
    MAX_DELTA_KEY,
    MAX_HEAD_DIM,
    MAX_MAMBA_STATE,
    MAX_STREAMS,
    NORMS,
    ROTARIES,
)
from .weights import WEIGHTS, refusal_of_tensors

NAME = "native"
REORDERED = "experts with columns in an order of their own, or such products with latents (GPTQ's desc_act)"

IMPLEMENTED: Mapping[str, Accepts] = {
    **SIZES,
    **any_of(
        "num_kv_heads layer_shapes layer_inputs layer_inputs.size layer_inputs.vocab_size "
        "layer_inputs.default_row layer_inputs.rounds_factors streams streams.active streams.has_scales "
        "laurel_rank gate_cuts layer_scalars value_norms input_norms output_norms inner_norms rounds_inputs "
        "score_cap logit_cap embedding_scale residual_scale logits_scale local_rotary local_rotary.dim "
        "local_rotary.frequencies local_rotary.factor wide_rotary joint_head_norms late_head_norms "
        "is_parallel parallel_norms interleaved_qkv learned_positions experts experts.num experts.num_used "
        "experts.size experts.layers experts.sum_to_1 experts.rounds_weights experts.has_bias "
        "experts.swiglu experts.swiglu.alpha experts.swiglu.limit experts.shares experts.wide_scores "
        "experts.has_correction experts.num_groups experts.num_groups_used experts.sum_eps experts.factor "
        "experts.shared_size experts.has_shared_gate experts.weighs_inputs experts.joins_mlp convolutions "
        "convolutions.layers convolutions.has_bias latent latent.rank latent.query_rank latent.plain_dim "
        "latent.value_dim latent.norm_eps delta_nets delta_nets.num_key_heads delta_nets.num_value_heads "
        "delta_nets.value_size delta_nets.layers delta_nets.order mamba mamba.num_heads mamba.num_groups "
        "mamba.head_dim mamba.layers mamba.has_bias mamba.has_convolution_bias mamba.has_output_bias "
        "mamba.has_norm mamba.is_parallel mamba.scales mamba.output_scale sublayers mlp_output_scale "
        "gate_scale attention_output_scale gated_attention sinks rotary.interleaved max_context windows "
        "chunked_windows query_scaling query_scaling.interval query_scaling.strength query_scaling.layers "
        "is_bidirectional qkv_bias output_bias mlp_bias gated_mlp norm_bias head_bias head_norms tied_head "
        "rotary_axes takes_images num_deep_rows whole_images windowed_images source_len rotary.dim "
        "rotary.frequencies rotary.factor"
    ),
    "dtype": one_of(DType.BF16, DType.F32),
    "head_dim": lambda head_dim: head_dim <= MAX_HEAD_DIM,
    "activation": one_of(*ACTIVATIONS),
    "norm": one_of(*NORMS),
    "convolutions.size": lambda size: size <= MAX_CONVOLUTION,
    "delta_nets.convolution_size": lambda size: size <= MAX_CONVOLUTION,
    "delta_nets.key_size": lambda size: size <= MAX_DELTA_KEY and size % DELTA_KEY_STEP == 0,
    "streams.num": lambda num: num <= MAX_STREAMS,
    "mamba.convolution_size": lambda size: size <= MAX_CONVOLUTION,
    "mamba.state_size": lambda size: size <= MAX_MAMBA_STATE and size % MAMBA_STATE_STEP == 0,
    "layer_rotary": lambda rotaries: set(rotaries) <= set(ROTARIES),
}


def refusal(spec: DecoderSpec, weights: DecoderWeights) -> str | None:
    """Why the core cannot compute this model; None where it can."""
    return (
        refusal_of_spec(spec)
        or refusal_of_tensors([weights.embeddings.weight])
        or refusal_of_formats(weights, WEIGHTS, NAME)
        or (f"{NAME} does not implement {REORDERED}" if _may_reorder_experts(weights) else None)
    )


def _may_reorder_experts(weights: DecoderWeights) -> bool:
    mixtures = [layer for layer in weights.layers if layer.experts]
    experts = itertools.chain(*(layer.experts for layer in mixtures))
    products = itertools.chain(
        (product for layer in mixtures for product in (layer.router, layer.shared_gate)),
        (layer.key_value_up for layer in weights.layers),
        *((expert.gate_up, expert.down) for expert in experts),
    )
    return any(each is not None and each.may_reorder_columns for each in products)


def refusal_of_spec(spec: DecoderSpec) -> str | None:
    """Likewise, whatever its weights are."""
    as_the_main_one = {"local_rotary.interleaved": one_of(spec.rotary.interleaved)}
    return refusal_of(spec, {**IMPLEMENTED, **as_the_main_one}, NAME)
