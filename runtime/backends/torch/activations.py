"""The activation functions of a spec, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from ...models.spec import Activation


def activation(name: Activation) -> Callable[[torch.Tensor], torch.Tensor]:
    functions: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
        Activation.SILU: F.silu,
        Activation.GELU: F.gelu,
        Activation.GELU_TANH: _gelu_tanh,
        Activation.RELU: F.relu,
        Activation.TANH: torch.tanh,
    }
    return functions[name]


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")
