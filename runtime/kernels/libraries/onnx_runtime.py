"""Products of integer weights by ONNX Runtime: its operator MatMulNBits, over a copy in its own order.

Each product is a session of its own, and has threads of its own, which sleep while nothing is to be done. (Threads for
all sessions together could be had, but spin for some 40 ms after each product, and Python cannot forbid that.)
ONNX Runtime's packages report to their maker unless told otherwise; they are told before they are imported, by the
environment, which is the only way that they heed in full.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

import numpy as np
import torch

from ...models.packed import CannotPackError
from ...models.quantized import QuantizedLinear
from .layout import in_column_order, is_for, largest_block, pairs
from .onnx_model import INPUT, OUTPUT, matmul_n_bits

BLOCKS = (32, 64, 128)  # columns whose inputs share a scale
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
_ROW_BLOCK = 16  # its kernels fill rows up to a multiple of it
_SESSION_BYTES = 512 << 10  # of a session, its graph, and a thread's stack
_ERRORS_ONLY = 3
_OPTIONS = {"session.intra_op.allow_spinning": "0", "session.inter_op.allow_spinning": "0"}


def can_pack(weight: QuantizedLinear) -> bool:
    """Whether there is any use in trying: without looking at what is in the weights, or importing the library."""
    return is_for(weight, BLOCKS, package="onnxruntime")


def packed_bytes(weight: QuantizedLinear) -> int:
    """What a `Product` takes, at most, once it is built."""
    block_size = largest_block(weight, BLOCKS) or BLOCKS[0]
    num_out = -(-weight.num_out // _ROW_BLOCK) * _ROW_BLOCK
    scales_and_sums = 3 * 4  # a scale twice
    a_block = block_size * weight.bits // 8 + scales_and_sums + (4 if weight.zero is not None else 0)
    return num_out * (weight.num_in // block_size) * a_block + _SESSION_BYTES


class Product:
    """The copy, and what computes with it. May be called by any thread, and by several at once."""

    __slots__ = ("_num_out", "_session")

    def __init__(self, weight: QuantizedLinear, *, num_threads: int) -> None:
        """`weight` is exact by now, and not needed afterwards. Takes some ms, and up to three times the copy's memory
        meanwhile; raises CannotPackError.
        """
        if not can_pack(weight):
            raise CannotPackError("ONNX Runtime is not installed, or has no kernel for such weights")
        self._num_out = weight.num_out
        try:
            self._session = _session(weight, num_threads)
            _give_back()
        except Exception as error:  # of the library: RuntimeError, its own, or whatever importing it raises
            raise CannotPackError(f"ONNX Runtime could not pack weights: {error}") from error

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x (T, in) bf16 or fp32 → x @ weight.T + bias, (T, out) of the same dtype, rounded once."""
        own = x.to(torch.float32).contiguous()
        out = torch.empty(len(x), self._num_out)
        if len(x):  # no memory can be bound without an address
            binding = self._session.io_binding()
            binding.bind_input(INPUT, "cpu", 0, np.float32, own.shape, own.data_ptr())
            binding.bind_output(OUTPUT, "cpu", 0, np.float32, out.shape, out.data_ptr())
            self._session.run_with_iobinding(binding)
        if bias is not None:
            out += bias
        return out.to(x.dtype)


def _session(weight: QuantizedLinear, num_threads: int) -> Any:
    os.environ.setdefault(NO_TELEMETRY, "1")
    # For who uses it only, and not before it is told not to report.
    import onnxruntime

    block_size = largest_block(weight, BLOCKS)
    assert block_size is not None
    tensors = _tensors(weight, block_size)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.inter_op_num_threads = 1
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.log_severity_level = _ERRORS_ONLY
    for key, value in _OPTIONS.items():
        options.add_session_config_entry(key, value)
    model = matmul_n_bits(
        weight.num_in, weight.num_out, bits=weight.bits, block_size=block_size, weights=tensors
    )
    session = onnxruntime.InferenceSession(
        model, options, providers=["CPUExecutionProvider"], enable_fallback=False
    )
    session._model_bytes = None  # kept for changing to a GPU, say; the session has packed them
    return session


def _give_back() -> None:
    """To the system what building left free: twice the copy, of which the allocator would keep most."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _tensors(weight: QuantizedLinear, block_size: int) -> dict[str, torch.Tensor]:
    """The operator's inputs after x, in its order: new memory."""
    num_blocks = weight.num_in // block_size
    # Of 8 bits, they are from 1 to 255, and 128 means 0.
    levels = in_column_order(weight.weight) if weight.bits == 4 else weight.weight.view(torch.uint8) ^ 128
    repeats = weight.group_size // block_size
    scale = weight.scale.to(torch.float32).repeat_interleave(repeats, dim=1)
    tensors = {"weight": levels.view(weight.num_out, num_blocks, -1), "scale": scale}
    if weight.zero is not None:
        tensors["zero"] = pairs(weight.zero.repeat_interleave(repeats, dim=1))
    return tensors
