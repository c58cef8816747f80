"""A device without kernels of ours: torch computes each sequence's attention by itself, and tokens are chosen here.

Slower, and waits for the device many times a step; but it runs whatever torch runs.
"""

from __future__ import annotations

import torch

from ..host import HostBackend


class TorchDeviceBackend(HostBackend):
    """As on a CPU: the executor sends the numbers of a step where the model is."""

    def make_room(self) -> None:
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
