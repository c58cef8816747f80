"""Models that transcribe sound compute what transformers does: the rows of windows, and the logits behind them."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.models import DictWeights, build_model, torch_model
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

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.runtime.engine.sequence import Lane
from teneral.runtime.errors import ModelError
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.step.batch import Epoch, Rows, build_batch, join, select
from teneral.runtime.step.images import PromptImage, SoundAttention
from teneral.runtime.step.requests import GenerationRequest
from teneral.runtime.step.state import SamplingState
from teneral.runtime.weights import StreamedWeights

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


def forward(decoder: Any, kv: Any, *parts: Rows) -> np.ndarray:
    return decoder.forward(build_batch(parts, 4), kv)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KVKind)
def test_bits_depend_on_no_company_and_no_chunks(dtype: torch.dtype, kind: KVKind) -> None:
    decoder = ours(tiny_speech_model(dtype=dtype))
    kv = decoder.new_kv(48, 4, kind=kind)
    windows = [encoded(decoder, seed=seed)[0] for seed in (0, 1)]
    lanes = [
        lane_of(PROMPT, tuple(range(at, at + 16)), window)
        for at, window in ((0, windows[0]), (16, windows[1]), (32, windows[0]))
    ]
    end, num = len(PROMPT), len(TEXT)
    alone = forward(decoder, kv, Rows(lanes[0], PROMPT, 0, end, num))
    other = forward(decoder, kv, Rows(lanes[1], PROMPT, 0, end, num))
    assert not np.array_equal(alone, other)
    together = [Rows(lanes[1], PROMPT, 0, end, num), Rows(lanes[2], PROMPT, 0, end, num)]
    assert (forward(decoder, kv, *together) == np.concatenate([other, alone])).all()
    # By chunks, of which one ends within the sound, and one has some of it and of the text.
    ends = (13, 49, 53, 54, end)
    parts = []
    for first, stop in zip((0, *ends), ends, strict=False):
        made = forward(
            decoder,
            kv,
            Rows(lanes[2], PROMPT, first, stop, min(stop - first, max(0, stop - NUM_PLACES))),
            Rows(lanes[1], PROMPT, end - 1, end, 1),
        )
        assert (made[-1] == other[-1]).all()
        parts.append(made[:-1])
    assert (np.concatenate(parts) == alone).all()


@torch.no_grad()
@pytest.mark.parametrize("kind", KVKind)
def test_attention_over_sound_is_that_of_transformers(kind: KVKind) -> None:
    model, heads = tiny_speech_model(), [(0, 1), (2, 0), (2, 1)]
    decoder = ours(model)
    window, features = encoded(decoder)
    made = model(
        input_features=features, decoder_input_ids=torch.tensor([TEXT]), output_attentions=True
    ).cross_attentions
    expected = np.stack([made[layer][0, head].numpy() for layer, head in heads])

    def attended(*ends: int) -> np.ndarray:
        window.attention = SoundAttention(heads, NUM_PLACES, len(TEXT))
        kv, lane = decoder.new_kv(48, 4, kind=kind), lane_of(PROMPT, tuple(range(16)), window)
        for first, end in zip((0, *ends), (*ends, len(PROMPT)), strict=True):
            other = Rows(
                lane_of(PROMPT, tuple(range(16, 32)), encoded(decoder)[0]), PROMPT, 0, len(PROMPT), 1
            )
            decoder.forward(build_batch([other, Rows(lane, PROMPT, first, end, 1)], 4), kv)
        return np.stack(list(window.attention.shares()))

    alone = attended()
    np.testing.assert_allclose(alone, expected, atol=3e-4 if kind is KVKind.MODEL else 0.03)
    assert (attended(20, 53, 54) == alone).all()


def test_passes_with_sound_are_joined_and_divided() -> None:
    decoder = ours(tiny_speech_model())
    kv = decoder.new_kv(32, 4)
    end, num = len(PROMPT), len(TEXT)
    parts = [
        build_batch([Rows(lane_of(PROMPT, blocks, encoded(decoder, seed=seed)[0]), PROMPT, 0, end, num)], 4)
        for seed, blocks in ((0, tuple(range(16))), (1, tuple(range(16, 32))))
    ]
    expected = [decoder.forward(part, kv) for part in parts]
    assert (decoder.forward(join(parts), kv) == np.concatenate(expected)).all()
    assert (decoder.forward(select(join(parts), [1])[0], kv) == expected[1]).all()
    under_way = decoder.begin(join(parts), kv)
    under_way.advance()
    left = under_way.without({0})
    while not left.is_done:
        left.advance()
    assert (left.logits == expected[1]).all()


def test_tokens_without_sound_are_refused() -> None:
    decoder = ours(tiny_speech_model())
    lane = lane_of(TEXT, tuple(range(8)))
    with pytest.raises(ValueError, match="first 50 tokens must be an encoder's rows"):
        forward(decoder, decoder.new_kv(8, 4), Rows(lane, TEXT, 0, len(TEXT), 1))


def test_other_backends_refuse_sound() -> None:
    model = tiny_speech_model()
    with pytest.raises(ModelError, match="torch does not implement source_len = 50"):
        torch_model(config_json(model), DictWeights(tensors_of(model)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"d_model": 0}, "d_model is 0, but must be a whole number"),
        ({"encoder_attention_heads": 5}, "encoder_attention_heads is 5, but must divide d_model, 64"),
        ({"decoder_attention_heads": 7}, "num_attention_heads, 7"),
        ({"max_source_positions": 1 << 20}, "max_source_positions is 1048576, but must"),
        ({"max_source_positions": 49}, "embed_positions.weight has shape"),
        ({"num_mel_bins": 17}, "conv1.weight has shape"),
        ({"activation_function": "swoosh"}, "activation_function is 'swoosh'"),
        ({"encoder_layers": None}, "config.json has no encoder_layers"),
        ({"decoder_ffn_dim": True}, "decoder_ffn_dim is True, but must"),
        # Next to it is num_hidden_layers, which counts the encoder's.
        ({"decoder_layers": None}, "config.json has no decoder_layers or num_hidden_layers"),
        (
            {"architectures": ["WhisperForAudioClassification"]},
            "architecture 'WhisperForAudioClassification'",
        ),
    ],
)
def test_configs_that_cannot_be_computed_are_refused_by_name(change: dict[str, Any], message: str) -> None:
    model = tiny_speech_model()
    with pytest.raises(ModelError, match=message):
        build_model({**config_json(model), **change}, DictWeights(tensors_of(model)))


@pytest.mark.parametrize("kind", ["plain", "packed", "int8", "int4"])
def test_packed_models_compute_while_they_arrive(kind: str, tmp_path: Path) -> None:
    model = tiny_speech_model(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    if kind != "plain":
        bits = {"int8": 8, "int4": 4}.get(kind)
        quantize = None if bits is None else QuantizeOptions(bits)
        pack(open_source(str(tmp_path / "plain")), open_store(str(tmp_path / kind)), quantize=quantize)
    source = open_source(str(tmp_path / kind))
    manifest = open_artifact(source)
    with closing(source), WeightLoad(source, manifest, options=LoadOptions()) as load:
        for group in manifest.groups:
            load.slab(group.index)[:] = 0xFF
        decoder = build_model(json.loads(read_file(source, manifest, "config.json")), StreamedWeights(load))
        load.start()
        window, _ = encoded(decoder)
        lane = lane_of(PROMPT, tuple(range(16)), window)
        logits = forward(decoder, decoder.new_kv(16, 4), Rows(lane, PROMPT, 0, len(PROMPT), len(TEXT)))
    exact = ours(model)
    expected = forward(exact, exact.new_kv(16, 4), Rows(lane, PROMPT, 0, len(PROMPT), len(TEXT)))
    if kind in ("plain", "packed"):
        assert (logits == expected).all()
    else:
        assert 0 < np.abs(logits - expected).max() < (1.0 if kind == "int8" else 12.0)
