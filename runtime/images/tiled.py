"""The processing of models that cut an image into square tiles.

Idefics 3 and SmolVLM resize an image so that its longest side has `longest_side` pixels, and then so that whole tiles
cover it; the image as one tile comes last. LLaVA-OneVision (arXiv 2408.03326, section 3.2) resizes it into the one of
its sizes that wastes least, between black bars, and the image as one tile comes first; of several images each is one
tile. LLaVA-NeXT does the same with each image, and keeps all of a grid's tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from itertools import product
from typing import TYPE_CHECKING

import msgspec

from ..errors import ModelError
from .processor import (
    BICUBIC,
    CLIP_KEYS,
    CLIP_MEAN,
    CLIP_STD,
    MAX_SIDE,
    ClipFile,
    ImageProcessor,
    ImageTiles,
    Kind,
    PixelFile,
    Rectangle,
    TileLayout,
    array_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_LANCZOS = 1
_MAX_SIZES = 256  # among which an image's is chosen
MAX_GRID_TOKENS = 1 << 16  # of a grid of tiles, padding included; 36 * 729 as published
_ASPECT_RATIO = re.compile(r"anyres_max_([1-9][0-9]?)", re.ASCII)


class _Edge(msgspec.Struct, frozen=True):
    longest_edge: int


class TiledFile(PixelFile, frozen=True):
    """Those of Idefics 3."""

    resample: int = _LANCZOS
    do_image_splitting: bool = True
    size: _Edge = _Edge(4 * 364)
    max_image_size: _Edge = _Edge(364)

    @property
    def sides(self) -> tuple[int, ...]:
        return self.size.longest_edge, self.max_image_size.longest_edge


class AnyresFile(PixelFile, frozen=True):
    """The settings of LLaVA-OneVision's processor; some are processor_config.json's."""

    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD
    resample: int = BICUBIC
    size: Rectangle = Rectangle(384, 384)
    do_center_crop: bool = False
    image_grid_pinpoints: tuple[tuple[int, int], ...] = tuple(
        product(range(384, 2305, 384), range(384, 2305, 384))
    )
    vision_aspect_ratio: str = "anyres_max_9"
    vision_feature_select_strategy: str = "full"

    @property
    def sides(self) -> tuple[int, ...]:
        return self.size.height, self.size.width


class UnscaledFile(ClipFile, frozen=True):
    """The settings of LLaVA-NeXT's processor; some are processor_config.json's."""

    image_grid_pinpoints: tuple[tuple[int, int], ...] = (
        (336, 672),
        (672, 336),
        (672, 672),
        (1008, 336),
        (336, 1008),
    )


class TilingProcessor(ImageProcessor, frozen=True):
    """That of Idefics 3 and SmolVLM."""

    file: TiledFile
    around: str  # of each tile's row of tokens
    whole: str  # before the tile of the whole image

    @classmethod
    def make(cls, file: TiledFile, num_tokens: int, tokens: Mapping[str, str], name: str) -> TilingProcessor:
        token = tokens.get("image_token", "<image>")
        return cls(
            file,
            num_tokens,
            token,
            token,
            tokens.get("fake_image_token", "<fake_token_around_image>"),
            tokens.get("global_image_token", "<global-img>"),
        )

    def tiles(self, image: Image, num_images: int = 1) -> ImageTiles:
        size = self.file.max_image_size.longest_edge
        if self.file.do_resize:
            image = self.resized(image, *_within(*image.size, self.file.size.longest_edge))
        num_columns = num_rows = 0
        parts: list[Image] = []
        if self.file.do_image_splitting:
            image = self.resized(image, *_covered(*image.size, size))
            if image.width > size or image.height > size:
                num_columns, num_rows = image.width // size, image.height // size
                parts = [
                    image.crop((column * size, row * size, (column + 1) * size, (row + 1) * size))
                    for row in range(num_rows)
                    for column in range(num_columns)
                ]
        parts.append(self.resized(image, size, size))
        return ImageTiles(array_of(parts), num_rows, num_columns)

    def text(self, tiles: ImageTiles) -> str:
        row = self.image_token * self.tokens_per_tile
        text = "".join(
            "".join(
                f"{self.around}<row_{number + 1}_col_{column + 1}>{row}"
                for column in range(tiles.num_columns)
            )
            + "\n"
            for number in range(tiles.num_rows)
        )
        return f"{text}{chr(10) if text else ''}{self.around}{self.whole}{row}{self.around}"


class AnyresProcessor(ImageProcessor, frozen=True):
    """The processor of LLaVA-OneVision and LLaVA-NeXT: an image is its whole, and tiles of the grid that fits best."""

    file: AnyresFile | UnscaledFile
    tile_size: int
    # A grid of more tokens than these have is made smaller, and of several images none has one. None: neither.
    most_tiles: int | None

    @classmethod
    def make(cls, file: AnyresFile, num_tokens: int, tokens: Mapping[str, str], name: str) -> AnyresProcessor:
        size, sizes = file.size.height, file.image_grid_pinpoints
        if not file.do_resize or file.do_center_crop or file.size.width != size:
            raise ModelError(
                f"{name}: images must be resized (do_resize) to a square size, and not be cropped "
                f"(do_center_crop), not to {file.size.height} x {file.size.width}"
            )
        _check_grids(sizes, size, num_tokens, name, "num_image_tokens")
        if file.vision_feature_select_strategy != "full":
            raise ModelError(
                "processor_config.json: vision_feature_select_strategy is "
                f"{file.vision_feature_select_strategy[:40]!r}, but must be 'full'"
            )
        if not all(0 <= mean <= 1 for mean in file.image_mean):
            raise ModelError(f"{name}: image_mean must be numbers from 0 to 1")
        found = _ASPECT_RATIO.fullmatch(file.vision_aspect_ratio)
        if found is None:
            raise ModelError(
                f"processor_config.json: vision_aspect_ratio is {file.vision_aspect_ratio[:40]!r}, but must be "
                "'anyres_max_' and a number from 1 to 99"
            )
        token = tokens.get("image_token", "<image>")
        return cls(file, num_tokens, token, token, size, int(found[1]))

    @classmethod
    def make_unscaled(
        cls, file: UnscaledFile, num_tokens: int, tokens: Mapping[str, str], name: str
    ) -> AnyresProcessor:
        size = file.tile_size(name)
        num_tokens = file.num_tokens(size)
        _check_grids(file.image_grid_pinpoints, size, num_tokens, name, "the number of a tile's tokens")
        token = tokens.get("image_token", "<image>")
        return cls(file, num_tokens, token, token, size, None)

    def tiles(self, image: Image, num_images: int = 1) -> ImageTiles:
        size = self.tile_size
        if num_images > 1 and self.most_tiles is not None:
            return ImageTiles(array_of([self.squared(image, size)]), layout=TileLayout())
        height, width = _best_size(image.width, image.height, self.file.image_grid_pinpoints)
        padded = self._padded(image, width, height)
        parts = [
            padded.crop((left, top, left + size, top + size))
            for top in range(0, height, size)
            for left in range(0, width, size)
        ]
        layout = self._layout(image.width, image.height, height // size, width // size)
        return ImageTiles(array_of([self.resized(image, size, size), *parts]), layout=layout)

    def text(self, tiles: ImageTiles) -> str:
        return self.image_token * self.num_tokens(tiles)

    def _padded(self, image: Image, width: int, height: int) -> Image:
        """The image within this size, between black bars."""
        import PIL.Image  # imports Pillow, for servers that get images

        by_width, by_height = width / image.width, height / image.height
        if by_width < by_height:
            inner = width, min(math.ceil(image.height * by_width), height)
        else:
            inner = min(math.ceil(image.width * by_height), width), height
        padded = PIL.Image.new("RGB", (width, height))
        padded.paste(self.resized(image, *inner), ((width - inner[0]) // 2, (height - inner[1]) // 2))
        return padded

    def _layout(self, width: int, height: int, num_rows: int, num_columns: int) -> TileLayout:
        """Of an image of these pixels in a grid of this number of tiles: the tokens of its bars are left out."""
        side = math.isqrt(self.tokens_per_tile)
        rows, columns = num_rows * side, num_columns * side
        # As transformers computes them.
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        if self.most_tiles is None:
            return TileLayout(num_rows, num_columns, rows, columns, rows, columns)
        ratio = math.sqrt(rows * columns / (self.most_tiles * self.tokens_per_tile))
        scaled = (int(rows // ratio), int(columns // ratio)) if ratio > 1.1 else (rows, columns)
        return TileLayout(num_rows, num_columns, rows, columns, *scaled)


TILING = Kind(TilingProcessor.make, TiledFile, "image_seq_len", 169)
ANYRES = Kind(
    AnyresProcessor.make,
    AnyresFile,
    "num_image_tokens",
    0,
    ("vision_aspect_ratio", "vision_feature_select_strategy"),
)
ANYRES_UNSCALED = Kind(AnyresProcessor.make_unscaled, UnscaledFile, "", 1, CLIP_KEYS)


def _check_grids(
    sizes: tuple[tuple[int, int], ...], tile_size: int, num_tokens: int, name: str, key: str
) -> None:
    """Raise `ModelError` for sizes of grids that cannot be used. `key` says the number of tokens of a tile."""
    if not 1 <= len(sizes) <= _MAX_SIZES or any(
        side % tile_size or not 0 < side <= MAX_SIDE for each in sizes for side in each
    ):
        raise ModelError(
            f"{name}: image_grid_pinpoints must be 1 to {_MAX_SIZES} sizes, whose sides are multiples of "
            f"{tile_size} pixels up to {MAX_SIDE}"
        )
    most = max(height * width for height, width in sizes) // tile_size**2
    if math.isqrt(num_tokens) ** 2 != num_tokens or most * num_tokens > MAX_GRID_TOKENS:
        raise ModelError(
            f"processor_config.json: {key} is {num_tokens}, but must be the square of a number, and "
            f"{most} times it at most {MAX_GRID_TOKENS}"
        )


def _within(width: int, height: int, longest: int) -> tuple[int, int]:
    """The size whose longest side is `longest`, the other one even, and none above the bound of sides."""
    ratio = width / height
    if width >= height:
        width, height = longest, int(longest / ratio)
        height += height % 2
    else:
        width, height = int(longest * ratio), longest
        width += width % 2
    return max(width, 1), max(height, 1)


def _covered(width: int, height: int, size: int) -> tuple[int, int]:
    """The size whose sides are multiples of `size`, that are not smaller."""
    ratio = width / height
    if width >= height:
        width = math.ceil(width / size) * size
        return width, math.ceil(int(width / ratio) / size) * size
    height = math.ceil(height / size) * size
    return math.ceil(int(height * ratio) / size) * size, height


def _best_size(width: int, height: int, sizes: tuple[tuple[int, int], ...]) -> tuple[int, int]:
    """Rows and columns of the size in which an image has most pixels, no more than its own, and of these the one that
    wastes least.
    """

    def rank(size: tuple[int, int]) -> tuple[int, int]:
        scale = min(size[1] / width, size[0] / height)
        num_pixels = min(int(width * scale) * int(height * scale), width * height)
        return num_pixels, num_pixels - size[0] * size[1]

    return max(sizes, key=rank)
