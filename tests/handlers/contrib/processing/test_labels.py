from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.instances import StagedInstance, TinyParts
from tests.support.tiny_models import tiny_model

from teneral.handlers.contrib.processing import Prototypes, achoose, choose, decide, sigmoid, softmax
from teneral.handlers.function.context import Context
from teneral.runtime.errors import RequestError

SCORES = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=10)


@given(scores=SCORES, temperature=st.floats(0.01, 100))
def test_probabilities_are_torchs(scores, temperature):
    tensor = torch.tensor(scores, dtype=torch.float64) / temperature
    np.testing.assert_allclose(
        softmax(scores, temperature=temperature), tensor.softmax(0), rtol=1e-9, atol=1e-300
    )
    np.testing.assert_allclose(
        sigmoid(scores, temperature=temperature), tensor.sigmoid(), rtol=1e-9, atol=1e-300
    )


def test_the_best_label_is_chosen_by_its_name():
    for labels in (["no", "yes"], {0: "no", 1: "yes"}, {"0": "no", "1": "yes"}):
        prediction = decide([0.2, 0.8], labels)
        assert (prediction.label, prediction.score) == ("yes", 0.8)
        assert prediction.scores == (("yes", 0.8), ("no", 0.2))


def test_below_the_threshold_it_abstains_and_says_how_near_it_was():
    prediction = decide({"no": 0.4, "yes": 0.6}, threshold=0.7)
    assert prediction.abstained
    assert prediction.to_dict() == {
        "label": None,
        "score": 0.6,
        "labels": [],
        "scores": {"yes": 0.6, "no": 0.4},
    }
    assert not decide({"no": 0.3, "yes": 0.7}, threshold=0.7).abstained


def test_several_labels_may_be_true():
    prediction = decide(sigmoid([2.0, -3.0, 1.0]), ["a", "b", "c"], threshold=0.5, top_k=1)
    assert prediction.labels == ("a", "c")
    assert len(prediction.scores) == 1


@pytest.mark.parametrize(
    "call",
    [
        lambda: decide([]),
        lambda: decide([1.0], ["a", "b"]),
        lambda: decide([1.0, 2.0], ["a"]),
        lambda: decide([1.0, 2.0], {0: "a", 5: "b"}),
        lambda: decide([math.nan]),
        lambda: decide({"a": 1.0}, ["a"]),
        lambda: decide([1.0], top_k=0),
        lambda: softmax([1.0], temperature=0),
        lambda: softmax([math.inf]),
    ],
)
def test_what_does_not_fit_together_is_refused(call):
    with pytest.raises(RequestError):
        call()


def test_the_nearest_prototype_scores_best():
    prototypes = Prototypes({"east": np.array([[2.0, 0.1], [1.0, -0.1]]), "north": np.array([[0.0, 3.0]])})
    scores = prototypes.scores(np.array([10.0, 1.0], dtype=np.float32))
    assert decide(scores).label == "east"
    assert scores["north"] == pytest.approx(1 / math.sqrt(101))


@pytest.fixture(scope="module")
def instance(tmp_path_factory):
    with StagedInstance(TinyParts.make("llama", tmp_path_factory.mktemp("tiny"))) as instance:
        yield instance.let_in()


@pytest.fixture
def model(instance):
    return Context(instance, request_id="labels", timeout_s=60).model


LABELS = ["yes", "no", "maybe", "é"]


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_labels_are_as_likely_as_the_model_finds_their_beginnings(model, temperature):
    prompt = "Is it a dragonfly?"
    scores = choose(model, prompt, LABELS, temperature=temperature)
    tokens = [model.tokenize(label, add_special_tokens=False)[0] for label in LABELS]
    with torch.inference_mode():
        logits = tiny_model("llama")(torch.tensor([model.tokenize(prompt)])).logits[0, -1]
    expected = (logits[tokens] / temperature).softmax(0)
    assert list(scores) == LABELS
    np.testing.assert_allclose(list(scores.values()), expected, atol=1e-4)


async def test_async_handlers_choose_the_same(model):
    scores = await asyncio.to_thread(choose, model, "Is it?", LABELS)
    assert await achoose(model, "Is it?", LABELS) == scores


def test_labels_can_be_chosen_in_answer_to_messages(model):
    scores = choose(model, [{"role": "user", "content": "Yes or no?"}], ["yes", "no"])
    assert sum(scores.values()) == pytest.approx(1)


@pytest.mark.parametrize(
    "labels", [["yes"], ["yes", "yellow"], ["", "no"], [chr(65 + index) for index in range(21)]]
)
def test_labels_that_cannot_be_distinguished_are_refused(model, labels):
    with pytest.raises(RequestError):
        choose(model, "x", labels)


def test_a_completion_has_its_logprobs_where_they_are_asked_for(model):
    completion = model.generate("x", max_tokens=3, temperature=0, ignore_eos=True, logprobs=2)
    assert len(completion.logprobs) == 3
    assert all(
        step.top[0] == (step.token, step.logprob) and len(step.top) == 2 for step in completion.logprobs
    )
    assert len(completion.to_dict()["logprobs"]) == 3
    assert "logprobs" not in model.generate("x", max_tokens=1).to_dict()
