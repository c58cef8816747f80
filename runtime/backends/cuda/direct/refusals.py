"""The features of models and the formats of matrices that the direct path computes, and its refusals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ....models.encoder_weights import EncoderWeights
from ....models.executor import SIZES, Accepts, any_of, none_of, one_of, refusal_of
from ....models.fields import Norm
from ....models.gptq_awq import GptqAwqMatrix
from ....models.matrices import DecoderLayerWeights, DecoderWeights, Projection
from ....models.pooling import HOST_ACTIVATIONS
from ....models.spec import DecoderSpec, EncoderSpec
from ....tensors import DType
from ..implemented import IMPLEMENTED
from .experts import MAX_CHOSEN, MAX_EXPERTS, refusal_of_experts
from .products import WEIGHT_KINDS, format_of, matrices_of
from .sources import DTYPES, HEAD_DIMS, LATENT_DIM, LATENT_RANK

NORMS = (Norm.RMS, Norm.RMS_WIDE, Norm.RMS_PLUS_ONE, Norm.LAYER)  # as the kernels number them
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "tanh": 4}
_EIGHT = 8  # numbers that are read at once

FEATURES: dict[str, Accepts] = {
    **IMPLEMENTED,
    **any_of(
        "is_bidirectional input_norms output_norms is_parallel residual_scale logits_scale score_cap logit_cap "
        "rotary.interleaved local_rotary local_rotary.frequencies local_rotary.factor layer_rotary "
        "wide_rotary joint_head_norms experts experts.size experts.layers experts.sum_to_1 "
        "experts.rounds_weights experts.has_bias experts.shares experts.wide_scores experts.has_correction "
        "experts.num_groups experts.num_groups_used experts.sum_eps experts.factor experts.shared_size "
        "experts.has_shared_gate latent latent.query_rank latent.norm_eps"
    ),
    "dtype": one_of(*DTYPES),
    "norm": one_of(*NORMS),
    "experts.num": lambda num: num <= MAX_EXPERTS,
    "experts.num_used": lambda num: num <= MAX_CHOSEN,
    **none_of("experts.swiglu experts.weighs_inputs experts.joins_mlp"),
    "head_dim": lambda dim: dim % _EIGHT == 0 and dim <= HEAD_DIMS[-1],
    "latent.rank": lambda rank: rank % 32 == 0 and rank <= LATENT_RANK,
    "latent.plain_dim": lambda dim: dim % 16 == 0,
    "latent.value_dim": lambda dim: dim % _EIGHT == 0,
    "activation": one_of(*ACTIVATIONS),
    "rotary.dim": lambda dim: dim % 2 == 0,
}
OF_ENCODERS: dict[str, Accepts] = {
    **SIZES,
    **any_of(
        "gated pre_norm embedding_size embedding_norm final_norm norm_bias qkv_bias output_bias mlp_bias "
        "max_positions position_offset type_vocab_size windows rotary rotary.dim rotary.frequencies "
        "rotary.factor local_rotary local_rotary.dim local_rotary.frequencies local_rotary.factor "
        "position_bias position_bias.num_buckets position_bias.max_distance pooling normalize num_labels "
        "head_bias head_norm"
    ),
    "dtype": one_of(*DTYPES),
    "norm": one_of(Norm.LAYER),
    "head_dim": lambda dim: dim % _EIGHT == 0 and dim <= HEAD_DIMS[-1],
    "activation": one_of(*ACTIVATIONS),
    "head_activation": one_of(*ACTIVATIONS),
    "dense": lambda layers: all(layer.activation in (None, *HOST_ACTIVATIONS) for layer in layers),
    **none_of("output_norms head_norms is_bounded disentangled rotary.interleaved local_rotary.interleaved"),
    "turned_parts": one_of(1),
}
_NAME = "the device's direct path"


def refusal_of_encoder(spec: EncoderSpec, weights: EncoderWeights) -> str | None:
    """Why the kernels cannot compute this encoder; None where they can."""
    reason = refusal_of(spec, OF_ENCODERS, _NAME)
    if reason is not None:
        return reason
    tables = [each for each in (weights.words, weights.types, weights.positions) if each is not None]
    if len({table.dtype for table in tables}) > 1:
        return f"{_NAME} does not take embeddings of tokens, types and positions in several dtypes"
    return _refusal_of_products(projections_of_encoder(weights), spec.dtype)


def refusal(spec: DecoderSpec, weights: DecoderWeights) -> str | None:
    """Why the kernels cannot compute this model; None where they can."""
    of_local = {
        "local_rotary.dim": one_of(spec.rotary.dim),
        "local_rotary.interleaved": one_of(spec.rotary.interleaved),
    }
    own: dict[str, Accepts] = {}
    if spec.experts is not None:
        own["is_parallel"] = one_of(False)
    if spec.latent is not None:
        own["head_dim"] = lambda dim: dim <= LATENT_DIM
        own["rotary.dim"] = lambda dim: dim % _EIGHT == 0
    reason = refusal_of(spec, FEATURES | of_local | own, _NAME)
    if reason is not None:
        return reason
    table = weights.embeddings
    expected = (spec.dtype, DType.F32) if table.scale is None else (DType.I8,)
    if table.weight.dtype not in expected or (table.scale and table.scale.dtype not in WEIGHT_KINDS):
        return f"{_NAME} does not take embeddings in {table.weight.dtype.label}"
    of_experts = [
        each for layer in weights.layers for expert in layer.experts for each in (expert.gate_up, expert.down)
    ]
    reason = _refusal_of_products((*projections_of(weights), *of_experts), spec.dtype)
    if reason is not None:
        return reason
    reasons = (refusal_of_experts(layer, spec.dtype, _NAME) for layer in weights.layers)
    return next((reason for reason in reasons if reason is not None), None)


def _refusal_of_products(projections: Iterable[Projection], dtype: DType) -> str | None:
    for projection in projections:
        if not matrices_of(projection):
            return (
                f"{_NAME} does not take matrices that are stored with the inputs first, of three values, or of "
                "bitsandbytes"
            )
        for matrix in matrices_of(projection):
            if format_of(matrix, dtype) is None and isinstance(matrix, GptqAwqMatrix):
                return (
                    f"{_NAME} takes matrices of GPTQ, AWQ and compressed-tensors in 4 bits and groups of 32 columns or "
                    f"more, without an order of columns (desc_act), and not {matrix.name}"
                )
            if format_of(matrix, dtype) is None:
                return (
                    f"{_NAME} does not multiply with a {type(matrix).__name__} [{matrix.num_out}, {matrix.num_in}] in "
                    f"{matrix.weight.dtype.label}"
                )
    return None


def projections_of_encoder(weights: EncoderWeights) -> list[Projection]:
    """Those on the device."""
    of_layers = [each for layer in weights.layers for each in (layer.qkv, layer.output, layer.up, layer.down)]
    every = (weights.projection, *of_layers, weights.dense, weights.scores)
    return [each for each in every if each is not None]


def projections_of(weights: DecoderWeights) -> Iterator[Projection]:
    """All but those of experts."""
    yield weights.head
    for layer in weights.layers:
        yield from _projections(layer)


def ordered_matrices(weights: DecoderWeights) -> dict[int, list[GptqAwqMatrix]]:
    """Matrices whose content must say that their columns are in order, by layer; the head's by the number of layers."""
    found: dict[int, list[GptqAwqMatrix]] = {}
    for number in range(len(weights.layers) + 1):
        projections = [weights.head]
        if number < len(weights.layers):
            layer = weights.layers[number]
            of_experts = [each for expert in layer.experts for each in (expert.gate_up, expert.down)]
            projections = [*_projections(layer), *of_experts]
        matrices = [matrix for each in projections for matrix in matrices_of(each)]
        own = [each for each in matrices if isinstance(each, GptqAwqMatrix) and each.order is not None]
        if own:
            found[number] = own
    return found


def _projections(layer: DecoderLayerWeights) -> list[Projection]:
    of_attention = (layer.qkv, layer.query_up, layer.key_value_up, layer.output)
    every = (*of_attention, layer.router, layer.shared_gate, layer.gate_up, layer.down)
    return [each for each in every if each is not None]
