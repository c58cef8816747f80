"""An encoder of sound: spectrograms of windows to the first rows of a decoder's sequences, and its weights.

Each window is computed by itself, so its rows depend on no other window or request. Layers wait at their own gates, for
exact weights only. It knows no files of sound, no prompts and no tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import Struct

from ..tensors import DType, Tensor
from ..weights import Weights
from .encoder import take_layer_norm
from .encoder_weights import EncoderLayerWeights, EncoderWeights
from .matrices import DenseMatrix
from .parameters import Parameters
from .projections import take_linear, take_qkv
from .spec import EncoderSpec
from .speech_config import SpeechConfig
from .vision import tower_spec

if TYPE_CHECKING:
    import numpy.typing as npt

TAPS = 3  # of both convolutions
_ROOTS = ("encoder.", "model.encoder.")
Rows = Any  # (num_places, hidden_size) in the dtype of activations


class SpeechWeights(Struct, frozen=True, eq=False):
    """The weights of an encoder of sound. Of its encoder, `words` is the first convolution's matrix, whose rows are
    those of `entry_gate`, and `norm` is not used. Inputs of the convolutions' matrices are channels with `TAPS` columns
    each.
    """

    encoder: EncoderWeights
    first: DenseMatrix  # (hidden, num_bands * TAPS)
    second: DenseMatrix  # (hidden, hidden * TAPS), of every other column


class SpeechExecutor(Protocol):
    """Computes a window. One thread at a time; long calls release the GIL."""

    def embed(self, window: npt.NDArray[np.float32]) -> Rows:
        """Both convolutions of window (num_bands, 2 * num_places), a GELU behind each, and the positions."""

    def layers(self, first: int, end: int, x: Rows) -> Rows:
        """x (num_places, hidden_size) through the layers [first, end). It may be changed, and is not used again."""

    def finish(self, x: Rows) -> Rows:
        """The final norm."""

    def working_bytes(self, num_rows: int) -> int:
        """The memory that `layers` still takes for `num_rows` besides x."""


class SpeechFactory(Protocol):
    """A backend that takes sound, which `DecoderSpec.source_len` says."""

    def speech(self, spec: EncoderSpec, weights: SpeechWeights) -> SpeechExecutor: ...


class SpeechTower(Struct, frozen=True, eq=False):
    """An encoder of sound and its weights. Not thread-safe: the caller encodes one window at a time."""

    config: SpeechConfig
    dtype: DType  # of activations
    weights: SpeechWeights
    executor: SpeechExecutor

    def working_bytes(self, height: int = 0, width: int = 0) -> int:
        """Memory that encoding a window takes, all of which are of one size."""
        states = 8 * self.config.hidden_size + 2 * TAPS * max(self.config.hidden_size, self.config.num_bands)
        num_rows = self.config.num_places
        return 4 * num_rows * states + self.executor.working_bytes(num_rows)

    def encode(
        self,
        tiles: npt.NDArray[np.float32],
        levels: Any = None,
        is_over: Callable[[], bool] = lambda: False,
    ) -> Iterator[Rows]:
        """The rows of each spectrogram of tiles (N, num_bands, 2 * num_places) in turn. Ends between two layers once
        `is_over`. Spectrograms have no `levels`.

        Blocks until the weights arrive, layer by layer, and raises the load's error if they never do.
        """
        weights, executor = self.weights.encoder, self.executor
        for window in tiles:
            weights.entry_gate(np.arange(self.config.hidden_size))
            x = executor.embed(window)
            for index, layer in enumerate(weights.layers):
                if is_over():
                    return
                layer.gate()
                x = executor.layers(index, index + 1, x)
            assert weights.head_gate is not None
            weights.head_gate()
            yield executor.finish(x)

    def join(self, parts: Sequence[Rows], layout: None = None) -> Rows:
        """The rows of the one window of sound there is."""
        (rows,) = parts
        return rows


def build_speech(
    config: SpeechConfig, weights: Weights, factory: SpeechFactory, *, dtype: DType
) -> SpeechTower:
    """The encoder whose rows a decoder of this dtype takes. Every tensor is looked up and checked; no content is read.
    Raises `ModelError`.
    """
    taken = take_speech(config, weights)
    spec = tower_spec(config, dtype, vocab_size=config.hidden_size, max_positions=config.num_places)
    return SpeechTower(config, dtype, taken, factory.speech(spec, taken))


def take_speech(config: SpeechConfig, weights: Weights) -> SpeechWeights:
    """All of the encoder's weights. Raises `ModelError` when a tensor is missing or does not fit `config`."""
    width = config.hidden_size
    root = next((each for each in _ROOTS if f"{each}conv1.weight" in weights), _ROOTS[-1])
    entry = Parameters(weights, root)
    first = _take_convolution(entry, "conv1", config.num_bands, width)
    second = _take_convolution(entry, "conv2", width, width)
    positions = entry.take("embed_positions.weight", config.num_places, width)
    entry_gate = entry.row_gate("conv1.weight")
    layers = tuple(
        _take_layer(config, Parameters(weights, f"{root}layers.{index}."))
        for index in range(config.num_layers)
    )
    last = Parameters(weights, root)
    encoder = EncoderWeights(
        words=first.weight,
        positions=positions,
        types=None,
        norm=None,
        layers=layers,
        entry_gate=entry_gate,
        final_norm=take_layer_norm(last, "layer_norm", width),
        head_gate=last.gate(),
    )
    return SpeechWeights(encoder, first, second)


def _take_convolution(parameters: Parameters, name: str, num_in: int, num_out: int) -> DenseMatrix:
    weight = parameters.take(f"{name}.weight", num_out, num_in, TAPS)
    matrix = Tensor(weight.dtype, weight.array.reshape(num_out, num_in * TAPS))
    return DenseMatrix(matrix, parameters.take(f"{name}.bias", num_out))


def _take_layer(config: SpeechConfig, parameters: Parameters) -> EncoderLayerWeights:
    width, inner = config.hidden_size, config.intermediate_size
    qkv = [(f"self_attn.{name}_proj", width) for name in "qkv"]
    return EncoderLayerWeights(
        qkv=take_qkv(parameters, qkv, width),
        output=take_linear(parameters, "self_attn.out_proj", width, width, bias=True),
        attention_norm=take_layer_norm(parameters, "self_attn_layer_norm", width),
        up=take_linear(parameters, "fc1", width, inner, bias=True),
        down=take_linear(parameters, "fc2", inner, width, bias=True),
        mlp_norm=take_layer_norm(parameters, "final_layer_norm", width),
        gate=parameters.gate(),
    )
