"""Tiny models that take images, with random weights, made by transformers: the oracle's side of a comparison."""

from __future__ import annotations

import base64
import io
import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tests.support.tiny_models import save_tiny
from tokenizers import AddedToken, Tokenizer

with warnings.catch_warnings():
    # transformers' own deprecations while it is imported are not ours to answer for
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformers

from teneral.runtime.step.images import PromptImage

IMAGE_TOKEN = 262
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


def tiny_vision_model(
    family: str = "idefics3",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    vision: dict[str, Any] | None = None,
    **overrides: Any,
) -> Any:
    """A transformers model of one of `VISION_FAMILY_MODULES`. No weight is left at 0 or 1."""
    settings = {
        "image_token_id": IMAGE_TOKEN,
        "scale_factor": 2,
        "text_config": {**_TEXT, **overrides.pop("text", {})},
        "vision_config": {**_VISION, **(vision or {})},
        "tie_word_embeddings": False,
        **overrides,
    }
    config = transformers.AutoConfig.for_model(family, **settings)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = "norm" in name.lower() and name.endswith("weight")
            parameter.copy_(1.0 + 0.2 * noise if is_scale else 0.15 * noise)
    return model.to(dtype).eval()


def random_tiles(num: int, size: int = 32, *, seed: int = 0) -> np.ndarray:
    """(num, 3, size, size) uint8."""
    return np.random.default_rng(seed).integers(0, 256, (num, 3, size, size), dtype=np.uint8)


def prompt_with(*runs: int | list[int]) -> list[int]:
    """Tokens, in which a number stands for a run of image tokens."""
    return [token for run in runs for token in ([IMAGE_TOKEN] * run if isinstance(run, int) else list(run))]


def image_at(places: list[int], tiles: np.ndarray, *, digest: bytes = b"one") -> PromptImage:
    return PromptImage(digest, tiles, PLAIN_LEVELS, np.array(places, np.int64))


def pixel_values(tiles: np.ndarray, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """(1, N, 3, size, size), as the oracle takes tiles."""
    own = np.stack([PLAIN_LEVELS[channel][tiles[:, channel]] for channel in range(3)], axis=1)
    return torch.from_numpy(own)[None].to(dtype)


MARKS = ("<fake_token_around_image>", "<global-img>", "<image>", "\n\n")
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


def save_vision(directory: Path, *, model: Any = None) -> Any:
    """Write a model's directory as Hugging Face does, with the files of its processor; returns the model."""
    model = model or tiny_vision_model(text={"max_position_embeddings": 4096})
    save_tiny("llama", directory)  # for the tokenizer
    model.save_pretrained(directory)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    rows = [f"<row_{row}_col_{column}>" for row in (1, 2) for column in (1, 2)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in (*MARKS, *rows)])
    assert tokenizer.token_to_id("<image>") == IMAGE_TOKEN
    tokenizer.save(str(directory / "tokenizer.json"))
    path = directory / "tokenizer_config.json"
    settings = {**json.loads(path.read_text()), "chat_template": TEMPLATE}
    for name, content in (
        ("tokenizer_config.json", settings),
        ("preprocessor_config.json", PREPROCESSOR),
        ("processor_config.json", PROCESSOR),
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
