"""The manifest's JSON: what is written is canonical and comes back equal."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.flipped_bits import without_own_digest
from tests.support.format_artifacts import MIXED_LAYOUT, Shapes, build_format_artifact
from tests.support.manifest_documents import document_of

from teneral.loader.errors import IntegrityError, ManifestError
from teneral.loader.format.manifest import FRAME_ELEMENTS, Blob, Manifest, Tier
from teneral.loader.format.manifest_json import dump_manifest, manifest_digest, parse_manifest

PAGE = Path(__file__).parents[2] / "docs" / "format.md"


@pytest.fixture(scope="module")
def manifest() -> Manifest:
    return build_format_artifact(
        MIXED_LAYOUT,
        files={"config.json": b"{}", "1_Pooling/config.json": b"{ }"},
        aliases={"lm_head.weight": "embed.weight"},
        metadata={"format": "pt", "note": 'several\nlines, "quoted" — é 🦋', "": ""},
        part_elements=FRAME_ELEMENTS,
    ).manifest


def test_a_manifest_comes_back_equal_and_knows_its_digest(manifest: Manifest) -> None:
    data = dump_manifest(manifest)
    own = blake3(data[:-77])
    assert data.endswith(b',"blake3":"%b"}' % own.hexdigest().encode())
    assert parse_manifest(data) == manifest._replace(digest=own.digest(), has_own_digest=True)


def test_an_older_manifest_is_read_without_a_digest_of_its_own(manifest: Manifest) -> None:
    data = without_own_digest(dump_manifest(manifest))
    assert parse_manifest(data) == manifest._replace(digest=blake3(data).digest())
    data = without_own_digest(dump_manifest(in_generation(manifest, GENERATION)))
    digest = blake3(data[:-29]).digest()
    assert parse_manifest(data) == in_generation(manifest, GENERATION)._replace(digest=digest)


def test_the_digest_of_a_manifest_in_a_generation_is_that_of_older_writers(manifest: Manifest) -> None:
    data = dump_manifest(in_generation(manifest, GENERATION))
    assert manifest_digest(data) == manifest_digest(without_own_digest(data))


def test_a_wrong_digest_of_its_own_is_damage_and_not_a_wrong_pin(manifest: Manifest) -> None:
    data = dump_manifest(manifest)
    pin = manifest_digest(data)
    damaged = data.replace(b'"1_Pooling/', b'"1_Poolinf/', 1)
    for expected in (None, pin):
        with pytest.raises(IntegrityError, match="damaged: its bytes are not those that were written"):
            parse_manifest(damaged, expected_digest=expected)


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data + b" ",
        lambda data: b'{"blake3":"%b",' % data[-66:-2] + without_own_digest(data)[1:],
        lambda data: data[:-66] + data[-66:-2].upper() + data[-2:],
        lambda data: data[:-3] + b'"}',
        lambda data: data[:-66] + b'"}',
    ],
)
def test_a_digest_of_its_own_elsewhere_than_at_the_end_is_refused(
    manifest: Manifest, change: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(change(dump_manifest(manifest)))


def test_what_was_read_is_written_as_it_was(manifest: Manifest) -> None:
    data = dump_manifest(manifest)
    assert dump_manifest(parse_manifest(data)) == data


def test_white_space_and_the_order_of_keys_mean_nothing(manifest: Manifest) -> None:
    document = document_of(dump_manifest(manifest))
    other = json.dumps(dict(reversed(document.items())), indent=2).encode()
    assert parse_manifest(other)._replace(digest=None) == manifest


def test_the_example_of_the_format_page_is_valid() -> None:
    example = re.search(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert example is not None
    shown = json.loads(example[1].replace("<64 digits>", "0" * 64))
    assert list(shown)[-2:] == ["generation", "blake3"]
    del shown["blake3"]
    before = json.dumps(shown, separators=(",", ":")).encode()[:-1]
    parsed = parse_manifest(b'%b,"blake3":"%b"}' % (before, blake3(before).hexdigest().encode()))
    assert parsed.blobs[0].name == "blobs/5f0c3a91d2e7/draft-000.bin"
    assert [tensor.name for tensor in parsed.tensors] == ["embed.weight", "norm.weight"]
    assert parsed.stored_bytes(Tier.REFINE) == 1024


def test_the_pinned_manifest_is_accepted_and_another_one_refused(manifest: Manifest) -> None:
    data = dump_manifest(manifest)
    pin = manifest_digest(data)
    assert parse_manifest(data, expected_digest=pin).digest == pin
    with pytest.raises(IntegrityError, match="pinned") as caught:
        parse_manifest(data + b" ", expected_digest=pin)
    assert caught.value.expected == pin.hex()


GENERATION = "0123456789ab"


def in_generation(manifest: Manifest, generation: str) -> Manifest:
    folder = f"blobs/{generation}/"
    return manifest._replace(
        generation=generation,
        blobs=tuple(blob._replace(name=folder + blob.name) for blob in manifest.blobs),
        files=tuple(file._replace(path=folder + file.path) for file in manifest.files),
    )


def test_a_generation_moves_all_objects_and_leaves_the_digest(manifest: Manifest) -> None:
    first, second = (
        dump_manifest(in_generation(manifest, generation)) for generation in (GENERATION, "f" * 12)
    )
    assert first != second
    digest = parse_manifest(first).digest
    assert parse_manifest(second, expected_digest=digest) == in_generation(manifest, "f" * 12)._replace(
        digest=digest, has_own_digest=True
    )


def test_an_object_outside_its_generation_cannot_be_written(manifest: Manifest) -> None:
    with pytest.raises(ManifestError, match="cannot express"):
        dump_manifest(manifest._replace(generation=GENERATION))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: data + b" ",
        lambda data: data.replace(b'"0123456789ab"', b'"0123456789AB"'),
        lambda data: data.replace(b'"0123456789ab"', b'"0123456789abc"'),
        lambda data: data.replace(b'"0123456789ab"', b'"../456789ab"'),
        lambda data: data.replace(b'"0123456789ab"', b"12"),
        lambda data: data.replace(b'{"format"', b'{"generation":"0123456789ab","format"', 1),
        lambda data: b'{"generation":"0123456789ab",' + data[1:-29] + b"}",
    ],
)
def test_a_generation_elsewhere_than_at_the_end_is_refused(
    manifest: Manifest, change: Callable[[bytes], bytes]
) -> None:
    with pytest.raises(ManifestError):
        parse_manifest(change(without_own_digest(dump_manifest(in_generation(manifest, GENERATION)))))


def test_a_generation_cannot_be_put_to_a_manifest_that_has_none(manifest: Manifest) -> None:
    data = without_own_digest(dump_manifest(manifest))
    with pytest.raises(ManifestError):
        parse_manifest(data + b',"generation":"0123456789ab"}', expected_digest=blake3(data).digest())


def test_a_model_without_tensors_has_a_manifest() -> None:
    manifest = build_format_artifact({}).manifest
    assert parse_manifest(dump_manifest(manifest))._replace(digest=None, has_own_digest=False) == manifest


def test_slabs_follow_from_the_order_of_the_tensors(manifest: Manifest) -> None:
    parsed = parse_manifest(dump_manifest(manifest))
    assert [tensor.offset_bytes for tensor in parsed.tensors] == [t.offset_bytes for t in manifest.tensors]
    assert [group.slab_bytes for group in parsed.groups] == [group.slab_bytes for group in manifest.groups]


def test_weights_that_were_never_packed_have_no_manifest_to_write(manifest: Manifest) -> None:
    part = manifest.parts[0]._replace(digest=None)
    with pytest.raises(ManifestError, match="no digest"):
        dump_manifest(manifest._replace(parts=(part, *manifest.parts[1:])))


def test_what_the_format_cannot_express_is_not_written(manifest: Manifest) -> None:
    moved = manifest.tensors[0]._replace(offset_bytes=64)
    versioned = Blob(manifest.blobs[0].name, manifest.blobs[0].size_bytes, version="1")
    for wrong, where in (
        (manifest._replace(tensors=(moved, *manifest.tensors[1:])), "tensors"),
        (manifest._replace(blobs=(versioned, *manifest.blobs[1:])), "blobs"),
        (manifest._replace(parts=manifest.parts[1:]), "parts"),
        (manifest._replace(metadata={"half": "\ud800"}), ""),
    ):
        with pytest.raises(ManifestError) as caught:
            dump_manifest(wrong)
        assert caught.value.where.startswith(where)


SHAPES = st.lists(st.integers(0, 40), max_size=3).map(tuple)
LAYOUTS = st.dictionaries(
    st.text("abc.0é", min_size=1, max_size=6),
    st.integers(1, 4).flatmap(
        lambda count: st.lists(
            st.tuples(st.sampled_from(["BF16", "F32", "F16", "U8", "BOOL", "I64", "F64"]), SHAPES),
            min_size=count,
            max_size=count,
        )
    ),
    max_size=4,
)


@given(layout=LAYOUTS, part_frames=st.integers(1, 3), parts_in_blob=st.integers(1, 4))
@settings(max_examples=50, deadline=None)
def test_any_layout_comes_back_equal(
    layout: dict[str, list[tuple[str, tuple[int, ...]]]], part_frames: int, parts_in_blob: int
) -> None:
    named: dict[str, Shapes] = {
        group: {f"{group}/{index}": spec for index, spec in enumerate(specs)}
        for group, specs in layout.items()
    }
    manifest = build_format_artifact(
        named, part_elements=part_frames * FRAME_ELEMENTS, parts_in_blob=parts_in_blob
    ).manifest
    assert parse_manifest(dump_manifest(manifest))._replace(digest=None, has_own_digest=False) == manifest
