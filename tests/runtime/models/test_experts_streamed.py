"""Mixtures of experts while their weights arrive: a pass waits for the experts that its tokens choose."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.models import build_model
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.tiny_models import save_tiny

from teneral.loader.artifact import open_artifact, read_file
from teneral.loader.errors import IntegrityError
from teneral.loader.format import layout
from teneral.loader.format.manifest import Manifest, Tier
from teneral.loader.load import queue
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions, Order
from teneral.loader.load.plan import expert_groups
from teneral.loader.native.library import library
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.backends.torch.backend import TorchBackend
from teneral.runtime.models.decoder import Decoder, ForwardPass, Work
from teneral.runtime.weights import StreamedWeights

pytestmark = pytest.mark.skipif(library() is None, reason="the native libraries are not built here")

SHAPES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": [1]},
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 3},
}
OPTIONS = LoadOptions(on_demand=True, connections=64)
PROMPT = prompt_of(2, seed=3)  # few tokens, so that many experts are chosen by none


def packed(family: str, folder: Path, tiers: TierOptions | None = None) -> Path:
    plain = save_tiny(family, folder / "plain", dtype=torch.bfloat16, **SHAPES[family])
    pack(open_source(str(plain)), open_store(str(folder / "packed")), tiers=tiers)
    return folder / "packed"


@contextmanager
def arriving(
    artifact: Path, options: LoadOptions = OPTIONS, *, seed: int = 1, backend: Any = None
) -> Iterator[tuple[WeightLoad, PacedSource, Decoder]]:
    """A load that is not started, whose memory holds NaN, and the model over it."""
    source = PacedSource(open_source(str(artifact)))
    source.delay(seed=seed, max_s=0.003)
    manifest = open_artifact(source)
    with closing(source), WeightLoad(source, manifest, options=options) as load:
        for group in manifest.groups:
            load.slab(group.index)[:] = 0xFF
        config = json.loads(read_file(source, manifest, "config.json"))
        decoder = build_model(config, StreamedWeights(load), backends=[backend or NativeBackend()])
        assert isinstance(decoder, Decoder)
        yield load, source, decoder


def whole(artifact: Path, *prompts: Sequence[int]) -> list[torch.Tensor]:
    """The logits of each prompt by itself, once all weights are there."""
    with arriving(artifact) as (load, _, decoder):
        load.start()
        load.join()
        return [Stepper(decoder).step({"a": prompt})["a"] for prompt in prompts]


def chosen_groups(artifact: Path, *prompts: Sequence[int]) -> frozenset[int]:
    """The groups of the experts that these prompts' tokens choose, each prompt by itself."""
    found: set[int] = set()
    with arriving(artifact) as (load, _, decoder):
        load.start()
        load.join()
        for prompt in prompts:
            stepper = Stepper(decoder)
            batch = stepper.batch({"a": prompt})
            executor: Any = decoder.executor
            x, step = executor.embed(batch), executor.begin(batch, stepper.kv)
            for stage in decoder.stages:
                if stage.work is Work.ROUTE:
                    x, chosen = executor.route(step, stage.layer, x)
                    names = {
                        f"layers.{stage.layer}.experts.{expert}" for expert in np.unique(chosen).tolist()
                    }
                    found.update(group.index for group in load.manifest.groups if group.name in names)
                    x = executor.experts(step, stage.layer, x)
                elif stage.work is Work.LAYER:
                    x = executor.layers(step, stage.layer, stage.layer + 1, x)
    return frozenset(found)


def parts_of(manifest: Manifest, groups: frozenset[int]) -> list[Any]:
    return [part for part in manifest.parts if part.group in groups]


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("seed", [1, 2])
def test_a_pass_waits_for_the_chosen_experts_alone(tmp_path, monkeypatch, family, seed):
    # Other tests and processes may slow this one.
    monkeypatch.setattr(queue, "HOLD_S", WAIT_S)
    monkeypatch.setattr(queue, "MAX_HOLD_S", WAIT_S)
    artifact = packed(family, tmp_path)
    needed = chosen_groups(artifact, PROMPT)
    with arriving(artifact, seed=seed) as (load, source, decoder):
        others = expert_groups(load.manifest) - needed
        assert len(others) > len(needed) // 2
        held = source.hold(reads_of(load.manifest, *parts_of(load.manifest, others)))
        # As a pass does whose first layer is there at once: from then on others are held back.
        load.want_parts([part.index for part in parts_of(load.manifest, frozenset([min(needed)]))])
        load.start()
        ours = Stepper(decoder).step({"a": PROMPT})["a"]
        assert held.num_reached == 0, "experts were read in vain"
        assert {group for group in expert_groups(load.manifest) if load.is_ready(group)} == needed
        held.release()
    assert ours.isfinite().all()
    assert torch.equal(ours, *whole(artifact, PROMPT))


@pytest.mark.parametrize("family", SHAPES)
def test_experts_that_come_in_any_order_give_the_bits_of_the_whole_load(tmp_path, family):
    artifact, prompts = packed(family, tmp_path), [prompt_of(21, seed=1), prompt_of(3, seed=2)]
    expected = whole(artifact, *prompts)
    for seed in range(5):
        with arriving(artifact, seed=seed) as (load, source, decoder):
            source.delay(seed=seed, max_s=0.02)
            load.start()
            stepper = Stepper(decoder)
            both = stepper.step({"a": prompts[0][:8], "b": prompts[1]})
            rest = stepper.step({"a": prompts[0][8:]})
        assert torch.equal(torch.cat([both["a"], rest["a"]]), expected[0])
        assert torch.equal(both["b"], expected[1])


def test_sequences_that_join_and_leave_between_router_and_experts_keep_their_bits(tmp_path):
    artifact, prompts = packed("mixtral", tmp_path), [prompt_of(9, seed=1), prompt_of(3), prompt_of(5)]
    expected = whole(artifact, *prompts)
    with arriving(artifact) as (load, source, decoder):
        held = source.hold(reads_of(load.manifest, *parts_of(load.manifest, expert_groups(load.manifest))))
        load.start()
        stepper = Stepper(decoder)
        first = decoder.begin(stepper.batch({"a": prompts[0], "b": prompts[1]}), stepper.kv)
        second = decoder.begin(stepper.batch({"c": prompts[2]}), stepper.kv)
        for under_way in (first, second):
            while decoder.stages[under_way.stage].work is not Work.EXPERTS:
                under_way.advance()
            assert not under_way.can_advance()
        held.release()
        joined: ForwardPass = first.joined(second).without({1})
        while not joined.is_done:
            joined.advance()
    ours = torch.from_numpy(joined.logits)
    assert torch.equal(ours, torch.cat([expected[0], expected[2]]))


def test_an_artifact_whose_experts_lie_in_their_layers_gives_the_same_bits(tmp_path, monkeypatch):
    artifact = packed("mixtral", tmp_path / "new")
    monkeypatch.setattr(layout, "_expert_number", lambda place: None)
    old = packed("mixtral", tmp_path / "old")
    monkeypatch.undo()
    with arriving(old) as (load, _, decoder):
        assert not expert_groups(load.manifest)
        load.start()
        ours = Stepper(decoder).step({"a": PROMPT})["a"]
    assert torch.equal(ours, *whole(artifact, PROMPT))


@pytest.mark.parametrize("times", [1, 2])
def test_a_damaged_expert_is_fetched_again_and_then_fails_the_pass_that_needs_it(tmp_path, times):
    artifact = packed("mixtral", tmp_path)
    needed = chosen_groups(artifact, PROMPT)
    with arriving(artifact) as (load, source, decoder):
        bad = max(needed)
        source.spoil(reads_of(load.manifest, *parts_of(load.manifest, frozenset([bad]))), times=times)
        load.start()
        if times == 2:
            with pytest.raises(IntegrityError, match=load.manifest.groups[bad].name):
                Stepper(decoder).step({"a": PROMPT})
            assert not load.is_ready(bad)
        else:
            ours = Stepper(decoder).step({"a": PROMPT})["a"]
            assert torch.equal(ours, *whole(artifact, PROMPT))


def test_a_mixture_has_one_tier_unless_a_draft_is_asked_for(tmp_path):
    one = open_artifact(open_source(str(packed("mixtral", tmp_path / "one"))))
    tiered = open_artifact(open_source(str(packed("mixtral", tmp_path / "two", TierOptions(draft_bits=3)))))
    assert {part.tier for part in one.parts} == {Tier.DRAFT}
    assert {part.tier for part in tiered.parts} == {Tier.DRAFT, Tier.REFINE}


@pytest.mark.parametrize("tiers", [None, TierOptions(draft_bits=3)])
def test_what_every_pass_needs_comes_before_the_experts(tmp_path, tiers):
    artifact = packed("olmoe", tmp_path, tiers)
    with arriving(artifact, OPTIONS._replace(connections=1)) as (load, source, _):
        experts = parts_of(load.manifest, expert_groups(load.manifest))
        is_expert = reads_of(load.manifest, *experts)
        source.calls.clear()
        load.start()
        load.join()
        order = [is_expert(call) for call in source.calls if call.name.startswith("blobs")]
    assert order == sorted(order)
    assert any(order)


def test_a_draft_of_a_mixture_routes_with_the_weights_that_are_there(tmp_path):
    artifact = packed("mixtral", tmp_path, TierOptions(draft_bits=3))
    options = OPTIONS._replace(order=Order.DRAFT_FIRST)
    with arriving(artifact, options) as (load, source, decoder):
        held = source.hold(
            reads_of(load.manifest, *(part for part in load.manifest.parts if part.tier is Tier.REFINE))
        )
        load.start()
        stepper = Stepper(decoder)
        draft = torch.from_numpy(decoder.forward(stepper.batch({"a": PROMPT}), stepper.kv, tier=Tier.DRAFT))
        held.release()
        exact = Stepper(decoder).step({"a": PROMPT})["a"]
    assert draft.isfinite().all()
    assert not torch.equal(draft, exact)


def test_torch_waits_for_all_experts_of_a_layer(tmp_path):
    artifact = packed("mixtral", tmp_path)
    with arriving(artifact, backend=TorchBackend()) as (load, _, decoder):
        assert {stage.work for stage in decoder.stages} == {Work.EMBED, Work.LAYER, Work.HEAD}
        load.start()
        assert Stepper(decoder).step({"a": PROMPT})["a"].isfinite().all()
