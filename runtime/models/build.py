"""From a model's config.json and its weights to the model, computed by the first backend that implements it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast

from msgspec.structs import replace

from ..errors import ModelError
from ..weights import Weights
from .decoder import Decoder
from .decoder_config import DecoderConfig, is_decoder, is_pooled
from .decoder_tensors import take_decoder
from .executor import ComputeDtype, ExecutorFactory
from .fields import Fields
from .spec import DecoderSpec, EncoderSpec

if TYPE_CHECKING:
    from ..files import ModelFiles
    from .encoder import DenseTensors, Encoder
    from .encoder_config import EncoderConfig
    from .pooled_decoder import PooledDecoder
    from .speech import SpeechTower
    from .vision import VisionTower

T = TypeVar("T", DecoderSpec, EncoderSpec)

_SENTENCE_FILES = {
    "modules": "modules.json",
    "pooling": "1_Pooling/config.json",
    "sentence_bert": "sentence_bert_config.json",
    "logit_score": "1_LogitScore/config.json",
}

logger = logging.getLogger(__name__)


def build_model(
    config: Mapping[str, Any],
    weights: Weights,
    backends: Iterable[ExecutorFactory],
    *,
    max_context: int | None = None,
    modules: Any = None,
    pooling: Any = None,
    sentence_bert: Any = None,
    logit_score: Any = None,
    dense: Mapping[str, Any] | None = None,
    dense_weights: DenseTensors | None = None,
) -> Decoder | Encoder | PooledDecoder:
    """The model that a parsed config.json describes, over weights that may still be empty.

    A decoder whose rotary embedding is stretched for contexts beyond its own (`DecoderConfig.admitting`) is made for
    `max_context` tokens.
    Encoders, and decoders that embed or classify (`is_pooled`), also take what modules.json, 1_Pooling/config.json and
    sentence_bert_config.json hold, where they are there, and the config.json and weights of each folder with a Dense
    module; decoders the config.json of LogitScore. The first of `backends`, at least one, that implements the model
    computes it, in a dtype of its choice; each one that refuses is logged with its reason.
    Every tensor that the model needs is looked up and checked; none is copied, and no content is read. Raises
    `ModelError` when the config is not supported by any of them, or a tensor is missing or does not fit.
    """
    files = {"modules": modules, "pooling": pooling, "sentence_bert": sentence_bert, "dense": dense}
    if not is_decoder(config):
        from .encoder_config import EncoderConfig, is_encoder  # decoders do without

        if is_encoder(config):
            return _encoder(EncoderConfig.from_json(config, **files), weights, dense_weights, backends)
    if not is_pooled(config, has_modules=modules is not None):
        return _decoder(DecoderConfig.from_json(config).admitting(max_context or 0), weights, backends)
    from .pooled_decoder import PooledDecoder, PooledDecoderConfig  # of few servers

    own_config = PooledDecoderConfig.from_json(
        config, max_context=max_context, logit_score=logit_score, **files
    )
    return PooledDecoder(own_config, _decoder(own_config.decoder, weights, backends), weights, dense_weights)


def sentence_files(files: ModelFiles, config: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `build_model` that sentence-transformers' files give; None for missing files. `config` is the
    config.json, which may name tokens in place of a LogitScore module.

    Reads the weights of Dense modules, a few megabytes at most. Raises the errors of `ModelFiles.json`, and
    `ModelError` for a modules.json that is not supported.
    """
    found: dict[str, Any] = {key: files.json(name) for key, name in _SENTENCE_FILES.items()}
    if found["modules"] is None:
        if config.get("classifier_from_token") is not None and is_pooled(config):
            from .pooling_config import logit_score_of  # of few models

            found["logit_score"] = logit_score_of(Fields(config), files.json("tokenizer.json"))
        return found
    from .pooling_config import dense_files  # of few models

    return found | dense_files(files, found["modules"])


def _encoder(
    config: EncoderConfig,
    weights: Weights,
    dense_weights: DenseTensors | None,
    backends: Iterable[ExecutorFactory],
) -> Encoder:
    from .encoder import Encoder, take_encoder  # decoders do without

    taken, stored = take_encoder(config, weights, dense_weights)
    backend, spec, computes = _first_that_can(
        backends,
        lambda backend: backend.compute_dtype(stored, is_quantised=False, is_encoder=True),
        lambda computes: EncoderSpec.of(config, computes.dtype),
        lambda backend, spec: backend.refuses_encoder(spec, taken),
    )
    return Encoder(config, spec, taken, backend.encoder(spec, taken), computes)


def _decoder(config: DecoderConfig, weights: Weights, backends: Iterable[ExecutorFactory]) -> Decoder:
    if config.vision is not None and not config.vision.is_among(weights.names()):
        config = replace(config, vision=None)  # a file of the text model alone
    own, stored = take_decoder(config, weights)
    if config.quantization is not None and config.quantization.rounds_inputs:
        logger.info("config.json asks for products with inputs in 8 bits: they are used unrounded")
    backend, spec, computes = _first_that_can(
        backends,
        lambda backend: backend.compute_dtype(stored, is_quantised=config.quantization is not None),
        lambda computes: DecoderSpec.of(config, computes.dtype),
        lambda backend, spec: backend.refuses_decoder(spec, own),
    )
    tower: VisionTower | SpeechTower | None = None
    if config.vision is not None:
        from .vision import VisionFactory  # of few models
        from .vision_tensors import build_vision

        factory = cast("VisionFactory", backend)
        tower = build_vision(
            config.vision, weights, factory, dtype=spec.dtype, hidden_size=config.hidden_size
        )
    if config.speech is not None:
        from .speech import SpeechFactory, build_speech  # of few models

        tower = build_speech(config.speech, weights, cast("SpeechFactory", backend), dtype=spec.dtype)
    return Decoder(config, spec, own, backend.decoder(spec, own), computes, tower)


def build_again(model: Decoder, backends: Iterable[ExecutorFactory]) -> Decoder | None:
    """The same model over the same weights with an executor of its own, so that two threads may compute
    with them; None where the backend that made it is not among `backends`.
    """
    for backend in backends:
        if backend.name == model.executor.name:
            executor = backend.decoder(model.spec, model.weights)
            return Decoder(model.config, model.spec, model.weights, executor, model.computes, model.vision)
    return None


def _first_that_can(
    backends: Iterable[ExecutorFactory],
    dtype_of: Callable[[ExecutorFactory], ComputeDtype],
    spec_of: Callable[[ComputeDtype], T],
    refusal: Callable[[ExecutorFactory, T], str | None],
) -> tuple[ExecutorFactory, T, ComputeDtype]:
    """The first backend that does not refuse the spec made for it."""
    reasons: list[str] = []
    for backend in backends:
        computes = dtype_of(backend)
        spec = spec_of(computes)
        reason = refusal(backend, spec)
        if reason is None:
            for other in reasons:
                logger.warning("%s: %s computes instead", other, backend.name)
            logger.info("%s", computes.describe(backend.name))
            return backend, spec, computes
        reasons.append(reason)
    raise ModelError(
        f"no backend computes this model: {'; '.join(reasons) or 'none is installed'}",
        hint="pip install 'teneral[torch]' brings torch, which computes what the native core lacks.",
    )
