"""Encoders embed texts as transformers and sentence-transformers do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.decoding import prompt_of
from tests.support.models import DictWeights, WaitedGate, build_model, embed, torch_model
from tests.support.tiny_models import ENCODERS, config_json, tensors_of, tiny_model

from teneral.runtime.errors import ContextLengthError, RequestError
from teneral.runtime.models.encoder import MAX_BATCH_TOKENS, Encoder, batches_by_length

POOLING = {"mean": {"pooling_mode_mean_tokens": True}, "cls": {"pooling_mode_cls_token": True}}
MODULES = [
    {"type": "sentence_transformers.models.Transformer"},
    {"type": "sentence_transformers.models.Pooling"},
]
NORMALIZE = {"type": "sentence_transformers.models.Normalize"}


def both(
    family: str,
    mode: str = "mean",
    *,
    normalize: bool = False,
    dtype: torch.dtype = torch.float32,
    **overrides: Any,
) -> tuple[Any, Encoder]:
    oracle = tiny_model(family, dtype=dtype, **overrides)
    encoder = torch_model(
        config_json(oracle),
        DictWeights(tensors_of(oracle)),
        modules=[*MODULES, NORMALIZE] if normalize else MODULES,
        pooling=POOLING[mode],
    )
    assert isinstance(encoder, Encoder)
    return oracle, encoder


@torch.no_grad()
def oracle_embedding(
    oracle: Any, tokens: Sequence[int], mode: str, *, normalize: bool = False
) -> torch.Tensor:
    """One text at a time, so that nothing is padded."""
    states = oracle(input_ids=torch.tensor([tokens])).last_hidden_state[0].float()
    pooled = states[0] if mode == "cls" else states.mean(0)
    return pooled / pooled.norm() if normalize else pooled


def texts(*lengths: int) -> list[list[int]]:
    """Texts without the padding token, which RoBERTa's positions would skip."""
    return [[5 + token for token in prompt_of(length)] for length in lengths]


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("mode", POOLING)
@pytest.mark.parametrize("normalize", [True, False])
def test_a_batch_of_different_lengths_gives_the_oracles_embeddings_in_order(family, mode, normalize):
    oracle, encoder = both(family, mode, normalize=normalize)
    lists = texts(7, 90, 1, 33, 90, 2)

    ours = embed(encoder, lists)

    expected = torch.stack([oracle_embedding(oracle, tokens, mode, normalize=normalize) for tokens in lists])
    assert ours.dtype is torch.float32
    torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "overrides", [{"hidden_act": "gelu_new"}, {"hidden_act": "relu"}, {"layer_norm_eps": 1e-2}]
)
def test_variants_of_bert_give_the_oracles_embeddings(overrides):
    oracle, encoder = both("bert", **overrides)
    [tokens] = texts(40)

    torch.testing.assert_close(
        embed(encoder, [tokens])[0], oracle_embedding(oracle, tokens, "mean"), atol=1e-4, rtol=1e-4
    )


def test_bf16_embeddings_point_where_the_oracles_do():
    oracle, encoder = both("bert", dtype=torch.bfloat16)
    [tokens] = texts(40)

    ours, theirs = embed(encoder, [tokens])[0], oracle_embedding(oracle, tokens, "mean")

    assert torch.cosine_similarity(ours, theirs, dim=0) > 0.999


def test_names_from_tensorflow_are_understood():
    oracle, encoder = both("bert")
    renamed = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for name, tensor in tensors_of(oracle).items()
    }
    old = torch_model(config_json(oracle), DictWeights(renamed), modules=MODULES, pooling=POOLING["mean"])

    assert torch.equal(embed(old, texts(9)), embed(encoder, texts(9)))


def test_each_gate_is_asked_once_a_batch_before_its_layer():
    oracle = tiny_model("bert")
    log: list[int] = []

    class Recording(DictWeights):
        def gate(self, names):
            number = len(log_of_gates)
            log_of_gates.append(list(names))
            return WaitedGate(lambda: log.append(number))

    log_of_gates: list[list[str]] = []
    encoder = build_model(config_json(oracle), Recording(tensors_of(oracle)))
    assert log == []

    encoder.embed(texts(5, 6))

    assert log == [0, 1, 2, 3]
    assert any("word_embeddings" in name for name in log_of_gates[0])
    assert all("encoder.layer.2." in name for name in log_of_gates[3])


def test_no_texts_give_no_embeddings():
    _, encoder = both("bert")

    assert encoder.embed([]).shape == (0, 64)


def test_a_text_may_fill_the_position_table_and_not_more():
    _, encoder = both("roberta")
    limit = encoder.config.max_tokens
    assert embed(encoder, texts(limit)).isfinite().all()

    with pytest.raises(ContextLengthError, match=f"input 1 has {limit + 1} tokens"):
        encoder.embed(texts(3, limit + 1))


@pytest.mark.parametrize("tokens", [[], [320], [-1], [5, 10**30]])
def test_invalid_texts_are_refused(tokens):
    _, encoder = both("bert")

    with pytest.raises(RequestError, match="input 1") as caught:
        encoder.embed([[5], tokens])
    assert caught.value.param == "input"


@given(lengths=st.lists(st.integers(1, 2 * MAX_BATCH_TOKENS), max_size=40))
def test_batches_hold_every_text_once_and_stay_within_their_bound(lengths):
    batches = batches_by_length(lengths)

    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        padded = len(batch) * max(lengths[index] for index in batch)
        assert len(batch) == 1 or padded <= MAX_BATCH_TOKENS
