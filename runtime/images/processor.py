"""A model's processing of images: sizes, tiles, numbers, and the text that stands for an image in a prompt.

Of preprocessor_config.json and processor_config.json, as transformers' processors have them. Idefics 3 and SmolVLM
resize an image so that its longest side has `longest_side` pixels, and then so that whole square tiles cover it; the
image as one tile comes last. Gemma 3 makes one square tile of the image. Qwen2.5-VL, Qwen3-VL and Qwen3.5 keep its
size, as far as whole squares of patches and bounds of pixels allow it. Gemma 4 makes an image as large as its number
of tokens allows, at nearly its own ratio of sides. This module knows no model and no tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import ModelError, RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

_MAX_SIDE = 4_096  # of a resized image
_MAX_PATCHES = 1 << 14  # of an image of any size; larger ones are made smaller than a file may allow
_MAX_RATIO = 200  # of an image's sides
_BUDGETS = (70, 140, 280, 560, 1120)  # tokens of an image, of which Gemma 4's files have one
_LANCZOS = 1
_BILINEAR = 2
_BICUBIC = 3


class PixelFile(msgspec.Struct, frozen=True):
    """The keys of preprocessor_config.json that count, with transformers' defaults: those of all processors."""

    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    resample: int = _BILINEAR

    @property
    def sides(self) -> tuple[int, ...]:
        """Of resized images and tiles."""
        raise NotImplementedError


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


class _Rectangle(msgspec.Struct, frozen=True):
    height: int
    width: int


class SquareFile(PixelFile, frozen=True):
    """Those of Gemma 3."""

    size: _Rectangle = _Rectangle(224, 224)
    do_pan_and_scan: bool = False

    @property
    def sides(self) -> tuple[int, ...]:
        return self.size.height, self.size.width


class _Pixels(msgspec.Struct, frozen=True):
    """Of an image, at least and at most. Older files have other names for them, outside, which count."""

    shortest_edge: int | None = None
    longest_edge: int | None = None


class DynamicFile(PixelFile, frozen=True):
    """Those of Qwen2.5-VL, Qwen3-VL and Qwen3.5."""

    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    resample: int = _BICUBIC
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
    resample: int = _BICUBIC
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


class ImageTiles(NamedTuple):
    """An image as a model takes it."""

    tiles: npt.NDArray[np.uint8]  # (N, 3, height, width); the whole image is the last
    num_rows: int  # of the tiles before it; 0: there are none
    num_columns: int


class ImageProcessor(msgspec.Struct, frozen=True):
    """The processing of one model's images. A plain value, which processes send one another."""

    file: PixelFile
    tokens_per_tile: int
    placeholder: str  # of an image, in what the chat template writes
    image_token: str  # of each row of an image, in the prompt

    @classmethod
    def read(
        cls, preprocessor: Mapping[str, Any], processor: Mapping[str, Any], tokens: Mapping[str, str]
    ) -> ImageProcessor | None:
        """Of the content of the two files, and the tokenizer's special tokens by name. None: the model's processor
        takes no images, or is of another family. Raises `ModelError` for values that cannot be used.
        """
        own = _PROCESSORS.get(str(processor.get("processor_class", preprocessor.get("processor_class"))))
        if own is None:
            return None
        name, settings = "preprocessor_config.json", preprocessor
        if isinstance(processor.get("image_processor"), Mapping):
            name, settings = "processor_config.json: image_processor", processor["image_processor"]
        try:
            file = msgspec.convert(
                {key: each for key, each in settings.items() if each is not None}, own.file_type
            )
            num_tokens = msgspec.convert(processor.get(own.length_key, own.length), int)
        except msgspec.ValidationError as error:
            raise ModelError(f"{name} cannot be used: {error}") from None
        if not all(1 <= side <= _MAX_SIDE for side in file.sides) or not 1 <= num_tokens <= 1 << 14:
            raise ModelError(
                f"{name} has sizes of {file.sides} pixels and {num_tokens} tokens for a tile, but sides must be from "
                f"1 to {_MAX_SIDE}, and tokens from 1 to {1 << 14}"
            )
        if min(file.image_std) <= 0 or not 0 <= file.resample <= 5:
            raise ModelError(f"{name} has an image_std or a resample that is out of range")
        return own.make(file, num_tokens, tokens, name)

    def tiles(self, image: Image) -> ImageTiles:
        """Of an RGB image. Raises `RequestError` for one that is too narrow to be resized."""
        raise NotImplementedError

    def num_tokens(self, tiles: ImageTiles) -> int:
        """Rows of the image."""
        return len(tiles.tiles) * self.tokens_per_tile

    def text(self, tiles: ImageTiles) -> str:
        """The text in place of one placeholder: it has a token for each row of the image."""
        raise NotImplementedError

    @property
    def levels(self) -> npt.NDArray[np.float32]:
        """(3, 256): the number that a channel's pixel of each value becomes."""
        import numpy as np  # which the start of a process does not pay for

        values = np.arange(256, dtype=np.float64)
        if self.file.do_rescale:
            values *= self.file.rescale_factor
        levels = np.repeat(values.astype(np.float32)[None], 3, axis=0)
        if self.file.do_normalize:
            mean, std = (
                np.array(each, np.float32)[:, None] for each in (self.file.image_mean, self.file.image_std)
            )
            levels = (levels - mean) / std
        return levels

    def _resized(self, image: Image, width: int, height: int) -> Image:
        if not 0 < width <= 2 * _MAX_SIDE or not 0 < height <= 2 * _MAX_SIDE:
            raise RequestError(
                f"an image of {image.width} x {image.height} pixels cannot be resized for this model",
                param="messages",
                hint="Send a part of it.",
            )
        from PIL.Image import Resampling

        return image.resize((width, height), Resampling(self.file.resample))


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

    def tiles(self, image: Image) -> ImageTiles:
        import numpy as np  # as above

        size = self.file.max_image_size.longest_edge
        if self.file.do_resize:
            image = self._resized(image, *_within(*image.size, self.file.size.longest_edge))
        num_columns = num_rows = 0
        parts: list[Image] = []
        if self.file.do_image_splitting:
            image = self._resized(image, *_covered(*image.size, size))
            if image.width > size or image.height > size:
                num_columns, num_rows = image.width // size, image.height // size
                parts = [
                    image.crop((column * size, row * size, (column + 1) * size, (row + 1) * size))
                    for row in range(num_rows)
                    for column in range(num_columns)
                ]
        parts.append(self._resized(image, size, size))
        pixels = np.stack([np.asarray(part) for part in parts])  # (N, size, size, 3)
        return ImageTiles(np.ascontiguousarray(pixels.transpose(0, 3, 1, 2)), num_rows, num_columns)

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

    def tiles(self, image: Image) -> ImageTiles:
        import numpy as np  # as above

        pixels = np.asarray(self._resized(image, self.file.size.width, self.file.size.height))
        return ImageTiles(np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]), 0, 0)

    def text(self, tiles: ImageTiles) -> str:
        return f"\n\n{self.placeholder}{self.image_token * self.tokens_per_tile}{self.end}\n\n"


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

    def tiles(self, image: Image) -> ImageTiles:
        import numpy as np  # as above
        from PIL.Image import Resampling

        if max(image.size) > _MAX_RATIO * min(image.size):
            raise RequestError(
                f"an image of {image.width} x {image.height} pixels is more than {_MAX_RATIO} times as long as wide",
                param="messages",
                hint="Send a part of it.",
            )
        size = _between(*image.size, self.file.step, *self.file.pixels)
        pixels = np.asarray(image.resize(size, Resampling(self.file.resample)))
        return ImageTiles(np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]), 0, 0)

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

    def tiles(self, image: Image) -> ImageTiles:
        import numpy as np  # as above
        from PIL.Image import Resampling

        size = _filling(*image.size, self.file.step, self.file.max_soft_tokens)
        pixels = np.asarray(image.resize(size, Resampling(self.file.resample)))
        return ImageTiles(np.ascontiguousarray(pixels.transpose(2, 0, 1)[None]), 0, 0)

    def num_tokens(self, tiles: ImageTiles) -> int:
        return int(tiles.tiles.shape[2] * tiles.tiles.shape[3]) // self.file.step**2

    def text(self, tiles: ImageTiles) -> str:
        return f"{self.begin}{self.image_token * self.num_tokens(tiles)}{self.end}"


class _Kind(NamedTuple):
    """A family's processor: the keys of its files."""

    # Of the file, tokens of a tile, special tokens, and the file's name for errors. Raises `ModelError`.
    make: Callable[[Any, int, Mapping[str, str], str], ImageProcessor]
    file_type: type[Any]
    length_key: str  # empty: an image's size says it
    length: int  # tokens of a tile, without that key


_TILING = _Kind(TilingProcessor.make, TiledFile, "image_seq_len", 169)
_DYNAMIC = _Kind(DynamicProcessor.make, DynamicFile, "", 1)
_BUDGET = _Kind(BudgetProcessor.make, BudgetFile, "", 1)
_PROCESSORS = {
    "Idefics3Processor": _TILING,
    "SmolVLMProcessor": _TILING,
    "Gemma3Processor": _Kind(SquareProcessor.make, SquareFile, "image_seq_length", 256),
    "Gemma4Processor": _BUDGET,
    "Gemma4UnifiedProcessor": _BUDGET,
    "Qwen2_5_VLProcessor": _DYNAMIC,
    "Qwen3VLProcessor": _DYNAMIC,
}


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
