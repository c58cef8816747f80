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
from tests.support.gemma4 import EQUAL, MIXTURE
from tests.support.models import DictWeights, build_model, torch_model
from tests.support.paced import PacedSource
from tests.support.tiny_models import config_json, tensors_of
from tests.support.vision_models import (
    DYNAMIC,
    IMAGE_TOKEN,
    PLAIN_LEVELS,
    QWEN,
    image_at,
    oracle_inputs,
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
from teneral.runtime.engine.sequence import Lane
from teneral.runtime.errors import ModelError
from teneral.runtime.images.processor import TileLayout
from teneral.runtime.models.decoder_config import VISION_FAMILY_MODULES, DecoderConfig
from teneral.runtime.step.batch import Epoch, Rows, build_batch, join, select
from teneral.runtime.step.images import axes_of
from teneral.runtime.step.requests import GenerationRequest
from teneral.runtime.step.state import SamplingState
from teneral.runtime.tensors import to_float32
from teneral.runtime.weights import StreamedWeights


def ours(model: Any) -> Any:
    return build_model(config_json(model), DictWeights(tensors_of(model)))


def rows_of(decoder: Any, tiles: np.ndarray) -> np.ndarray:
    parts, layout = decoder.vision.encode(tiles, PLAIN_LEVELS), None
    if decoder.config.vision.marks:  # a tile is an image
        layout = TileLayout()
    return np.concatenate([decoder.vision.join([part], layout) for part in parts])


@torch.no_grad()
def oracle_rows(model: Any, tiles: np.ndarray) -> np.ndarray:
    inputs = oracle_inputs(model, [], tiles)
    names = ("pixel_values", "image_grid_thw", "image_position_ids", "image_sizes", "batch_num_images")
    values = {key: inputs[key] for key in names if key in inputs}
    made = model.get_image_features(**values)
    features = [made.pooler_output, *(getattr(made, "deepstack_features", None) or ())]
    return torch.cat([torch.cat(list(each)) for each in features], dim=1).float().numpy()


# Of LLaVA-NeXT an image is a grid: `test_llava.py`.
@pytest.mark.parametrize("family", [each for each in VISION_FAMILY_MODULES if each != "llava_next"])
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


@pytest.mark.parametrize("family", ["smolvlm", "llava", "llava_onevision", "gemma3", *DYNAMIC])
def test_rows_in_bf16_are_near_those_of_transformers(family: str) -> None:
    model = tiny_vision_model(family, dtype=torch.bfloat16)
    tiles = random_tiles(2)
    decoder = ours(model)
    rows = to_float32(rows_of(decoder, tiles), decoder.dtype)
    np.testing.assert_allclose(rows, oracle_rows(model, tiles), atol=0.15, rtol=0.05)


@torch.no_grad()
@pytest.mark.parametrize("family", ["smolvlm", "gemma3", *DYNAMIC, "qwen3_vl_moe", "qwen3_5_moe"])
def test_logits_with_images_are_those_of_transformers(family: str) -> None:
    model, tiles = tiny_vision_model(family), random_tiles(2)
    prompt = prompt_with([1, 2, 3], 4, [9], 4, [8, 7])
    expected = model(**oracle_inputs(model, prompt, tiles)).logits[0].float()
    decoder = ours(model)
    images = (image_at([3, 4, 5, 6], tiles[:1]), image_at([8, 9, 10, 11], tiles[1:]))
    for image in images:
        image.rows = rows_of(decoder, image.tiles)
        image.grid = (2, 2) if decoder.config.vision.has_grid else None
        image.runs = image.find_runs() if decoder.config.vision.is_whole else ()
    lane = lane_of(prompt, (2, 0, 1), *images)
    kv = decoder.new_kv(3, 5)
    batch = build_batch([Rows(lane, prompt, 0, len(prompt), len(prompt))], 5)
    whole = decoder.forward(batch, kv)
    np.testing.assert_allclose(whole, expected.numpy(), atol=3e-4 if decoder.state_bytes else 2e-4)
    # From within the second image on, its first tokens being there, and the state after these.
    if decoder.state_bytes:
        for first, end in ((0, 1), (1, 9)):
            decoder.forward(build_batch([Rows(lane, prompt, first, end, 1)], 5), kv)
    again = build_batch([Rows(lane, prompt, 9, len(prompt), len(prompt) - 9)], 5)
    assert (decoder.forward(again, kv) == whole[9:]).all()


@pytest.mark.parametrize("size", [(16, 16), (48, 48), (64, 112), (144, 16)])
@pytest.mark.parametrize("family", DYNAMIC)
def test_rows_of_images_of_any_size(family: str, size: tuple[int, int]) -> None:
    """Smaller than a window, one window, and windows that the edge cuts off."""
    model, tiles = tiny_vision_model(family), random_tiles(1, *size)
    np.testing.assert_allclose(rows_of(ours(model), tiles), oracle_rows(model, tiles), atol=2e-4)


@pytest.mark.parametrize("family", QWEN)
def test_positions_of_images_are_those_of_transformers(family: str) -> None:
    """Of all tokens, and of each range of them: images at the beginning, side by side, and of one row."""
    model, grids = tiny_vision_model(family), [(2, 3), (1, 7), (4, 2)]
    prompt = prompt_with(6, 7, [1, 2, 3], 8, [4, 5])
    types = torch.tensor([[1] * 6 + [0] + [1] * 7 + [0] * 3 + [1] * 8 + [0] * 2])
    places = [index for index, kind in enumerate(types[0].tolist()) if kind]
    tokens = torch.tensor([[*prompt[:6], 9, *prompt[6:]]])
    thw = torch.tensor([[1, 2 * rows, 2 * columns] for rows, columns in grids])
    expected = model.model.get_rope_index(tokens, types, thw)[0][:, 0].numpy()
    images, start = [], 0
    for rows, columns in grids:
        image = image_at(places[start : start + rows * columns], random_tiles(1))
        image.grid, start = (rows, columns), start + rows * columns
        images.insert(0, image)
    num = tokens.shape[1]
    for first in range(num):
        for end in range(first, num + 1):
            assert (axes_of(images, first, end) == expected[:, first:end]).all()
    assert (axes_of(images, num + 5, num + 6) == expected.max() + 6).all()


def test_positions_follow_their_rows_from_step_to_step() -> None:
    image = image_at([1, 2, 3, 4], random_tiles(1))
    image.rows, image.grid = np.zeros((4, 64), np.float32), (2, 2)
    seen, text = lane_of([9, *[IMAGE_TOKEN] * 4, 8, 7], (0, 1), image), lane_of([5, 6], (2,))
    parts = [Rows(text, text.tokens, 0, 2, 1), Rows(seen, seen.tokens, 2, 7, 1)]
    together = build_batch(parts, 5)
    expected = [[0, 1, 1, 1, 1, 3, 4], [0, 1, 1, 2, 2, 3, 4], [0, 1, 2, 1, 2, 3, 4]]
    assert together.axes.tolist() == expected
    apart = [build_batch([part], 5) for part in parts]
    assert apart[0].axes is None
    assert join(apart).axes.tolist() == expected
    assert select(together, [1])[0].axes.tolist() == [row[2:] for row in expected]


def lane_of(tokens: list[int], blocks: tuple[int, ...], *images: Any) -> Lane:
    lane = Lane(Epoch.EXACT, tokens, SamplingState(GenerationRequest("r", tokens), frozenset()), None, images)
    lane.blocks = blocks
    return lane


@pytest.mark.parametrize(
    "vision",
    [
        {"use_clipped_linears": False, "standardize": False},
        {"hidden_size": 96, "head_dim": 24, "intermediate_size": 128},
        {"pooling_kernel_size": 3, "patch_size": 4, "hidden_activation": "gelu", "rms_norm_eps": 0.1},
        {"rope_parameters": {"rope_type": "axial", "rope_theta": 7.0}, "position_embedding_size": 14},
    ],
)
def test_rows_of_other_towers_of_gemma4(vision: dict[str, Any]) -> None:
    model = tiny_vision_model("gemma4", vision=vision)
    tiles = random_tiles(1, 48, 96)
    np.testing.assert_allclose(rows_of(ours(model), tiles), oracle_rows(model, tiles), atol=2e-4)


OF_GEMMA4: dict[str, dict[str, Any]] = {
    "seen from before": {"use_bidirectional_attention": None},
    "larger than a window": {},
    "a mixture": MIXTURE,
    "keys are values": EQUAL,
    "another padding token": {"pad_token_id": 7},
}


@torch.no_grad()
@pytest.mark.parametrize("variant", OF_GEMMA4)
def test_logits_of_gemma4_are_those_of_transformers(variant: str) -> None:
    """Of an image with more tokens than a window, which begins within it; and the same bits in company, by chunks."""
    model = tiny_vision_model("gemma4", text=OF_GEMMA4[variant])
    tiles, prompt = random_tiles(1, 48, 80), prompt_with([1, 2, 3], 15, [8, 7, 6])
    expected = model(**oracle_inputs(model, prompt, tiles)).logits[0].float()
    decoder = ours(model)
    image = image_at(list(range(3, 18)), tiles)
    image.rows = rows_of(decoder, tiles)
    image.runs = image.find_runs() if decoder.config.vision.is_whole else ()
    kv, text = decoder.new_kv(12, 4), list(range(20, 29))
    alone, other, cut = (lane_of(prompt, tuple(range(at, at + 6)), image) for at in (0, 0, 6))
    whole = decoder.forward(build_batch([Rows(alone, prompt, 0, 21, 21)], 4), kv)
    np.testing.assert_allclose(whole, expected.numpy(), atol=3e-4)
    assert image.runs or variant == "seen from before"
    together = [Rows(lane_of(text, (9, 10, 11)), text, 0, 9, 9), Rows(other, prompt, 0, 21, 21)]
    assert (decoder.forward(build_batch(together, 4), kv)[9:] == whole).all()
    ends = (3, 18, 20, 21) if image.runs else (2, 5, 16, 21)
    parts = [
        decoder.forward(build_batch([Rows(cut, prompt, first, end, end - first)], 4), kv)
        for first, end in zip((0, *ends), ends, strict=False)
    ]
    assert (np.concatenate(parts) == whole).all()


def test_rows_of_a_tile_depend_on_no_other() -> None:
    decoder, tiles = ours(tiny_vision_model()), random_tiles(3)
    together = rows_of(decoder, tiles)
    apart = np.concatenate([rows_of(decoder, tiles[index : index + 1]) for index in range(3)])
    assert (together == apart).all()


def test_a_tile_is_left_between_two_layers_once_it_is_over() -> None:
    decoder, asked = ours(tiny_vision_model("qwen2_5_vl")), iter([False, False, True])
    assert list(decoder.vision.encode(random_tiles(1), PLAIN_LEVELS, lambda: next(asked))) == []


@pytest.mark.parametrize("num", [14, 16, 24, 26, 27, 28, 32])
def test_patches_take_the_positions_one_after_the_other(num: int) -> None:
    """transformers computes the same from fractions of a tile's side, for all sizes that models have."""
    boundaries = torch.arange(1 / num, 1.0, 1 / num)
    fractions = torch.clamp(
        torch.arange(num, dtype=torch.float32) * (1.0 / torch.tensor(num)), max=1.0 - 1e-6
    )
    buckets = torch.bucketize(fractions, boundaries, right=True)
    assert buckets.tolist() == list(range(num))


@pytest.mark.parametrize(
    ("family", "named"), [("idefics3", "implement takes_images = True"), ("qwen3_5", "know delta_nets")]
)
def test_backends_other_than_the_native_core_refuse_images(family: str, named: str) -> None:
    model = tiny_vision_model(family)
    with pytest.raises(ModelError, match=f"torch does not {named}"):
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
        ({"mm_tokens_per_image": 9}, r"must be the square of a number that divides the 4 patches of a side"),
        ({"mm_tokens_per_image": 8}, r"mm_tokens_per_image is 8, but must be the square"),
        ({"image_token_index": 320}, r"image_token_index is 320, but must be a whole number"),
    ],
)
def test_configs_that_cannot_be_computed_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    is_gemma = bool({"mm_tokens_per_image", "image_token_index"} & set(change))
    check_refused("gemma3" if is_gemma else "idefics3", change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": {"out_hidden_size": 32}}, r"vision_config.out_hidden_size is 32, but must"),
        (
            {"vision_config": {"fullatt_block_indexes": "all"}},
            r"fullatt_block_indexes is 'all', but must be a list",
        ),
        ({"vision_config": {"window_size": 15}}, r"vision_config.window_size is 15, but must"),
        ({"vision_config": {"patch_size": [8, 8]}}, r"vision_config.patch_size is list, but must"),
        ({"vision_config": {"num_heads": 8}}, r"must be a multiple of 4 for each of 8 heads"),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [2, 2]}}},
            r"mrope_section is list, but the 8 freq",
        ),
        (
            {"text_config": {"rope_parameters": {"mrope_section": None}}},
            r"no rope_parameters.mrope_section, and \[16, 24, 24\], .* are not the 8 frequencies",
        ),
        (
            {"text_config": {"rope_parameters": {"mrope_section": [-1, 9]}}},
            r"but must be a list of whole numbers",
        ),
    ],
)
def test_configs_of_qwen_that_cannot_be_computed_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    check_refused("qwen2_5_vl", change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": {"num_position_embeddings": 24}}, r"embeddings is 24, but must be the square"),
        ({"vision_config": {"deepstack_visual_indexes": [1, 0]}}, r"must name some of 3 layers, ascending"),
        ({"vision_config": {"deepstack_visual_indexes": [3]}}, r"must name some of 3 layers, ascending"),
        ({"text_config": {"num_hidden_layers": 1}}, r"num_hidden_layers is 1, but must be at least 2"),
        ({"text_config": {"rope_parameters": {"mrope_section": [1, 4, 3]}}}, r"must alternate within 8 freq"),
    ],
)
def test_configs_of_qwen3_that_cannot_be_computed_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    check_refused("qwen3_vl", change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": {"num_key_value_heads": 2}}, r"vision_config.num_key_value_heads is 2, but must"),
        ({"vision_config": {"head_dim": 8}}, r"vision_config.head_dim is 8, but must"),
        ({"vision_config": {"hidden_size": 24, "head_dim": 6}}, r"must be a multiple of 4 for each of 4"),
        (
            {"vision_config": {"rope_parameters": {"rope_type": "yarn"}}},
            r"rope_parameters.rope_type is 'yarn'",
        ),
        ({"vision_config": {"rope_parameters": {"rope_theta": 0}}}, r"rope_parameters.rope_theta is 0"),
        ({"vision_config": {"hidden_activation": "swoosh"}}, r"vision_config.hidden_activation is 'swoosh'"),
        ({"vision_config": {"pooling_kernel_size": 1}}, r"vision_config.pooling_kernel_size is 1"),
        ({"vision_config": {"position_embedding_size": 1 << 20}}, r"vision_config.position_embedding_size"),
        ({"vision_config": {"use_clipped_linears": 1}}, r"vision_config.use_clipped_linears is 1"),
        ({"vision_config": {"standardize": "yes"}}, r"vision_config.standardize is 'yes'"),
        ({"vision_config": {"rms_norm_eps": -1}}, r"vision_config.rms_norm_eps is -1"),
        ({"vision_config": 3}, r"vision_config must be an object"),
        ({"image_token_id": 320}, r"image_token_id is 320, but must be a whole number from 0 to 319"),
        ({"text_config": {"pad_token_id": 320}}, r"text_config.pad_token_id is 320"),
        ({"text_config": {"use_bidirectional_attention": "all"}}, r"use_bidirectional_attention is 'all'"),
    ],
)
def test_configs_of_gemma4_that_cannot_be_computed_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    check_refused("gemma4", change, message)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vision_config": {"output_proj_dims": 64}}, r"vision_config.output_proj_dims is 64, but must"),
        ({"vision_config": {"mm_embed_dim": 0}}, r"vision_config.mm_embed_dim is 0"),
        ({"vision_config": {"patch_size": 4096}}, r"vision_config.patch_size is 4096"),
        ({"vision_config": {"mm_posemb_size": 1 << 20}}, r"vision_config.mm_posemb_size"),
        ({"image_token_id": 320}, r"image_token_id is 320"),
    ],
)
def test_configs_of_unified_models_that_cannot_be_computed_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    check_refused("gemma4_unified", change, message)


def test_images_of_unified_models_have_no_more_tokens_than_a_window() -> None:
    """transformers lets them see one another beyond it."""
    config = ours(tiny_vision_model("gemma4_unified")).config.vision
    assert (config.grid_of(48, 64), config.grid_of(16, 208), config.grid_of(656, 16)) == ((3, 4), None, None)
    text = {"use_bidirectional_attention": None}
    assert ours(tiny_vision_model("gemma4_unified", text=text)).config.vision.grid_of(16, 208) == (1, 13)


@pytest.mark.parametrize("size", [(16, 656), (656, 16), (8, 32), (36, 32)])
def test_images_of_gemma4_fit_its_tables_of_positions(size: tuple[int, int]) -> None:
    assert ours(tiny_vision_model("gemma4")).config.vision.grid_of(*size) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"text_config": {"num_experts_per_tok": 7}}, r"num_experts_per_tok is 7, but must .* 1 to 6"),
        ({"text_config": {"mlp_only_layers": "all"}}, r"mlp_only_layers is 'all', but must be a list"),
        ({"text_config": {"model_type": "qwen3_vl_text"}}, r"text_config.model_type is 'qwen3_vl_text'"),
        ({"vision_config": {"deepstack_visual_indexes": [3]}}, r"must name some of 3 layers, ascending"),
    ],
)
def test_configs_of_qwen3_mixtures_that_cannot_be_computed_are_refused_by_name(
    change: dict[str, Any], message: str
) -> None:
    check_refused("qwen3_vl_moe", change, message)


@pytest.mark.parametrize("moe_size", [48, 64, 32])
def test_experts_of_one_tensor_may_have_the_inputs_or_the_outputs_first(moe_size: int) -> None:
    """Also where one of the two tensors has both shapes at once. Published files have the inputs first."""
    model = tiny_vision_model("qwen3_vl_moe", text={"moe_intermediate_size": moe_size})
    config, tokens = config_json(model), list(range(20))
    rows = model.state_dict()
    columns = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in rows.items()
    }
    first, *others = (
        Stepper(build_model(config, DictWeights(tensors))).step({"a": tokens})["a"]
        for tensors in (tensors_of(model), rows, columns)
    )
    assert all(torch.equal(first, other) for other in others)


def test_older_files_have_the_decoders_fields_next_to_the_whole_models() -> None:
    config = config_json(tiny_vision_model("qwen2_5_vl"))
    text = config["text_config"]
    rope = text.pop("rope_parameters")
    older = {**text, **{key: value for key, value in config.items() if key != "text_config"}}
    older["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    older["rope_theta"] = rope["rope_theta"]
    text["rope_parameters"] = rope
    assert DecoderConfig.from_json(older) == DecoderConfig.from_json(config)


def check_refused(family: str, change: dict[str, Any], message: str) -> None:
    config = config_json(tiny_vision_model(family))
    for key, value in change.items():
        is_part = isinstance(value, dict) and isinstance(config[key], dict)
        config[key] = {**config[key], **value} if is_part else value
    with pytest.raises(ModelError, match=message):
        DecoderConfig.from_json(config)


PACKED: dict[str, dict[str, Any]] = {
    "packed": {},
    "tiers": {"tiers": TierOptions(draft_bits=3)},
    "int8": {"quantize": QuantizeOptions(8)},
    "int4": {"quantize": QuantizeOptions(4)},
}


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        *(("idefics3", kind) for kind in PACKED),
        ("llava", "tiers"),
        ("llava_next", "int4"),
        ("llava_onevision", "tiers"),
        ("llava_onevision", "int4"),
        ("gemma3", "tiers"),
        ("gemma3", "int4"),
        ("gemma4", "tiers"),
        ("gemma4", "int4"),
        ("gemma4_unified", "tiers"),
        ("gemma4_unified", "int4"),
        ("qwen2_5_vl", "tiers"),
        ("qwen2_5_vl", "int4"),
        ("qwen3_vl", "tiers"),
        ("qwen3_vl_moe", "tiers"),
        ("qwen3_vl_moe", "int4"),
        ("qwen3_5", "int4"),
        ("qwen3_5_moe", "packed"),
    ],
)
def test_a_packed_tower_computes_while_weights_arrive(tmp_path: Path, family: str, kind: str) -> None:
    """The rows of images, and the logits, are those of a load that has ended; the tower is as it was."""
    model = tiny_vision_model(family, dtype=torch.bfloat16, text={"intermediate_size": 128})
    model.save_pretrained(tmp_path / "plain")
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
