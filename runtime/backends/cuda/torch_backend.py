"""The backend for a device without kernels: torch computes each sequence's attention separately,
and tokens are chosen on the host.

Slower, with many waits for the device a step; but it runs any model that torch runs.
"""

from __future__ import annotations

import torch

from ..host import HostBackend


class TorchDeviceBackend(HostBackend):
    """A `HostBackend` whose executor sends a step's numbers to the model's device."""

    def make_room(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
