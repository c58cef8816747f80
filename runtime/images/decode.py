"""Untrusted files of images to pixels: `pip install 'teneral[images]'`.

An image's header is checked before a pixel is decoded: its bytes, format, pixels and frames are bounded, so that a
small file cannot become a large array.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...loader.errors import UsageError
from ..errors import RequestError

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_IMAGE_BYTES = 20 << 20
MAX_PIXELS = 50_000_000  # 150 MB as RGB
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")  # Pillow's names


def decode_image(
    data: bytes,
    *,
    max_bytes: int = MAX_IMAGE_BYTES,
    max_pixels: int = MAX_PIXELS,
    formats: Sequence[str] = FORMATS,
    param: str = "image",
) -> Image:
    """Decode the picture to RGB, with its EXIF orientation applied; the first frame of an
    animation.

    Transparency becomes white. Raises `RequestError`, naming `param`, if it is too large, of another
    format, or damaged; `UsageError` if Pillow is not installed.
    """
    if len(data) > max_bytes:
        raise RequestError(f"the image has {len(data)} bytes, more than {max_bytes}", param=param)
    pillow = pillow_modules()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's own bound on pixels warns first; ours is below
            image = pillow.Image.open(io.BytesIO(data), formats=list(formats))
    except pillow.UnidentifiedImageError:
        raise RequestError(
            "the image's format is not supported",
            param=param,
            hint=f"Send one of {', '.join(formats)}.",
        ) from None
    except Exception as error:
        raise _damaged(error, param) from error
    with image:
        width, height = image.size
        if not 0 < width * height <= max_pixels:
            raise RequestError(
                f"the image has {width} x {height} pixels, more than {max_pixels}", param=param
            )
        try:
            image.load()
            return _as_rgb(pillow.ImageOps.exif_transpose(image), pillow)
        except Exception as error:  # decoders raise nearly any error for damaged files
            raise _damaged(error, param) from error


def _as_rgb(image: Image, pillow: Any) -> Image:
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        layers = image.convert("RGBA")
        white = pillow.Image.new("RGBA", layers.size, (255, 255, 255, 255))
        image = pillow.Image.alpha_composite(white, layers)
    result: Image = image.convert("RGB")
    return result


def _damaged(error: Exception, param: str) -> RequestError:
    return RequestError(f"the image cannot be read: {type(error).__name__}: {str(error)[:200]}", param=param)


def pillow_modules() -> Any:
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
