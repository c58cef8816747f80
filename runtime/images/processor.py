"""A model's processing of images: sizes, tiles, numbers, and the text that stands for an image in a prompt.

Of preprocessor_config.json and processor_config.json, as transformers' processors have them. `tiled.py` has those that
cut an image into square tiles, and `whole.py` those that do not. This module knows no model and no tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import ModelError, RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

MAX_SIDE = 4_096  # of a resized image
MAX_TOKENS = 1 << 14  # of a tile
_MAX_SQUARE = 1 << 14  # pixels of the side of a square that is made smaller
_BAND = 256  # rows of such a square at once
BILINEAR = 2  # Pillow's numbers
BICUBIC = 3
CLIP_MEAN = (0.48145466, 0.4578275, 0.40821073)
CLIP_STD = (0.26862954, 0.26130258, 0.27577711)
# The class of a processor in its files → the module that has its kind, and the kind's name there
_PROCESSORS = {
    "Idefics3Processor": ("tiled", "TILING"),
    "SmolVLMProcessor": ("tiled", "TILING"),
    "LlavaProcessor": ("whole", "CROPPED"),
    "LlavaNextProcessor": ("tiled", "ANYRES_UNSCALED"),
    "LlavaOnevisionProcessor": ("tiled", "ANYRES"),
    "Gemma3Processor": ("whole", "SQUARE"),
    "Gemma4Processor": ("whole", "BUDGET"),
    "Gemma4UnifiedProcessor": ("whole", "BUDGET"),
    "Qwen2_5_VLProcessor": ("whole", "DYNAMIC"),
    "Qwen3VLProcessor": ("whole", "DYNAMIC"),
}


class PixelFile(msgspec.Struct, frozen=True):
    """The keys of preprocessor_config.json that count, with transformers' defaults: those of all processors."""

    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    resample: int = BILINEAR

    @property
    def sides(self) -> tuple[int, ...]:
        """Of resized images and tiles."""
        raise NotImplementedError


class Rectangle(msgspec.Struct, frozen=True):
    height: int
    width: int


class Sides(msgspec.Struct, frozen=True):
    """The sides of a resized image in pixels: the shorter one, or both."""

    shortest_edge: int | None = None
    height: int | None = None
    width: int | None = None


class ClipFile(PixelFile, frozen=True):
    """The settings of CLIP's processor; the last three are processor_config.json's."""

    image_mean: tuple[float, float, float] = CLIP_MEAN
    image_std: tuple[float, float, float] = CLIP_STD
    resample: int = BICUBIC
    size: Sides = Sides(shortest_edge=224)
    do_center_crop: bool = True
    crop_size: Rectangle = Rectangle(224, 224)
    patch_size: int = 0
    num_additional_image_tokens: int = 0
    vision_feature_select_strategy: str = ""

    @property
    def sides(self) -> tuple[int, ...]:
        stated = (self.size.shortest_edge, self.size.height, self.size.width)
        return (*(side for side in stated if side is not None), self.crop_size.height, self.crop_size.width)

    def tile_size(self, name: str) -> int:
        """The side of the squares that it makes. Raises `ModelError` for what is not one."""
        size, crop = self.size, self.crop_size.height
        square = size.height if size.height == size.width else None
        side = size.shortest_edge or square or 0
        if self.do_center_crop and not (side == crop == self.crop_size.width):
            side = 0
        if not self.do_resize or not side or (not self.do_center_crop and square is None):
            raise ModelError(
                f"{name}: images must be resized (do_resize) to a size whose shortest side is that of a square "
                f"crop_size (do_center_crop), or to a square, not to {self.size} and {self.crop_size}"
            )
        return side

    def num_tokens(self, size: int) -> int:
        """The tokens of a tile of this size. Raises `ModelError`."""
        if not 0 < self.patch_size <= size or not 0 <= self.num_additional_image_tokens <= 1:
            raise ModelError(
                f"processor_config.json: patch_size is {self.patch_size}, but must be from 1 to {size}, and "
                f"num_additional_image_tokens is {self.num_additional_image_tokens}, but must be 0 or 1"
            )
        num = (size // self.patch_size) ** 2 + self.num_additional_image_tokens
        num -= self.vision_feature_select_strategy == "default"
        if not 1 <= num <= MAX_TOKENS:
            raise ModelError(f"processor_config.json: a patch_size of {self.patch_size} makes {num} tokens")
        return num


CLIP_KEYS = ("patch_size", "num_additional_image_tokens", "vision_feature_select_strategy")


class TileLayout(msgspec.Struct, frozen=True):
    """The rows of an image as one tile and, behind it, as a grid of tiles: those of the first tile, then those of the
    grid's tokens, row by row, each of these ended by a mark of the model's. Without a grid one mark is behind the tile.
    """

    # Tiles of the grid; 0: there is none.
    num_rows: int = 0
    num_columns: int = 0
    # Its tokens without as many on either side of them.
    height: int = 0
    width: int = 0
    # What these are scaled to.
    scaled_height: int = 0
    scaled_width: int = 0

    def num_tokens(self, tokens_per_tile: int) -> int:
        return tokens_per_tile + (self.scaled_height * (self.scaled_width + 1) if self.num_rows else 1)

    def fits(self, num_tiles: int, side: int) -> bool:
        """True of this number of tiles, each of `side` by `side` tokens."""
        left_over = self.num_rows * side - self.height, self.num_columns * side - self.width
        return (
            num_tiles == 1 + self.num_rows * self.num_columns
            and all(each >= 0 and each % 2 == 0 for each in left_over)
            and 0 <= self.scaled_height <= self.height
            and 0 <= self.scaled_width <= self.width
        )


class ImageTiles(NamedTuple):
    """An image as a model takes it."""

    tiles: npt.NDArray[np.uint8]  # (N, 3, height, width)
    # Of the tiles before that of the whole image, which is the last; 0: there are none.
    num_rows: int = 0
    num_columns: int = 0
    layout: TileLayout | None = None  # then the whole image is the first one


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
        found = _PROCESSORS.get(str(processor.get("processor_class", preprocessor.get("processor_class"))))
        if found is None:
            return None
        own: Kind = getattr(import_module(f".{found[0]}", __package__), found[1])
        name, settings = "preprocessor_config.json", preprocessor
        if isinstance(processor.get("image_processor"), Mapping):
            name, settings = "processor_config.json: image_processor", processor["image_processor"]
        settings = {**settings, **{key: processor.get(key) for key in own.processor_keys}}
        try:
            file = msgspec.convert(
                {key: each for key, each in settings.items() if each is not None}, own.file_type
            )
            stated = processor.get(own.length_key)
            num_tokens = msgspec.convert(own.length if stated is None else stated, int)
        except msgspec.ValidationError as error:
            raise ModelError(f"{name} cannot be used: {error}") from None
        if not all(1 <= side <= MAX_SIDE for side in file.sides) or not 1 <= num_tokens <= MAX_TOKENS:
            raise ModelError(
                f"{name} has sizes of {file.sides} pixels and {num_tokens} tokens for a tile, but sides must be from "
                f"1 to {MAX_SIDE}, and tokens from 1 to {MAX_TOKENS}"
            )
        if min(file.image_std) <= 0 or not 0 <= file.resample <= 5:
            raise ModelError(f"{name} has an image_std or a resample that is out of range")
        return own.make(file, num_tokens, tokens, name)

    def tiles(self, image: Image, num_images: int = 1) -> ImageTiles:
        """Of an RGB image, one of a prompt's `num_images`. Raises `RequestError` if it is too narrow to be resized."""
        raise NotImplementedError

    def num_tokens(self, tiles: ImageTiles) -> int:
        """Rows of the image."""
        if tiles.layout is not None:
            return tiles.layout.num_tokens(self.tokens_per_tile)
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

    def resized(self, image: Image, width: int, height: int) -> Image:
        if not 0 < width <= 2 * MAX_SIDE or not 0 < height <= 2 * MAX_SIDE:
            raise not_resized(image)
        from PIL.Image import Resampling  # imports Pillow, for servers that get images

        return image.resize((width, height), Resampling(self.file.resample))

    def squared(self, image: Image, size: int) -> Image:
        """The image in the middle of a square of the mean's colour, resized. The square is not there at once: Pillow
        resizes rows, each by itself, and then columns.
        """
        import PIL.Image  # imports Pillow, for servers that get images

        side = max(image.size)
        if side > _MAX_SQUARE:
            raise not_resized(image)
        colour = tuple(int(255 * mean) for mean in self.file.image_mean)
        left, top = (side - image.width) // 2, (side - image.height) // 2
        narrow = PIL.Image.new("RGB", (size, side), colour)
        for first in range(0, image.height, _BAND):
            part = image.crop((0, first, image.width, min(first + _BAND, image.height)))
            band = PIL.Image.new("RGB", (side, part.height), colour)
            band.paste(part, (left, 0))
            narrow.paste(self.resized(band, size, part.height), (0, top + first))
        return self.resized(narrow, size, size)


def not_resized(image: Image) -> RequestError:
    return RequestError(
        f"an image of {image.width} x {image.height} pixels cannot be resized for this model",
        param="messages",
        hint="Send a part of it.",
    )


def array_of(parts: Sequence[Image]) -> npt.NDArray[np.uint8]:
    """(N, 3, height, width) of images of the same size."""
    import numpy as np  # which the start of a process does not pay for

    pixels = np.stack([np.asarray(part) for part in parts])
    return np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))


class Kind(NamedTuple):
    """A family's processor: the keys of its files."""

    # Of the file, tokens of a tile, special tokens, and the file's name for errors. Raises `ModelError`.
    make: Callable[[Any, int, Mapping[str, str], str], ImageProcessor]
    file_type: type[Any]
    length_key: str  # empty: an image's size says it
    length: int  # tokens of a tile, without that key
    processor_keys: tuple[str, ...] = ()  # of processor_config.json, that are fields of the file, too
