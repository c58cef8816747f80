"""Products of integer weights by OpenVINO's CPU kernels, over a copy in their own order.

Each product is a model of its own, compiled for any number of rows, and brings two threads of its own, which sleep
while nothing is to be done. The library keeps what it made its copy from: with 8 bits that is the weights themselves,
where they lie; with 4, whose order is another, it is a second copy.
"""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import torch

from ...models.packed import CannotPackError
from ...models.quantized import QuantizedLinear, dequantize
from .layout import in_column_order, is_for, largest_block, pairs

BLOCKS = (32, 64)  # columns whose inputs share a scale
MAX_ROWS = 64  # at a time: more are no faster, and each product keeps room for as many as it ever had
# What weights are while they are multiplied. For a processor without such kernels they would be made into floats.
INTEGERS = {"i8", "i4", "u4"}
CHECKED_OUTPUTS = 64  # of a copy, when it is made
MAX_DIFFERENCE = 0.05  # of their length; rounding the inputs leaves a fifth of that
_MODEL_BYTES = 1 << 20  # of a model, its code, and its threads


def can_pack(weight: QuantizedLinear) -> bool:
    """Whether there is any use in trying: without looking at what is in the weights, or importing the library."""
    return is_for(weight, BLOCKS, package="openvino")


def packed_bytes(weight: QuantizedLinear) -> int:
    """What a `Product` takes, at most: the copy, with 4 bits what it was made from, and room for inputs and outputs."""
    num_bytes = weight.num_out * weight.num_in * weight.bits // 8
    if weight.bits == 4:
        num_bytes *= 2
    a_group = 3 * 4 + (4 if weight.zero is not None else 0)
    rooms = MAX_ROWS * (2 * weight.num_in + weight.num_out) * 4
    return num_bytes + weight.scale.numel() * a_group + rooms + _MODEL_BYTES


class Product:
    """The copy, and what computes with it. May be called by any thread; several wait for one another."""

    __slots__ = ("_held", "_lock", "_nothing", "_num_out", "_request", "_tensor")

    def __init__(self, weight: QuantizedLinear, *, num_threads: int) -> None:
        """`weight` is exact by now. With 8 bits its integers are read where they lie, so they must stay as they are,
        and are held; with 4 they are not needed afterwards. Takes some tens of ms; raises CannotPackError.
        """
        if not can_pack(weight):
            raise CannotPackError("OpenVINO is not installed, or has no kernel for such weights")
        self._num_out = weight.num_out
        self._lock = threading.Lock()
        try:
            # A fifth of a second of import, for who uses it only.
            import openvino

            model, self._held = _compiled(weight, num_threads)
            self._request = model.create_infer_request()
            self._tensor = partial(openvino.Tensor, shared_memory=True)
            self._nothing = tuple(
                self._tensor(np.empty((0, width), np.float32)) for width in (weight.num_in, weight.num_out)
            )
            self._check(weight)  # only now the integers are brought into their order, too
        except CannotPackError:
            raise
        except Exception as error:  # of the library: RuntimeError, or whatever importing it raises
            raise CannotPackError(f"OpenVINO could not pack weights: {error}") from error

    def _check(self, weight: QuantizedLinear) -> None:
        """Raises CannotPackError. Groups of 192 and 320 were seen to give wrong products of 33 rows, not of 8, on a
        processor with AVX2 alone (OpenVINO 2026.4).
        """
        x = torch.randn(MAX_ROWS, weight.num_in, generator=torch.Generator().manual_seed(0))
        zero = None if weight.zero is None else weight.zero[:CHECKED_OUTPUTS]
        floats = dequantize(weight.weight[:CHECKED_OUTPUTS], weight.scale[:CHECKED_OUTPUTS], zero)
        expected = x @ floats.float().T
        difference = self(x, None)[:, :CHECKED_OUTPUTS] - expected
        if not torch.linalg.norm(difference) <= MAX_DIFFERENCE * torch.linalg.norm(expected):
            raise CannotPackError("OpenVINO computes something else from such weights on this processor")

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x (T, in) bf16 or fp32 → x @ weight.T + bias, (T, out) of the same dtype, rounded once."""
        own = x.to(torch.float32).contiguous()
        out = torch.empty(len(x), self._num_out)
        inputs, outputs = own.numpy(), out.numpy()
        # Equal parts: a last one of few rows would take as long as one of many.
        num_parts = max(1, -(-len(x) // MAX_ROWS))
        step = max(1, -(-len(x) // num_parts))
        with self._lock:
            for begin in range(0, len(x), step):
                self._request.set_input_tensor(self._tensor(inputs[begin : begin + step]))
                self._request.set_output_tensor(self._tensor(outputs[begin : begin + step]))
                self._request.infer()
            # Else it would keep what it was given until next time.
            self._request.set_input_tensor(self._nothing[0])
            self._request.set_output_tensor(self._nothing[1])
        if bias is not None:
            out += bias
        return out.to(x.dtype)


def _compiled(weight: QuantizedLinear, num_threads: int) -> tuple[Any, list[torch.Tensor]]:
    """The compiled model, and what it reads as long as it is there."""
    import openvino

    x = openvino.opset13.parameter(openvino.PartialShape([-1, weight.num_in]), openvino.Type.f32)
    floats, held = _floats(weight)
    product = openvino.opset13.matmul(x, floats, False, True)
    settings = {
        "INFERENCE_NUM_THREADS": num_threads,
        "NUM_STREAMS": 1,
        "PERFORMANCE_HINT": "LATENCY",
        "ENABLE_CPU_PINNING": False,
        "INFERENCE_PRECISION_HINT": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": largest_block(weight, BLOCKS),
    }
    compiled = openvino.Core().compile_model(openvino.Model([product], [x]), "CPU", settings)
    weights_as = [str(node.get_rt_info()["runtimePrecision"].astype(str)) for node in _products(compiled)]
    if not weights_as or not set(weights_as) <= INTEGERS:
        raise CannotPackError(f"OpenVINO would multiply with weights as {weights_as} on this processor")
    return compiled, held


def _products(compiled: Any) -> list[Any]:
    nodes = compiled.get_runtime_model().get_ordered_ops()
    return [node for node in nodes if str(node.get_rt_info()["layerType"].astype(str)) == "FullyConnected"]


def _floats(weight: QuantizedLinear) -> tuple[Any, list[torch.Tensor]]:
    """What the integers mean, (out, in), in operators that the library's compiler knows: (integer - zero) · scale. And
    the tensors whose memory they are in.
    """
    import openvino
    from openvino import opset13 as operators

    num_out, num_in = weight.num_out, weight.num_in
    num_groups = weight.scale.shape[1]
    grouped = [num_out, num_groups, weight.group_size] if num_groups > 1 else [num_out, num_in]
    a_group = [*grouped[:-1], 1]
    held = []

    def integers(tensor: torch.Tensor, shape: list[int], kind: Any) -> Any:
        held.append(tensor)
        view = openvino.Tensor(tensor.numpy(), openvino.Shape(shape), kind)
        return operators.convert(operators.constant(view, shared_memory=True), openvino.Type.f32)

    if weight.bits == 8:
        levels = integers(weight.weight.contiguous(), grouped, openvino.Type.i8)
    elif weight.zero is None:
        signed = in_column_order(weight.weight).bitwise_xor_(0x88)  # from -8 to 7
        levels = integers(signed, grouped, openvino.Type.i4)
    else:
        levels = integers(in_column_order(weight.weight), grouped, openvino.Type.u4)
        zero = integers(pairs(weight.zero.reshape(-1)), a_group, openvino.Type.u4)
        levels = operators.subtract(levels, zero)
    scale = weight.scale.to(torch.float32).reshape(a_group).numpy()
    floats = operators.multiply(levels, operators.constant(scale))
    if num_groups > 1:
        floats = operators.reshape(floats, operators.constant(np.array([num_out, num_in])), False)
    return floats, held
