"""The output of `inspect`, as a value and as a table."""

from __future__ import annotations

import json

import pytest
from tests.support.checkpoints import llama_contents, model_store, random_content
from tests.support.memory_store import MemoryStore

from teneral.loader.artifact import open_artifact
from teneral.loader.format.manifest import Tier
from teneral.loader.tools.inspect import describe, render_table
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions


@pytest.fixture(scope="module")
def artifact() -> MemoryStore:
    store = MemoryStore(label="models/tiny")
    pack(model_store(llama_contents(tied=True, hidden=128), metadata={"format": "pt"}), store)
    return store


def test_the_value_is_json_and_its_sums_agree(artifact: MemoryStore) -> None:
    manifest = open_artifact(artifact)
    value = describe(manifest, artifact.url)
    assert json.loads(json.dumps(value)) == value
    totals = value["totals"]
    assert totals["draft_bytes"] == manifest.stored_bytes(Tier.DRAFT)
    assert totals["refine_bytes"] == manifest.stored_bytes(Tier.REFINE)
    assert totals["stored_bytes"] == totals["draft_bytes"] + totals["refine_bytes"]
    for key in ("tensors", "elements", "raw_bytes", "stored_bytes"):
        assert totals[key] == sum(group[key] for group in value["groups"])
    assert totals["stored_bytes"] == sum(blob["bytes"] for blob in value["blobs"])
    assert totals["raw_bytes"] == 2 * totals["elements"]
    assert 0.6 < totals["stored_ratio"] < 0.7


def test_the_value_names_what_identifies_the_artifact(artifact: MemoryStore) -> None:
    manifest = open_artifact(artifact)
    value = describe(manifest, artifact.url)
    assert value["pin"] == f"memory://models/tiny@b3:{manifest.digest.hex()}"
    assert value["format"] == "teneral 1"
    assert value["generator"].startswith("teneral ")
    assert value["aliases"] == {"lm_head.weight": "model.embed_tokens.weight"}
    assert value["metadata"] == {"format": "pt"}
    assert [file["name"] for file in value["files"]] == [
        "config.json",
        "tokenizer.json",
        "1_Pooling/config.json",
        "tensors.b3",
    ]
    assert all(len(file["digest"]) == 64 for file in value["files"])


def test_the_table_has_a_row_for_each_group_between_header_and_total(artifact: MemoryStore) -> None:
    table = render_table(describe(open_artifact(artifact), artifact.url))
    header, _, body = table.partition("\n\n")
    assert "artifact  memory://models/tiny" in header
    assert "digest    b3:" in header
    assert "tied      lm_head.weight = model.embed_tokens.weight" in header
    rows = [line.split()[0] for line in body.splitlines() if line[0].isalpha()]
    assert rows == ["group", "embed", "layers.0", "layers.1", "head", "total"]
    assert "stored/raw" in body
    assert len({len(line) for line in body.splitlines()}) == 1


def test_a_sketch_has_columns_where_there_is_one(artifact: MemoryStore) -> None:
    store = MemoryStore()
    source = model_store(llama_contents(hidden=128))
    manifest = pack(source, store, tiers=TierOptions(sketch_bits=1)).manifest
    value = describe(manifest, store.url)
    totals = value["totals"]
    assert totals["sketch_bytes"] == manifest.stored_bytes(Tier.SKETCH)
    assert totals["stored_bytes"] == sum(totals[f"{name}_bytes"] for name in ("sketch", "draft", "refine"))
    assert 0.28 < totals["sketch_ratio"] < 0.32
    assert 0.40 < totals["draft_ratio"] < 0.45  # with the sketch, without which it is none
    table = render_table(value)
    assert "sketch/raw" in table
    assert "bf16.1.3 (" in table
    assert "sketch" not in render_table(describe(open_artifact(artifact), artifact.url))


def test_a_dtype_without_tiers_is_reported_as_exact_only() -> None:
    contents = llama_contents(hidden=64)
    contents["model.layers.0.quantized.weight"] = random_content("F8_E4M3", (40, 40))
    contents["model.layers.0.half.weight"] = random_content("F16", (40, 40))
    store = MemoryStore()
    value = describe(pack(model_store(contents), store).manifest, store.url)
    assert {entry["dtype"]: entry["exact_only"] for entry in value["precision"]} == {
        "BF16": False,
        "F16": False,
        "F8_E4M3": True,
    }
    assert sum(entry["raw_bytes"] for entry in value["precision"]) == value["totals"]["raw_bytes"]
    (line,) = [line for line in render_table(value).splitlines() if line.startswith("encodings")]
    assert (
        line
        == "encodings BF16 bf16.3 (13), whole (5), bf16.5 (3); F16 f16.3 (1); F8_E4M3 exact only, bytes (1)"
    )


def test_plain_safetensors_are_shown_without_tiers() -> None:
    store = model_store(llama_contents())
    value = describe(open_artifact(store), store.url)
    assert value["digest"] is None
    assert value["pin"] is None
    assert value["totals"]["stored_ratio"] == 1.0
    table = render_table(value)
    assert "plain weights, not packed" in table
    assert "draft" not in table


def test_a_model_of_empty_tensors_has_no_ratio() -> None:
    store = MemoryStore()
    pack(model_store({"e": random_content("F32", (0, 3))}), store)
    value = describe(open_artifact(store), store.url)
    assert value["totals"]["stored_ratio"] is None
    assert "–" in render_table(value)


def test_the_experts_of_a_layer_share_a_row_and_their_least_memory_is_shown() -> None:
    content = {"model.embed_tokens.weight": ("BF16", (64, 64))}
    for layer in range(2):
        content[f"model.layers.{layer}.mlp.gate.weight"] = ("BF16", (64, 64))
        content |= {
            f"model.layers.{layer}.mlp.experts.{expert}.up_proj.weight": ("BF16", (64, 64))
            for expert in range(3)
        }
    store = MemoryStore(label="mixture")
    pack(model_store({name: random_content(*each) for name, each in content.items()}), store)
    value = describe(open_artifact(store), store.url)
    assert value["experts"] == {
        "count": 6,
        "layers": 2,
        "raw_bytes": 6 * 8192,
        "least_weights_bytes": (3 + 3) * 8192,
    }
    table = render_table(value)
    assert "6 in 2 layers, 49.2 kB; --weights-bytes from" in table
    rows = [line.split("  ")[0].strip() for line in table.splitlines()]
    assert rows[-7:-2] == ["embed", "layers.0", "layers.0.experts (3)", "layers.1", "layers.1.experts (3)"]
    assert len(value["groups"]) == 9
