"""The format as `docs/format.md` says it: a reader made from that page understands what Teneral writes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.artifacts import coarse
from tests.support.format_artifacts import MIXED_LAYOUT, FormatArtifact, build_format_artifact
from tests.support.memory_store import MemoryStore
from tests.support.reference_reader import read_files, read_weights

from teneral.loader.format.manifest import FRAME_ELEMENTS, Tier
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions

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


# Each with a number of elements that fills neither bytes nor frames. Of fp32, cuts at bytes and between them.
CUTS = [
    *(
        f"bf16.{bits}"
        for bits in ("0", "1", "2", "3", "4", "5", "6", "7", "0.1", "0.7", "1.3", "2.4", "3.6", "6.7")
    ),
    *(f"f16.{bits}" for bits in ("0", "3", "5", "7", "9", "10", "1.3", "0.9", "7.10")),
    *(f"f32.{bits}" for bits in ("0", "3", "7", "8", "15", "22", "23", "1.7", "0.22", "7.23", "3.11")),
]
DTYPES = {"bf16": "BF16", "f16": "F16", "f32": "F32"}


@pytest.fixture(scope="module")
def cut_artifact() -> FormatArtifact:
    shapes = {name: (DTYPES[name.partition(".")[0]], (29, 41)) for name in CUTS}
    long = {
        f"long.{name}": (DTYPES[name.partition(".")[0]], (5, 13_109))
        for name in ("bf16.1.6", "f16.2", "f32.6")
    }
    vectors = {"vector": ("BF16", (77,)), "codes": ("I16", (9, 11))}
    encodings = {name: name.removeprefix("long.") for name in (*shapes, *long)}
    return build_format_artifact(
        {"embed": vectors, "layers.0": shapes, "head": long},
        encodings=encodings | {"vector": "whole.sketch", "codes": "bytes.sketch"},
        part_elements=FRAME_ELEMENTS,
    )


def test_a_reader_made_from_the_page_understands_every_cut(cut_artifact: FormatArtifact) -> None:
    assert read_weights(cut_artifact.objects) == {
        name: content.tobytes() for name, content in cut_artifact.contents.items()
    }


@pytest.mark.parametrize("tier", [Tier.SKETCH, Tier.DRAFT])
def test_it_gets_the_values_that_each_tier_of_a_cut_means(cut_artifact: FormatArtifact, tier: Tier) -> None:
    weights = read_weights(cut_artifact.objects, tiers=("sketch", "draft")[: tier + 1])
    cut = 0
    for tensor in cut_artifact.manifest.tensors:
        content = cut_artifact.contents[tensor.name]
        if len(tensor.encoding.tiers) > 1 and tier in tensor.encoding.tiers:
            content = coarse(tensor.dtype, tensor.encoding.mantissa_bits(tier), content)
            cut += 1
        if tensor.encoding.tiers[0] <= tier:
            assert weights[tensor.name] == content.tobytes(), tensor.name
    assert cut > 10


def test_a_reader_made_from_the_page_understands_sparse_tensors() -> None:
    names = ["bf16.sparse.3", "bf16.sparse.1.3", "bf16.sparse.7", "f16.sparse.3", "f32.sparse.7"]
    shapes = {name: (DTYPES[name.partition(".")[0]], (29, 41)) for name in names}
    shapes |= {"bytes.sparse": ("I8", (29, 41)), "long": ("BF16", (5, 13_109))}
    artifact = build_format_artifact(
        {"embed": shapes},
        encodings={name: name for name in shapes} | {"long": "bf16.sparse.3"},
        part_elements=FRAME_ELEMENTS,
    )
    assert read_weights(artifact.objects) == {
        name: content.tobytes() for name, content in artifact.contents.items()
    }


def test_it_finds_the_small_files(artifact: FormatArtifact) -> None:
    assert read_files(artifact.objects) == {"config.json": b"{}"}


def test_the_artifact_of_these_tests_has_every_encoding_and_codec(artifact: FormatArtifact) -> None:
    manifest = json.loads(artifact.objects["manifest.json"])
    encodings = {tensor["encoding"] for group in manifest["groups"] for tensor in group["tensors"]}
    planes = [
        plane for part in manifest["parts"] for segment in part["segments"] for plane in segment["planes"]
    ]
    assert encodings == {"whole", "bytes", "bf16.3", "f16.3", "f32.7"}
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

    written = key_paths(json.loads(artifact.objects["manifest.json"]))
    written |= {".generation"}  # which may be missing
    assert written == key_paths(json.loads(example[1]))


@pytest.mark.parametrize("tiers", [TierOptions(), TierOptions(draft_bits=6, sketch_bits=1)])
def test_it_reads_what_the_packer_writes(artifact: FormatArtifact, tiers: TierOptions) -> None:
    from tests.support.checkpoints import safetensors_file

    tensors = {tensor.name: tensor for tensor in artifact.manifest.tensors}
    contents = {
        name: (tensors[name].dtype, tensors[name].shape, content.tobytes())
        for name, content in artifact.contents.items()
    }
    store = MemoryStore()
    source = MemoryStore({"model.safetensors": safetensors_file(contents), "config.json": b"{}"})
    pack(source, store, tiers=tiers)
    objects = {info.name: store.read(info.name, max_bytes=1 << 30)[0] for info in store.list()}
    assert read_weights(objects) == {name: content.tobytes() for name, content in artifact.contents.items()}
