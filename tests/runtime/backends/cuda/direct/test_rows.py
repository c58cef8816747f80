"""Embeddings, norms, heads and the gate on the device, against torch; copies of blocks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.support.direct_kernels import Device
from tests.support.reference.operations import to_codes

from teneral.runtime.backends.cuda.direct.arguments import (
    AddRows,
    CopyBlocks,
    CopyTokens,
    Embed,
    Gate,
    NormRows,
    PlaceHeads,
    PoolRows,
    ScaleLogits,
)
from teneral.runtime.backends.cuda.direct.refusals import NORMS
from teneral.runtime.models.fields import Norm
from teneral.runtime.models.pooling import pooled
from teneral.runtime.models.spec import Pooling
from teneral.runtime.tensors import DType, from_float32, to_float32

TORCH = {DType.BF16: torch.bfloat16, DType.F16: torch.float16}
KINDS = {DType.BF16: 0, DType.F16: 1, DType.F32: 2}


def random(device: Device, *shape: int, seed: int = 0) -> np.ndarray:
    numbers = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return from_float32(numbers, device.kernels.dtype)


def tensor(device: Device, numbers: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(numbers.view(np.int16)).view(TORCH[device.kernels.dtype])


def assert_close(device: Device, found: np.ndarray, expected: torch.Tensor, *, num_off: int = 0) -> None:
    """Equal but for `num_off` numbers, which are one rounding apart."""
    dtype = device.kernels.dtype
    wide, known = to_float32(found, dtype), expected.float().numpy()
    np.testing.assert_allclose(wide, known, rtol=2**-7 if dtype is DType.BF16 else 2**-10, atol=1e-6)
    assert np.count_nonzero(wide != known) <= num_off


def counts(device: Device, *numbers: int) -> int:
    return device.put(np.array(numbers, np.uint32)).address


@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_embeddings_are_the_tokens_rows(device: Device, scale: float) -> None:
    dtype = device.kernels.dtype
    table, tokens = random(device, 50, 72), np.array([49, 3, 3, 0], np.uint32)
    out = device.put(np.zeros((4, 72), dtype.numpy), dtype)
    arguments = Embed(
        table=device.put(table, dtype).address, tokens=device.put(tokens).address, out=out.address,
        counts=counts(device, 3), size=72, group=72, table_kind=KINDS[dtype], scale=scale,
    )  # fmt: skip
    device.run("rows", "embed", (4,), 256, arguments)
    expected = tensor(device, table)[torch.tensor([49, 3, 3])] * scale
    found = device.get(out)
    assert_close(device, found[:3], expected)
    assert not found[3].any()  # rows beyond the count are left alone


@pytest.mark.parametrize("has_positions", [False, True])
@pytest.mark.parametrize("has_types", [False, True])
def test_embeddings_in_fp32_gain_those_of_types_and_positions(
    device: Device, has_types: bool, has_positions: bool
) -> None:
    dtype, size = device.kernels.dtype, 72
    tables = [
        np.random.default_rng(seed).standard_normal((num, size)).astype(np.float32)
        for seed, num in enumerate((50, 2, 9))
    ]
    tokens, types, positions = (np.array(each, np.uint32) for each in ([49, 3, 3], [0, 1, 1], [0, 1, 6]))
    out = device.put(np.zeros((3, size), dtype.numpy), dtype)
    arguments = Embed(
        table=device.put(tables[0]).address, tokens=device.put(tokens).address, out=out.address,
        counts=counts(device, 3), type_table=device.put(tables[1]).address if has_types else 0,
        types=device.put(types).address, position_table=device.put(tables[2]).address if has_positions else 0,
        positions=device.put(positions).address, size=size, group=size, table_kind=KINDS[DType.F32],
        first_position=2, scale=1.0,
    )  # fmt: skip
    device.run("rows", "embed", (3,), 256, arguments)
    narrow = [torch.from_numpy(table).to(TORCH[dtype]) for table in tables]
    expected = narrow[0][tokens.astype(np.int64)]
    if has_types:
        expected = expected + narrow[1][types.astype(np.int64)]
    if has_positions:
        expected = expected + narrow[2][positions.astype(np.int64) + 2]
    assert_close(device, device.get(out), expected)


@pytest.mark.parametrize("scale", [1.0, 12.0])
def test_embeddings_of_int8_are_levels_times_their_groups_scales(device: Device, scale: float) -> None:
    dtype = device.kernels.dtype
    levels = np.random.default_rng(0).integers(-128, 128, (50, 64), np.int8)
    scales = from_float32(np.random.default_rng(1).random((50, 2)).astype(np.float32), DType.BF16)
    tokens = np.array([49, 3], np.uint32)
    out = device.put(np.zeros((2, 64), dtype.numpy), dtype)
    arguments = Embed(
        table=device.put(levels).address, table_scale=device.put(scales, DType.BF16).address,
        tokens=device.put(tokens).address, out=out.address, counts=counts(device, 2),
        size=64, group=32, scale_kind=0, scale=scale,
    )  # fmt: skip
    device.run("rows", "embed", (2,), 256, arguments)
    numbers = levels * np.repeat(to_float32(scales, DType.BF16), 32, 1)
    rows = torch.from_numpy(numbers[tokens.astype(np.int64)]).to(TORCH[dtype])
    assert_close(device, device.get(out), rows * scale)


def normed(x: torch.Tensor, weight: torch.Tensor, kind: Norm, dtype: torch.dtype) -> torch.Tensor:
    """x and weight in fp32. As transformers' norms compute it, with an epsilon of 1e-5."""
    if kind is Norm.LAYER:
        x = x - x.mean(-1, keepdim=True)
    unit = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5)
    if kind is Norm.RMS:
        return unit.to(dtype) * weight.to(dtype)
    return (unit * (1 + weight if kind is Norm.RMS_PLUS_ONE else weight)).to(dtype)


@pytest.mark.parametrize("kind", NORMS)
@pytest.mark.parametrize("weight_kind", [0, 1, 2])
@pytest.mark.parametrize("size", [64, 1000])
def test_norms(device: Device, size: int, weight_kind: int, kind: Norm) -> None:
    """Of the first numbers of longer rows."""
    dtype = device.kernels.dtype
    weight_dtype = (DType.BF16, DType.F16, DType.F32)[weight_kind]
    x = random(device, 5, size + 8)
    weight = from_float32(1 + np.random.default_rng(1).random(size).astype(np.float32), weight_dtype)
    rows = np.array([4, 0, 2], np.uint32)
    out = device.put(np.zeros((3, size + 16), dtype.numpy), dtype)
    arguments = NormRows(
        x=device.put(x, dtype).address, weight=device.put(weight, weight_dtype).address, out=out.address,
        rows=device.put(rows).address, counts=counts(device, 0, 3),
        count=1, size=size, x_stride=size + 8, out_stride=size + 16, weight_kind=weight_kind,
        kind=NORMS.index(kind), eps=1e-5,
    )  # fmt: skip
    device.run("rows", "norm_rows", (3,), 256, arguments)
    wide = tensor(device, x).float()[rows.astype(np.int64), :size]
    own = torch.from_numpy(to_float32(weight, weight_dtype))
    found = device.get(out)
    assert_close(device, found[:, :size].copy(), normed(wide, own, kind, TORCH[dtype]), num_off=6)
    assert not found[:, size:].any()


@pytest.mark.parametrize("bias_dtype", [DType.BF16, DType.F32])
def test_layer_norms_have_biases(device: Device, bias_dtype: DType) -> None:
    """In place."""
    dtype, size = device.kernels.dtype, 300
    x, weight = random(device, 4, size), np.random.default_rng(1).random(size).astype(np.float32)
    bias = from_float32(np.random.default_rng(2).random(size).astype(np.float32), bias_dtype)
    out = device.put(x, dtype)
    arguments = NormRows(
        x=out.address, weight=device.put(weight).address, bias=device.put(bias, bias_dtype).address,
        out=out.address, counts=counts(device, 3), count=0, size=size, x_stride=size, out_stride=size,
        weight_kind=KINDS[DType.F32], bias_kind=KINDS[bias_dtype], kind=NORMS.index(Norm.LAYER), eps=1e-5,
    )  # fmt: skip
    device.run("rows", "norm_rows", (4,), 256, arguments)
    own, more = torch.from_numpy(weight), torch.from_numpy(to_float32(bias, bias_dtype))
    expected = torch.nn.functional.layer_norm(tensor(device, x).float(), (size,), own, more).to(TORCH[dtype])
    expected[3] = tensor(device, x)[3]
    assert_close(device, device.get(out), expected, num_off=6)


@pytest.mark.parametrize("kind", [None, *NORMS])
@pytest.mark.parametrize("scale", [1.0, 0.22])
def test_rows_are_added_after_a_norm_and_scaled(device: Device, kind: Norm | None, scale: float) -> None:
    dtype, size = device.kernels.dtype, 300
    x, more, weight = random(device, 4, size), random(device, 4, size, seed=1), random(device, size, seed=2)
    out, own_kind = device.put(x, dtype), 0 if dtype is DType.BF16 else 1
    arguments = AddRows(
        x=out.address, more=device.put(more, dtype).address,
        weight=0 if kind is None else device.put(weight, dtype).address, counts=counts(device, 3),
        size=size, weight_kind=own_kind, kind=0 if kind is None else NORMS.index(kind), eps=1e-5, scale=scale,
    )  # fmt: skip
    device.run("rows", "add_rows", (4,), 256, arguments)
    added = tensor(device, more)
    if kind is not None:
        added = normed(added.float(), tensor(device, weight).float(), kind, TORCH[dtype])
    expected = tensor(device, x) + added * scale
    expected[3] = tensor(device, x)[3]  # behind the rows that there are
    assert_close(device, device.get(out), expected, num_off=12)


@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_logits_are_scaled_and_capped(device: Device, cap: float) -> None:
    logits = 10 * np.random.default_rng(0).standard_normal((3, 300)).astype(np.float32)
    out = device.put(logits)
    arguments = ScaleLogits(out.address, counts(device, 0, 2), 300, 0.5, cap)
    device.run("rows", "scale_logits", (3, 2), 256, arguments)
    expected = logits * np.float32(0.5)
    expected = cap * np.tanh(expected / cap) if cap else expected
    found = device.get(out)
    np.testing.assert_allclose(found[:2], expected[:2], rtol=1e-6)
    assert (found[2] == logits[2]).all()


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("kind", range(5))
def test_gates(device: Device, kind: int, is_open: bool) -> None:
    """Also of what passes as a whole."""
    dtype, size = device.kernels.dtype, 300
    product = random(device, 3, size if is_open else 2 * size)
    out = device.put(np.zeros((3, size), dtype.numpy), dtype)
    arguments = Gate(
        device.put(product, dtype).address, out.address, counts(device, 3), 0, size, kind, is_open
    )
    device.run("rows", "gate", (3, 2), 256, arguments)
    functions: list[Any] = [
        torch.nn.functional.silu,
        torch.nn.functional.gelu,
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        torch.relu,
        torch.tanh,
    ]
    first, *second = tensor(device, product).split(size, dim=1)
    active = functions[kind](first.float()).to(TORCH[dtype])
    assert_close(device, device.get(out), active if is_open else active * second[0], num_off=20)


@pytest.mark.parametrize("is_narrow", [False, True])
@pytest.mark.parametrize("pooling", Pooling)
def test_rows_of_texts_are_pooled(device: Device, pooling: Pooling, is_narrow: bool) -> None:
    dtype, starts = device.kernels.dtype, np.array([0, 1, 8, 40], np.int64)
    x = random(device, 40, 72)
    kind = dtype if is_narrow else DType.F32
    out = device.put(np.zeros((4, 72), kind.numpy), kind)
    tables = [device.put(table.astype(np.uint32)).address for table in (starts[:-1], np.diff(starts))]
    arguments = PoolRows(
        device.put(x, dtype).address, out.address, *tables, counts(device, 0, 3), 72,
        list(Pooling).index(pooling), is_narrow,
    )  # fmt: skip
    device.run("rows", "pool_rows", (4, 1), 256, arguments)
    expected = pooled(x, starts, pooling, dtype)
    found = to_float32(device.get(out), kind)
    if is_narrow:
        expected = to_float32(from_float32(expected, dtype), dtype)
    np.testing.assert_allclose(found[:3], expected, rtol=2**-7 if is_narrow else 1e-6, atol=1e-6)
    assert not found[3].any()


class Heads:
    """Rows of heads, and what `place_heads` makes of them."""

    num_heads, num_kv_heads, num_slots, eps = 4, 2, 24, 1e-6

    def __init__(
        self,
        device: Device,
        head_dim: int,
        rotary_dim: int,
        *,
        norms: bool,
        of_int8: bool = False,
        special: bool = False,
    ) -> None:
        """`special` numbers are some of the values."""
        dtype = device.kernels.dtype
        self.device, self.head_dim, self.rotary_dim = device, head_dim, rotary_dim
        self.heads = random(device, 5, self.num_heads + 2 * self.num_kv_heads, head_dim)
        if special:
            numbers = [np.inf, -np.inf, np.nan, 0.0]
            self.heads[:4, -1, 1] = from_float32(np.array(numbers, np.float32), dtype)
            self.heads[3, -1] = 0
        self.positions, self.slots = (
            np.array([0, 7, 9, 30, 2], np.uint32),
            np.array([3, 20, 5, 0, 9], np.uint32),
        )
        angles = np.arange(31, dtype=np.float32)[:, None] * np.linspace(
            1, 0.01, rotary_dim // 2, dtype=np.float32
        )
        self.cos, self.sin = np.cos(angles), np.sin(angles)
        self.norms = [random(device, head_dim, seed=seed) for seed in (1, 2)] if norms else []
        shape, kind = (2, self.num_slots, self.num_kv_heads), DType.I8 if of_int8 else dtype
        pool = device.put(np.zeros((*shape, head_dim), kind.numpy), kind)
        scales = device.put(np.zeros(shape, dtype.numpy), dtype)
        stored = device.put(self.heads, dtype)
        query_norm, key_norm = [device.put(norm, dtype).address for norm in self.norms] or (0, 0)
        arguments = PlaceHeads(
            heads=stored.address, cos=device.put(self.cos).address, sin=device.put(self.sin).address,
            query_norm=query_norm, key_norm=key_norm, keys=pool.row(0), values=pool.row(1),
            key_scales=scales.row(0) if of_int8 else 0, value_scales=scales.row(1) if of_int8 else 0,
            positions=device.put(self.positions).address, slots=device.put(self.slots).address,
            counts=counts(device, 5), num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            head_dim=head_dim, rotary_dim=rotary_dim, weight_kind=0 if dtype is DType.BF16 else 1, eps=self.eps,
        )  # fmt: skip
        device.run("rows", "place_heads", (6, 2), 128, arguments)
        self.pool, self.scales, self.after = device.get(pool), device.get(scales), device.get(stored)

    def expected(self) -> torch.Tensor:
        """transformers' result: (rows, heads, head_dim)."""
        kind = TORCH[self.device.kernels.dtype]
        x = tensor(self.device, self.heads).clone()
        turned = self.num_heads + self.num_kv_heads
        if self.norms:
            for number, (first, end) in enumerate(((0, self.num_heads), (self.num_heads, turned))):
                wide = x[:, first:end].float()
                unit = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(kind)
                x[:, first:end] = unit * tensor(self.device, self.norms[number])
        half = self.rotary_dim // 2
        at = self.positions.astype(np.int64)
        cos, sin = (torch.from_numpy(table[at]).to(kind)[:, None] for table in (self.cos, self.sin))
        low, high = x[:, :turned, :half].clone(), x[:, :turned, half : 2 * half].clone()
        x[:, :turned, :half] = low * cos + -high * sin
        x[:, :turned, half : 2 * half] = high * cos + low * sin
        return x


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize(("head_dim", "rotary_dim"), [(16, 16), (64, 64), (80, 32), (256, 256)])
def test_heads_are_normalised_turned_and_stored(
    device: Device, head_dim: int, rotary_dim: int, norms: bool
) -> None:
    made = Heads(device, head_dim, rotary_dim, norms=norms)
    expected, num_off = made.expected(), 40 if norms else 0
    assert_close(device, made.after[:, :4], expected[:, :4], num_off=num_off)
    slots = made.slots.astype(np.int64)
    assert_close(device, made.pool[0][slots], expected[:, 4:6], num_off=num_off)
    assert_close(device, made.pool[1][slots], expected[:, 6:])
    np.testing.assert_array_equal(made.after[:, 4:], made.heads[:, 4:])
    others = np.setdiff1d(np.arange(made.num_slots), slots)
    assert not made.pool[:, others].any()


@pytest.mark.parametrize("head_dim", [16, 80])
def test_heads_become_the_codes_and_scales_of_the_cpu(device: Device, head_dim: int) -> None:
    """Of numbers that are not finite, and of zeros, too."""
    dtype = device.kernels.dtype
    floats = Heads(device, head_dim, 16, norms=True, special=True)
    made = Heads(device, head_dim, 16, norms=True, special=True, of_int8=True)
    np.testing.assert_array_equal(made.after, floats.after)
    slots = made.slots.astype(np.int64)
    codes, scales = to_codes(to_float32(floats.pool, dtype), dtype)
    np.testing.assert_array_equal(made.pool[:, slots], codes[:, slots])
    np.testing.assert_array_equal(to_float32(made.scales, dtype)[:, slots], scales[..., 0][:, slots])
    assert not np.isfinite(scales[1, slots[:3]]).all()


LAYERS, BLOCKS, SLOTS, KV_HEADS, DIM = 2, 5, 4, 3, 8


def test_blocks_leave_the_pool_in_the_order_of_the_hosts_and_come_back(device: Device) -> None:
    dtype = device.kernels.dtype
    pool = random(device, LAYERS, 2, BLOCKS, SLOTS, KV_HEADS, DIM)
    chosen = np.array([4, 1, 2], np.uint32)
    on_device = device.put(pool, dtype)
    stored = device.put(np.zeros((3, LAYERS, 2, KV_HEADS, SLOTS, DIM), dtype.numpy), dtype)
    sizes = (BLOCKS, SLOTS, KV_HEADS, DIM, LAYERS * 2 * KV_HEADS * SLOTS * DIM)
    arguments = CopyBlocks(on_device.address, stored.address, device.put(chosen).address, *sizes, 0)
    device.run("blocks", "copy_blocks", (3, 2 * LAYERS), 256, arguments)
    found = device.get(stored)
    np.testing.assert_array_equal(found, pool[:, :, chosen].transpose(2, 0, 1, 4, 3, 5))
    others = np.array([0, 3, 1], np.uint32)
    arguments = CopyBlocks(on_device.address, stored.address, device.put(others).address, *sizes, 1)
    device.run("blocks", "copy_blocks", (3, 2 * LAYERS), 256, arguments)
    after = device.get(on_device)
    np.testing.assert_array_equal(after[:, :, others], pool[:, :, chosen])
    np.testing.assert_array_equal(after[:, :, [2, 4]], pool[:, :, [2, 4]])


def test_the_first_tokens_of_a_block_are_copied_to_another(device: Device) -> None:
    pool = random(device, LAYERS, 2, BLOCKS, SLOTS, KV_HEADS, DIM)
    on_device = device.put(pool, device.kernels.dtype)
    arguments = CopyTokens(on_device.address, BLOCKS, SLOTS, KV_HEADS * DIM, 3, 0, 2)
    device.run("blocks", "copy_tokens", (2 * LAYERS,), 256, arguments)
    after = device.get(on_device)
    np.testing.assert_array_equal(after[:, :, 0, :2], pool[:, :, 3, :2])
    pool[:, :, 0, :2] = after[:, :, 0, :2]
    np.testing.assert_array_equal(after, pool)
