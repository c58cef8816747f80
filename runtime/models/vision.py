"""A vision tower with its connector: tiles of images to rows of a decoder's embeddings, and their weights.

Each tile is computed by itself, so its rows depend on no other tile or request. Layers wait at their own gates, for
exact weights only. It knows no files of images, no prompts and no tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from msgspec import Struct

from ..images.processor import TileLayout
from ..step.batch import Int64s
from ..tensors import DType, Tensor, from_float32, to_float32
from .encoder_weights import EncoderWeights
from .fields import Norm
from .matrices import DenseMatrix, LayerNormWeights, Projection
from .rotary import Floats, Rotary
from .spec import Activation, EncoderSpec, Pooling, activation_of
from .vision_config import MAX_TILE_PIXELS, VisionConfig

if TYPE_CHECKING:
    import numpy.typing as npt

    from .speech_config import SpeechConfig

    Levels = npt.NDArray[np.float32]  # (3, 256): a channel's number for each value of a pixel
    Tiles = npt.NDArray[np.uint8]  # (N, 3, height, width), as `VisionConfig.grid_of` takes them

_BAND_PIXELS = 1 << 16  # which become numbers at once, or those of one row of patches
BAND_ROWS = 512  # of what positions are mixed of, at most
_WIDE_BYTES = 40  # of each number that becomes one of the dtype at once
Rows = Any  # (T, hidden_size) in the dtype of activations


class DeepConnector(Struct, frozen=True, eq=False):
    """output(GELU(inner(norm(x)))) of the states x of a token's patches, side by side, behind a layer of the tower."""

    norm: LayerNormWeights
    inner: Projection
    output: Projection


class VisionWeights(Struct, frozen=True, eq=False):
    """A vision tower's weights. Of its encoder, `words` is the patches' matrix, whose rows are those of `entry_gate`,
    `norm` is not used, and the head's gate is the connector's, too.
    """

    encoder: EncoderWeights
    patches: DenseMatrix  # (hidden, 3 * num_frames * patch_size ** 2)
    connector: Projection  # from the states of a token's patches, side by side
    # (hidden,): then from their mean, normalised as `Norm.RMS_PLUS_ONE` does.
    connector_norm: Tensor | None = None
    class_row: Tensor | None = None  # (hidden,), which comes before the patches' products
    # Of patches, of their products, and of the sums of these and their positions; or none.
    entry_norms: tuple[LayerNormWeights | None, ...] = ()
    entry_norm_eps: float = 0.0
    mean_scale: float = 1.0  # of the mean before that, in fp32,
    # (hidden,) each: and then (mean - the first) * the second
    mean_standard: tuple[Tensor, Tensor] | None = None
    connector_output: Projection | None = None  # then an activation, and to the decoder's rows
    mark: Tensor | None = None  # (the decoder's hidden_size,): of `TileLayout`
    deep: tuple[DeepConnector, ...] = ()  # of what some layers give


class VisionExecutor(Protocol):
    """Computes a tower's tile. One thread at a time; long calls release the GIL."""

    def working_bytes(self, num_rows: int) -> int:
        """The memory that `layers` still takes for `num_rows` besides x."""

    def embed(self, patches: Rows, places: Int64s, shares: Floats | None) -> Rows:
        """patches (P, 3 * num_frames * patch_size ** 2) times the patches' matrix, behind the `class_row` if there
        is one, plus the positions of `places` (P,) where there is a table of them, or with `shares` (P, N) the sum of
        those of `places` (P, N), times these. Each of the three is normalised where there are `entry_norms`.
        """

    def layers(self, first: int, end: int, x: Rows, starts: Int64s, turns: Floats | None) -> Rows:
        """x (P, hidden_size) through the layers [first, end). A patch sees those of its window, whose rows are
        [starts[i], starts[i + 1]), and turns by its row of `turns` (P, head_dim): cosines, then sines. x may be
        changed, and is not used again.
        """

    def connect_deep(self, number: int, x: Rows, order: Int64s) -> Rows:
        """Likewise, by the `DeepConnector` of this number."""

    def connect(self, x: Rows, order: Int64s) -> Rows:
        """The final norm of x (P, hidden_size), then the rows of each token, which `order` (tokens, rows of each)
        numbers, side by side or averaged and normalised (`VisionWeights`), through the connector: (tokens, the
        decoder's hidden_size).
        """


class VisionFactory(Protocol):
    """A backend that takes images, which `DecoderSpec.takes_images` says."""

    def vision(self, spec: EncoderSpec, weights: VisionWeights) -> VisionExecutor: ...


class _Grid(NamedTuple):
    """The order in which a tile's patches are computed: window by window."""

    places: Int64s  # (P,): the patches' numbers, which count row by row of the tile
    # Below, P rows have that of a class first, where the tower has one.
    windows: Int64s  # (N + 1,): window i has the rows [windows[i], windows[i + 1])
    order: Int64s  # (tokens, square ** 2): those of each token, row by row
    turns: Floats | None  # (P, head_dim)
    taps: Int64s  # (P,) or (P, N): the rows of the table of positions
    shares: Floats | None  # (P, N)


class VisionTower(Struct, frozen=True, eq=False):
    """A tower and its weights. Not thread-safe: the caller encodes one tile at a time."""

    config: VisionConfig
    dtype: DType  # of activations
    weights: VisionWeights
    executor: VisionExecutor

    def working_bytes(self, height: int = 0, width: int = 0) -> int:
        """The memory that encoding a tile of these pixels takes, the tile left out, by default the largest one that the
        tower takes: no less than it does. What earlier tiles have left to the executor is not counted again.
        """
        config, item = self.config, self.dtype.size_bytes
        num_patches = height // config.patch_size * (width // config.patch_size) or config.most_patches
        num_rows = num_patches + (config.names.class_row is not None)
        patches = num_rows * 3 * config.num_frames * config.patch_size**2 * item
        band = 3 * max(_BAND_PIXELS, (width or MAX_TILE_PIXELS) * config.patch_size)
        making = patches + _WIDE_BYTES * band
        # Then patches in another order or packed, too; the states of a row and of deep layers, what they are made of,
        # and what becomes of them.
        states = (6 + len(config.deep_layers)) * config.hidden_size + 2 * config.connector_width
        embedding = 2 * patches + num_rows * states * item + _WIDE_BYTES * BAND_ROWS * config.hidden_size
        places = 16 * config.hidden_size // config.num_heads + 256  # what a row turns by, and where it is
        return max(making, embedding) + num_rows * places + self.executor.working_bytes(num_rows)

    def encode(
        self, tiles: Tiles, levels: Levels, is_over: Callable[[], bool] = lambda: False
    ) -> Iterator[Rows]:
        """The rows of each tile in turn, (its tokens, the decoder's hidden_size) in the decoder's dtype; where some
        layers' states become rows, too, these are next to them. Ends between two layers once `is_over`.

        Blocks until the weights arrive, layer by layer, and raises the load's error if they never do.
        """
        size = self.config.patch_size
        grid = _grid(self.config, tiles.shape[2] // size, tiles.shape[3] // size)
        for tile in tiles:
            rows = self._encode_tile(tile, levels, grid, is_over)
            if rows is None:
                return
            yield rows

    def _encode_tile(
        self, tile: npt.NDArray[np.uint8], levels: Levels, grid: _Grid, is_over: Callable[[], bool]
    ) -> Rows | None:
        weights, executor, config = self.weights.encoder, self.executor, self.config
        weights.entry_gate(np.arange(config.hidden_size))
        x = executor.embed(self._patches(tile, levels)[grid.places], grid.taps, grid.shares)
        deep = []
        for index, layer in enumerate(weights.layers):
            if is_over():
                return None
            layer.gate()
            starts = grid.windows[[0, -1]] if index in config.full_layers else grid.windows
            x = executor.layers(index, index + 1, x, starts, grid.turns)
            if index in config.deep_layers:
                deep.append(x.copy())
        if weights.head_gate is not None:
            weights.head_gate()
        rows = executor.connect(x, grid.order)
        if deep:
            more = [executor.connect_deep(number, x, grid.order) for number, x in enumerate(deep)]
            rows = np.concatenate([rows, *more], axis=1)
        return rows

    def join(self, parts: Sequence[Rows], layout: TileLayout | None) -> Rows:
        """The rows of an image out of its tiles', which `encode` has made."""
        if layout is None:
            return np.concatenate(parts)
        assert self.weights.mark is not None
        mark = from_float32(to_float32(self.weights.mark.array, self.weights.mark.dtype), self.dtype)[None]
        if not layout.num_rows:
            return np.concatenate([*parts, mark])
        rows = [parts[0]]
        for row in _scaled(parts[1:], layout, self.dtype):
            rows += [row, mark]
        return np.concatenate(rows)

    def _patches(self, tile: npt.NDArray[np.uint8], levels: Levels) -> Rows:
        """(P, 3 * num_frames * patch_size ** 2), row by row of patches: what of the tile is left over on the right and
        at the bottom is no whole patch. A few rows at a time are wider than `dtype`.
        """
        size, num_frames = self.config.patch_size, self.config.num_frames
        rows, columns = (side // size for side in tile.shape[1:])
        if self.config.centres_pixels:
            levels = 2 * (levels - np.float32(0.5))
        order = (1, 3, 2, 4, 0) if self.config.channels_last else (1, 3, 0, 2, 4)
        patches = np.empty((rows, columns, 3, num_frames, size**2), self.dtype.numpy)
        step = max(1, _BAND_PIXELS // (columns * size**2))
        for first in range(0, rows, step):
            band = tile[:, first * size : min(first + step, rows) * size, : columns * size]
            pixels = np.stack([own[channel] for own, channel in zip(levels, band, strict=True)])
            split = pixels.reshape(3, -1, size, columns, size).transpose(order)
            own = from_float32(split.reshape(-1, 3 * size**2), self.dtype)
            patches[first : first + step] = own.reshape(-1, columns, 3, 1, size**2)
        return patches.reshape(rows * columns, -1)


def _scaled(tiles: Sequence[Rows], layout: TileLayout, dtype: DType) -> Iterator[Rows]:
    """The rows of a grid's tokens, (scaled_width, hidden_size) each, interpolated in fp32 as torch does."""
    side = math.isqrt(len(tiles[0]))
    top, left = (layout.num_rows * side - layout.height) // 2, (layout.num_columns * side - layout.width) // 2

    def whole_row(number: int) -> Rows:
        row, inner = divmod(top + number, side)
        own = tiles[row * layout.num_columns : (row + 1) * layout.num_columns]
        joined = np.concatenate([tile[inner * side : (inner + 1) * side] for tile in own])
        return joined[left : left + layout.width]

    if (layout.height, layout.width) == (layout.scaled_height, layout.scaled_width):
        yield from map(whole_row, range(layout.height))
        return
    columns, shares = _neighbours(layout.width, layout.scaled_width)

    def narrowed(number: int) -> Floats:
        row = to_float32(whole_row(number), dtype)
        return row[columns[:, 0]] * shares[:, :1] + row[columns[:, 1]] * shares[:, 1:]

    for (above, below), (share, other) in zip(*_neighbours(layout.height, layout.scaled_height), strict=True):
        yield from_float32(narrowed(above) * share + narrowed(below) * other, dtype)


def _neighbours(num: int, num_scaled: int) -> tuple[Int64s, Floats]:
    """(num_scaled, 2) each: the neighbours of the middles of as many equal parts of an axis of `num` rows, and the
    share of each. In fp32, as torch has them.
    """
    scale = np.float32(num) / np.float32(num_scaled)
    at = np.maximum((np.arange(num_scaled, dtype=np.float32) + np.float32(0.5)) * scale - np.float32(0.5), 0)
    low = np.minimum(np.floor(at), num - 1)
    taps = np.minimum(np.stack((low, low + 1), axis=1), num - 1)
    above = np.minimum(at - low, 1)
    return taps.astype(np.int64), np.stack((1 - above, above), axis=1).astype(np.float32)


def _grid(config: VisionConfig, num_rows: int, num_columns: int) -> _Grid:
    """The order of a tile with these rows and columns of patches."""
    own = squares(num_rows, num_columns, config.square)
    num_patches = num_rows * num_columns
    # transformers takes positions from fp32 fractions, which of sizes that no model has are off by one here and there.
    places, windows = np.arange(num_patches, dtype=np.int64), np.array([0, num_patches], np.int64)
    if config.window:
        row, column = np.divmod(np.arange(len(own)), num_columns // config.square)
        window = row // config.window * num_columns + column // config.window
        tokens = np.argsort(window, kind="stable")
        places = own[tokens].reshape(-1)
        ends = np.cumsum(np.unique(window, return_counts=True)[1]) * config.square**2
        windows = np.concatenate((windows[:1], ends.astype(np.int64)))
        own[tokens] = np.arange(num_patches).reshape(own.shape)
    if config.names.class_row is not None:
        rows = np.arange(num_patches + 1, dtype=np.int64)
        order = rows[:, None] if config.gives_class else own + 1
        return _Grid(places, np.array([0, len(rows)], np.int64), order, None, rows, None)
    rotary = Rotary.whole(config.rope_theta, config.hidden_size // config.num_heads // 2)
    row, column = np.divmod(places, num_columns)
    if rotary is None and config.axis_positions:
        return _Grid(places, windows, own, None, *_axis_taps(config, row, column))
    if rotary is None:
        return _Grid(places, windows, own, None, places, None)
    tables = rotary.tables(0, max(num_rows, num_columns))
    axes = (column, row) if config.axis_positions else (row, column)
    turns = np.concatenate([table[each] for table in tables for each in axes], axis=1)
    if config.axis_positions:
        return _Grid(places, windows, own, turns, *_axis_taps(config, row, column))
    if not config.positions_side:
        return _Grid(places, windows, own, turns, places, None)
    side = config.positions_side
    (upper, above), (left, before) = (_between(num, side) for num in (num_rows, num_columns))
    taps = (upper[row, :, None] * side + left[column, None, :]).reshape(num_patches, 4)
    shares = (above[row, :, None] * before[column, None, :]).reshape(num_patches, 4)
    return _Grid(places, windows, own, turns, taps, shares)


def _axis_taps(config: VisionConfig, row: Int64s, column: Int64s) -> tuple[Int64s, Floats]:
    """(P, 2) each: the rows of a patch's column and row in a table of both, and the share of each."""
    if config.axes_alternate:
        taps = np.stack((2 * column, 2 * row + 1), axis=1)
    else:
        taps = np.stack((column, config.axis_positions + row), axis=1)
    return taps, np.ones(taps.shape, np.float32)


def _between(num: int, side: int) -> tuple[Int64s, Floats]:
    """(num, 2) each: the neighbours of evenly spread places on an axis of `side` rows, from end to end, and the share
    of each. In fp32, as transformers has them.
    """
    at = np.arange(num, dtype=np.float32) * np.float32(side - 1) / np.float32(max(num - 1, 1))
    low = np.floor(at)
    taps = np.minimum(np.stack((low, low + 1), axis=1), side - 1)
    above = at - low
    return taps.astype(np.int64), np.stack((1 - above, above), axis=1)


def squares(num_rows: int, num_columns: int, size: int) -> Int64s:
    """(tokens, size ** 2): the numbers of each token's patches, a square of `size` by `size`, row by row."""
    shape = (num_rows // size, size, num_columns // size, size)
    numbers = np.arange(num_rows * num_columns).reshape(shape)
    return numbers.transpose(0, 2, 1, 3).reshape(-1, size**2).astype(np.int64)


def spec_of(config: VisionConfig, dtype: DType) -> EncoderSpec:
    """The tower's layers as those of an encoder."""
    head_dim = config.hidden_size // config.num_heads
    rotary = Rotary.whole(config.rope_theta, head_dim // 2)  # of rows, and of columns
    return tower_spec(
        config,
        dtype,
        vocab_size=config.patches_per_tile,
        max_positions=config.num_positions,
        norm=config.norm,
        attention_scale=config.attention_scale,
        gated=len(config.names.up) > 1,
        final_norm=config.names.final_norm is not None,
        has_biases=config.has_biases,
        rotary=None if rotary is None else Rotary(head_dim, rotary.frequencies * 2),
        head_activation=activation_of(config.connector_activation) or Activation.GELU,
        output_norms=config.names.output_norms is not None,
        head_norms=config.names.head_norms is not None,
        turned_parts=2 if config.axis_positions else 1,
        is_bounded=config.is_bounded,
    )


def tower_spec(
    config: VisionConfig | SpeechConfig,
    dtype: DType,
    *,
    vocab_size: int,
    max_positions: int,
    norm: Norm = Norm.LAYER,
    attention_scale: float | None = None,
    gated: bool = False,
    final_norm: bool = True,
    has_biases: bool = True,
    rotary: Rotary | None = None,
    head_activation: Activation = Activation.GELU,
    **more: Any,
) -> EncoderSpec:
    """An encoder of these sizes whose norms come first, and which pools nothing. `more` are fields of it."""
    head_dim = config.hidden_size // config.num_heads
    return EncoderSpec(
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        head_dim=head_dim,
        norm=norm,
        norm_eps=config.norm_eps,
        attention_scale=attention_scale or head_dim**-0.5,
        activation=activation_of(config.activation) or Activation.GELU_TANH,
        gated=gated,
        pre_norm=True,
        embedding_size=None,
        embedding_norm=False,
        final_norm=final_norm,
        norm_bias=norm is Norm.LAYER,
        qkv_bias=has_biases,
        output_bias=has_biases,
        mlp_bias=has_biases,
        max_positions=max_positions,
        position_offset=0,
        type_vocab_size=0,
        windows=(None,) * config.num_layers,
        rotary=rotary,
        local_rotary=None,
        position_bias=None,
        disentangled=None,
        pooling=Pooling.MEAN,
        dense=(),
        normalize=False,
        num_labels=0,
        head_activation=head_activation,
        head_bias=False,
        head_norm=False,
        **more,
    )
