"""`teneral inspect` of a config.json."""

from __future__ import annotations

import json

import pytest
from tests.support.tiny_models import FAMILIES, config_json, tiny_model

from teneral.runtime.backends.describe import describe_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_described(family):
    described = describe_model(json.dumps(config_json(tiny_model(family))).encode())

    assert described["refused"] is None
    assert described["family"] == family
    assert described["native_refuses"] is None


def test_a_model_that_the_core_lacks_is_described_with_the_reason():
    data = config_json(tiny_model("llama", head_dim=512))

    assert "head_dim = 512" in describe_model(json.dumps(data).encode())["native_refuses"]


@pytest.mark.parametrize("data", [b"{}", b"[]", b"{", b"\xff", b'{"model_type": "gpt2"}', b"[" * 100_000])
def test_what_cannot_be_read_is_refused_with_a_reason(data):
    assert describe_model(data)["refused"]
