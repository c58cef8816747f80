"""gpt-oss while its weights arrive: experts of one tensor are read by themselves."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.gpt_oss import checkpoint, saved
from tests.support.models import DictWeights, build_model
from tests.support.paced import WAIT_S, PacedSource, reads_of
from tests.support.tiny_models import config_json, tensors_in_rows, tensors_of, tiny_model

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import IntegrityError, UsageError
from teneral.loader.format import layout
from teneral.loader.format.layout import is_stacked
from teneral.loader.format.manifest import Part
from teneral.loader.load import queue
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.load.pages import plan_paging, step_need
from teneral.loader.load.plan import RowParts, expert_groups
from teneral.loader.native.library import library
from teneral.loader.sources.open import open_source, open_store
from teneral.loader.tools.inspect import describe, render_table
from teneral.loader.tools.pack import quantize_plan
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions
from teneral.loader.tools.pack.prune import PruneOptions
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.runtime.backends.native.backend import NativeBackend
from teneral.runtime.files import ModelFiles
from teneral.runtime.models.decoder import Decoder, Work
from teneral.runtime.weights import StreamedWeights

pytestmark = pytest.mark.skipif(library() is None, reason="the native libraries are not built here")

# An expert's matrices take several frames, of which two are its neighbours', too.
SHAPE = {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 8160}
OPTIONS = LoadOptions(on_demand=True, connections=64)
PROMPT = prompt_of(1, seed=5)
NAMES = [f"{name}_proj_{kind}" for name in ("gate_up", "down") for kind in ("blocks", "scales")]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("gpt-oss")
    config, tensors, _ = checkpoint(**SHAPE)
    plain = saved(folder / "plain", config, tensors)
    pack(open_source(str(plain)), open_store(str(folder / "packed")))
    return {"plain": plain, "packed": folder / "packed"}


@contextmanager
def arriving(folder: Path, *, seed: int = 1) -> Iterator[tuple[WeightLoad, PacedSource, Decoder]]:
    """A load that is not started, whose memory holds NaN, and the model over it."""
    source = PacedSource(open_source(str(folder)))
    source.delay(seed=seed, max_s=0.003)
    manifest = open_artifact(source)
    with closing(source), WeightLoad(source, manifest, options=OPTIONS) as load:
        yield load, source, decoder_over(load, source)


def decoder_over(load: WeightLoad, source: Any) -> Decoder:
    for group in load.manifest.groups:
        load.slab(group.index)[:] = 0xFF
    config = ModelFiles(source, load.manifest, OPTIONS).json("config.json", required=True)
    decoder = build_model(config, StreamedWeights(load), backends=[NativeBackend()])
    assert isinstance(decoder, Decoder)
    return decoder


def whole(folder: Path) -> tuple[torch.Tensor, list[list[int]]]:
    """The prompt's logits once all weights are there, and the experts that it chooses in each layer."""
    with arriving(folder) as (load, _, decoder):
        load.start()
        load.join()
        stepper, executor = Stepper(decoder), decoder.executor
        batch = stepper.batch({"a": PROMPT})
        x, step = executor.embed(batch), executor.begin(batch, stepper.kv)
        chosen: list[list[int]] = []
        for stage in decoder.stages:
            if stage.work is Work.ROUTE:
                x, experts = executor.route(step, stage.layer, x)  # type: ignore[attr-defined]
                chosen.append(np.unique(experts).tolist())
                x = executor.experts(step, stage.layer, x)  # type: ignore[attr-defined]
        return Stepper(decoder).step({"a": PROMPT})["a"], chosen


def parts_of(load: WeightLoad, chosen: list[list[int]]) -> set[int]:
    """The numbers of the parts that hold these experts of each layer."""
    found: set[int] = set()
    for layer, experts in enumerate(chosen):
        for name in NAMES:
            found |= RowParts(load.manifest, f"model.layers.{layer}.mlp.experts.{name}").holding(experts)
    return found


def parts_of_experts(load: WeightLoad) -> list[Part]:
    groups = expert_groups(load.manifest)
    return [part for part in load.manifest.parts if part.group in groups]


@pytest.mark.parametrize("form", ["packed", "plain"])
@pytest.mark.parametrize("seed", [1, 2])
def test_a_pass_waits_for_the_chosen_experts_alone(folders, monkeypatch, form, seed):
    # Other tests and processes may slow this one.
    monkeypatch.setattr(queue, "HOLD_S", WAIT_S)
    monkeypatch.setattr(queue, "MAX_HOLD_S", WAIT_S)
    expected, chosen = whole(folders[form])
    with arriving(folders[form], seed=seed) as (load, source, decoder):
        needed = parts_of(load, chosen)
        others = [part for part in parts_of_experts(load) if part.index not in needed]
        stored_bytes = sum(part.size_bytes for part in parts_of_experts(load))
        assert sum(part.size_bytes for part in others) > 0.6 * stored_bytes, "2 of 8 experts are needed"
        held = source.hold(reads_of(load.manifest, *others))
        # As a pass does whose first layer is there at once: from then on others are held back.
        load.want_parts([min(needed)])
        load.start()
        ours = Stepper(decoder).step({"a": PROMPT})["a"]
        assert held.num_reached == 0, "experts were read in vain"
        assert not any(load.is_ready(group) for group in expert_groups(load.manifest))
        held.release()
    assert torch.equal(ours, expected)


def test_a_damaged_expert_fails_the_passes_that_need_it(folders):
    expected, chosen = whole(folders["packed"])
    with arriving(folders["packed"]) as (load, source, decoder):
        needed = [load.manifest.parts[number] for number in parts_of(load, chosen)]
        bad = max(needed, key=lambda part: part.size_bytes)  # read by itself
        source.spoil(reads_of(load.manifest, bad), times=1)  # it is fetched again
        load.start()
        assert torch.equal(Stepper(decoder).step({"a": PROMPT})["a"], expected)
    with arriving(folders["packed"]) as (load, source, decoder):
        source.spoil(reads_of(load.manifest, bad), times=2)
        load.start()
        with pytest.raises(IntegrityError, match="experts"):
            Stepper(decoder).step({"a": PROMPT})


def test_experts_of_one_tensor_have_a_group_behind_their_layer(folders):
    for folder in folders.values():
        manifest = open_artifact(open_source(str(folder)))
        names = [group.name for group in manifest.groups if is_stacked(group.name)]
        assert names == [f"layers.{layer}.experts" for layer in range(len(names))]
        for group in expert_groups(manifest):
            held = [manifest.tensors[number].name for number in manifest.groups[group].tensors]
            assert sorted(name.rpartition(".")[2] for name in held) == sorted(NAMES)


def test_an_artifact_whose_experts_lie_in_their_layers_gives_the_same_bits(folders, tmp_path, monkeypatch):
    monkeypatch.setattr(layout, "_STACKED", re.compile("(?!)"))
    pack(open_source(str(folders["plain"])), open_store(str(tmp_path / "old")))
    monkeypatch.undo()
    with arriving(tmp_path / "old") as (load, _, decoder):
        assert not expert_groups(load.manifest)
        load.start()
        ours = Stepper(decoder).step({"a": PROMPT})["a"]
    assert torch.equal(ours, whole(folders["packed"])[0])


def test_inspect_counts_experts_of_one_tensor(folders):
    description = describe(open_artifact(open_source(str(folders["packed"]))), "x")
    layers = description["experts"]["layers"]
    assert description["experts"]["count"] == layers * SHAPE["num_local_experts"]
    assert "layers.0.experts " in render_table(description)


@pytest.mark.parametrize("form", ["packed", "plain"])
def test_experts_of_one_tensor_come_and_go_one_by_one(folders, form):
    source = open_source(str(folders[form]))
    manifest = open_artifact(source)
    need = step_need(manifest)
    assert need is not None
    paging = plan_paging(manifest, need.least_bytes)
    assert paging is not None
    assert paging.groups == expert_groups(manifest)
    assert len(paging.pages) == SHAPE["num_local_experts"] * len(paging.groups)
    assert need.layer_bytes > 0.5 * manifest.groups[min(paging.groups)].slab_bytes
    expected, chosen = whole(folders[form])
    with WeightLoad(source, manifest, paging=paging, options=OPTIONS) as load:
        config = json.loads((folders["plain"] / "config.json").read_text())
        decoder = build_model(config, StreamedWeights(load), backends=[NativeBackend()])
        assert isinstance(decoder, Decoder)
        assert decoder.routes_apart
        load.start()
        for _ in range(3):
            assert torch.equal(Stepper(decoder).step({"a": PROMPT})["a"], expected)
            for name in ("a", "b", "c"):  # others, which make way for each other
                Stepper(decoder).step({name: prompt_of(3, seed=ord(name))})
            load.check_integrity()
        statistics = load.experts.statistics()
        assert statistics.evictions_total > 0
        assert statistics.resident < len(paging.pages)
        assert statistics.hits_total > 0
        assert sum(map(len, chosen)) < len(paging.pages)


# With the sizes of an expert that take several frames
IN_ROWS = {
    "qwen3_5_moe_text": {"moe_intermediate_size": 2048},
    "granitemoehybrid": {"intermediate_size": 2048},
}


@pytest.mark.parametrize("draft_bits", [None, 3])
@pytest.mark.parametrize("family", IN_ROWS)
def test_experts_that_are_rows_of_floats_are_read_by_themselves(
    tmp_path: Path, family: str, draft_bits: int | None
) -> None:
    from safetensors.torch import save_file

    model = tiny_model(family, dtype=torch.bfloat16, **IN_ROWS[family])
    (tmp_path / "plain").mkdir()
    save_file(tensors_in_rows(model), tmp_path / "plain" / "model.safetensors")
    (tmp_path / "plain" / "config.json").write_text(json.dumps(config_json(model)))
    tiers = None if draft_bits is None else TierOptions(draft_bits=draft_bits)
    pack(open_source(str(tmp_path / "plain")), open_store(str(tmp_path / "packed")), tiers=tiers)
    backends = [NativeBackend()]
    oracle = build_model(config_json(model), DictWeights(tensors_in_rows(model)), backends=backends)

    with arriving(tmp_path / "packed") as (load, _, decoder):
        gates = [layer.expert_gate for layer in decoder.weights.layers]
        load.start()
        ours = Stepper(decoder).step({"a": prompt_of(9)})["a"]
        load.join()

    assert all(gate is not None for gate in gates)
    assert sum(is_stacked(group.name) for group in load.manifest.groups) == 3
    assert torch.equal(ours, Stepper(oracle).step({"a": prompt_of(9)})["a"])


@pytest.mark.parametrize(
    "options",
    [{"quantize": QuantizeOptions(8)}, {"quantize": QuantizeOptions(4)}, {"prune": PruneOptions(0.5)}],
    ids=["int8", "int4", "pruned"],
)
@pytest.mark.parametrize("family", IN_ROWS)
def test_experts_in_rows_become_what_those_that_are_stored_apart_become(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_model(family, dtype=torch.bfloat16)
    made = []
    for name, tensors in (("rows", tensors_in_rows(model)), ("apart", tensors_of(model))):
        plain = saved(tmp_path / name, config_json(model), tensors)
        result = pack(open_source(str(plain)), open_store(str(tmp_path / f"{name}-packed")), **options)
        made.append(result.manifest)
    rows, apart = made

    assert any(tensor.ndim == 3 and "conv1d" not in name for name, tensor in tensors_in_rows(model).items())
    assert "layers.0.experts.3" in {group.name for group in rows.groups}
    assert rows.tensors == apart.tensors
    assert rows.parts == apart.parts, "with equal digests"


@pytest.mark.parametrize("bits", [8, 4])
def test_experts_with_the_inputs_first_become_the_same_integers_as_those_that_are_stored_apart(
    bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read in several pieces, as large ones are."""
    monkeypatch.setattr(quantize_plan, "READ_ELEMENTS", 1 << 10)
    model, made = tiny_model("llama4_text", dtype=torch.bfloat16), []
    for name, tensors in (("columns", model.state_dict()), ("apart", tensors_of(model))):
        plain = saved(tmp_path / name, config_json(model), tensors)
        folder = tmp_path / f"{name}-packed"
        pack(open_source(str(plain)), open_store(str(folder)), quantize=QuantizeOptions(bits))
        with arriving(folder) as (load, _, decoder):
            gates = [layer.expert_gate for layer in decoder.weights.layers if layer.experts]
            load.start()
            made.append((Stepper(decoder).step({"a": prompt_of(40)})["a"], load.manifest))
        assert all(gate is not None for gate in gates)
    (ours, manifest), (apart, _) = made

    assert "model.layers.0.feed_forward.experts.gate_up_proj" in model.state_dict()
    assert "layers.0.experts.3" in {group.name for group in manifest.groups}
    assert torch.equal(ours, apart)


def test_experts_whose_outputs_alternate_are_not_quantised(tmp_path: Path) -> None:
    model = tiny_model("gpt_oss")
    plain = saved(tmp_path / "plain", config_json(model), model.state_dict())

    with pytest.raises(UsageError, match="all experts of a layer in one tensor"):
        pack(open_source(str(plain)), open_store(str(tmp_path / "packed")), quantize=QuantizeOptions(8))
