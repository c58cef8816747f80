"""Attention over latents on the direct path: each kernel by itself, and models in any company."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec.structs import replace
from tests.support.decoding import Stepper as HostStepper
from tests.support.direct_engine import (
    LATENTS,
    TEXT,
    DirectModel,
    DirectRig,
    check_company,
    prompts_of,
)
from tests.support.direct_kernels import Device, needs_kernels
from tests.support.direct_program import tensors_of
from tests.support.gptq_awq_checkpoints import foreign_checkpoint
from tests.support.models import arrays_of
from tests.support.quantized import FP8_ROWS
from tests.support.reference.operations import of_codes, rounded, to_codes
from tests.support.reference.operations import turn as turn_on_host
from tests.support.tiny_models import save_tiny, tiny_model

from teneral import cli
from teneral.runtime.backends.choose import BackendChoice
from teneral.runtime.backends.cuda.direct.arguments import (
    AbsorbQueries,
    Attention,
    HeadProduct,
    MatrixPart,
    PlaceLatents,
    TransposeMatrix,
)
from teneral.runtime.backends.cuda.direct.attention import attention_launches
from teneral.runtime.backends.cuda.direct.latent import copied_layers
from teneral.runtime.backends.cuda.direct.memory import Array
from teneral.runtime.backends.cuda.direct.products import MAX_FEW_ROWS, MatrixLayout, kernel_for
from teneral.runtime.backends.cuda.direct.refusals import refusal
from teneral.runtime.backends.cuda.direct.tables import AttentionPlan, plan_attention
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.step.batch import SequenceSpan
from teneral.runtime.tensors import DType, from_float32, to_float32
from teneral.runtime.weights import DictWeights

pytestmark = needs_kernels

BLOCK_SIZE = 16


def random(dtype: DType, *shape: int, seed: int = 0) -> np.ndarray:
    """Numbers of the dtype, as fp32."""
    return rounded(np.random.default_rng(seed).standard_normal(shape).astype(np.float32), dtype)


def put(device: Device, numbers: np.ndarray) -> Array:
    dtype = device.kernels.dtype
    return device.put(from_float32(numbers, dtype), dtype)


def get(device: Device, array: Array) -> np.ndarray:
    return to_float32(device.get(array), device.kernels.dtype)


@pytest.mark.parametrize(("heads", "plain", "rank", "num_rows"), [(3, 48, 96, 37), (2, 128, 512, 3)])
def test_queries_are_multiplied_with_each_heads_rows_for_keys(
    device: Device, heads: int, plain: int, rank: int, num_rows: int
) -> None:
    """Rows that the step does not have, and numbers behind the latent's, stay; a row's bits are its own."""
    dtype, turned, value = device.kernels.dtype, 8, 24
    matrix = random(dtype, heads, plain + value, rank, seed=1) / rank**0.5
    stride = heads * (plain + turned) + 8
    queries = random(dtype, num_rows, stride, seed=2)
    weight, x = put(device, matrix), put(device, queries)

    def absorb(first: int, num: int) -> np.ndarray:
        out = put(device, np.full((num + 1, heads, rank + turned), 7, np.float32))
        arguments = AbsorbQueries(
            weight=weight.address, queries=x.row(first), out=out.address,
            counts=device.put(np.array([num], np.uint32)).address, num_heads=heads, head_rows=plain + value,
            rank=rank, plain_dim=plain, query_dim=plain + turned, query_stride=stride, out_dim=rank + turned,
        )  # fmt: skip
        device.run("latent", "absorb_queries", (-(-num // 32) + 1, heads, -(-rank // 512)), 256, arguments)
        return get(device, out)

    found = absorb(0, num_rows)
    own = queries[:, : stride - 8].reshape(num_rows, heads, -1)[..., :plain].astype(np.float64)
    expected = np.einsum("thp,hpr->thr", own, rounded(matrix, dtype)[:, :plain])
    np.testing.assert_allclose(found[:-1, :, :rank], expected, rtol=2**-7, atol=2**-5)
    assert (found[-1] == 7).all()
    assert (found[:, :, rank:] == 7).all()
    np.testing.assert_array_equal(absorb(num_rows - 2, 2)[:2], found[-3:-1])


@pytest.mark.parametrize(("heads", "value", "rank", "num_rows"), [(3, 24, 96, 70), (2, 144, 512, 5)])
def test_sums_are_multiplied_with_each_heads_rows_for_values(
    device: Device, heads: int, value: int, rank: int, num_rows: int
) -> None:
    """By every kernel, with the same bits."""
    dtype, plain = device.kernels.dtype, 16
    matrix = random(dtype, heads, plain + value, rank, seed=1) / rank**0.5
    sums = random(dtype, num_rows, heads, rank, seed=2)
    weight, x = put(device, matrix), put(device, sums)
    layout = MatrixLayout("float", rank, rank, scale_rows=1, scale_kind=0, bias_kind=0)
    counts = device.put(np.array([num_rows], np.uint32))
    rows_of_x, made = Array(x.address, (num_rows, rank), dtype), []
    for bucket in (8, 16, 32, 64, MAX_FEW_ROWS + 1):
        out = put(device, np.zeros((num_rows, heads * value), np.float32))
        part = MatrixPart(weight=weight.address + plain * rank * 2)
        each = layout.product(part, value, rows_of_x, out, counts)
        kernel = kernel_for(bucket)
        grid = -(-num_rows // kernel.rows) + 1, heads * -(-value // kernel.outs)
        arguments = HeadProduct(each=each, head_rows=plain + value, x_stride=heads * rank)
        device.run("latent", f"latent_{kernel.name}", grid, 256, arguments)
        made.append(get(device, out))
    expected = np.einsum("thr,hvr->thv", sums.astype(np.float64), rounded(matrix, dtype)[:, plain:])
    np.testing.assert_allclose(made[0].reshape(expected.shape), expected, rtol=2**-7, atol=2**-5)
    for other in made[1:]:
        np.testing.assert_array_equal(other, made[0])


def test_matrices_are_transposed(device: Device) -> None:
    numbers = random(device.kernels.dtype, 70, 45)
    out = put(device, np.zeros((45, 70), np.float32))
    arguments = TransposeMatrix(source=put(device, numbers).address, out=out.address, num_in=70, num_out=45)
    device.run("latent", "transpose_matrix", (3, 2), 256, arguments)
    np.testing.assert_array_equal(get(device, out), numbers.T)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("wide", [True, False])
@pytest.mark.parametrize("of_int8", [True, False])
def test_queries_and_keys_turn_and_rows_go_to_their_slots(
    device: Device, *, interleaved: bool, wide: bool, of_int8: bool
) -> None:
    dtype, num_rows, heads, plain, turned, rank = device.kernels.dtype, 5, 6, 16, 8, 64
    down = random(dtype, num_rows, heads * (plain + turned) + rank + turned)
    angles = np.random.default_rng(3).uniform(0, 6, (9, turned // 2)).astype(np.float32)
    positions, slots = np.array([0, 8, 3, 3, 1], np.uint32), np.array([4, 0, 6, 2, 5], np.uint32)
    x, absorbed = put(device, down), put(device, np.full((num_rows, heads, rank + turned), 7, np.float32))
    pool = (
        device.put(np.full((7, rank + turned), 3, np.int8))
        if of_int8
        else put(device, np.full((7, rank + turned), 7, np.float32))
    )
    scales = put(device, np.full(7, 7, np.float32))
    arguments = PlaceLatents(
        queries=x.address, latents=x.address + 2 * heads * (plain + turned), absorbed=absorbed.address,
        pool=pool.address, scales=scales.address if of_int8 else 0,
        cos=device.put(np.cos(angles)).address, sin=device.put(np.sin(angles)).address,
        positions=device.put(positions).address, slots=device.put(slots).address,
        counts=device.put(np.array([num_rows - 1], np.uint32)).address, num_heads=heads, plain_dim=plain,
        rotary_dim=turned, rank=rank, query_stride=down.shape[1], latent_stride=down.shape[1],
        interleaved=interleaved, wide_turns=wide,
    )  # fmt: skip
    device.run("rows", "place_latents", (num_rows + 2, 2), 128, arguments)
    turns = np.concatenate([np.cos(angles), np.sin(angles)], axis=1)[positions]
    inner = DType.F32 if wide else dtype
    queries = down[:, : -rank - turned].reshape(num_rows, heads, -1)[..., plain:]
    keys = down[:, None, -turned:]
    of_queries, of_keys = (
        turn_on_host(each, rounded(turns, inner), dtype, inner, interleaved=interleaved)
        for each in (queries, keys)
    )
    found = get(device, absorbed)
    np.testing.assert_array_equal(found[:-1, :, rank:], of_queries[:-1])
    assert (found[:, :, :rank] == 7).all()
    assert (found[-1] == 7).all()
    rows = np.concatenate([down[:, -rank - turned : -turned], of_keys[:, 0]], axis=1)[:-1]
    if of_int8:
        codes, of_rows = to_codes(rows, dtype)
        np.testing.assert_array_equal(device.get(pool)[slots[:-1]], codes)
        np.testing.assert_array_equal(get(device, scales)[slots[:-1]], of_rows[:, 0])
    else:
        np.testing.assert_array_equal(get(device, pool)[slots[:-1]], rows)
        assert (get(device, pool)[slots[-1]] == 7).all()


class Latents:
    """Latents of one long sequence, in blocks that lie anywhere, and queries for each of its places."""

    def __init__(
        self, device: Device, *, num_tokens: int, heads: int, rank: int = 512, turned: int = 64
    ) -> None:
        generator = np.random.default_rng(0)
        dtype = device.kernels.dtype
        self.device, self.num_heads, self.rank, self.dim = device, heads, rank, rank + turned
        self.queries = random(dtype, num_tokens, heads, self.dim, seed=1)
        codes, scales = to_codes(random(dtype, num_tokens, self.dim, seed=2), dtype)
        self.latents = of_codes(codes, scales, dtype)  # which pools of both kinds hold
        num_blocks = -(-num_tokens // BLOCK_SIZE) + 3
        self.blocks = tuple(map(int, generator.permutation(num_blocks)[: -(-num_tokens // BLOCK_SIZE)]))
        slots = [self.blocks[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in range(num_tokens)]
        pool = np.full((num_blocks * BLOCK_SIZE, self.dim), np.nan, np.float32)
        pool[slots] = self.latents
        self.pool = put(device, pool)
        of_codes_too = np.full(pool.shape, 99, np.int8)
        of_codes_too[slots] = codes
        of_scales = np.full(len(pool), np.nan, np.float32)
        of_scales[slots] = scales[:, 0]
        self.codes, self.scales = device.put(of_codes_too), put(device, of_scales)
        self.scale = self.dim**-0.5

    def expected(self, places: Sequence[int]) -> np.ndarray:
        out = np.empty((len(places), self.num_heads, self.rank))
        for row, at in enumerate(places):
            seen = self.latents[: at + 1].astype(np.float64)
            scores = self.queries[at] @ seen.T * self.scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            out[row] = weights @ seen[:, : self.rank] / weights.sum(-1, keepdims=True)
        return out

    def attend(
        self, runs: Sequence[tuple[int, int]], *, num_processors: int = 1, of_int8: bool = False,
        plan: AttentionPlan | None = None,
    ) -> np.ndarray:  # fmt: skip
        """The rows of these runs [first, end) of places, each a sequence of its own."""
        device = self.device
        rows, spans, start = [at for first, end in runs for at in range(first, end)], [], 0
        for first, end in runs:
            spans.append(SequenceSpan(start, end - first, end, self.blocks[: -(-end // BLOCK_SIZE)]))
            start += end - first
        plan = plan or plan_attention(
            spans, self.num_heads, num_kv_heads=1, num_processors=num_processors, takes_many=False
        )
        assert not plan.many
        out = put(device, np.zeros((len(rows), self.num_heads, self.rank), np.float32))
        pool, slots = self.codes if of_int8 else self.pool, max(1, plan.num_slots)

        def table(numbers: object) -> int:
            return device.put(np.array(numbers or [0], np.uint32).reshape(-1)).address

        lengths = np.cumsum([0, *[len(span.blocks) for span in spans]])[:-1].tolist()
        arguments = Attention(
            heads=put(device, self.queries[rows]).address, keys=pool.address, values=pool.address,
            out=out.address, key_scales=self.scales.address if of_int8 else 0,
            value_scales=self.scales.address if of_int8 else 0,
            split_sums=device.put(np.full((slots, 16, self.rank), np.nan, np.float32)).address,
            split_scales=device.put(np.full((slots, 16, 2), np.nan, np.float32)).address,
            items=table(plan.items), merges=table(plan.merges),
            starts=table([span.start for span in spans]), lengths=table([span.length for span in spans]),
            contexts=table([span.context_len for span in spans]), table_starts=table(lengths),
            blocks=table([block for span in spans for block in span.blocks]),
            counts=table([len(rows), 0, len(plan.items), len(plan.merges)]),
            num_heads=self.num_heads, num_kv_heads=1, row_heads=self.num_heads, head_dim=self.dim,
            value_dim=self.rank, block_size=BLOCK_SIZE, window=1 << 30, scale=self.scale * 1.4426950408889634,
        )  # fmt: skip
        sizes = {"num_items": len(plan.items) + 2, "num_merges": len(plan.merges)}
        for launch in attention_launches(device.kernels, arguments, many=False, of_latents=True, **sizes):
            device.driver.launch(launch, device.stream)
        return device.get(out)


@pytest.mark.parametrize(("heads", "rank", "turned"), [(16, 512, 64), (3, 64, 8), (20, 96, 16)])
def test_attention_is_right(device: Device, heads: int, rank: int, turned: int) -> None:
    cache = Latents(device, num_tokens=300, heads=heads, rank=rank, turned=turned)
    runs = [(0, 4), (298, 300), (255, 257), (65, 66)]
    found = to_float32(cache.attend(runs), device.kernels.dtype)
    expected = cache.expected([at for first, end in runs for at in range(first, end)])
    np.testing.assert_allclose(found, expected, atol=0.02 if device.kernels.dtype is DType.BF16 else 0.004)
    np.testing.assert_array_equal(cache.attend(runs, of_int8=True), cache.attend(runs))


def test_a_row_has_the_same_bits_alone_in_chunks_and_split(device: Device) -> None:
    """Three splits of keys: by one block, by a block each; heads of a row in one item, or in two."""
    cache = Latents(device, num_tokens=600, heads=20, rank=96, turned=16)
    places = [0, 64, 255, 256, 511, 599]
    alone = np.concatenate([cache.attend([(at, at + 1)]) for at in places])
    for num_processors in (1, 99):
        together = cache.attend([(at, at + 1) for at in places], num_processors=num_processors)
        np.testing.assert_array_equal(together, alone)
    for first, end in ((250, 258), (511, 513), (0, 3), (595, 600)):
        run = cache.attend([(first, end)])
        for at, bits in zip(places, alone, strict=True):
            if first <= at < end:
                np.testing.assert_array_equal(run[at - first], bits)


@pytest.fixture(scope="module")
def deepseek() -> Iterator[DirectModel]:
    made = DirectModel.of(tiny_model("deepseek_v3", dtype=torch.bfloat16, **LATENTS["deepseek_v3"]))
    yield made
    made.close()


@pytest.mark.parametrize("kind", [KVKind.MODEL, KVKind.INT8], ids=str)
def test_a_text_has_the_same_bits_in_chunks_in_company_and_as_a_graph(
    deepseek: DirectModel, kind: KVKind
) -> None:
    check_company(deepseek, TEXT[:300], kind=kind)


@pytest.mark.parametrize("flags", [("int8",), ("int4", "--asymmetric")], ids=" ".join)
def test_quantised_latents_say_what_the_cpu_says(flags: tuple[str, ...], tmp_path: Path) -> None:
    """Their matrix is copied in 16 bits."""
    folder = save_tiny("deepseek_v2", tmp_path / "model", dtype=torch.bfloat16, **LATENTS["deepseek_v2"])
    packed, plain = tmp_path / "packed", tmp_path / "plain"
    assert cli.run(["pack", str(folder), str(packed), "--quantize", *flags, "--quiet"]) == 0
    assert cli.run(["unpack", str(packed), str(plain), "--quiet"]) == 0
    config, tensors = json.loads((plain / "config.json").read_text()), tensors_of(plain / "model.safetensors")
    assert_says_what_the_cpu_says(config, tensors)


def test_latents_of_fp8_say_what_the_cpu_says() -> None:
    oracle = tiny_model("deepseek_v3", **{**LATENTS["deepseek_v3"], "moe_intermediate_size": 128})
    config, checkpoint, _ = foreign_checkpoint(oracle, FP8_ROWS)
    halves = {n: t if t.dtype is torch.float8_e4m3fn else t.to(torch.bfloat16) for n, t in checkpoint.items()}
    assert_says_what_the_cpu_says(config, arrays_of(halves))


def assert_says_what_the_cpu_says(config: dict[str, Any], tensors: Any) -> None:
    model, prompt = DirectModel(config, tensors), prompts_of(2, seed=10)[1]
    decoder = model.decoder
    assert len(copied_layers(decoder.weights, decoder.spec.dtype)) == decoder.spec.num_layers
    with DirectRig(model) as rig:
        (found,) = rig.say([prompt], 6)
        assert rig.say([prompt], 6) == [found]
    model.close()
    on_cpu = build_model(config, DictWeights(tensors), BackendChoice(threads=1).model_backends())
    assert isinstance(on_cpu, Decoder)
    assert found == tuple(HostStepper(on_cpu).greedy({"a": list(prompt)}, 6)["a"])


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"rank": 544}, "does not implement latent.rank = 544"),
        ({"rank": 72}, "does not implement latent.rank = 72"),
        ({"plain_dim": 24}, "does not implement latent.plain_dim = 24"),
        ({"value_dim": 20}, "does not implement latent.value_dim = 20"),
    ],
)
def test_sizes_that_kernels_lack_are_refused_by_name(
    deepseek: DirectModel, fields: dict[str, int], why: str
) -> None:
    spec, weights = deepseek.decoder.spec, deepseek.decoder.weights
    assert spec.latent is not None
    assert refusal(spec, weights) is None
    assert why in str(refusal(replace(spec, latent=replace(spec.latent, **fields)), weights))
    assert "does not implement head_dim = 584" in str(refusal(replace(spec, head_dim=584), weights))
