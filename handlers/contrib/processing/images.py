"""Images into arrays for vision models: `pip install 'teneral[images]'`.

`decode_image` bounds untrusted files. This module knows no models; `Normalisation` has a model's
parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ....loader.errors import UsageError
from ....runtime.errors import RequestError
from ....runtime.images.decode import decode_image, pillow_modules

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

__all__ = ["Normalisation", "center_crop", "decode_image", "resize", "stack_images", "to_array"]

MAX_SIDE = 1 << 14  # of the result of resizing

Resample = Literal["nearest", "bilinear", "bicubic", "lanczos"]


@dataclass(frozen=True, slots=True)
class Normalisation:
    """(pixel / 255 - mean) / std, channel by channel, in the order R, G, B."""

    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        if len(self.mean) != 3 or len(self.std) != 3 or min(self.std) <= 0:
            raise UsageError(
                "mean and std need three numbers each, those of std above 0", key="normalisation"
            )


def resize(
    image: Image,
    *,
    size: tuple[int, int] | None = None,
    shortest_side: int | None = None,
    resample: Resample = "bicubic",
) -> Image:
    """Resize to exactly `size` (height, width), or so that the shortest side has that many pixels,
    keeping the aspect ratio.
    """
    if (size is None) == (shortest_side is None):
        raise UsageError("give either size or shortest_side", key="size")
    if size is None:
        assert shortest_side is not None
        short, long = sorted(image.size)
        other = int(shortest_side * long / short)  # rounded down, as image processors do
        size = (other, shortest_side) if image.width <= image.height else (shortest_side, other)
    height, width = size
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise RequestError(f"an image of {width} x {height} pixels cannot be made", param="image")
    pillow = pillow_modules()
    return image.resize((width, height), resample=pillow.Image.Resampling[resample.upper()])


def center_crop(image: Image, size: tuple[int, int]) -> Image:
    """`size` (height, width) from the middle; smaller images are padded with black."""
    height, width = size
    if not (0 < height <= MAX_SIDE and 0 < width <= MAX_SIDE):
        raise UsageError(f"an image of {width} x {height} pixels cannot be cropped", key="size")
    left, top = (image.width - width) // 2, (image.height - height) // 2
    return image.crop((left, top, left + width, top + height))


def to_array(
    image: Image, normalisation: Normalisation | None = None, *, layout: Literal["CHW", "HWC"] = "CHW"
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(3, height, width) or (height, width, 3) float32: normalised, or from 0 to 1 without a normalisation."""
    import numpy as np  # 68 ms that other handlers need not pay

    pixels = np.asarray(image.convert("RGB"), dtype=np.float32)  # (H, W, 3)
    pixels = pixels * np.float32(1 / 255)
    if normalisation is not None:
        np.subtract(pixels, np.array(normalisation.mean, dtype=np.float32), out=pixels)
        np.divide(pixels, np.array(normalisation.std, dtype=np.float32), out=pixels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1)) if layout == "CHW" else pixels


def stack_images(
    arrays: Sequence[np.ndarray[Any, np.dtype[np.float32]]],
) -> np.ndarray[Any, np.dtype[np.float32]]:
    """(N, …) of arrays of one shape. Raises `RequestError` for none, or for shapes that differ."""
    import numpy as np  # as above

    shapes = {array.shape for array in arrays}
    if len(shapes) != 1:
        raise RequestError(
            f"images of {len(shapes)} shapes cannot be stacked",
            param="image",
            hint="Resize them to one size.",
        )
    return np.stack(arrays)
