"""Copies say what they must, keep to their memory, and are exchanged between steps."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.support.decoding import Stepper, prompt_of
from tests.support.packing_rig import (
    KERNELS,
    ONEDNN,
    ONNX,
    OPENVINO,
    PLENTY,
    TORCH,
    Plain,
    all_logits,
    decoder,
    error_of,
    figures,
    library_backends,
    needs_onednn,
    pack,
    packed,
)

from teneral.runtime.kernels import onednn
from teneral.runtime.kernels.choice import PRODUCT_SIZES, SIZES
from teneral.runtime.kernels.copies import ROUNDING
from teneral.runtime.kernels.kinds import kind_of_layer, products_of
from teneral.runtime.kernels.packing import RESERVE_BYTES, Packing
from teneral.runtime.models.quantized import QuantizedLinear

# Copies of a whole model


@needs_onednn
def test_a_packed_model_says_the_same_and_its_weights_stay_where_they_are():
    model = decoder()
    before = all_logits(model)
    where = [
        (product.linear.weight.data_ptr(), product.linear.weight.clone()) for product in products_of(model)
    ]

    said = pack(model)

    assert not any(packed(model))  # nobody has begun a step since
    assert torch.equal(all_logits(model), before)
    assert all(packed(model))
    assert said["outcome"] == "used where they are faster"
    assert said["packed"] == f"{len(where)} of {len(where)} products"
    for (address, weight), product in zip(where, products_of(model), strict=True):
        assert product.linear.weight.data_ptr() == address
        assert torch.equal(product.linear.weight, weight)


@pytest.mark.parametrize("kind", ["int8", "int4", "int4 --asymmetric", "int4 --group-size 128"])
@pytest.mark.parametrize("backend", library_backends)
def test_a_quantised_model_over_a_librarys_copies_says_nearly_the_same(quantised, kind, backend):
    model = quantised(kind)
    before = all_logits(model)
    library = {backend: ROUNDING[backend]}

    said = pack(model, figures(model, **{backend: 100}), rounding=library)
    after = all_logits(model)

    assert all(packed(model))
    assert said["outcome"] == "used where they are faster"
    assert not [value for key, value in said.items() if "left out" in str(value)]
    assert 0 < error_of(after, before) < 0.1  # 2 % a product at most, in random layers one behind the other
    assert (after.argmax(-1) == before.argmax(-1)).float().mean() > 0.9


@pytest.mark.parametrize("backend", library_backends)
def test_what_libraries_gain_is_measured_and_what_is_measured_is_used(quantised, backend):
    model = quantised()
    said = pack(model, {}, rounding={backend: ROUNDING[backend]})
    for product in products_of(model):
        assert said[product.kind].startswith(f"{backend} 1 rows ")
        assert said[product.kind].endswith("(measured)")
    all_logits(model)
    assert any(packed(model)) == (said["bytes"] > 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has priorities for single threads")
@pytest.mark.parametrize("backend", library_backends)
def test_threads_that_a_library_starts_do_not_stand_back(quantised, backend):
    model = quantised()
    before = set(os.listdir("/proc/self/task"))

    pack(model, figures(model, **{backend: 100}), rounding={backend: ROUNDING[backend]})
    all_logits(model)

    assert any(packed(model))
    started = [int(number) for number in set(os.listdir("/proc/self/task")) - before]
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    assert [os.getpriority(os.PRIO_PROCESS, number) for number in started] == [usual] * len(started)


def test_prompts_of_a_quantised_model_are_computed_over_copies(quantised):
    model, library = quantised(), Plain()
    before = all_logits(model)
    times = {size: {TORCH: 200, ONNX: 100 if size >= 64 else 400} for size in PRODUCT_SIZES}
    kept = {product.kind: {size: times[size] for size in product.sizes} for product in products_of(model)}

    said = pack(model, kept, rounding={ONNX: library})
    *of_layers, of_head = products_of(model)
    library.num_computed = 0
    library.row_counts.clear()
    after = all_logits(model)

    assert error_of(after, before) < 0.01  # of products in another order
    assert said[f"{of_layers[0].kind}: chosen"] == "onnxruntime for 64, 128 rows"
    assert library.row_counts == {150, 34, 71}
    assert library.num_computed == 3 * len(of_layers)
    assert of_head.linear.packed is None


def test_each_kind_has_the_copy_that_gains_most(quantised):
    model = quantised()
    both = {ONNX: Plain(), OPENVINO: Plain()}
    kept = {}
    for number, (kind, times) in enumerate(figures(model, onnxruntime=100, openvino=100).items()):
        fastest = {ONNX: 90} if number % 2 else {OPENVINO: 90}
        kept[kind] = {size: {**by, **fastest} for size, by in times.items()}

    said = pack(model, kept, rounding=both)
    all_logits(model)

    assert all(packed(model))
    chosen = [said[f"{kind}: chosen"].split()[0] for kind in kept]
    assert chosen == [OPENVINO if number % 2 == 0 else ONNX for number in range(len(kept))]
    assert both[ONNX].num_made + both[OPENVINO].num_made == len(products_of(model))


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


# Memory


@needs_onednn
def test_copies_keep_to_the_bound_and_what_does_not_fit_stays_as_it_is():
    model = decoder()
    before = all_logits(model)
    sizes = [onednn.packed_bytes(product.linear) for product in products_of(model)]
    for limit_bytes in (1, sizes[0], sum(sizes) // 2, sum(sizes) - 1):
        said = pack(model, limit_bytes=limit_bytes)
        assert torch.equal(all_logits(model), before)
        used = [size for size, is_packed in zip(sizes, packed(model), strict=True) if is_packed]
        assert sum(used) == said["bytes"] <= limit_bytes
        for product in products_of(model):
            product.linear.packed = None


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_copies_of_integers_keep_to_the_bound_while_they_are_measured_too(quantised, share):
    model = quantised()
    sizes = [product.linear.weight.nbytes for product in products_of(model)]
    limit_bytes = int(sum(sizes) * share)
    most = 0

    class Watched(Plain):
        def Product(self, linear: QuantizedLinear, *, num_threads: int) -> Any:
            nonlocal most
            compute = super().Product(linear, num_threads=num_threads)
            alive = SimpleNamespace(size=linear.weight.nbytes)
            living.append(alive)
            most = max(most, sum(each.size for each in living))

            class Counted:
                def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
                    return compute(x, bias)

                def __del__(self) -> None:
                    living.remove(alive)

            return Counted()

    living: list[SimpleNamespace] = []
    said = pack(model, {}, limit_bytes=limit_bytes, rounding={ONNX: Watched(), OPENVINO: Watched()})
    all_logits(model)

    used = [size for size, is_packed in zip(sizes, packed(model), strict=True) if is_packed]
    assert sum(used) == said["bytes"] <= most <= limit_bytes
    assert sum(each.size for each in living) == said["bytes"]


@needs_onednn
def test_copies_leave_the_reserve_of_the_containers_memory():
    model = decoder()
    sizes = [onednn.packed_bytes(product.linear) for product in products_of(model)]
    free = [sum(sizes[:3]) + RESERVE_BYTES + 1000]
    settings = {"limit_bytes": PLENTY, "num_threads": 1}
    packing = Packing(model, reserved_bytes=1000, free_bytes=lambda: free[0], **settings)
    for number in range(3):
        assert packing.make(number, ONEDNN) is not None
        free[0] -= sizes[number]
    assert packing.make(3, ONEDNN) is None
    assert packing.left_out == {}
    assert Packing(model, free_bytes=lambda: None, **settings).make(3, ONEDNN) is not None


# What is known, and what is measured


@needs_onednn
def test_what_is_not_kept_is_measured_and_the_timeline_says_which():
    model = decoder()
    first = products_of(model)[0].kind
    kept = {first: figures(model)[first]}

    said = pack(model, kept)

    kinds = {product.kind for product in products_of(model)}
    assert said[first].endswith("(kept beside the model)")
    assert all(said[kind].endswith("(measured)") for kind in kinds - {first})


def test_kept_figures_are_used_without_measuring(quantised, monkeypatch):
    model = quantised()
    monkeypatch.setattr(Packing, "measure", lambda *_: pytest.fail("measured"))
    kept = figures(model, onnxruntime=100)  # openvino failed where they were measured
    said = pack(model, kept, rounding={ONNX: Plain(), OPENVINO: Plain()})
    assert said["outcome"] == "used where they are faster"


def test_measured_is_who_computes_and_in_torch_with_what_expands_integers(quantised):
    model, library = quantised(), Plain()
    num_expanded = 0

    def counting(part: QuantizedLinear) -> Any:
        def expand(begin: int, end: int) -> torch.Tensor:
            nonlocal num_expanded
            num_expanded += 1
            return part.rows(begin, end).to(torch.bfloat16)

        return expand

    for product in products_of(model):
        product.linear.expand = counting(product.linear)
    packing = Packing(model, limit_bytes=PLENTY, num_threads=1, rounding={ONNX: library})
    times = packing.measure(products_of(model)[0].kind, trials_s=0.0)

    assert list(times) == list(PRODUCT_SIZES)
    assert all(list(by) == [TORCH, ONNX] and min(by.values()) > 0 for by in times.values())
    assert library.num_computed == num_expanded > 0
    assert library.row_counts == set(PRODUCT_SIZES)


@needs_onednn
def test_what_gains_nothing_is_not_packed():
    model = decoder()
    said = pack(model, figures(model, onednn=200))
    all_logits(model)
    assert not any(packed(model))
    assert said["bytes"] == 0
    assert "gain nothing" in said["outcome"]


class Kernels:
    """What `prepack` asks of `DecoderKernels`: the sizes that are left to them."""

    def __init__(self) -> None:
        self.sizes: frozenset[int] | None = None

    def keep_to(self, sizes: frozenset[int]) -> None:
        self.sizes = sizes


@needs_onednn
def test_kernels_step_back_where_copies_are_faster_and_spare_the_head_its_copy():
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
    assert said[products_of(model)[-1].kind] == "compiled kernels compute it"


def test_single_tokens_stay_with_compiled_kernels_that_are_faster_and_prompts_go_over_copies(quantised):
    pytest.importorskip("numba", reason="kernels need the extra [cpu]")
    from teneral.runtime.kernels.decoder import DecoderKernels

    model, library = quantised(), Plain()
    kernels = DecoderKernels(model, num_threads=1)
    kernels.use_at(SIZES)
    kernels.install()
    before = all_logits(model)
    layer = kind_of_layer(model.layers[0])
    times = {size: {TORCH: 1000, KERNELS: 10} for size in SIZES}

    pack(model, figures(model, onnxruntime=100), layers={layer: times}, rounding={ONNX: library})
    library.row_counts.clear()
    after = all_logits(model)

    assert any(packed(model))
    assert library.row_counts == {34, 71, 150}
    assert all(kernels.is_used_for(num_rows) for num_rows in range(1, 33))
    assert error_of(after, before) < 0.01


def test_importing_what_chooses_imports_no_library():
    program = (
        "import sys, teneral.runtime.kernels.prepack as p, torch\n"
        "print(sorted({'onnxruntime', 'openvino', 'numba'} & set(sys.modules)))"
    )
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "[]"
