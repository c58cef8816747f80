"""Stream weights into a module of your own, and compute while they arrive.

    python examples/any_module.py [ADDRESS]

Without an address it first writes a model of its own, of 200 MB, to a temporary folder.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

import teneral


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., width) → the same
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, width: int = 1024, num_layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # (..., width) → (..., 10)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def main(address: str | Path) -> None:
    with teneral.empty_weights():
        net = Net().eval()
    started_s = time.perf_counter()
    with teneral.load_into(net, address) as load, torch.inference_mode():
        print(f"the module may be called after {1e3 * (time.perf_counter() - started_s):.0f} ms")
        net(torch.ones(1, 1024))
        print(f"first output                   {1e3 * (time.perf_counter() - started_s):.0f} ms")
        load.wait()
        print(f"everything is there            {1e3 * (time.perf_counter() - started_s):.0f} ms")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            save_file(Net().state_dict(), Path(folder) / "model.safetensors")
            main(folder)
