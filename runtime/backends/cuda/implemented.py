"""The features of decoders that the kernels of a CUDA device implement.

Imports no torch: a machine without a device describes models by it, too.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...models.decoder_config import LayerRotary
from ...models.executor import SIZES, WITHOUT_NATIVE, Accepts, any_of, any_value, none_of, one_of, refusal_of
from ...models.fields import Norm
from ...models.spec import DecoderSpec
from . import variants as v

IMPLEMENTED: Mapping[str, Accepts] = {
    **SIZES,
    **WITHOUT_NATIVE,
    **none_of(
        "output_norms inner_norms rounds_inputs is_parallel parallel_norms interleaved_qkv "
        "learned_positions experts convolutions latent rotary.interleaved local_rotary wide_rotary "
        "chunked_windows query_scaling is_bidirectional norm_bias head_bias joint_head_norms "
        "late_head_norms sinks"
    ),
    **any_of(
        "num_kv_heads head_dim rotary.dim rotary.frequencies rotary.factor max_context windows qkv_bias "
        "output_bias mlp_bias head_norms tied_head"
    ),
    "dtype": any_value,  # `variants.why_not` checks it
    "norm": one_of(Norm.RMS),
    "input_norms": one_of(True),
    "score_cap": one_of(None),
    "logit_cap": one_of(None),
    "embedding_scale": any_value,  # torch computes the rows
    "residual_scale": one_of(1.0),
    "logits_scale": one_of(1.0),
    "activation": one_of(*v.ACTIVATIONS),
    "layer_rotary": lambda tables: set(tables) == {LayerRotary.MAIN},
    "gated_mlp": one_of(True),
}


def refusal_of_spec(spec: DecoderSpec) -> str | None:
    """Why the kernels cannot compute this model, whatever its weights are; None where they can."""
    return refusal_of(spec, IMPLEMENTED, "a device's kernels")
