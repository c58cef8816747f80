"""A load into a module whose memory is poisoned, and whose layer groups arrive when, and in the order in which, a test
says.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from tests.support.inspection import weights_of
from tests.support.paced import Hold, PacedSource, reads_of
from torch import nn

from teneral.loader.artifact import open_artifact
from teneral.loader.format.manifest import Tier
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.base import Source
from teneral.runtime.into.match import Rename
from teneral.runtime.into.module_load import ModuleLoad
from teneral.runtime.into.slots import find_slots

PAUSE_S = 0.001  # between two groups, so that the module comes to wait


class PoisonedLoad:
    """`load` is started. Every float that has not arrived is NaN; `arrive` lets groups come."""

    def __init__(
        self, module: nn.Module, source: Source, *, strict: bool = True, rename: Rename | None = None
    ) -> None:
        self.paced = PacedSource(source)
        self.manifest = open_artifact(self.paced)
        # Enough for every read to be requested at once, and released in any order.
        options = LoadOptions(connections=64, decode_threads=1)
        self.load = ModuleLoad(
            module, self.paced, self.manifest, strict=strict, rename=rename, options=options
        )
        self._poison(module)
        self._holds: dict[int, Hold] = {
            group.index: self.paced.hold(
                reads_of(
                    self.manifest,
                    *(part for tier in Tier for part in self.manifest.parts_of(group.index, tier)),
                )
            )
            for group in self.manifest.groups
        }
        self.load.start()

    def _poison(self, module: nn.Module) -> None:
        for group in self.manifest.groups:
            weights_of(self.load).slab(group.index)[:] = 0xFF  # a NaN in every float dtype
        for slot in find_slots(module).slots:
            if slot.name not in self.load.missing_keys and slot.tensor.is_floating_point():
                slot.tensor.data.fill_(torch.nan)

    def group_of(self, name: str) -> int:
        return self.manifest.by_name[name].group

    def arrive(self, groups: Iterable[int] | None = None) -> None:
        """Let these groups come, or all."""
        for group in self._holds if groups is None else groups:
            self._holds[group].release()

    @contextmanager
    def arriving(self, groups: Iterable[int]) -> Iterator[None]:
        """The groups come one after another, in parallel with the block's code."""

        def run() -> None:
            for group in order:
                self._holds[group].release()
                ended.wait(PAUSE_S)

        order, ended = list(groups), threading.Event()
        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
