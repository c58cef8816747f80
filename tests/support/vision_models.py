"""Tiny models that take images, with random weights, made by transformers: the oracle's side of a comparison."""

from __future__ import annotations

import base64
import io
import json
import warnings
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.support.gemma4 import SETTINGS as GEMMA4
from tests.support.tiny_models import save_tiny
from tokenizers import AddedToken, Tokenizer

with warnings.catch_warnings():
    # transformers' own deprecations while it is imported are not ours to answer for
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformers
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.image_processing_pil_llava import LlavaImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor
    from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
    from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
    from transformers.models.llava_onevision.image_processing_pil_llava_onevision import (
        LlavaOnevisionImageProcessorPil,
    )
    from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor

from teneral.runtime.images.processor import TileLayout
from teneral.runtime.step.images import PromptImage

IMAGE_TOKEN = 262
QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5")
DYNAMIC = (*QWEN, "gemma4", "gemma4_unified")  # families whose tiles are images of any size
PLAIN_LEVELS = np.repeat((np.arange(256, dtype=np.float32)[None] / 255 - 0.5) / 0.5, 3, axis=0)

_TEXT = {
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "bos_token_id": 257,
    "eos_token_id": 256,
    "pad_token_id": 256,
}
_VISION = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 8,
}


# Of a text_config and of the whole, where families differ. Windows are shorter than an image with what is before it.
_GEMMA3_TEXT = {
    **_TEXT,
    "model_type": "gemma3_text",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_QWEN_TEXT = {
    **_TEXT,
    "model_type": "qwen2_5_vl_text",
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]},
}
# Windows of 3 x 3 tokens, which no side of an image is a multiple of.
_QWEN_VISION = {
    **{key: value for key, value in _VISION.items() if key != "image_size"},
    "num_hidden_layers": 3,
    "window_size": 48,
    "fullatt_block_indexes": [1],
    "out_hidden_size": 64,
}
_QWEN3_TEXT = {
    **_TEXT,
    "model_type": "qwen3_vl_text",
    "head_dim": 16,
    "num_hidden_layers": 3,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
}
_QWEN3_VISION = {
    **{
        key: value
        for key, value in _QWEN_VISION.items()
        if key not in ("window_size", "fullatt_block_indexes")
    },
    "num_position_embeddings": 25,
    "deepstack_visual_indexes": [0, 1],
}
# A mixture in each layer but the second one
_QWEN3_MOE_TEXT = {
    **_QWEN3_TEXT,
    "model_type": "qwen3_vl_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "mlp_only_layers": [1],
}
# The first layer is a delta net; a quarter of each head turns.
_QWEN35_TEXT = {
    **_TEXT,
    "model_type": "qwen3_5_text",
    "head_dim": 64,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 1e4,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
    },
}
_QWEN35_MOE_TEXT = {
    **_QWEN35_TEXT,
    "model_type": "qwen3_5_moe_text",
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 96,
}
_QWEN35_VISION = {key: value for key, value in _QWEN3_VISION.items() if key != "deepstack_visual_indexes"}
# Windows are shorter than an image with what is before it, and than the tokens of some.
_GEMMA4_TEXT = {
    **_TEXT,
    **GEMMA4["gemma4_text"],
    "model_type": "gemma4_text",
    "sliding_window": 6,
    "use_bidirectional_attention": "vision",
}
_GEMMA4_VISION = {
    **{key: value for key, value in _VISION.items() if key != "image_size"},
    "num_key_value_heads": 4,
    "head_dim": 12,
    "pooling_kernel_size": 2,
    "position_embedding_size": 40,
    "use_clipped_linears": True,
    "standardize": True,
}
_UNIFIED_TEXT = {
    **_TEXT,
    **GEMMA4["gemma4_unified_text"],
    "num_hidden_layers": 3,
    "model_type": "gemma4_unified_text",
    "use_bidirectional_attention": "vision",
}
_UNIFIED_VISION = {
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "mm_embed_dim": 48,
    "output_proj_dims": 48,
    "mm_posemb_size": 40,
}
_GEMMA4_TOKENS = {
    "image_token_id": IMAGE_TOKEN,
    "video_token_id": 319,
    "audio_token_id": 318,
    "audio_config": None,
}
_QWEN_TOKENS = {"image_token_id": IMAGE_TOKEN, "video_token_id": 319}
# LLaVA-OneVision's sizes of grids, and its files.
ONEVISION = {
    "size": {"height": 32, "width": 32},
    "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32], [64, 64], [32, 96], [96, 64]],
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
ONEVISION_PROCESSOR = {
    "processor_class": "LlavaOnevisionProcessor",
    "num_image_tokens": 16,
    "vision_aspect_ratio": "anyres_max_2",
}


def theirs_of_onevision(num_tokens: int = 16, aspect_ratio: str = "anyres_max_2", **settings: Any) -> Any:
    """transformers' processor with these settings, without a tokenizer."""
    made = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
    made.image_processor = LlavaOnevisionImageProcessorPil(**settings)
    made.image_token, made.vision_feature_select_strategy = "<image>", "full"
    made.num_image_tokens, made.vision_aspect_ratio = num_tokens, aspect_ratio
    return made


# Those of LLaVA 1.5 and LLaVA-NeXT: tiles of 16 tokens, with a class that is left out.
CLIP = {
    "size": {"shortest_edge": 32},
    "crop_size": {"height": 32, "width": 32},
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
NEXT = {**CLIP, "image_grid_pinpoints": ONEVISION["image_grid_pinpoints"]}
LLAVA_PROCESSOR = {
    "processor_class": "LlavaProcessor",
    "patch_size": 8,
    "num_additional_image_tokens": 1,
    "vision_feature_select_strategy": "default",
}


def theirs_of_llava(family: str, *, names: dict[str, Any] | None = None, **settings: Any) -> Any:
    """The processor of LLaVA 1.5 or LLaVA-NeXT in transformers: with `do_pad` the former's own."""
    own = LlavaImageProcessorPil if "do_pad" in settings else CLIPImageProcessorPil
    kinds = {"llava": (LlavaProcessor, own), "llava_next": (LlavaNextProcessor, LlavaNextImageProcessorPil)}
    processor, of_images = kinds[family]
    made = processor.__new__(processor)
    made.image_processor, made.image_token = of_images(**settings), "<image>"
    for key, value in {**LLAVA_PROCESSOR, **(names or {})}.items():
        setattr(made, key, value)
    return made


_CLIP_VISION = {**_VISION, "model_type": "clip_vision_model", "num_hidden_layers": 3}
_LLAVA_WHOLE = {"image_token_index": IMAGE_TOKEN}
_NEXT_WHOLE = {**_LLAVA_WHOLE, "image_grid_pinpoints": NEXT["image_grid_pinpoints"]}
_ONEVISION_VISION = {**_VISION, "model_type": "siglip_vision_model", "vision_use_head": False}
_ONEVISION_WHOLE = {
    "image_token_index": IMAGE_TOKEN,
    "video_token_index": 319,
    "image_grid_pinpoints": ONEVISION["image_grid_pinpoints"],
    "vision_aspect_ratio": "anyres_max_2",
}
_TIED = ("gemma3", "gemma4", "gemma4_unified", "qwen3_5")  # families whose embeddings are the head's matrix
# Of a text_config, a vision_config and the whole.
_FAMILIES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "idefics3": (_TEXT, _VISION, {"image_token_id": IMAGE_TOKEN, "scale_factor": 2}),
    "llava": (_TEXT, _CLIP_VISION, _LLAVA_WHOLE),
    "llava_next": ({**_TEXT, "model_type": "mistral"}, _CLIP_VISION, _NEXT_WHOLE),
    "llava_onevision": ({**_TEXT, "model_type": "qwen2"}, _ONEVISION_VISION, _ONEVISION_WHOLE),
    "gemma3": (_GEMMA3_TEXT, _VISION, {"image_token_index": IMAGE_TOKEN, "mm_tokens_per_image": 4}),
    "gemma4": (_GEMMA4_TEXT, _GEMMA4_VISION, _GEMMA4_TOKENS),
    "gemma4_unified": (_UNIFIED_TEXT, _UNIFIED_VISION, _GEMMA4_TOKENS),
    "qwen2_5_vl": (_QWEN_TEXT, _QWEN_VISION, _QWEN_TOKENS),
    "qwen3_vl": (_QWEN3_TEXT, _QWEN3_VISION, _QWEN_TOKENS),
    "qwen3_vl_moe": (_QWEN3_MOE_TEXT, _QWEN3_VISION, _QWEN_TOKENS),
    "qwen3_5": (_QWEN35_TEXT, _QWEN35_VISION, _QWEN_TOKENS),
    "qwen3_5_moe": (_QWEN35_MOE_TEXT, _QWEN35_VISION, _QWEN_TOKENS),
}


def tiny_vision_model(
    family: str = "idefics3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vision: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """A transformers model of one of `VISION_FAMILY_MODULES`. No weight is left at 0 or 1."""
    text, tower, whole = _FAMILIES.get(family, _FAMILIES["idefics3"])
    settings = {
        **whole,
        "text_config": {**text, **overrides.pop("text", {})},
        "vision_config": {**tower, **(vision or {})},
        "tie_word_embeddings": family in _TIED,
        **overrides,
    }
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = ("norm" in name.lower() or "_ln" in name) and name.endswith("weight")
            parameter.copy_(1.0 + 0.2 * noise if is_scale else 0.15 * noise)
        # Of Gemma 4's tower: bounds that clip some numbers, and what means are standardised by.
        for name, buffer in model.named_buffers():
            noise = torch.rand(buffer.shape, generator=generator)
            if name.endswith(("_min", "_max")):
                buffer.copy_((0.8 + noise) * (-1 if name.endswith("_min") else 1))
            elif name.endswith(("std_bias", "std_scale")):
                buffer.copy_(0.5 + noise)
    return model.to(dtype).eval()


def random_tiles(num: int, size: int = 32, width: int = 0, *, seed: int = 0) -> np.ndarray:
    """(num, 3, size, width or size) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (num, 3, size, width or size), dtype=np.uint8)


def prompt_with(*runs: int | list[int]) -> list[int]:
    """Tokens, in which a number stands for a run of image tokens."""
    return [token for run in runs for token in ([IMAGE_TOKEN] * run if isinstance(run, int) else list(run))]


def image_at(
    places: list[int], tiles: np.ndarray, *, digest: bytes = b"one", layout: TileLayout | None = None
) -> PromptImage:
    return PromptImage(digest, tiles, PLAIN_LEVELS, np.array(places, np.int64), layout)


def oracle_inputs(
    model: Any, prompt: Sequence[int], *tiles: np.ndarray, sizes: Sequence[tuple[int, int]] = ()
) -> dict[str, torch.Tensor]:
    """The arguments of a transformers model for a prompt with these tiles. Of LLaVA-OneVision, those of images of these
    sizes (height, width), or else, if there are several, one image each.
    """
    tokens, dtype = torch.tensor([list(prompt)]), next(model.parameters()).dtype
    types = (tokens == IMAGE_TOKEN).long()
    if model.config.model_type.removesuffix("_moe") in DYNAMIC:
        size = model.config.vision_config.patch_size
        images = [image for own in tiles for image in pixel_values(own, dtype)[0]]
        if model.config.model_type.startswith("gemma4"):
            size = getattr(model.config.vision_config, "model_patch_size", size)
            return {"input_ids": tokens, "mm_token_type_ids": types, **_patches_of_gemma4(images, size)}
        return {
            "input_ids": tokens,
            "pixel_values": torch.cat([_patches(image, size) for image in images]),
            "image_grid_thw": torch.tensor(
                [[1, *(side // size for side in image.shape[1:])] for image in images]
            ),
            "mm_token_type_ids": types,
        }
    values = pixel_values(np.concatenate(tiles), dtype)
    if model.config.model_type == "llava_onevision":
        num = len(values[0])
        more = {} if sizes else {"batch_num_images": torch.tensor([num])}
        image_sizes = torch.tensor(sizes or [(32, 32)] * num)
        return {"input_ids": tokens, "pixel_values": values[0], "image_sizes": image_sizes, **more}
    if model.config.model_type == "llava_next":
        padded = torch.nn.utils.rnn.pad_sequence(
            [pixel_values(own, dtype)[0] for own in tiles], batch_first=True
        )
        return {"input_ids": tokens, "pixel_values": padded, "image_sizes": torch.tensor(sizes)}
    if model.config.model_type == "llava":
        return {"input_ids": tokens, "pixel_values": values[0]}
    if model.config.model_type != "gemma3":
        return {"input_ids": tokens, "pixel_values": values}
    return {"input_ids": tokens, "pixel_values": values[0], "token_type_ids": types}


def _patches(image: torch.Tensor, size: int) -> torch.Tensor:
    """(P, 3 * 2 * size ** 2) of an image (3, height, width), by squares of 2 by 2 patches, each patch twice."""
    _, height, width = image.shape
    split = image.reshape(3, height // size // 2, 2, size, width // size // 2, 2, size)
    patches = split.permute(1, 4, 2, 5, 0, 3, 6).reshape(-1, 3, 1, size, size)
    return patches.repeat(1, 1, 2, 1, 1).reshape(len(patches), -1)


def _patches_of_gemma4(images: Sequence[torch.Tensor], size: int) -> dict[str, torch.Tensor]:
    """Patches with channels last, and their columns and rows."""
    patches, places = [], []
    for image in images:
        rows, columns = (side // size for side in image.shape[1:])
        split = image.reshape(3, rows, size, columns, size).permute(1, 3, 2, 4, 0)
        patches.append(split.reshape(rows * columns, -1))
        grid = torch.meshgrid(torch.arange(columns), torch.arange(rows), indexing="xy")
        places.append(torch.stack(grid, dim=-1).reshape(-1, 2))
    pad = partial(torch.nn.utils.rnn.pad_sequence, batch_first=True)
    return {"pixel_values": pad(patches), "image_position_ids": pad(places, padding_value=-1)}


def pixel_values(tiles: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(1, N, 3, size, size), as the oracle of Idefics 3 takes tiles."""
    own = np.stack([PLAIN_LEVELS[channel][tiles[:, channel]] for channel in range(3)], axis=1)
    return torch.from_numpy(own)[None].to(dtype)


# Of the tokenizer; the third one is IMAGE_TOKEN.
MARKS = {
    "idefics3": ("<fake_token_around_image>", "<global-img>", "<image>", "\n\n"),
    "gemma3": ("<start_of_image>", "<end_of_image>", "<image_soft_token>", "\n\n"),
    "gemma4": ("<|image>", "<image|>", "<|image|>", "\n\n"),
    "qwen2_5_vl": ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "\n\n"),
}
MARKS["llava"] = MARKS["llava_next"] = MARKS["llava_onevision"] = MARKS["idefics3"]
MARKS["qwen3_vl"] = MARKS["qwen3_5"] = MARKS["qwen2_5_vl"]
# As SmolVLM's: parts one after the other, and none of a message whose content is a text.
TEMPLATE = (
    "<|start|>{% for message in messages %}<|{{ message.role }}|>{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>{% endif %}{% endfor %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PREPROCESSOR = {
    "image_processor_type": "Idefics3ImageProcessor",
    "size": {"longest_edge": 64},
    "max_image_size": {"longest_edge": 32},
}
PROCESSOR = {"processor_class": "SmolVLMProcessor", "image_seq_len": 4}
# What the template writes for an image, preprocessor_config.json and processor_config.json.
FILES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "idefics3": ("<image>", PREPROCESSOR, PROCESSOR),
    "gemma3": (
        "<start_of_image>",
        {"size": {"height": 32, "width": 32}, "do_pan_and_scan": None},
        {"processor_class": "Gemma3Processor", "image_seq_length": 4},
    ),
    "gemma4": (
        "<|image|>",
        {},
        {
            "processor_class": "Gemma4Processor",
            "image_processor": {
                "patch_size": 8,
                "pooling_kernel_size": 2,
                "max_soft_tokens": 70,
                "do_normalize": True,
                "image_mean": [0.5] * 3,
                "image_std": [0.5] * 3,
            },
        },
    ),
    "qwen2_5_vl": (
        "<|vision_start|><|image_pad|><|vision_end|>",
        {
            "patch_size": 8,
            "min_pixels": 1024,
            "max_pixels": 8192,
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
            "processor_class": "Qwen2_5_VLProcessor",
        },
        {},
    ),
}
FILES["llava"] = ("<image>", CLIP, LLAVA_PROCESSOR)
FILES["llava_next"] = ("<image>", NEXT, {**LLAVA_PROCESSOR, "processor_class": "LlavaNextProcessor"})
FILES["llava_onevision"] = ("<image>", ONEVISION, ONEVISION_PROCESSOR)
FILES["qwen3_vl"] = FILES["qwen3_5"] = (*FILES["qwen2_5_vl"][:2], {"processor_class": "Qwen3VLProcessor"})


def save_vision(directory: Path, family: str = "idefics3", *, model: Any = None) -> Any:
    """Write a model's directory as Hugging Face does, with the files of its processor; returns the model."""
    model = model or tiny_vision_model(family, text={"max_position_embeddings": 4096})
    placeholder, preprocessor, processor = FILES[family]
    save_tiny("llama", directory)  # for the tokenizer
    model.save_pretrained(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*MARKS[family], *rows)])
    assert tokenizer.token_to_id(MARKS[family][2]) == IMAGE_TOKEN
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "chat_template": TEMPLATE.replace("<image>", placeholder)}
    if family == "gemma4":
        settings |= dict(zip(("boi_token", "eoi_token", "image_token"), MARKS[family], strict=False))
    for name, content in (
        ("tokenizer_config.json", settings),
        ("preprocessor_config.json", preprocessor),
        ("processor_config.json", processor),
    ):
        (directory / name).write_text(json.dumps(content))
    return model


def picture(width: int, height: int, *, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG") -> bytes:
    file = io.BytesIO()
    image.save(file, kind)
    return file.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
