"""The model of an instance: its backend, its skeleton over storage that is still empty, and the engine or embedder that
answers for it. Steps of the thread "model" of `startup.py`; imports of models and backends begin here.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ...loader.device.detect import CPU
from ...loader.errors import TeneralError, UsageError
from ...loader.load.options import Order
from ..errors import ModelError

if TYPE_CHECKING:
    import threading
    from concurrent.futures import Future

    from ...loader.load.base import AnyLoad
    from ...loader.timeline import Timeline
    from ..adapters.registry import AdapterRegistry
    from ..backends.choose import BackendChoice
    from ..config import ServeConfig
    from ..engine.embedder import Embedder
    from ..engine.engine import Engine
    from ..files import ModelFiles
    from ..models.decoder import Decoder
    from ..models.score_functions import ScoreFunctions
    from ..text.tokenizer import TextTokenizer
    from ..weights import Weights


class BuiltModel(NamedTuple):
    """A model over weights that are still arriving."""

    model: Any  # Decoder or Encoder, or what transformers computes
    kind: str  # "decoder" or "encoder"
    score_functions: ScoreFunctions | None  # of an encoder


def choose_backend(
    config: ServeConfig, timeline: Timeline, server_is_there: threading.Event
) -> BackendChoice:
    """Choose it, import it, and models; wait until the server is there, before the imports on a CPU,
    on a GPU behind torch's, the longest part of a start there.
    """
    device = config.chosen_device

    def wait_for_server() -> None:
        with timeline.span("process", "wait for the server"):
            server_is_there.wait()

    if device == CPU:
        wait_for_server()
    with timeline.span("process", "import backends"):
        from ..backends.choose import BackendChoice

    # OpenMP's threads sleep between regions, whichever library loads it, for instance a
    # handler's torch (docs/decisions/0007).
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    choice = BackendChoice(
        config.backend, device, config.compute_dtype, config.threads, config.trim_imports, config.kernel_dir
    )
    choice.check()
    if choice.is_torch:
        with timeline.span("process", "import torch") as details:
            details["trimmed"] = choice.import_torch()  # in parallel to the fetch
    if device != CPU:
        wait_for_server()
    with timeline.span("process", "import models"):
        from ..models import build  # noqa: F401
    if choice.is_direct:
        with timeline.span("device", "open for computing"):
            choice.direct_device()
    elif device != CPU:
        # One-time preparations of a GPU, in parallel to the fetch.
        import torch

        from ..backends.cuda.warm_up import start_warm_up

        start_warm_up(torch.device(device), torch.bfloat16, timeline=timeline)
    return choice


def build(
    config: ServeConfig, timeline: Timeline, files: ModelFiles, load: AnyLoad, choice: BackendChoice
) -> BuiltModel:
    """The model of a load that has begun. Raises `ModelError` and `CheckpointError` for one that cannot be computed."""
    from ..backends.choose import TRANSFORMERS, model_of_transformers  # imported for the choice
    from ..models.build import build_model, sentence_files
    from ..models.decoder import Decoder

    with timeline.span("model", "build") as details:
        model_config = files.json("config.json", required=True)
        weights, sentence = _weights_of(load, choice), sentence_files(files, model_config)
        model: Any
        if config.backend == TRANSFORMERS:
            model, is_encoder = model_of_transformers(model_config, weights, config.compute_dtype, **sentence)
        else:
            backends = choice.model_backends()
            model = build_model(model_config, weights, backends, max_context=config.max_context, **sentence)
            is_encoder = not isinstance(model, Decoder)
        details.update(backend=model.executor.name, **model.computes.attributes)
        _check_paged(load, model)
    scores = None
    if is_encoder:
        from ..models.score_functions import ScoreFunctions  # of few servers

        tokens = getattr(model.config, "score_tokens", None)
        scores = ScoreFunctions.of(
            model_config,
            files.json("config_sentence_transformers.json"),
            is_log_odds=tokens is not None and tokens.false is not None,
        )
    return BuiltModel(model, "encoder" if is_encoder else "decoder", scores)


def _weights_of(load: AnyLoad, choice: BackendChoice) -> Weights:
    if load.place == "host":
        from ..weights import StreamedWeights

        return StreamedWeights(load)
    # Only models on a device need them.
    if choice.is_direct:
        from ..backends.cuda.direct.weights import DirectWeights

        return DirectWeights(load, choice.direct_device())
    from ..backends.cuda.weights import DeviceWeights

    return DeviceWeights(load)


def _check_paged(load: AnyLoad, model: Any) -> None:
    """Raise `UsageError` if the model needs weights that are not all in memory."""
    if load.paged_groups and not getattr(model, "routes_apart", False):
        raise UsageError(
            "weights_bytes is less than the model takes, but its backend reads all experts of a layer at once",
            key="weights_bytes",
            hint="Use --backend native, and weights that it computes as they are stored; or leave it out.",
        )


def refusals(kind: str, config: ServeConfig) -> dict[str, ModelError]:
    """The errors of requests that a model of this kind cannot answer, by the worker that could. Raises
    `UsageError` for adapters of a model that has none.
    """
    name = config.served_name
    takes_texts = ModelError(f"{name} takes texts, not tensors", hint="context.model.run is for ONNX models.")
    if kind == "decoder":
        error = ModelError(
            f"{name} generates text and does not make embeddings",
            hint="Serve a model that embeds, as docs/models.md lists them, for /v1/embeddings.",
        )
        return {"embedder": error, "onnx": takes_texts}
    if config.adapters is not None:
        what = "this one makes embeddings" if kind == "encoder" else "this is an ONNX model"
        raise UsageError(
            f"adapters are for models that generate text, but {what}", key="adapters", hint="Leave it out."
        )
    if kind == "encoder":
        error = ModelError(
            f"{name} makes embeddings and does not generate text",
            hint="Use /v1/embeddings, or serve a decoder (Llama, Mistral, Qwen) to generate.",
        )
        return {"engine": error, "onnx": takes_texts}
    error = ModelError(
        f"{name} is an ONNX model, whose inputs and outputs are tensors",
        hint="Use /invoke or /v2/models/NAME/infer, or call context.model.run in a handler.",
    )
    return {"engine": error, "embedder": error}


def adapter_registry(config: ServeConfig, model: Decoder, digest: bytes | None) -> AdapterRegistry | None:
    """The registry of adapters; None if not configured. Raises `ModelError` if the executor does not
    support adapters. `digest` is that of the base's manifest.
    """
    if config.adapters is None and not config.model_control:
        return None
    if not getattr(model.executor, "takes_adapters", False):
        if config.adapters is None:
            return None
        raise ModelError(
            f"--adapters: {model.executor.name} computes this model, but does not implement adapters",
            hint="Serve it on a CPU with --backend native, on a GPU with --backend direct, or leave --adapters out.",
        )
    # Few instances have them.
    from ..adapters.registry import AdapterRegistry

    return AdapterRegistry(
        model.config,
        template=config.adapters,
        max_bytes=config.adapters_bytes,
        options=config.source_options._replace(base=None),
        base_digest=digest,
    )


def make_engine(
    config: ServeConfig,
    timeline: Timeline,
    load: AnyLoad,
    model: Decoder,
    drafter: Decoder | None,
    *,
    tokenizer: Future[TextTokenizer],
    adapters: AdapterRegistry | None,
    on_device_lost: Callable[[TeneralError], None],
) -> Engine:
    """An engine that was not started. Blocks until the tokenizer is there."""
    with timeline.span("process", "import engine"):
        from ..backends.choose import pool_bytes, step_backend
        from ..engine.arrival import BasedArrival, LoadArrival
        from ..engine.engine import Engine, EngineOptions
        from ..kv.storage import KVKind
        from ..models.decoder import Decoder

    with timeline.span("model", "KV pool"):
        options = config.options(
            EngineOptions,
            kv_bytes=pool_bytes(
                model,
                _untaken_bytes(load, config.weights_bytes),
                config.max_running,
                kv_bytes=config.kv_bytes,
                device_percent=config.device_percent,
                adapters_bytes=0 if adapters is None else config.adapters_bytes,
            ),
            kv_dtype=KVKind(config.kv_dtype),
            kv_host_bytes=config.kv_host_bytes or 0,
            kv_disk_bytes=config.kv_disk_bytes or 0,
            look_ahead=_max_proposals(config),
        )
    if not tokenizer.done():
        with timeline.span("tokenizer", "wait"):
            tokenizer.exception()
    text = tokenizer.result()
    # transformers supports no draft, and its weights have all arrived.
    arrival = None
    if isinstance(model, Decoder):
        arrival = (LoadArrival if drafter is None else BasedArrival)(load)
    with timeline.span("model", "engine"):
        return Engine(
            model,
            text,
            options=options,
            timeline=timeline,
            eos_token_ids=text.eos_token_ids,
            arrival=arrival,
            drafter=drafter,
            prefix_seed=_prefix_seed(load.manifest.digest, model),
            make_backend=step_backend,
            on_device_lost=on_device_lost,
            adapters=adapters,
        )


def _max_proposals(config: ServeConfig) -> int | None:
    """The proposals of look-ahead in a step; None: as many as pay."""
    if config.look_ahead != "auto":
        return int(config.look_ahead)
    # Where not all experts are in memory, a wrong proposal may have some read for nothing.
    return None if config.weights_bytes is None else 0


def _untaken_bytes(load: AnyLoad, weights_bytes: int | None) -> int:
    """The weights' memory, `weights_bytes` at most, except for a standby process's reserve from before the load."""
    size_bytes = load.manifest.weight_bytes
    if weights_bytes is not None:
        size_bytes = min(size_bytes, weights_bytes)
    return size_bytes - load.reserved_bytes


def _prefix_seed(digest: bytes | None, model: Decoder) -> bytes | None:
    """The seed of all keys and values of this model, wherever they were computed; None: unknown."""
    from ..kv.prefixes import seed_hash

    if digest is None:
        return None
    return seed_hash(digest, f"{model.dtype.label} {model.numerics}".encode())


def start_embedder(config: ServeConfig, timeline: Timeline, load: AnyLoad, built: BuiltModel) -> Embedder:
    from ..backends.choose import check_encoder_share
    from ..engine.embedder import Embedder

    check_encoder_share(built.model, _untaken_bytes(load, None), config.device_percent)
    # Embeddings never use the draft.
    load.reorder(Order.EXACT)
    embedder = Embedder(
        built.model,
        max_queued=config.max_calls - 1,
        max_delay_s=config.embed_delay_s,
        timeline=timeline,
        score_functions=built.score_functions,
    )
    embedder.start()
    return embedder
