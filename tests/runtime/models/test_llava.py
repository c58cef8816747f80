"""LLaVA-OneVision, LLaVA-NeXT and LLaVA 1.5 compute what transformers does: rows of images of all sizes, and prompts
with them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from tests.support.decoding import Stepper
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of
from tests.support.vision_models import (
    FILES,
    PLAIN_LEVELS,
    image_at,
    oracle_inputs,
    picture,
    prompt_with,
    random_tiles,
    tiny_vision_model,
)

from teneral.runtime.engine.sequence import Lane
from teneral.runtime.errors import ModelError
from teneral.runtime.images.processor import ImageProcessor, ImageTiles, TileLayout
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.step.batch import Epoch, Rows, build_batch
from teneral.runtime.step.requests import GenerationRequest
from teneral.runtime.step.state import SamplingState
from teneral.runtime.tensors import to_float32

FAMILY = "llava_onevision"
GRIDS = (FAMILY, "llava_next")
# Width and height: those of a tile, of each grid, cut and scaled, and so narrow that no token of the grid is left.
SIZES = [
    *((32, 32), (64, 32), (32, 64), (64, 64), (96, 32), (640, 480), (100, 230), (45, 31), (33, 66)),
    *((1, 1), (4000, 1), (1, 4000), (300, 9), (5, 70)),
]


def ours(model: Any) -> Any:
    return build_model(config_json(model), DictWeights(tensors_of(model)))


def tiles_of(image: Image.Image, num_images: int = 1, family: str = FAMILY) -> ImageTiles:
    processor = ImageProcessor.read(*FILES[family][1:], {})
    assert processor is not None
    return processor.tiles(image, num_images)


def rows_of(decoder: Any, made: ImageTiles) -> np.ndarray:
    rows = decoder.vision.join(list(decoder.vision.encode(made.tiles, PLAIN_LEVELS)), made.layout)
    assert len(rows) == (16 if made.layout is None else made.layout.num_tokens(16))
    return np.asarray(rows)


@torch.no_grad()
def oracle_rows(model: Any, image: Image.Image, made: ImageTiles) -> np.ndarray:
    inputs = oracle_inputs(model, [], made.tiles, sizes=[image.size[::-1]])
    del inputs["input_ids"]
    features = model.get_image_features(**inputs).pooler_output
    return np.asarray(features[0].float().numpy())


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest) -> Any:
    return tiny_vision_model(getattr(request, "param", FAMILY))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("model", GRIDS, indirect=True)
def test_rows_of_an_image_alone_are_those_of_transformers(model: Any, size: tuple[int, int]) -> None:
    image = picture(*size)
    made = tiles_of(image, family=model.config.model_type)
    np.testing.assert_allclose(rows_of(ours(model), made), oracle_rows(model, image, made), atol=2e-4)


@pytest.mark.parametrize(
    ("vision", "settings", "num_rows"),
    [
        ({}, {"vision_feature_select_strategy": "full"}, 17),
        ({"hidden_act": "gelu", "layer_norm_eps": 0.1}, {"vision_feature_layer": -1}, 16),
        ({"num_hidden_layers": 5}, {"vision_feature_layer": 1, "multimodal_projector_bias": False}, 16),
        # Pixels left over
        ({"image_size": 31, "patch_size": 7}, {"projector_hidden_act": "quick_gelu"}, 16),
    ],
)
def test_rows_of_clips_towers(vision: dict[str, Any], settings: dict[str, Any], num_rows: int) -> None:
    model = tiny_vision_model("llava", vision=vision, **settings)
    tiles, decoder = random_tiles(2, vision.get("image_size", 32)), ours(model)
    rows = np.concatenate(list(decoder.vision.encode(tiles, PLAIN_LEVELS)))
    assert len(rows) == 2 * num_rows
    with torch.no_grad():
        features = model.get_image_features(pixel_values=oracle_inputs(model, [], tiles)["pixel_values"])
    np.testing.assert_allclose(rows, torch.cat(list(features.pooler_output)).numpy(), atol=2e-4)
    places = np.arange(len(rows))
    assert decoder.config.vision.fits(tiles, places, None)
    assert not decoder.config.vision.fits(tiles, places[1:], None)
    assert not decoder.config.vision.fits(tiles[:, :, 1:], places, None)


def test_grids_are_cut_and_scaled() -> None:
    """The sizes above are of all kinds."""
    layouts = [tiles_of(picture(*size)).layout for size in SIZES]
    side = 4
    assert all(layout is not None for layout in layouts)
    made = [layout for layout in layouts if layout is not None]
    assert any(each.height < each.num_rows * side for each in made)
    assert any(each.width < each.num_columns * side for each in made)
    assert any(each.scaled_height < each.height for each in made)
    assert any(not each.height * each.width for each in made)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rows_in_half_precision_are_near_those_of_transformers(dtype: torch.dtype) -> None:
    model, image = tiny_vision_model(FAMILY, dtype=dtype), picture(100, 230)
    decoder, made = ours(model), tiles_of(image)
    rows = to_float32(rows_of(decoder, made), decoder.dtype)
    np.testing.assert_allclose(rows, oracle_rows(model, image, made), atol=0.15, rtol=0.05)


@pytest.mark.parametrize(
    ("vision", "settings"),
    [
        ({"vision_use_head": True, "hidden_act": "gelu"}, {"vision_feature_layer": -2}),
        ({"num_hidden_layers": 3}, {"vision_feature_layer": 1, "multimodal_projector_bias": False}),
        ({}, {"projector_hidden_act": "gelu_pytorch_tanh", "vision_feature_layer": 2}),
        # So400m's shape: pixels left over.
        ({"image_size": 32, "patch_size": 7}, {}),
    ],
)
def test_rows_of_other_towers(vision: dict[str, Any], settings: dict[str, Any]) -> None:
    model, image = tiny_vision_model(FAMILY, vision=vision, **settings), picture(70, 40)
    made, decoder = tiles_of(image), ours(model)
    np.testing.assert_allclose(
        decoder.vision.join(list(decoder.vision.encode(made.tiles, PLAIN_LEVELS)), made.layout),
        oracle_rows(model, image, made),
        atol=2e-4,
    )


TEXTS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": (FAMILY, {}),
    "llama": (FAMILY, {}),
    "mistral": (FAMILY, {"sliding_window": 9}),
    "tied": (FAMILY, {"model_type": "qwen2", "tie_word_embeddings": True}),
    "next": ("llava_next", {"model_type": "mistral", "sliding_window": 9}),
    "next, llama": ("llava_next", {"model_type": "llama"}),
    "1.5": ("llava", {"model_type": "llama"}),
}


def lane_of(tokens: list[int], blocks: range, *images: Any) -> Lane:
    state = SamplingState(GenerationRequest("r", tokens), frozenset())
    lane = Lane(Epoch.EXACT, tokens, state, None, images)
    lane.blocks = tuple(blocks)
    return lane


@torch.no_grad()
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("num_images", [1, 2])
def test_logits_with_images_are_those_of_transformers(text: str, num_images: int) -> None:
    """One image, which is a grid but for LLaVA 1.5, and two; and the same bits in company and by chunks."""
    family, settings = TEXTS[text]
    model = tiny_vision_model(family, text={"model_type": text, **settings})
    pictures = [picture(100, 70), picture(20, 90)][:num_images]
    made = [tiles_of(each, num_images, family) for each in pictures]
    sizes = [16 if each.layout is None else each.layout.num_tokens(16) for each in made]
    prompt = prompt_with([1, 2, 3], sizes[0], [9], *sizes[1:], [8, 7])
    inputs = oracle_inputs(
        model,
        prompt,
        *(each.tiles for each in made),
        sizes=[each.size[::-1] for each in pictures] if num_images == 1 or family == "llava_next" else (),
    )
    expected = model(**inputs).logits[0].float()
    decoder, images = ours(model), []
    for each, first, size in zip(made, (3, 4 + sizes[0]), sizes, strict=False):
        images.append(image_at(list(range(first, first + size)), each.tiles, layout=each.layout))
        images[-1].rows = rows_of(decoder, each)
    kv, num, other = decoder.new_kv(180, 4), len(prompt), list(range(20, 29))
    lanes = [lane_of(prompt, range(at, at + 55), *images) for at in (0, 55, 110)]
    whole = decoder.forward(build_batch([Rows(lanes[0], prompt, 0, num, num)], 4), kv)
    np.testing.assert_allclose(whole, expected.numpy(), atol=2e-4)
    together = [Rows(lane_of(other, range(165, 170)), other, 0, 9, 9), Rows(lanes[1], prompt, 0, num, num)]
    assert (decoder.forward(build_batch(together, 4), kv)[9:] == whole).all()
    ends = (2, 5, 20, num)
    parts = [
        decoder.forward(build_batch([Rows(lanes[2], prompt, first, end, end - first)], 4), kv)
        for first, end in zip((0, *ends), ends, strict=False)
    ]
    assert (np.concatenate(parts) == whole).all()


@pytest.mark.parametrize("model", GRIDS, indirect=True)
def test_published_files_have_the_language_model_with_its_head(model: Any) -> None:
    tensors, image, tokens = tensors_of(model), picture(64, 40), list(range(20))
    named = {
        name.removeprefix("model.")
        .replace("language_model.", "language_model.model.", 1)
        .replace("lm_head.", "language_model.lm_head.")
        .replace("vision_tower.", "vision_tower.vision_model."): each
        for name, each in tensors.items()
    }
    assert {"language_model.lm_head.weight", "image_newline"} <= set(named)
    decoder, made = build_model(config_json(model), DictWeights(named)), tiles_of(image)
    assert (rows_of(decoder, made) == rows_of(ours(model), made)).all()
    assert torch.equal(
        Stepper(decoder).step({"a": tokens})["a"], Stepper(ours(model)).step({"a": tokens})["a"]
    )


@pytest.mark.parametrize(
    ("num_tiles", "layout", "fits"),
    [
        (1, TileLayout(), True),
        (2, TileLayout(), False),
        (3, TileLayout(1, 2, 4, 6, 4, 6), True),
        (4, TileLayout(1, 2, 4, 6, 4, 6), False),
        (3, TileLayout(1, 2, 4, 7, 4, 7), False),
        (3, TileLayout(1, 2, 6, 8, 6, 8), False),
        (3, TileLayout(1, 2, 4, 8, 5, 8), False),
        (3, TileLayout(1, 2, 4, 8, 2, 4), True),
    ],
)
def test_layouts_fit_their_tiles(num_tiles: int, layout: TileLayout, fits: bool) -> None:
    assert layout.fits(num_tiles, 4) is fits


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": {"model_type": "gemma2"}}, r"text_config.model_type is 'gemma2', which is not supp"),
        ({"text_config": None}, r"needs a text_config"),
        ({"text_config": {"hidden_size": -1}}, r"text_config.hidden_size is -1"),
        ({"vision_config": {"model_type": "clip_vision_model"}}, r"vision_config.model_type is 'clip_vision"),
        ({"vision_config": {"num_channels": 1}}, r"vision_config.num_channels is 1"),
        ({"vision_config": {"image_size": 1 << 20}}, r"vision_config.image_size is 1048576"),
        ({"vision_config": 3}, r"vision_config must be an object"),
        ({"vision_feature_layer": [-1, -2]}, r"vision_feature_layer is list, but must be a whole number"),
        ({"vision_feature_layer": -3}, r"vision_feature_layer is -3, but must be a whole number from -2"),
        ({"vision_feature_layer": 0}, r"vision_feature_layer is 0, but must be a layer"),
        ({"vision_feature_select_strategy": "default"}, r"select_strategy is 'default', which is not supp"),
        ({"vision_aspect_ratio": "pad"}, r"vision_aspect_ratio is 'pad', but must be anyres_max_"),
        ({"projector_hidden_act": "swoosh"}, r"projector_hidden_act is 'swoosh'"),
        ({"multimodal_projector_bias": 1}, r"multimodal_projector_bias is 1, but must be true or false"),
        ({"image_token_index": 320}, r"image_token_index is 320, but must be a whole number from 0 to 319"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused_by_name(
    model: Any, change: dict[str, Any], message: str
) -> None:
    check_refused(model, change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": {"model_type": "siglip_vision_model"}}, r"vision_config.model_type is 'siglip_v"),
        ({"vision_config": {"hidden_act": "swoosh"}}, r"vision_config.hidden_act is 'swoosh'"),
        ({"vision_feature_select_strategy": "full"}, r"select_strategy is 'full', which is not supported"),
        ({"vision_feature_layer": [-2, -5]}, r"vision_feature_layer is list, but must be a whole number"),
        ({"text_config": {"model_type": "gemma2"}}, r"text_config.model_type is 'gemma2', which is not supp"),
        ({"image_token_index": 320}, r"image_token_index is 320, but must be a whole number from 0 to 319"),
    ],
)
@pytest.mark.parametrize("model", ["llava_next"], indirect=True)
def test_configs_with_clips_towers_that_cannot_be_computed_are_refused_by_name(
    model: Any, change: dict[str, Any], message: str
) -> None:
    check_refused(model, change, message)


def check_refused(model: Any, change: dict[str, Any], message: str) -> None:
    config = config_json(model)
    for key, value in change.items():
        config[key] = {**config[key], **value} if isinstance(value, dict) else value
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_json(config)


@pytest.mark.parametrize("family", ["llava", "llava_next"])
def test_fields_of_clips_towers_that_files_leave_out_are_those_of_transformers(family: str) -> None:
    config = config_json(tiny_vision_model(family))
    for given in (None, {"model_type": "clip_vision_model"}):
        left_out = {key: value for key, value in config.items() if key != "vision_config"}
        left_out |= {} if given is None else {"vision_config": given}
        stated = transformers.AutoConfig.for_model(**left_out).vision_config.to_dict()
        assert DecoderConfig.from_json(left_out) == DecoderConfig.from_json(
            {**config, "vision_config": stated}
        )


def test_fields_of_the_decoder_that_files_leave_out_are_those_of_transformers() -> None:
    for kind in ("llama", "mistral", "qwen2"):
        stated = tiny_vision_model(FAMILY, text={"model_type": kind}).config.text_config.__class__().to_dict()
        config = config_json(tiny_vision_model(FAMILY))
        whole, short = ({**config, "text_config": each} for each in (stated, {"model_type": kind}))
        assert DecoderConfig.from_json(short) == DecoderConfig.from_json(whole)
