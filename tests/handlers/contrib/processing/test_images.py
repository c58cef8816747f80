"""Images: bounded before they are decoded, and the same arrays as transformers' own processors make."""

from __future__ import annotations

import io
import struct
import sys
import zlib

import numpy as np
import pytest
from PIL import Image
from tests.support.tiny_models import transformers

from teneral.handlers.contrib.processing import (
    Normalisation,
    center_crop,
    decode_image,
    resize,
    stack_images,
    to_array,
)
from teneral.loader.errors import UsageError
from teneral.runtime.errors import RequestError

CLIP = Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))


def picture(width: int = 60, height: int = 40, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(1).integers(0, 256, (height, width, 4), dtype=np.uint8)
    return Image.fromarray(noise, "RGBA" if mode == "RGBA" else None).convert(mode)


def encoded(image: Image.Image, kind: str = "PNG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


@pytest.mark.parametrize("size", [(60, 40), (40, 60), (301, 200), (33, 97)])
def test_the_result_is_that_of_clips_image_processor(size):
    image = picture(*size)
    expected = transformers.CLIPImageProcessorPil()(image, return_tensors="np")["pixel_values"]
    ours = center_crop(resize(decode_image(encoded(image)), shortest_side=224), (224, 224))
    np.testing.assert_allclose(stack_images([to_array(ours, CLIP)]), expected, atol=2e-6)


@pytest.mark.parametrize("size", [(60, 40), (301, 200)])
def test_the_result_is_that_of_vits_image_processor(size):
    image = picture(*size)
    expected = transformers.ViTImageProcessorPil()(image, return_tensors="np")["pixel_values"][0]
    ours = resize(decode_image(encoded(image)), size=(224, 224), resample="bilinear")
    np.testing.assert_allclose(to_array(ours, Normalisation()), expected, atol=2e-6)


def test_a_crop_larger_than_the_image_is_padded_in_the_middle():
    array = to_array(center_crop(picture(2, 4), (4, 4)), layout="HWC")
    assert array.shape == (4, 4, 3)
    assert not array[:, [0, 3]].any()
    assert array[:, 1:3].all()


def test_layouts_and_types():
    image = picture()
    chw, hwc = to_array(image), to_array(image, layout="HWC")
    assert (chw.shape, hwc.shape, chw.dtype) == ((3, 40, 60), (40, 60, 3), np.float32)
    assert chw.flags["C_CONTIGUOUS"]
    np.testing.assert_array_equal(chw, hwc.transpose(2, 0, 1))
    np.testing.assert_allclose(hwc, np.asarray(image) / 255, atol=1e-6)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_its_exif_says(orientation):
    # A corner of each its own grey; which one is at the top left after turning is EXIF's definition.
    image = Image.new("L", (32, 16))
    for (x, y), grey in {(0, 0): 10, (16, 0): 80, (0, 8): 150, (16, 8): 220}.items():
        image.paste(grey, (x, y, x + 16, y + 8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    turned = decode_image(encoded(image, "JPEG", exif=exif, quality=95))
    first = {1: 10, 2: 80, 3: 220, 4: 150, 5: 10, 6: 150, 7: 220, 8: 80}[orientation]
    assert abs(turned.getpixel((2, 2))[0] - first) < 12
    assert turned.size == ((32, 16) if orientation < 5 else (16, 32))


@pytest.mark.parametrize("mode", ["L", "P", "CMYK", "RGB"])
def test_other_colours_become_rgb(mode):
    image = picture().convert(mode)
    kind = "JPEG" if mode == "CMYK" else "PNG"
    assert decode_image(encoded(image, kind)).mode == "RGB"


def test_what_is_transparent_becomes_white():
    image = Image.new("RGBA", (2, 2), (255, 0, 0, 0))
    assert decode_image(encoded(image)).getpixel((0, 0)) == (255, 255, 255)


def test_of_an_animation_the_first_frame_is_taken():
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    animation = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert decode_image(animation).getpixel((1, 1)) == (255, 0, 0)


def png_that_claims(width: int, height: int) -> bytes:
    def piece(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + piece(b"IHDR", header) + piece(b"IDAT", b"") + piece(b"IEND", b"")


@pytest.mark.parametrize("side", [8_000, 100_000, 2**31 - 1])
def test_an_image_that_would_become_large_is_refused_by_its_header(side):
    with pytest.raises(RequestError) as caught:
        decode_image(png_that_claims(side, side))
    assert caught.value.param == "image"


def test_bounds_are_the_callers_to_set():
    data = encoded(picture(60, 40))
    with pytest.raises(RequestError, match="60 x 40 pixels"):
        decode_image(data, max_pixels=60 * 40 - 1)
    with pytest.raises(RequestError, match="bytes"):
        decode_image(data, max_bytes=len(data) - 1)
    with pytest.raises(RequestError, match="format"):
        decode_image(data, formats=["JPEG"])


@pytest.mark.parametrize("kind", ["TIFF", "PPM", "ICO"])
def test_formats_that_few_need_are_not_taken(kind):
    with pytest.raises(RequestError, match="format"):
        decode_image(encoded(picture(16, 16), kind))


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_a_damaged_image_is_an_invalid_request(kind):
    data = encoded(picture(300, 200), kind)
    for end in (0, 3, 20, len(data) // 2):
        with pytest.raises(RequestError):
            decode_image(data[:end])


def test_arrays_of_several_shapes_cannot_be_stacked():
    with pytest.raises(RequestError, match="Resize"):
        stack_images([to_array(picture(2, 2)), to_array(picture(2, 3))])
    with pytest.raises(RequestError):
        stack_images([])


def test_invalid_sizes_are_refused():
    image = picture(1, 3_000)
    for options in ({}, {"size": (1, 1), "shortest_side": 1}):
        with pytest.raises(UsageError):
            resize(image, **options)
    with pytest.raises(RequestError):
        resize(image, shortest_side=224)
    with pytest.raises(UsageError):
        center_crop(image, (0, 5))
    with pytest.raises(UsageError):
        Normalisation(std=(0, 1, 1))


def test_without_pillow_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(UsageError, match=r"teneral\[images\]"):
        decode_image(b"x")
