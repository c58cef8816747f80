"""Second moments of the inputs of a decoder's projections, for `pack --quantize int4`.

The whole model is in memory as stored. The windows of a text are independent, and all of them go
through one layer before any goes through the next, when the moments of that layer are first
requested. They exist until each matrix that was announced has got its own: packing works on a few
neighbouring layers at a time. The native core computes the layers, in fp32.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from glob import glob
from typing import TYPE_CHECKING, Any

import numpy as np

from ...loader.artifact import open_artifact
from ...loader.memory.limits import available, check_fits
from ...loader.native.library import require_library
from ...loader.sources.base import Source
from ...loader.tools.pack.quantize import InputMoments
from ..backends.native import arrays, implemented
from ..backends.native.decoder import NativeDecoder, NativeStep
from ..errors import ModelError
from ..kv.storage import KVStorage
from ..models.adapter import modules_of
from ..models.decoder import Decoder
from ..models.decoder_tensors import QUERY_UP
from ..models.spec import DecoderSpec
from ..step.batch import SequenceSpan, StepBatch
from ..tensors import DType
from .decoders import WINDOW_TOKENS, cut_windows
from .evaluate import WORK_BYTES, OnProgress, PartCounter, WholeDecoder, check_max_tokens
from .sequences import sample_windows
from .text import EvaluationText, InputReader

if TYPE_CHECKING:
    import numpy.typing as npt

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
_PROJECTIONS = ("qkv", "output", "gate_up", "down", "query_up")  # that have moments, by the layer's record


class Calibration:
    """A decoder that reads a text layer by layer. Thread-safe; layers are requested in about their order."""

    def __init__(self, decoder: Decoder, windows: Sequence[Sequence[int]], names: Iterable[str]) -> None:
        """The decoder's weights must be loaded. `names` are the matrices that will be requested, each
        once; others have no moments. Raises `ModelError` for a decoder that the native core does not compute.
        """
        config = decoder.config
        spec = DecoderSpec.of(config, DType.F32)
        if reason := implemented.refusal(spec, decoder.weights):
            raise ModelError(f"the model cannot be calibrated: {reason}", hint="Pack it with --no-calibrate.")
        self._places: dict[str, tuple[int, str]] = {
            f"{root}{config.model_names.layers}.{layer}.{module.name}.weight": (
                layer,
                module.place.name.lower(),
            )
            for root in config.roots
            for layer in range(config.num_layers)
            for module in modules_of(config, layer)
        }
        if config.latent is not None:
            self._places |= {
                f"{root}layers.{layer}.{QUERY_UP}.weight": (layer, "query_up")
                for root in config.roots
                for layer in range(config.num_layers)
            }
        self._decoder = _MeteredDecoder(spec, decoder.weights, require_library())
        self._batches = list(_batches(windows))
        num_blocks = max(batch.spans[-1].blocks[-1] for batch in self._batches) + 1
        self._kv = KVStorage(spec.kv_shape(num_blocks, _BLOCK_TOKENS))
        self._states = [self._decoder.embed(batch) for batch in self._batches]
        # Layers that the states have passed.
        self._num_done = 0
        self._meters: dict[tuple[int, str], _Meter] = {}  # by layer and projection
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
        for batch, x in zip(self._batches, self._states, strict=True):
            step = self._decoder.begin(batch, self._kv)
            for projection, inputs in self._decoder.inputs_of(step, layer, x).items():
                if self._expected[layer, projection] > 0:
                    self._meters.setdefault((layer, projection), _Meter(inputs.shape[1])).add(inputs)
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


class _MeteredDecoder(NativeDecoder):
    """The native decoder, which shows what the projections of a layer take."""

    def inputs_of(self, step: NativeStep, layer: int, x: Any) -> dict[str, Floats]:
        """x through the layer, in place. The inputs (T, K) of its projections, which are not copied; none of a
        mixture's experts, each of which sees few rows.
        """
        if layer not in self._parts:
            self._fill(layer)
        assert layer in self._parts, "weights that are there are settled"
        projections = {name: getattr(self._layers[layer], name) for name in _PROJECTIONS}
        inputs = {
            name: np.empty((len(step.batch.tokens), projection.num_in), np.float32)
            for name, projection in projections.items()
            if projection.num_parts
        }
        for name, kept in inputs.items():
            projections[name].inputs = arrays.address(kept)
        self.layers(step, layer, layer + 1, x)
        for name in inputs:
            projections[name].inputs = None
        return inputs


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
