"""Recurrent states in the engine: in company, chunks, preempted and from the prefix cache, answers are the same."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.support.decoding import Stepper
from tests.support.load import patience_s
from tests.support.models import DictWeights, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model
from tests.support.toy_decoder import ToyTokenizer

from teneral.loader.errors import UsageError
from teneral.loader.native.library import library
from teneral.runtime.engine import options as engine_options
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.kv.states import StatePlaces
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.backend import host_backend
from teneral.runtime.step.requests import GenerationRequest, SamplingParams

pytestmark = pytest.mark.skipif(library() is None, reason="states are the native core's")

SIZE = 4  # tokens of a block
TIMEOUT_S = patience_s(60)
GREEDY = SamplingParams(temperature=0)


def prompt(length: int, *, first: int = 1) -> tuple[int, ...]:
    return tuple((first * 41 + index * 11) % 250 for index in range(length))


@pytest.fixture(scope="module", params=["qwen3_5_text", "granitemoehybrid", "falcon_h1", "nemotron_h"])
def decoder(request: pytest.FixtureRequest) -> Iterator[Decoder]:
    oracle = tiny_model(request.param)
    made = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    assert isinstance(made, Decoder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_options, "STATE_SHARE", 0.98)  # of tiny models they are far larger than blocks
        yield made


class Server:
    """An engine over the decoder, with this number of blocks and of places for states."""

    def __init__(
        self, decoder: Decoder, *, num_blocks: int = 200, num_states: int = 12, **options: Any
    ) -> None:
        kv_bytes = num_blocks * decoder.kv_block_bytes(SIZE) + num_states * decoder.state_bytes
        self.engine = Engine(
            decoder,
            ToyTokenizer(),
            options=EngineOptions(
                kv_bytes=kv_bytes, block_size=SIZE, max_context=160, max_running=num_states // 4, **options
            ),
            make_backend=host_backend,
        )
        self._num_requests = 0

    def __enter__(self) -> Server:
        self.engine.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.check_integrity()
        assert self.engine.stop(TIMEOUT_S)

    def ask(self, *prompts: tuple[int, ...], num_tokens: int = 12) -> list[tuple[int, ...]]:
        generations = [
            self.engine.submit(GenerationRequest(f"{self._num_requests}-{number}", each, num_tokens, GREEDY))
            for number, each in enumerate(prompts)
        ]
        self._num_requests += 1
        answers = [tuple(generation.result(TIMEOUT_S).tokens) for generation in generations]
        self.engine.check_integrity()
        return answers

    @property
    def num_reused(self) -> int:
        return self.engine.statistics().prefix_hit_tokens_total


def expected(decoder: Decoder, *prompts: tuple[int, ...], num_tokens: int = 12) -> list[tuple[int, ...]]:
    """The model's answers without an engine; `test_delta_nets.py` and `test_mamba.py` compare them with
    transformers.
    """
    stepper = Stepper(decoder, num_blocks=200)
    names = {str(number): each for number, each in enumerate(prompts)}
    return [tuple(answer) for answer in stepper.greedy(names, num_tokens).values()]


def test_company_chunks_and_preemption_change_no_token(decoder: Decoder) -> None:
    prompts = [prompt(3 + 9 * number, first=number) for number in range(5)]
    wanted = expected(decoder, *prompts, num_tokens=24)

    with Server(decoder) as server:
        assert server.ask(*prompts, num_tokens=24) == wanted
    tight = {"num_blocks": 26, "num_states": 20, "max_step_tokens": 24, "max_prefill_tokens": 7}
    with Server(decoder, **tight) as server:
        assert server.ask(*prompts, num_tokens=24) == wanted
        assert server.engine.statistics().preemptions_total > 0


def test_an_answer_goes_on_from_the_last_block_that_it_filled(decoder: Decoder) -> None:
    first = prompt(21)
    with Server(decoder) as server:
        (answer,) = server.ask(first)
        longer = (*first, *answer, 7, 8)

        assert server.ask(longer) == expected(decoder, longer)
        assert server.num_reused == 32  # of 33 tokens that were computed


def test_a_prompt_is_found_again_up_to_its_last_full_block(decoder: Decoder) -> None:
    with Server(decoder) as server:
        first = server.ask(prompt(22))

        assert server.ask(prompt(22)) == first == expected(decoder, prompt(22))
        assert server.num_reused == 20


def test_a_shared_beginning_is_reused_from_the_third_prompt_on(decoder: Decoder) -> None:
    """The second one computes it again, and leaves a copy of the state where the two part."""
    shared = prompt(18)
    prompts = [(*shared, *prompt(9, first=each)) for each in (3, 4, 5)]
    with Server(decoder) as server:
        hits = []
        for each in prompts:
            assert server.ask(each) == expected(decoder, each)
            hits.append(server.num_reused)

    assert hits == [0, 0, 16]


def test_copies_make_room_for_sequences(decoder: Decoder) -> None:
    prompts = [prompt(15 + each, first=each) for each in range(9)]
    with Server(decoder, num_states=4) as server:
        assert server.engine.options.max_running == 1
        for each in (*prompts, *prompts[-1:]):
            assert server.ask(each) == expected(decoder, each)
        assert server.num_reused == 20


def test_what_states_take_is_a_part_of_the_pool(decoder: Decoder) -> None:
    options = {"block_size": SIZE, "max_running": 8}

    def engine(kv_bytes: int, **more: Any) -> Engine:
        asked = EngineOptions(kv_bytes=kv_bytes, **{**options, **more})
        return Engine(decoder, ToyTokenizer(), options=asked, make_backend=host_backend)

    assert engine(1 << 22).options.max_running == 8
    assert engine(13 * decoder.state_bytes).options.max_running == 6
    assert engine(12 * decoder.state_bytes).statistics().kv_bytes <= 12 * decoder.state_bytes
    with pytest.raises(UsageError, match="states of"):
        engine(2 * decoder.state_bytes)
    with pytest.raises(UsageError, match="not spilled"):
        engine(1 << 22, kv_host_bytes=1 << 20)


@pytest.mark.parametrize(
    ("first", "end", "branch", "ends"),
    [
        (0, 22, 0, [20]),  # a prompt of 22 tokens at once
        (0, 22, 8, [8, 20]),
        (8, 22, 8, [20]),
        (0, 16, 0, []),  # its first chunk
        (16, 22, 0, [20]),
        (22, 23, 0, []),  # its answer
        (23, 24, 0, [24]),
        (0, 31, 0, [20, 28]),  # once more, after it was preempted
    ],
)
def test_states_are_copied_where_others_are_likely_to_branch_off(
    first: int, end: int, branch: int, ends: list[int]
) -> None:
    assert StatePlaces.ends_to_save(first, end, num_prompt_tokens=22, branch=branch, block_size=SIZE) == ends


def test_a_copy_that_a_sequence_begins_with_makes_no_room() -> None:
    places = StatePlaces(2)
    places.keep(b"a", places.take() or 0)
    held = places.hold(b"a")
    running = places.take()

    assert running is not None
    assert places.take() is None
    places.drop(b"a")
    assert b"a" in places
    places.let_go(held)
    assert places.take() == held
    assert places.num_usable([b"a"]) == 0
    places.check_integrity([held, running], [])
