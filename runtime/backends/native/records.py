"""The core's structs as ctypes sees them: `core.h` says what every field means.

A struct that is the argument of a function begins with its own size. `check` compares all sizes with those of a
library.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from ....loader.native.library import fields
from .products import LinearArgs, MatrixRecord

if TYPE_CHECKING:
    from ....loader.native.library import Library

_POINTER, _INT64, _INT32, _FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float


class Vector(ctypes.Structure):
    """`tn_vector`"""

    _fields_ = (("data", _POINTER), ("dtype", _INT32), ("reserved", _INT32))


class EmbedArgs(ctypes.Structure):
    """`tn_embed_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(_POINTER, "table scale tokens out"),
        *fields(_INT64, "num_rows num_columns"),
        *fields(_INT32, "table_dtype scale_dtype dtype group_size"),
        ("factor", _FLOAT),
        ("reserved", _INT32),
    )


class AddArgs(ctypes.Structure):
    """`tn_add_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(_POINTER, "x more"),
        *fields(_INT64, "num_rows num_columns more_stride"),
        ("dtype", _INT32),
        ("factor", _FLOAT),
    )


class NormArgs(ctypes.Structure):
    """`tn_norm_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(_POINTER, "x out"),
        *fields(Vector, "weight bias"),
        *fields(_INT64, "num_rows num_columns"),
        ("eps", _FLOAT),
        *fields(_INT32, "dtype kind"),
        ("factor", _FLOAT),
    )


class ActivateArgs(ctypes.Structure):
    """`tn_activate_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(_POINTER, "gate up out"),
        *fields(_INT64, "num_rows num_columns in_stride out_stride"),
        *fields(_INT32, "activation dtype"),
    )


class KV(ctypes.Structure):
    """`tn_kv`"""

    _fields_ = (
        *fields(_POINTER, "data scale"),
        *fields(_INT64, "num_slots block_size"),
        *fields(_INT32, "dtype scale_dtype"),
    )


class HeadsArgs(ctypes.Structure):
    """`tn_heads_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("kv", ctypes.POINTER(KV)),
        *fields(_POINTER, "heads turns turn slots query_scales"),
        *fields(Vector, "query_norm key_norm value_norm"),
        *fields(_INT64, "layer num_rows num_heads num_kv_heads head_dim rotary_dim"),
        ("norm_eps", _FLOAT),
        *fields(_INT32, "dtype norm joint_norms late_norms wide_turns interleaved keys_are_values"),
    )


class SpanRecord(ctypes.Structure):
    """`tn_span`"""

    _fields_ = (
        *fields(_INT64, "start length context_len"),
        *fields(_POINTER, "blocks state saves"),
        ("num_saves", _INT64),
    )


class SaveRecord(ctypes.Structure):
    """`tn_save`"""

    _fields_ = (("num_rows", _INT64), ("state", _POINTER))


class AttentionArgs(ctypes.Structure):
    """`tn_attention_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("kv", ctypes.POINTER(KV)),
        *fields(_POINTER, "spans queries out"),
        *fields(_INT64, "num_spans query_stride out_stride layer window num_heads num_kv_heads head_dim"),
        ("latent_rank", _INT64),
        ("scale", _FLOAT),
        ("dtype", _INT32),
        ("cap", _FLOAT),
        ("bidirectional", _INT32),
        ("sinks", Vector),
        ("ends", _POINTER),
        *fields(_INT32, "chunked reserved"),
        *fields(_INT64, "first_key last_key"),
    )


class Distances(ctypes.Structure):
    """`tn_distances`"""

    _fields_ = (
        *fields(_POINTER, "bias keys queries buckets"),
        ("reach", _INT64),
    )


class TextAttentionArgs(ctypes.Structure):
    """`tn_text_attention_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(_POINTER, "qkv out starts"),
        ("distances", Distances),
        *fields(_INT64, "num_texts num_heads head_dim window"),
        ("scale", _FLOAT),
        ("dtype", _INT32),
    )


class PartRecord(ctypes.Structure):
    """`tn_part`"""

    _fields_ = (("matrix", MatrixRecord), ("columns", _POINTER))


class ProjectionRecord(ctypes.Structure):
    """`tn_projection`"""

    _fields_ = (
        ("parts", ctypes.POINTER(PartRecord)),
        *fields(_INT64, "num_parts num_in num_out"),
        ("inputs", _POINTER),
    )


class Expert(ctypes.Structure):
    """`tn_expert`"""

    _fields_ = (("gate_up", ProjectionRecord), ("down", ProjectionRecord))


class DecoderLayerRecord(ctypes.Structure):
    """`tn_decoder_layer`"""

    _fields_ = (
        *fields(Vector, "attention_norm query_norm key_norm attention_output_norm mlp_norm mlp_output_norm"),
        *fields(Vector, "attention_norm_bias mlp_norm_bias attention_inner_norm mlp_inner_norm"),
        *fields(ProjectionRecord, "qkv query_up key_up value_up output gate_up down router shared_gate"),
        *fields(ProjectionRecord, "mamba_in mamba_out"),
        *fields(Vector, "correction router_norm expert_norm expert_output_norm shared_output_norm"),
        ("expert_factors", Vector),
        ("experts", ctypes.POINTER(Expert)),
        *fields(Vector, "sinks convolution convolution_bias value_norm"),
        *fields(ProjectionRecord, "input_gate input_up"),
        *fields(Vector, "input_norm scalar"),
        *fields(ProjectionRecord, "laurel_down laurel_up"),
        *fields(Vector, "laurel_norm stream_norm stream_router stream_predictions stream_corrections"),
        ("stream_scale", Vector),
        *fields(_INT64, "num_kv_heads head_dim pool kv_layer"),
        *fields(Vector, "delta_taps delta_log delta_bias delta_norm mamba_taps mamba_taps_bias mamba_log"),
        *fields(Vector, "mamba_step_bias mamba_skip mamba_norm"),
        *fields(_INT64, "state_first window"),
        *fields(_INT32, "rotary scales_queries reads_keys keys_are_values cuts_gates"),
        ("gate_cut", _FLOAT),
        *fields(Vector, "cross_norm cross_norm_bias"),
        *fields(ProjectionRecord, "cross_query cross_keys cross_output"),
    )


class DecoderRecord(ctypes.Structure):
    """`tn_decoder`"""

    _fields_ = (
        ("layers", ctypes.POINTER(DecoderLayerRecord)),
        *fields(_INT64, "hidden_size intermediate_size num_heads num_kv_heads head_dim rotary_dim"),
        *fields(_INT64, "local_rotary_dim num_layers layer_input_size"),
        *fields(_INT64, "permuted_size num_experts num_experts_used expert_size shared_size"),
        *fields(_INT64, "num_expert_groups num_expert_groups_used latent_rank query_rank plain_dim"),
        *fields(_INT64, "value_dim convolution_size delta_key_heads delta_value_heads delta_key_size"),
        *fields(_INT64, "delta_value_size delta_convolution_size delta_order"),
        *fields(_INT64, "mamba_heads mamba_groups mamba_head_dim mamba_state_size mamba_convolution_size"),
        *fields(_INT64, "laurel_rank num_streams active_stream"),
        *fields(_FLOAT, "norm_eps attention_scale score_cap residual_scale"),
        *fields(_INT32, "activation dtype plain_mlp norm joint_norms late_norms wide_turns interleaved"),
        *fields(_INT32, "parallel expert_weights_sum_to_1 expert_weights_rounded"),
        *fields(_FLOAT, "swiglu_alpha swiglu_limit"),
        *fields(_INT32, "expert_sigmoid expert_scores_wide"),
        *fields(_FLOAT, "expert_sum_eps expert_factor"),
        ("bidirectional", _INT32),
        ("latent_norm_eps", _FLOAT),
        *fields(_INT32, "gated_attention interleaved_qkv rounds_inputs chunked_windows experts_weigh_inputs"),
        *fields(_FLOAT, "mlp_residual_scale gate_scale attention_output_scale mamba_output_scale"),
        ("mamba_scales", _FLOAT * 5),
        ("ends_in_windows", _INT32),
        ("source_len", _INT64),
    )


class DecoderStepArgs(ctypes.Structure):
    """`tn_decoder_step_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("model", ctypes.POINTER(DecoderRecord)),
        ("kv", ctypes.POINTER(KV)),
        *fields(_POINTER, "spans turns local_turns turn slots x scratch ends chosen query_scales"),
        *fields(_POINTER, "layer_inputs cross_queries"),
        *fields(_INT64, "num_spans num_rows first end"),
        *fields(_INT32, "half reserved"),
    )


class MatchArgs(ctypes.Structure):
    """`tn_match_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(_POINTER, "x mean"),
        *fields(_INT64, "num_rows num_streams num_columns"),
        *fields(_INT32, "dtype reserved"),
    )


class EncoderLayerRecord(ctypes.Structure):
    """`tn_encoder_layer`"""

    _fields_ = (
        *fields(ProjectionRecord, "qkv output up down"),
        *fields(Vector, "attention_norm_weight attention_norm_bias mlp_norm_weight mlp_norm_bias"),
        *fields(_POINTER, "position_keys position_queries"),
        ("window", _INT64),
        *fields(Vector, "attention_output_norm mlp_output_norm query_norm key_norm value_norm"),
        ("bounds", _POINTER),
    )


class EncoderRecord(ctypes.Structure):
    """`tn_encoder`"""

    _fields_ = (
        ("layers", ctypes.POINTER(EncoderLayerRecord)),
        *fields(_INT64, "hidden_size intermediate_size num_heads head_dim rotary_dim"),
        *fields(_FLOAT, "norm_eps attention_scale"),
        *fields(_INT32, "activation dtype pre_norm gated norm turned_parts bounded"),
    )


class EncoderStepArgs(ctypes.Structure):
    """`tn_encoder_step_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("model", ctypes.POINTER(EncoderRecord)),
        *fields(_POINTER, "starts turns local_turns turn bias buckets x scratch"),
        *fields(_INT64, "reach num_texts num_rows first end"),
    )


class MeanArgs(ctypes.Structure):
    """`tn_mean_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        *fields(_POINTER, "x starts out"),
        *fields(_INT64, "num_texts num_columns"),
        *fields(_INT32, "dtype reserved"),
    )


STRUCTS: dict[str, type[ctypes.Structure]] = {
    "tn_matrix": MatrixRecord,
    "tn_linear_args": LinearArgs,
    "tn_vector": Vector,
    "tn_embed_args": EmbedArgs,
    "tn_add_args": AddArgs,
    "tn_norm_args": NormArgs,
    "tn_activate_args": ActivateArgs,
    "tn_kv": KV,
    "tn_heads_args": HeadsArgs,
    "tn_span": SpanRecord,
    "tn_save": SaveRecord,
    "tn_attention_args": AttentionArgs,
    "tn_distances": Distances,
    "tn_text_attention_args": TextAttentionArgs,
    "tn_part": PartRecord,
    "tn_projection": ProjectionRecord,
    "tn_expert": Expert,
    "tn_decoder_layer": DecoderLayerRecord,
    "tn_decoder": DecoderRecord,
    "tn_decoder_step_args": DecoderStepArgs,
    "tn_match_args": MatchArgs,
    "tn_encoder_layer": EncoderLayerRecord,
    "tn_encoder": EncoderRecord,
    "tn_encoder_step_args": EncoderStepArgs,
    "tn_mean_args": MeanArgs,
}


def check(library: Library) -> None:
    """Raises `NativeLibraryError` where the library was built from other declarations."""
    for name, declared in STRUCTS.items():
        library.check_struct(name, declared)
