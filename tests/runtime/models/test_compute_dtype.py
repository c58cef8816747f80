"""The compute dtype follows from the stored one and from the CPU's abilities, and changes no
weight.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from teneral.runtime.backends.torch.tensors import ComputePolicy, CpuDtypes
from teneral.runtime.models.executor import ComputeDtype
from teneral.runtime.models.parameters import COMPUTE_DTYPES
from teneral.runtime.tensors import DType

BF16, FP16, FP32 = DType.BF16, DType.F16, DType.F32
NEITHER, ONLY_BF16, ONLY_FP16, BOTH = (
    CpuDtypes(bfloat16=False, float16=False),
    CpuDtypes(bfloat16=True, float16=False),
    CpuDtypes(bfloat16=False, float16=True),
    CpuDtypes(bfloat16=True, float16=True),
)
CPUS = (NEITHER, ONLY_BF16, ONLY_FP16, BOTH)


@pytest.mark.parametrize(
    ("stored", "cpu", "compute", "why"),
    [
        (BF16, ONLY_BF16, BF16, "as stored"),
        (BF16, BOTH, BF16, "as stored"),
        (BF16, NEITHER, FP32, "the CPU has no fast bf16"),
        (BF16, ONLY_FP16, FP32, "the CPU has no fast bf16"),
        (FP16, ONLY_FP16, FP16, "as stored"),
        (FP16, BOTH, FP16, "as stored"),
        (FP16, NEITHER, FP32, "the CPU has no fast fp16"),
        (FP16, ONLY_BF16, FP32, "the CPU has no fast fp16"),
        *((FP32, cpu, FP32, "as stored") for cpu in CPUS),
    ],
)
def test_floats_are_computed_as_they_are_stored_or_in_fp32_where_the_cpu_is_slow(stored, cpu, compute, why):
    chosen = ComputePolicy(cpu).choose(stored, is_quantised=False)

    assert (chosen.dtype, chosen.why) == (compute, why)


@pytest.mark.parametrize(
    ("stored", "cpu", "compute"),
    [
        (BF16, ONLY_BF16, BF16),
        (BF16, BOTH, BF16),
        (BF16, NEITHER, FP32),
        (BF16, ONLY_FP16, FP32),
        (FP16, ONLY_BF16, BF16),
        (FP16, BOTH, BF16),
        (FP16, NEITHER, FP32),
        (FP16, ONLY_FP16, FP32),
        *((FP32, cpu, FP32) for cpu in CPUS),
    ],
)
def test_integers_are_computed_in_bf16_where_it_is_fast(stored, cpu, compute):
    chosen = ComputePolicy(cpu).choose(stored, is_quantised=True)

    assert chosen.dtype is compute


@pytest.mark.parametrize("asked", COMPUTE_DTYPES)
def test_what_was_asked_for_is_taken_on_every_cpu_and_to_the_letter(asked):
    for cpu, stored, is_quantised in itertools.product(CPUS, COMPUTE_DTYPES, [False, True]):
        policy = ComputePolicy(cpu, asked=asked.label)

        chosen = policy.choose(stored, is_quantised=is_quantised)

        assert chosen == ComputeDtype(stored, asked, "it was requested")


def test_the_log_has_both_dtypes_and_the_reason():
    chosen = ComputePolicy(NEITHER).choose(FP16, is_quantised=False)

    assert chosen.describe("torch") == (
        "weights in float16, computing in float32 by torch: the CPU has no fast fp16"
    )


def test_this_machine_says_something_of_itself():
    found = CpuDtypes.of_this_machine()

    assert found in CPUS
    assert found == CpuDtypes.of_this_machine()


def test_what_torch_cannot_say_is_taken_for_slow(monkeypatch):
    for query in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
        monkeypatch.delattr(torch.cpu, query, raising=False)
    monkeypatch.setattr("platform.machine", lambda: "x86_64")

    assert not CpuDtypes.of_this_machine().bfloat16
