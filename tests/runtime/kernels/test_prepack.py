"""Copies say what they must, keep to their memory, and are exchanged between steps; who fails harms nobody."""

from __future__ import annotations

import json
import os
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.support.decoding import Stepper, prompt_of
from tests.support.tiny_models import config_json, save_tiny, tensors_of, tiny_model

from teneral import cli
from teneral.loader.timeline import Timeline
from teneral.runtime.kernels import onednn
from teneral.runtime.kernels.choice import PRODUCT_SIZES, SIZES, Figures, LinearBackend
from teneral.runtime.kernels.copies import MAX_ERROR, ROUNDING, objection
from teneral.runtime.kernels.kinds import kind_of_layer, products_of
from teneral.runtime.kernels.packing import RESERVE_BYTES, Packing
from teneral.runtime.kernels.prepack import prepack
from teneral.runtime.models.build import build_model
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.models.linear import Linear
from teneral.runtime.models.packed import CannotPackError, Copy
from teneral.runtime.models.quantized import QuantizedLinear
from teneral.runtime.weights import DictWeights

TORCH, ONEDNN, KERNELS = LinearBackend.TORCH, LinearBackend.ONEDNN, LinearBackend.KERNELS
ONNX, OPENVINO = LinearBackend.ONNX_RUNTIME, LinearBackend.OPENVINO
PLENTY = 1 << 30
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}

needs_onednn = pytest.mark.skipif(
    not onednn.can_pack(Linear(torch.zeros(64, 64, dtype=torch.bfloat16))),
    reason="torch packs no bf16 on this processor",
)
_INTEGERS = QuantizedLinear(torch.zeros(64, 64, dtype=torch.int8), torch.ones(64, 1))
library_backends = [
    pytest.param(
        backend, marks=pytest.mark.skipif(not library.can_pack(_INTEGERS), reason=f"{backend} is not here")
    )
    for backend, library in ROUNDING.items()
]


class Plain:
    """A library whose products are torch's, in memory of its own; counts them."""

    def __init__(self, *, fails_at: int | None = None, factor: float = 1.0) -> None:
        self.num_made = self.num_computed = 0
        self.row_counts: set[int] = set()
        self.fails_at = fails_at
        self.factor = factor

    def can_pack(self, linear: Linear | QuantizedLinear) -> bool:
        return True

    def packed_bytes(self, linear: Linear | QuantizedLinear) -> int:
        return linear.weight.nbytes

    def Product(self, linear: QuantizedLinear, *, num_threads: int) -> Any:
        if self.num_made == self.fails_at:
            raise CannotPackError("there is no memory left")
        assert num_threads == 1
        self.num_made += 1
        own = QuantizedLinear(linear.weight.clone(), linear.scale.clone(), linear.zero)

        def compute(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            self.num_computed += 1
            self.row_counts.add(len(x))
            product = own.in_torch(x) * self.factor
            return product if bias is None else product + bias

        return compute


def decoder(dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> Decoder:
    model = tiny_model("qwen2", **overrides).to(dtype)
    tensors = {name: tensor.to(dtype) for name, tensor in tensors_of(model).items()}
    built = build_model(config_json(model), DictWeights(tensors))
    assert isinstance(built, Decoder)
    return built


@pytest.fixture(scope="module")
def quantised_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Any, Any]]:
    """Configurations and tensors, by how they are quantised."""
    found = {}
    for kind in ("int8", "int4", "int4 --asymmetric", "int4 --group-size 128"):
        folder = tmp_path_factory.mktemp("quantised")
        save_tiny("qwen2", folder / "plain", dtype=torch.bfloat16, **SHAPE)
        packed, unpacked = str(folder / "packed"), str(folder / "unpacked")
        assert cli.run(["pack", str(folder / "plain"), packed, "--quiet", "--quantize", *kind.split()]) == 0
        assert cli.run(["unpack", packed, unpacked, "--quiet"]) == 0
        config = json.loads((folder / "unpacked" / "config.json").read_text())
        found[kind] = config, load_file(folder / "unpacked" / "model.safetensors")
    return found


@pytest.fixture
def quantised(quantised_models: dict[str, tuple[Any, Any]]) -> Any:
    def build(kind: str = "int4") -> Decoder:
        config, tensors = quantised_models[kind]
        built = build_model(config, DictWeights(tensors))
        assert isinstance(built, Decoder)
        return built

    return build


def figures(of: Decoder, **copies_ns: int) -> Figures:
    """As if all products took 200 ns in torch, and so many with each of these backends."""
    backends = {LinearBackend(name): time_ns for name, time_ns in (copies_ns or {"onednn": 100}).items()}
    times = {TORCH: 200, **backends}
    return {product.kind: dict.fromkeys(product.sizes, times) for product in products_of(of)}


def packed(of: Decoder) -> list[bool]:
    return [product.linear.packed is not None for product in products_of(of)]


def pack(of: Decoder, kept: Figures | None = None, **settings: Any) -> dict[str, Any]:
    """What the timeline says of it."""
    timeline = Timeline()
    given = {"limit_bytes": PLENTY, "num_threads": 1, "ended": threading.Event(), **settings}
    thread = threading.Thread(  # whose priority goes down
        target=lambda: prepack(
            of, kept=lambda: figures(of) if kept is None else kept, timeline=timeline, **given
        )
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


def error_of(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).norm() / expected.norm())


# What computes over a copy


@needs_onednn
@pytest.mark.parametrize("shape", [(1152, 896), (64, 64), (96, 100), (7, 3)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_product_packed_by_onednn_is_torchs_to_the_bit(shape, has_bias):
    torch.manual_seed(0)
    weight = torch.randn(shape).to(torch.bfloat16)
    linear = Linear(weight, torch.randn(shape[0]).to(torch.bfloat16) if has_bias else None)
    compute = onednn.Product(linear, num_threads=1)
    assert objection(linear, compute, PRODUCT_SIZES, torch.bfloat16) is None
    assert compute.packed.nbytes <= onednn.packed_bytes(linear)
    with torch.inference_mode():
        for num_rows in (0, 1, 33, 100, 128, 129, 300):
            x = torch.randn(num_rows, shape[1]).to(torch.bfloat16)
            expected = linear(x)
            linear.packed = Copy(compute, bytes([1]))
            assert torch.equal(linear(x), expected)
            assert torch.equal(linear(x.t().contiguous().t()), expected)
            linear.packed = None


@needs_onednn
def test_a_packed_product_of_other_weights_does_not_pass_for_the_same():
    weight = torch.randn(64, 64).to(torch.bfloat16)
    other = weight.clone()
    other[5, 7] += 1
    compute = onednn.Product(Linear(other), num_threads=1)
    assert "differs" in str(objection(Linear(weight), compute, (8,), torch.bfloat16))


def integers(bias: torch.Tensor | None = None) -> QuantizedLinear:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randint(0, 256, (96, 64), dtype=torch.uint8, generator=generator)
    return QuantizedLinear(weight, torch.rand(96, 2, generator=generator) + 0.5, None, bias)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_with_inputs_in_8_bits_for_each_row_is_accepted(dtype):
    linear = integers(torch.randn(96))

    def rounded(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        step = x.float().abs().amax(1, keepdim=True) / 127
        own = (x.float() / step).round() * step
        product = linear.in_torch(own) - linear.bias
        return (product if bias is None else product + bias).to(x.dtype)

    assert objection(linear, rounded, PRODUCT_SIZES, dtype) is None


def test_a_product_that_rounds_one_row_by_the_measure_of_another_is_refused():
    linear = integers()

    def rounded(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        step = x.abs().max() / 127
        return linear.in_torch((x / step).round() * step)

    assert objection(linear, rounded, (1,), torch.float32) is None
    assert "may be 2%" in str(objection(linear, rounded, (8,), torch.float32))


@pytest.mark.parametrize(
    "wrong",
    [
        lambda product: product * (1 + 2 * MAX_ERROR),
        lambda product: product.index_fill(0, torch.tensor([3]), 0.0),
        lambda product: product * float("nan"),
        lambda product: product[:, :-1],
        lambda product: product.double(),
    ],
)
def test_a_product_that_is_off_is_refused(wrong):
    linear = integers()
    assert objection(linear, lambda x, bias: wrong(linear.in_torch(x)), (8,), torch.float32) is not None
    assert objection(linear, lambda x, bias: linear.in_torch(x), (8,), torch.float32) is None


def test_a_product_that_forgets_its_bias_or_takes_it_twice_is_refused():
    linear = integers(torch.full((96,), 1000.0))
    bare = integers()
    assert objection(linear, lambda x, bias: bare.in_torch(x), (1,), torch.float32) is not None
    assert objection(linear, lambda x, bias: linear.in_torch(x), (1,), torch.float32) is not None


def test_a_matrix_of_zeros_agrees_with_itself():
    zeros = QuantizedLinear(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 1))
    assert objection(zeros, lambda x, bias: zeros.in_torch(x), (1, 8), torch.float32) is None


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


# Who fails harms nobody


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
