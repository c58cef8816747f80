"""The helper processes of an instance: launched before anything else is imported, adopted later.

Imports little, and nothing that starts a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Self

from ...loader.device.detect import CPU, index_of
from ...loader.errors import UsageError
from ...loader.sources.open import split_pin
from ...loader.timeline import Timeline
from ..config import ServeConfig

if TYPE_CHECKING:
    from ...loader.device.base import Device
    from ...loader.load.device_load import DeviceLoad
    from ...loader.load.launch import Launched, Prepared
    from ...loader.load.process_load import ProcessLoad
    from ...loader.load.targets.shared import SharedBase
    from ...loader.memory.arena import Reserve
    from ...loader.process.helper import ProcessContext
    from ..text.chat import ChatWorker
    from ..text.launch import LaunchedTokenizer, PreparedTokenizer
    from ..text.remote import TokenizerProcess


class LaunchedHelpers(NamedTuple):
    """Helper processes launched but not yet adopted."""

    load: Launched | None  # None: the instance loads in its own threads
    tokenizer: LaunchedTokenizer
    kernel_dir: str | None = None  # from the configuration
    chat_worker: ChatWorker | None = None  # an idle one
    reserve: Reserve | None = None  # memory for a load in the instance's own threads
    shared: SharedBase | None = None  # a base in memory, for such a load
    device_percent: int | None = None  # from the configuration

    def adopt(self, timeline: Timeline) -> Helpers:
        """Adopt the processes. `timeline` must have their origin. No process can be forked
        afterwards if another device than the CPU is used.
        """
        # Imported while they are running.
        from ..text.remote import TokenizerProcess

        tokenizer = TokenizerProcess(self.tokenizer, timeline=timeline, chat_worker=self.chat_worker)
        return Helpers(self._follow(timeline), tokenizer, self.reserve, self.shared)

    def _follow(self, timeline: Timeline) -> ProcessLoad | DeviceLoad | None:
        if self.load is None:
            return None
        device = self.load.task.device
        if device == CPU:
            from ...loader.load.process_load import ProcessLoad  # as above

            return ProcessLoad(self.load, timeline=timeline)
        from ...loader.load.device_load import DeviceLoad  # as above

        opened = opener(device, self.kernel_dir, timeline, self.device_percent)
        return DeviceLoad.follow(self.load, opened, timeline=timeline)


class Helpers(NamedTuple):
    """An instance's helper processes: each does work that must not wait for this one's GIL."""

    load: ProcessLoad | DeviceLoad | None  # None: the instance loads in its own threads
    tokenizer: TokenizerProcess
    reserve: Reserve | None = None  # memory for a load in those threads
    shared: SharedBase | None = None  # a base in memory, for such a load

    def close(self) -> None:
        """End the processes. Arrived weights stay. Idempotent."""
        if self.load is not None:
            self.load.close()
        self.tokenizer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def launch_helpers(
    config: ServeConfig,
    timeline: Timeline,
    *,
    prepared: Prepared | None = None,
    tokenizer: PreparedTokenizer | None = None,
    chat_worker: ChatWorker | None = None,
    reserve: Reserve | None = None,
    shared: SharedBase | None = None,
    context: ProcessContext | None = None,
    fork: bool = False,
) -> LaunchedHelpers | None:
    """Launch an instance's helper processes; None with `loader = thread`, which has none, and for a
    local ONNX model without a tokenizer, which needs none.

    Adopts prepared processes, and passes the `context` to them if they have none. `fork` is for a
    process that has just begun, as in `HelperProcess`. Returns at once. Raises `UsageError` for an
    invalid address or an unusable device, and `OSError` if the system refuses another process.
    """
    if reserve is not None:
        reserve.stop()  # from now on only the load allocates pages
    is_fresh = prepared is None and tokenizer is None
    if config.loader == "thread" or (is_fresh and _needs_none(config)):
        if reserve is not None:
            reserve.release()
        for each in (prepared, tokenizer):
            if each is not None:
                each.discard()
        if chat_worker is not None:
            chat_worker.end()
        if shared is not None:
            shared.close()
        return None
    address, digest = split_pin(config.model)
    source, options = config.source_options, config.load_options
    device = config.chosen_device
    began_at = timeline.started_at
    load = files = None
    if prepared is not None or _loads_in_process(config, device):
        from ...loader.load.launch import Prepared, Task, launch  # most loads are in the server's own threads

        refuse_weights_bytes(config)
        prepared = prepared or Prepared(fork=fork)
        if reserve is not None:
            reserve.release()
        if shared is not None:
            shared.close()
        reserve = shared = None
        files = prepared.files
        load = launch(Task(address, digest, source, options, began_at, device, context), prepared)
    # The weights are requested without it.
    from ..text.launch import PreparedTokenizer, TokenizerTask

    tokenizer = tokenizer or PreparedTokenizer(files=files, fork=fork)
    launched = tokenizer.launch(TokenizerTask(address, source, options, began_at, context))
    return LaunchedHelpers(
        load, launched, config.kernel_dir, chat_worker, reserve, shared, config.device_percent
    )


def _needs_none(config: ServeConfig) -> bool:
    """True for a local ONNX model without a tokenizer that is loaded in the server's own threads."""
    if config.loader == "process" or "://" in config.model.removeprefix("file://"):
        return False
    # Others read their manifest later.
    from ..files import seems_onnx

    return seems_onnx(config.model, without_tokenizer=True) and not _loads_in_process(
        config, config.chosen_device
    )


def _loads_in_process(config: ServeConfig, device: str) -> bool:
    """True if another process should read the weights, because the import of torch would block
    threads.
    """
    for_torch = config.backend != "direct" and (device != CPU or config.backend == "torch")
    if config.loader != "process" and not for_torch:
        return False
    from ...loader.load.launch import is_possible  # few loads are

    return is_possible()


def refuse_weights_bytes(config: ServeConfig) -> None:
    """Raise `UsageError` if it is set, for loads that lack it."""
    if config.weights_bytes is not None:
        raise UsageError(
            "weights_bytes is for loads in the server's own threads, on a CPU",
            key="weights_bytes",
            hint="Leave it out, or leave --loader, --device and --backend at auto.",
        )


def opener(
    device: str, kernel_dir: str | None, timeline: Timeline, device_percent: int | None
) -> Callable[[], Device]:
    """A function that opens a CUDA device in its calling thread."""

    def open_device() -> Device:
        # Only devices need it.
        from ...loader.device.compile import kernel_folders
        from ...loader.device.cuda import CudaDevice

        return CudaDevice(
            index_of(device),
            timeline=timeline,
            cubin_folders=kernel_folders(kernel_dir),
            max_percent=device_percent or 100,
        )

    return open_device
