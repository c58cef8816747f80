"""Untrusted images into arrays for vision models: `pip install 'teneral[images]'`.

An image's header is checked before a pixel is decoded: its bytes, format, pixels and frames are
bounded, so that a small file cannot become a large array. This module knows no models;
`Normalisation` has a model's parameters.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from ....loader.errors import UsageError
from ....runtime.errors import RequestError

if TYPE_CHECKING:
    import numpy as np
    from PIL.Image import Image

MAX_IMAGE_BYTES = 20 << 20
MAX_PIXELS = 50_000_000  # 150 MB as RGB
MAX_SIDE = 1 << 14  # of the result of resizing
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # Pillow's names

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


def decode_image(
    data: bytes,
    *,
    max_bytes: int = MAX_IMAGE_BYTES,
    max_pixels: int = MAX_PIXELS,
    formats: Sequence[str] = FORMATS,
) -> Image:
    """Decode the picture to RGB, with its EXIF orientation applied; the first frame of an
    animation.

    Transparency becomes white. Raises `RequestError` if it is too large, of another format, or
    damaged.
    """
    if len(data) > max_bytes:
        raise RequestError(f"the image has {len(data)} bytes, more than {max_bytes}", param="image")
    pillow = _pillow()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own bound on pixels warns first; ours is below
            image = pillow.Image.open(io.BytesIO(data), formats=list(formats))
    except pillow.UnidentifiedImageError:
        raise RequestError(
            "the image's format is not supported",
            param="image",
            hint=f"Send one of {', '.join(formats)}.",
        ) from None
    except Exception as error:
        raise _damaged(error) from error
    with image:
        width, height = image.size
        if not 0 < width * height <= max_pixels:
            raise RequestError(
                f"the image has {width} x {height} pixels, more than {max_pixels}", param="image"
            )
        try:
            image.load()
            return _as_rgb(pillow.ImageOps.exif_transpose(image), pillow)
        except Exception as error:  # decoders raise nearly any error for damaged files
            raise _damaged(error) from error


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
    pillow = _pillow()
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


def _as_rgb(image: Image, pillow: Any) -> Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layers = image.convert("RGBA")
        white = pillow.Image.new("RGBA", layers.size, (255, 255, 255, 255))
        image = pillow.Image.alpha_composite(white, layers)
    result: Image = image.convert("RGB")
    return result


def _damaged(error: Exception) -> RequestError:
    return RequestError(
        f"the image cannot be read: {type(error).__name__}: {str(error)[:200]}", param="image"
    )


def _pillow() -> Any:
    """Import Pillow, an extra, as most models take no images."""
    try:
        import PIL
        import PIL.Image
        import PIL.ImageOps
    except ImportError as error:
        raise UsageError(
            "images need Pillow, which is not installed", key="images", hint="pip install 'teneral[images]'"
        ) from error
    return PIL
