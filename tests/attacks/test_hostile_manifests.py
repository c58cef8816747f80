"""Manifests that lie: every one is refused with a place and a hint, before anything is allocated by it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.format_artifacts import build_format_artifact
from tests.support.manifest_documents import SOUND, THREE_TIERS, Document, document_of, encoded, refused

from teneral.loader.format.limits import MAX_MANIFEST_BYTES
from teneral.loader.format.manifest import FRAME_ELEMENTS, Tier
from teneral.loader.format.manifest_json import MAX_JSON_ITEMS, parse_manifest


def test_the_manifest_of_these_tests_is_sound_when_left_alone() -> None:
    assert len(parse_manifest(encoded(SOUND)).parts) == 9


# One value changed: where it stands, what it becomes, and what the error says

NEWER = "newer"


CHANGES: dict[str, tuple[str, Any, str]] = {
    "another format": ("format", "onnx", "not the manifest of a Teneral artifact"),
    "a newer version": ("version", 2, "format version 2 is not 1"),
    "a version of another type": ("version", True, "not an integer"),
    "a generator with a line break": ("generator", "a\nb", "control characters"),
    "groups that are no list": ("groups", {}, "not a list"),
    "a group that is no object": ("groups/0", [], "not a JSON object"),
    "a group without tensors": ("groups/0/tensors", [], "no tensors"),
    "an empty group name": ("groups/0/name", "", "control characters"),
    "a group name twice": ("groups/0/name", "head", "stands there twice"),
    "an unknown dtype": ("groups/0/tensors/0/dtype", "Q4_K", "not one of"),
    "an unknown encoding": ("groups/0/tensors/0/encoding", "lattice", "'lattice' is not known here"),
    "a draft of more bits than there are": ("groups/0/tensors/0/encoding", "bf16.8", "not known here"),
    "a sketch that leaves the draft nothing": ("groups/0/tensors/0/encoding", "bf16.3.3", "not known here"),
    "a sketch that is finer than the draft": ("groups/0/tensors/0/encoding", "bf16.4.3", "not known here"),
    "far too many bits": ("groups/0/tensors/0/encoding", "f32.99", "not known here"),
    "bits with a leading zero": ("groups/0/tensors/0/encoding", "bf16.03", "not known here"),
    "bits in other digits": ("groups/0/tensors/0/encoding", "bf16.\u0663", "not known here"),
    "bits below none": ("groups/0/tensors/0/encoding", "bf16.-1", "not known here"),
    "no bits": ("groups/0/tensors/0/encoding", "bf16.", "not known here"),
    "four tiers": ("groups/0/tensors/0/encoding", "bf16.1.2.3", "not known here"),
    "an encoding in a line of its own": ("groups/0/tensors/0/encoding", "bf16.3\n", "control characters"),
    "an encoding of other planes": ("groups/0/tensors/0/encoding", "bf16.4", "2 planes, not 3"),
    "an encoding of another number of tiers": ("groups/0/tensors/0/encoding", "bf16.7", "cannot be a"),
    "a sketch that is not there": ("groups/0/tensors/0/encoding", "bf16.1.3", "the sketch tier of tensor 0"),
    "vectors in a sketch that is not there": ("groups/1/tensors/0/encoding", "whole.sketch", "the sketch tier"),
    "an encoding for another dtype": ("groups/1/tensors/1/encoding", "bf16.3", "is not for I16"),
    "a negative dimension": ("groups/0/tensors/0/shape/0", -1, "not an integer from 0"),
    "a fractional dimension": ("groups/0/tensors/0/shape/0", 2.0, "is not an integer"),
    "a true dimension": ("groups/0/tensors/0/shape/0", True, "not an integer from 0"),
    "a dimension as text": ("groups/0/tensors/0/shape/0", "2", "not an integer from 0"),
    "a huge dimension": ("groups/0/tensors/0/shape/0", 2**53, "not an integer from 0"),
    "an endless dimension": ("groups/0/tensors/0/shape/0", 10**4000, "not an integer from 0"),
    "too many dimensions": ("groups/0/tensors/0/shape", [1] * 33, "at most 32"),
    "too many elements": ("groups/0/tensors/0/shape", [2**24, 2**25], "more than 281474976710656 elements"),
    "an overflow hidden by a zero": ("groups/1/tensors/2/shape", [2**48, 2**48, 0], "more than"),
    "weights of 32 TiB": ("groups/0/tensors/0/shape", [2**44], "weights take more than"),
    "half a byte": ("groups/1/tensors/2", {"name": "none", "dtype": "F4", "shape": [3], "encoding": "whole"},
                    "whole bytes"),
    "a smaller tensor": ("groups/0/tensors/0/shape", [2, FRAME_ELEMENTS], "what comes next"),
    "a larger tensor": ("groups/0/tensors/0/shape", [3, FRAME_ELEMENTS], "no multiple of 65536"),
    "a tensor called twice the same": ("groups/0/tensors/0/name", "head.weight", "stands there twice"),
    "a tensor called as an alias is": ("groups/0/tensors/0/name", "tied.weight", "stands there twice"),
    "a reserved tensor name": ("groups/2/tensors/0/name", "__metadata__", "can be called"),
    "a long tensor name": ("groups/2/tensors/0/name", "é" * 513, "1 to 1024 bytes"),
    "half of a surrogate pair": ("groups/2/tensors/0/name", "\ud800", "1 to 1024 bytes"),
    "an alias of nothing": ("aliases/tied.weight", "lost.weight", "is not a tensor"),
    "an alias of an alias": ("aliases/again", "tied.weight", "is not a tensor"),
    "an alias of itself": ("aliases/self", "self", "is not a tensor"),
    "an alias called as a tensor is": ("aliases/head.weight", "embed.weight", "stands there twice"),
    "an empty alias": ("aliases/", "embed.weight", "cannot stand here"),
    "aliases that are no object": ("aliases", [["a", "b"]], "not a JSON object"),
    "metadata that is no text": ("metadata/format", 1, "cannot stand here"),
    "half a surrogate in metadata": ("metadata/format", "\udfff", "cannot stand here"),
    "a blob outside": ("blobs/0/name", "../secret", "not a usable object name"),
    "an absolute blob": ("blobs/0/name", "/etc/passwd", "not a usable object name"),
    "a blob with a backslash": ("blobs/0/name", "a\\b", "not a usable object name"),
    "a blob with a NUL": ("blobs/0/name", "a\0b", "control characters"),
    "a blob that is the manifest": ("blobs/0/name", "manifest.json", "stands there twice"),
    "a blob twice": ("blobs/0/name", "blobs/001.bin", "stands there twice"),
    "a blob that is a file": ("blobs/0/name", "files/config.json", "stands there twice"),
    "a blob in a blob": ("blobs/0/name", "blobs/001.bin/a", "is an object"),
    "a longer blob": ("blobs/0/size", 10**9, "its parts end at"),
    "an empty blob": ("blobs/0/size", 0, "its parts end at"),
    "one more blob": ("blobs/3", {"name": "b", "size": 8}, "its parts end at 0"),
    "a file outside": ("files/0/name", "../../.bashrc", "not a usable object name"),
    "a file stored outside": ("files/0/path", "../x", "not a usable object name"),
    "a file in a file": ("files/0/name", "sub/more.json/x", "is an object"),
    "a file twice": ("files/0/name", "sub/more.json", "stands there twice"),
    "a file of a gibibyte": ("files/0/size", 2**30, "from 0 to 268435456"),
    "half a digest": ("files/0/blake3", "00" * 31, "64 lower-case"),
    "a digest in capitals": ("parts/0/blake3", "AB" * 32, "64 lower-case"),
    "a digest with a line break": ("parts/0/blake3", "ab" * 32 + "\n", "64 lower-case"),
    "no digest": ("parts/0/blake3", None, "64 lower-case"),
    "an unknown tier": ("parts/0/tier", "outline", "not one of sketch, draft, refine"),
    "a refine part among drafts": ("parts/1/tier", "refine", "what comes next is the draft tier"),
    "a part of a group that there is not": ("parts/0/group", 7, "what comes next"),
    "a draft part called a sketch": ("parts/0/tier", "sketch", "what comes next is the draft tier"),
    "a draft part called a refinement": ("parts/0/tier", "refine", "what comes next is the draft tier"),
    "a part of another group": ("parts/3/group", 2, "what comes next"),
    "a part of a blob that there is not": ("parts/0/blob", 7, "no blob 7"),
    "a part of another blob": ("parts/0/blob", 1, "the part before it ends at"),
    "a part that overlaps another": ("parts/1/offset", 8, "the part before it ends at"),
    "a part behind its blob": ("parts/8/offset", 2**50, "the part before it ends at"),
    "a longer part": ("parts/8/size", 2**30, "its parts end at"),
    "a shorter part": ("parts/8/size", 1, "its parts end at"),
    "a part without segments": ("parts/0/segments", [], "0 segments"),
    "a segment of another tensor": ("parts/0/segments/0/tensor", 1, "what comes next"),
    "a segment of a tensor that there is not": ("parts/0/segments/0/tensor", 99, "what comes next"),
    "a segment that leaves a gap": ("parts/0/segments/0/start", FRAME_ELEMENTS, "from element 0 on"),
    "a segment that overlaps": ("parts/1/segments/0/start", 0, "from element 65536 on"),
    "a segment of nothing": ("parts/0/segments/0/count", 0, "has 131082 elements"),
    "a segment past its tensor": ("parts/2/segments/0/count", 11, "has 131082 elements, not 131083"),
    "a segment that ends within a frame": ("parts/0/segments/0/count", 65_535, "no multiple of 65536"),
    "a segment of two frames in one's place": ("parts/0/segments/0/count", 131_072, "cannot be a"),
    "a segment without planes": ("parts/0/segments/0/planes", [], "0 planes, not 2"),
    "one plane too many": ("parts/0/segments/0/planes/2", ["raw", 0, 0], "3 planes, not 2"),
    "a plane that is no list": ("parts/0/segments/0/planes/0", "raw", "a plane is a list"),
    "a plane of two values": ("parts/0/segments/0/planes/0", ["raw", 0], "a plane is a list"),
    "an unknown codec": ("parts/0/segments/0/planes/0/0", "lz4", "not one of raw, zstd"),
    "a codec that is no text": ("parts/0/segments/0/planes/0/0", ["raw"], "not one of raw, zstd"),
    "a coded plane called raw": ("parts/0/segments/0/planes/0/0", "raw", "cannot be a raw plane"),
    "a raw plane called coded": ("parts/0/segments/0/planes/1/0", "zstd", "cannot be a zstd plane"),
    "a coded whole plane": ("parts/3/segments/0/planes/0/0", "zstd", "cannot be a zstd plane"),
    "a plane that overlaps another": ("parts/0/segments/0/planes/1/1", 0, "a plane starts at 0"),
    "a plane that starts late": ("parts/0/segments/0/planes/0/1", 8, "a plane starts at 8"),
    "a coded plane of no bytes": ("parts/0/segments/0/planes/0/2", 0, "cannot be a zstd plane"),
    "a coded plane of odd size": ("parts/0/segments/0/planes/0/2", 1001, "cannot be a zstd plane"),
    "a coded plane that grew": ("parts/0/segments/0/planes/0/2", 65_536, "cannot be a zstd plane"),
}  # fmt: skip


def changed(path: str, value: Any, sound: Document = SOUND) -> Document:
    document = copy.deepcopy(sound)
    *parents, last = path.split("/")
    target: Any = document
    for key in parents:
        target = target[int(key) if isinstance(target, list) else key]
    if isinstance(target, list) and int(last) == len(target):
        target.append(value)
    else:
        target[int(last) if isinstance(target, list) else last] = value
    return document


@pytest.mark.parametrize("what", CHANGES)
def test_it_is_refused_when_it_has(what: str) -> None:
    path, value, message = CHANGES[what]
    assert message in str(refused(encoded(changed(path, value))))


@pytest.mark.parametrize("path", ["version", "groups/0/tensors/0/dtype", "groups/0/tensors/0/encoding",
                                  "parts/0/tier", "parts/0/segments/0/planes/0/0"])  # fmt: skip
def test_what_a_newer_version_may_have_written_is_called_so(path: str) -> None:
    value: Any = 2 if path == "version" else "from-the-future"
    assert "newer Teneral" in refused(encoded(changed(path, value))).hint


@pytest.mark.parametrize(
    "path",
    ["", "blobs/0/", "files/0/", "groups/0/", "groups/0/tensors/0/", "parts/0/", "parts/0/segments/0/"],
)
def test_unknown_keys_are_refused_as_a_newer_versions(path: str) -> None:
    error = refused(encoded(changed(f"{path}extra", 1)))
    assert "'extra' is unknown" in str(error)
    assert "newer Teneral" in error.hint


def objects_in(value: Any, path: str = "") -> list[tuple[str, Document]]:
    """Every object of the document with fixed keys, by its path."""
    if isinstance(value, list):
        return [found for index, item in enumerate(value) for found in objects_in(item, f"{path}/{index}")]
    if not isinstance(value, dict) or path in ("/aliases", "/metadata"):
        return []
    inner = [found for key, item in value.items() for found in objects_in(item, f"{path}/{key}")]
    return [(path, value), *inner]


def test_no_key_may_be_missing() -> None:
    num_tried = 0
    for path, found in objects_in(SOUND):
        for key in found:
            document = copy.deepcopy(SOUND)
            target: Any = document
            for step in path.split("/")[1:]:
                target = target[int(step) if isinstance(target, list) else step]
            del target[key]
            refused(encoded(document))
            num_tried += 1
    assert num_tried > 100


def reordered(change: Callable[[Document], object]) -> Document:
    document = copy.deepcopy(SOUND)
    change(document)
    return document


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda document: document["parts"].reverse(), id="reversed"),
        pytest.param(lambda document: document["parts"].pop(), id="without the last"),
        pytest.param(lambda document: document["parts"].pop(0), id="without the first"),
        pytest.param(lambda document: document["parts"].clear(), id="none"),
        pytest.param(lambda document: document["parts"].append(document["parts"][-1]), id="the last twice"),
        pytest.param(
            lambda document: document["parts"].insert(0, document["parts"][0]), id="the first twice"
        ),
    ],
)
def test_parts_that_do_not_hold_every_tensor_once_in_order_are_refused(
    change: Callable[[Document], object],
) -> None:
    refused(encoded(reordered(change)))


def test_a_part_of_too_many_elements_is_refused() -> None:
    num_elements = 17 * 1024 * 1024
    document = document_of(build_format_artifact({"g": {"w": ("U8", (8, 8))}}).objects["manifest.json"])
    document["groups"][0]["tensors"][0]["shape"] = [num_elements]
    part = document["parts"][0]
    part["segments"][0].update(count=num_elements, planes=[["raw", 0, num_elements]])
    part["size"] = document["blobs"][0]["size"] = num_elements
    assert "more than a part may" in str(refused(encoded(document)))


def test_a_part_of_too_many_bytes_is_refused() -> None:
    num_elements = 9 * 1024 * 1024
    document = document_of(build_format_artifact({"g": {"w": ("F64", (8,))}}).objects["manifest.json"])
    document["groups"][0]["tensors"][0]["shape"] = [num_elements]
    part = document["parts"][0]
    part["segments"][0].update(count=num_elements, planes=[["raw", 0, 8 * num_elements]])
    part["size"] = document["blobs"][0]["size"] = 8 * num_elements
    assert "1 segments in 75497472 bytes" in str(refused(encoded(document)))


# Not even JSON

NOT_A_MANIFEST: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "not valid JSON"),
    "a list": (b"[]", "not a JSON object"),
    "a number": (b"1", "not a JSON object"),
    "an empty object": (b"{}", "not the manifest of a Teneral artifact"),
    "another encoding": ("{}".encode("utf-16"), "not valid JSON"),
    "a byte order mark": (b"\xef\xbb\xbf" + encoded(SOUND), "not valid JSON"),
    "bytes that are no UTF-8": (b'{"format":"\xff"}', "not valid JSON"),
    "two documents": (encoded(SOUND) * 2, "not valid JSON"),
    "the first half": (encoded(SOUND)[:900], "not valid JSON"),
    "NaN": (b'{"format":NaN}', "NaN is not an integer"),
    "infinity": (b'{"format":-Infinity}', "-Infinity is not an integer"),
    "a fraction": (b'{"format":1.5}', "1.5 is not an integer"),
    "an exponent": (b'{"format":1e999}', "1e999 is not an integer"),
    "a number of 5,000 digits": (b'{"format":' + b"9" * 5000 + b"}", "not valid JSON"),
    "a key twice": (b'{"format":"teneral","format":"teneral"}', "stands twice"),
    "a key twice, deep down": (encoded(SOUND).replace(b'"dtype"', b'"name"', 1), "stands twice"),
    "100,000 levels": (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
    "100,000 levels of objects": (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deeply"),
    "too many values": (b"[" + b"0," * MAX_JSON_ITEMS + b"0]", "more than 5000000 items"),
    "too many bytes": (b" " * (MAX_MANIFEST_BYTES + 1), "more than 67108864"),
}


@pytest.mark.parametrize("what", NOT_A_MANIFEST)
def test_it_is_refused_when_it_is(what: str) -> None:
    data, message = NOT_A_MANIFEST[what]
    assert message in str(refused(data))


@pytest.mark.parametrize(
    "what", ["an unknown tier", "an unknown encoding", "an unknown codec", "an unknown dtype"]
)
def test_a_name_that_is_not_known_may_be_a_newer_versions(what: str) -> None:
    path, value, _ = CHANGES[what]
    error = refused(encoded(changed(path, value)))
    assert "A newer Teneral may have written it" in error.hint
    assert value in error.message or path.startswith("parts/0/segments")


# Three tiers


def test_three_tiers_are_sound_when_left_alone() -> None:
    parts = parse_manifest(encoded(THREE_TIERS)).parts
    assert [(part.tier, part.group) for part in parts] == [(tier, group) for tier in Tier for group in (0, 1)]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("parts/0/tier", "draft", "what comes next is the sketch tier of tensor 0"),
        ("parts/1/tier", "refine", "what comes next is the sketch tier of tensor 2"),
        ("parts/2/tier", "sketch", "what comes next is the draft tier of tensor 0"),
        ("parts/4/tier", "draft", "what comes next is the refine tier of tensor 0"),
        ("parts/5/tier", "outline", "'outline' is not one of sketch, draft, refine"),
        ("groups/0/tensors/0/encoding", "bf16.3", "what comes next is the sketch tier of tensor 1"),
        ("groups/0/tensors/0/encoding", "bf16.1.2", "cannot be a raw plane of 200"),
        ("groups/0/tensors/0/encoding", "bf16.2.3", "2 planes, not 3"),
        ("groups/0/tensors/0/encoding", "bf16.1.7", "1 planes, not 2"),
        ("groups/0/tensors/1/encoding", "whole", "what comes next is the sketch tier of tensor 2"),
        ("groups/1/tensors/0/encoding", "bf16.1.3", "is not for F32"),
    ],
)
def test_three_tiers_are_refused_with(path: str, value: Any, message: str) -> None:
    assert message in str(refused(encoded(changed(path, value, THREE_TIERS))))


@pytest.mark.parametrize("number", range(6))
def test_three_tiers_are_refused_without_one_of_their_parts(number: int) -> None:
    document = copy.deepcopy(THREE_TIERS)
    del document["parts"][number]
    refused(encoded(document))


def test_the_tiers_of_another_order_are_refused() -> None:
    document = copy.deepcopy(THREE_TIERS)
    document["parts"] = document["parts"][2:4] + document["parts"][:2] + document["parts"][4:]
    refused(encoded(document))
