"""Products by other libraries' kernels mean what `QuantizedLinear` means, but for inputs rounded to 8 bits."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from types import ModuleType
from typing import Any

import pytest
import torch

from teneral.runtime.kernels.libraries import onnx_runtime, openvino
from teneral.runtime.models.packed import CannotPackError
from teneral.runtime.models.quantized import QuantizedLinear, dequantize

PACKAGES = {onnx_runtime: "onnxruntime", openvino: "openvino"}
# Rounding normally distributed inputs to 127 levels a side of their block's largest leaves 0.0053 (blocks of 32) to
# 0.0066 (of 128) of their length; a single row of few outputs is up to 0.0100 off.
MAX_ERROR, MAX_ERROR_OF_ALL = 0.012, 0.008
ROWS = (1, 2, 7, 33, 128)
THREADS = 2


@pytest.fixture(params=[onnx_runtime, openvino], ids=PACKAGES.values())
def library(request: pytest.FixtureRequest) -> ModuleType:
    if importlib.util.find_spec(PACKAGES[request.param]) is None:
        pytest.skip(f"{PACKAGES[request.param]} is not installed")
    module: ModuleType = request.param
    return module


def matrix(
    num_out: int,
    num_in: int,
    *,
    bits: int,
    group_size: int | None = None,
    zeros: bool = False,
    scale_dtype: torch.dtype = torch.bfloat16,
    bias: bool = False,
) -> QuantizedLinear:
    """Random integers of all levels; some scales are negative, as `teneral pack` may choose them."""
    generator = torch.Generator().manual_seed(num_out + num_in)
    groups = (num_out, num_in // (group_size or num_in))
    signs = 2 * torch.randint(0, 2, groups, generator=generator) - 1
    scale = (0.005 + 0.02 * torch.rand(groups, generator=generator)) * signs
    if bits == 8:
        weight = torch.randint(-127, 128, (num_out, num_in), dtype=torch.int8, generator=generator)
    else:
        weight = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8, generator=generator)
    zero = torch.randint(0, 16, groups, dtype=torch.uint8, generator=generator) if zeros else None
    own_bias = torch.randn(num_out, generator=generator).to(scale_dtype) if bias else None
    return QuantizedLinear(weight, scale.to(scale_dtype), zero, own_bias)


def inputs(num_rows: int, num_in: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(num_rows, num_in, generator=torch.Generator().manual_seed(num_rows)).to(dtype)


def reference(weight: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    product = x.float() @ dequantize(weight.weight, weight.scale, weight.zero).T
    return product if weight.bias is None else product + weight.bias


def error_of(y: torch.Tensor, expected: torch.Tensor) -> float:
    return float(torch.linalg.norm(y - expected) / torch.linalg.norm(expected))


KINDS: list[dict[str, Any]] = [
    {"bits": 8},
    {"bits": 8, "scale_dtype": torch.float32, "bias": True},
    {"bits": 8, "group_size": 128},
    {"bits": 4, "group_size": 32, "zeros": True},
    {"bits": 4, "group_size": 64},
    {"bits": 4, "group_size": 64, "zeros": True, "bias": True},
    {"bits": 4, "group_size": 64, "zeros": True, "scale_dtype": torch.float32},
    {"bits": 4, "group_size": 128, "bias": True},
    {"bits": 4, "group_size": 128, "zeros": True},
    {"bits": 4, "scale_dtype": torch.float32, "zeros": True},
]


@pytest.mark.parametrize("shape", [(1152, 896), (1000, 896), (1000, 4864), (37, 128)], ids=str)
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: "-".join(map(str, kind.values())))
def test_a_product_is_off_by_what_rounding_the_inputs_makes_it(library, kind, shape):
    weight = matrix(*shape, **kind)
    assert library.can_pack(weight)
    product = library.Product(weight, num_threads=THREADS)
    errors = []
    for dtype, rows in ((torch.float32, ROWS), (torch.bfloat16, (1, 33))):
        for num_rows in rows:
            x = inputs(num_rows, weight.num_in, dtype)
            y = product(x, weight.bias)
            assert y.dtype is dtype
            assert y.shape == (num_rows, weight.num_out)
            assert torch.equal(y, product(x, weight.bias))
            errors.append(error_of(y, reference(weight, x)))
    assert max(errors) < MAX_ERROR
    assert sum(errors) / len(errors) < MAX_ERROR_OF_ALL


@pytest.mark.parametrize(("bits", "group_size"), [(4, 96), (4, 192), (8, 320)])
def test_groups_may_be_of_any_size_that_the_blocks_of_inputs_divide(library, bits, group_size):
    """Or are refused, as by OpenVINO on processors where it gets some wrong."""
    weight = matrix(40, 960, bits=bits, group_size=group_size, zeros=bits == 4)
    try:
        product = library.Product(weight, num_threads=THREADS)
    except CannotPackError as error:
        if library is openvino and "something else" in str(error):
            return
        raise
    for num_rows in ROWS:
        x = inputs(num_rows, 960)
        assert error_of(product(x, None), reference(weight, x)) < MAX_ERROR


def test_a_copy_that_computes_something_else_is_refused(monkeypatch):
    pytest.importorskip("openvino")
    weight = matrix(96, 128, bits=8)
    monkeypatch.setattr(openvino, "dequantize", lambda *_: torch.ones(64, 128))
    with pytest.raises(CannotPackError, match="something else"):
        openvino.Product(weight, num_threads=THREADS)


def test_nothing_but_the_bias_that_is_given_is_added(library):
    weight = matrix(64, 128, bits=8, bias=True)
    product = library.Product(weight, num_threads=THREADS)
    x = inputs(3, 128)
    torch.testing.assert_close(product(x, weight.bias), product(x, None) + weight.bias)


def test_a_row_says_the_same_whoever_shares_its_step(library):
    weight = matrix(1000, 896, bits=4, group_size=64, zeros=True)
    product = library.Product(weight, num_threads=THREADS)
    x = inputs(130, 896)
    together = product(x, None)
    for num_rows in (1, 2, 5, 33, 64, 65, 129):
        torch.testing.assert_close(product(x[:num_rows], None), together[:num_rows], rtol=1e-4, atol=1e-4)


def test_inputs_may_be_views_and_long(library):
    weight = matrix(96, 128, bits=4, group_size=64)
    product = library.Product(weight, num_threads=THREADS)
    wide = inputs(600, 300, torch.bfloat16)
    for x in (wide[:, 40:168], wide[::2, 40:168], wide[3:4, 1:129], inputs(128, 77).T, inputs(0, 128)):
        assert torch.equal(product(x, None), product(x.contiguous(), None))
    x = wide[:, :128]
    assert error_of(product(x, None), reference(weight, x)) < MAX_ERROR


def test_outputs_and_inputs_are_the_callers(library):
    weight = matrix(96, 128, bits=8)
    product = library.Product(weight, num_threads=THREADS)
    x, other = inputs(4, 128), inputs(4, 128) + 1
    first = product(x, None)
    copy, given = first.clone(), x.clone()
    product(other, None)
    assert torch.equal(first, copy)
    assert torch.equal(x, given)
    first.zero_()
    assert torch.equal(product(x, None), copy)


def test_any_thread_may_call_and_several_at_once(library):
    weight = matrix(1000, 896, bits=4, group_size=64)
    product = library.Product(weight, num_threads=THREADS)
    given = [inputs(num_rows, 896) for num_rows in (1, 7, 40, 70)]
    expected = [product(x, None) for x in given]
    same = []

    def call(x: torch.Tensor, y: torch.Tensor) -> None:
        same.extend(torch.equal(product(x, None), y) for _ in range(20))

    threads = [
        threading.Thread(target=call, args=pair, daemon=True) for pair in zip(given, expected, strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(same) == 80
    assert all(same)


@pytest.mark.parametrize("zeros", [False, True])
def test_four_bit_weights_are_not_needed_afterwards(library, zeros):
    weight = matrix(1000, 896, bits=4, group_size=64, zeros=zeros)
    product = library.Product(weight, num_threads=THREADS)
    x = inputs(70, 896)
    expected = product(x, None)
    for tensor in (weight.weight, weight.scale, weight.zero):
        if tensor is not None:
            tensor.zero_()
    del weight, tensor
    torch.full((1 << 22,), -1.0)
    assert torch.equal(product(x, None), expected)


def test_eight_bit_weights_may_be_let_go(library):
    weight = matrix(1000, 896, bits=8)
    product = library.Product(weight, num_threads=THREADS)
    x = inputs(70, 896)
    expected = product(x, None)
    del weight
    torch.full((1 << 22,), -1.0)
    assert torch.equal(product(x, None), expected)


def test_products_of_one_shape_do_not_mix(library):
    weights = [matrix(64, 128, bits=4, group_size=64) for _ in range(3)]
    for number, weight in enumerate(weights):
        weight.weight.add_(17 * number)
    products = [library.Product(weight, num_threads=THREADS) for weight in weights]
    x = inputs(9, 128)
    for weight, product in zip(weights, products, strict=True):
        assert error_of(product(x, None), reference(weight, x)) < MAX_ERROR


@pytest.mark.parametrize(
    "weight",
    [
        matrix(64, 100, bits=8),
        matrix(64, 320, bits=4, group_size=16),
        QuantizedLinear(
            torch.ones(64, 128, dtype=torch.int8), torch.ones(64, 2), torch.zeros(64, 2, dtype=torch.int16)
        ),
        QuantizedLinear(
            torch.ones(64, 64, dtype=torch.uint8), torch.ones(64, 2), torch.zeros(64, 2, dtype=torch.int16)
        ),
        QuantizedLinear(torch.ones(64, 128, dtype=torch.int8, device="meta"), torch.ones(64, 1)),
    ],
    ids=["odd rows", "groups of 16", "8 bits with zeros", "zeros of 16 bits", "elsewhere"],
)
def test_what_the_kernels_do_not_know_is_refused(library, weight):
    assert not library.can_pack(weight)
    with pytest.raises(CannotPackError, match="not installed, or has no kernel"):
        library.Product(weight, num_threads=THREADS)


def test_without_the_library_nothing_can_be_packed(library, monkeypatch):
    weight = matrix(64, 128, bits=8)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert not library.can_pack(weight)


def test_what_the_library_says_of_a_failure_is_told(library):
    weight = matrix(64, 128, bits=4, group_size=64)
    weight.num_out = 65
    with pytest.raises(CannotPackError, match="could not pack weights: "):
        library.Product(weight, num_threads=THREADS)


def in_a_fresh_process(program: str, *arguments: str) -> Any:
    """What it prints last, as JSON."""
    environment = {name: value for name, value in os.environ.items() if name != onnx_runtime.NO_TELEMETRY}
    result = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
        env=environment,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_neither_library_is_imported_before_a_product_is_built():
    program = """
import json, sys
from teneral.runtime.kernels.libraries import onnx_runtime, openvino
import torch
from teneral.runtime.models.quantized import QuantizedLinear
weight = QuantizedLinear(torch.ones(64, 128, dtype=torch.int8), torch.ones(64, 1))
for library in (onnx_runtime, openvino):
    library.can_pack(weight), library.packed_bytes(weight)
print(json.dumps(sorted({"onnxruntime", "openvino"} & set(sys.modules))))
"""
    assert in_a_fresh_process(program) == []


MEASURE = """
import ctypes, importlib, json, os, sys, time
import torch
from teneral.runtime.models.quantized import QuantizedLinear
library = importlib.import_module(sys.argv[1])
torch.set_num_threads(2)

def resident():
    torch.empty(0)
    ctypes.CDLL(None).malloc_trim(0)
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGESIZE")

def matrix(bits):
    if bits == 8:
        weight, groups = torch.ones(4096, 896, dtype=torch.int8), 1
    else:
        weight, groups = torch.ones(4096, 448, dtype=torch.uint8), 14
    return QuantizedLinear(weight, torch.ones(4096, groups))

weights = [matrix(int(sys.argv[2])) for _ in range(9)]
x = torch.ones(300, 896)
library.Product(weights[0], num_threads=2)(x, None)  # imports, and whatever there is only once
before = resident()
products = [library.Product(weight, num_threads=2) for weight in weights[1:]]
for product in products:
    product(x, None)
num_bytes = resident() - before
del weights
time.sleep(0.2)
start = time.process_time()
time.sleep(1)
print(json.dumps({
    "bytes": num_bytes / len(products),
    "bound": library.packed_bytes(matrix(int(sys.argv[2]))),
    "idle_s": time.process_time() - start,
    "sockets": [path for path in map(os.readlink, (f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")
                if os.path.lexists(f"/proc/self/fd/{fd}"))) if path.startswith("socket") or path.endswith(".db")],
}))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("bits", [8, 4])
def test_a_copy_keeps_to_its_bound_and_its_threads_sleep(library, bits):
    measured = in_a_fresh_process(MEASURE, library.__name__, str(bits))
    assert measured["bytes"] <= measured["bound"]
    assert measured["bound"] < 4 * 4096 * 896 * bits // 8
    assert measured["idle_s"] < 0.1  # of a second; spinning threads would take more than all of it
    assert measured["sockets"] == []  # ONNX Runtime's telemetry would open a database
