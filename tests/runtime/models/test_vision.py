"""Models that take images compute what transformers does: the rows of images, and the logits of prompts with them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper
from tests.support.models import DictWeights, build_model, torch_model
from tests.support.paced import PacedSource
from tests.support.tiny_models import config_json, tensors_of
from tests.support.vision_models import (
    IMAGE_TOKEN,
    PLAIN_LEVELS,
    pixel_values,
    prompt_with,
    random_tiles,
    tiny_vision_model,
)

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder_config import VISION_FAMILY_MODULES, DecoderConfig
from teneral.runtime.step.batch import ImageRows
from teneral.runtime.tensors import to_float32
from teneral.runtime.weights import StreamedWeights


def ours(model: Any) -> Any:
    return build_model(config_json(model), DictWeights(tensors_of(model)))


def rows_of(decoder: Any, tiles: np.ndarray) -> np.ndarray:
    return np.concatenate(list(decoder.vision.encode(tiles, PLAIN_LEVELS)))


@torch.no_grad()
def oracle_rows(model: Any, tiles: np.ndarray) -> np.ndarray:
    values = pixel_values(tiles, next(model.parameters()).dtype)
    return torch.cat(list(model.get_image_features(values).pooler_output)).float().numpy()


@pytest.mark.parametrize("family", VISION_FAMILY_MODULES)
def test_rows_of_images_are_those_of_transformers(family: str) -> None:
    model = tiny_vision_model(family)
    decoder, tiles = ours(model), random_tiles(3)
    np.testing.assert_allclose(rows_of(decoder, tiles), oracle_rows(model, tiles), atol=2e-4)


@pytest.mark.parametrize(
    "vision",
    [
        # So400m's shape: 27 patches a side, and pixels left over.
        {"image_size": 110, "patch_size": 4, "num_attention_heads": 4, "hidden_size": 72},
        {"image_size": 27, "patch_size": 3, "hidden_act": "gelu"},
    ],
)
def test_rows_of_towers_of_other_shapes(vision: dict[str, Any]) -> None:
    model = tiny_vision_model(vision=vision, scale_factor=3)
    tiles = random_tiles(1, vision["image_size"])
    np.testing.assert_allclose(rows_of(ours(model), tiles), oracle_rows(model, tiles), atol=2e-4)


def test_rows_in_bf16_are_near_those_of_transformers() -> None:
    model = tiny_vision_model(dtype=torch.bfloat16)
    tiles = random_tiles(2)
    decoder = ours(model)
    rows = to_float32(rows_of(decoder, tiles), decoder.dtype)
    np.testing.assert_allclose(rows, oracle_rows(model, tiles), atol=0.15, rtol=0.05)


@torch.no_grad()
def test_logits_with_images_are_those_of_transformers() -> None:
    model, tiles = tiny_vision_model(), random_tiles(2)
    prompt = prompt_with([1, 2, 3], 4, [9], 4, [8, 7])
    expected = model(torch.tensor([prompt]), pixel_values=pixel_values(tiles)).logits[0].float()
    decoder = ours(model)
    stepper = Stepper(decoder)
    batch = stepper.batch({"a": prompt})
    places = np.flatnonzero(np.array(prompt) == IMAGE_TOKEN)
    batch = type(batch)(
        batch.tokens,
        batch.positions,
        batch.slots,
        batch.spans,
        batch.logit_rows,
        images=(ImageRows(places, rows_of(decoder, tiles)),),
    )
    np.testing.assert_allclose(decoder.forward(batch, stepper.kv), expected.numpy(), atol=2e-4)


def test_rows_of_a_tile_depend_on_no_other() -> None:
    decoder, tiles = ours(tiny_vision_model()), random_tiles(3)
    together = rows_of(decoder, tiles)
    apart = np.concatenate([rows_of(decoder, tiles[index : index + 1]) for index in range(3)])
    assert (together == apart).all()


@pytest.mark.parametrize("num", [14, 16, 24, 26, 27, 28, 32])
def test_patches_take_the_positions_one_after_the_other(num: int) -> None:
    """As transformers has them by fractions of a tile's side, for all sizes that models have."""
    boundaries = torch.arange(1 / num, 1.0, 1 / num)
    fractions = torch.clamp(
        torch.arange(num, dtype=torch.float32) * (1.0 / torch.tensor(num)), max=1.0 - 1e-6
    )
    buckets = torch.bucketize(fractions, boundaries, right=True)
    assert buckets.tolist() == list(range(num))


def test_backends_other_than_the_native_core_refuse_images() -> None:
    model = tiny_vision_model()
    with pytest.raises(ModelError, match="torch does not implement takes_images = True"):
        torch_model(config_json(model), DictWeights(tensors_of(model)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"scale_factor": 3}, r"scale_factor is 3, but must divide the 4 patches of a side"),
        ({"image_token_id": 320}, r"image_token_id is 320, but must be a whole number from 0 to 319"),
        ({"text_config": None}, r"a model of the family 'idefics3' needs a text_config"),
        ({"vision_config": {"num_channels": 1}}, r"vision_config.num_channels is 1"),
        ({"vision_config": {"hidden_act": "swoosh"}}, r"vision_config.hidden_act is 'swoosh'"),
        ({"vision_config": 3}, r"vision_config must be an object"),
        ({"text_config": {"model_type": "bert"}}, r"text_config.model_type is 'bert'"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    config = config_json(tiny_vision_model())
    for key, value in change.items():
        is_part = isinstance(value, dict) and isinstance(config[key], dict)
        config[key] = {**config[key], **value} if is_part else value
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_json(config)


def save_vision(model: Any, folder: Path) -> Path:
    model.save_pretrained(folder)
    return folder


PACKED: dict[str, dict[str, Any]] = {
    "packed": {},
    "tiers": {"tiers": TierOptions(draft_bits=3)},
    "int8": {"quantize": QuantizeOptions(8)},
    "int4": {"quantize": QuantizeOptions(4)},
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_packed_tower_computes_while_weights_arrive(tmp_path: Path, kind: str) -> None:
    """The rows of images, and the logits, are those of a load that has ended; the tower is as it was."""
    model = tiny_vision_model(dtype=torch.bfloat16, text={"intermediate_size": 128})
    save_vision(model, tmp_path / "plain")
    pack(open_source(str(tmp_path / "plain")), open_store(str(tmp_path / kind)), **PACKED[kind])
    tiles, tokens = random_tiles(2), list(range(20))
    expected = rows_of(ours(model), tiles)
    results = []
    for waits in (False, True):
        source = PacedSource(open_source(str(tmp_path / kind)))
        source.delay(seed=1, max_s=0.003)
        manifest = open_artifact(source)
        with closing(source), WeightLoad(source, manifest, options=LoadOptions()) as load:
            for group in manifest.groups:
                load.slab(group.index)[:] = 0xFF
            config = json.loads(read_file(source, manifest, "config.json"))
            decoder = build_model(config, StreamedWeights(load))
            load.start()
            if waits:
                load.join()
            assert (rows_of(decoder, tiles) == expected).all()
            results.append(Stepper(decoder).step({"a": tokens})["a"])
    assert torch.equal(*results)
    assert results[0].isfinite().all()
