"""`load_into`: streaming of weights into a module that can be called immediately.

Its parameters stay the same objects. They are laid over the load's memory from the start, and each
part of the module waits, when it is called, for its own weights only. Invariant: no forward
computes with unfilled memory, as long as weights are read in the forward of the module that they
belong to, or of one below the gate (`gates.py` defines the gates). This module knows no model
families.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Self

import torch
from torch import nn

from ...loader.errors import TeneralError, UsageError
from ...loader.format.manifest import Manifest
from ...loader.load.accounting import LoadProgress
from ...loader.load.load import WeightLoad
from ...loader.load.options import LoadOptions
from ...loader.sources.base import Source, SourceOptions
from .files import Address, open_weights
from .gates import GateHooks, ModuleGate, find_gates
from .match import Action, Filling, Rename, bind, check_bindable, match_weights
from .slots import check_module, find_slots


def load_into(
    module: nn.Module,
    source: Address,
    *,
    strict: bool = True,
    rename: Rename | None = None,
    source_options: SourceOptions | None = None,
    options: LoadOptions | None = None,
    base: Address | None = None,
) -> ModuleLoad:
    """Begin to stream the weights at `source` into `module`; return as soon as the module can be
    called.

    `source` is the address of a packed artifact (pinned or not) or of plain safetensors: a folder
    or one file. `base` is the address of the artifact that a fine-tune's holds differences to; both
    are read. Blocks while the manifest or the headers are read. The module's parameters and
    persistent buffers stay the same objects and keep their dtype and device; if the file has
    another dtype, values are converted as they arrive. Buffers that no file holds stay as the
    module made them. A module wrapped by `torch.compile` is loaded completely before this returns.

    With `strict`, the names must be the same, except for a prefix that all names of a base model
    have, or lack. Without it, tensors that the file lacks keep their values, and are listed in
    `missing_keys`. `rename` returns the module's name for a name of the file, or None to leave it
    out.

    Raises before any weights are read: `WeightsMismatchError` if names or shapes do not fit,
    `InsufficientMemoryError`, `ModelError` for parameters without plain memory, `UsageError` for a
    module that is being loaded already, and the errors of the source. The module is then unchanged.
    """
    check_module(module)
    opened = open_weights(source, source_options, base)
    try:
        load = ModuleLoad(
            module,
            opened.source,
            opened.manifest,
            strict=strict,
            rename=rename,
            options=options,
        )
    except BaseException:
        opened.source.close()
        raise
    try:
        load.start()
        if _is_compiled(module):
            load.wait()
    except BaseException:
        load.close()
        raise
    return load


class ModuleLoad:
    """A load in progress into a module. Thread-safe. A context manager, which closes the load at
    its end.

    `missing_keys` are the module's names that the file lacks, `unexpected_keys` the file's that the
    module lacks.
    """

    def __init__(
        self,
        module: nn.Module,
        source: Source,
        manifest: Manifest,
        *,
        strict: bool = True,
        rename: Rename | None = None,
        options: LoadOptions | None = None,
    ) -> None:
        """Give the module its memory and its gates; nothing is read before `start`.

        Once started, the load closes the source. Raises the errors of `load_into`.
        """
        match = match_weights(find_slots(module), manifest, strict=strict, rename=rename)
        self.missing_keys = match.missing_keys
        self.unexpected_keys = match.unexpected_keys
        check_bindable(match.fillings)
        earlier = _find_lost_gates(module)
        weights = WeightLoad(source, manifest, options=options)
        # None once everything has arrived: the module then owns the memory alone.
        self._weights: WeightLoad | None = weights
        self._progress = weights.progress()
        self._source = source
        self._settled = [False] * len(manifest.groups)
        self._settling = [threading.Lock() for _ in manifest.groups]
        self._lost = False
        for hooks in earlier:
            hooks.remove()
        self._actions: dict[int, list[Action]] = bind(match.fillings, weights)
        self._groups_of = _groups_by_tensor(match.fillings)
        self._hooks = [self._install(gate) for gate in find_gates(module)]
        self._thread = threading.Thread(target=self._run, args=(weights,), name="teneral-into", daemon=True)

    def start(self) -> None:
        """Begin to read; return at once. Raises `RuntimeError` the second time."""
        if self._weights is not None:
            self._weights.start()
        self._thread.start()

    def wait(self, module: nn.Module | None = None, timeout_s: float | None = None) -> None:
        """Wait until `module` (a part of the loaded one), or everything, has its weights.

        Needed only if weights are read outside a forward. Raises the load's error, or
        `TimeoutError`.
        """
        if module is not None:
            self._wait_for(self._groups_below(module), timeout_s)
            return
        self._wait_for(range(len(self._settled)), timeout_s)
        if (weights := self._weights) is not None:
            weights.wait_checks(timeout_s)
        # The thread only has to remove the gates.
        self._thread.join()

    def is_ready(self) -> bool:
        """True if all weights have arrived."""
        return all(self._settled)

    def progress(self) -> LoadProgress:
        """The current progress of the load. Takes microseconds."""
        weights = self._weights
        return self._progress if weights is None else weights.progress()

    def close(self) -> None:
        """Cancel the rest of the load, and wait for its threads. Idempotent.

        After a cancelled load, calling the module raises `LoadCancelledError` until it is loaded
        again.
        """
        if (weights := self._weights) is not None:
            self._lost = not self.is_ready()
            weights.close()
        if self._thread.ident is not None:
            self._thread.join()
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _install(self, gate: ModuleGate) -> GateHooks:
        groups = sorted({group for tensor in gate.tensors for group in self._groups_of.get(id(tensor), ())})

        def wait() -> None:
            try:
                self._wait_for(groups, None)
            except TeneralError as error:
                error.add_note(f"while {gate.name or 'the module'} waited for its weights")
                raise

        return GateHooks(gate, wait, is_lost=lambda: self._lost)

    def _groups_below(self, module: nn.Module) -> list[int]:
        tensors = (*module.parameters(), *module.buffers())
        return sorted({group for tensor in tensors for group in self._groups_of.get(id(tensor), ())})

    def _wait_for(self, groups: Iterable[int], timeout_s: float | None) -> None:
        deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        for group in groups:
            weights = self._weights
            if weights is not None and not self._settled[group]:
                left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
                weights.wait(group, timeout_s=left_s)
                self._settle(group)

    def _settle(self, group: int) -> None:
        """Finish a group that has arrived, once, in the first thread that needs it."""
        with self._settling[group]:
            if not self._settled[group]:
                with torch.no_grad():
                    for action in self._actions.get(group, ()):
                        action()
                self._actions.pop(group, None)
                self._settled[group] = True

    def _run(self, weights: WeightLoad) -> None:
        """The body of the load's own thread: groups that have arrived are finished without waiting
        for a call of the module.
        """
        try:
            self._wait_for(range(len(self._settled)), None)
            weights.wait_checks()
        except Exception:  # noqa: BLE001 - every waiting thread raises the same error, and no thread waits here
            self._lost = True
        weights.join()
        self._source.close()
        if not self._lost:
            for hooks in self._hooks:
                hooks.remove()
            self._progress = weights.progress()
            self._weights = None


def _find_lost_gates(module: nn.Module) -> set[GateHooks]:
    """Gates of loads that ended early. Raises `UsageError` if there are gates of a load in
    progress.
    """
    found = GateHooks.find(module)
    if not all(hooks.is_lost() for hooks in found):
        raise UsageError(
            "the module is being loaded already",
            hint="Wait for that load, or close it, before you start another.",
        )
    return found


def _groups_by_tensor(fillings: Iterable[Filling]) -> dict[int, set[int]]:
    """The groups of each of the module's tensors, by its id."""
    return {
        id(tensor): {entry.group for entry in (filling.entry, *filling.twins)}
        for filling in fillings
        for tensor in filling.slot.tensors
    }


def _is_compiled(module: nn.Module) -> bool:
    """True if calling it, or a part of it, runs compiled code, which bypasses the gates."""
    return any(
        type(each).__name__ == "OptimizedModule" or each._compiled_call_impl is not None
        for each in module.modules()
    )
