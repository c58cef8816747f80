"""Drives executors of decoders in tests: weights of transformers' models, sequences with their blocks, and steps of any
mixture of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray
from tests.support.inspection import num_layers_of
from tests.support.models import DictWeights
from tests.support.tiny_models import config_json, tensors_of

from teneral.loader.tools.pack.quantize import quantize_int4, quantize_int8
from teneral.runtime.backends.native.pools import Pool
from teneral.runtime.models.bitsandbytes import CODES
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.models.decoder_tensors import take_decoder
from teneral.runtime.models.matrices import (
    CodeMatrix,
    DecoderWeights,
    DenseMatrix,
    IntegerMatrix,
    Matrix,
    StoredProjection,
    Tensor,
)
from teneral.runtime.models.spec import DecoderSpec
from teneral.runtime.step.batch import SequenceSpan, StepBatch
from teneral.runtime.tensors import DType, to_float32

Array = NDArray[Any]

_DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.F16, torch.float32: DType.F32}


class OpenGate:
    """Of weights that are all there."""

    def __call__(self, *_: Any) -> None:
        pass

    def opens(self, *_: Any, **__: Any) -> bool:
        return True

    def reading(self, *_: Any) -> Any:
        return nullcontext()

    def want(self, *_: Any) -> None:
        pass


def tensor_of(tensor: torch.Tensor) -> Tensor:
    """The same numbers in numpy; a copy."""
    dtype = _DTYPES[tensor.dtype]
    plain = tensor.detach().contiguous().clone()
    array = plain.view(torch.int16).numpy().view(np.uint16) if dtype is DType.BF16 else plain.numpy()
    return Tensor(dtype, array)


def with_parameters_in(dtype: torch.dtype, of: Any) -> Any:
    """The model with parameters in `dtype`, and rotary frequencies in fp32, which `.to(dtype)` would round."""
    for parameter in of.parameters():
        parameter.data = parameter.data.to(dtype)
    return of


def spec_of(model: Any, dtype: DType) -> DecoderSpec:
    return DecoderSpec.of(DecoderConfig.from_json(config_json(model)), dtype)


def weights_of(model: Any) -> DecoderWeights:
    """Those of a transformers model, each matrix by itself."""
    config = DecoderConfig.from_json(config_json(model))
    return take_decoder(config, DictWeights(tensors_of(model)))[0]


def quantized(weights: DecoderWeights, *, bits: int, group_size: int = 32) -> DecoderWeights:
    """The same model with integers in its layers, as `teneral pack --quantize` makes them."""
    return _with_matrices(weights, lambda matrix: _integer_matrix(matrix, bits, group_size))


def with_codes(weights: DecoderWeights) -> DecoderWeights:
    """The same model with bitsandbytes' NF4 in its layers, in blocks of 64 columns."""
    return _with_matrices(weights, _code_matrix)


def _with_matrices(weights: DecoderWeights, make: Callable[[DenseMatrix], Matrix]) -> DecoderWeights:
    def made(projection: Any) -> StoredProjection:
        return StoredProjection(tuple(make(part) for part in projection.parts))

    return replace(
        weights,
        layers=tuple(
            replace(
                layer,
                qkv=made(layer.qkv),
                output=made(layer.output),
                gate_up=made(layer.gate_up),
                down=made(layer.down),
            )
            for layer in weights.layers
        ),
    )


def _integer_matrix(matrix: DenseMatrix, bits: int, group_size: int) -> IntegerMatrix:
    floats = to_float32(matrix.weight.array, matrix.weight.dtype)
    made = quantize_int8(floats, group_size) if bits == 8 else quantize_int4(floats, group_size)
    kind = DType.I8 if bits == 8 else DType.U8
    scale = Tensor(DType.BF16 if made.scale.dtype == np.uint16 else DType.F32, made.scale)
    return IntegerMatrix(Tensor(kind, made.weight.view(kind.numpy)), scale, bias=matrix.bias)


def _code_matrix(matrix: DenseMatrix) -> CodeMatrix:
    floats = to_float32(matrix.weight.array, matrix.weight.dtype)
    blocks = floats.reshape(len(floats), -1, 64)
    scale = np.abs(blocks).max(axis=2)
    codes = np.abs(blocks[..., None] / scale[..., None, None] - np.array(CODES["nf4"], np.float32)).argmin(
        axis=3
    )
    halves = codes.astype(np.uint8).reshape(len(floats), -1, 2)
    weight = Tensor(DType.U8, halves[:, :, 0] << 4 | halves[:, :, 1])
    return CodeMatrix(weight, Tensor(DType.F32, scale), "nf4", CODES["nf4"], matrix.bias)


def new_pool(spec: DecoderSpec, num_blocks: int, block_size: int, *, int8: bool = False) -> Pool:
    """For this model, as `pool_of_shape`; with as many states as blocks, where it has some, full of NaN, too."""
    whole = spec.kv_shape(num_blocks, block_size)
    states = np.full((whole.num_states, whole.state_size), np.nan, np.float32)
    pool, *others = (
        pool_of_shape(
            (each.num_layers, each.num_kv_heads, each.head_dim),
            *(num_blocks, block_size, spec.dtype),
            int8=int8,
            parts=whole.num_parts,
        )
        for each in whole.groups
    )
    return Pool(pool.data, pool.scales, block_size, states, [(other.data, other.scales) for other in others])


def pool_of_shape(
    shape: tuple[int, int, int],
    num_blocks: int,
    block_size: int,
    dtype: DType,
    *,
    int8: bool = False,
    parts: int = 2,
) -> Pool:
    """(layers, kv_heads, head_dim). Full of NaN, so that whatever is read before it is written is seen."""
    num_layers, num_kv_heads, head_dim = shape
    whole = (num_layers, parts, num_kv_heads, num_blocks * block_size, head_dim)
    nan = np.array(0x7FC0, np.uint16) if dtype is DType.BF16 else np.array(np.nan, np.float32)
    if not int8:
        return Pool(np.full(whole, nan), None, block_size)
    return Pool(np.zeros(whole, np.int8), np.full((*whole[:-1], 1), nan), block_size)


class NativeStepper:
    """Holds the keys and values of some sequences. Blocks are handed out in `block_order` as sequences grow;
    `adapters` are those of sequences, by their names.
    """

    def __init__(
        self,
        executor: Any,
        pool: Any,
        *,
        block_order: Iterable[int] | None = None,
        adapters: Mapping[str, Any] | None = None,
    ) -> None:
        self._adapters = adapters or {}
        self.executor = executor
        self.pool = pool
        num_blocks = pool.num_slots // pool.block_size
        self._free = list(block_order if block_order is not None else range(num_blocks))
        self._blocks: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(
        self, work: dict[str, Sequence[int]], *, cuts: Sequence[int] = ()
    ) -> dict[str, NDArray[np.float32]]:
        """Runs these new tokens of each sequence in one batch: logits of all their rows. `cuts` are layers before which
        the pass is left and taken up again."""
        batch = self.batch(work)
        x = self.executor.embed(batch)
        step = self.executor.begin(batch, self.pool)
        for first, end in zip((0, *cuts), (*cuts, num_layers_of(self.executor)), strict=True):
            x = self.executor.layers(step, first, end, x)
        logits = self.executor.logits(x, batch.logit_rows)
        return {
            name: logits[span.start : span.start + span.length]
            for name, span in zip(work, batch.spans, strict=True)
        }

    def share(self, source: str, target: str, num_blocks: int) -> None:
        """Begin `target` with the first blocks of `source`, as a found prefix does."""
        self._blocks[target] = self._blocks[source][:num_blocks]
        self._lengths[target] = num_blocks * self.pool.block_size

    def batch(self, work: dict[str, Sequence[int]]) -> StepBatch:
        """The batch that appends these tokens to their sequences, and wants the logits of all rows."""
        size = self.pool.block_size
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[SequenceSpan] = []
        for name, new in work.items():
            cached = self._lengths.get(name, 0)
            end = cached + len(new)
            blocks = self._blocks.setdefault(name, [])
            while len(blocks) * size < end:
                blocks.append(self._free.pop(0))
            spans.append(
                SequenceSpan(len(tokens), len(new), end, tuple(blocks), adapter=self._adapters.get(name))
            )
            tokens += new
            positions += range(cached, end)
            slots += [blocks[at // size] * size + at % size for at in range(cached, end)]
            self._lengths[name] = end
        rows = np.arange(len(tokens), dtype=np.int64)
        as_int64 = [np.array(each, np.int64) for each in (tokens, positions, slots)]
        return StepBatch(*as_int64, tuple(spans), rows)
