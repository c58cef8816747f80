"""Requests that come and go while the weights arrive, in any order: exact tokens are the exact model's.

Requests, cancellations, refinements and the time that drafting is given are drawn at random; the engine's thread runs
at the same time. What each request got is compared with a reference that knows no engine: the model step by step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.decoding import Stepper
from tests.support.early_rig import GREEDY, SHAPE, TIMEOUT_S, EarlyRig, packed_tiny
from tests.support.inspection import events_of, state_of
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.native.library import library
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.engine.generation import Generation
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.requests import FinishReason, FirstToken, GenerationRequest, SamplingParams
from teneral.runtime.step.sampling import choose_tokens
from teneral.runtime.step.state import Choice, SamplingState

PROMPTS = [tuple((number * 37 + index * 11) % 250 for index in range(1 + 9 * number)) for number in range(4)]
SAMPLINGS = [
    GREEDY,
    SamplingParams(temperature=1.0, top_p=0.95, seed=5),
    SamplingParams(temperature=0.7, seed=11, repetition_penalty=1.2, presence_penalty=0.5),
]
NUM_GROUPS = 5


@dataclass(frozen=True)
class Ask:
    prompt: int
    sampling: int
    is_draft: bool
    max_tokens: int
    stop_every: int  # tokens that this divides end the answer; 0: none does

    @property
    def request(self) -> GenerationRequest:
        stops = frozenset(range(0, 320, self.stop_every)) if self.stop_every else frozenset()
        return GenerationRequest(
            "r",
            PROMPTS[self.prompt],
            self.max_tokens,
            sampling=SAMPLINGS[self.sampling],
            stop_token_ids=stops,
            first_token=FirstToken.DRAFT if self.is_draft else FirstToken.EXACT,
        )


@dataclass(frozen=True)
class Cancel:
    number: int


@dataclass(frozen=True)
class Refine:
    group: int


@dataclass(frozen=True)
class HasTime:
    value: bool


@dataclass(frozen=True)
class Nap:
    time_s: float


asks = st.builds(
    Ask,
    prompt=st.integers(0, len(PROMPTS) - 1),
    sampling=st.integers(0, len(SAMPLINGS) - 1),
    is_draft=st.booleans(),
    max_tokens=st.sampled_from([1, 2, 7, 20]),
    stop_every=st.sampled_from([0, 0, 7, 40]),
)
others = st.one_of(
    st.builds(Cancel, st.integers(0, 7)),
    st.builds(Refine, st.integers(0, NUM_GROUPS - 1)),
    st.builds(HasTime, st.booleans()),
    st.builds(Nap, st.sampled_from([0.001, 0.005, 0.02])),
)
schedules = st.lists(st.one_of(asks, others, others), min_size=4, max_size=16)


# In bf16 the native core gives each row the same bits in passes of any size, which torch does not.
COMPUTED: dict[str, tuple[str, torch.dtype, Callable[[], Any]]] = {
    "torch, fp32": ("llama", torch.float32, TorchBackend),
    "native, bf16": ("llama", torch.bfloat16, NativeBackend),
    "native, convolutions": ("lfm2", torch.bfloat16, NativeBackend),
    "native, inputs of layers": ("gemma4_text", torch.bfloat16, NativeBackend),
    "native, streams": ("gemma3n_text", torch.bfloat16, NativeBackend),
}
UNTIED: dict[str, Any] = {"tie_word_embeddings": False}  # so that each family has a head of its own
_SHARED = {"layer_types": ["full_attention"] * SHAPE["num_hidden_layers"], "num_kv_shared_layers": 1}
OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma3n_text": {**_SHARED, "activation_sparsity_pattern": [0.9] * SHAPE["num_hidden_layers"]},
    "gemma4_text": _SHARED,
}


@pytest.fixture(scope="module", params=COMPUTED)
def computed(request):
    """The backend, its dtype, and the family."""
    if request.param.startswith("native") and library() is None:
        pytest.skip("there is no native library for this processor")
    return request.param


@pytest.fixture(scope="module")
def artifact(computed, tmp_path_factory):
    family, dtype, _ = COMPUTED[computed]
    overrides = UNTIED | OVERRIDES.get(family, {})
    return packed_tiny(tmp_path_factory.mktemp(family), family, dtype=dtype, **overrides)


def rig_of(artifact: Path, computed: str, **options: Any) -> EarlyRig:
    return EarlyRig(artifact, backends=[COMPUTED[computed][2]()], **options)


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@cache
def exact_decoder(computed: str) -> Decoder:
    family, dtype, backend = COMPUTED[computed]
    oracle = tiny_model(family, dtype=dtype, **{**SHAPE, **UNTIED, **OVERRIDES.get(family, {})})
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[backend()])
    assert isinstance(decoder, Decoder)
    return decoder


@cache
def continuation(computed: str, ask: Ask, drafted_text: tuple[int, ...]) -> tuple[int, ...]:
    """The whole answer, if it begins with `beginning` and the exact model goes on."""
    request = ask.request
    state = SamplingState(request)
    stepper = Stepper(exact_decoder(computed))
    tokens = list(drafted_text)
    for token in drafted_text:
        state.add(token)
    work: Sequence[int] = [*request.prompt_tokens, *drafted_text]
    while len(tokens) < ask.max_tokens and not (tokens and tokens[-1] in request.stop_token_ids):
        logits = stepper.step({"s": work})["s"][-1:]
        (choice,) = choose_tokens(logits.numpy(), [state])
        assert isinstance(choice, Choice)
        tokens.append(choice.token)
        state.add(choice.token)
        work = [choice.token]
    return tuple(tokens)


def check(computed: str, ask: Ask, generation: Generation, *, was_cancelled: bool) -> None:
    result = generation.result(TIMEOUT_S)
    events = list(events_of(generation))
    num_drafted = sum(event.num_drafted for event in events)
    kinds = [event.num_drafted > 0 for event in events if event.tokens]
    assert kinds == sorted(kinds, reverse=True), "a drafted token after an exact one"
    assert ask.is_draft or num_drafted == 0
    expected = continuation(computed, ask, result.tokens[:num_drafted])
    if result.finish_reason is FinishReason.CANCELLED:
        assert was_cancelled
        assert result.tokens == expected[: len(result.tokens)]
        return
    assert result.tokens == expected
    ends = expected[-1] in ask.request.stop_token_ids
    assert result.finish_reason is (FinishReason.STOP if ends else FinishReason.LENGTH)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    schedule=schedules,
    num_blocks=st.sampled_from([14, 20, 33, 60, 400]),
    max_step_tokens=st.sampled_from([8, 16, 2048]),
    max_running=st.sampled_from([1, 3, 8]),
    ends_with_time=st.booleans(),
)
def test_whatever_happens_meanwhile_exact_tokens_are_those_of_the_exact_model(
    computed, artifact, schedule, num_blocks, max_step_tokens, max_running, ends_with_time
):
    asked: list[tuple[Ask, Generation]] = []
    cancelled: set[int] = set()
    bounds = {"num_blocks": num_blocks, "max_step_tokens": max_step_tokens, "max_running": max_running}
    with rig_of(artifact, computed, **bounds) as rig:
        assert len(rig.groups) == NUM_GROUPS
        rig.start()
        for step in schedule:
            match step:
                case Ask():
                    asked.append((step, rig.engine.submit(step.request)))
                case Cancel(number) if number < len(asked):
                    cancelled.add(number)
                    asked[number][1].cancel()
                case Refine(group):
                    rig.refine(group)
                case HasTime(value):
                    rig.arrival.has_time = value
                case Nap(time_s):
                    time.sleep(time_s)
            rig.engine.check_integrity()
        rig.arrival.has_time = ends_with_time
        rig.refine()
        for number, (ask, generation) in enumerate(asked):
            check(computed, ask, generation, was_cancelled=number in cancelled)
            rig.engine.check_integrity()
        until_s = time.monotonic() + TIMEOUT_S
        while rig.engine.statistics().running:  # who was cancelled leaves with the step that is under way
            assert time.monotonic() < until_s
            time.sleep(0.001)


def test_a_request_that_is_ending_drafts_nothing_more_and_disturbs_no_other(computed, artifact, monkeypatch):
    """The thread that cancels is held up between the end and the moment in which the engine hears of it."""
    ask = Ask(prompt=2, sampling=0, is_draft=False, max_tokens=20, stop_every=0)
    with rig_of(artifact, computed) as rig:
        state = state_of(rig.engine)
        may_tell = threading.Event()
        note_end = state.note_end

        def note_end_late(generation, reason):
            if reason is FinishReason.CANCELLED:
                may_tell.wait(TIMEOUT_S)
            note_end(generation, reason)

        monkeypatch.setattr(state, "note_end", note_end_late)
        rig.start()
        leaves = rig.submit(PROMPTS[1], first_token=FirstToken.DRAFT, max_tokens=400)
        next(leaves.events(TIMEOUT_S))
        stays = rig.engine.submit(ask.request)
        canceller = threading.Thread(target=leaves.cancel)
        canceller.start()
        until_s = time.monotonic() + TIMEOUT_S
        while not leaves.ended:
            assert time.monotonic() < until_s
            time.sleep(0.001)
        time.sleep(0.2)  # many draft steps
        assert not stays.ended
        may_tell.set()
        canceller.join(TIMEOUT_S)
        rig.refine()
        check(computed, ask, stays, was_cancelled=False)
