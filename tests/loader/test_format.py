"""The format as `docs/format.md` says it: a reader made from that page understands what Teneral writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.format_artifacts import MIXED_LAYOUT, FormatArtifact, build_format_artifact
from tests.support.reference_reader import read_files, read_weights

from teneral.loader.format.manifest import FRAME_ELEMENTS
from teneral.loader.sources.memory import MemoryStore
from teneral.loader.tools.pack import pack

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture(scope="module")
def artifact() -> FormatArtifact:
    return build_format_artifact(
        MIXED_LAYOUT,
        files={"config.json": b"{}"},
        aliases={"lm_head.weight": "embed.weight"},
        part_elements=FRAME_ELEMENTS,
    )


def test_a_reader_made_from_the_page_gets_every_bit_back(artifact: FormatArtifact) -> None:
    weights = read_weights(artifact.objects)
    expected = {name: content.tobytes() for name, content in artifact.contents.items()}
    assert weights == expected | {"lm_head.weight": expected["embed.weight"]}


def test_its_draft_differs_only_in_the_four_low_mantissa_bits(artifact: FormatArtifact) -> None:
    draft = np.frombuffer(read_weights(artifact.objects, tiers=("draft",))["up.weight"], "<u2")
    exact = artifact.contents["up.weight"].view("<u2")
    assert np.array_equal(draft, exact & 0xFFF0 | 0b1000)


def test_it_finds_the_small_files(artifact: FormatArtifact) -> None:
    assert read_files(artifact.objects) == {"config.json": b"{}"}


def test_the_artifact_of_these_tests_has_every_encoding_and_codec(artifact: FormatArtifact) -> None:
    manifest = json.loads(artifact.objects["manifest.json"])
    encodings = {tensor["encoding"] for group in manifest["groups"] for tensor in group["tensors"]}
    planes = [
        plane for part in manifest["parts"] for segment in part["segments"] for plane in segment["planes"]
    ]
    assert encodings == {"whole", "bytes", "bf16.3"}
    assert {codec for codec, _, _ in planes} == {"raw", "zstd"}


def test_the_manifest_has_the_keys_that_the_page_shows(artifact: FormatArtifact) -> None:
    example = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None

    def key_paths(value: object, path: str = "") -> set[str]:
        if isinstance(value, dict) and path not in (".aliases", ".metadata"):
            return {f"{path}.{key}" for key in value} | {
                found for key, item in value.items() for found in key_paths(item, f"{path}.{key}")
            }
        if isinstance(value, list):
            return {found for item in value for found in key_paths(item, f"{path}[]")}
        return set()

    assert key_paths(json.loads(artifact.objects["manifest.json"])) == key_paths(json.loads(example[1]))


def test_it_reads_what_the_packer_writes(artifact: FormatArtifact) -> None:
    from tests.support.checkpoints import safetensors_file

    tensors = {tensor.name: tensor for tensor in artifact.manifest.tensors}
    contents = {
        name: (tensors[name].dtype, tensors[name].shape, content.tobytes())
        for name, content in artifact.contents.items()
    }
    store = MemoryStore()
    pack(MemoryStore({"model.safetensors": safetensors_file(contents), "config.json": b"{}"}), store)
    objects = {info.name: store.read(info.name, max_bytes=1 << 30)[0] for info in store.list()}
    assert read_weights(objects) == {name: content.tobytes() for name, content in artifact.contents.items()}
