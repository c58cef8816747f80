"""The processing of models that make one tile of an image.

Gemma 3 makes a square of it, and LLaVA 1.5 takes the square in its middle. Qwen2.5-VL, Qwen3-VL and Qwen3.5 keep its
size, as far as whole squares of patches and bounds of pixels allow it. Gemma 4 makes an image as large as its number of
tokens allows, at nearly its own ratio of sides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

import msgspec

from ..errors import ModelError, RequestError
from .processor import (
    BICUBIC,
    CLIP_KEYS,
    CLIP_MEAN,
    CLIP_STD,
    ClipFile,
    ImageProcessor,
    ImageTiles,
    Kind,
    PixelFile,
    Rectangle,
    array_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

_MAX_PATCHES = 1 << 14  # of an image of any size; larger ones are made smaller than a file may allow
_CROPPING = ("CLIPImageProcessor", "LlavaImageProcessor")  # how names of LLaVA 1.5's image processors begin
_MAX_RATIO = 200  # of an image's sides
_BUDGETS = (70, 140, 280, 560, 1120)  # tokens of an image, of which Gemma 4's files have one


class SquareFile(PixelFile, frozen=True):
    """Those of Gemma 3."""

    size: Rectangle = Rectangle(224, 224)
    do_pan_and_scan: bool = False

    @property
    def sides(self) -> tuple[int, ...]:
        return self.size.height, self.size.width


class CroppedFile(ClipFile, frozen=True):
    """The settings of LLaVA 1.5's processors, of which its own may pad."""

    image_processor_type: str = "CLIPImageProcessor"
    do_pad: bool = False


class _Pixels(msgspec.Struct, frozen=True):
    """Of an image, at least and at most. Older files have other names for them, outside, which count."""

    shortest_edge: int | None = None
    longest_edge: int | None = None


class DynamicFile(PixelFile, frozen=True):
    """Those of Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD
    resample: int = BICUBIC
    size: _Pixels = _Pixels(56 * 56, 28 * 28 * 1280)
    min_pixels: int | None = None
    max_pixels: int | None = None
    patch_size: int = 14
    merge_size: int = 2

    @property
    def sides(self) -> tuple[int, ...]:
        return (self.step,)

    @property
    def step(self) -> int:
        """The side of a token, which an image's sides are multiples of."""
        return self.patch_size * self.merge_size

    @property
    def pixels(self) -> tuple[int, int]:
        """Of an image, at least and at most; 0: the file does not say it."""
        least, most = self.min_pixels or self.size.shortest_edge, self.max_pixels or self.size.longest_edge
        return least or 0, min(most or 0, _MAX_PATCHES * self.patch_size**2)


class BudgetFile(PixelFile, frozen=True):
    """Those of Gemma 4."""

    do_normalize: bool = False
    image_mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    image_std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    resample: int = BICUBIC
    patch_size: int = 16
    pooling_kernel_size: int = 3
    max_soft_tokens: int = 280

    @property
    def sides(self) -> tuple[int, ...]:
        return (self.step,)

    @property
    def step(self) -> int:
        """The side of a token, which an image's sides are multiples of."""
        return self.patch_size * self.pooling_kernel_size


class SquareProcessor(ImageProcessor, frozen=True):
    """That of Gemma 3, without its crops of images that are much wider than high (pan and scan)."""

    file: SquareFile
    end: str  # behind the tokens of an image, as the placeholder is before them

    @classmethod
    def make(cls, file: SquareFile, num_tokens: int, tokens: Mapping[str, str], name: str) -> SquareProcessor:
        if file.do_pan_and_scan:
            raise ModelError(
                f"{name}: do_pan_and_scan is true, which is not supported",
                hint="Set it to false: an image is one tile then.",
            )
        if not file.do_resize or file.size.height != file.size.width:
            raise ModelError(f"{name}: images must be resized (do_resize) to a square size, not {file.size}")
        return cls(
            file,
            num_tokens,
            tokens.get("boi_token", "<start_of_image>"),
            tokens.get("image_token", "<image_soft_token>"),
            tokens.get("eoi_token", "<end_of_image>"),
        )

    def tiles(self, image: Image, num_images: int = 1) -> ImageTiles:
        return ImageTiles(array_of([self.resized(image, self.file.size.width, self.file.size.height)]))

    def text(self, tiles: ImageTiles) -> str:
        return f"\n\n{self.placeholder}{self.image_token * self.tokens_per_tile}{self.end}\n\n"


class CroppedProcessor(ImageProcessor, frozen=True):
    """The processor of LLaVA 1.5: an image is one tile, its middle or all of it."""

    file: CroppedFile
    tile_size: int
    pads: bool  # an image becomes a square of the mean's colour first

    @classmethod
    def make(
        cls, file: CroppedFile, num_tokens: int, tokens: Mapping[str, str], name: str
    ) -> CroppedProcessor:
        kind = next((each for each in _CROPPING if file.image_processor_type.startswith(each)), None)
        if kind is None:
            raise ModelError(
                f"{name}: image_processor_type is {file.image_processor_type[:40]!r}, but must be one of {_CROPPING}"
            )
        pads = file.do_pad and kind == _CROPPING[1]
        if pads and not all(0 <= mean <= 1 for mean in file.image_mean):
            raise ModelError(f"{name}: image_mean must be numbers from 0 to 1")
        size, token = file.tile_size(name), tokens.get("image_token", "<image>")
        return cls(file, file.num_tokens(size), token, token, size, pads)

    def tiles(self, image: Image, num_images: int = 1) -> ImageTiles:
        size = self.tile_size
        if self.pads:
            return ImageTiles(array_of([self.squared(image, size)]))
        if self.file.size.shortest_edge is None:
            return ImageTiles(array_of([self.resized(image, size, size)]))
        longest = int(size * max(image.size) / min(image.size))
        width, height = (longest, size) if image.width > image.height else (size, longest)
        left, top = (width - size) // 2, (height - size) // 2
        whole = self.resized(image, width, height)
        return ImageTiles(array_of([whole.crop((left, top, left + size, top + size))]))

    def text(self, tiles: ImageTiles) -> str:
        return self.image_token * self.tokens_per_tile


class DynamicProcessor(ImageProcessor, frozen=True):
    """That of Qwen2.5-VL, Qwen3-VL and Qwen3.5: dynamic resolution (arXiv 2409.12191, section 2.1)."""

    file: DynamicFile

    @classmethod
    def make(
        cls, file: DynamicFile, num_tokens: int, tokens: Mapping[str, str], name: str
    ) -> DynamicProcessor:
        if not file.do_resize:
            raise ModelError(f"{name}: images must be resized (do_resize)")
        if min(file.patch_size, file.merge_size) < 1 or not 1 <= file.pixels[0] <= file.pixels[1]:
            raise ModelError(
                f"{name} has images of {file.pixels[0]} to {file.pixels[1]} pixels (min_pixels and max_pixels, or "
                f"size.shortest_edge and size.longest_edge), and patches of {file.patch_size} x {file.merge_size}"
            )
        token = tokens.get("image_token", "<|image_pad|>")
        return cls(file, num_tokens, token, token)

    def tiles(self, image: Image, num_images: int = 1) -> ImageTiles:
        from PIL.Image import Resampling  # imports Pillow, for servers that get images

        if max(image.size) > _MAX_RATIO * min(image.size):
            raise RequestError(
                f"an image of {image.width} x {image.height} pixels is more than {_MAX_RATIO} times as long as wide",
                param="messages",
                hint="Send a part of it.",
            )
        size = _between(*image.size, self.file.step, *self.file.pixels)
        return ImageTiles(array_of([image.resize(size, Resampling(self.file.resample))]))

    def num_tokens(self, tiles: ImageTiles) -> int:
        return int(tiles.tiles.shape[2] * tiles.tiles.shape[3]) // self.file.step**2

    def text(self, tiles: ImageTiles) -> str:
        return self.image_token * self.num_tokens(tiles)


class BudgetProcessor(ImageProcessor, frozen=True):
    """That of Gemma 4."""

    file: BudgetFile
    begin: str  # before the tokens of an image
    end: str

    @classmethod
    def make(cls, file: BudgetFile, num_tokens: int, tokens: Mapping[str, str], name: str) -> BudgetProcessor:
        if not file.do_resize or min(file.patch_size, file.pooling_kernel_size) < 1:
            raise ModelError(f"{name}: images must be resized (do_resize), to whole patches")
        if file.max_soft_tokens not in _BUDGETS:
            raise ModelError(
                f"{name}: max_soft_tokens is {file.max_soft_tokens}, but must be one of {_BUDGETS}"
            )
        missing = [each for each in ("image_token", "boi_token", "eoi_token") if each not in tokens]
        if missing:
            raise ModelError(f"tokenizer_config.json has no {missing[0]}, which prompts with images need")
        image = tokens["image_token"]
        return cls(file, num_tokens, image, image, tokens["boi_token"], tokens["eoi_token"])

    def tiles(self, image: Image, num_images: int = 1) -> ImageTiles:
        from PIL.Image import Resampling  # imports Pillow, for servers that get images

        size = _filling(*image.size, self.file.step, self.file.max_soft_tokens)
        return ImageTiles(array_of([image.resize(size, Resampling(self.file.resample))]))

    def num_tokens(self, tiles: ImageTiles) -> int:
        return int(tiles.tiles.shape[2] * tiles.tiles.shape[3]) // self.file.step**2

    def text(self, tiles: ImageTiles) -> str:
        return f"{self.begin}{self.image_token * self.num_tokens(tiles)}{self.end}"


SQUARE = Kind(SquareProcessor.make, SquareFile, "image_seq_length", 256)
CROPPED = Kind(CroppedProcessor.make, CroppedFile, "", 1, CLIP_KEYS)
DYNAMIC = Kind(DynamicProcessor.make, DynamicFile, "", 1)
BUDGET = Kind(BudgetProcessor.make, BudgetFile, "", 1)


def _between(width: int, height: int, step: int, least: int, most: int) -> tuple[int, int]:
    """The nearest size whose sides are multiples of `step`, of at least `least` and at most `most` pixels."""
    columns, rows = round(width / step), round(height / step)
    if rows * columns * step**2 > most:
        scale = math.sqrt(width * height / most)
        columns, rows = (max(1, math.floor(side / scale / step)) for side in (width, height))
    elif rows * columns * step**2 < least:
        scale = math.sqrt(least / (width * height))
        columns, rows = (math.ceil(side * scale / step) for side in (width, height))
    return columns * step, rows * step


def _filling(width: int, height: int, step: int, most: int) -> tuple[int, int]:
    """The largest size of about this ratio whose sides are multiples of `step`, of at most `most` squares of it."""
    factor = math.sqrt(most * step**2 / (width * height))
    columns, rows = (math.floor(factor * side / step) for side in (width, height))
    if not rows:
        columns, rows = min(width // height, most), 1
    elif not columns:
        columns, rows = 1, min(height // width, most)
    return columns * step, rows * step
