"""The core's structs as ctypes sees them: `core.h` says what every field means.

A struct that is the argument of a function begins with its own size. `check` compares all sizes with those of a
library.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

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
        ("table", _POINTER),
        ("scale", _POINTER),
        ("tokens", _POINTER),
        ("out", _POINTER),
        ("num_rows", _INT64),
        ("num_columns", _INT64),
        ("table_dtype", _INT32),
        ("scale_dtype", _INT32),
        ("dtype", _INT32),
        ("group_size", _INT32),
        ("factor", _FLOAT),
        ("reserved", _INT32),
    )


class AddArgs(ctypes.Structure):
    """`tn_add_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("x", _POINTER),
        ("more", _POINTER),
        ("num_rows", _INT64),
        ("num_columns", _INT64),
        ("more_stride", _INT64),
        ("dtype", _INT32),
        ("reserved", _INT32),
    )


class NormArgs(ctypes.Structure):
    """`tn_norm_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("x", _POINTER),
        ("out", _POINTER),
        ("weight", Vector),
        ("bias", Vector),
        ("num_rows", _INT64),
        ("num_columns", _INT64),
        ("eps", _FLOAT),
        ("dtype", _INT32),
        ("kind", _INT32),
        ("reserved", _INT32),
    )


class ActivateArgs(ctypes.Structure):
    """`tn_activate_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("gate", _POINTER),
        ("up", _POINTER),
        ("out", _POINTER),
        ("num_rows", _INT64),
        ("num_columns", _INT64),
        ("in_stride", _INT64),
        ("out_stride", _INT64),
        ("activation", _INT32),
        ("dtype", _INT32),
    )


class KV(ctypes.Structure):
    """`tn_kv`"""

    _fields_ = (
        ("data", _POINTER),
        ("scale", _POINTER),
        ("num_slots", _INT64),
        ("block_size", _INT64),
        ("dtype", _INT32),
        ("scale_dtype", _INT32),
    )


class HeadsArgs(ctypes.Structure):
    """`tn_heads_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("kv", ctypes.POINTER(KV)),
        ("heads", _POINTER),
        ("turns", _POINTER),
        ("turn", _POINTER),
        ("slots", _POINTER),
        ("query_norm", Vector),
        ("key_norm", Vector),
        ("layer", _INT64),
        ("num_rows", _INT64),
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
        ("rotary_dim", _INT64),
        ("norm_eps", _FLOAT),
        ("dtype", _INT32),
        ("norm", _INT32),
        ("joint_norms", _INT32),
        ("wide_turns", _INT32),
        ("interleaved", _INT32),
    )


class SpanRecord(ctypes.Structure):
    """`tn_span`"""

    _fields_ = (("start", _INT64), ("length", _INT64), ("context_len", _INT64), ("blocks", _POINTER))


class AttentionArgs(ctypes.Structure):
    """`tn_attention_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("kv", ctypes.POINTER(KV)),
        ("spans", _POINTER),
        ("queries", _POINTER),
        ("out", _POINTER),
        ("num_spans", _INT64),
        ("query_stride", _INT64),
        ("out_stride", _INT64),
        ("layer", _INT64),
        ("window", _INT64),
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
        ("scale", _FLOAT),
        ("dtype", _INT32),
        ("cap", _FLOAT),
        ("reserved", _INT32),
        ("sinks", Vector),
    )


class Distances(ctypes.Structure):
    """`tn_distances`"""

    _fields_ = (
        ("bias", _POINTER),
        ("keys", _POINTER),
        ("queries", _POINTER),
        ("buckets", _POINTER),
        ("reach", _INT64),
    )


class TextAttentionArgs(ctypes.Structure):
    """`tn_text_attention_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("qkv", _POINTER),
        ("out", _POINTER),
        ("starts", _POINTER),
        ("distances", Distances),
        ("num_texts", _INT64),
        ("num_heads", _INT64),
        ("head_dim", _INT64),
        ("window", _INT64),
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
        ("num_parts", _INT64),
        ("num_in", _INT64),
        ("num_out", _INT64),
    )


class Expert(ctypes.Structure):
    """`tn_expert`"""

    _fields_ = (("gate_up", ProjectionRecord), ("down", ProjectionRecord))


class DecoderLayerRecord(ctypes.Structure):
    """`tn_decoder_layer`"""

    _fields_ = (
        ("attention_norm", Vector),
        ("query_norm", Vector),
        ("key_norm", Vector),
        ("attention_output_norm", Vector),
        ("mlp_norm", Vector),
        ("mlp_output_norm", Vector),
        ("qkv", ProjectionRecord),
        ("output", ProjectionRecord),
        ("gate_up", ProjectionRecord),
        ("down", ProjectionRecord),
        ("router", ProjectionRecord),
        ("correction", Vector),
        ("experts", ctypes.POINTER(Expert)),
        ("sinks", Vector),
        ("convolution", Vector),
        ("convolution_bias", Vector),
        ("kv_layer", _INT64),
        ("window", _INT64),
        ("rotary", _INT32),
        ("reserved", _INT32),
    )


class DecoderRecord(ctypes.Structure):
    """`tn_decoder`"""

    _fields_ = (
        ("layers", ctypes.POINTER(DecoderLayerRecord)),
        ("hidden_size", _INT64),
        ("intermediate_size", _INT64),
        ("num_heads", _INT64),
        ("num_kv_heads", _INT64),
        ("head_dim", _INT64),
        ("rotary_dim", _INT64),
        ("permuted_size", _INT64),
        ("num_experts", _INT64),
        ("num_experts_used", _INT64),
        ("expert_size", _INT64),
        ("shared_size", _INT64),
        ("num_expert_groups", _INT64),
        ("num_expert_groups_used", _INT64),
        ("convolution_size", _INT64),
        ("norm_eps", _FLOAT),
        ("attention_scale", _FLOAT),
        ("score_cap", _FLOAT),
        ("residual_scale", _FLOAT),
        ("activation", _INT32),
        ("dtype", _INT32),
        ("norm", _INT32),
        ("joint_norms", _INT32),
        ("wide_turns", _INT32),
        ("interleaved", _INT32),
        ("parallel", _INT32),
        ("expert_weights_sum_to_1", _INT32),
        ("expert_weights_rounded", _INT32),
        ("swiglu_alpha", _FLOAT),
        ("swiglu_limit", _FLOAT),
        ("expert_sigmoid", _INT32),
        ("expert_scores_wide", _INT32),
        ("expert_sum_eps", _FLOAT),
        ("expert_factor", _FLOAT),
        ("reserved", _INT32),
    )


class DecoderStepArgs(ctypes.Structure):
    """`tn_decoder_step_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("model", ctypes.POINTER(DecoderRecord)),
        ("kv", ctypes.POINTER(KV)),
        ("spans", _POINTER),
        ("turns", _POINTER),
        ("local_turns", _POINTER),
        ("turn", _POINTER),
        ("slots", _POINTER),
        ("x", _POINTER),
        ("scratch", _POINTER),
        ("chosen", _POINTER),
        ("num_spans", _INT64),
        ("num_rows", _INT64),
        ("first", _INT64),
        ("end", _INT64),
        ("half", _INT32),
        ("reserved", _INT32),
    )


class EncoderLayerRecord(ctypes.Structure):
    """`tn_encoder_layer`"""

    _fields_ = (
        ("qkv", ProjectionRecord),
        ("output", ProjectionRecord),
        ("up", ProjectionRecord),
        ("down", ProjectionRecord),
        ("attention_norm_weight", Vector),
        ("attention_norm_bias", Vector),
        ("mlp_norm_weight", Vector),
        ("mlp_norm_bias", Vector),
        ("position_keys", _POINTER),
        ("position_queries", _POINTER),
        ("window", _INT64),
    )


class EncoderRecord(ctypes.Structure):
    """`tn_encoder`"""

    _fields_ = (
        ("layers", ctypes.POINTER(EncoderLayerRecord)),
        ("hidden_size", _INT64),
        ("intermediate_size", _INT64),
        ("num_heads", _INT64),
        ("head_dim", _INT64),
        ("rotary_dim", _INT64),
        ("norm_eps", _FLOAT),
        ("attention_scale", _FLOAT),
        ("activation", _INT32),
        ("dtype", _INT32),
        ("pre_norm", _INT32),
        ("gated", _INT32),
    )


class EncoderStepArgs(ctypes.Structure):
    """`tn_encoder_step_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("model", ctypes.POINTER(EncoderRecord)),
        ("starts", _POINTER),
        ("turns", _POINTER),
        ("local_turns", _POINTER),
        ("turn", _POINTER),
        ("bias", _POINTER),
        ("buckets", _POINTER),
        ("x", _POINTER),
        ("scratch", _POINTER),
        ("reach", _INT64),
        ("num_texts", _INT64),
        ("num_rows", _INT64),
        ("first", _INT64),
        ("end", _INT64),
    )


class MeanArgs(ctypes.Structure):
    """`tn_mean_args`"""

    _fields_ = (
        ("size", ctypes.c_size_t),
        ("x", _POINTER),
        ("starts", _POINTER),
        ("out", _POINTER),
        ("num_texts", _INT64),
        ("num_columns", _INT64),
        ("dtype", _INT32),
        ("reserved", _INT32),
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
    "tn_attention_args": AttentionArgs,
    "tn_distances": Distances,
    "tn_text_attention_args": TextAttentionArgs,
    "tn_part": PartRecord,
    "tn_projection": ProjectionRecord,
    "tn_expert": Expert,
    "tn_decoder_layer": DecoderLayerRecord,
    "tn_decoder": DecoderRecord,
    "tn_decoder_step_args": DecoderStepArgs,
    "tn_encoder_layer": EncoderLayerRecord,
    "tn_encoder": EncoderRecord,
    "tn_encoder_step_args": EncoderStepArgs,
    "tn_mean_args": MeanArgs,
}


def check(library: Library) -> None:
    """Raises `NativeLibraryError` where the library was built from other declarations."""
    for name, declared in STRUCTS.items():
        library.check_struct(name, declared)
