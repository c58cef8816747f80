"""A model's processing of images: sizes, tiles, numbers, and the text that stands for an image in a prompt.

Of preprocessor_config.json and processor_config.json, as transformers' processors of Idefics 3 and SmolVLM have them:
an image is resized so that its longest side has `longest_side` pixels, and then so that whole square tiles cover it;
the image as one tile comes last. It knows no model and no tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ..errors import ModelError, RequestError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from PIL.Image import Image

_PROCESSORS = ("Idefics3Processor", "SmolVLMProcessor")
_MAX_SIDE = 4_096  # of a resized image
_LANCZOS = 1


class _Edge(msgspec.Struct, frozen=True):
    longest_edge: int


class ImageFile(msgspec.Struct, frozen=True):
    """The keys of preprocessor_config.json that count, with transformers' defaults."""

    do_resize: bool = True
    do_rescale: bool = True
    do_normalize: bool = True
    do_image_splitting: bool = True
    size: _Edge = _Edge(4 * 364)
    max_image_size: _Edge = _Edge(364)
    resample: int = _LANCZOS
    rescale_factor: float = 1 / 255
    image_mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    image_std: tuple[float, float, float] = (0.5, 0.5, 0.5)


class ImageTiles(NamedTuple):
    """An image as a model takes it."""

    tiles: npt.NDArray[np.uint8]  # (N, 3, tile_size, tile_size); the whole image is the last
    num_rows: int  # of the tiles before it; 0: there are none
    num_columns: int


class ImageProcessor(NamedTuple):
    """The processing of one model's images. A plain value, which processes send one another."""

    file: ImageFile
    tokens_per_tile: int
    image_token: str
    around: str  # of each tile's row of tokens
    whole: str  # before the tile of the whole image

    @classmethod
    def read(
        cls, preprocessor: Mapping[str, Any], processor: Mapping[str, Any], tokens: Mapping[str, str]
    ) -> ImageProcessor | None:
        """Of the content of the two files, and the tokenizer's special tokens by name. None: the model's processor
        takes no images, or is of another family. Raises `ModelError` for values that cannot be used.
        """
        if processor.get("processor_class", preprocessor.get("processor_class")) not in _PROCESSORS:
            return None
        name, settings = "preprocessor_config.json", preprocessor
        if isinstance(processor.get("image_processor"), Mapping):
            name, settings = "processor_config.json: image_processor", processor["image_processor"]
        try:
            file = msgspec.convert(
                {key: each for key, each in settings.items() if each is not None}, ImageFile
            )
            num_tokens = msgspec.convert(processor.get("image_seq_len", 169), int)
        except msgspec.ValidationError as error:
            raise ModelError(f"{name} cannot be used: {error}") from None
        sides = (file.size.longest_edge, file.max_image_size.longest_edge)
        if not all(1 <= side <= _MAX_SIDE for side in sides) or not 1 <= num_tokens <= 1 << 14:
            raise ModelError(
                f"{name} has sizes of {sides} pixels and {num_tokens} tokens for a tile, but sides must be from 1 to "
                f"{_MAX_SIDE}, and tokens from 1 to {1 << 14}"
            )
        if min(file.image_std) <= 0 or not 0 <= file.resample <= 5:
            raise ModelError(f"{name} has an image_std or a resample that is out of range")
        return cls(
            file,
            num_tokens,
            tokens.get("image_token", "<image>"),
            tokens.get("fake_image_token", "<fake_token_around_image>"),
            tokens.get("global_image_token", "<global-img>"),
        )

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

    def tiles(self, image: Image) -> ImageTiles:
        """Of an RGB image. Raises `RequestError` for one that is too narrow to be resized."""
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
        """The text in place of one image token: it has a token for each row of the image."""
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

    def _resized(self, image: Image, width: int, height: int) -> Image:
        if not 0 < width <= 2 * _MAX_SIDE or not 0 < height <= 2 * _MAX_SIDE:
            raise RequestError(
                f"an image of {image.width} x {image.height} pixels cannot be resized for this model",
                param="messages",
                hint="Send a part of it.",
            )
        from PIL.Image import Resampling

        return image.resize((width, height), Resampling(self.file.resample))


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
