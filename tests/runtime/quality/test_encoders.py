"""The figures of an encoder's draft agree with the definitions."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from tests.support.decoding import prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.runtime.errors import ModelError
from teneral.runtime.models.encoder import Encoder
from teneral.runtime.quality.encoders import compare_encoders

SENTENCES = [prompt_of(length) for length in (5, 9, 4, 30, 12, 7, 21)]


def encoder(*, noise: float = 0.0, **broken: float) -> Encoder:
    oracle = tiny_model("bert")
    generator = torch.Generator().manual_seed(2)
    tensors: dict[str, Any] = {
        name: tensor * (1 + noise * torch.randn(tensor.shape, generator=generator))
        for name, tensor in tensors_of(oracle).items()
    }
    for name, value in broken.items():
        tensors[name.replace("__", ".")][0, 0] = value
    model = build_model(config_json(oracle), DictWeights(tensors))
    assert isinstance(model, Encoder)
    return model


def ranks(values: list[float]) -> list[int]:
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(place) for place in range(len(values))]


def test_an_encoder_that_is_compared_with_itself_keeps_everything():
    model = encoder()

    quality = compare_encoders(model, model, SENTENCES)

    assert quality.sentences == 7
    assert quality.worst_cosine == pytest.approx(1.0)
    assert quality.rank_correlation == pytest.approx(1.0)
    assert quality.same_nearest == 1.0


def test_figures_are_those_of_the_definitions():
    draft, exact = encoder(noise=0.15), encoder()
    vectors = [torch.from_numpy(model.embed(SENTENCES)).double() for model in (draft, exact)]
    cosines = torch.cosine_similarity(*vectors, dim=-1).tolist()
    pairs = list(combinations(range(len(SENTENCES)), 2))
    ours, theirs = (
        ranks([float(torch.cosine_similarity(v[a], v[b], dim=0)) for a, b in pairs]) for v in vectors
    )
    squares = sum((a - b) ** 2 for a, b in zip(ours, theirs, strict=True))

    quality = compare_encoders(draft, exact, SENTENCES)

    assert quality.cosine == pytest.approx(sum(cosines) / len(cosines))
    assert quality.worst_cosine == pytest.approx(min(cosines))
    assert quality.worst_sentence == cosines.index(min(cosines))
    # Spearman's formula for ranks without ties
    assert quality.rank_correlation == pytest.approx(1 - 6 * squares / (len(pairs) * (len(pairs) ** 2 - 1)))
    assert quality.rank_correlation < 1


def test_equal_similarities_share_their_rank():
    twice = [*SENTENCES, SENTENCES[0], SENTENCES[0]]
    quality = compare_encoders(encoder(), encoder(), twice)
    assert quality.rank_correlation == pytest.approx(1.0)


def test_two_sentences_have_no_order():
    quality = compare_encoders(encoder(noise=0.1), encoder(), SENTENCES[:2])
    assert quality.cosine < 1
    assert quality.rank_correlation is None
    assert quality.same_nearest is None


def test_weights_that_are_no_numbers_are_refused():
    broken = encoder(encoder__layer__1__output__dense__weight=float("nan"))
    with pytest.raises(ModelError, match="not finite"):
        compare_encoders(broken, encoder(), SENTENCES)
