"""An instance: from an address to a running engine, with everything in parallel.

`start` returns at once. A child process then streams the weights into shared memory, and here three
threads work in parallel: one follows that stream, one loads the tokenizer, one builds the model's
skeleton over storage that is still empty, and starts the engine. Each result is a future; a request
waits for the ones that it needs, and its forward pass for the layers that it has reached. The first
failure fails the instance, and everything that waits for it.

An instance knows no HTTP and no platform; handlers translate for it.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, cast

from ..loader.artifact import open_model
from ..loader.errors import TeneralError, UsageError
from ..loader.memory.limits import return_free_memory
from ..loader.pin import split_pin
from ..loader.sources.base import Remote
from ..loader.sources.http.outage import show_outages
from ..loader.timeline import Timeline
from .config import ServeConfig
from .errors import DrainingError, ModelError
from .files import TOKENIZER_NAME, ModelFiles, is_onnx, seems_onnx
from .loading import (
    check_whole,
    load_here,
    paging_statistics,
    placement_statistics,
    tensor_digests,
    verify_exact,
    wait_exact,
    warn_of_cache,
    wire_share_of,
)
from .metrics import on_the_wire
from .start import Helpers, launch_helpers
from .state import Forecast, State, resolve, result_or_none

if TYPE_CHECKING:
    from ..loader.format.manifest import Manifest
    from ..loader.load.base import AnyLoad
    from ..loader.load.targets.shared import SharedBase
    from ..loader.sources.base import Source
    from .adapters.registry import AdapterRegistry
    from .engine.embedder import Embedder
    from .engine.engine import Engine
    from .kv.snapshots.service import SnapshotService
    from .onnx.runner import OnnxRunner
    from .opening import Opening
    from .resident import BaseInMemory, SharedBaseInMemory
    from .text.settings import TextSettings
    from .text.tokenizer import TextTokenizer

CHAT_DELAY_S = 1.0  # from the last weights to the start of the process that renders chat templates


class Instance:
    """One model being served. Thread-safe. Close it with `close`, or use it as a context manager."""

    def __init__(
        self,
        config: ServeConfig,
        *,
        timeline: Timeline | None = None,
        source: Source | None = None,
        helpers: Helpers | None = None,
        base: BaseInMemory | None = None,
        opening: Opening | None = None,
        server_first: bool = False,
    ) -> None:
        """With `source`, the model is read from there instead of `config.model`; `helpers` are the
        processes that load it, if they were started already. The instance closes both. With `base`,
        the model is a fine-tune of it, of which only the differences are read; the base's instance
        must be closed after this one. `opening` has opened the model ahead. With `server_first` the
        cores are the caller's until it sets `full_speed`: the model is not built before, and decoding
        leaves two of them alone.
        """
        self.config = config
        self.timeline = timeline or Timeline()
        self.model_name = config.served_name
        self.created_unix_s = int(time.time())
        self.text_settings: Future[TextSettings] = Future()  # set before the tokenizer
        self.tokenizer: Future[TextTokenizer] = Future()
        self.engine: Future[Engine] = Future()
        self.embedder: Future[Embedder] = Future()
        self.onnx: Future[OnnxRunner] = Future()
        self.kind: Future[str] = Future()
        self.ended: Future[TeneralError | None] = Future()  # resolves when the instance fails or is closed
        self.opening: Future[tuple[Source, Manifest]] = Future()  # when the manifest was read, and fits
        self.exact: Future[None] = Future()  # when all weights are
        self._opening = opening
        self._source = source if opening is None else opening.source
        self._helpers = helpers
        # Set by `opening` at the latest.
        self.base: BaseInMemory | SharedBaseInMemory | None = base
        # Once `opening` is set, only where the load uses it.
        self._shared: SharedBase | None = helpers.shared if helpers else None
        self.has_base = base is not None  # in memory: it loads the differences alone
        self.load: AnyLoad | None = helpers.load if helpers else None  # None before it begins
        self._snapshots: SnapshotService | None = None
        # Set together with the engine, if adapters are configured.
        self.adapters: AdapterRegistry | None = None
        self._draining = False
        self._wire_share = 1.0  # bytes of the network for one of the load's
        self._failure: TeneralError | None = None
        self._threads: list[threading.Thread] = []
        self._closed = threading.Event()
        # The build and the load may take all cores.
        self.full_speed = threading.Event() if opening is None else opening.full_speed
        if not server_first:
            self.full_speed.set()
        self._lock = threading.Lock()

    # lifecycle

    def start(self) -> Instance:
        """Start everything; return at once, or when the imports of a local ONNX model are done.
        Startup errors fail the instance like later ones.
        """
        if self._helpers is None and self._source is None and self.base is None:
            # Before all imports, to run in parallel to them.
            self._run(self._start_helpers)
        if self.config.kv_snapshot is not None:
            self._run(self._start_snapshots)
        for name, work in (("open", self._open), ("tokenizer", self._load_tokenizer), ("model", self._build)):
            thread = threading.Thread(target=self._run, args=(work,), name=f"teneral-{name}", daemon=True)
            self._threads.append(thread)
            thread.start()
        if seems_onnx(self.config.model):
            # Here, too, before the caller imports a web server: decode threads wait for numpy, and
            # two threads that import share the GIL.
            from .onnx.start import import_ahead

            import_ahead(self.timeline)
        return self

    def drain(self, timeout_s: float) -> bool:
        """Refuse new work and let running work finish. Returns True if nothing was cut off."""
        self._draining = True
        deadline_s = time.monotonic() + timeout_s
        finished = True
        for worker in self._workers():
            finished &= worker.drain(max(0.0, deadline_s - time.monotonic()))
        self.save_snapshot(deadline_s - time.monotonic())
        return finished

    def save_snapshot(self, timeout_s: float) -> bool:
        """Save computed prefixes for the next instance, if configured, within this time. Blocks;
        raises nothing. Returns True if something was saved.
        """
        return self._snapshots is not None and self._failure is None and self._snapshots.save(timeout_s)

    def quiesce(self) -> None:
        """Prepare for, or recover from, a freeze of the process: close connections to stores and
        drop addresses and credentials, which are renewed on demand. Does not block.
        """
        if isinstance(self._source, Remote):
            self._source.quiesce()
        if self._snapshots is not None:
            self._snapshots.quiesce()
        if self.adapters is not None:
            self.adapters.quiesce()

    def wait_opened(self, timeout_s: float) -> bool:
        """Block until the manifest was read; False at the time limit. Raises the instance's failure."""
        try:
            self.opening.result(timeout_s)
        except TimeoutError:
            return False
        return True

    def close(self) -> None:
        """Stop everything and free memory. Tensors that are still referenced stay valid.
        Idempotent.
        """
        self._draining = True
        self._closed.set()
        self.full_speed.set()
        self._settle(DrainingError("the instance was closed"))
        tokenizer = result_or_none(self.tokenizer)
        if tokenizer is not None and (self.base is None or tokenizer is not self.base.tokenizer):
            tokenizer.close()
        for worker in self._workers():
            # Waiting callers have their answer now; the pass itself may wait at a gate, which …
            worker.stop(0)
        if self.load is not None:
            self.load.close()  # … opens, with an error, here
        if self._helpers is not None:
            self._helpers.close()
        for worker in self._workers():
            worker.stop()
        if self._source is not None:
            self._source.close()
        if self._snapshots is not None:
            self._snapshots.close()
        if self.adapters is not None:
            self.adapters.close()
        with self._lock:
            if not self.ended.done():
                self.ended.set_result(self._failure)

    def release(self, timeout_s: float = 10.0) -> None:
        """Drop the model, after `close`: references to this instance then hold none of its memory.
        Waits for the threads that were building it.
        """
        deadline_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        if self._helpers is not None and self._helpers.load is not None:
            # The process that launched them may still reference them.
            self._helpers.load.release()
        if self._shared is not None:
            self._shared.close()  # after all threads, which read its files
        self.text_settings, self.tokenizer, self.opening = Future(), Future(), Future()
        self.engine, self.embedder, self.onnx = Future(), Future(), Future()
        self._settle(DrainingError("the instance was closed"))
        self.load = self._helpers = self._source = self._snapshots = self.adapters = None
        self.base = self._shared = self._opening = None

    def __enter__(self) -> Instance:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait_exact(self, timeout_s: float | None = None) -> bool:
        """Block until all weights are exact; False if the instance has failed or was closed before,
        or at the time limit.
        """
        try:
            return self.exact.exception(timeout_s) is None
        except TimeoutError:
            return False

    def as_base(self) -> BaseInMemory:
        """This instance's model, for instances of its fine-tunes. Blocks until all of it is exact.

        Raises the instance's failure, and `UsageError` for a model that cannot be a base.
        """
        self.exact.result()
        if self.kind.result() == "onnx":
            raise UsageError(
                "an ONNX model cannot be the base of a fine-tune that is switched to", key="model"
            )
        from .resident import base_in_memory

        assert self.load is not None
        model = self.engine.result().model if self.kind.result() == "decoder" else None
        return base_in_memory(self.load, self.text_settings.result(), self.tokenizer.result(), model)

    # state

    @property
    def failure(self) -> TeneralError | None:
        return self._failure

    @property
    def digest(self) -> bytes | None:
        """The digest of the manifest, once a load could begin; None for plain safetensors. Raises
        the failure.
        """
        return self.opening.result()[1].digest

    @property
    def state(self) -> State:
        if self._failure is not None:
            return State.FAILED
        if self._draining:
            return State.DRAINING
        if not self._workers():
            return State.LOADING
        return State.READY if self._all_exact() else State.PARTIAL

    def progress(self) -> dict[str, Any]:
        """The progress of the load, JSON-ready. Bytes are those that cross the network."""
        if self.load is None:
            return {"stored_bytes": 0, "fetched_bytes": 0, "fraction": 0.0}
        progress = self.load.progress()
        total = progress.stored_bytes_total
        return {
            "stored_bytes": round(total * self._wire_share),
            "fetched_bytes": round(progress.fetched_bytes * self._wire_share),
            "fraction": round(progress.fetched_bytes / total, 4) if total else 1.0,
            "groups": progress.num_groups,
            "groups_draft": progress.groups_ready_draft,
            "groups_exact": progress.groups_exact,
        }

    def opened(self) -> tuple[Source, Manifest] | None:
        """The model's source and manifest; None before the manifest was read, and after a failed read."""
        return result_or_none(self.opening)

    def forecast(self) -> Forecast | None:
        """The load's rate, and the time of a first token at it; None where it is unknown or all is loaded."""
        if self.load is None or not self.opening.done() or self.opening.exception() is not None:
            return None
        progress = self.load.progress()
        left_s = progress.left_s
        if not 0.0 < left_s < math.inf:
            return None
        # Imported with the model.
        from ..loader.format.layout import is_expert
        from .engine.arrival import token_s

        manifest = self.load.manifest
        is_mixture = any(is_expert(group.name) for group in manifest.groups)
        return Forecast(progress.rate_bytes_per_s * self._wire_share, left_s + token_s(manifest), is_mixture)

    def statistics(self) -> dict[str, Any]:
        """The figures of every part that exists so far."""
        figures: dict[str, Any] = {"state": str(self.state), "progress": self.progress()}
        if self.load is not None:
            statistics = self.load.statistics()
            if statistics is not None:
                figures["load"] = on_the_wire(statistics, self._wire_share)
            if (placement := placement_statistics(self.load)) is not None:
                figures["placement"] = placement
            if (paging := paging_statistics(self.load)) is not None:
                figures["experts"] = paging
        if self._shared is not None:
            figures["shared_base_bytes"] = self._shared.size_bytes
        for worker in self._workers():
            figures[type(worker).__name__.lower()] = worker.statistics()
        if self._snapshots is not None:
            figures["kv_snapshot"] = self._snapshots.statistics()
        if self.adapters is not None:
            figures["adapters"] = self.adapters.statistics()
        return figures

    # the three threads

    def _start_helpers(self) -> None:
        launched = launch_helpers(self.config, self.timeline)
        if launched is not None:
            self._helpers = launched.adopt(self.timeline)
            self.load = self._helpers.load

    def _start_snapshots(self) -> None:
        # Few instances have them.
        from .kv.snapshots.service import SnapshotService

        self._snapshots = SnapshotService.of(self.config, self.timeline)
        self._snapshots.start(self.opening)

    def _open(self) -> None:
        address, digest = split_pin(self.config.model)
        if self._opening is not None:
            self.load = self._opening.result()
        if self._source is None:
            self._source = open_model(address, self.config.source_options)
            show_outages(self._source, self.timeline)
        shared, self._shared = self._shared, None
        if self.load is None:
            reserve = self._helpers.reserve if self._helpers is not None else None
            base = None if self.base is None else cast("BaseInMemory", self.base).weights
            cores = self.full_speed
            begun = load_here(self._source, digest, self.config, self.timeline, reserve, base, cores, shared)
            self.load, self._shared = begun.load, begun.shared
            if begun.base is not None:
                from .resident import SharedBaseInMemory

                assert begun.shared is not None
                options, held = self.config.load_options, begun.shared.files
                files = ModelFiles(self._source, begun.base.manifest, options, held)
                self.base = SharedBaseInMemory(begun.base, files.json("config.json", required=True))
        if shared is not None and self._shared is None:
            shared.close()  # else its memory would stay as long as this process does
        manifest = self.load.manifest
        self._wire_share = wire_share_of(self._source, self.timeline)
        self.opening.set_result((self._source, manifest))
        expected = None
        if self.config.verify_exact:
            check_whole(self.load)
            expected = tensor_digests(self.files(), manifest)
        self._watch_load(self.load, expected)

    def files(self) -> ModelFiles:
        """The model's small files, once `opening` has a result. Raises the failure."""
        source, manifest = self.opening.result()
        held = None if self._shared is None else self._shared.files
        return ModelFiles(source, manifest, self.config.load_options, held)

    def _watch_load(self, load: AnyLoad, expected: tuple[bytes, ...] | None) -> None:
        """Wait for the whole load, so that an idle instance also fails with its load, or if its
        tensors do not have the `expected` digests.
        """
        wait_exact(load)
        self.timeline.mark("process", "all weights exact")
        if expected is not None:
            with self.timeline.span("process", "verify exact"):
                verify_exact(load, expected)
        resolve(self.exact, None)
        if self.config.cache_dir is not None:
            # Until everything is written to the cache for the next container.
            load.join()
            warn_of_cache(load)

    def _load_tokenizer(self) -> None:
        _, manifest = self.opening.result()
        if is_onnx(manifest) and not any(file.name == TOKENIZER_NAME for file in manifest.files):
            refuse = ModelError(f"{self.model_name} takes tensors and has no tokenizer")
            self.text_settings.set_exception(refuse)
            self.tokenizer.set_exception(refuse)
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
            from .text.tokenizer import TextTokenizer

            with self.timeline.span("tokenizer", "load"):
                tokenizer = TextTokenizer.from_files(self.files().read, adjust=self._adjust_settings)
        resolve(self.tokenizer, tokenizer)
        # The first chat is not to wait for its process; but the first tokens come first.
        if self.wait_exact() and not self._closed.wait(CHAT_DELAY_S):
            tokenizer.chat_template.start()
            return_free_memory()

    def _adjust_settings(self, settings: TextSettings) -> TextSettings:
        """The model's own settings with the configuration's replacements. Raises `UsageError`."""
        if self.config.chat_template is not None:
            from .text.settings import read_template  # rarely used

            settings = settings.with_template(read_template(self.config.chat_template))
        resolve(self.text_settings, settings)
        return settings

    def _build(self) -> None:
        from .building import ModelBuild

        ModelBuild(self, snapshots=self._snapshots, fail=self._fail).run()

    # errors

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except TeneralError as error:
            self._fail(error)
        # a bug in a thread must end the instance, not leave it waiting forever
        except Exception as error:  # noqa: BLE001
            failure = ModelError(f"the instance could not start: {type(error).__name__}: {error}")
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
        with self._lock:
            if not self.ended.done():
                self.ended.set_result(error)

    def _settle(self, error: TeneralError) -> None:
        """Answer everything that waits, with this error."""
        futures = (
            self.opening,
            self.exact,
            self.text_settings,
            self.tokenizer,
            self.engine,
            self.embedder,
            self.onnx,
            self.kind,
        )
        for future in futures:
            with self._lock:
                if not future.done():
                    future.set_exception(error)

    def _workers(self) -> list[Engine | Embedder | OnnxRunner]:
        """The workers that exist so far: an engine, an embedder, or an ONNX model's runner."""
        found = (result_or_none(self.engine), result_or_none(self.embedder), result_or_none(self.onnx))
        return [worker for worker in found if worker is not None]

    def _all_exact(self) -> bool:
        if self.load is None:
            return False
        progress = self.load.progress()
        return progress.groups_exact == progress.num_groups
