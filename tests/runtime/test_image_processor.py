"""The processing of images gives the pixels and the prompts of transformers' processors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from teneral.runtime.errors import ModelError, RequestError
from teneral.runtime.images.processor import ImageProcessor

SETTINGS: dict[str, Any] = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
NAMES = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}


def ours(**settings: Any) -> ImageProcessor:
    made = ImageProcessor.read({**SETTINGS, **settings}, NAMES, {})
    assert made is not None
    return made


def picture(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize(
    "size",
    [
        (128, 128),
        (32, 32),
        (31, 33),
        (7, 500),
        (500, 7),
        (200, 100),
        (101, 203),
        (1, 1),
        (64, 63),
        (129, 128),
    ],
)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"do_image_splitting": False},
        {"do_resize": False, "image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6]},
        {"resample": 3, "do_normalize": False},
        {"do_rescale": False, "size": {"longest_edge": 30}},
    ],
)
def test_tiles_and_texts_are_those_of_transformers(size: tuple[int, int], settings: dict[str, Any]) -> None:
    image, processor = picture(*size), ours(**settings)
    expected = Idefics3ImageProcessorPil(**{**SETTINGS, **settings})(
        [[image]], return_tensors="np", return_row_col_info=True
    )
    made = processor.tiles(image)
    levels = processor.levels
    values = np.stack([levels[channel][made.tiles[:, channel]] for channel in range(3)], axis=1)
    assert np.array_equal(values, expected["pixel_values"][0])
    rows, columns = expected["rows"][0][0], expected["cols"][0][0]
    assert (made.num_rows, made.num_columns) == (rows, columns)
    assert processor.text(made) == get_image_prompt_string(
        rows, columns, 4, "<fake_token_around_image>", "<image>", "<global-img>"
    )


def test_settings_within_processor_config_json_come_first() -> None:
    made = ImageProcessor.read({}, {**NAMES, "image_processor": SETTINGS}, {"image_token": "<img>"})
    assert made == ours()._replace(image_token="<img>")


@pytest.mark.parametrize("name", [None, "LlavaProcessor"])
def test_other_processors_are_none(name: str | None) -> None:
    assert ImageProcessor.read(SETTINGS, {"processor_class": name}, {}) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": {"longest_edge": 0}}, "sides must be from 1 to 4096"),
        ({"max_image_size": {"longest_edge": 1 << 30}}, "sides must be from 1 to 4096"),
        ({"size": {"height": 3}}, "preprocessor_config.json cannot be used: .*longest_edge"),
        ({"image_std": [0, 1, 1]}, "image_std or a resample"),
        ({"resample": 9}, "image_std or a resample"),
        ({"image_mean": [0.5]}, "cannot be used"),
    ],
)
def test_settings_that_cannot_be_used_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        ours(**settings)


def test_an_image_that_cannot_be_resized_is_refused() -> None:
    with pytest.raises(RequestError, match="100000 x 1 pixels cannot be resized"):
        ours(do_resize=False).tiles(Image.new("RGB", (100_000, 1)))
