"""Rotary embedding: what parity with transformers does not show."""

from __future__ import annotations

import pytest
import torch
from msgspec.structs import replace
from tests.support.decoding import Stepper, oracle_logits, prompt_of
from tests.support.models import DictWeights, torch_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.runtime.backends.torch.layers import RopeTable, rotate_
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.models.rope_config import RopeConfig, RopeType
from teneral.runtime.models.rotary import Rotary

PLAIN = Rotary.of(RopeConfig(RopeType.DEFAULT, 10_000.0, 8, 4_096, 4_096), 4_096)


def test_a_rotation_turns_each_pair_by_position_times_frequency():
    x = torch.randn(3, 2, 8)
    positions = torch.tensor([0, 5, 700])
    frequencies = torch.tensor(PLAIN.frequencies)
    turned = x.clone()

    rotate_(turned, *RopeTable(PLAIN, 4_096, torch.float32).rows(positions, 701))

    for row, position in enumerate(positions.tolist()):
        pairs = torch.complex(x[row, :, :4], x[row, :, 4:]) * torch.exp(1j * position * frequencies)
        torch.testing.assert_close(turned[row], torch.cat((pairs.real, pairs.imag), -1), atol=1e-4, rtol=1e-4)


def test_a_partial_rotation_leaves_the_other_dimensions_alone():
    x = torch.randn(2, 3, 20)
    turned = x.clone()

    rotate_(turned, *RopeTable(PLAIN, 4_096, torch.float32).rows(torch.tensor([3, 4]), 5))

    alone = x[..., :8].clone()
    rotate_(alone, *RopeTable(PLAIN, 4_096, torch.float32).rows(torch.tensor([3, 4]), 5))
    assert torch.equal(turned[..., 8:], x[..., 8:])
    assert torch.equal(turned[..., :8], alone)
    assert not torch.equal(turned[..., :8], x[..., :8])


def test_a_table_that_grew_says_the_same_as_one_made_at_once():
    grown = RopeTable(PLAIN, 4_096, torch.float32)
    grown.rows(torch.tensor([1]), 2)
    positions = torch.tensor([1, 600, 4_095])

    rows = grown.rows(positions, 4_096)

    for ours, expected in zip(
        rows, RopeTable(PLAIN, 4_096, torch.float32).rows(positions, 4_096), strict=True
    ):
        assert torch.equal(ours, expected)


@pytest.mark.parametrize("stretch", [2, 3])
def test_dynamic_scaling_beyond_the_trained_context_matches_a_prefill_of_that_length(stretch, monkeypatch):
    oracle = tiny_model(
        "llama",
        max_position_embeddings=32,
        rope_scaling={"rope_type": "dynamic", "factor": 2.0},
    )
    config = DecoderConfig.from_json(config_json(oracle))
    assert config.max_context == 32
    longer = replace(config, max_context=32 * stretch)
    monkeypatch.setattr(DecoderConfig, "from_json", lambda data: longer)
    prompt = prompt_of(32 * stretch)

    ours = Stepper(torch_model({"model_type": "llama"}, DictWeights(tensors_of(oracle)))).step({"a": prompt})[
        "a"
    ]

    torch.testing.assert_close(ours, oracle_logits(oracle, prompt), atol=1e-4, rtol=1e-4)


def test_a_decoder_with_partial_rotation_runs_and_differs_from_a_full_one(monkeypatch):
    oracle = tiny_model("llama")
    config, weights = config_json(oracle), DictWeights(tensors_of(oracle))
    prompt = {"a": prompt_of(9)}
    full = DecoderConfig.from_json(config)
    partial = replace(full, rope=replace(full.rope, rotary_dim=full.head_dim // 2))

    logits = []
    for each in (full, partial):
        monkeypatch.setattr(DecoderConfig, "from_json", lambda data, chosen=each: chosen)
        logits.append(Stepper(torch_model(config, weights)).step(prompt)["a"])
    full_logits, partial_logits = logits

    assert torch.equal(full_logits[0], partial_logits[0]), "position 0 is not turned at all"
    assert (full_logits[1:] - partial_logits[1:]).abs().max() > 1e-2
