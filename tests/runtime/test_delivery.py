"""Events on a device: delivered while it computes the next step, and in all else those of a CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace
from tests.support.engine_rig import TIMEOUT_S, EngineRig, finish
from tests.support.toy_decoder import ToyDecoder, ToyTokenizer

from teneral.runtime.errors import ModelError, shutting_down
from teneral.runtime.step.backend import HostBackend
from teneral.runtime.step.batch import Rows, StepBatch
from teneral.runtime.step.requests import FinishReason, GenerationEvent
from teneral.runtime.step.state import Chosen, SamplingState

PROMPT = (1, 2, 3)


class DeviceBackend(HostBackend):
    """Computes as a device does: `forward` has begun when it returns, and `choose` ends the step.
    `log` has both, and what tests add to it.
    """

    def __init__(self, model: Any, kv: Any, options: Any, timeline: Any, *, records: bool = True) -> None:
        super().__init__(model, kv, options.block_size)
        self.log: list[str] = []
        self.between_steps: Callable[[], bool] = lambda: False
        self._records = records

    @property
    def returns_early(self) -> bool:
        return True

    def build(self, parts: Sequence[Rows]) -> StepBatch:
        is_recorded = self._records and all(part.is_next_token for part in parts)
        return replace(super().build(parts), is_recorded=is_recorded)

    def forward(self, batch: StepBatch, *, on_layer: Any) -> Any:
        self.log.append("forward")
        return super().forward(batch, on_layer=on_layer)

    def choose(self, logits: Any, states: Sequence[SamplingState]) -> list[Chosen]:
        self.log.append("choose")
        return super().choose(logits, states)

    def wants_idle_time(self, *, has_running: bool) -> bool:
        return self.between_steps()

    def work_when_idle(self) -> None:
        self.log.append("idle")


class DeviceRig(EngineRig):
    def __init__(self, *, records: bool = True, **options: Any) -> None:
        def make_backend(*parts: Any) -> DeviceBackend:
            self.backend = DeviceBackend(*parts, records=records)
            return self.backend

        super().__init__(make_backend=make_backend, start=False, **options)

    def note(self, event: GenerationEvent) -> None:
        self.backend.log.append("event" if event.finish_reason is None else "end")


STEP = ["forward", "choose"]


def test_events_come_while_the_next_step_computes():
    with DeviceRig() as rig:
        generation = rig.submit(max_tokens=3, on_event=rig.note)
        rig.engine.start()
        assert finish(generation).tokens == rig.expected(PROMPT, 3)
        late = ["forward", "event", "choose"]
    assert rig.backend.log == [*STEP, *late, *late, "end"]


def test_events_come_before_a_step_that_may_wait_for_weights():
    with DeviceRig(records=False) as rig:
        generation = rig.submit(max_tokens=3, on_event=rig.note)
        rig.engine.start()
        finish(generation)
    assert rig.backend.log == [*STEP, "event", *STEP, "event", *STEP, "end"]


def test_events_come_before_idle_time_is_used():
    with DeviceRig() as rig:
        generation = rig.submit(max_tokens=2, on_event=rig.note)
        rig.backend.between_steps = lambda: rig.backend.log == STEP or rig.backend.log[-1:] == ["event"]
        rig.backend.work_when_idle = lambda: rig.backend.log.append("idle")
        rig.engine.start()
        finish(generation)
    assert rig.backend.log == [*STEP, "event", "idle", *STEP, "end"]


TEXT = ToyTokenizer().decode(list(ToyDecoder().greedy(PROMPT, 8)))
ENDS = {
    "limit": {"max_tokens": 4},
    "stop token": {"stop_token_ids": frozenset({ToyDecoder().greedy(PROMPT, 4)[3]})},
    "stop string": {"stop": (TEXT[3],)},
}


@pytest.mark.parametrize("end", ENDS)
def test_a_sequence_that_ends_has_no_row_in_the_next_step(end):
    with DeviceRig() as rig:
        ending = rig.submit(PROMPT, **ENDS[end])
        other = rig.submit((9, 9), max_tokens=8)
        rig.engine.start()
        assert finish(ending).tokens == rig.expected(PROMPT, 4)
        assert finish(other).tokens == rig.expected((9, 9), 8)
    assert rig.model.batch_sizes == [2] * 4 + [1] * 4


def test_blocks_are_free_before_the_last_event():
    free: list[bool] = []

    def look(event: GenerationEvent) -> None:
        statistics = rig.engine.statistics()
        free.append(statistics.free_blocks == statistics.num_blocks)

    with DeviceRig() as rig:
        generation = rig.submit(max_tokens=3, on_event=look)
        rig.engine.start()
        finish(generation)
    assert free == [False, False, True]


def test_blocks_can_be_found_by_whom_an_event_reaches():
    followers: list[Any] = []
    prompt = tuple(range(9))

    def follow(event: GenerationEvent) -> None:
        if not followers:
            followers.append(rig.submit(prompt, max_tokens=2))

    with DeviceRig() as rig:
        first = rig.submit(prompt, max_tokens=12, on_event=follow)
        rig.engine.start()
        assert finish(first).tokens == rig.expected(prompt, 12)
        assert finish(followers[0]).tokens == rig.expected(prompt, 2)
        assert followers[0].num_cached_tokens == 8
        again = rig.submit((*prompt, *rig.expected(prompt, 12)), max_tokens=1)
        finish(again)
        assert again.num_cached_tokens == 20  # of 20 computed ones


def test_a_caller_that_cancels_gets_no_more_tokens_and_others_go_on():
    events: list[GenerationEvent] = []

    def cancel(event: GenerationEvent) -> None:
        events.append(event)
        cancelled.cancel()

    with DeviceRig() as rig:
        cancelled = rig.submit(PROMPT, on_event=cancel)
        other = rig.submit((9, 9), max_tokens=8)
        rig.engine.start()
        assert finish(cancelled).finish_reason is FinishReason.CANCELLED
        assert finish(other).tokens == rig.expected((9, 9), 8)
    assert [event.finish_reason for event in events] == [None, FinishReason.CANCELLED]
    assert rig.model.batch_sizes == [2, 2] + [1] * 6


def test_a_text_that_fails_ends_its_own_sequence():
    class Fragile(ToyTokenizer):
        def decode(self, tokens: list[int], skip_special_tokens: bool = True) -> str:
            if bad in tokens:
                raise ValueError("not a token")
            return super().decode(tokens)

    bad = ToyDecoder().greedy(PROMPT, 3)[2]
    with DeviceRig(tokenizer=Fragile()) as rig:
        assert bad not in (9, 9, *rig.expected((9, 9), 6))
        fragile = rig.submit(PROMPT)
        other = rig.submit((9, 9), max_tokens=6)
        rig.engine.start()
        with pytest.raises(ModelError):
            finish(fragile)
        assert finish(other).tokens == rig.expected((9, 9), 6)


def test_an_event_comes_before_the_error_of_the_next_step():
    events: list[GenerationEvent] = []
    with DeviceRig() as rig:

        def fail(number: int) -> None:
            if number == 2:
                raise ModelError("broken")

        rig.model.before_forward = fail
        generation = rig.submit(PROMPT, on_event=events.append)
        rig.engine.start()
        with pytest.raises(ModelError, match="broken"):
            finish(generation)
    assert [event.tokens for event in events] == [(each,) for each in rig.expected(PROMPT, 2)] + [()]


def test_a_sequence_that_has_ended_gets_its_end_from_an_engine_that_stops():
    with DeviceRig() as rig:
        ended = rig.submit(PROMPT, max_tokens=2)
        other = rig.submit((9, 9))

        def stop() -> bool:
            if rig.backend.log == STEP * 2:
                rig.engine.abort(shutting_down())
            return False

        rig.backend.between_steps = stop
        rig.engine.start()
        assert finish(ended).finish_reason is FinishReason.LENGTH
        assert other.finish_reason is FinishReason.ERROR


@pytest.mark.parametrize(
    ("make_rig", "waits_less"), [(DeviceRig, True), (partial(EngineRig, start=False), False)]
)
def test_a_device_is_not_kept_waiting_for_the_interpreter(make_rig, waits_less):
    usual_s = sys.getswitchinterval()
    intervals_s: list[float] = []
    with make_rig() as rig:
        rig.model.before_forward = lambda _: intervals_s.append(sys.getswitchinterval())
        generation = rig.submit(max_tokens=2)
        rig.engine.start()
        finish(generation)
    assert len(intervals_s) == 2
    assert all((interval_s < usual_s) is waits_less for interval_s in intervals_s)
    assert sys.getswitchinterval() == usual_s


def test_on_a_cpu_events_come_before_the_next_step():
    log: list[str] = []
    with EngineRig(start=False) as rig:
        rig.model.before_forward = lambda number: log.append("forward")
        generation = rig.submit(max_tokens=2, on_event=lambda event: log.append("event"))
        rig.engine.start()
        generation.result(TIMEOUT_S)
    assert log == ["forward", "event"] * 2
