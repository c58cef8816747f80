"""A toy way to compute: models like Llama in fp32, with nothing but numpy, a token at a time.

All that a backend needs is this file and its row. It refuses what it does not implement, by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from teneral.runtime.backends.choose import BackendChoice, BackendRow
from teneral.runtime.kv.storage import KVKind, KVStorage
from teneral.runtime.models.decoder_config import LayerRotary, Sublayers
from teneral.runtime.models.encoder_weights import EncoderWeights
from teneral.runtime.models.executor import (
    ComputeDtype,
    EncoderExecutor,
    any_value,
    one_of,
    refusal_of,
)
from teneral.runtime.models.fields import Norm
from teneral.runtime.models.matrices import DecoderWeights, DenseMatrix, Projection
from teneral.runtime.models.spec import Activation, DecoderSpec, EncoderSpec, are_alike
from teneral.runtime.step.batch import Int64s, StepBatch
from teneral.runtime.tensors import DType, Tensor, to_float32

Floats = npt.NDArray[np.float32]

IMPLEMENTED = {
    **dict.fromkeys(
        ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim",
         "norm_eps", "attention_scale", "rotary.dim", "rotary.frequencies", "rotary.factor", "wide_rotary",
         "max_context", "qkv_bias", "output_bias", "mlp_bias", "tied_head"),
        any_value,
    ),
    **{name: one_of(False) for name in
       ("norm_bias", "head_bias", "output_norms", "is_parallel", "parallel_norms", "interleaved_qkv", "inner_norms",
        "rounds_inputs",
        "learned_positions", "rotary.interleaved", "head_norms",
        "joint_head_norms", "late_head_norms", "gated_attention", "sinks", "takes_images", "whole_images",
        "is_bidirectional", "chunked_windows", "layer_scalars", "value_norms", "windowed_images")},
    **{name: one_of(None) for name in
       ("experts", "latent", "convolutions", "delta_nets", "mamba", "score_cap", "logit_cap", "local_rotary",
        "query_scaling", "layer_inputs", "streams")},
    "laurel_rank": one_of(0),
    "source_len": one_of(0),
    "gate_cuts": lambda cuts: set(cuts) == {None},
    **{name: one_of(1.0) for name in
       ("embedding_scale", "residual_scale", "logits_scale", "mlp_output_scale", "gate_scale",
        "attention_output_scale")},
    "sublayers": lambda kinds: set(kinds) == {Sublayers.BOTH},
    "dtype": one_of(DType.F32),
    "layer_shapes": are_alike,
    "rotary_axes": one_of(()),
    "num_deep_rows": one_of(0),
    "norm": one_of(Norm.RMS),
    "input_norms": one_of(True),
    "gated_mlp": one_of(True),
    "activation": one_of(Activation.SILU),
    "layer_rotary": lambda tables: set(tables) == {LayerRotary.MAIN},
    "windows": lambda windows: set(windows) == {None},
}  # fmt: skip


class ToyBackend:
    """An `ExecutorFactory`."""

    name = "toy"

    def compute_dtype(self, stored: DType, *, is_quantised: bool, is_encoder: bool = False) -> ComputeDtype:
        return ComputeDtype(stored, DType.F32, "toys compute in fp32")

    def refuses_decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> str | None:
        return refusal_of(spec, IMPLEMENTED, self.name)

    def refuses_encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> str | None:
        return "toy computes no encoders"

    def decoder(self, spec: DecoderSpec, weights: DecoderWeights) -> ToyExecutor:
        return ToyExecutor(spec, weights)

    def encoder(self, spec: EncoderSpec, weights: EncoderWeights) -> EncoderExecutor:
        raise NotImplementedError


def make(choice: BackendChoice) -> ToyBackend:
    return ToyBackend()


ROW = BackendRow(ToyBackend.name, make)


class ToyExecutor:
    """An `Executor`."""

    name = "toy"
    numerics = "toy/1"
    is_batch_invariant = False
    runs_layers_together = False
    takes_adapters = False
    routes_apart = False
    scores_in_strips = False

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        self._spec = spec
        self._weights = weights

    def embed(self, batch: StepBatch) -> Floats:
        table = self._weights.embeddings.weight
        return to_float32(table.array[batch.tokens], table.dtype)

    def begin(self, batch: StepBatch, kv: Any) -> Any:
        return batch, kv

    def layers(self, step: Any, first: int, end: int, x: Floats) -> Floats:
        batch, kv = step
        for index in range(first, end):
            layer = self._weights.layers[index]
            assert layer.gate_up is not None
            assert layer.down is not None
            qkv = _product(self._norm(x, layer.attention_norm), layer.qkv)
            x = x + _product(self._attend(batch, kv.data[index], kv.block_size, qkv), layer.output)
            gate, up = np.split(_product(self._norm(x, layer.mlp_norm), layer.gate_up), 2, axis=1)
            x = x + _product(gate / (1 + np.exp(-gate)) * up, layer.down)
        return x

    def logits(self, x: Floats, rows: Int64s) -> Floats:
        return _product(self._norm(x[rows], self._weights.norm), self._weights.head)

    def states(self, x: Floats, rows: Int64s) -> Floats:
        return self._norm(x[rows], self._weights.norm)

    def join(self, parts: Sequence[Floats]) -> Floats:
        return np.concatenate(parts)

    def select(self, x: Floats, rows: Int64s) -> Floats:
        return x[rows]

    def new_kv(self, num_blocks: int, block_size: int, kind: KVKind) -> KVStorage:
        return KVStorage(self._spec.kv_shape(num_blocks, block_size))

    def kv_block_bytes(self, block_size: int, kind: KVKind) -> int:
        return KVStorage.block_bytes(self._spec.kv_shape(1, block_size))

    def _norm(self, x: Floats, weight: Tensor | None) -> Floats:
        assert weight is not None
        root = np.sqrt((x * x).mean(-1, keepdims=True) + np.float32(self._spec.norm_eps))
        return (x / root * to_float32(weight.array, weight.dtype)).astype(np.float32)

    def _attend(self, batch: StepBatch, stored: Floats, block_size: int, qkv: Floats) -> Floats:
        """Writes the rows' keys and values into `stored` (2, kv_heads, slots, head_dim), then attends."""
        spec = self._spec
        heads = qkv.reshape(len(qkv), -1, spec.head_dim)
        queries, keys, values = np.split(heads, (spec.num_heads, spec.num_heads + spec.num_kv_heads), axis=1)
        stored[0][:, batch.slots] = self._turned(keys, batch.positions).swapaxes(0, 1)
        stored[1][:, batch.slots] = values.swapaxes(0, 1)
        queries = self._turned(queries, batch.positions)
        out = np.empty_like(queries)
        for span in batch.spans:
            tokens = np.arange(span.context_len)
            slots = np.array(span.blocks)[tokens // block_size] * block_size + tokens % block_size
            for row in range(span.start, span.start + span.length):
                seen = slots[: span.context_len - span.length + row - span.start + 1]
                for head in range(spec.num_heads):
                    kv_head = head * spec.num_kv_heads // spec.num_heads
                    scores = stored[0][kv_head, seen] @ queries[row, head] * spec.attention_scale
                    weights = np.exp(scores - scores.max())
                    out[row, head] = weights / weights.sum() @ stored[1][kv_head, seen]
        return out.reshape(len(out), -1)

    def _turned(self, heads: Floats, positions: Int64s) -> Floats:
        rotary = self._spec.rotary
        cos, sin = (table[positions][:, None] for table in rotary.tables(0, int(positions.max()) + 1))
        first, second, rest = np.split(heads, (rotary.dim // 2, rotary.dim), axis=2)
        return np.concatenate((first * cos - second * sin, second * cos + first * sin, rest), axis=2)


def _product(x: Floats, projection: Projection) -> Floats:
    made = []
    for matrix in projection.matrices():
        assert isinstance(matrix, DenseMatrix), "toy computes plain matrices alone"
        made.append(x @ to_float32(matrix.weight.array, matrix.weight.dtype).T)
        if matrix.bias is not None:
            made[-1] = made[-1] + to_float32(matrix.bias.array, matrix.bias.dtype)
    return np.concatenate(made, axis=1)
