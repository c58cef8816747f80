"""A decoder reads a weight only behind that weight's gate, and asks each gate only when its turn has come."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.models import DictWeights, WaitedGate, build_model
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.errors import UnavailableError
from teneral.runtime.weights import Gate


class ArrivingWeights(DictWeights):
    """NaN until their gate is asked, which then fills them in. `log` has the gates in the order of asking."""

    def __init__(self, finished: dict[str, torch.Tensor], *, broken: str = "") -> None:
        super().__init__({name: torch.full_like(tensor, float("nan")) for name, tensor in finished.items()})
        self.log: list[str] = []
        self._finished = finished
        self._broken = broken

    def gate(self, names: Iterable[str]) -> Gate:
        names = list(names)
        group = next((name.split(".")[2] for name in names if ".layers." in name), names[0])

        def wait() -> None:
            self.log.append(f"gate {group}")
            if group == self._broken:
                raise UnavailableError("the store went away", source="s3://bucket", name="draft-000.bin")
            for name in names:
                self.in_torch(name).copy_(self._finished[name])

        return WaitedGate(wait)


def arriving(family: str = "llama", *, broken: str = "", **overrides: Any) -> tuple[Any, ArrivingWeights]:
    oracle = tiny_model(family, **overrides)
    return oracle, ArrivingWeights(tensors_of(oracle), broken=broken)


def test_building_asks_no_gate_and_changes_no_weight():
    oracle, weights = arriving()

    build_model(config_json(oracle), weights)

    assert weights.log == []
    assert all(weights.in_torch(name).isnan().all() for name in weights.names())


def test_each_layer_runs_before_the_next_gate_is_asked():
    oracle, weights = arriving()
    decoder = build_model(config_json(oracle), weights)

    Stepper(decoder).step(
        {"a": prompt_of(5)}, on_layer=lambda index, name, start_s, end_s: weights.log.append(f"ran {name}")
    )

    assert weights.log == [
        "gate model.embed_tokens.weight", "ran embed",
        "gate 0", "ran layers.0",
        "gate 1", "ran layers.1",
        "gate 2", "ran layers.2",
        "gate model.norm.weight", "ran head",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("mistral", {}),
    ],
)
def test_the_gates_cover_every_weight_that_is_read(family, overrides):
    oracle, weights = arriving(family, **overrides)
    complete = build_model(config_json(oracle), DictWeights(tensors_of(oracle)))
    streamed = build_model(config_json(oracle), weights)
    prompts = {"a": prompt_of(19), "b": prompt_of(6)}

    assert Stepper(streamed).greedy(prompts, 4) == Stepper(complete).greedy(prompts, 4)


def test_spans_of_execution_follow_one_another_and_leave_waiting_out():
    oracle, weights = arriving()
    decoder = build_model(config_json(oracle), weights)
    spans = []

    Stepper(decoder).step({"a": prompt_of(5)}, on_layer=lambda *span: spans.append(span))

    assert [index for index, *_ in spans] == [-1, 0, 1, 2, 3]
    times = [time_s for _, _, start_s, end_s in spans for time_s in (start_s, end_s)]
    assert times == sorted(times)


def test_a_failed_load_ends_the_pass_at_its_layer_with_the_loads_error():
    oracle, weights = arriving(broken="1")
    decoder = build_model(config_json(oracle), weights)
    ran = []

    with pytest.raises(UnavailableError, match="the store went away"):
        Stepper(decoder).step({"a": prompt_of(5)}, on_layer=lambda index, *_: ran.append(index))

    assert ran == [-1, 0]
