"""The activation functions that a config.json may name (`config.ACTIVATIONS`)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def activation(name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    """The function of this name, which is one of `config.ACTIVATIONS`."""
    functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "silu": F.silu,
        "swish": F.silu,
        "gelu": F.gelu,
        "gelu_python": F.gelu,
        "gelu_new": _gelu_tanh,
        "gelu_pytorch_tanh": _gelu_tanh,
        "relu": F.relu,
    }
    return functions[name]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")
