"""Decoders to be given copies of their weights, a library that makes them, and what came of it."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.timeline import Timeline
from teneral.runtime.kernels import onednn
from teneral.runtime.kernels.choice import Figures, LinearBackend
from teneral.runtime.kernels.copies import ROUNDING
from teneral.runtime.kernels.kinds import products_of
from teneral.runtime.kernels.prepack import prepack
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.linear import Linear
from teneral.runtime.models.packed import CannotPackError
from teneral.runtime.models.quantized import QuantizedLinear
from teneral.runtime.weights import DictWeights

TORCH, ONEDNN, KERNELS = LinearBackend.TORCH, LinearBackend.ONEDNN, LinearBackend.KERNELS
ONNX, OPENVINO = LinearBackend.ONNX_RUNTIME, LinearBackend.OPENVINO
PLENTY = 1 << 30
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}

needs_onednn = pytest.mark.skipif(
    not onednn.can_pack(Linear(torch.zeros(64, 64, dtype=torch.bfloat16))),
    reason="torch packs no bf16 on this processor",
)
_INTEGERS = QuantizedLinear(torch.zeros(64, 64, dtype=torch.int8), torch.ones(64, 1))
library_backends = [
    pytest.param(
        backend, marks=pytest.mark.skipif(not library.can_pack(_INTEGERS), reason=f"{backend} is not here")
    )
    for backend, library in ROUNDING.items()
]


class Plain:
    """A library whose products are torch's, in memory of its own; counts them."""

    def __init__(self, *, fails_at: int | None = None, factor: float = 1.0) -> None:
        self.num_made = self.num_computed = 0
        self.row_counts: set[int] = set()
        self.fails_at = fails_at
        self.factor = factor

    def can_pack(self, linear: Linear | QuantizedLinear) -> bool:
        return True

    def packed_bytes(self, linear: Linear | QuantizedLinear) -> int:
        return linear.weight.nbytes

    def Product(self, linear: QuantizedLinear, *, num_threads: int) -> Any:
        if self.num_made == self.fails_at:
            raise CannotPackError("there is no memory left")
        assert num_threads == 1
        self.num_made += 1
        own = QuantizedLinear(linear.weight.clone(), linear.scale.clone(), linear.zero)

        def compute(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            self.num_computed += 1
            self.row_counts.add(len(x))
            product = own.in_torch(x) * self.factor
            return product if bias is None else product + bias

        return compute


def decoder(dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Decoder:
    model = tiny_model("qwen2", **overrides).to(dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(model).items()}
    built = build_model(config_json(model), DictWeights(tensors))
    assert isinstance(built, Decoder)
    return built


def integers(bias: torch.Tensor | None = None) -> QuantizedLinear:
    """96 rows of 64 columns in 4 bits, two scales a row."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (96, 64), dtype=torch.uint8, generator=generator)
    return QuantizedLinear(weight, torch.rand(96, 2, generator=generator) + 0.5, None, bias)


def figures(of: Decoder, **copies_ns: int) -> Figures:
    """As if all products took 200 ns in torch, and so many with each of these backends."""
    backends = {LinearBackend(name): time_ns for name, time_ns in (copies_ns or {"onednn": 100}).items()}
    times = {TORCH: 200, **backends}
    return {product.kind: dict.fromkeys(product.sizes, times) for product in products_of(of)}


def packed(of: Decoder) -> list[bool]:
    return [product.linear.packed is not None for product in products_of(of)]


def pack(of: Decoder, kept: Figures | None = None, **settings: Any) -> dict[str, Any]:
    """What the timeline says of it."""
    timeline = Timeline()
    given = {"limit_bytes": PLENTY, "num_threads": 1, "ended": threading.Event(), **settings}
    thread = threading.Thread(  # whose priority goes down
        target=lambda: prepack(
            of, kept=lambda: figures(of) if kept is None else kept, timeline=timeline, **given
        )
    )
    thread.start()
    thread.join()
    (span,) = timeline.spans()
    assert span.name == "pack weights"
    return span.attributes


def all_logits(of: Decoder) -> torch.Tensor:
    """Of prompts of many lengths, and of steps of one token."""
    stepper = Stepper(of, num_blocks=256)
    outputs = [stepper.step({"a": prompt_of(150)})["a"]]
    for length in (1, 2, 5, 33, 70):
        outputs += stepper.step({"a": [7], f"b{length}": prompt_of(length, seed=length)}).values()
    return torch.cat(outputs)


def error_of(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())
