"""The figures of a decoder's draft agree with the definitions, worked out from transformers' logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tests.support.decoding import oracle_greedy, oracle_logits, prompt_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.runtime.errors import ModelError
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.quality import decoders
from teneral.runtime.quality.decoders import CONTEXT_TOKENS, DRAFTED_TOKENS, compare_decoders
from teneral.runtime.step.batch import StepBatch


def decoder_of(oracle: Any) -> Decoder:
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    assert isinstance(decoder, Decoder)
    return decoder


def nearly(oracle: Any, *, noise: float) -> Any:
    """The same model with slightly other weights, as a draft's are."""
    other = tiny_model("llama")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter, original in zip(other.parameters(), oracle.parameters(), strict=True):
            parameter.copy_(original * (1 + noise * torch.randn(original.shape, generator=generator)))
    return other


@pytest.fixture(scope="module")
def exact() -> Any:
    return tiny_model("llama")


@pytest.fixture(scope="module")
def draft(exact: Any) -> Any:
    return nearly(exact, noise=0.08)


def losses(oracle: Any, window: Sequence[int]) -> list[float]:
    """Of every token of the window but the first, in nats."""
    log_p = oracle_logits(oracle, window[:-1]).double().log_softmax(-1)
    return [-float(row[token]) for row, token in zip(log_p, window[1:], strict=True)]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def test_a_model_that_is_compared_with_itself_keeps_everything(exact):
    model = decoder_of(exact)

    quality = compare_decoders(model, model, prompt_of(100))

    assert quality.perplexity_ratio == 1.0
    assert quality.perplexity_ratio_error == 0.0
    assert quality.agreement == 1.0
    assert quality.total_variation == 0.0
    assert quality.kl_nats == 0.0
    assert quality.worst_hidden_cosine == pytest.approx(1.0)
    assert quality.accepted.accepted == (DRAFTED_TOKENS,) * 3
    assert quality.accepted.mean == DRAFTED_TOKENS
    assert quality.accepted.mean_error == 0.0
    assert quality.accepted.whole_share == 1.0


def test_perplexities_are_those_of_transformers(draft, exact):
    tokens = prompt_of(90)

    quality = compare_decoders(decoder_of(draft), decoder_of(exact), tokens)

    assert quality.predictions == 89
    assert quality.exact_perplexity == pytest.approx(math.exp(mean(losses(exact, tokens))), rel=1e-4)
    assert quality.perplexity == pytest.approx(math.exp(mean(losses(draft, tokens))), rel=1e-4)
    assert quality.perplexity_ratio == pytest.approx(quality.perplexity / quality.exact_perplexity)
    assert quality.perplexity_ratio != pytest.approx(1.0, abs=1e-4)
    assert quality.perplexity_ratio_error > 0


def test_distributions_are_compared_by_their_definitions(draft, exact):
    tokens = prompt_of(60)
    logits, exact_logits = (oracle_logits(model, tokens[:-1]).double() for model in (draft, exact))
    q, p = logits.softmax(-1), exact_logits.softmax(-1)

    quality = compare_decoders(decoder_of(draft), decoder_of(exact), tokens)

    assert quality.agreement == mean((p.argmax(-1) == q.argmax(-1)).double().tolist())
    assert 0 < quality.agreement < 1
    assert quality.total_variation == pytest.approx(
        mean(torch.maximum(p - q, torch.zeros(())).sum(-1).tolist()), rel=1e-3
    )
    assert quality.kl_nats == pytest.approx(
        mean(torch.nn.functional.kl_div(q.log(), p, reduction="none").sum(-1).tolist()), rel=1e-3
    )


@torch.no_grad()
def test_hidden_states_are_compared_as_the_head_reads_them(draft, exact):
    tokens = prompt_of(60)
    states, exact_states = (
        model.model(torch.tensor([tokens[:-1]])).last_hidden_state[0].double() for model in (draft, exact)
    )
    cosines = torch.cosine_similarity(states, exact_states, dim=-1)

    quality = compare_decoders(decoder_of(draft), decoder_of(exact), tokens)

    assert quality.hidden_cosine == pytest.approx(float(cosines.mean()), abs=1e-5)
    assert quality.worst_hidden_cosine == pytest.approx(float(cosines.min()), abs=1e-5)
    assert quality.worst_hidden_cosine < quality.hidden_cosine < 1


def test_tokens_are_accepted_as_far_as_both_models_continue_alike(exact):
    draft = nearly(exact, noise=0.03)
    tokens = prompt_of(128)
    places = [128 * share // 5 for share in (1, 2, 3, 4)]

    quality = compare_decoders(decoder_of(draft), decoder_of(exact), tokens)

    expected = []
    for place in places:
        ours, theirs = (
            oracle_greedy(model, tokens[:place][-CONTEXT_TOKENS:], DRAFTED_TOKENS) for model in (draft, exact)
        )
        expected.append(
            next((n for n, pair in enumerate(zip(ours, theirs, strict=True)) if len(set(pair)) > 1), 32)
        )
    assert quality.accepted.accepted == tuple(expected)
    assert len(set(expected)) > 1, "places that differ, or this says little"
    assert quality.accepted.mean == mean(expected)
    assert quality.accepted.whole_share == expected.count(32) / 4
    assert quality.exact_accepted.accepted == (32, 32, 32, 32)


def test_a_model_with_equal_bits_in_any_batch_does_not_draft_for_itself(draft, exact, monkeypatch):
    """Its choices are known to be accepted, and drafting takes most of an evaluation."""
    drafting: set[Decoder] = set()
    own = Decoder.forward

    def recorded(model: Decoder, batch: StepBatch, *arguments: Any) -> Any:
        if all(span.length == 1 for span in batch.spans):
            drafting.add(model)
        return own(model, batch, *arguments)

    monkeypatch.setattr(Decoder, "forward", recorded)
    model, approximate = decoder_of(exact), decoder_of(draft)
    assert model.is_batch_invariant
    quality = compare_decoders(approximate, model, prompt_of(100))
    assert drafting == {approximate}
    assert quality.exact_accepted.whole_share == 1.0


def test_a_long_text_is_read_in_windows_that_begin_with_the_prefix(draft, exact):
    tokens, prefix = prompt_of(600), [257]
    windows = [[*prefix, *tokens[:511]], [*prefix, *tokens[511:]]]

    quality = compare_decoders(decoder_of(draft), decoder_of(exact), tokens, prefix=prefix)

    assert quality.predictions == 600
    expected = [loss for window in windows for loss in losses(exact, window)]
    assert quality.exact_perplexity == pytest.approx(math.exp(mean(expected)), rel=1e-4)


def test_the_figures_do_not_depend_on_how_many_logits_fit(draft, exact, monkeypatch):
    models, tokens = (decoder_of(draft), decoder_of(exact)), prompt_of(70)
    at_once = compare_decoders(*models, tokens)

    monkeypatch.setattr(decoders, "_MAX_SLICE_ELEMENTS", 7 * exact.config.vocab_size)
    in_slices = compare_decoders(*models, tokens)

    assert in_slices.predictions == at_once.predictions == 69
    assert in_slices.perplexity == pytest.approx(at_once.perplexity, rel=1e-4)
    assert in_slices.total_variation == pytest.approx(at_once.total_variation, rel=1e-3)
    assert in_slices.hidden_cosine == pytest.approx(at_once.hidden_cosine, abs=1e-5)
    assert in_slices.accepted == at_once.accepted


def test_the_models_are_left_as_they_were(exact):
    model = decoder_of(exact)
    assert model.is_exact  # which it remembers
    before = dict(vars(model))

    compare_decoders(model, model, prompt_of(20))

    assert vars(model) == before


def test_a_model_with_a_short_context_is_compared_within_it():
    model = decoder_of(tiny_model("llama", max_position_embeddings=24))

    quality = compare_decoders(model, model, prompt_of(100))

    assert quality.accepted.drafted == 12
    assert quality.accepted.accepted == (12, 12, 12)


def test_a_token_outside_of_the_vocabulary_is_refused(exact):
    model = decoder_of(exact)
    with pytest.raises(ModelError, match="token 320, but the model's vocabulary has 320"):
        compare_decoders(model, model, [*prompt_of(20), 320])


def test_weights_that_are_no_numbers_are_refused(exact):
    tensors = tensors_of(exact)
    tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = float("nan")
    broken = build_model(config_json(exact), DictWeights(tensors))
    with pytest.raises(ModelError, match="not finite"):
        compare_decoders(broken, decoder_of(exact), prompt_of(20))
