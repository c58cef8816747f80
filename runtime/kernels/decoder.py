"""A decoder's layers for a few rows, with compiled kernels: what is faster than torch while tokens are generated.

The weights stay where the loader has put them, and the cache stays the pool's: this is another way to compute the same
step, which torch computes for prompts and wherever it is the faster one. Which that is, is measured once, when the
kernels are made. The weights must be exact by then.

Not for several threads: one step at a time, as everywhere with a model.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch

from ..engine.batch import SequenceSpan, StepBatch
from ..kv.storage import KVStorage
from ..models.norm import RMSNorm
from .attention import attention
from .compile import kind_of_heads
from .projection import MAX_ROWS, CompiledProjection, NotCompiledError, Scratch, bits, expander, padded
from .rows import ACTIVATIONS, add_, gate, place_heads, rms_norm

if TYPE_CHECKING:
    from ..models.decoder import Decoder, DecoderLayer

NUM_TRIALS = 20
SIZES = (1, 2, 4, 8, 16, 32)  # numbers of rows at which torch and these kernels are compared

# Where there is no OpenMP, numba's own pool of threads ends the process when two threads come to it at once.
_pool = threading.Lock()

__all__ = ["SIZES", "DecoderKernels", "NotCompiledError"]


class DecoderKernels:
    """For one decoder. Making it takes seconds where nothing was compiled before."""

    def __init__(self, decoder: Decoder, *, num_threads: int | None = None) -> None:
        """Computes in so many threads (None: as many as there are cores). Raises NotCompiledError when this decoder is
        not for these kernels.
        """
        self._num_threads = min(num_threads or numba.config.NUMBA_NUM_THREADS, numba.config.NUMBA_NUM_THREADS)
        if decoder.dtype is not torch.bfloat16 or decoder.embeddings.device.type != "cpu":
            raise NotCompiledError(f"kernels compute in bf16 on a CPU, and this model in {decoder.dtype}")
        self._scratch = Scratch()
        self._decoder = decoder
        self._layers = [CompiledLayer(layer, decoder, self._scratch) for layer in decoder.layers]
        self._norm = CompiledNorm(decoder.norm)
        try:
            self._head: CompiledProjection | None = CompiledProjection(decoder.head, self._scratch)
        except NotCompiledError:  # it alone may be stored in another dtype, and computed in it
            self._head = None
        self._normed = self._scratch.rows(decoder.config.hidden_size, "normed")
        self._used_for: set[int] = set()  # numbers of rows

    @property
    def kinds(self) -> set[str]:
        """What is compiled for it, as `compile.py` names it."""
        return self._scratch.kinds | {kind_of_heads(self._decoder.config.head_dim)}

    def measure(self, num_rows: int) -> tuple[float, float]:
        """Compile for so many rows (one of SIZES) and compare: seconds of (these kernels, torch) for one layer.
        What is faster is used from now on.
        """
        decoder, config = self._decoder, self._decoder.config
        kv = decoder.new_kv(num_rows, 16)
        if type(kv) is not KVStorage:
            raise NotCompiledError("kernels know only caches of the model's own dtype")
        kv.data.zero_()
        places = torch.arange(num_rows)
        spans = tuple(SequenceSpan(row, 1, 1, (row,)) for row in range(num_rows))
        batch = StepBatch(places, torch.zeros_like(places), places * 16, spans, places)
        x = torch.zeros(num_rows, config.hidden_size, dtype=decoder.dtype)
        step = decoder.plan(batch, kv)
        own = self.begin(batch, kv, step.cos, step.sin)
        if self._head is not None:
            self._head(self._normed, padded(num_rows))
        own.layer(0, x.clone())
        times_s = []
        for compute in (own.layer, lambda index, x: decoder.layers[index].compute(x, step)):
            best_s = float("inf")
            for trial in range(NUM_TRIALS):
                rows = x.clone()
                start_s = time.perf_counter()
                compute(trial % len(self._layers), rows)
                best_s = min(best_s, time.perf_counter() - start_s)
            times_s.append(best_s)
        kernels_s, torch_s = times_s
        if kernels_s < torch_s:
            lower = max((size for size in SIZES if size < num_rows), default=0)
            self.use_for(range(lower + 1, num_rows + 1))
        return kernels_s, torch_s

    def use_for(self, numbers: Iterable[int]) -> None:
        """Compute steps of so many rows here."""
        self._used_for.update(numbers)

    def is_used_for(self, num_rows: int) -> bool:
        return num_rows in self._used_for

    def install(self) -> None:
        """Have the decoder use them from now on, wherever they are faster."""
        projections = [each for layer in self._layers for each in layer.projections]
        if self._head is not None:
            projections.append(self._head)
        for part in [part for projection in projections for part in projection.quantised]:
            part.expand = expander(part, self._scratch)
        self._decoder.kernels = self

    def takes(self, batch: StepBatch) -> bool:
        """Whether a step over this batch is to be computed here, if its cache is a `KVStorage`."""
        return len(batch.tokens) in self._used_for

    def begin(self, batch: StepBatch, kv: KVStorage, cos: torch.Tensor, sin: torch.Tensor) -> CompiledStep:
        """The step over this batch; `cos` and `sin` are `RopeTable.rows`."""
        return CompiledStep(self, batch, kv, cos, sin)

    def logits(self, x: torch.Tensor) -> torch.Tensor | None:
        """(R, vocab_size) fp32 of final hidden states (R, hidden_size); None where torch is to compute them."""
        if self._head is None or len(x) not in self._used_for:
            return None
        num_rows = len(x)
        with _pool:
            self._norm(bits(x.contiguous()), self._normed)
            product = self._head(self._normed, padded(num_rows))[:num_rows]
            # A new tensor, rounded as torch's product is: among equal logits both then take the same token.
            return torch.from_numpy(product).to(torch.bfloat16).float()


class CompiledStep:
    """What all layers share in one step over up to MAX_ROWS rows."""

    def __init__(
        self,
        kernels: DecoderKernels,
        batch: StepBatch,
        kv: KVStorage,
        cos: torch.Tensor,
        sin: torch.Tensor,
    ) -> None:
        num_rows = len(batch.tokens)
        numba.set_num_threads(kernels._num_threads)  # of what this thread starts
        self._layers = kernels._layers
        self._height = padded(num_rows)
        self._block_size = kv.block_size
        self._caches = kv.data
        self._cos, self._sin = bits(cos.squeeze(1)), bits(sin.squeeze(1))
        self._slots = batch.slots.numpy()
        self._ends = batch.positions.numpy() + 1
        self._tables = np.zeros((num_rows, max(len(span.blocks) for span in batch.spans)), np.int64)
        for span in batch.spans:
            self._tables[span.start : span.start + span.length, : len(span.blocks)] = span.blocks
        self._firsts = {
            window: np.zeros_like(self._ends) if window is None else np.maximum(self._ends - window, 0)
            for window in {layer.window for layer in kernels._layers}
        }

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """x (T, hidden_size) through this layer, in place."""
        with _pool:
            self._compute(self._layers[index], bits(x), bits(self._caches[index]))
        return x

    def _compute(self, layer: CompiledLayer, rows: np.ndarray, keys_values: np.ndarray) -> None:
        num_rows = len(rows)
        normed, queries, attended, inner = layer.rooms
        layer.attention_norm(rows, normed)
        product = layer.qkv(normed, self._height)
        layer.place(product, (self._cos, self._sin, self._slots), keys_values, queries[:num_rows])
        layer.attend(
            queries[:num_rows],
            keys_values,
            self._tables,
            self._firsts[layer.window],
            self._ends,
            self._block_size,
            layer.scale,
            attended[:num_rows],
        )
        flat = attended.reshape(MAX_ROWS, -1)
        add_(rows, layer.output(flat, self._height), layer.output.bias)
        layer.mlp_norm(rows, normed)
        gate(layer.gate_up(normed, self._height), layer.gate_up.bias, layer.activation, inner[:num_rows])
        add_(rows, layer.down(inner, self._height), layer.down.bias)


class CompiledNorm:
    __slots__ = ("_eps", "_weight")

    def __init__(self, norm: RMSNorm) -> None:
        self._weight, self._eps = bits(_in_bf16(norm.weight)), norm.eps

    def __call__(self, rows: np.ndarray, out: np.ndarray) -> None:
        """rows (T, size) → the first T of out."""
        rms_norm(rows, self._weight, self._eps, out[: len(rows)])


class CompiledLayer:
    """A layer's kernels, and the arrays that they are called with."""

    def __init__(self, layer: DecoderLayer, decoder: Decoder, scratch: Scratch) -> None:
        config, attention_, mlp = decoder.config, layer.attention, layer.mlp
        if config.activation not in ACTIVATIONS:
            raise NotCompiledError(f"there is no kernel for the activation {config.activation}")
        self.attention_norm, self.mlp_norm = CompiledNorm(layer.attention_norm), CompiledNorm(layer.mlp_norm)
        self.qkv = CompiledProjection(attention_.qkv, scratch)
        self.output = CompiledProjection(attention_.output, scratch)
        self.gate_up, self.down = (
            CompiledProjection(mlp.gate_up, scratch),
            CompiledProjection(mlp.down, scratch),
        )
        self.projections = (self.qkv, self.output, self.gate_up, self.down)
        self.activation = ACTIVATIONS[config.activation]
        self.window, self.scale = attention_.window, attention_.scale
        self.attend = attention(config.head_dim)
        norms = attention_.head_norm
        self._norms = np.empty((0, 0), np.uint16)
        if norms is not None:
            self._norms = np.stack([bits(_in_bf16(each)) for each in (norms.query_weight, norms.key_weight)])
        self._eps = config.norm_eps
        heads = (MAX_ROWS, config.num_heads, config.head_dim)
        num_in = config.num_heads * config.head_dim
        self.rooms = (
            scratch.rows(config.hidden_size, "normed"),
            scratch.rows(num_in, "queries").reshape(heads),
            scratch.rows(num_in, "attended").reshape(heads),
            scratch.rows(config.intermediate_size, "inner"),
        )

    def place(
        self, product: np.ndarray, where: tuple[np.ndarray, ...], keys_values: np.ndarray, queries: np.ndarray
    ) -> None:
        """Queries, keys and values out of their product, to where they belong."""
        place_heads(product, self.qkv.bias, self._norms, self._eps, *where, keys_values, queries)


def _in_bf16(vector: torch.Tensor) -> torch.Tensor:
    """A norm's weights as torch uses them beside rows in bf16: rounded to it."""
    return vector.to(torch.bfloat16).contiguous()
