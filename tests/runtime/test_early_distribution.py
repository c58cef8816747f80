"""Sampled tokens that the draft had proposed have the exact model's distribution, and are the very same tokens."""

from __future__ import annotations

import time
from collections import Counter

import pytest
import torch
from tests.support.decoding import Stepper
from tests.support.early_rig import TIMEOUT_S, EarlyRig
from tests.support.inspection import state_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model

from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.runtime.step.requests import SamplingParams

SMALL = {"vocab_size": 6, "hidden_size": 64, "num_hidden_layers": 2, "bos_token_id": 0, "eos_token_id": 5}
PROMPT = (1, 2, 3)
NUM_SEEDS = 400
NUM_TOKENS = 4
TEMPERATURE = 1.5
WATCHED = 2  # the third token: it depends on two that were drawn before
# Of chi-square with 5 degrees of freedom: exceeded once in 10,000 times. Seeds are fixed, so that the test is, too.
MOST_CHI_SQUARE = 25.7


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """With a draft so coarse that it often draws another token."""
    folder = tmp_path_factory.mktemp("small")
    save_tiny("llama", folder / "plain", dtype=torch.float32, **SMALL)
    store = open_store(str(folder / "packed"))
    pack(open_source(str(folder / "plain")), store, tiers=TierOptions(draft_bits=0))
    return folder / "packed"


def drawn(rig: EarlyRig, *, refine_late: bool) -> list[tuple[int, ...]]:
    """The answers for all seeds."""
    if not refine_late:
        rig.refine()
    rig.start()
    if not refine_late:
        for group in rig.groups:
            rig.load.wait(group, timeout_s=TIMEOUT_S)
    generations = [
        rig.submit(
            PROMPT,
            sampling=SamplingParams(temperature=TEMPERATURE, seed=seed),
            max_tokens=NUM_TOKENS,
            ignore_eos=True,
        )
        for seed in range(NUM_SEEDS)
    ]
    if refine_late:
        wait_for_proposals(rig, NUM_SEEDS * (NUM_TOKENS - 1))
        rig.refine()
    return [generation.result(TIMEOUT_S).tokens for generation in generations]


def wait_for_proposals(rig: EarlyRig, number: int) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while True:
        lanes = [(each, each.draft) for each in state_of(rig.engine).running]
        if sum(len(lane.tokens) - each.num_tokens for each, lane in lanes if lane is not None) >= number:
            return
        assert time.monotonic() < deadline_s, "so much was never drafted"
        time.sleep(0.002)


def third_token_probabilities() -> torch.Tensor:
    """(vocab,) of the exact model, summed over the two tokens before."""
    oracle = tiny_model("llama", dtype=torch.float32, **SMALL)
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))

    def after(tokens: tuple[int, ...]) -> torch.Tensor:
        logits = Stepper(decoder).step({"s": tokens})["s"][-1]
        return torch.softmax(logits.double() / TEMPERATURE, 0)

    total = torch.zeros(SMALL["vocab_size"], dtype=torch.float64)
    for first, p_first in enumerate(after(PROMPT)):
        for second, p_second in enumerate(after((*PROMPT, first))):
            total += p_first * p_second * after((*PROMPT, first, second))
    return total


def test_what_was_drafted_and_confirmed_is_drawn_as_the_exact_model_draws(artifact):
    with EarlyRig(artifact, num_blocks=3 * NUM_SEEDS * 2, max_running=NUM_SEEDS, max_queued=NUM_SEEDS) as rig:
        with_draft = drawn(rig, refine_late=True)
        statistics = rig.engine.statistics()
        assert statistics.accepted_proposals_total > NUM_SEEDS
        assert statistics.rejected_proposals_total > 0  # or the draft would be as good as the model
    with EarlyRig(artifact, num_blocks=3 * NUM_SEEDS * 2, max_running=NUM_SEEDS, max_queued=NUM_SEEDS) as rig:
        without = drawn(rig, refine_late=False)
        assert rig.engine.statistics().accepted_proposals_total == 0
    assert with_draft == without

    expected = third_token_probabilities() * NUM_SEEDS
    assert expected.min() > 5
    counts = Counter(tokens[WATCHED] for tokens in with_draft)
    chi_square = sum(float((counts[token] - number) ** 2 / number) for token, number in enumerate(expected))
    assert chi_square < MOST_CHI_SQUARE
