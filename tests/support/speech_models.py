"""Tiny models that transcribe sound, with random weights, made by transformers: the oracle's side of a comparison."""

from __future__ import annotations

import io
import json
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.support.tiny_models import save_tiny
from tokenizers import AddedToken, Tokenizer

with warnings.catch_warnings():
    # transformers' own deprecations while it is imported are not ours to answer for
    warnings.simplefilter("ignore", DeprecationWarning)
    import transformers
    from transformers import WhisperConfig, WhisperFeatureExtractor

from teneral.runtime.step.images import PromptImage

# Bytes are tokens 0 to 255, as the tokenizer of other tiny models has them.
END, START, BEFORE, NO_SPEECH, NO_TIMES = 256, 257, 269, 270, 271
LANGUAGES = {"<|en|>": 260, "<|de|>": 261, "<|fr|>": 262}
TASKS = {"transcribe": 263, "translate": 264}
TIMES_FROM = NO_TIMES + 1
NUM_PLACES = 50  # windows of a second
NUM_TIMES = 51
VOCAB_SIZE = TIMES_FROM + NUM_TIMES
_CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "num_mel_bins": 16,
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_layers": 3,
    "decoder_attention_heads": 2,
    "decoder_ffn_dim": 80,
    "max_source_positions": NUM_PLACES,
    "max_target_positions": 40,
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "bos_token_id": END,
    "pad_token_id": END,
    "suppress_tokens": [],
    "begin_suppress_tokens": [32, END],
}
GENERATION: dict[str, Any] = {
    "decoder_start_token_id": START,
    "eos_token_id": END,
    "bos_token_id": END,
    "pad_token_id": END,
    "is_multilingual": True,
    "lang_to_id": LANGUAGES,
    "task_to_id": TASKS,
    "no_timestamps_token_id": NO_TIMES,
    "prev_sot_token_id": BEFORE,
    "max_initial_timestamp_index": 10,
    "alignment_heads": [[0, 1], [2, 0], [2, 1]],
    "max_length": 40,
    "suppress_tokens": [3, 5, 7, START, BEFORE, NO_SPEECH, *LANGUAGES.values(), *TASKS.values()],
    "begin_suppress_tokens": [32, END],
}


def tiny_speech_model(
    *, seed: int = 0, dtype: torch.dtype = torch.float32, scale: float = 0.15, **overrides: Any
) -> Any:
    """A Whisper of transformers. No weight is left at 0 or 1."""
    config = WhisperConfig(**{**_CONFIG, **overrides})
    model = transformers.AutoModelForSpeechSeq2Seq.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_scale = "norm" in name and name.endswith("weight")
            parameter.copy_(1.0 + 0.2 * noise if is_scale else scale * noise)
    model.generation_config = transformers.GenerationConfig(**GENERATION)
    return model.to(dtype).eval()


def extractor(num_bands: int = 16, window_s: int = 1) -> WhisperFeatureExtractor:
    return WhisperFeatureExtractor(feature_size=num_bands, chunk_length=window_s)


def noise(seconds: float, *, seed: int = 0) -> np.ndarray:
    """Tones that come and go, with noise, at 16 kHz."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * 16_000)) / 16_000
    sound = 0.01 * random.standard_normal(len(times))
    for _ in range(4):
        pitch, begin = random.uniform(100, 3_000), random.uniform(0, seconds)
        sound += 0.2 * np.sin(2 * np.pi * pitch * times) * np.exp(-((times - begin) ** 2) * 20)
    return sound.astype(np.float32)


def features_of(sound: np.ndarray, num_bands: int = 16, window_s: int = 1) -> torch.Tensor:
    """transformers' spectrogram (1, bands, columns): of one window, or of all of a longer sound."""
    is_long = len(sound) > window_s * 16_000
    more: dict[str, Any] = {"truncation": False, "padding": "longest"} if is_long else {}
    made = extractor(num_bands, window_s)(sound, sampling_rate=16_000, return_tensors="pt", **more)
    return made["input_features"]


def window_of(features: Any, *, digest: bytes = b"one") -> PromptImage:
    """A prompt's window of (1, bands, columns)."""
    tiles = np.ascontiguousarray(features, np.float32)
    return PromptImage(digest, tiles, np.zeros((0, 0), np.float32), np.arange(NUM_PLACES, dtype=np.int64))


def save_speech(directory: Path, *, model: Any = None) -> Any:
    """Write a model's directory as Hugging Face does; returns the model."""
    model = model or tiny_speech_model()
    save_tiny("llama", directory)  # for the tokenizer
    model.save_pretrained(directory)
    (directory / "generation_config.json").write_text(json.dumps(GENERATION))
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    marks = [f"<|{number}|>" for number in range(tokenizer.get_vocab_size(), TIMES_FROM)]
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in marks])
    tokenizer.add_tokens(
        [AddedToken(f"<|{number * 0.02:.2f}|>", special=False) for number in range(NUM_TIMES)]
    )
    assert tokenizer.token_to_id("<|0.00|>") == TIMES_FROM
    tokenizer.save(str(directory / "tokenizer.json"))
    preprocessor = {
        "feature_extractor_type": "WhisperFeatureExtractor",
        "processor_class": "WhisperProcessor",
        "feature_size": 16,
        "sampling_rate": 16_000,
        "hop_length": 160,
        "n_fft": 400,
        "chunk_length": 1,
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    settings = {"tokenizer_class": "WhisperTokenizer", "eos_token": "<|end|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


def wav_of(sound: np.ndarray, rate: int = 16_000, *, kind: int = 1, bits: int = 16) -> bytes:
    """A WAV file of (N,) or (N, channels) from -1 to 1, as integers (kind 1) or floats (3)."""
    frames = sound[:, None] if sound.ndim == 1 else sound
    if kind == 3:
        data = frames.astype(f"<f{bits // 8}").tobytes()
    elif bits == 8:
        data = np.clip(np.rint(frames * 128 + 128), 0, 255).astype(np.uint8).tobytes()
    else:
        most = 2 ** (bits - 1)
        wide = np.clip(np.rint(frames.astype(np.float64) * most), -most, most - 1).astype("<i4")
        data = wide.reshape(-1, 1).view(np.uint8)[:, : bits // 8].tobytes()
    frame_bytes = frames.shape[1] * bits // 8
    form = struct.pack("<HHIIHH", kind, frames.shape[1], rate, rate * frame_bytes, frame_bytes, bits)
    body = b"WAVEfmt " + struct.pack("<I", len(form)) + form + b"data" + struct.pack("<I", len(data)) + data
    file = io.BytesIO()
    file.write(b"RIFF" + struct.pack("<I", len(body)) + body)
    return file.getvalue()
