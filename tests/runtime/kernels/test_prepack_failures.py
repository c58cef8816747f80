"""A library that fails while weights are packed, or later, harms nobody."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.support.packing_rig import (
    ONNX,
    OPENVINO,
    Plain,
    all_logits,
    decoder,
    error_of,
    figures,
    integers,
    needs_onednn,
    pack,
    packed,
)

from teneral.runtime.kernels import onednn
from teneral.runtime.kernels.kinds import products_of
from teneral.runtime.models.linear import Linear
from teneral.runtime.models.packed import CannotPackError, Copy
from teneral.runtime.models.quantized import QuantizedLinear


@needs_onednn
def test_where_a_product_differs_by_a_bit_it_is_not_used(monkeypatch):
    model = decoder()
    honest = onednn.Product.__call__
    monkeypatch.setattr(onednn.Product, "__call__", lambda self, x, bias: honest(self, x, bias) * 1.01)
    said = pack(model)
    all_logits(model)
    assert not any(packed(model))
    assert "differs from torch's product" in said[f"{products_of(model)[0].kind}: onednn"]


def test_where_a_library_is_off_the_next_best_is_used_and_the_timeline_says_so(quantised):
    model = quantised()
    before = all_logits(model)
    off, right = Plain(factor=1.03), Plain()

    said = pack(model, figures(model, onnxruntime=50, openvino=100), rounding={ONNX: off, OPENVINO: right})

    assert error_of(all_logits(model), before) < 0.01
    assert all(packed(model))
    for kind in {product.kind for product in products_of(model)}:
        assert said[f"{kind}: onnxruntime"].startswith("left out: with 1 rows it is 3.")
        assert said[f"{kind}: chosen"].startswith("openvino for ")
    assert said["bytes"] == sum(product.linear.weight.nbytes for product in products_of(model))


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("error", [ImportError("libgomp.so.1 is missing"), CannotPackError("no such order")])
def test_a_library_that_cannot_be_used_is_left_out(quantised, error, is_kept):
    model, right = quantised(), Plain()

    class Broken(Plain):
        def Product(self, linear: QuantizedLinear, *, num_threads: int) -> Any:
            raise error

    kept = figures(model, onnxruntime=50, openvino=100) if is_kept else {}
    said = pack(model, kept, rounding={ONNX: Broken(), OPENVINO: right})
    all_logits(model)

    assert str(error) in said[f"{products_of(model)[0].kind}: onnxruntime"]
    assert right.num_made > 0
    if is_kept:
        assert all(packed(model))


@pytest.mark.parametrize("at", [0, 1, 100])
@pytest.mark.parametrize("is_kept", [False, True])
def test_a_library_that_fails_while_it_computes_leaves_the_server_as_it_was(quantised, at, is_kept):
    model = quantised()
    before = all_logits(model)

    class Failing(Plain):
        def Product(self, linear: QuantizedLinear, *, num_threads: int) -> Any:
            compute = super().Product(linear, num_threads=num_threads)

            def fail(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
                if self.num_computed >= at:
                    raise RuntimeError("the library is gone")
                return compute(x, bias)

            return fail

    kept = figures(model, onnxruntime=50) if is_kept else {}
    said = pack(model, kept, rounding={ONNX: Failing()})
    assert error_of(all_logits(model), before) < 0.01
    if at < 100:  # it was seen before anybody was served
        assert not any(packed(model))
        assert said["bytes"] == 0
        assert "RuntimeError: the library is gone" in said[f"{products_of(model)[0].kind}: onnxruntime"]


def test_a_copy_that_fails_once_is_asked_no_more(caplog):
    num_asked = 0

    def fail(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        nonlocal num_asked
        num_asked += 1
        raise MemoryError("no room for so many rows")

    linear = integers(torch.ones(96))
    x = torch.randn(3, 128)
    expected = linear(x)
    linear.packed = Copy(fail, bytes([0, 1]))
    for _ in range(3):
        assert torch.equal(linear(x), expected)
    assert num_asked == 1
    assert "MemoryError" in caplog.text


@pytest.mark.parametrize("fails_at", [1, 5])
def test_a_library_that_has_no_room_in_the_middle_leaves_what_is_there_in_use(quantised, fails_at):
    model, library = quantised(), Plain(fails_at=fails_at)
    before = all_logits(model)
    said = pack(model, figures(model, onnxruntime=50), rounding={ONNX: library})
    assert error_of(all_logits(model), before) < 0.01
    used = [product.linear.weight.nbytes for product in products_of(model) if product.linear.packed]
    assert len(used) < len(products_of(model))
    assert sum(used) == said["bytes"]
    assert [key for key, value in said.items() if value == "left out: there is no memory left"]


@needs_onednn
def test_a_torch_that_refuses_harms_nobody(monkeypatch):
    def refuse(*_: Any) -> None:
        raise TypeError("takes other arguments")

    monkeypatch.setattr(torch.ops.mkldnn, "_reorder_linear_weight", refuse)
    model = decoder()
    said = pack(model)
    assert "TypeError" in said[f"{products_of(model)[0].kind}: onednn"]
    all_logits(model)
    assert not any(packed(model))


def test_what_nobody_foresaw_ends_the_packing_and_nothing_else(quantised):
    model = quantised()

    class Absurd(Plain):
        def can_pack(self, linear: Linear | QuantizedLinear) -> bool:
            raise OSError("the disk is gone")

    assert "OSError" in pack(model, rounding={ONNX: Absurd()})["outcome"]
    all_logits(model)
    assert not any(packed(model))


def test_a_model_without_libraries_is_left_alone_and_the_timeline_says_so(quantised):
    for model in (decoder(torch.float32), quantised()):
        assert "nothing that could be packed" in pack(model, rounding={})["outcome"]
    with pytest.raises(CannotPackError):
        onednn.Product(Linear(torch.zeros(64, 64)), num_threads=1)


def test_a_torch_that_cannot_pack_is_left_alone(monkeypatch):
    class Bare:
        """torch.ops.mkldnn without anything."""

    monkeypatch.setattr(onednn.torch.ops, "mkldnn", Bare())
    model = decoder()
    assert "nothing that could be packed" in pack(model)["outcome"]
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


def test_who_is_closed_meanwhile_makes_no_more_copies(quantised):
    model, ended = quantised(), threading.Event()

    class Closing(Plain):
        def Product(self, linear: QuantizedLinear, *, num_threads: int) -> Any:
            if self.num_made == 7:
                ended.set()
            return super().Product(linear, num_threads=num_threads)

    library = Closing()
    said = pack(model, figures(model, onnxruntime=50), rounding={ONNX: library}, ended=ended)
    assert said["outcome"] == "the model was closed before"
    assert library.num_made == 8
