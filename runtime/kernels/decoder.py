"""A decoder's layers for a few rows, with compiled kernels: what is faster than torch while tokens are generated.

The weights stay where the loader has put them, and the cache stays the pool's: this is another way to compute the same
step, which torch computes for prompts and wherever it is the faster one. Which that is, can be measured here, and is
decided elsewhere (`choice.py`). The weights must be exact by then.

Not for several threads: one step at a time, as everywhere with a model.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import numba
import numpy as np
import torch

from ..engine.batch import SequenceSpan, StepBatch
from ..kv.storage import KVStorage
from . import records
from .choice import SIZES, rows_of
from .compile import kind_of_heads, kind_of_weights
from .projection import CompiledProjection, NotCompiledError, Scratch, bits, expander
from .records import LAYER_FIELDS, MAX_ROWS, PROJECTION_FIELDS
from .rows import ACTIVATIONS
from .step import MAX_HEIGHT, head_kernel, layers_kernel, padded
from .team import new_team

if TYPE_CHECKING:
    from ..models.decoder import Decoder, DecoderLayer
    from ..models.quantized import QuantizedLinear

NUM_TRIALS = 10
LAYERS_A_TRIAL = 4
MAX_ALONE = 3  # steps in which the threads did not come together, before torch computes everything again

# Where there is no OpenMP, numba's own pool of threads ends the process when two threads come to it at once.
_pool = threading.Lock()

Compute = Callable[
    [int, int, torch.Tensor], torch.Tensor
]  # layers [first, end) of rows, which may be changed

logger = logging.getLogger(__name__)

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
        self._decoder, config = decoder, decoder.config
        if config.activation not in ACTIVATIONS:
            raise NotCompiledError(f"there is no kernel for the activation {config.activation}")
        self._scratch = Scratch()
        self._team = new_team()
        self._num_alone = 0
        num_in = config.num_heads * config.head_dim
        self._normed = self._scratch.rows(config.hidden_size, "normed")
        self._queries = self._scratch.rows(num_in, "queries").reshape(MAX_ROWS, config.num_heads, -1)
        self._layers = [CompiledLayer(layer, decoder, self._scratch) for layer in decoder.layers]
        self._windows = sorted({layer.window for layer in self._layers}, key=lambda window: window or 0)
        for layer in self._layers:
            layer.record[records.WINDOW] = self._windows.index(layer.window)
        self._records = np.stack([layer.record for layer in self._layers])
        self._norm = bits(_in_bf16(decoder.norm.weight))
        self._head: CompiledProjection | None = None
        with contextlib.suppress(
            NotCompiledError
        ):  # it alone may be stored in another dtype, and computed in it
            self._head = CompiledProjection(decoder.head, self._normed, self._scratch)
        self._used_for: frozenset[int] = frozenset()  # numbers of rows

    @property
    def kinds(self) -> set[str]:
        """What is compiled for it, as `compile.py` names it."""
        weights = {kind_of_weights(part.bits) for part in self._quantised()}
        return {*weights, kind_of_heads(self._decoder.config.head_dim)}

    def warm(self, num_rows: int) -> None:
        """Have what steps of so many rows run compiled, or read from where it was kept: none has to wait for it."""
        self._trial(num_rows)

    def measure(self, num_rows: int) -> tuple[float, float]:
        """Compile for so many rows and compare: seconds of (these kernels, torch) for one layer. Decides nothing."""
        compute_here, compute_in_torch, x = self._trial(num_rows)
        times_s = []
        num_layers = min(LAYERS_A_TRIAL, len(self._layers))
        for compute in (compute_here, compute_in_torch):
            best_s = float("inf")
            for trial in range(NUM_TRIALS):
                rows, first = x.clone(), trial * num_layers % (len(self._layers) - num_layers + 1)
                start_s = time.perf_counter()
                compute(first, first + num_layers, rows)
                best_s = min(best_s, (time.perf_counter() - start_s) / num_layers)
            times_s.append(best_s)
        return times_s[0], times_s[1]

    def _trial(self, num_rows: int) -> tuple[Compute, Compute, torch.Tensor]:
        """One step of so many sequences (one of SIZES) here and in torch, and what it begins with. Here it has been
        done once, for the first layer and the head.
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
            self._compute_head(bits(x))
        own.layers(0, 1, x.clone())

        def in_torch(first: int, end: int, x: torch.Tensor) -> torch.Tensor:
            for layer in decoder.layers[first:end]:
                x = layer(x, step)
            return x

        return own.layers, in_torch, x

    def use_for(self, numbers: Iterable[int]) -> None:
        """Compute steps of so many rows here, and no others."""
        self._used_for = frozenset(numbers)

    def use_at(self, sizes: Iterable[int]) -> None:
        """Compute steps here of as many rows as these of SIZES stand for, and no others."""
        self.use_for(rows_of(sizes))

    def keep_to(self, sizes: Iterable[int]) -> None:
        """The same, but of those only that it computes already."""
        self._used_for &= rows_of(sizes)

    def is_used_for(self, num_rows: int) -> bool:
        return num_rows in self._used_for

    def install(self) -> None:
        """Have the decoder use them from now on, wherever they are faster."""
        for part in self._quantised():
            part.expand = _one_at_a_time(expander(part, self._scratch))
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
        self._compute_head(bits(x.contiguous()))
        # A new tensor, rounded as torch's product is: among equal logits both then take the same token.
        return torch.from_numpy(self._head.out[: len(x)]).to(torch.bfloat16).float()

    def _compute_head(self, x: np.ndarray) -> None:
        assert self._head is not None
        kernel = head_kernel(min(padded(len(x)), MAX_HEIGHT))
        norm, eps = self._norm.ctypes.data, self._decoder.config.norm_eps
        record = self._head.record
        self.run(lambda team, size: kernel(team, size, record, norm, x, eps))

    def run(self, kernel: Callable[[np.ndarray, int], bool]) -> None:
        """Call a kernel with the team and its size: all threads, or, where they do not come together, this one."""
        with _pool:
            numba.set_num_threads(self._num_threads)  # of what this thread starts
            if kernel(self._team, self._num_threads):
                return
            self._num_alone += 1
            if self._num_alone == MAX_ALONE:
                logger.warning("of %d threads some never came; torch computes from now on", self._num_threads)
                self._used_for = frozenset()
            kernel(self._team, 1)

    def _quantised(self) -> list[QuantizedLinear]:
        projections = [each for layer in self._layers for each in layer.projections]
        if self._head is not None:
            projections.append(self._head)
        return [part for projection in projections for part in projection.quantised]


def _one_at_a_time(expand: Callable[[int, int], torch.Tensor]) -> Callable[[int, int], torch.Tensor]:
    """Threads of numba's own, where there is no OpenMP, end the process when two ask for them at once."""

    def expand_alone(begin: int, end: int) -> torch.Tensor:
        with _pool:
            return expand(begin, end)

    return expand_alone


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
        num_rows, config = len(batch.tokens), kernels._decoder.config
        self._kernels = kernels
        self._compute = layers_kernel(min(padded(num_rows), MAX_HEIGHT), config.head_dim)
        self._block_size = kv.block_size
        self._caches = bits(kv.data)
        self._turns = bits(cos.squeeze(1)), bits(sin.squeeze(1))
        self._ends = batch.positions.numpy() + 1
        blocks = np.zeros((num_rows, max(len(span.blocks) for span in batch.spans)), np.int64)
        for span in batch.spans:
            blocks[span.start : span.start + span.length, : len(span.blocks)] = span.blocks
        self._where = batch.slots.numpy(), blocks
        windows = [
            self._ends if window is None else np.minimum(self._ends, window) for window in kernels._windows
        ]
        self._firsts = self._ends - np.stack(windows)
        self._numbers = config.norm_eps, config.head_dim**-0.5, ACTIVATIONS[config.activation]

    def layers(self, first: int, end: int, x: torch.Tensor) -> torch.Tensor:
        """x (T, hidden_size) through the layers [first, end), in place."""
        kernels, rows = self._kernels, bits(x)
        records, caches = kernels._records[first:end], self._caches[first:end]
        fixed = self._firsts, self._ends, caches, self._block_size, kernels._queries, *self._numbers
        kernels.run(
            lambda team, size: self._compute(team, size, records, rows, self._turns, self._where, *fixed)
        )
        return x


class CompiledLayer:
    """A layer's record, and what it points to."""

    def __init__(self, layer: DecoderLayer, decoder: Decoder, scratch: Scratch) -> None:
        config, attention, mlp = decoder.config, layer.attention, layer.mlp
        normed = scratch.rows(config.hidden_size, "normed")
        attended = scratch.rows(config.num_heads * config.head_dim, "attended")
        inner = scratch.rows(config.intermediate_size, "inner")
        self.projections = (
            CompiledProjection(attention.qkv, normed, scratch),
            CompiledProjection(attention.output, attended, scratch),
            CompiledProjection(mlp.gate_up, normed, scratch),
            CompiledProjection(mlp.down, inner, scratch),
        )
        self.window = attention.window
        self.record = np.zeros(LAYER_FIELDS, np.int64)
        places = (records.QKV, records.OUTPUT, records.GATE_UP, records.DOWN)
        for place, projection in zip(places, self.projections, strict=True):
            self.record[place : place + PROJECTION_FIELDS] = projection.record
        norms = {records.ATTENTION_NORM: layer.attention_norm.weight, records.MLP_NORM: layer.mlp_norm.weight}
        self._held = {place: bits(_in_bf16(weight)) for place, weight in norms.items()}
        if attention.head_norm is not None:
            both = attention.head_norm.query_weight, attention.head_norm.key_weight
            self._held[records.HEAD_NORMS] = np.stack([bits(_in_bf16(each)) for each in both])
        for place, array in self._held.items():
            self.record[place] = array.ctypes.data


def _in_bf16(vector: torch.Tensor) -> torch.Tensor:
    """A norm's weights as torch uses them beside rows in bf16: rounded to it."""
    return vector.to(torch.bfloat16).contiguous()
