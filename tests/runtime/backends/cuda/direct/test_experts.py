"""Mixtures of experts on the direct path: each kernel by itself, and models in any company."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.runtime.backends.cuda.direct.test_products import FORMATS, WORDS, Multiplier, matrix_of, rows_of
from tests.support.decoding import Stepper as HostStepper
from tests.support.direct_engine import (
    MIXTURES,
    TEXT,
    DirectModel,
    DirectRig,
    Stepper,
    check_company,
    prompts_of,
)
from tests.support.direct_kernels import Device, needs_kernels
from tests.support.direct_program import tensors_of
from tests.support.gptq_awq_checkpoints import foreign_checkpoint
from tests.support.models import arrays_of
from tests.support.native_decoder import with_parameters_in
from tests.support.quantized import FP8, FP8_ROWS
from tests.support.reference.operations import route as route_on_host
from tests.support.tiny_models import save_tiny, tiny_model

from teneral import cli
from teneral.runtime.backends.choose import BackendChoice
from teneral.runtime.backends.cuda.direct.arguments import AddExperts, GroupPairs, MatrixPart, RouteExperts
from teneral.runtime.backends.cuda.direct.memory import Array
from teneral.runtime.backends.cuda.direct.products import (
    MAX_FEW_ROWS,
    Mode,
    Tiles,
    expert_product_launch,
    layout_of,
    parts_of,
)
from teneral.runtime.backends.cuda.direct.refusals import refusal
from teneral.runtime.errors import ModelError
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.experts_config import Experts, ExpertShares
from teneral.runtime.models.matrices import Float8Matrix, StoredProjection
from teneral.runtime.tensors import DType, from_float32, to_float32
from teneral.runtime.weights import DictWeights

pytestmark = needs_kernels

EXPERTS = Experts(40, 6, 64, (True,), sum_to_1=False, rounds_weights=False)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def choose(
    device: Device, scores: np.ndarray, experts: Experts, correction: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    num, used = len(scores), experts.num_used
    chosen = device.empty((num, used), DType.U32)
    weights = device.empty((num, used), DType.F32)
    more = None if correction is None else device.put(correction)
    arguments = RouteExperts(
        scores=device.put(scores).address, correction=more.address if more is not None else 0,
        chosen=chosen.address, weights=weights.address, counts=device.put(np.array([num], np.uint32)).address,
        num=experts.num, num_used=used, correction_kind=2,
        sigmoid=experts.shares is ExpertShares.SIGMOID, wide_scores=experts.wide_scores,
        sum_to_1=experts.sum_to_1, rounds_weights=experts.rounds_weights,
        sum_eps=experts.sum_eps, factor=experts.factor,
        num_groups=experts.num_groups, num_groups_used=experts.num_groups_used,
    )  # fmt: skip
    device.run("experts", "route", (num + 3,), 32, arguments)
    return device.get(chosen), device.get(weights)


@pytest.mark.parametrize("corrects", [False, True])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"sum_to_1": True, "rounds_weights": True},
        {"shares": ExpertShares.SIGMOID, "sum_to_1": True, "sum_eps": 1e-20, "factor": 2.5},
        {"wide_scores": True, "sum_to_1": True},
        {"num_groups": 5, "num_groups_used": 2},
        {"shares": ExpertShares.SIGMOID, "wide_scores": True, "num_groups": 40, "num_groups_used": 7},
    ],
)
def test_rows_choose_the_experts_that_they_choose_on_the_cpu(
    device: Device, fields: dict[str, Any], *, corrects: bool
) -> None:
    dtype, experts = device.kernels.dtype, replace(EXPERTS, **fields)
    scores = random(9, experts.num)
    if not experts.wide_scores:
        scores = to_float32(from_float32(scores, dtype), dtype)
    correction = random(experts.num, seed=1) if corrects else None
    chosen, weights = choose(device, scores, experts, correction)
    expected, known = route_on_host(scores, experts, dtype, correction)
    order = np.argsort(expected, axis=-1)
    np.testing.assert_array_equal(chosen, np.take_along_axis(expected, order, -1))
    np.testing.assert_allclose(weights, np.take_along_axis(known, order, -1), rtol=2**-7)


def test_of_equal_scores_the_first_are_chosen(device: Device) -> None:
    scores = np.zeros((2, EXPERTS.num), np.float32)
    scores[0, 1::2] = -0.0
    scores[1, [33, 39]] = 1
    chosen, _ = choose(device, scores, EXPERTS)
    assert chosen.tolist() == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 33, 39]]


def test_any_scores_choose_different_experts_that_there_are(device: Device) -> None:
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0, 1e38], np.float32)
    scores = np.random.default_rng(0).choice(special, (40, EXPERTS.num))
    scores[0], scores[1] = np.nan, -np.inf
    in_groups = replace(EXPERTS, num_groups=4, num_groups_used=1)
    for experts in (EXPERTS, replace(EXPERTS, shares=ExpertShares.SIGMOID), in_groups):
        for correction in (None, scores[2]):
            chosen, _ = choose(device, scores, experts, correction)
            assert chosen.max() < experts.num
            assert (np.diff(chosen.astype(np.int64)) > 0).all()
            if experts is in_groups:
                assert (chosen // 10 == chosen[:, :1] // 10).all()


def group(
    device: Device, chosen: np.ndarray, num: int, tile_rows: int, num_tiles: int
) -> tuple[Array, Array, Array]:
    """The rows and places of pairs, and tiles."""
    pairs = chosen.size
    rows, places = device.empty((pairs,), DType.U32), device.empty((pairs,), DType.U32)
    tiles = device.put(np.full((num_tiles, 3), 77, np.uint32))
    counts = np.array([len(chosen), 0, 0, 0, pairs], np.uint32)
    arguments = GroupPairs(
        chosen=device.put(chosen.astype(np.uint32)).address, rows=rows.address, places=places.address,
        tiles=tiles.address, counts=device.put(counts).address, num=num, num_used=chosen.shape[1],
        tile_rows=tile_rows, num_tiles=num_tiles,
    )  # fmt: skip
    device.run("experts", "group_pairs", (num,), 256, arguments)
    return rows, places, tiles


def choices(num_rows: int, num: int, used: int, *, seed: int = 0, favours: int = 0) -> np.ndarray:
    """(rows, used), ascending; of `favours` experts each row has one."""
    generator = np.random.default_rng(seed)
    rows = [generator.permutation(num)[:used] for _ in range(num_rows)]
    if favours:
        rows = [np.unique(np.r_[number % favours, row])[:used] for number, row in enumerate(rows)]
    return np.sort(np.array(rows), axis=-1)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_pairs_are_grouped_by_expert(device: Device, data: st.DataObject) -> None:
    """Places of an expert are in the order of rows, and each is in one tile."""
    num = data.draw(st.integers(1, 70))
    used = data.draw(st.integers(1, min(num, 8)))
    tile_rows = data.draw(st.sampled_from([8, 16, 64]))
    chosen = choices(data.draw(st.integers(1, 90)), num, used, seed=data.draw(st.integers(0, 9)))
    most = chosen.size // tile_rows + min(num, chosen.size)
    rows, places, tiles = (
        device.get(each)
        for each in group(device, chosen, num, tile_rows, most + data.draw(st.integers(0, 3)))
    )
    order = np.argsort(chosen.reshape(-1), kind="stable")
    np.testing.assert_array_equal(places[order], np.arange(chosen.size))
    np.testing.assert_array_equal(rows, order // used)
    covered = []
    for expert, first, end in tiles.tolist():
        assert first == end or (chosen.reshape(-1)[order[first:end]] == expert).all()
        assert end - first <= tile_rows
        covered += range(first, end)
    assert covered == list(range(chosen.size))


@pytest.mark.parametrize(
    ("kind", "is_joined"),
    [*itertools.product(FORMATS, (True, False)), ("gptq", False), ("awq", False), ("packed", False)],
)
def test_products_of_experts_have_the_bits_of_each_experts_own(
    device: Device, kind: str, *, is_joined: bool
) -> None:
    """By every kernel; gate and up in one matrix, or apart."""
    num, used, size, num_in = 5, 2, 40 if kind in WORDS else 36, 192
    dtype, num_rows = device.kernels.dtype, 21
    sizes = [2 * size] if is_joined else [size, size]
    projections = [
        StoredProjection(tuple(matrix_of(device, kind, each, num_in, bias=True)[0] for each in sizes))
        for _ in range(num)
    ]
    parts = [part for each in projections for part in parts_of(each, size)]
    table = device.put(np.frombuffer((MatrixPart * len(parts))(*parts), np.uint8))
    rows, chosen = rows_of(device, num_rows, num_in), choices(num_rows, num, used, favours=2)
    x, pairs = device.put(rows, dtype), chosen.size
    counts = device.put(np.array([num_rows, 0, 0, 0, pairs], np.uint32))
    own = [
        np.concatenate(
            [Multiplier(device, matrix)(rows, mode=Mode.STORE) for matrix in each.matrices()], axis=1
        )
        for each in projections
    ]
    for num_pairs in (pairs, 12 * num, 30 * num, 60 * num, (MAX_FEW_ROWS + 1) * num):
        tiles = Tiles.of(num_pairs, num)
        by_place, places, tile_table = group(device, chosen, num, tiles.kernel.rows, tiles.num)
        out = device.put(np.zeros((pairs, 2 * size), dtype.numpy), dtype)
        launch = expert_product_launch(
            device.kernels, layout_of(projections[0].parts[0], dtype), x, out, counts, tiles,
            parts=table.address, num_parts=2, tile_table=tile_table.address, rows=by_place.address,
        )  # fmt: skip
        device.driver.launch(launch, device.stream)
        found = device.get(out)[device.get(places)].reshape(num_rows, used, -1)
        expected = np.array([[own[n][row] for n in numbers] for row, numbers in enumerate(chosen)])
        np.testing.assert_array_equal(found, expected, err_msg=tiles.kernel.name)


@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize("shared", ["none", "plain", "gated"])
def test_experts_are_weighted_rounded_and_added_in_order(device: Device, shared: str, *, adds: bool) -> None:
    dtype, num_rows, used, size = device.kernels.dtype, 5, 3, 300
    kind = torch.bfloat16 if dtype is DType.BF16 else torch.float16

    def put(*shape: int, seed: int) -> tuple[Array, torch.Tensor]:
        stored = from_float32(random(*shape, seed=seed), dtype)
        return device.put(stored, dtype), torch.from_numpy(stored.view(np.int16)).view(kind)

    out, before = put(num_rows, size, seed=1)
    made, rows = put(num_rows * used, size, seed=2)
    own, of_shared = put(num_rows, size, seed=3)
    gate, of_gate = put(num_rows, 1, seed=4)
    weights = np.abs(random(num_rows, used, seed=5))
    places = np.random.default_rng(6).permutation(num_rows * used).astype(np.uint32)
    arguments = AddExperts(
        out=out.address, made=made.address, places=device.put(places).address,
        weights=device.put(weights).address, shared=0 if shared == "none" else own.address,
        shared_gate=gate.address if shared == "gated" else 0,
        counts=device.put(np.array([num_rows - 1], np.uint32)).address,
        size=size, num_used=used, adds=adds,
    )  # fmt: skip
    device.run("experts", "add_experts", (num_rows, 2), 256, arguments)
    total = torch.zeros(num_rows, size, dtype=kind)
    for k in range(used):
        of_expert = rows[torch.from_numpy(places.reshape(num_rows, used)[:, k].astype(np.int64))]
        total += (of_expert * torch.from_numpy(weights[:, k : k + 1])).to(kind)
    if shared != "none":
        total = total + (torch.sigmoid(of_gate) * of_shared if shared == "gated" else of_shared)
    expected = before + total if adds else total
    expected[-1] = before[-1]  # a row that the step does not have
    found = torch.from_numpy(device.get(out).view(np.int16)).view(kind)
    np.testing.assert_allclose(found.float().numpy(), expected.float().numpy(), rtol=2**-7, atol=1e-6)
    assert (found != expected).sum() <= (4 if shared == "gated" else 0)


@pytest.fixture(scope="module")
def mixture() -> Iterator[DirectModel]:
    """40 experts, so that most have no row of a step, and layers with and without them."""
    oracle = tiny_model(
        "qwen3_moe", dtype=torch.bfloat16, num_experts=40, num_experts_per_tok=6, mlp_only_layers=[1],
        moe_intermediate_size=64,
    )  # fmt: skip
    made = DirectModel.of(oracle)
    yield made
    made.close()


def test_a_text_has_the_same_bits_in_chunks_in_company_and_as_a_graph(mixture: DirectModel) -> None:
    check_company(mixture, TEXT[:450])


@pytest.mark.parametrize("family", MIXTURES)
def test_logits_are_as_near_to_fp32_as_those_of_transformers(family: str) -> None:
    """But for texts whose rows choose other experts in bf16, which are as many as there."""
    oracle = with_parameters_in(torch.bfloat16, tiny_model(family, **MIXTURES[family]))
    model = DirectModel.of(oracle)
    stepper, text = Stepper(model), TEXT[:200]
    found = stepper.run({"text": text})["text"].copy()
    stepper.close()
    model.close()
    with torch.no_grad():
        in_bf16 = oracle(torch.tensor([text])).logits[0].float().numpy()
        exact = oracle.float()(torch.tensor([text])).logits[0].numpy()
    errors, known = (np.linalg.norm(each - exact, axis=1) for each in (found, in_bf16))
    for share in (0.25, 0.5, 0.75, 0.9):
        assert np.quantile(errors, share) < 1.3 * np.quantile(known, share)


@pytest.mark.parametrize("flags", [("int8",), ("int4", "--asymmetric")], ids=" ".join)
def test_quantised_mixtures_say_what_the_cpu_says(flags: tuple[str, ...], tmp_path: Path) -> None:
    folder = save_tiny("qwen3_moe", tmp_path / "model", dtype=torch.bfloat16, moe_intermediate_size=64)
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    assert cli.run(["pack", str(folder), str(packed), "--quantize", *flags, "--quiet"]) == 0
    assert cli.run(["unpack", str(packed), str(plain), "--quiet"]) == 0
    config, tensors = json.loads((plain / "config.json").read_text()), tensors_of(plain / "model.safetensors")
    # A prompt whose every next token leads by more than 0.2 on the CPU: orders of sums shift logits by 0.1.
    model, prompt = DirectModel(config, tensors), prompts_of(1, seed=124)[0]
    with DirectRig(model) as rig:
        (found,) = rig.say([prompt], 6)
    model.close()
    on_cpu = build_model(config, DictWeights(tensors), BackendChoice(threads=1).model_backends())
    assert isinstance(on_cpu, Decoder)
    assert found == tuple(HostStepper(on_cpu).greedy({"a": list(prompt)}, 6)["a"])


@pytest.mark.parametrize("note", [FP8, FP8_ROWS])
def test_mixtures_of_fp8_say_what_the_cpu_says(note: dict[str, Any]) -> None:
    oracle = tiny_model("qwen3_moe", moe_intermediate_size=128)
    config, checkpoint, _ = foreign_checkpoint(oracle, note)
    halves = {n: t if t.dtype is torch.float8_e4m3fn else t.to(torch.bfloat16) for n, t in checkpoint.items()}
    tensors, prompt = arrays_of(halves), prompts_of(2, seed=10)[1]
    model = DirectModel(config, tensors)
    expert = model.decoder.weights.layers[0].experts[0]
    assert isinstance(expert.down.matrices()[0], Float8Matrix)
    with DirectRig(model) as rig:
        (found,) = rig.say([prompt], 6)
    model.close()
    on_cpu = build_model(config, DictWeights(tensors), BackendChoice(threads=1).model_backends())
    assert isinstance(on_cpu, Decoder)
    assert found == tuple(HostStepper(on_cpu).greedy({"a": list(prompt)}, 6)["a"])


class TestRefusals:
    def test_gates_and_ups_that_alternate(self) -> None:
        with pytest.raises(ModelError, match="does not take experts whose gates and ups alternate"):
            DirectModel.of(tiny_model("gpt_oss", dtype=torch.bfloat16))

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            ({"weighs_inputs": True}, "does not implement experts.weighs_inputs = True"),
            ({"num_used": 33}, "does not implement experts.num_used = 33"),
            ({"num": 1025}, "does not implement experts.num = 1025"),
        ],
    )
    def test_what_kernels_lack_is_refused_by_name(
        self, mixture: DirectModel, fields: dict[str, Any], why: str
    ) -> None:
        spec, weights = mixture.decoder.spec, mixture.decoder.weights
        assert spec.experts is not None
        assert why in str(refusal(replace(spec, experts=replace(spec.experts, **fields)), weights))

    def test_experts_of_several_formats(self, mixture: DirectModel) -> None:
        """Biases of one type are no other format."""
        weights = mixture.decoder.weights
        first, second, *rest = weights.layers[0].experts
        for bias, is_taken in ((weights.norm, True), (replace(weights.norm, dtype=DType.F32), False)):
            down = StoredProjection((replace(second.down.matrices()[0], bias=bias),))
            experts = (first, replace(second, down=down), *rest)
            changed = (replace(weights.layers[0], experts=experts), *weights.layers[1:])
            reason = refusal(mixture.decoder.spec, replace(weights, layers=changed))
            assert (reason is None) == is_taken
            assert is_taken or "experts of several formats in one layer" in str(reason)
