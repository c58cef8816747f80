"""One model being served: its state, its figures, how it drains and ends. `startup.py` starts it.

An instance knows no HTTP and no platform; handlers translate for it.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from ...loader.errors import TeneralError, UsageError
from ...loader.sources.base import Remote
from ..errors import DrainingError
from ..state import Forecast, State
from .startup import Startup, resolve, result_or_none

if TYPE_CHECKING:
    from ...loader.format.manifest import Manifest
    from ...loader.sources.base import Source
    from .base import BaseInMemory


class Instance(Startup):
    """One model being served. Thread-safe. Close it with `close`, or use it as a context manager."""

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
        for worker in self._workers():
            # Waiting callers have their answer now; the pass itself may wait at a gate, which …
            worker.stop(0)
        if self.load is not None:
            self.load.close()  # … opens, with an error, here
        running = [worker for worker in self._workers() if not worker.stop()]
        tokenizer = result_or_none(self.tokenizer)
        if tokenizer is not None and (self.base is None or tokenizer is not self.base.tokenizer):
            tokenizer.close()
        if self._helpers is not None:
            self._helpers.close()
        for worker in running:  # which may have waited for the tokenizer
            worker.stop()
        if self._source is not None:
            self._source.close()
        if self._snapshots is not None:
            self._snapshots.close()
        if self.adapters is not None:
            self.adapters.close()
        resolve(self.ended, self._failure)

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
        self.base = self._shared = self._launched = self._opening = None

    def __enter__(self) -> Instance:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def as_base(self) -> BaseInMemory:
        """This instance's model, for instances of its fine-tunes. Blocks until all of it is exact.

        Raises the instance's failure, and `UsageError` for a model that cannot be a base.
        """
        self.exact.result()
        if self.kind.result() == "onnx":
            raise UsageError(
                "an ONNX model cannot be the base of a fine-tune that is switched to", key="model"
            )
        from .base import base_in_memory

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
        from ...loader.format.layout import is_expert
        from ..engine.arrival import token_s

        manifest = self.load.manifest
        is_mixture = any(is_expert(group.name) for group in manifest.groups)
        return Forecast(progress.rate_bytes_per_s * self._wire_share, left_s + token_s(manifest), is_mixture)

    def statistics(self) -> dict[str, Any]:
        """The figures of every part that exists so far."""
        from ..metrics import on_the_wire

        figures: dict[str, Any] = {"state": str(self.state), "progress": self.progress()}
        if self.load is not None:
            statistics = self.load.statistics()
            if statistics is not None:
                figures["load"] = on_the_wire(statistics, self._wire_share)
            if self.load.place == "device" and (placement := self.load.device_statistics()) is not None:
                figures["placement"] = placement
            if self.load.experts is not None:
                figures["experts"] = self.load.experts.statistics()
        if self._shared is not None:
            figures["shared_base_bytes"] = self._shared.size_bytes
        for worker in self._workers():
            figures[type(worker).__name__.lower()] = worker.statistics()
        if self._snapshots is not None:
            figures["kv_snapshot"] = self._snapshots.statistics()
        if self.adapters is not None:
            figures["adapters"] = self.adapters.statistics()
        return figures

    def _all_exact(self) -> bool:
        if self.load is None:
            return False
        progress = self.load.progress()
        return progress.groups_exact == progress.num_groups and not progress.unchecked_files
