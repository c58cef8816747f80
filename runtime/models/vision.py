"""A vision tower with its connector: tiles of images to rows of a decoder's embeddings, and their weights.

Each tile is computed by itself, so its rows depend on no other tile or request. Layers wait at their own gates, for
exact weights only. It knows no files of images, no prompts and no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from ..step.batch import Int64s
from ..tensors import DType, Tensor, from_float32
from ..weights import Weights
from .encoder import take_layer_norm
from .matrices import DenseMatrix, EncoderLayerWeights, EncoderWeights, VisionWeights
from .parameters import Parameters
from .projections import take_linear, take_stacked
from .spec import Activation, EncoderSpec, Pooling, activation_of
from .vision_config import VisionConfig

if TYPE_CHECKING:
    import numpy.typing as npt

    Levels = npt.NDArray[np.float32]  # (3, 256): a channel's number for each value of a pixel
    Tiles = npt.NDArray[np.uint8]  # (N, 3, tile_size, tile_size)

Rows = Any  # (T, hidden_size) in the dtype of activations


class VisionExecutor(Protocol):
    """Computes a tower's tile. One thread at a time; long calls release the GIL."""

    def embed(self, patches: Rows, places: Int64s) -> Rows:
        """patches (P, 3 * patch_size ** 2) times the patches' matrix, plus the positions of `places` (P,)."""

    def layers(self, first: int, end: int, x: Rows) -> Rows:
        """x (P, hidden_size) through the layers [first, end). x may be changed, and is not used again."""

    def connect(self, x: Rows, order: Int64s) -> Rows:
        """The final norm of x (P, hidden_size), its rows in this order, the rows of each token side by side, times the
        connector's matrix: (tokens, the decoder's hidden_size).
        """


class VisionFactory(Protocol):
    """A backend that takes images, which `DecoderSpec.takes_images` says."""

    def vision(self, spec: EncoderSpec, weights: VisionWeights) -> VisionExecutor: ...


class VisionTower:
    """A tower and its weights. Not thread-safe: the caller encodes one tile at a time."""

    def __init__(
        self, config: VisionConfig, dtype: DType, weights: VisionWeights, executor: VisionExecutor
    ) -> None:
        self.config = config
        self.dtype = dtype  # of activations
        self._weights = weights
        self._executor = executor
        # transformers takes them from fp32 fractions, which of sizes that no model has are off by one here and there.
        self._places = np.arange(config.patches_per_tile, dtype=np.int64)
        self._order = shuffled(config.patches_per_side, config.shuffle)

    def encode(self, tiles: Tiles, levels: Levels) -> Iterator[Rows]:
        """The rows of each tile in turn, (tokens_per_tile, the decoder's hidden_size) in the decoder's dtype.

        Blocks until the weights arrive, layer by layer, and raises the load's error if they never do.
        """
        weights, executor = self._weights.encoder, self._executor
        for tile in tiles:
            weights.entry_gate(self._places)
            x = executor.embed(self._patches(tile, levels), self._places)
            for index, layer in enumerate(weights.layers):
                layer.gate()
                x = executor.layers(index, index + 1, x)
            if weights.head_gate is not None:
                weights.head_gate()
            yield executor.connect(x, self._order)

    def _patches(self, tile: npt.NDArray[np.uint8], levels: Levels) -> Rows:
        """(P, 3 * patch_size ** 2), row by row of patches: what of the tile is left over on the right and at the bottom
        is no whole patch.
        """
        num, size = self.config.patches_per_side, self.config.patch_size
        pixels = np.stack([own[channel] for own, channel in zip(levels, tile, strict=True)])
        whole = pixels[:, : num * size, : num * size].reshape(3, num, size, num, size)
        return from_float32(whole.transpose(1, 3, 0, 2, 4).reshape(num * num, -1), self.dtype)


def shuffled(num_per_side: int, size: int) -> Int64s:
    """The numbers of patches, token by token: those of each square of `size` by `size`, row by row."""
    squares = np.arange(num_per_side**2).reshape(num_per_side // size, size, num_per_side // size, size)
    return squares.transpose(0, 2, 1, 3).reshape(-1).astype(np.int64)


def build_vision(
    config: VisionConfig, weights: Weights, factory: VisionFactory, *, dtype: DType, hidden_size: int
) -> VisionTower:
    """The tower whose rows a decoder of this dtype and `hidden_size` takes. Every tensor is looked up and checked; no
    content is read. Raises `ModelError`.
    """
    taken = take_vision(config, weights, hidden_size)
    return VisionTower(config, dtype, taken, factory.vision(spec_of(config, dtype), taken))


def spec_of(config: VisionConfig, dtype: DType) -> EncoderSpec:
    """The tower's layers as those of an encoder."""
    head_dim = config.hidden_size // config.num_heads
    return EncoderSpec(
        dtype=dtype,
        vocab_size=config.patches_per_tile,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        head_dim=head_dim,
        norm_eps=config.norm_eps,
        attention_scale=head_dim**-0.5,
        activation=activation_of(config.activation) or Activation.GELU_TANH,
        gated=False,
        pre_norm=True,
        final_norm=True,
        norm_bias=True,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
        max_positions=config.patches_per_tile,
        position_offset=0,
        type_vocab_size=0,
        windows=(None,) * config.num_layers,
        rotary=None,
        local_rotary=None,
        position_bias=None,
        disentangled=None,
        pooling=Pooling.MEAN,
        dense=(),
        normalize=False,
        num_labels=0,
        head_activation=Activation.TANH,
        head_bias=False,
        head_norm=False,
    )


def take_vision(config: VisionConfig, weights: Weights, hidden_size: int) -> VisionWeights:
    """All of the tower's weights, and the connector to rows of `hidden_size`. Raises `ModelError` when a tensor is
    missing or does not fit `config`.
    """
    width, size, num = config.hidden_size, config.patch_size, config.patches_per_tile
    entry = Parameters(weights, config.root)
    patches = entry.take("embeddings.patch_embedding.weight", width, 3, size, size)
    matrix = DenseMatrix(
        Tensor(patches.dtype, patches.array.reshape(width, -1)),
        entry.take("embeddings.patch_embedding.bias", width),
    )
    table = "embeddings.position_embedding.weight"
    positions = entry.take(table, num, width)
    entry_gate = entry.row_gate(table)
    layers = tuple(
        _take_layer(config, Parameters(weights, f"{config.root}encoder.layers.{index}."))
        for index in range(config.num_layers)
    )
    last = Parameters(weights, "")
    final_norm = take_layer_norm(last, f"{config.root}post_layernorm", width)
    connector = take_linear(last, config.connector, width * config.shuffle**2, hidden_size, bias=False)
    encoder = EncoderWeights(
        words=matrix.weight,
        positions=positions,
        types=None,
        norm=final_norm,
        layers=layers,
        entry_gate=entry_gate,
        final_norm=final_norm,
        head_gate=last.gate(),
    )
    return VisionWeights(encoder, matrix, connector)


def _take_layer(config: VisionConfig, parameters: Parameters) -> EncoderLayerWeights:
    width, inner = config.hidden_size, config.intermediate_size
    names = [(f"self_attn.{part}_proj", width) for part in "qkv"]
    return EncoderLayerWeights(
        qkv=take_stacked(parameters, names, width, bias=True),
        output=take_linear(parameters, "self_attn.out_proj", width, width, bias=True),
        attention_norm=take_layer_norm(parameters, "layer_norm1", width),
        up=take_linear(parameters, "mlp.fc1", width, inner, bias=True),
        down=take_linear(parameters, "mlp.fc2", inner, width, bias=True),
        mlp_norm=take_layer_norm(parameters, "layer_norm2", width),
        gate=parameters.gate(),
    )
