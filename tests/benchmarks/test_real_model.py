"""The model of `benchmarks.int4`: another order of columns is no other function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.real_model import shuffle
from tests.support.decoding import oracle_logits, prompt_of
from tests.support.tiny_models import tensors_of, tiny_model


@pytest.fixture
def model() -> Any:
    """With embeddings that are the head, whose columns are shuffled with all others, and norms that differ."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": True}
    model = tiny_model("llama", intermediate_size=96, **shape)
    for name, tensor in model.named_parameters():
        if name.endswith("norm.weight"):
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return model


def shuffled(model: Any) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model's tensors, before and after."""
    tensors = {name: tensor.clone() for name, tensor in tensors_of(model).items() if name != "lm_head.weight"}
    config = {**model.config.to_dict(), "head_dim": model.config.hidden_size // 4}
    return tensors, shuffle(tensors, config)


def test_a_shuffled_model_computes_the_same_with_other_matrices(model):
    prompt = prompt_of(40)
    expected = oracle_logits(model, prompt)

    before, after = shuffled(model)
    assert not any(torch.equal(after[name], before[name]) for name in before)
    model.load_state_dict(after, strict=False)

    torch.testing.assert_close(oracle_logits(model, prompt), expected, atol=1e-4, rtol=1e-4)


def test_every_number_is_there_once(model):
    before, after = shuffled(model)

    for name, tensor in before.items():
        assert torch.equal(after[name].flatten().sort().values, tensor.flatten().sort().values), name
