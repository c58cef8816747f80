"""The features of decoders that the kernels of a CUDA device implement.

Imports no torch: a machine without a device describes models by it, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...models.decoder_config import LayerRotary, Sublayers
from ...models.executor import SIZES, Accepts, any_value, one_of, refusal_of
from ...models.fields import Norm
from ...models.spec import DecoderSpec, are_alike
from . import variants as v

IMPLEMENTED: Mapping[str, Accepts] = {
    **SIZES,
    "dtype": any_value,  # `variants.why_not` checks it
    "num_kv_heads": any_value,
    "head_dim": any_value,
    "layer_shapes": are_alike,
    "layer_inputs": one_of(None),
    "streams": one_of(None),
    "laurel_rank": one_of(0),
    "gate_cuts": lambda cuts: set(cuts) == {None},
    "layer_scalars": one_of(False),
    "value_norms": one_of(False),
    "norm": one_of(Norm.RMS),
    "input_norms": one_of(True),
    "output_norms": one_of(False),
    "inner_norms": one_of(False),
    "rounds_inputs": one_of(False),
    "is_parallel": one_of(False),
    "parallel_norms": one_of(False),
    "interleaved_qkv": one_of(False),
    "learned_positions": one_of(False),
    "experts": one_of(None),
    "convolutions": one_of(None),
    "latent": one_of(None),
    "delta_nets": one_of(None),
    "mamba": one_of(None),
    "sublayers": lambda kinds: set(kinds) == {Sublayers.BOTH},
    **dict.fromkeys(("mlp_output_scale", "gate_scale", "attention_output_scale"), one_of(1.0)),
    "gated_attention": one_of(False),
    "score_cap": one_of(None),
    "logit_cap": one_of(None),
    "embedding_scale": any_value,  # torch computes the rows
    "residual_scale": one_of(1.0),
    "logits_scale": one_of(1.0),
    "activation": one_of(*v.ACTIVATIONS),
    "rotary.dim": any_value,
    "rotary.frequencies": any_value,
    "rotary.factor": any_value,
    "rotary.interleaved": one_of(False),
    "local_rotary": one_of(None),
    "layer_rotary": lambda tables: set(tables) == {LayerRotary.MAIN},
    "wide_rotary": one_of(False),
    "max_context": any_value,
    "windows": any_value,
    "chunked_windows": one_of(False),
    "query_scaling": one_of(None),
    "is_bidirectional": one_of(False),
    "qkv_bias": any_value,
    "output_bias": any_value,
    "mlp_bias": any_value,
    "gated_mlp": one_of(True),
    "norm_bias": one_of(False),
    "head_bias": one_of(False),
    "head_norms": any_value,
    "joint_head_norms": one_of(False),
    "late_head_norms": one_of(False),
    "sinks": one_of(False),
    "tied_head": any_value,
    "rotary_axes": one_of(()),
    "num_deep_rows": one_of(0),
    "takes_images": one_of(False),
    "whole_images": one_of(False),
    "windowed_images": one_of(False),
    "source_len": one_of(0),
}


def refusal_of_spec(spec: DecoderSpec) -> str | None:
    """Why the kernels cannot compute this model, whatever its weights are; None where they can."""
    return refusal_of(spec, IMPLEMENTED, "a device's kernels")
