"""Models that transcribe sound compute what transformers does: the rows of windows, and the logits behind them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models import DictWeights, build_model
from tests.support.speech_models import (
    LANGUAGES,
    NO_TIMES,
    NUM_PLACES,
    START,
    TASKS,
    features_of,
    noise,
    tiny_speech_model,
    window_of,
)
from tests.support.tiny_models import config_json, tensors_of

from teneral.runtime.engine.sequence import Lane
from teneral.runtime.step.batch import Epoch, Rows, build_batch
from teneral.runtime.step.images import PromptImage
from teneral.runtime.step.requests import GenerationRequest
from teneral.runtime.step.state import SamplingState

TEXT = [START, LANGUAGES["<|de|>"], TASKS["transcribe"], NO_TIMES, 104, 101, 108, 108, 111, 33, 9]
PROMPT = [0] * NUM_PLACES + TEXT


def ours(model: Any) -> Any:
    return build_model(config_json(model), DictWeights(tensors_of(model)))


def rows_of(decoder: Any, features: Any) -> np.ndarray:
    (rows,) = decoder.vision.encode(np.ascontiguousarray(features, np.float32))
    return rows


def encoded(decoder: Any, seconds: float = 0.7, *, seed: int = 0) -> tuple[PromptImage, torch.Tensor]:
    features = features_of(noise(seconds, seed=seed))
    window = window_of(features, digest=bytes([seed]))
    window.rows = rows_of(decoder, features)
    return window, features


def lane_of(prompt: list[int], blocks: tuple[int, ...], *images: PromptImage) -> Lane:
    request = GenerationRequest("a", tuple(prompt))
    lane = Lane(Epoch.EXACT, list(prompt), SamplingState(request), None, images)
    lane.blocks = blocks
    return lane


@torch.no_grad()
@pytest.mark.parametrize(
    "overrides", [{}, {"activation_function": "relu", "num_mel_bins": 16, "encoder_layers": 1}]
)
def test_rows_of_sound_are_those_of_transformers(overrides: dict[str, Any]) -> None:
    model = tiny_speech_model(**overrides)
    features = features_of(noise(0.6))
    expected = model.model.encoder(features).last_hidden_state[0].numpy()
    np.testing.assert_allclose(rows_of(ours(model), features), expected, atol=2e-4)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_behind_sound_are_those_of_transformers(dtype: torch.dtype) -> None:
    model = tiny_speech_model(dtype=dtype)
    decoder = ours(model)
    window, features = encoded(decoder)
    expected = model.float()(input_features=features, decoder_input_ids=torch.tensor([TEXT])).logits[0]
    batch = build_batch(
        [Rows(lane_of(PROMPT, tuple(range(16)), window), PROMPT, 0, len(PROMPT), len(TEXT))], 4
    )
    logits = decoder.forward(batch, decoder.new_kv(16, 4))
    atol = 0.3 if dtype is torch.bfloat16 else 3e-4
    np.testing.assert_allclose(logits, expected.numpy(), atol=atol)
