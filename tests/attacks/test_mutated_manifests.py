"""Manifests with anything changed: each is refused, or still sound."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.manifest_documents import SOUND, THREE_TIERS, Document, encoded, refused

from teneral.loader.errors import ManifestError
from teneral.loader.format.manifest import Manifest, Tier, decoded_plane_bytes
from teneral.loader.format.manifest_json import parse_manifest

JSON_VALUES = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-5, 70_000),
        st.sampled_from([2**31, 2**48, 2**53, 2**64]),
        st.floats(),
        st.text(max_size=5),
        st.sampled_from(
            [
                "raw",
                "zstd",
                "whole",
                "bytes",
                "bf16.3",
                "bf16.1.3",
                "BF16",
                "F32",
                "U8",
                "refine",
                "draft",
                "sketch",
            ]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


def assert_sound(manifest: Manifest) -> None:
    """By brute force, and not as the checks do it: everything is there once and lies within what holds it."""
    for tier in Tier:
        for tensor in manifest.tensors:
            covered = sorted(
                (segment.start, segment.start + segment.count)
                for part in manifest.parts
                for segment in part.segments
                if part.tier is tier and segment.tensor == tensor.index
            )
            wanted = tensor.num_elements if tier in tensor.encoding.tiers else 0
            assert [start for start, _ in covered] == [0, *(end for _, end in covered)][: len(covered)]
            assert (covered[-1][1] if covered else 0) == wanted
    for part in manifest.parts:
        for segment in part.segments:
            tensor = manifest.tensors[segment.tensor]
            assert tensor.group == part.group
            assert len(segment.planes) == len(
                decoded_plane_bytes(tensor.encoding, part.tier, tensor.element_bytes, 1, 1)
            )
        assert_apart(
            [(plane.offset_bytes, plane.size_bytes) for s in part.segments for plane in s.planes],
            part.size_bytes,
        )
    for index, blob in enumerate(manifest.blobs):
        inside = [(part.offset_bytes, part.size_bytes) for part in manifest.parts if part.blob == index]
        assert_apart(inside, blob.size_bytes)


def assert_apart(stretches: list[tuple[int, int]], size_bytes: int) -> None:
    ordered = sorted(stretches)
    ends = [0, *(offset + length for offset, length in ordered)]
    assert all(offset >= end for (offset, _), end in zip(ordered, ends, strict=False))
    assert ends[-1] <= size_bytes


def try_parse(data: bytes) -> None:
    try:
        manifest = parse_manifest(data)
    except ManifestError as error:
        place = error.where
    else:
        assert_sound(manifest)
        return
    assert place


@st.composite
def mutated_documents(draw: st.DrawFn) -> Document:
    """A sound manifest with one to three places replaced, removed, doubled or swapped."""
    document = copy.deepcopy(draw(st.sampled_from([SOUND, THREE_TIERS])))
    for _ in range(draw(st.integers(1, 3))):
        target: Any = document
        while True:
            keys = list(range(len(target))) if isinstance(target, list) else sorted(target)
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            inner = target[key]
            if isinstance(inner, list | dict) and inner and draw(st.integers(0, 5)):
                target = inner
                continue
            action = draw(st.sampled_from(["replace", "nudge", "remove", "double", "swap"]))
            if action == "nudge" and type(inner) is int:
                target[key] = inner + draw(st.sampled_from([-65_536, -8, -1, 1, 8, 65_536]))
            elif action == "remove":
                del target[key]
            elif action == "double" and isinstance(target, list):
                target.insert(key, copy.deepcopy(inner))
            elif action == "swap":
                other = draw(st.sampled_from(keys))
                target[key], target[other] = target[other], target[key]
            else:
                target[key] = draw(JSON_VALUES)
            break
    return document


@given(document=mutated_documents())
@settings(max_examples=300, deadline=None)
def test_a_mutated_manifest_is_refused_or_still_sound(document: Document) -> None:
    try_parse(encoded(document))


@given(
    changes=st.lists(
        st.tuples(
            st.integers(0, 100_000), st.sampled_from([b"", b"0", b"9", b'"', b",", b"]", b"\xff", b"-"])
        ),
        min_size=1,
        max_size=3,
    )
)
@settings(max_examples=300, deadline=None)
def test_a_manifest_with_changed_bytes_is_refused_or_still_sound(changes: list[tuple[int, bytes]]) -> None:
    data = encoded(SOUND)
    for place, replacement in changes:
        at = place % len(data)
        data = data[:at] + replacement + data[at + 1 :]
    try_parse(data)


@given(noise=st.binary(max_size=100))
def test_noise_is_refused(noise: bytes) -> None:
    refused(noise)
