"""Second moments of the inputs of a decoder's projections, for `pack --quantize int4`.

The whole model is in memory as stored. The windows of a text are independent, and all of them go
through one layer before any goes through the next, when the moments of that layer are first
requested. They exist until each matrix that was announced has got its own: packing works on a few
neighbouring layers at a time. numpy computes, in fp32.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from glob import glob
from typing import TYPE_CHECKING

import numpy as np

from ...loader.artifact import open_artifact
from ...loader.memory.limits import available, check_fits
from ...loader.sources.base import Source
from ...loader.tools.pack.quantize import InputMoments
from ..backends.native.reference import floats_of, scale_and_cap
from ..backends.native.reference_models import ReferenceDecoder
from ..errors import ModelError
from ..kv.storage import KVStorage
from ..models.adapter import AdapterPlace, modules_of
from ..models.decoder import Decoder
from ..models.decoder_tensors import QUERY_UP
from ..models.matrices import DecoderLayerWeights, DecoderWeights
from ..models.spec import DecoderSpec
from ..step.batch import SequenceSpan, StepBatch
from ..tensors import DType, to_float32
from .decoders import WINDOW_TOKENS, cut_windows
from .evaluate import WORK_BYTES, OnProgress, PartCounter, WholeDecoder, check_max_tokens
from .sequences import sample_windows
from .text import EvaluationText, InputReader

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..backends.native.pools import Pool
    from ..models.matrices import Projection

    Floats = npt.NDArray[np.float32]

# Of weights: larger models take more than half an hour on two cores.
MAX_UNASKED_BYTES = 4 << 30
MAX_TOKENS = 8192
# Of a text that the model makes: rows of inputs for each column of the widest matrix, and the least.
_ROWS_A_COLUMN = 8
_MIN_OWN_TOKENS = 1024
# Columns up to which the threads of numpy's OpenBLAS cost more than they bring: they wait by spinning.
_NARROW = 1024
_BLOCK_TOKENS = 16
_STEP_TOKENS = 2048  # of several windows; bounds the activations
_QUERY_UP = AdapterPlace.DOWN + 1  # of latents: in the place of Mamba-2's, which are not calibrated


class Calibration:
    """A decoder that reads a text layer by layer. Thread-safe; layers are requested in about their order."""

    def __init__(self, decoder: Decoder, windows: Sequence[Sequence[int]], names: Iterable[str]) -> None:
        """The decoder's weights must be loaded. `names` are the matrices that will be requested, each
        once; others have no moments.
        """
        config = decoder.config
        spec = DecoderSpec.of(config, DType.F32)
        self._layers = decoder.weights.layers
        self._places: dict[str, tuple[int, int]] = {
            f"{root}{config.model_names.layers}.{layer}.{module.name}.weight": (layer, module.place)
            for root in config.roots
            for layer in range(config.num_layers)
            for module in modules_of(config, layer)
        }
        if config.latent is not None:
            self._places |= {
                f"{root}layers.{layer}.{QUERY_UP}.weight": (layer, _QUERY_UP)
                for root in config.roots
                for layer in range(config.num_layers)
            }
        self._decoder = _MeteredDecoder(spec, decoder.weights)
        self._batches = list(_batches(windows))
        num_blocks = max(batch.spans[-1].blocks[-1] for batch in self._batches) + 1
        self._kv = KVStorage(spec.kv_shape(num_blocks, _BLOCK_TOKENS))
        self._states = [self._decoder.embed(batch) for batch in self._batches]
        # Layers that the states have passed.
        self._num_done = 0
        self._meters: dict[tuple[int, int], _Meter] = {}  # by layer and projection
        self._expected = Counter(self._places[name] for name in names if name in self._places)
        self._lock = threading.Lock()

    def inputs_of(self, name: str) -> InputMoments | None:
        """The moments of the inputs of the projection `name`; None for any other matrix, and for
        experts.

        Blocks while its layer is computed.
        """
        place = self._places.get(name)
        if place is None:
            return None
        with self._lock:
            while self._num_done <= place[0]:
                self._advance()
            meter = self._meters.get(place)
            self._expected[place] -= 1
            if self._expected[place] <= 0:
                self._meters.pop(place, None)
        return None if meter is None else meter.inputs()

    def _advance(self) -> None:
        layer = self._num_done
        meters = self._decoder.meter(self._layers[layer])
        for number, batch in enumerate(self._batches):
            step = self._decoder.begin(batch, self._kv)
            self._states[number] = self._decoder.layers(step, layer, layer + 1, self._states[number])
        for projection, meter in enumerate(meters):
            if meter is not None and self._expected[layer, projection] > 0:
                self._meters[layer, projection] = meter
        self._num_done += 1


class _Meter:
    """Sums x xᵀ over the input rows of a projection."""

    __slots__ = ("_inputs", "_lock", "_num_rows", "_sum")

    def __init__(self, num_in: int) -> None:
        self._sum = np.zeros((num_in, num_in), np.float32)
        self._num_rows = 0
        self._inputs: InputMoments | None = None
        self._lock = threading.Lock()

    def add(self, x: Floats) -> None:
        self._sum += x.T @ x
        self._num_rows += len(x)

    def inputs(self) -> InputMoments:
        """Made once, for all matrices of these inputs. Thread-safe."""
        with self._lock:
            if self._inputs is None:
                self._inputs = InputMoments.of(self._sum / np.float32(self._num_rows))
            return self._inputs


class _MeteredDecoder(ReferenceDecoder):
    """The decoder in numpy, many rows at a time, with meters before the projections of one layer."""

    def __init__(self, spec: DecoderSpec, weights: DecoderWeights) -> None:
        super().__init__(spec, weights)
        self._meters: dict[int, _Meter] = {}  # by the identity of the projection

    def meter(self, layer: DecoderLayerWeights) -> tuple[_Meter | None, ...]:
        """New meters for this layer, in the order of `AdapterPlace` and `_QUERY_UP`; None for a mixture's experts,
        each of which sees few rows.
        """
        projections = (layer.qkv, layer.output, layer.gate_up, layer.down, layer.query_up)
        meters = tuple(None if each is None else _Meter(each.num_in) for each in projections)
        self._meters = {
            id(projection): meter
            for projection, meter in zip(projections, meters, strict=True)
            if meter is not None
        }
        return meters

    def _project(self, x: Floats, projection: Projection, dtype: DType) -> Floats:
        meter = self._meters.get(id(projection))
        if meter is not None:
            meter.add(x)
        parts = []
        for matrix in projection.matrices():
            columns = matrix.columns
            part = (x if columns is None else x[:, columns]) @ floats_of(matrix).T
            if matrix.bias is not None:
                part += to_float32(matrix.bias.array, matrix.bias.dtype)
            parts.append(part)
        return np.concatenate(parts, axis=1)

    def _attend_span(self, index: int, pool: Pool, span: SequenceSpan, queries: Floats, out: Floats) -> None:
        """A whole window: its keys and values are those of its own rows."""
        spec = self._spec
        keys, values = self._keys_and_values(index, pool, span)  # (kv_heads, T, head_dim)
        rows = slice(span.start, span.start + span.length)
        own = queries[rows].reshape(span.length, spec.num_kv_heads, -1, spec.head_dim).transpose(1, 2, 0, 3)
        places = np.arange(span.length)
        first = np.array([spec.first_key(index, place) for place in range(span.length)])
        is_seen = (places <= places[:, None]) & (places >= first[:, None])
        group = spec.num_heads // spec.num_kv_heads
        sinks = self._weights.layers[index].sinks
        for head, (of_head, key, value) in enumerate(zip(own, keys, values, strict=True)):
            heads = slice(head * group, (head + 1) * group)
            scores = scale_and_cap(of_head @ key.T, spec.attention_scale, spec.score_cap)
            scores = np.where(is_seen, scores, np.float32(-1e30))  # (group, T, T)
            largest, sink = scores.max(-1, keepdims=True), None
            if sinks is not None:
                sink = to_float32(sinks.array[heads], sinks.dtype)[:, None, None]
                largest = np.maximum(largest, sink)
            powers = np.exp(scores - largest)
            total = powers.sum(-1, keepdims=True)
            if sink is not None:
                total += np.exp(sink - largest)
            out[rows, heads] = ((powers / total) @ value).transpose(1, 0, 2)


def weight_bytes(source: Source) -> int:
    """Of the model there, in memory. Raises the source's errors."""
    return open_artifact(source).weight_bytes


def calibrate(
    source: Source,
    text: EvaluationText | None,
    names: Iterable[str],
    *,
    max_tokens: int | None = None,
    threads: int | None = None,
    progress: OnProgress | None = None,
    note: Callable[[str], None] = lambda line: None,
) -> Calibration:
    """Load a decoder that can be quantised, to read the first `max_tokens` tokens of the text
    (`MAX_TOKENS`), or as many of its own making (as many as its matrices need). `names` are the
    matrices whose moments will be requested. `note` gets a line about what will take its time.

    Blocks; `progress` is called from this thread while weights are read. Raises `UsageError` for an
    encoder, `InsufficientMemoryError` if the model does not fit, `ModelError` for one that cannot
    be run, and the source's errors.
    """
    check_max_tokens(MAX_TOKENS if max_tokens is None else max_tokens)
    manifest = open_artifact(source)
    check_fits(
        manifest.weight_bytes + WORK_BYTES,
        available(),
        what="calibrating",
        made_of="the weights, and room to compute in",
    )
    counter = PartCounter(progress, sum(part.size_bytes for part in manifest.parts))
    model = WholeDecoder(source, manifest, threads=threads, on_part=counter)
    config = model.decoder.config
    kinds = {
        "gated delta nets": config.delta_nets is not None,
        "Mamba-2 layers": config.mamba is not None,
        "layers of different sizes": bool(config.layer_shapes),
    }
    for kind in (kind for kind, is_there in kinds.items() if is_there):
        raise ModelError(
            f"{source.url} has {kind}, which cannot be calibrated",
            hint="Pack it with --no-calibrate.",
        )
    reader = InputReader(model.files)
    columns = _widest(model.decoder)
    if columns <= _NARROW:
        limit_blas_threads(1)
    if text is None:
        num_tokens = own_text_tokens(columns) if max_tokens is None else max_tokens
        note(f"calibrating: the model writes and reads {num_tokens:,} tokens")
        windows = sample_windows(model.decoder, reader.first_tokens, num_tokens)
    else:
        read = reader.for_decoder(text, MAX_TOKENS if max_tokens is None else max_tokens)
        note(f"calibrating: the model reads {len(read.tokens):,} tokens")
        window_tokens = min(WINDOW_TOKENS, model.decoder.config.max_context)
        windows = list(cut_windows(read.tokens, read.prefix, window_tokens))
    return Calibration(model.decoder, windows, names)


def own_text_tokens(columns: int) -> int:
    """The tokens of a text of the model's own, for matrices of up to `columns` columns."""
    return min(MAX_TOKENS, max(_MIN_OWN_TOKENS, _ROWS_A_COLUMN * columns))


def _widest(decoder: Decoder) -> int:
    """The columns of the widest projection that has moments."""
    projections = (
        each for layer in decoder.weights.layers for each in (layer.output, layer.gate_up, layer.down)
    )
    return max((each.num_in for each in projections if each is not None), default=1)


def limit_blas_threads(number: int) -> None:
    """Have numpy's OpenBLAS compute in `number` threads, where numpy has brought one along; process-wide."""
    for path in glob(os.path.join(os.path.dirname(np.__file__) + ".libs", "libscipy_openblas64_*")):
        with suppress(OSError, AttributeError):
            ctypes.CDLL(path).scipy_openblas_set_num_threads64_(ctypes.c_int(number))


def _batches(windows: Sequence[Sequence[int]]) -> Iterator[StepBatch]:
    """Batches of up to `_STEP_TOKENS` tokens, but at least one window each, in a pool's first blocks."""
    begin = 0
    while begin < len(windows):
        end, num_tokens = begin + 1, len(windows[begin])
        while end < len(windows) and num_tokens + len(windows[end]) <= _STEP_TOKENS:
            num_tokens += len(windows[end])
            end += 1
        yield _batch(windows[begin:end])
        begin = end


def _batch(windows: Sequence[Sequence[int]]) -> StepBatch:
    spans: list[SequenceSpan] = []
    slots: list[npt.NDArray[np.int64]] = []
    start = first_block = 0
    for window in windows:
        num_blocks = -(-len(window) // _BLOCK_TOKENS)
        blocks = tuple(range(first_block, first_block + num_blocks))
        spans.append(SequenceSpan(start, len(window), len(window), blocks))
        slots.append(first_block * _BLOCK_TOKENS + np.arange(len(window), dtype=np.int64))
        start, first_block = start + len(window), first_block + num_blocks
    tokens = np.concatenate([np.array(window, np.int64) for window in windows])
    places = np.concatenate([np.arange(len(window), dtype=np.int64) for window in windows])
    return StepBatch(tokens, places, np.concatenate(slots), tuple(spans), np.zeros(0, np.int64))
