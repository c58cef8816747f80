"""A pass taken layer by layer, joined with another one or freed of some sequences computes what a whole one does.

In fp32, where passes of different sizes differ by rounding only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.decoding import Stepper, prompt_of
from tests.support.models import DictWeights, WaitedGate, build_model, forward, torch_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.format.manifest import Tier
from teneral.loader.native.library import library
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.engine.speculation import ExactPasses
from teneral.runtime.kv.storage import by_block
from teneral.runtime.models.decoder import Decoder, ForwardPass
from teneral.runtime.step.batch import StepBatch, join, select

FAMILIES = [
    ("llama", build_model, {}),
    ("llama", torch_model, {}),
    ("qwen2", build_model, {"tie_word_embeddings": True}),
    ("qwen3", build_model, {}),
    ("mistral", build_model, {"sliding_window": 6}),
]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def decoder_of(family: str = "llama", build: Callable[..., Any] = build_model, **overrides: Any) -> Decoder:
    """One whose passes never run all layers in one call, as over weights that are not exact yet."""
    oracle = tiny_model(family, **overrides)
    decoder = build(config_json(oracle), DictWeights(tensors_of(oracle)))
    assert isinstance(decoder, Decoder)
    decoder.executor.runs_layers_together = False
    return decoder


@pytest.fixture(
    scope="module", params=FAMILIES, ids=[f"{family}-{build.__name__}" for family, build, _ in FAMILIES]
)
def decoder(request: pytest.FixtureRequest) -> Decoder:
    family, build, overrides = request.param
    return decoder_of(family, build, **overrides)


@pytest.fixture(scope="module")
def llama() -> Decoder:
    return decoder_of()


@pytest.fixture(autouse=True)
def in_inference_mode() -> Iterator[None]:
    with torch.inference_mode():
        yield


def advance(under_way: ForwardPass, stage: int) -> ForwardPass:
    while under_way.stage < stage:
        under_way.advance()
    return under_way


def finish(under_way: ForwardPass) -> torch.Tensor:
    while not under_way.is_done:
        assert under_way.can_advance()
        under_way.advance()
    return torch.from_numpy(under_way.logits)


def num_stages(decoder: Decoder) -> int:
    return decoder.num_layers + 2


def apart(decoder: Decoder, *works: dict[str, list[int]]) -> list[torch.Tensor]:
    """The logits of these steps, one after the other, each in one go."""
    stepper = Stepper(decoder)
    return [forward(decoder, stepper.batch(work), stepper.kv) for work in works]


ONE, TWO = {"one": prompt_of(13)}, {"two": prompt_of(7)}
LATER = {"one": prompt_of(5, seed=3)}  # more of the first sequence


def test_step_by_step_is_the_same_as_in_one_go(decoder: Decoder) -> None:
    (expected,) = apart(decoder, ONE | TWO)
    stepper = Stepper(decoder)
    under_way = decoder.begin(stepper.batch(ONE | TWO), stepper.kv)
    stages = []
    while not under_way.is_done:
        stages.append(under_way.stage)
        under_way.advance()
    assert stages == list(range(num_stages(decoder)))
    assert torch.equal(torch.from_numpy(under_way.logits), expected)


def test_what_happens_between_two_stages_does_not_matter(decoder: Decoder) -> None:
    """Another sequence's steps, in the same storage."""
    (expected,) = apart(decoder, ONE)
    stepper = Stepper(decoder)
    under_way = decoder.begin(stepper.batch(ONE), stepper.kv)
    while not under_way.is_done:
        under_way.advance()
        stepper.step({"other": [under_way.stage]})
    torch.testing.assert_close(torch.from_numpy(under_way.logits), expected, **CLOSE)


@pytest.mark.parametrize(
    "works", [(ONE, TWO), (ONE, LATER)], ids=["two sequences", "one sequence's later rows"]
)
def test_joined_at_any_stage_two_passes_give_what_they_give_apart(
    decoder: Decoder, works: tuple[dict[str, list[int]], ...]
) -> None:
    expected = torch.cat(apart(decoder, *works))
    for stage in range(num_stages(decoder)):
        stepper = Stepper(decoder)
        first, second = (decoder.begin(stepper.batch(work), stepper.kv) for work in works)
        both = advance(first, stage).joined(advance(second, stage))
        assert both.stage == stage
        assert both.batch.logit_rows.tolist() == list(range(len(expected)))
        torch.testing.assert_close(finish(both), expected, **CLOSE)


def test_a_pass_that_stays_one_layer_behind_sees_the_keys_of_the_one_before(decoder: Decoder) -> None:
    expected = apart(decoder, ONE, LATER)
    stepper = Stepper(decoder)
    ahead = decoder.begin(stepper.batch(ONE), stepper.kv)
    behind = decoder.begin(stepper.batch(LATER), stepper.kv)
    while not behind.is_done:
        if not ahead.is_done:
            ahead.advance()
        behind.advance()
    for under_way, logits in zip((ahead, behind), expected, strict=True):
        torch.testing.assert_close(torch.from_numpy(under_way.logits), logits, **CLOSE)


def test_three_passes_may_be_joined_one_by_one(llama: Decoder) -> None:
    expected = torch.cat(apart(llama, ONE, TWO, LATER))
    stepper = Stepper(llama)
    passes = [llama.begin(stepper.batch(work), stepper.kv) for work in (ONE, TWO, LATER)]
    both = advance(passes[0], 1).joined(advance(passes[1], 1))
    three = advance(both, 3).joined(advance(passes[2], 3))
    torch.testing.assert_close(finish(three), expected, **CLOSE)


@pytest.mark.parametrize("gone", [(0,), (1,), (2,), (0, 2)])
def test_without_some_sequences_the_others_logits_are_as_they_were(
    decoder: Decoder, gone: tuple[int, ...]
) -> None:
    work = {"one": prompt_of(9), "two": prompt_of(4), "three": prompt_of(6)}
    (expected,) = apart(decoder, work)
    spans = Stepper(decoder).batch(work).spans
    left = torch.cat(
        [
            expected[span.start : span.start + span.length]
            for number, span in enumerate(spans)
            if number not in gone
        ]
    )
    for stage in range(num_stages(decoder)):
        stepper = Stepper(decoder)
        under_way = advance(decoder.begin(stepper.batch(work), stepper.kv), stage).without(gone)
        assert under_way.stage == stage
        torch.testing.assert_close(finish(under_way), left, **CLOSE)


def test_without_a_sequence_nothing_is_written_to_its_blocks_any_more(llama: Decoder) -> None:
    stepper = Stepper(llama)
    under_way = advance(llama.begin(stepper.batch(ONE | TWO), stepper.kv), 2).without([0])
    freed = list(stepper.batch({"one": []}).spans[0].blocks)
    kv = stepper.kv
    blocks = by_block(kv.data, kv.num_blocks)
    blocks[freed] = np.nan
    logits = finish(under_way)
    assert np.isnan(blocks[freed]).all()
    torch.testing.assert_close(logits, apart(llama, TWO)[0], **CLOSE)


def test_it_reports_each_stage_once_also_when_joined(llama: Decoder) -> None:
    stepper = Stepper(llama)
    layer_names: list[str] = []
    first = llama.begin(
        stepper.batch(ONE), stepper.kv, on_layer=lambda index, name, start_s, end_s: layer_names.append(name)
    )
    second = llama.begin(stepper.batch(TWO), stepper.kv)
    finish(advance(first, 2).joined(advance(second, 2)))
    assert layer_names == ["embed", *(f"layers.{number}" for number in range(llama.num_layers)), "head"]


class TieredWeights(DictWeights):
    """Writes down what is asked of its gates."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.log: list[tuple[str, Any]] = []
        self.is_open = True

    def gate(self, names: Any) -> Any:
        names = list(names)
        if any(".layers.0." in name for name in names) and any(".layers.1." in name for name in names):
            return WaitedGate(lambda: None)  # of all weights, which have not come
        return TieredGate(self, ("layer" if any(".layers." in name for name in names) else "head"))

    def row_gate(self, tables: Any, names: Any) -> Any:
        return TieredGate(self, "rows")


class TieredGate:
    def __init__(self, weights: TieredWeights, what: str) -> None:
        self._weights, self._what = weights, what

    def __call__(self, *rows: torch.Tensor) -> None:
        self._weights.log.append((self._what, "exact"))

    def opens(self, *arguments: Any) -> bool:
        self._weights.log.append((self._what, arguments[-2:]))
        return self._weights.is_open

    @contextmanager
    def reading(self, *arguments: Any) -> Iterator[None]:
        self._weights.log.append((self._what, arguments[-1]))
        yield
        self._weights.log.append((self._what, "used"))

    def want(self, rows: torch.Tensor, tier: Tier) -> None:
        self._weights.log.append((self._what, rows.tolist()))


@pytest.fixture
def tiered() -> tuple[Decoder, TieredWeights]:
    oracle = tiny_model("llama", num_hidden_layers=2)
    weights = TieredWeights(tensors_of(oracle))
    decoder = build_model(config_json(oracle), weights)
    assert isinstance(decoder, Decoder)
    return decoder, weights


def test_a_pass_over_the_draft_holds_each_gates_weights_only_while_it_computes_with_them(
    tiered: tuple[Decoder, TieredWeights],
) -> None:
    decoder, weights = tiered
    stepper = Stepper(decoder)
    decoder.forward(
        stepper.batch(ONE),
        stepper.kv,
        tier=Tier.DRAFT,
        on_layer=lambda index, name, start_s, end_s: weights.log.append(("ran", name)),
    )
    assert weights.log == [
        ("rows", Tier.DRAFT), ("ran", "embed"), ("rows", "used"),
        ("layer", Tier.DRAFT), ("ran", "layers.0"), ("layer", "used"),
        ("layer", Tier.DRAFT), ("ran", "layers.1"), ("layer", "used"),
        ("head", Tier.DRAFT), ("ran", "head"), ("head", "used"),
    ]  # fmt: skip


def test_a_pass_over_exact_weights_waits_for_them_and_holds_nothing(
    tiered: tuple[Decoder, TieredWeights],
) -> None:
    decoder, weights = tiered
    stepper = Stepper(decoder)
    decoder.forward(stepper.batch(ONE), stepper.kv)
    assert weights.log == [("rows", "exact"), ("layer", "exact"), ("layer", "exact"), ("head", "exact")]


@pytest.mark.parametrize("tier", [Tier.DRAFT, Tier.REFINE])
def test_whether_it_can_go_on_is_what_the_next_stages_gate_says(
    tiered: tuple[Decoder, TieredWeights], tier: Tier
) -> None:
    decoder, weights = tiered
    stepper = Stepper(decoder)
    under_way = decoder.begin(stepper.batch(ONE), stepper.kv, tier=tier)
    for what in ("rows", "layer", "layer", "head"):
        weights.is_open = False
        assert not under_way.can_advance(0.5)
        assert weights.log.pop() == (what, (0.5, tier))
        weights.is_open = True
        assert under_way.can_advance()
        under_way.advance()
    assert under_way.is_done


def test_what_it_will_begin_with_can_be_sent_for(tiered: tuple[Decoder, TieredWeights]) -> None:
    decoder, weights = tiered
    decoder.want(np.array([3, 1]), Tier.REFINE)
    assert weights.log == [("rows", [3, 1])]


def equal(one: StepBatch, other: StepBatch) -> bool:
    return one.spans == other.spans and all(
        np.array_equal(getattr(one, name), getattr(other, name))
        for name in ("tokens", "positions", "slots", "logit_rows")
    )


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=5), data=st.data())
def test_batches_are_joined_and_taken_apart_without_loss(
    llama: Decoder, lengths: list[int], data: st.DataObject
) -> None:
    work = {f"s{number}": prompt_of(length, seed=number) for number, length in enumerate(lengths)}
    stepper = Stepper(llama)
    singles = [stepper.batch({name: tokens}) for name, tokens in work.items()]
    together = Stepper(llama).batch(work)
    joined = join(singles)
    assert equal(joined, together)
    assert equal(join([joined]), joined)
    kept = sorted(data.draw(st.sets(st.sampled_from(range(len(lengths))), min_size=1)))
    chosen, rows = select(joined, kept)
    assert equal(chosen, join([singles[number] for number in kept]))
    assert np.array_equal(joined.tokens[rows], chosen.tokens)


def test_taking_spans_out_keeps_only_their_logit_rows(llama: Decoder) -> None:
    batch = Stepper(llama).batch(ONE | TWO)
    last_rows = StepBatch(batch.tokens, batch.positions, batch.slots, batch.spans, np.array([12, 19]))
    chosen, _ = select(last_rows, [1])
    assert chosen.logit_rows.tolist() == [6]


@pytest.mark.skipif(library() is None, reason="there is no native library for this processor")
def test_a_pass_behind_another_one_never_overtakes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last weights come just after the first pass was asked whether it has any, and before the second one is."""
    oracle = tiny_model("llama", dtype=torch.bfloat16)
    decoder = build_model(config_json(oracle), DictWeights(tensors_of(oracle)), backends=[NativeBackend()])
    assert decoder.executor.runs_layers_together
    expected = apart(decoder, ONE, LATER)[1]
    stepper = Stepper(decoder)
    ahead = decoder.begin(stepper.batch(ONE), stepper.kv)
    behind = decoder.begin(stepper.batch(LATER), stepper.kv)
    for _ in range(2):
        ahead.advance(is_behind=True)
    answers = iter([False, False])  # the first pass's gate, while the second one goes on
    monkeypatch.setattr(ahead, "can_advance", lambda timeout_s=0.0: next(answers, True))
    passes = ExactPasses(max_rows=-1)  # which are never joined
    passes.send(ahead, [])
    passes.send(behind, [])
    while passes:
        passes.advance()
    assert torch.equal(torch.from_numpy(behind.logits), expected)
