"""Models of any architecture that transformers knows, over the weights of a load.

Building waits for all weights, because transformers takes them at once. Code that comes with a
model is never run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
import transformers

from ...errors import ModelError
from ...models.executor import ComputeDtype
from ...models.parameters import COMPUTE_DTYPES
from ...models.pooling_config import sentence_of
from ...weights import Weights
from ..torch.tensors import ComputePolicy, to_torch, torch_dtype
from .decoder import TransformersDecoder
from .encoder import TransformersEncoder

logger = logging.getLogger(__name__)

_DECODERS = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
_CLASSIFIERS = "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES"
# Floats that JSON lacks, as transformers writes them: {"__float__": "Infinity"}.
_SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}
_ENCODERS = ("MODEL_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES")


def build_with_transformers(
    config: Mapping[str, Any],
    weights: Weights,
    *,
    compute_dtype: str,
    modules: Any = None,
    pooling: Any = None,
    sentence_bert: Any = None,
    logit_score: Any = None,
    dense: Mapping[str, Any] | None = None,
    dense_weights: Mapping[str, Weights] | None = None,
) -> TransformersDecoder | TransformersEncoder:
    """Build the model that a parsed config.json describes. Blocks until all weights have arrived.

    `compute_dtype` is the value of `--compute-dtype`, the other arguments are those of
    `build_model`. Raises the load's error, and `ModelError` for an architecture that transformers
    does not know, or weights that do not fit.
    """
    architecture, kind = _kind_of(config)
    if logit_score is not None:
        raise ModelError(
            "--backend transformers does not score by the logits of tokens (LogitScore, or classifier_from_token)",
            hint="Choose another --backend.",
        )
    settings = _settings_of(config)
    names = list(weights.names())
    weights.gate(names)()
    tensors = {name: weights.tensor(name) for name in names}
    floats = [tensor.dtype for tensor in tensors.values() if tensor.dtype in COMPUTE_DTYPES]
    if not floats:
        raise ModelError("the model has no weights in bf16, fp16 or fp32")
    computes = ComputePolicy.of_this_machine(compute_dtype).choose(
        max(sorted(set(floats)), key=floats.count), is_quantised=False
    )
    logger.warning(
        "%s is computed by transformers %s, slowly: one sequence at a time, and its keys and values are in no pool",
        architecture,
        transformers.__version__,
    )
    module = _load(
        _class_of(architecture, kind), settings, {name: to_torch(t) for name, t in tensors.items()}, computes
    )
    if kind == "decoder":
        return TransformersDecoder(module, settings, computes)
    sentence = None
    if kind == "encoder":
        sentence = sentence_of(modules, pooling, dense or {}, int(settings.get_text_config().hidden_size))
    return TransformersEncoder(module, settings, computes, sentence, sentence_bert, dense_weights)


def _kind_of(config: Mapping[str, Any]) -> tuple[str, str]:
    """The architecture and its kind: "decoder", "classifier" or "encoder"."""
    from transformers.models.auto import modeling_auto

    architectures = config.get("architectures")
    names = architectures if isinstance(architectures, list) else []
    for name in names:
        for kind, mappings in (
            ("decoder", (_DECODERS,)),
            ("classifier", (_CLASSIFIERS,)),
            ("encoder", _ENCODERS),
        ):
            if any(name in getattr(modeling_auto, mapping).values() for mapping in mappings):
                return str(name), kind
    raise ModelError(
        f"config.json: architectures is {str(names)[:80]}, which transformers {transformers.__version__} does not know "
        "as a model that generates, classifies or embeds text",
        hint="Code that comes with a model is not run: models that need trust_remote_code are not supported.",
    )


def _settings_of(config: Mapping[str, Any]) -> Any:
    try:
        return transformers.CONFIG_MAPPING[str(config.get("model_type"))].from_dict(
            _with_floats(dict(config))
        )
    except Exception as error:
        raise ModelError(
            f"transformers {transformers.__version__} does not read this config.json: {str(error)[:300]}"
        ) from error


def _with_floats(value: Any) -> Any:
    """A copy of a parsed config.json with special floats as numbers."""
    match value:
        case {"__float__": str(name), **others} if name in _SPECIAL_FLOATS and not others:
            return _SPECIAL_FLOATS[name]
        case dict():
            return {key: _with_floats(each) for key, each in value.items()}
        case list():
            return [_with_floats(each) for each in value]
    return value


def _class_of(architecture: str, kind: str) -> Any:
    """The class of transformers. For encoders the auto class, so that one with a head is loaded
    without it.
    """
    return transformers.AutoModel if kind == "encoder" else getattr(transformers, architecture)


def _load(kind: Any, settings: Any, tensors: dict[str, torch.Tensor], computes: ComputeDtype) -> Any:
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if kind is transformers.AutoModel:
        kind = transformers.MODEL_MAPPING[type(settings)]
    try:
        module, report = kind.from_pretrained(
            None,
            config=settings,
            state_dict=tensors,
            dtype=torch_dtype(computes.dtype),
            output_loading_info=True,
        )
    except Exception as error:
        raise ModelError(f"transformers rejected the weights: {str(error)[:300]}") from error
    missing = sorted(name for name in report["missing_keys"] if "pooler" not in name)
    if missing:
        raise ModelError(
            f"the weights lack {len(missing)} tensors that {kind.__name__} needs: {', '.join(missing)[:300]}",
            hint="Check that the config.json and the weights belong to the same model.",
        )
    return module.eval()
