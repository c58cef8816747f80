"""`teneral inspect` of a config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tests.support.tiny_models import (
    DECODERS,
    FAMILIES,
    NATIVE_ONLY,
    WITH_TEXT_CONFIG,
    config_json,
    tiny_model,
)

from teneral.loader.format.gguf.families import model_types
from teneral.runtime.backends.describe import describe_model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_described(family):
    described = describe_model(json.dumps(config_json(tiny_model(family))).encode())

    assert described["refused"] is None
    assert described["family"] == family
    assert described["native_refuses"] is None


@pytest.mark.parametrize(
    ("family", "kernels", "quantizes", "adapts"),
    [
        ("llama", True, True, ["attention", "MLP"]),
        ("gemma2", False, True, ["attention", "MLP"]),
        ("qwen3_moe", False, True, ["attention"]),
        ("gpt_oss", False, False, ["attention"]),
        ("bert", False, False, []),
    ],
)
def test_a_description_says_what_can_be_done_with_the_weights(family, kernels, quantizes, adapts):
    described = describe_model(json.dumps(config_json(tiny_model(family))).encode())

    assert (described["kernels_refuse"] is None) is kernels
    assert (described["quantizes"], described["adapts"]) == (quantizes, adapts)


@pytest.mark.parametrize("family", ["llama", "bert", *NATIVE_ONLY])
def test_models_that_torch_lacks_are_described_as_the_native_cores(family):
    described = describe_model(json.dumps(config_json(tiny_model(family))).encode())

    assert described["native_only"] is (family in NATIVE_ONLY)


def test_keys_and_values_of_a_token_take_what_their_pool_takes():
    config = config_json(tiny_model("llama"))
    described = describe_model(json.dumps(config).encode())

    numbers = 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * 16
    assert described["kv_bytes_per_token"] == {"bf16": 2 * numbers, "int8": numbers + 2 * numbers // 16}
    assert describe_model(json.dumps(config_json(tiny_model("bert"))).encode())["kv_bytes_per_token"] is None


def decoders_of_the_page() -> dict[str, dict[str, str]]:
    """The rows of the table of decoders in docs/models.md, by model_type."""
    text = (Path(__file__).parents[2] / "docs" / "models.md").read_text()
    lines = [
        line for line in text.split("## Decoders")[1].split("## ")[0].splitlines() if line.startswith("|")
    ]
    head, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    found = {}
    for row in rows:
        cells = dict(zip(head, row, strict=True))
        found |= dict.fromkeys(re.findall(r"`(\w+)`", cells["`model_type`"]), cells)
    return found


def test_the_page_has_a_row_for_every_family_of_decoders():
    assert sorted(decoders_of_the_page()) == sorted(DECODERS + NATIVE_ONLY + WITH_TEXT_CONFIG)


@pytest.mark.parametrize("family", DECODERS)
def test_the_page_says_of_each_family_what_the_code_does(family):
    described = describe_model(json.dumps(config_json(tiny_model(family))).encode())
    row = decoders_of_the_page()[family]

    assert row["native"] == ("yes" if described["native_refuses"] is None else "no")
    assert row["torch"] == "yes"
    assert row["CUDA kernels"] == ("yes" if described["kernels_refuse"] is None else "torch")
    assert row["quantised"] == ("yes" if described["quantizes"] else "no")
    assert row["adapters"] == ", ".join(described["adapts"])
    assert row["GGUF"] == ("yes" if family in model_types() else "no")


def test_a_model_that_the_core_lacks_is_described_with_the_reason():
    data = config_json(tiny_model("llama", head_dim=640))

    assert "head_dim = 640" in describe_model(json.dumps(data).encode())["native_refuses"]


@pytest.mark.parametrize("data", [b"{}", b"[]", b"{", b"\xff", b'{"model_type": "gptj"}', b"[" * 100_000])
def test_what_cannot_be_read_is_refused_with_a_reason(data):
    assert describe_model(data)["refused"]
