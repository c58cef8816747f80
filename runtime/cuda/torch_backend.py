"""A device without kernels of ours: torch computes each sequence's attention by itself, and chooses row by row.

Slower, and waits for the device many times a step; but it runs whatever torch runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..engine.backend import BackendOptions, CpuBackend, DeviceStatistics
from ..engine.batch import StepBatch
from ..engine.step_batch import Rows, build_batch


class TorchBackend(CpuBackend):
    """As on a CPU, the numbers of a step being sent where the model is."""

    def __init__(self, model: Any, kv: Any, options: BackendOptions) -> None:
        super().__init__(model, kv, options.block_size)
        self._device: torch.device = model.device
        self._size = options.block_size

    @property
    def returns_early(self) -> bool:
        return True

    def build(self, parts: Sequence[Rows]) -> StepBatch:
        batch = build_batch(parts, self._size)
        return replace(
            batch,
            tokens=batch.tokens.to(self._device),
            positions=batch.positions.to(self._device),
            slots=batch.slots.to(self._device),
            logit_rows=batch.logit_rows.to(self._device),
        )

    def make_room(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def statistics(self) -> DeviceStatistics | None:
        return None
