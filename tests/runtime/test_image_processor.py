"""The processing of images gives the pixels and the prompts of transformers' processors."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from PIL import Image
from tests.support.vision_models import CLIP, FILES, ONEVISION, theirs_of_llava, theirs_of_onevision
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

from teneral.runtime.errors import ModelError, RequestError
from teneral.runtime.images.processor import ImageProcessor

SETTINGS: dict[str, Any] = {"size": {"longest_edge": 128}, "max_image_size": {"longest_edge": 32}}
NAMES = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
TOKENS = {"boi_token": "<boi>", "eoi_token": "<eoi>", "image_token": "<soft>"}


def ours(**settings: Any) -> ImageProcessor:
    made = ImageProcessor.read({**SETTINGS, **settings}, NAMES, {})
    assert made is not None
    return made


def gemma(**settings: Any) -> ImageProcessor:
    given = {"size": {"height": 32, "width": 32}, "do_pan_and_scan": None, **settings}
    made = ImageProcessor.read(given, {"processor_class": "Gemma3Processor", "image_seq_length": 4}, TOKENS)
    assert made is not None
    return made


def qwen(**settings: Any) -> ImageProcessor:
    given = {"patch_size": 8, "processor_class": "Qwen2_5_VLProcessor", **settings}
    made = ImageProcessor.read(given, {}, {"image_token": "<pad>"})
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


@pytest.mark.parametrize("size", [(32, 32), (200, 100), (7, 500), (1, 1)])
@pytest.mark.parametrize("settings", [{}, {"resample": 3, "image_mean": [0.1, 0.2, 0.3]}])
def test_gemmas_tiles_and_texts_are_those_of_transformers(
    size: tuple[int, int], settings: dict[str, Any]
) -> None:
    image, processor = picture(*size), gemma(**settings)
    expected = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, **settings)(
        [image], return_tensors="np"
    )
    made, levels = processor.tiles(image), processor.levels
    values = np.stack([levels[channel][made.tiles[:, channel]] for channel in range(3)], axis=1)
    assert np.array_equal(values, expected["pixel_values"])
    assert processor.text(made) == "\n\n<boi><soft><soft><soft><soft><eoi>\n\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan is true, which is not supported"),
        ({"do_resize": False}, "must be resized"),
        ({"size": {"height": 32, "width": 64}}, "to a square size"),
        ({"size": {"height": 32}}, "cannot be used: .*width"),
    ],
)
def test_gemmas_settings_that_cannot_be_used_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gemma(**settings)


QWEN_PIXELS: list[dict[str, Any]] = [
    {"min_pixels": 1024, "max_pixels": 16_384},
    {"size": {"shortest_edge": 4096, "longest_edge": 5000}, "resample": 2},
    {"size": {"shortest_edge": 256, "longest_edge": 1 << 24}, "image_mean": [0.1, 0.2, 0.3]},
]


@pytest.mark.parametrize("size", [(32, 32), (200, 100), (7, 500), (1, 1), (1, 200), (72, 56), (333, 77)])
@pytest.mark.parametrize("settings", QWEN_PIXELS)
def test_qwens_tiles_and_texts_are_those_of_transformers(
    size: tuple[int, int], settings: dict[str, Any]
) -> None:
    image, processor = picture(*size), qwen(**settings)
    expected = Qwen2VLImageProcessorPil(patch_size=8, **settings)([image], return_tensors="np")
    made, levels = processor.tiles(image), processor.levels
    _, rows, columns = expected["image_grid_thw"][0].tolist()
    assert made.tiles.shape == (1, 3, rows * 8, columns * 8)
    values = np.stack([levels[channel][made.tiles[0, channel]] for channel in range(3)])
    split = values.reshape(3, rows // 2, 2, 8, columns // 2, 2, 8).transpose(1, 4, 2, 5, 0, 3, 6)
    patches = np.repeat(split.reshape(rows * columns, 3, 1, 64), 2, axis=2)
    assert np.array_equal(patches.reshape(rows * columns, -1), expected["pixel_values"])
    assert processor.text(made) == "<pad>" * (rows * columns // 4)
    assert processor.num_tokens(made) == rows * columns // 4


def test_qwens_images_are_bounded_whatever_the_file_allows() -> None:
    made = qwen(max_pixels=1 << 40).tiles(Image.new("RGB", (3000, 2000)))
    assert made.tiles[0, 0].size <= (1 << 14) * 64
    with pytest.raises(RequestError, match="1 x 201 pixels is more than 200 times as long"):
        qwen().tiles(Image.new("RGB", (1, 201)))


def gemma4(**settings: Any) -> ImageProcessor:
    names = {"processor_class": "Gemma4Processor", "image_processor": settings}
    made = ImageProcessor.read({}, names, TOKENS)
    assert made is not None
    return made


@pytest.mark.parametrize(
    "size", [(32, 32), (200, 100), (7, 500), (1, 1), (1, 900), (999, 2), (96, 56), (333, 77), (3000, 2000)]
)
@pytest.mark.parametrize(
    "settings",
    [
        {"max_soft_tokens": 70, "patch_size": 4, "pooling_kernel_size": 2},
        {"max_soft_tokens": 140, "patch_size": 2, "resample": 2, "rescale_factor": 0.5, "do_normalize": True},
    ],
)
def test_gemma4s_tiles_and_texts_are_those_of_transformers(
    size: tuple[int, int], settings: dict[str, Any]
) -> None:
    image, processor = picture(*size), gemma4(**settings)
    expected = Gemma4ImageProcessorPil(**settings)([image], return_tensors="np")
    made, levels = processor.tiles(image), processor.levels
    places = expected["image_position_ids"][0]
    columns, rows = (int(each) + 1 for each in places.max(axis=0))
    patch = settings["patch_size"]
    assert made.tiles.shape == (1, 3, rows * patch, columns * patch)
    values = np.stack([levels[channel][made.tiles[0, channel]] for channel in range(3)])
    patches = values.reshape(3, rows, patch, columns, patch).transpose(1, 3, 2, 4, 0)
    assert np.array_equal(patches.reshape(rows * columns, -1), expected["pixel_values"][0, : rows * columns])
    (num,) = expected["num_soft_tokens_per_image"]
    assert processor.num_tokens(made) == num
    assert processor.text(made) == f"<boi>{'<soft>' * num}<eoi>"
    assert processor.placeholder == "<soft>"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_resize": False}, "must be resized"),
        ({"max_soft_tokens": 300}, "max_soft_tokens is 300, but must be one of"),
        ({"patch_size": -2, "pooling_kernel_size": -2}, "to whole patches"),
        ({"patch_size": 0}, "sides must be from 1"),
        ({"patch_size": 1 << 20}, "sides must be from 1"),
        ({"max_soft_tokens": "many"}, "cannot be used"),
    ],
)
def test_gemma4s_settings_that_cannot_be_used_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        gemma4(**settings)


def test_gemma4s_tokens_around_images_are_not_guessed() -> None:
    with pytest.raises(ModelError, match=r"tokenizer_config.json has no boi_token"):
        ImageProcessor.read({}, {"processor_class": "Gemma4Processor"}, {"image_token": "<soft>"})


def onevision(names: dict[str, Any] | None = None, **settings: Any) -> ImageProcessor:
    given = {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 16, **(names or {})}
    made = ImageProcessor.read({**ONEVISION, **settings}, given, TOKENS)
    assert made is not None
    return made


ONEVISION_SIZES = [
    *((32, 32), (31, 33), (200, 100), (101, 203), (7, 500), (500, 7), (64, 63), (96, 64), (640, 480)),
    *((1, 1), (1, 4000), (4000, 1), (3, 2), (50, 1999), (1300, 900)),
]


@pytest.mark.parametrize("size", ONEVISION_SIZES)
@pytest.mark.parametrize(
    ("settings", "names"),
    [
        ({}, {}),
        ({"resample": 2, "image_mean": [0.1, 0.2, 0.3]}, {"vision_aspect_ratio": "anyres_max_1"}),
        ({"size": {"height": 16, "width": 16}, "do_normalize": False}, {"num_image_tokens": 9}),
    ],
)
def test_onevisions_tiles_and_texts_are_those_of_transformers(
    size: tuple[int, int], settings: dict[str, Any], names: dict[str, Any]
) -> None:
    """Of an image alone, and of one of two."""
    image, processor = picture(*size), onevision(names, **settings)
    aspect_ratio = names.get("vision_aspect_ratio", "anyres_max_9")
    theirs = theirs_of_onevision(processor.tokens_per_tile, aspect_ratio, **{**ONEVISION, **settings})
    levels = processor.levels
    for num in (1, 2):
        made, expected = (
            processor.tiles(image, num),
            theirs.image_processor([[image] * num], return_tensors="np"),
        )
        values = np.stack([levels[channel][made.tiles[:, channel]] for channel in range(3)], axis=1)
        assert np.array_equal(values, expected["pixel_values"][0])
        text = theirs.replace_image_token(expected, 0)
        assert processor.text(made) == text.replace("<image>", "<soft>")
        assert processor.num_tokens(made) == text.count("<image>")


def test_onevisions_defaults_are_those_of_transformers() -> None:
    names = {"processor_class": "LlavaOnevisionProcessor", "num_image_tokens": 729}
    made, theirs = ImageProcessor.read({}, names, {}), theirs_of_onevision(729, "anyres_max_9")
    assert made is not None
    for size in [(1000, 700), (1, 1), (5000, 40), (953, 1160)]:
        image = Image.new("RGB", size)
        expected = theirs.image_processor([[image]], return_tensors="np")
        assert made.text(made.tiles(image)) == theirs.replace_image_token(expected, 0)


def test_squares_of_onevision_are_bounded() -> None:
    onevision().tiles(Image.new("RGB", (16_384, 1)), 2)
    with pytest.raises(RequestError, match="16385 x 1 pixels cannot be resized"):
        onevision().tiles(Image.new("RGB", (16_385, 1)), 2)


@pytest.mark.parametrize(
    ("settings", "names", "message"),
    [
        ({"do_resize": False}, {}, "must be resized"),
        ({"do_center_crop": True}, {}, "not be cropped"),
        ({"size": {"height": 32, "width": 64}}, {}, "to a square size"),
        ({"size": {"shortest_edge": 32}}, {}, "cannot be used: .*height"),
        ({"image_grid_pinpoints": []}, {}, "must be 1 to 256 sizes"),
        ({"image_grid_pinpoints": [[32, 32]] * 257}, {}, "must be 1 to 256 sizes"),
        ({"image_grid_pinpoints": [[32, 40]]}, {}, "multiples of 32 pixels up to 4096"),
        ({"image_grid_pinpoints": [[32, 0]]}, {}, "multiples of 32 pixels"),
        ({"image_grid_pinpoints": [[32, 8192]]}, {}, "multiples of 32 pixels"),
        ({"image_grid_pinpoints": [[32]]}, {}, "cannot be used"),
        ({"image_grid_pinpoints": [[4096, 4096]]}, {}, "16384 times it at most 65536"),
        ({"image_mean": [0.5, 2.0, 0.5]}, {}, "image_mean must be numbers from 0 to 1"),
        ({}, {"num_image_tokens": None}, "0 tokens for a tile"),
        ({}, {"num_image_tokens": 15}, "num_image_tokens is 15, but must be the square"),
        ({}, {"num_image_tokens": 1 << 15}, "tokens from 1 to 16384"),
        ({}, {"vision_aspect_ratio": "pad"}, "vision_aspect_ratio is 'pad', but must be"),
        ({}, {"vision_aspect_ratio": "anyres_max_0"}, "vision_aspect_ratio is 'anyres_max_0'"),
        ({}, {"vision_aspect_ratio": 9}, "cannot be used"),
        ({}, {"vision_feature_select_strategy": "default"}, "strategy is 'default', but must be 'full'"),
    ],
)
def test_onevisions_settings_that_cannot_be_used_are_named(
    settings: dict[str, Any], names: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        onevision(names, **settings)


def llava(family: str, names: dict[str, Any] | None = None, **settings: Any) -> ImageProcessor:
    _, given, processor = FILES[family]
    made = ImageProcessor.read({**given, **settings}, {**processor, **(names or {})}, TOKENS)
    assert made is not None
    return made


LLAVA: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llava", {}, {}),
    ("llava", {"resample": 2, "size": {"height": 32, "width": 32}, "do_center_crop": False}, {}),
    ("llava", {"do_pad": True, "image_processor_type": "LlavaImageProcessor"}, {"patch_size": 7}),
    ("llava", {}, {"vision_feature_select_strategy": "full", "patch_size": 16}),
    ("llava_next", {}, {}),
    ("llava_next", {"resample": 2, "image_mean": [0.1, 0.2, 0.3]}, {"patch_size": 7}),
]


@pytest.mark.parametrize("size", [each for each in ONEVISION_SIZES if max(each) < 2000])
@pytest.mark.parametrize(("family", "settings", "names"), LLAVA)
def test_llavas_tiles_and_texts_are_those_of_transformers(
    size: tuple[int, int], family: str, settings: dict[str, Any], names: dict[str, Any]
) -> None:
    image, processor = picture(*size), llava(family, names, **settings)
    stated = {key: each for key, each in settings.items() if key != "image_processor_type"}
    theirs = theirs_of_llava(family, names=names, **{**FILES[family][1], **stated})
    made = processor.tiles(image, 2)
    expected = theirs.image_processor([image], return_tensors="np")
    levels = processor.levels
    values = np.stack([levels[channel][made.tiles[:, channel]] for channel in range(3)], axis=1)
    assert np.array_equal(values[None] if family == "llava_next" else values, expected["pixel_values"])
    text = theirs.replace_image_token(expected, 0)
    assert processor.text(made) == text.replace("<image>", "<soft>")
    assert processor.num_tokens(made) == text.count("<image>")


def test_an_image_that_is_much_longer_than_wide_has_no_middle() -> None:
    assert llava("llava").tiles(Image.new("RGB", (1, 256))).tiles.shape == (1, 3, 32, 32)
    with pytest.raises(RequestError, match="1 x 257 pixels cannot be resized"):
        llava("llava").tiles(Image.new("RGB", (1, 257)))


@pytest.mark.parametrize(
    ("family", "settings", "names", "message"),
    [
        ("llava", {"do_resize": False}, {}, "must be resized"),
        ("llava", {"size": {"shortest_edge": 48}}, {}, "is that of a square crop_size"),
        ("llava", {"do_center_crop": False}, {}, "is that of a square crop_size"),
        ("llava", {"size": {"height": 32}}, {}, "is that of a square crop_size"),
        ("llava", {"crop_size": {"height": 32, "width": 0}}, {}, "sides must be from 1 to 4096"),
        ("llava", {"size": {"shortest_edge": 1 << 20}}, {}, "sides must be from 1 to 4096"),
        (
            "llava",
            {"image_processor_type": "SiglipImageProcessor"},
            {},
            "is 'SiglipImageProcessor', but must",
        ),
        (
            "llava",
            {"do_pad": True, "image_processor_type": "LlavaImageProcessor", "image_mean": [2.0] * 3},
            {},
            "image_mean must be numbers from 0 to 1",
        ),
        ("llava", {}, {"patch_size": None}, "patch_size is 0, but must be from 1 to 32"),
        ("llava", {}, {"patch_size": 33}, "patch_size is 33, but must be from 1 to 32"),
        ("llava", {}, {"patch_size": 32, "num_additional_image_tokens": 0}, "makes 0 tokens"),
        (
            "llava",
            {},
            {"num_additional_image_tokens": 2},
            "num_additional_image_tokens is 2, but must be 0 or 1",
        ),
        ("llava_next", {"image_grid_pinpoints": [[32, 40]]}, {}, "multiples of 32 pixels up to 4096"),
        ("llava_next", {"image_grid_pinpoints": [[4096, 4096]]}, {}, "16384 times it at most 65536"),
        (
            "llava_next",
            {},
            {"vision_feature_select_strategy": "full"},
            "tokens is 17, but must be the square",
        ),
    ],
)
def test_llavas_settings_that_cannot_be_used_are_named(
    family: str, settings: dict[str, Any], names: dict[str, Any], message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        llava(family, names, **settings)


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_llavas_defaults_are_those_of_transformers(family: str) -> None:
    name = FILES[family][2]["processor_class"]
    sizes = {key: CLIP[key] for key in ("size", "crop_size")} | {"image_grid_pinpoints": [[32, 64], [64, 32]]}
    made = ImageProcessor.read(sizes, {**FILES[family][2], "processor_class": name}, {})
    assert made is not None
    if family == "llava":
        del sizes["image_grid_pinpoints"]
    image = picture(50, 70)
    expected = theirs_of_llava(family, **sizes).image_processor([image], return_tensors="np")["pixel_values"]
    tiles = made.tiles(image).tiles
    values = np.stack([made.levels[channel][tiles[:, channel]] for channel in range(3)], axis=1)
    assert np.array_equal(values, expected.reshape(values.shape))


def test_settings_within_processor_config_json_come_first() -> None:
    made = ImageProcessor.read({}, {**NAMES, "image_processor": SETTINGS}, {"image_token": "<img>"})
    assert made == msgspec.structs.replace(ours(), placeholder="<img>", image_token="<img>")


def test_qwen3s_processor_is_qwen2_5s() -> None:
    given = {"patch_size": 8, "processor_class": "Qwen3VLProcessor"}
    assert ImageProcessor.read(given, {}, {"image_token": "<pad>"}) == qwen()


@pytest.mark.parametrize("name", [None, "PixtralProcessor"])
def test_other_processors_are_none(name: str | None) -> None:
    assert ImageProcessor.read(SETTINGS, {"processor_class": name}, {}) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"do_resize": False}, "must be resized"),
        ({"min_pixels": 9, "max_pixels": 8}, "images of 9 to 8 pixels"),
        ({"size": {"min_pixels": 9}}, "images of 0 to 0 pixels"),
        ({"merge_size": 0}, "sides must be from 1"),
        ({"patch_size": -2, "merge_size": -2}, "patches of -2 x -2"),
        ({"max_pixels": "many"}, "cannot be used"),
    ],
)
def test_qwens_settings_that_cannot_be_used_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        qwen(**settings)


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
