"""Packed weights say the same to the bit, keep to their memory, and are exchanged between steps."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.tiny_models import config_json, tensors_of, tiny_model

from teneral.loader.timeline import Timeline
from teneral.runtime.kernels import prepack as module
from teneral.runtime.kernels.choice import PRODUCT_SIZES, SIZES, Figures, LinearBackend, table_of
from teneral.runtime.kernels.kinds import kind_of_layer, products_of
from teneral.runtime.kernels.prepack import RESERVE_BYTES, Packing, prepack
from teneral.runtime.models import packed as packed_module
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.linear import Linear
from teneral.runtime.models.packed import CannotPackError, PackedWeight, can_pack, packed_bytes
from teneral.runtime.weights import DictWeights

TORCH, ONEDNN, KERNELS = LinearBackend.TORCH, LinearBackend.ONEDNN, LinearBackend.KERNELS
PLENTY = 1 << 30

needs_onednn = pytest.mark.skipif(
    not can_pack(torch.zeros(64, 64, dtype=torch.bfloat16)), reason="torch packs no bf16 on this processor"
)


def decoder(dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Decoder:
    model = tiny_model("qwen2", **overrides).to(dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(model).items()}
    built = build_model(config_json(model), DictWeights(tensors))
    assert isinstance(built, Decoder)
    return built


def figures(of: Decoder, *, torch_ns: int = 200, onednn_ns: int = 100) -> Figures:
    """As if all products were so fast."""
    times = {TORCH: torch_ns, ONEDNN: onednn_ns}
    return {kind: dict.fromkeys(sizes, times) for kind, _, sizes in products_of(of)}


def packed(of: Decoder) -> list[bool]:
    return [linear.packed is not None for _, linear, _ in products_of(of)]


def pack(of: Decoder, kept: Figures | None = None, **settings: Any) -> dict[str, Any]:
    """What the timeline says of it."""
    timeline = Timeline()
    given = {"limit_bytes": PLENTY, "ended": threading.Event(), **settings}
    thread = threading.Thread(  # whose priority goes down
        target=lambda: prepack(of, kept=lambda: kept or figures(of), timeline=timeline, **given)
    )
    thread.start()
    thread.join()
    (span,) = timeline.spans()
    assert span.name == "pack weights"
    return span.attributes


def all_logits(of: Decoder) -> torch.Tensor:
    """Of prompts of many lengths, and of steps of one token."""
    stepper = Stepper(of, num_blocks=256)
    outputs = [stepper.step({"a": prompt_of(150)})["a"]]
    for length in (1, 2, 5, 33, 70):
        outputs += stepper.step({"a": [7], f"b{length}": prompt_of(length, seed=length)}).values()
    return torch.cat(outputs)


@needs_onednn
@pytest.mark.parametrize("shape", [(1152, 896), (64, 64), (96, 100), (7, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_packed_product_is_torchs_to_the_bit(shape, has_bias):
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.bfloat16)
    bias = torch.randn(shape[0]).to(torch.bfloat16) if has_bias else None
    linear = Linear(weight, bias)
    copy = PackedWeight(weight)
    assert copy.agrees(weight, bias, PRODUCT_SIZES)
    assert copy._packed.nbytes <= packed_bytes(weight)
    with torch.inference_mode():
        for num_rows in (0, 1, 33, 100, 128, 129, 300):
            x = torch.randn(num_rows, shape[1]).to(torch.bfloat16)
            expected = linear(x)
            copy.use_for(table_of(PRODUCT_SIZES))
            linear.packed = copy
            assert torch.equal(linear(x), expected)
            assert torch.equal(linear(x.t().contiguous().t()), expected)
            linear.packed = None


@needs_onednn
def test_a_packed_product_of_other_weights_does_not_pass_for_the_same():
    weight = torch.randn(64, 64).to(torch.bfloat16)
    other = weight.clone()
    other[5, 7] += 1
    assert not PackedWeight(other).agrees(weight, None, (8,))


@needs_onednn
def test_a_copy_is_used_only_for_the_rows_that_it_is_for():
    copy = PackedWeight(torch.zeros(64, 64, dtype=torch.bfloat16))
    assert not any(copy.takes(num_rows) for num_rows in (0, 1, 1000))
    copy.use_for(table_of([4, 128]))
    assert [rows for rows in (0, 1, 3, 4, 5, 64, 65, 128, 5000) if copy.takes(rows)] == [3, 4, 65, 128, 5000]


@needs_onednn
def test_a_packed_model_says_the_same_and_its_weights_stay_where_they_are():
    model = decoder()
    before = all_logits(model)
    where = [(linear.weight.data_ptr(), linear.weight.clone()) for _, linear, _ in products_of(model)]

    said = pack(model)

    assert not any(packed(model))  # nobody has begun a step since
    assert torch.equal(all_logits(model), before)
    assert all(packed(model))
    assert said["outcome"] == "used where they are faster"
    assert said["packed"] == f"{len(where)} of {len(where)} products"
    for (address, weight), (_, linear, _) in zip(where, products_of(model), strict=True):
        assert linear.weight.data_ptr() == address
        assert torch.equal(linear.weight, weight)


@needs_onednn
def test_an_exchange_never_comes_under_a_step():
    model = decoder()
    seen = []

    def exchange_while_layers_run(index: int, *_: Any) -> None:
        if index == 0:
            pack(model)
        seen.append(any(packed(model)))

    stepper = Stepper(model)
    stepper.step({"a": prompt_of(40)}, on_layer=exchange_while_layers_run)
    assert len(seen) == model.num_layers + 2
    assert not any(seen)
    stepper.step({"a": [3]})
    assert all(packed(model))


@needs_onednn
def test_copies_keep_to_the_bound_and_what_does_not_fit_stays_as_it_is():
    model = decoder()
    before = all_logits(model)
    sizes = [packed_bytes(linear.weight) for _, linear, _ in products_of(model)]
    for limit_bytes in (1, sizes[0], sum(sizes) // 2, sum(sizes) - 1):
        said = pack(model, limit_bytes=limit_bytes)
        assert torch.equal(all_logits(model), before)
        used = [size for size, is_packed in zip(sizes, packed(model), strict=True) if is_packed]
        assert sum(used) == said["bytes"] <= limit_bytes
        for _, linear, _ in products_of(model):
            linear.packed = None


@needs_onednn
def test_copies_leave_the_reserve_of_the_containers_memory():
    model = decoder()
    sizes = [packed_bytes(linear.weight) for _, linear, _ in products_of(model)]
    free = [sum(sizes[:3]) + RESERVE_BYTES + 1000]
    packing = Packing(model, limit_bytes=PLENTY, reserved_bytes=1000, free_bytes=lambda: free[0])
    for number in range(3):
        assert packing.copy(number) is not None
        free[0] -= sizes[number]
    assert packing.copy(3) is None
    assert Packing(model, limit_bytes=PLENTY, free_bytes=lambda: None).copy(3) is not None


@needs_onednn
def test_what_is_not_kept_is_measured_and_the_timeline_says_which():
    model = decoder()
    first = products_of(model)[0][0]
    kept = {first: figures(model)[first]}

    said = pack(model, kept)

    kinds = {kind for kind, _, _ in products_of(model)}
    assert said[first].endswith("(kept beside the model)")
    assert all(said[kind].endswith("(measured)") for kind in kinds - {first})


@needs_onednn
def test_kept_figures_are_used_without_measuring(monkeypatch):
    model = decoder()
    monkeypatch.setattr(Packing, "measure", lambda *_: pytest.fail("measured"))
    assert pack(model)["outcome"] == "used where they are faster"


@needs_onednn
def test_what_gains_nothing_is_not_packed():
    model = decoder()
    said = pack(model, figures(model, torch_ns=100, onednn_ns=100))
    all_logits(model)
    assert not any(packed(model))
    assert said["bytes"] == 0
    assert "gain nothing" in said["outcome"]


@needs_onednn
def test_where_a_product_differs_by_a_bit_it_is_not_used(monkeypatch):
    model = decoder()
    honest = PackedWeight.__call__
    monkeypatch.setattr(PackedWeight, "__call__", lambda self, x, bias: honest(self, x, bias) * 1.01)
    pack(model)
    all_logits(model)
    assert not any(packed(model))


class Kernels:
    """What `prepack` asks of `DecoderKernels`: the sizes that are left to them."""

    def __init__(self) -> None:
        self.sizes: frozenset[int] | None = None

    def keep_to(self, sizes: frozenset[int]) -> None:
        self.sizes = sizes


@needs_onednn
def test_kernels_step_back_where_packed_weights_are_faster_and_spare_the_head_its_copy():
    model = decoder()
    layer = kind_of_layer(model.layers[0])
    times = {size: {TORCH: 1000, KERNELS: 990 if size == 32 else 10} for size in SIZES}
    kernels: Any = Kernels()
    model.kernels = kernels

    said = pack(model, layers={layer: times})

    model.kernels = None
    all_logits(model)
    assert kernels.sizes == set(SIZES) - {32}
    *of_layers, of_head = packed(model)
    assert all(of_layers)
    assert not of_head
    assert said[products_of(model)[-1][0]] == "compiled kernels compute it"


def test_a_model_in_another_dtype_is_left_alone_and_the_timeline_says_so():
    model = decoder(torch.float32)
    assert "nothing that could be packed" in pack(model)["outcome"]
    with pytest.raises(CannotPackError):
        PackedWeight(torch.zeros(64, 64))


def test_a_torch_that_cannot_pack_is_left_alone(monkeypatch):
    class Bare:
        """torch.ops.mkldnn without anything."""

    monkeypatch.setattr(packed_module.torch.ops, "mkldnn", Bare())
    model = decoder()
    assert "nothing that could be packed" in pack(model)["outcome"]
    all_logits(model)
    assert not any(packed(model))


@needs_onednn
def test_a_torch_that_refuses_harms_nobody(monkeypatch):
    def refuse(*_: Any) -> None:
        raise TypeError("takes other arguments")

    monkeypatch.setattr(module, "PackedWeight", refuse)
    model = decoder()
    assert "TypeError" in pack(model)["outcome"]
    all_logits(model)
    assert not any(packed(model))


@needs_onednn
def test_who_is_closed_packs_no_more():
    model = decoder()
    ended = threading.Event()
    ended.set()
    assert pack(model, ended=ended)["outcome"] == "the model was closed before"
    all_logits(model)
    assert not any(packed(model))
