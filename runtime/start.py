"""The first thing that an instance does: send for its weights and its tokenizer, before anything else is even imported.

Imports little, and nothing that starts a thread.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Self

from ..loader.device.detect import CPU, choose_device, index_of
from ..loader.load.launch import Launched, Prepared, Task, is_possible, launch
from ..loader.pin import split_pin
from ..loader.timeline import Timeline
from .config import ServeConfig

if TYPE_CHECKING:
    from ..loader.device.base import Device
    from ..loader.load.device_load import DeviceLoad
    from ..loader.load.process_load import ProcessLoad
    from ..loader.memory.arena import Reserve
    from ..loader.process.helper import ProcessContext
    from .text.chat import ChatWorker
    from .text.launch import LaunchedTokenizer, PreparedTokenizer
    from .text.remote import TokenizerProcess


class LaunchedHelpers(NamedTuple):
    """Processes at work, launched and not yet adopted."""

    load: Launched | None  # None: the instance loads in its own threads
    tokenizer: LaunchedTokenizer
    kernel_dir: str | None = None  # as the configuration has it
    chat_worker: ChatWorker | None = None  # one that waits
    reserve: Reserve | None = None  # memory for a load in the instance's own threads

    def adopt(self, timeline: Timeline) -> Helpers:
        """Heed them, here. `timeline` has the origin that they were given. No process can be forked afterwards where
        another device than the CPU is used.
        """
        from .text.remote import TokenizerProcess  # while they are at work

        tokenizer = TokenizerProcess(self.tokenizer, timeline=timeline, chat_worker=self.chat_worker)
        return Helpers(self._follow(timeline), tokenizer, self.reserve)

    def _follow(self, timeline: Timeline) -> ProcessLoad | DeviceLoad | None:
        if self.load is None:
            return None
        device = self.load.task.device
        if device == CPU:
            from ..loader.load.process_load import ProcessLoad  # as above

            return ProcessLoad(self.load, timeline=timeline)
        from ..loader.load.device_load import DeviceLoad  # as above

        return DeviceLoad.follow(self.load, opener(device, self.kernel_dir, timeline), timeline=timeline)


class Helpers(NamedTuple):
    """The processes beside an instance's own: each does what must not wait for this one's GIL."""

    load: ProcessLoad | DeviceLoad | None  # None: the instance loads in its own threads
    tokenizer: TokenizerProcess
    reserve: Reserve | None = None  # memory for a load in those

    def close(self) -> None:
        """End them. The weights that have arrived stay. Idempotent."""
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
    context: ProcessContext | None = None,
    fork: bool = False,
) -> LaunchedHelpers | None:
    """An instance's helper processes, at work; None with `loader = thread`, which has none.

    Takes over what is prepared, and has it take the `context`, if they are not its own. `fork` is for a process
    that has just begun, as `HelperProcess` has it. Returns at once. Raises `UsageError` for an invalid address, or a
    device that cannot be used, and `OSError` when the system refuses another process.
    """
    if reserve is not None:
        reserve.stop()  # from now on only the load takes pages
    if config.loader == "thread":
        if reserve is not None:
            reserve.release()
        for each in (prepared, tokenizer):
            if each is not None:
                each.discard()
        if chat_worker is not None:
            chat_worker.end()
        return None
    address, digest = split_pin(config.model)
    source, options = config.source_options, config.load_options
    device = choose_device(config.device)
    began_at = timeline.started_at
    load = files = None
    if prepared is not None or _loads_in_process(config, device):
        prepared = prepared or Prepared(fork=fork)
        if reserve is not None:
            reserve.release()
            reserve = None
        files = prepared.files
        load = launch(Task(address, digest, source, options, began_at, device, context), prepared)
    from .text.launch import PreparedTokenizer, TokenizerTask  # the weights are sent for without it

    tokenizer = tokenizer or PreparedTokenizer(files=files, fork=fork)
    launched = tokenizer.launch(TokenizerTask(address, source, options, began_at, context))
    return LaunchedHelpers(load, launched, config.kernel_dir, chat_worker, reserve)


def _loads_in_process(config: ServeConfig, device: str) -> bool:
    """Whether weights are better read in another process: where the import of torch would hold up threads."""
    if config.loader == "process":
        return is_possible()
    return is_possible() and (device != CPU or config.backend == "torch")


def opener(device: str, kernel_dir: str | None, timeline: Timeline) -> Callable[[], Device]:
    """A function that opens a CUDA device in the thread that calls it. Compiled kernels are taken from the folder, and
    then from the place where the last server that had none left them.
    """

    def open_device() -> Device:
        from pathlib import Path  # a device's business

        from ..loader.device.cuda import CudaDevice

        folders = [Path(kernel_dir)] if kernel_dir else []
        with suppress(RuntimeError):  # a user without a home: then they are compiled each time
            folders.append(Path.home() / ".cache" / "teneral" / "kernels")
        return CudaDevice(index_of(device), timeline=timeline, cubin_folders=folders)

    return open_device
