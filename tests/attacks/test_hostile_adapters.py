"""Adapters that lie, are cut, or ask for what is not supported: refused by name, before anything is computed."""

from __future__ import annotations

import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from tests.support.adapters import adapter_config, save_adapter
from tests.support.manifest_documents import document_of
from tests.support.tiny_models import config_json, save_tiny, tiny_model

from teneral import cli
from teneral.loader.errors import FormatError, TeneralError
from teneral.loader.sources.open import open_source
from teneral.runtime.adapters.load import open_adapter
from teneral.runtime.adapters.peft import PeftConfig
from teneral.runtime.errors import AdapterError
from teneral.runtime.models.decoder_config import DecoderConfig

MODEL = tiny_model("llama")
BASE = DecoderConfig.from_json(config_json(MODEL))

UNSUPPORTED: list[dict[str, Any]] = [
    {"peft_type": "LOHA"},
    {"peft_type": None},
    {"use_dora": True},
    {"use_qalora": True},
    {"modules_to_save": ["lm_head"]},
    {"bias": "all"},
    {"bias": "lora_only"},
    {"lora_bias": True},
    {"layer_replication": [[0, 2]]},
    {"target_parameters": ["experts.gate_up_proj"]},
    {"trainable_token_indices": [1]},
    {"megatron_config": {"a": 1}},
    {"init_lora_weights": "pissa"},
    {"init_lora_weights": "pissa_niter_4"},
    {"init_lora_weights": "loftq"},
    {"exclude_modules": [".*"]},
    {"exclude_modules": 1},
    {"target_modules": r".*\.(?=q|v).*"},
    {"target_modules": r"(.*"},
    {"target_modules": "(" * 5000},
    {"target_modules": "(" * 4000},
    {"target_modules": r".*_proj", "layers_to_transform": [1]},
    {"target_modules": ["(a+)+$"]},
    {"target_modules": []},
    {"target_modules": None},
    {"target_modules": ["q_proj", "lm_head"]},
    {"rank_pattern": {")": 8}},
    {"rank_pattern": {"q_proj": 4, "(?i)v_proj": 4}},
    {"rank_pattern": {"q_proj": 0}},
    {"rank_pattern": [4]},
    {"alpha_pattern": {"q_proj": "8"}},
    {"layers_to_transform": "1"},
    {"layers_to_transform": [-1]},
    {"r": 0},
    {"r": 513},
    {"r": True},
    {"r": "8"},
    {"lora_alpha": None},
    {"lora_alpha": 1e300},
    {"use_rslora": "yes"},
    {"an_option_of_tomorrow": "on"},
]


def check(folder: Path) -> None:
    source = open_source(str(folder))
    try:
        open_adapter(source, "", BASE, max_bytes=1 << 22)
    finally:
        source.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_adapter(tmp_path / "a", MODEL, target_modules=["q_proj", "v_proj"])


def test_the_adapter_that_the_others_are_made_of_is_fine(folder: Path) -> None:
    check(folder)


@pytest.mark.parametrize("options", UNSUPPORTED, ids=lambda options: json.dumps(options)[:40])
def test_unsupported_options_are_refused_by_name(folder: Path, options: dict[str, Any]) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(**options)))
    with pytest.raises(AdapterError) as found:
        check(folder)
    assert next(iter(options)) in found.value.message
    assert len(found.value.message) < 500


@pytest.mark.parametrize(
    "options",
    [
        {"target_modules": r".*\.q_proj"},  # and not v_proj
        {"exclude_modules": ["q_proj"]},
        {"rank_pattern": {"^model.*q_proj": 4}},
        {"target_modules": f"((({'(.*)*' * 500}){{900}}){{900}})*!"},
        {"alpha_pattern": {f"({'(.*)*' * 100}){{1,900}}{index}": 8 for index in range(1000)}},
    ],
    ids=lambda options: json.dumps(options)[:60],
)
def test_expressions_that_do_not_fit_the_tensors_or_take_long_are_refused(
    folder: Path, options: dict[str, Any]
) -> None:
    base = {"target_modules": ["q_proj", "v_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(adapter_config(**base | options)))
    with pytest.raises(AdapterError, match=r"announce|rank|too long"):
        check(folder)


@pytest.mark.parametrize(
    "config",
    [
        b"",
        b"[]",
        b"{",
        b'{"r": 1, "r": 2}',
        b'{"peft_type": "LORA"}',
        b"\xff\xfe",
        b'{"a":' + b"[" * 100_000,
        b'{"peft_type": "LORA", "r": NaN, "lora_alpha": 1}',
        b'{"peft_type": "LORA", "r": 8, "lora_alpha": NaN, "target_modules": ["q_proj"]}',
    ],
    ids=lambda config: repr(config)[:30],
)
def test_configs_that_are_none_are_refused(config: bytes) -> None:
    with pytest.raises(AdapterError):
        PeftConfig.parse(config)


def test_a_config_beyond_its_bound_is_not_read(folder: Path) -> None:
    (folder / "adapter_config.json").write_bytes(b" " * (2 << 20))
    with pytest.raises(FormatError):
        check(folder)


CHANGES: dict[str, Any] = {
    "one matrix less": lambda tensors: tensors.pop(next(iter(tensors))),
    "DoRA's magnitudes": lambda tensors: tensors.update(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.zeros(64)}
    ),
    "another module": lambda tensors: tensors.update(
        {"base_model.model.model.layers.0.self_attn.o_proj.lora_A.weight": torch.zeros(8, 64)}
    ),
    "another layer": lambda tensors: tensors.update(
        {"base_model.model.model.layers.99999.self_attn.q_proj.lora_A.weight": torch.zeros(8, 64)}
    ),
    "an embedding": lambda tensors: tensors.update(
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(8, 320)}
    ),
    "another rank": lambda tensors: tensors.update(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(9, 64)}
    ),
    "transposed": lambda tensors: tensors.update(
        {"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(64, 8)}
    ),
    "integers": lambda tensors: tensors.update(
        {
            "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(
                8, 64, dtype=torch.int8
            )
        }
    ),
    "nothing": lambda tensors: tensors.clear(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_the_config_does_not_announce_are_refused(folder: Path, change: str) -> None:
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    CHANGES[change](tensors)
    save_file(tensors, path)
    with pytest.raises(AdapterError):
        check(folder)


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_cut_files_are_refused(folder: Path, cut: int) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TeneralError):
        check(folder)


def test_a_header_that_claims_too_much_is_refused(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 60) + path.read_bytes()[8:])
    with pytest.raises(FormatError):
        check(folder)


def test_a_file_beyond_the_budget_is_not_read(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    with path.open("ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(AdapterError, match="--adapters-bytes"):
        check(folder)


# Packed adapters


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    save_tiny("llama", tmp_path / "plain")
    assert cli.run(["pack", str(tmp_path / "plain"), str(tmp_path / "base"), "--quiet"]) == 0
    arguments = [str(folder), str(tmp_path / "packed"), "--base", str(tmp_path / "base"), "--quiet"]
    assert cli.run(["pack", *arguments]) == 0
    return tmp_path / "packed"


def read(packed: Path, base_digest: bytes | None = None) -> None:
    """Open and read it, over the base that its manifest names where no other is given."""
    if base_digest is None:
        named = json.loads((packed / "manifest.json").read_text()).get("base")
        base_digest = bytes.fromhex(named) if isinstance(named, str) and len(named) == 64 else b"1" * 32
    source = open_source(str(packed))
    try:
        opened = open_adapter(source, "", BASE, max_bytes=1 << 22, base_digest=base_digest)
        opened.read(opened.plan.allocate(), lambda layer: None)
    finally:
        source.close()


def test_the_packed_adapter_that_the_others_are_made_of_is_fine(packed: Path) -> None:
    read(packed)


MANIFESTS: dict[str, Any] = {
    "no base": lambda document: document.pop("base"),
    "base is null": lambda document: document.update(base=None),
    "no files": lambda document: document.update(files=[]),
    "no groups": lambda document: document.update(groups=[], parts=[]),
    "one tensor less": lambda document: document["groups"][0]["tensors"].pop(),
    "another name": lambda document: document["groups"][0]["tensors"][0].update(name="lm_head.weight"),
    "another shape": lambda document: document["groups"][0]["tensors"][0].update(shape=[1 << 40, 1 << 20]),
    "another dtype": lambda document: document["groups"][0]["tensors"][0].update(dtype="I64"),
    "no parts": lambda document: document.update(parts=[]),
    "parts twice": lambda document: document["parts"].extend(document["parts"]),
    "a text": lambda document: document.update(groups="groups"),
}


@pytest.mark.parametrize("change", MANIFESTS)
def test_packed_adapters_that_lie_are_refused(packed: Path, change: str) -> None:
    path = packed / "manifest.json"
    document = document_of(path.read_bytes())
    MANIFESTS[change](document)
    path.write_text(json.dumps(document, separators=(",", ":")))
    with pytest.raises(TeneralError):
        read(packed)


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(place=st.floats(0, 1, exclude_max=True), byte=st.integers(0, 255))
def test_a_packed_adapter_with_any_byte_changed_is_right_or_refused(
    packed: Path, place: float, byte: int
) -> None:
    path = packed / "manifest.json"
    content = path.read_bytes()
    base_digest = bytes.fromhex(json.loads(content)["base"])
    try:
        changed = bytearray(content)
        changed[int(place * len(content))] = byte
        path.write_bytes(changed)
        with suppress(TeneralError):
            read(packed, base_digest)
    finally:
        path.write_bytes(content)


def test_a_manifest_beyond_its_bound_is_not_read(packed: Path) -> None:
    with (packed / "manifest.json").open("ab") as file:
        file.truncate(1 << 30)
    with pytest.raises(TeneralError):
        read(packed, b"1" * 32)
