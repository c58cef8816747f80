"""Second moments of the inputs of a decoder's projections, over a text, for `pack --calibrate`.

The whole model is in memory as stored. The text is cut into independent windows, and all of them go
through one layer before any goes through the next, when the moments of that layer are first
requested: so only those of two layers exist at a time. torch computes.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from ...loader.artifact import open_artifact
from ...loader.memory.limits import available, check_fits
from ...loader.process.cpu import available_cores
from ...loader.sources.base import Source
from ..backends.torch.decoder import DecoderLayer, GatedMLP, TorchExecutor
from ..backends.torch.layers import Product
from ..models.decoder import Decoder
from ..step.batch import SequenceSpan, StepBatch
from .decoders import WINDOW_TOKENS
from .evaluate import WORK_BYTES, OnProgress, PartCounter, check_max_tokens
from .inputs import InputReader
from .text import EvaluationText
from .whole_decoder import WholeDecoder

if TYPE_CHECKING:
    import numpy.typing as npt

_BLOCK_TOKENS = 16
_KEPT_LAYERS = 2  # packing works on parts of neighbouring layers at a time
_NAME = re.compile(
    r"(?:model\.)?layers\.([0-9]+)\."
    r"(?:self_attn\.(?:([qkv])_proj|(qkv_proj)|(o_proj))|mlp\.(?:(gate|up)_proj|(gate_up_proj)|(down_proj)))\.weight"
)
_QKV, _OUTPUT, _GATE_UP, _DOWN = range(4)
_PROJECTION_OF_GROUP = {2: _QKV, 3: _QKV, 4: _OUTPUT, 5: _GATE_UP, 6: _GATE_UP, 7: _DOWN}


class Calibration:
    """A decoder that reads a text layer by layer. Thread-safe; layers are requested in order."""

    def __init__(self, decoder: Decoder, tokens: Sequence[int], prefix: Sequence[int] = ()) -> None:
        """The decoder's weights must be loaded. `prefix` precedes each window of the text."""
        executor = decoder.executor
        assert isinstance(executor, TorchExecutor)
        self._executor = executor
        width = min(WINDOW_TOKENS, decoder.config.max_context) - len(prefix)
        windows = [tokens[begin : begin + width] for begin in range(0, len(tokens), width)]
        self._batches = [_batch([*prefix, *window]) for window in windows]
        num_blocks = max(len(batch.spans[0].blocks) for batch in self._batches)
        self._kv = decoder.new_kv(num_blocks, _BLOCK_TOKENS)
        self._states = [executor.embed(batch) for batch in self._batches]
        # Layers that the states have passed.
        self._num_done = 0
        self._moments: dict[int, tuple[npt.NDArray[np.float32], ...]] = {}  # by layer
        self._lock = threading.Lock()

    def moments(self, name: str) -> npt.NDArray[np.float32] | None:
        """The mean of x xᵀ over the inputs x of the projection `name`, (K, K); None for any other
        matrix.

        Blocks while its layer is computed. Raises `ValueError` for a layer whose moments were
        dropped.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        layer = int(found[1])
        with self._lock:
            while self._num_done <= layer:
                self._advance()
            if layer not in self._moments:
                raise ValueError(f"layer {layer} was requested after layer {self._num_done - 1}")
            assert found.lastindex is not None
            return self._moments[layer][_PROJECTION_OF_GROUP[found.lastindex]]

    def _advance(self) -> None:
        layer = self._executor.layers_of[self._num_done]
        meters = _Meters(layer)
        for number, batch in enumerate(self._batches):
            step = self._executor.begin(batch, self._kv)
            first = self._num_done
            self._states[number] = self._executor.layers(step, first, first + 1, self._states[number])
        self._moments[self._num_done] = meters.remove()
        self._moments.pop(self._num_done - _KEPT_LAYERS, None)
        self._num_done += 1


class _Meters:
    """A meter before each projection of a layer; none before a mixture's experts, each of which
    sees few rows.
    """

    def __init__(self, layer: DecoderLayer) -> None:
        self._attention, self._mlp = layer.attention, layer.mlp
        self._qkv = self._attention.qkv = _Meter(self._attention.qkv)
        self._output = self._attention.output = _Meter(self._attention.output)
        if isinstance(self._mlp, GatedMLP):
            self._gate_up = self._mlp.gate_up = _Meter(self._mlp.gate_up)
            self._down = self._mlp.down = _Meter(self._mlp.down)

    def remove(self) -> tuple[npt.NDArray[np.float32], ...]:
        """Remove the meters. Returns the moments, in the order of `_QKV` and the others."""
        self._attention.qkv, self._attention.output = self._qkv.product, self._output.product
        meters = [self._qkv, self._output]
        if isinstance(self._mlp, GatedMLP):
            self._mlp.gate_up, self._mlp.down = self._gate_up.product, self._down.product
            meters += [self._gate_up, self._down]
        return tuple(meter.mean() for meter in meters)


class _Meter:
    """Sums x xᵀ over the input rows of a product."""

    __slots__ = ("_num_rows", "_sum", "product")

    def __init__(self, product: Product) -> None:
        self.product = product
        self._sum: torch.Tensor | None = None
        self._num_rows = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        squares = wide.T @ wide
        self._sum = squares if self._sum is None else self._sum.add_(squares)
        self._num_rows += len(x)
        return self.product(x)

    def mean(self) -> npt.NDArray[np.float32]:
        assert self._sum is not None
        mean: npt.NDArray[np.float32] = (self._sum / self._num_rows).numpy()
        return mean


def calibrate(
    source: Source,
    text: EvaluationText,
    *,
    max_tokens: int,
    threads: int | None = None,
    progress: OnProgress | None = None,
) -> Calibration:
    """Load a decoder that can be quantised, to read the first `max_tokens` tokens of the text.

    Blocks; `progress` is called from this thread while weights are read. torch uses all available
    cores from then on. Raises `UsageError` for an encoder, `InsufficientMemoryError` if the model
    does not fit, `ModelError` for one that cannot be run, and the source's errors.
    """
    check_max_tokens(max_tokens)
    manifest = open_artifact(source)
    check_fits(
        manifest.weight_bytes + WORK_BYTES,
        available(),
        what="calibrating",
        made_of="the weights, and room to compute in",
    )
    torch.set_num_threads(available_cores())
    counter = PartCounter(progress, sum(part.size_bytes for part in manifest.parts))
    model = WholeDecoder(source, manifest, threads=threads, on_part=counter)
    read = InputReader(model.files).for_decoder(text, max_tokens)
    return Calibration(model.decoder, read.tokens, read.prefix)


def _batch(tokens: Sequence[int]) -> StepBatch:
    """A batch of one window, in the first blocks of a pool."""
    places = np.arange(len(tokens), dtype=np.int64)
    blocks = tuple(range(-(-len(tokens) // _BLOCK_TOKENS)))
    span = SequenceSpan(0, len(tokens), len(tokens), blocks)
    none = np.zeros(0, np.int64)
    return StepBatch(np.array(tokens, dtype=np.int64), places, places, (span,), none)
