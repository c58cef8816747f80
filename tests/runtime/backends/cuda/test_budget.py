"""A device's memory is divided so that weights, the largest step, graphs, keys and values all fit."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis", reason="machines that only check a device need not have it")

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny_models import config_json, tiny_model

from teneral.runtime.backends.cuda.storage import activation_bytes
from teneral.runtime.kv.storage import GRAPH_BYTES, MIN_KV_BYTES, SPARE_BYTES, device_kv_bytes
from teneral.runtime.models.decoder_config import DecoderConfig
from teneral.runtime.models.spec import DecoderSpec
from teneral.runtime.tensors import DType

GIB = 1 << 30


@settings(deadline=None)
@given(free=st.integers(0, 200 * GIB), activations=st.integers(0, 8 * GIB))
def test_all_parts_together_fit_what_is_free_if_they_can(free, activations):
    kv_bytes = device_kv_bytes(free, activations)
    others = activations + GRAPH_BYTES + SPARE_BYTES
    assert kv_bytes >= MIN_KV_BYTES
    assert others + kv_bytes <= max(free, others + MIN_KV_BYTES)


def test_most_of_what_is_left_is_for_keys_and_values():
    assert 54 * GIB < device_kv_bytes(64 * GIB, GIB) < 63 * GIB


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_activations_are_those_of_the_largest_step(dtype):
    spec = DecoderSpec.of(DecoderConfig.from_json(config_json(tiny_model("llama"))), dtype)
    small, large = (activation_bytes(spec, rows, 4) for rows in (100, 200))
    a_row = dtype.size_bytes * (3 * 64 + (4 + 2 * 2) * 16 + 4 * 16 + 3 * 96)
    assert large - small == 100 * a_row
    assert activation_bytes(spec, 100, 5) - small == 320 * (dtype.size_bytes + 12)
