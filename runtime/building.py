"""The build of an instance's model: its skeleton over storage that is still empty, and the engine,
embedder or ONNX runner that answers for it.

Runs in a thread of the instance's, in parallel to the load and the tokenizer. What it makes becomes
the result of the instance's futures. Imports of models and backends begin here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from ..loader.device.detect import CPU, choose_device
from ..loader.errors import TeneralError, UsageError
from ..loader.load.options import Order
from .errors import ModelError
from .files import ModelFiles, is_onnx, seems_onnx
from .loading import check_paged, untaken_bytes
from .state import resolve

if TYPE_CHECKING:
    import threading
    from concurrent.futures import Future

    from ..loader.format.manifest import Manifest
    from ..loader.load.base import AnyLoad
    from ..loader.sources.base import Source
    from ..loader.timeline import Timeline
    from .adapters.registry import AdapterRegistry
    from .backends.choose import BackendChoice
    from .config import ServeConfig
    from .engine.embedder import Embedder
    from .engine.engine import Engine
    from .kv.snapshots.service import SnapshotService
    from .models.decoder import Decoder
    from .models.encoder import Encoder
    from .onnx.runner import OnnxRunner
    from .resident import BaseInMemory, SharedBaseInMemory
    from .text.tokenizer import TextTokenizer
    from .weights import Weights


class BuildParts(Protocol):
    """The parts of an instance that a build reads, waits for and makes."""

    config: ServeConfig
    timeline: Timeline
    model_name: str
    opening: Future[tuple[Source, Manifest]]
    tokenizer: Future[TextTokenizer]
    engine: Future[Engine]
    embedder: Future[Embedder]
    onnx: Future[OnnxRunner]
    kind: Future[str]
    full_speed: threading.Event  # nothing is built before it is set, and imported but torch for a GPU
    adapters: AdapterRegistry | None  # set together with the engine
    load: AnyLoad | None  # there, once `opening` has a result
    base: BaseInMemory | SharedBaseInMemory | None  # in memory, of a fine-tune; as `load`

    def files(self) -> ModelFiles: ...

    def wait_exact(self, timeout_s: float | None = None) -> bool: ...


class ModelBuild:
    """One instance's build. `fail` ends the instance, from any thread."""

    def __init__(
        self,
        instance: BuildParts,
        *,
        snapshots: SnapshotService | None,
        fail: Callable[[TeneralError], None],
    ) -> None:
        self._instance = instance
        self._config = instance.config
        self._timeline = instance.timeline
        self._snapshots = snapshots
        self._fail = fail

    def run(self) -> None:
        """Build the model, and start what answers for it. Blocks while its weights arrive only where
        the model needs them.
        """
        if seems_onnx(self._config.model):
            from .onnx.start import import_ahead

            import_ahead(self._timeline)  # while the manifest is being parsed
            if is_onnx(self._instance.opening.result()[1]):
                self._start_onnx()  # without the modules of other models
                return
        config, choice = self._config, self._choose_backend()
        with self._timeline.span("process", "import models"):
            from .models.build import build_model
            from .models.encoder import Encoder
            from .sentence_files import sentence_files
        self._warm_device_up(choice.device)
        _, manifest = self._instance.opening.result()
        load = self._instance.load
        assert load is not None
        if is_onnx(manifest):
            self._start_onnx()
            return
        with self._timeline.span("model", "build") as details:
            files = self._instance.files()
            model_config = files.json("config.json", required=True)
            weights, sentence = _weights_of(load), sentence_files(files)
            model: Any
            from .backends.choose import TRANSFORMERS, model_of_transformers  # imported for the choice

            if config.backend == TRANSFORMERS:
                model, is_encoder = model_of_transformers(
                    model_config, weights, config.compute_dtype, **sentence
                )
            else:
                model = build_model(
                    model_config,
                    weights,
                    choice.model_backends(),
                    max_context=config.max_context,
                    **sentence,
                )
                is_encoder = isinstance(model, Encoder)
            details.update(backend=model.executor.name, **model.computes.attributes)
            check_paged(load, model)
        if is_encoder:
            self._start_embedder(model, model_config)
        else:
            drafter = None
            base = self._instance.base
            if base is not None and config.draft_ahead:
                drafter = base.drafter_for(model, choice)
            self._start_engine(model, manifest, drafter)

    def _choose_backend(self) -> BackendChoice:
        """Choose it and import torch where it computes, and wait until the server is there: before the
        imports on a CPU; on a GPU behind torch's, the longest part of a start there.
        """
        device = choose_device(self._config.device)
        if device == CPU:
            self._wait_for_server()
        with self._timeline.span("process", "import backends"):
            from .backends.choose import BackendChoice

        # OpenMP's threads sleep between regions, whichever library loads it, for instance a
        # handler's torch (docs/decisions/0007).
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        config = self._config
        choice = BackendChoice(
            config.backend,
            device,
            config.compute_dtype,
            config.threads,
            config.trim_imports,
        )
        choice.check()
        if choice.is_torch:
            with self._timeline.span("process", "import torch") as details:
                details["trimmed"] = choice.import_torch()  # in parallel to the fetch
        if device != CPU:
            self._wait_for_server()
        return choice

    def _wait_for_server(self) -> None:
        with self._timeline.span("process", "wait for the server"):
            self._instance.full_speed.wait()

    def _warm_device_up(self, device: str) -> None:
        """Start a GPU's one-time preparations, in parallel to the fetch. Returns at once."""
        if device != CPU:
            import torch

            # Only models on a device need it.
            from .backends.cuda.warm_up import start_warm_up

            start_warm_up(torch.device(device), torch.bfloat16, timeline=self._timeline)

    def _start_engine(self, model: Decoder, manifest: Manifest, drafter: Decoder | None) -> None:
        with self._timeline.span("process", "import engine"):
            from .backends.choose import pool_bytes, step_backend
            from .engine.arrival import BasedArrival, LoadArrival
            from .engine.engine import Engine, EngineOptions
            from .kv.kinds import KVKind
            from .models.decoder import Decoder

        refuse = ModelError(
            f"{self._instance.model_name} generates text and does not make embeddings",
            hint="Serve an encoder (a BERT-type model) for /v1/embeddings.",
        )
        self._instance.embedder.set_exception(refuse)
        self._instance.onnx.set_exception(_takes_texts(self._instance.model_name))
        resolve(self._instance.kind, "decoder")
        assert self._instance.load is not None
        with self._timeline.span("model", "KV pool"):
            options = EngineOptions(
                max_running=self._config.max_running,
                max_queued=self._config.max_queued,
                max_context=self._config.max_context,
                kv_dtype=KVKind(self._config.kv_dtype),
                prefix_cache=self._config.prefix_cache,
                look_ahead=_max_proposals(self._config),
                max_wait_s=self._config.max_wait_s,
                max_queued_per_tenant=self._config.max_queued_per_tenant,
                session_kv_bytes=self._config.session_kv_bytes,
                session_idle_s=self._config.session_idle_s,
                kv_host_bytes=self._config.kv_host_bytes or 0,
                kv_disk_bytes=self._config.kv_disk_bytes or 0,
                kv_disk_dir=self._config.kv_disk_dir,
                kernels_dir=self._config.kernel_dir,
                kv_bytes=self._config.kv_bytes
                or pool_bytes(
                    model,
                    untaken_bytes(self._instance.load, self._config.weights_bytes),
                    self._config.max_running,
                ),
            )
        self._instance.adapters = self._registry(model, manifest.digest)
        if not self._instance.tokenizer.done():
            with self._timeline.span("tokenizer", "wait"):
                self._instance.tokenizer.exception()
        tokenizer = self._instance.tokenizer.result()
        with self._timeline.span("model", "engine"):
            engine = Engine(
                model,
                tokenizer,
                options=options,
                timeline=self._timeline,
                eos_token_ids=tokenizer.eos_token_ids,
                # transformers supports no draft, and its weights have all arrived.
                arrival=(LoadArrival if drafter is None else BasedArrival)(self._instance.load)
                if isinstance(model, Decoder)
                else None,
                drafter=drafter,
                prefix_seed=_prefix_seed(manifest, model),
                make_backend=step_backend,
                on_device_lost=self._fail,
                adapters=self._instance.adapters,
            )
            # Before the engine's waiters continue.
            if self._snapshots is not None:
                self._snapshots.attach(engine.prefix_pool, model=manifest.digest)
            engine.start()
            resolve(self._instance.engine, engine)
        self._timeline.mark("process", "engine runs", first_token=self._config.first_token)

    def _registry(self, model: Decoder, digest: bytes | None) -> AdapterRegistry | None:
        """The registry of adapters; None if not configured. Raises `ModelError` if the executor
        does not support adapters.
        """
        config = self._config
        if config.adapters is None and not config.model_control:
            return None
        if not getattr(model.executor, "takes_adapters", False):
            if config.adapters is None:
                return None
            raise ModelError(
                f"--adapters: {model.executor.name} computes this model, but does not implement adapters",
                hint="Serve it on a CPU with --backend native, or leave --adapters out.",
            )
        # Few instances have them.
        from .adapters.registry import AdapterRegistry

        return AdapterRegistry(
            model.config,
            template=config.adapters,
            max_bytes=config.adapters_bytes,
            options=config.source_options._replace(base=None),
            base_digest=digest,
        )

    def _start_embedder(self, model: Encoder, config: Mapping[str, Any]) -> None:
        from .engine.embedder import Embedder
        from .models.score_functions import ScoreFunctions

        refuse = ModelError(
            f"{self._instance.model_name} makes embeddings and does not generate text",
            hint="Use /v1/embeddings, or serve a decoder (Llama, Mistral, Qwen) to generate.",
        )
        self._instance.engine.set_exception(refuse)
        self._instance.onnx.set_exception(_takes_texts(self._instance.model_name))
        if self._config.adapters is not None:
            raise UsageError(
                "adapters are for models that generate text, but this one makes embeddings",
                key="adapters",
                hint="Leave it out.",
            )
        resolve(self._instance.kind, "encoder")
        assert self._instance.load is not None
        # Embeddings never use the draft.
        self._instance.load.reorder(Order.EXACT)
        embedder = Embedder(
            model,
            max_queued=self._config.max_calls - 1,
            max_delay_s=self._config.embed_delay_s,
            timeline=self._timeline,
            score_functions=ScoreFunctions.of(config),
        )
        embedder.start()
        resolve(self._instance.embedder, embedder)
        self._timeline.mark("process", "engine runs")

    def _start_onnx(self) -> None:
        from .onnx.start import open_runner

        assert self._instance.load is not None
        with self._timeline.span("model", "build") as attributes:
            files = self._instance.files()
            runner, exchange = open_runner(
                files,
                self._instance.load,
                self._config,
                self._timeline,
                on_wait=self._instance.full_speed.set,
            )
            attributes.update(backend="onnxruntime", segments=len(runner.spec.segments))
        refuse = ModelError(
            f"{self._instance.model_name} is an ONNX model, whose inputs and outputs are tensors",
            hint="Use /invoke or /v2/models/NAME/infer, or call context.model.run in a handler.",
        )
        if self._config.adapters is not None:
            raise UsageError(
                "adapters are for models that generate text, but this is an ONNX model",
                key="adapters",
                hint="Leave it out.",
            )
        self._instance.engine.set_exception(refuse)
        self._instance.embedder.set_exception(refuse)
        resolve(self._instance.kind, "onnx")
        runner.start()
        resolve(self._instance.onnx, runner)
        self._timeline.mark("process", "engine runs")
        if self._instance.wait_exact() and exchange() and self._instance.load.place == "host":
            self._instance.load.discard()
            self._timeline.mark("process", "whole session")


def _prefix_seed(manifest: Manifest, model: Decoder) -> bytes | None:
    """The seed of all keys and values of this model, wherever they were computed; None: unknown."""
    from .kv.prefixes import seed_hash

    if manifest.digest is None:
        return None
    return seed_hash(manifest.digest, f"{model.dtype.label} {model.numerics}".encode())


def _max_proposals(config: ServeConfig) -> int | None:
    """The proposals of look-ahead in a step; None: as many as pay."""
    if config.look_ahead != "auto":
        return int(config.look_ahead)
    # Where not all experts are in memory, a wrong proposal may have some read for nothing.
    return None if config.weights_bytes is None else 0


def _takes_texts(model_name: str) -> ModelError:
    return ModelError(f"{model_name} takes texts, not tensors", hint="context.model.run is for ONNX models.")


def _weights_of(load: AnyLoad) -> Weights:
    from .weights import StreamedWeights

    if load.place == "host":
        return StreamedWeights(load)
    # Only models on a device need it.
    from .backends.cuda.weights import DeviceWeights

    return DeviceWeights(load)
