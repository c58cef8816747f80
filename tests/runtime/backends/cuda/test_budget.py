"""A device's memory is divided so that weights, the largest step, graphs, keys and values all fit."""

from __future__ import annotations

import pytest

pytest.importorskip("hypothesis", reason="machines that only check a device need not have it")

from types import SimpleNamespace

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiny_models import config_json, tiny_model

from teneral.loader.errors import InsufficientMemoryError
from teneral.runtime.backends.choose import check_encoder_share, pool_bytes
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


@pytest.mark.parametrize("free", [80 * GIB, 30 * GIB])
def test_a_pool_in_a_share_of_a_device_leaves_the_rest_to_others(free):
    driver = SimpleNamespace(memory=lambda: (free, 80 * GIB))
    executor = SimpleNamespace(
        is_direct=True,
        device=SimpleNamespace(driver=driver),
        step_bytes=lambda _, adapters_bytes: GIB + adapters_bytes,
    )
    model = SimpleNamespace(device="cuda:0", executor=executor)
    others = GIB + GRAPH_BYTES + SPARE_BYTES
    kv_bytes = pool_bytes(model, 16 * GIB, 8, device_percent=40)
    assert kv_bytes == device_kv_bytes(min(free, 32 * GIB - 16 * GIB), GIB)
    assert 16 * GIB + others + kv_bytes <= 32 * GIB
    assert pool_bytes(model, 16 * GIB, 8, kv_bytes=2 * GIB, device_percent=40) == 2 * GIB
    assert pool_bytes(model, 16 * GIB, 8, kv_bytes=2 * GIB) == 2 * GIB
    for settings_ in ({"kv_bytes": 15 * GIB, "device_percent": 40}, {"device_percent": 21}):
        with pytest.raises(InsufficientMemoryError, match=r"of 40 percent|of 21 percent") as caught:
            pool_bytes(model, 16 * GIB, 8, **settings_)
        assert "weights 16,384" in caught.value.message
    with_adapters = pool_bytes(model, 16 * GIB, 8, device_percent=40, adapters_bytes=GIB)
    assert 0.89 * GIB < kv_bytes - with_adapters < GIB


def test_the_largest_batch_of_an_encoder_is_counted_in_a_share_of_a_device():
    driver = SimpleNamespace(memory=lambda: (80 * GIB, 80 * GIB))
    executor = SimpleNamespace(
        is_direct=True, device=SimpleNamespace(driver=driver), batch_bytes=lambda max_tokens: max_tokens << 20
    )
    for max_tokens, fits in ((1024, True), (8192, False)):
        config = SimpleNamespace(max_tokens=max_tokens)
        model = SimpleNamespace(device="cuda:0", executor=executor, config=config)
        check_encoder_share(model, GIB, None)
        if fits:
            check_encoder_share(model, GIB, 5)
        else:
            with pytest.raises(InsufficientMemoryError, match="of 5 percent"):
                check_encoder_share(model, GIB, 5)
    check_encoder_share(SimpleNamespace(), GIB, 5)  # computed by something else


@pytest.mark.parametrize("dtype", [DType.BF16, DType.F32])
def test_activations_are_those_of_the_largest_step(dtype):
    spec = DecoderSpec.of(DecoderConfig.from_json(config_json(tiny_model("llama"))), dtype)
    small, large = (activation_bytes(spec, rows, 4) for rows in (100, 200))
    a_row = dtype.size_bytes * (3 * 64 + (4 + 2 * 2) * 16 + 4 * 16 + 3 * 96)
    assert large - small == 100 * a_row
    assert activation_bytes(spec, 100, 5) - small == 320 * (dtype.size_bytes + 12)
