"""The start of an instance: all that happens between exec and the first token, step by step.

    caller                thread "open"           thread "tokenizer"      thread "model"
    ──────                ─────────────           ──────────────────      ──────────────
    launch helpers
    request the manifest ► manifest, load
    adopt helpers         │       └──────────────► tokenizer ─────┐
    import the server ─── │ ─────────────────────────── (CPU) ─── │ ────► import the backend
                          │                                       │       build the model (needs the manifest)
                          ▼                                       └─────► engine, embedder or runner: FIRST TOKEN
                          all weights exact ─────► process for chats      whole ONNX session
                          digests, cache

An arrow is a future: `opening`, `tokenizer`, `full_speed`, `engine`, `exact`. A step waits for the results that
it needs where it needs them; so does a request, and its forward pass for the layers that it has reached. Every step
writes its span to the timeline, and so does every wait for another one. The first failure fails the instance, and
everything that waits for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, TypeVar, cast

from ...loader.artifact import open_model
from ...loader.errors import TeneralError, memory_error
from ...loader.sources.open import split_pin
from ...loader.timeline import Timeline
from ..config import ServeConfig
from ..errors import ModelError
from ..files import TOKENIZER_NAME, ModelFiles, is_onnx, seems_onnx
from .helpers import launch_helpers
from .loading import Opening, wire_share_of

if TYPE_CHECKING:
    from typing import Self

    from ...loader.format.manifest import Manifest
    from ...loader.load.base import AnyLoad
    from ...loader.load.targets.shared import SharedBase
    from ...loader.sources.base import Source
    from ..adapters.registry import AdapterRegistry
    from ..engine.embedder import Embedder
    from ..engine.engine import Engine
    from ..kv.snapshots.service import SnapshotService
    from ..onnx.runner import OnnxRunner
    from ..text.settings import TextSettings
    from ..text.tokenizer import TextTokenizer
    from .base import BaseInMemory, SharedBaseInMemory
    from .helpers import Helpers, LaunchedHelpers
    from .loading import StartedLoad

T = TypeVar("T")

CHAT_DELAY_S = 1.0  # from the last weights to the start of the process that renders chat templates


class Startup:
    """The steps of one start and their results, which are futures. `start` begins all of them."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        timeline: Timeline | None = None,
        source: Source | None = None,
        launched: LaunchedHelpers | None = None,
        base: BaseInMemory | None = None,
        opening: Opening | None = None,
        server_first: bool = False,
    ) -> None:
        """With `source`, the model is read from there instead of `config.model`; `launched` are the
        processes that load it, and `opening` has opened it, if there are some already. The instance
        closes them. With `base`, the model is a fine-tune of it, of which only the differences are
        read; the base's instance must be closed after this one. With `server_first` the cores are the
        caller's until it sets `full_speed`: the model is not built before, and decoding leaves two of
        them alone.
        """
        self.config = config
        self.timeline = timeline or Timeline()
        self.model_name = config.served_name
        self.created_unix_s = int(time.time())
        self.has_base = base is not None  # in memory: it loads the differences alone
        # The build and the load may take all cores.
        self.full_speed = threading.Event() if opening is None else opening.full_speed
        if not server_first:
            self.full_speed.set()
        # Results, in the order in which they usually come.
        self.opening: Future[tuple[Source, Manifest]] = Future()  # when the load has begun
        self.text_settings: Future[TextSettings] = Future()  # set before the tokenizer
        self.tokenizer: Future[TextTokenizer] = Future()
        self.kind: Future[str] = Future()  # decoder, encoder or onnx; one of the next three then comes
        self.engine: Future[Engine] = Future()
        self.embedder: Future[Embedder] = Future()
        self.onnx: Future[OnnxRunner] = Future()
        self.exact: Future[None] = Future()  # when all weights are
        self.ended: Future[TeneralError | None] = Future()  # when the instance fails or is closed
        # Set by the step "open", before `opening`.
        self.load: AnyLoad | None = None
        self.base: BaseInMemory | SharedBaseInMemory | None = base
        self._shared: SharedBase | None = None  # only where the load uses it
        self._wire_share = 1.0  # bytes of the network for one of the load's
        # Set together with the engine, if adapters are configured.
        self.adapters: AdapterRegistry | None = None
        self._source = source
        self._opening = opening
        self._launched = launched
        self._helpers: Helpers | None = None
        self._snapshots: SnapshotService | None = None
        self._threads: list[threading.Thread] = []
        self._failure: TeneralError | None = None
        self._draining = False
        self._closed = threading.Event()
        self._lock = threading.Lock()

    def start(self) -> Self:
        """Start everything; return at once, or when the imports of a local ONNX model are done.
        Startup errors fail the instance like later ones.
        """
        self._run(self._launch)
        self._run(self._adopt)
        self._begin("open", self._open)
        if self.config.kv_snapshot is not None:
            self._run(self._start_snapshots)
        self._begin("tokenizer", self._load_tokenizer)
        self._begin("model", self._build)
        if seems_onnx(self.config.model):
            # Here, too, before the caller imports a web server: decode threads wait for numpy, and
            # two threads that import share the GIL.
            from ..onnx.start import import_ahead

            import_ahead(self.timeline)
        return self

    # The caller's thread

    def _launch(self) -> None:
        """Launch processes, and request the manifest, before all imports."""
        if self._launched is None and self._source is None and self.base is None:
            self._launched = launch_helpers(self.config, self.timeline)
        if self._launched is not None and self._launched.load is not None:
            return  # a process has requested it
        if self._opening is None:
            self._opening = Opening(
                self.config,
                self.timeline,
                source=self._source,
                launched=self._launched,
                base=None if self.base is None else cast("BaseInMemory", self.base).weights,
                full_speed=self.full_speed,
            )
        self._source = self._opening.source

    def _adopt(self) -> None:
        """Connect to the processes, and import what the first ranges need."""
        if self._launched is not None:
            with self.timeline.span("process", "adopt helpers"):
                self._helpers = self._launched.adopt(self.timeline)
            self.load = self._helpers.load
        if self._opening is not None:
            self._opening.import_ahead()

    def _start_snapshots(self) -> None:
        # Few instances have them.
        from ..kv.snapshots.service import SnapshotService

        self._snapshots = SnapshotService.of(self.config, self.timeline)
        self._snapshots.start(self.opening)

    # Thread "open"

    def _open(self) -> None:
        """Wait for the manifest, by which the load has started; then until all weights are exact."""
        if self._opening is not None:
            self._take(self._opening.take())
        else:
            address, _ = split_pin(self.config.model)
            self._source = open_model(address, self.config.source_options, timeline=self.timeline)
        assert self.load is not None
        assert self._source is not None
        if self._closed.is_set():
            self.load.close()  # `close` may not have seen it
            return
        manifest = self.load.manifest
        self._wire_share = wire_share_of(self._source, self.timeline)
        resolve(self.opening, (self._source, manifest))
        self._watch(self.load)

    def _take(self, started: StartedLoad) -> None:
        self.load, self._shared = started.load, started.shared
        if started.base is not None:
            from .base import SharedBaseInMemory

            assert self._source is not None
            assert started.shared is not None
            options, held = self.config.load_options, started.shared.files
            files = ModelFiles(self._source, started.base.manifest, options, held)
            self.base = SharedBaseInMemory(started.base, files.json("config.json", required=True))

    def files(self) -> ModelFiles:
        """The model's small files, once `opening` has a result. Raises the failure."""
        source, manifest = self.opening.result()
        held = None if self._shared is None else self._shared.files
        return ModelFiles(source, manifest, self.config.load_options, held)

    def _watch(self, load: AnyLoad) -> None:
        """Wait for the whole load, so that an idle instance also fails with its load, or if its
        tensors do not have the digests of their originals.
        """
        from . import exactness

        expected = None
        if self.config.verify_exact:
            exactness.check_whole(load)
            expected = exactness.tensor_digests(self.files(), load.manifest)
        exactness.wait_exact(load)
        self.timeline.mark("process", "all weights exact")
        if expected is not None:
            with self.timeline.span("process", "verify exact"):
                exactness.verify_exact(load, expected)
        resolve(self.exact, None)
        if self.config.cache_dir is not None:
            # Until everything is written to the cache for the next container.
            load.join()
            exactness.warn_of_cache(load)

    def wait_exact(self, timeout_s: float | None = None) -> bool:
        """Block until all weights are exact; False if the instance has failed or was closed before,
        or at the time limit.
        """
        try:
            return self.exact.exception(timeout_s) is None
        except TimeoutError:
            return False

    # Thread "tokenizer"

    def _load_tokenizer(self) -> None:
        """Have the tokenizer, in a process of its own; when all weights are there, start that of chats."""
        _, manifest = self.opening.result()
        if is_onnx(manifest) and not any(file.name == TOKENIZER_NAME for file in manifest.files):
            error = ModelError(f"{self.model_name} takes tensors and has no tokenizer")
            refuse(self.text_settings, error)
            refuse(self.tokenizer, error)
            if self._helpers is not None:
                self._helpers.tokenizer.close()
            return
        if self.base is not None:
            shared = self.base.tokenizer_for(manifest, self.files(), self._adjust_settings)
            if shared is not None:
                resolve(self.text_settings, cast("BaseInMemory", self.base).text_settings)
                resolve(self.tokenizer, shared)
                return
        if self._helpers is not None:
            tokenizer = self._helpers.tokenizer.load(manifest, adjust=self._adjust_settings)
        else:
            from ..text.tokenizer import TextTokenizer

            with self.timeline.span("tokenizer", "load"):
                tokenizer = TextTokenizer.from_files(self.files().read, adjust=self._adjust_settings)
        if not resolve(self.tokenizer, tokenizer):
            tokenizer.close()
            return
        # The first chat is not to wait for its process; but the first tokens come first.
        if self.wait_exact() and not self._closed.wait(CHAT_DELAY_S):
            from ...loader.memory.limits import return_free_memory

            tokenizer.chat_template.start()
            return_free_memory()

    def _adjust_settings(self, settings: TextSettings) -> TextSettings:
        """The model's own settings with the configuration's replacements. Raises `UsageError`."""
        if self.config.chat_template is not None:
            from ..text.settings import read_template  # rarely used

            settings = settings.with_template(read_template(self.config.chat_template))
        resolve(self.text_settings, settings)
        return settings

    # Thread "model"

    def _build(self) -> None:
        """Build the model over storage that is still empty, and start what answers for it. Blocks
        while weights arrive only where the model needs them.
        """
        if seems_onnx(self.config.model):
            from ..onnx.start import import_ahead

            import_ahead(self.timeline)  # while the manifest is being parsed
            if is_onnx(self.opening.result()[1]):
                self._start_onnx()  # without the modules of other models
                return
        from . import model as steps

        choice = steps.choose_backend(self.config, self.timeline, self.full_speed)
        _, manifest = self.opening.result()
        if is_onnx(manifest):
            self._start_onnx()
            return
        assert self.load is not None
        built = steps.build(self.config, self.timeline, self.files(), self.load, choice)
        self._set_kind(built.kind)
        if built.kind == "encoder":
            embedder = steps.start_embedder(self.config, self.timeline, self.load, built)
            if not resolve(self.embedder, embedder):
                embedder.stop()
        else:
            drafter = None
            if self.base is not None and self.config.draft_ahead:
                drafter = self.base.drafter_for(built.model, choice)
            self.adapters = steps.adapter_registry(self.config, built.model, manifest.digest)
            engine = steps.make_engine(
                self.config,
                self.timeline,
                self.load,
                built.model,
                drafter,
                tokenizer=self.tokenizer,
                adapters=self.adapters,
                on_device_lost=self._fail,
            )
            # Before the engine's waiters continue.
            if self._snapshots is not None:
                self._snapshots.attach(engine.prefix_pool, model=manifest.digest)
            engine.start()
            if not resolve(self.engine, engine):
                engine.stop()
                if self.adapters is not None:
                    self.adapters.close()
        self.timeline.mark("process", "engine runs", first_token=self.config.first_token)

    def _start_onnx(self) -> None:
        from ..onnx.start import open_runner

        assert self.load is not None
        with self.timeline.span("model", "build") as attributes:
            files, config = self.files(), self.config
            runner, exchange = open_runner(
                files, self.load, config, self.timeline, on_wait=self.full_speed.set
            )
            attributes.update(backend="onnxruntime", segments=len(runner.spec.segments))
        self._set_kind("onnx")
        runner.start()
        if not resolve(self.onnx, runner):
            runner.stop()
            return
        self.timeline.mark("process", "engine runs")
        if self.wait_exact() and exchange() and self.load.place == "host":
            self.load.discard()
            self.timeline.mark("process", "whole session")

    def _set_kind(self, kind: str) -> None:
        """Answer requests that the model cannot answer. Raises `UsageError` for adapters of a model
        that has none.
        """
        from .model import refusals

        for worker, error in refusals(kind, self.config).items():
            refuse(getattr(self, worker), error)
        resolve(self.kind, kind)

    # Failures

    def _begin(self, name: str, step: Callable[[], None]) -> None:
        thread = threading.Thread(target=self._run, args=(step,), name=f"teneral-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _run(self, step: Callable[[], None]) -> None:
        try:
            step()
        except TeneralError as error:
            self._fail(error)
        # a bug in a thread must end the instance, not leave it waiting forever
        except Exception as error:  # noqa: BLE001
            text = f"the instance could not start: {type(error).__name__}: {error}"
            failure = memory_error(error) or ModelError(text)
            failure.__cause__ = error
            self._fail(failure)

    def _fail(self, error: TeneralError) -> None:
        with self._lock:
            if self._failure is not None or self.ended.done() or self._draining:
                return
            self._failure = error
        self.timeline.mark("process", "failed", error=error.message)
        self._settle(error)
        for worker in self._workers():
            worker.abort(error)
        resolve(self.ended, error)

    def _settle(self, error: TeneralError) -> None:
        """Answer everything that waits, with this error."""
        futures = (self.opening, self.exact, self.text_settings, self.tokenizer, self.kind)
        for future in (*futures, self.engine, self.embedder, self.onnx):
            refuse(cast("Future[object]", future), error)

    def _workers(self) -> list[Engine | Embedder | OnnxRunner]:
        """The workers that exist so far: an engine, an embedder, or an ONNX model's runner."""
        found = (result_or_none(self.engine), result_or_none(self.embedder), result_or_none(self.onnx))
        return [worker for worker in found if worker is not None]


def resolve(future: Future[T], value: T) -> bool:
    """Set the result of a future; False where the instance's end has settled it before."""
    try:
        future.set_result(value)
    except InvalidStateError:
        return False
    return True


def refuse(future: Future[T], error: Exception) -> None:
    """Set the error of a future that may have been settled before."""
    with suppress(InvalidStateError):
        future.set_exception(error)


def result_or_none(future: Future[T]) -> T | None:
    """The result, if there is one by now."""
    return future.result() if future.done() and future.exception() is None else None
