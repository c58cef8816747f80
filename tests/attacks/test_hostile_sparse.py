"""Sparse tensors that lie about their values: in the manifest, in masks and signs, between the tiers."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.loader.test_sparse import Stored, decode, parts_of, stored, zeroed
from tests.support.format_artifacts import build_format_artifact
from tests.support.manifest_documents import document_of
from tests.support.native import decoded_by, each_isa

from teneral.loader.errors import IntegrityError, ManifestError
from teneral.loader.format.manifest import FRAME_ELEMENTS, Codec, Plane, Tier
from teneral.loader.format.manifest_json import parse_manifest

SOUND: dict[str, Any] = document_of(
    build_format_artifact(
        {"embed": {"a": ("BF16", (2, FRAME_ELEMENTS + 5)), "b": ("BF16", (40, 40)), "c": ("I8", (40, 40))}},
        encodings={"a": "bf16.sparse.3", "c": "bytes.sparse"},
        part_elements=FRAME_ELEMENTS,
    ).objects["manifest.json"]
)
A_DRAFT, A_REFINE = 0, 3  # parts


def test_the_manifest_of_these_tests_is_sound_when_left_alone() -> None:
    manifest = parse_manifest(json.dumps(SOUND).encode())
    assert [part.tier for part in manifest.parts].index(Tier.REFINE) == A_REFINE
    assert all(
        (segment.values is not None) == manifest.tensors[segment.tensor].encoding.is_sparse
        for part in manifest.parts
        for segment in part.segments
    )


def segment_of(document: dict[str, Any], part: int) -> dict[str, Any]:
    found: dict[str, Any] = document["parts"][part]["segments"][0]
    return found


def with_values(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda document: segment_of(document, A_DRAFT).__setitem__("values", value)


def dense_with_values(document: dict[str, Any]) -> None:
    (segment,) = (s for part in document["parts"][:A_REFINE] for s in part["segments"] if s["tensor"] == 1)
    segment["values"] = 3


def other_sum(document: dict[str, Any]) -> None:
    """One value less in the refine tier, which a raw plane of nibbles does not show where it is even."""
    segment = segment_of(document, A_REFINE)
    assert segment["planes"][0][0] == "raw"
    segment["values"] += 1 if segment["values"] % 2 else -1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_values(0), "has 0 values"),
        (with_values(FRAME_ELEMENTS + 1), "has 65537 values"),
        (with_values(2**53), "not an integer from 0"),
        (with_values(-1), "not an integer from 0"),
        (with_values(1.0), "not an integer"),
        (with_values(True), "not an integer from 0"),
        (with_values("5"), "not an integer from 0"),
        (with_values(""), "not an integer from 0"),
        (with_values(None), "not an integer from 0"),
        (with_values([]), "not an integer from 0"),
        (with_values(5), "cannot be a"),
        (lambda document: segment_of(document, A_DRAFT).pop("values"), "lacks 'values'"),
        (lambda document: segment_of(document, A_REFINE).pop("values"), "lacks 'values'"),
        (dense_with_values, "not sparse, has 'values'"),
        (other_sum, "its refine tier has"),
        (lambda document: segment_of(document, A_DRAFT)["planes"].pop(0), "3 planes, not 4"),
        (lambda document: segment_of(document, A_DRAFT)["planes"][0].__setitem__(2, 10**9), "cannot be a"),
        (
            lambda document: document["groups"][0]["tensors"][0].update(encoding="bytes.sparse"),
            "is not for BF16",
        ),
        (
            lambda document: document["groups"][0]["tensors"][0].update(encoding="f16.sparse.3"),
            "is not for BF16",
        ),
        (lambda document: document["groups"][0]["tensors"][0].update(encoding="bf16.3"), "has 'values'"),
    ],
)
def test_a_manifest_is_refused_that_lies_about_values(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    document = copy.deepcopy(SOUND)
    change(document)
    with pytest.raises(ManifestError, match=message) as caught:
        parse_manifest(json.dumps(document).encode())
    assert caught.value.where


@each_isa
@settings(max_examples=60, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 1 << 20), st.integers(0, 255)), min_size=1, max_size=4),
    num=st.integers(1, 1400),
    tier=st.sampled_from([Tier.DRAFT, Tier.REFINE]),
)
def test_changed_bytes_and_counts_are_refused_or_write_nothing_outside(
    isa: str, changes: list[tuple[int, int]], num: int, tier: Tier
) -> None:
    _, encoding, _ = parts_of("bf16.sparse.3")
    rng = np.random.default_rng(1)
    words = rng.integers(0, 1 << 16, 1003).astype("<u2")
    parts, declared = stored("BF16", encoding, zeroed(words.view(np.uint8), 2, 0.5, 1, negative=True))
    content, planes = parts[tier]
    damaged = bytearray(content)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    memory = np.full(64 + 2006 + 64, 0x5A, np.uint8)
    with decoded_by(isa):
        for claimed in (declared, min(num, 1003)):
            with contextlib.suppress(IntegrityError):
                decode(
                    "BF16", encoding, {tier: (bytes(damaged), planes)}, claimed, tier, memory[64:-64], 1003
                )
    assert (memory[:64] == 0x5A).all()
    assert (memory[-64:] == 0x5A).all()


# A part by hand, with one thing wrong.


def hostile(change: str) -> tuple[Stored, int, np.ndarray]:
    """Raw planes of 1,003 elements, of which 500 are values, with one thing wrong."""
    data = np.zeros(1003, "<u2")
    data[:500] = 0x3F80
    mask, signs = np.packbits(data != 0, bitorder="little"), np.zeros(63, np.uint8)
    if change == "a value too many in the mask":
        mask[80] = 1
    elif change == "a value too few in the mask":
        mask[0] ^= 1
    elif change == "all bits in the mask":
        mask[:] = 255
        mask[-1] = 0b111
    elif change == "no bits in the mask":
        mask[:] = 0
        signs[:] = 255
        signs[-1] = 0b1111111
    elif change == "bits behind the mask":
        mask[-1] |= 0b1000
    elif change == "bits behind the signs":
        signs[-1] |= 0x80
    draft = [mask, signs, np.full(500, 127, np.uint8), np.zeros(250, np.uint8)]
    parts: Stored = {}
    for tier, arrays in ((Tier.DRAFT, draft), (Tier.REFINE, [np.zeros(250, np.uint8)])):
        part, planes = bytearray(), []
        for array in arrays:
            part += bytes(-len(part) % 8)
            planes.append(Plane(Codec.RAW, len(part), array.size))
            part += array.tobytes()
        parts[tier] = bytes(part), tuple(planes)
    return parts, 500, data


@each_isa
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("a value too many in the mask", "the mask has another number of values than 500"),
        ("a value too few in the mask", "the mask has another number of values than 500"),
        ("all bits in the mask", "the mask has another number of values than 500"),
        ("no bits in the mask", "the mask has another number of values than 500"),
        ("bits behind the mask", "the unused bits behind the last of its mask"),
        ("bits behind the signs", "the unused bits behind the last of its signs"),
    ],
)
def test_masks_and_signs_that_lie_are_refused(isa: str, change: str, message: str) -> None:
    _, encoding, _ = parts_of("bf16.sparse.3")
    parts, num, _ = hostile(change)
    memory = np.full(64 + 2006 + 64, 0x5A, np.uint8)
    with decoded_by(isa), pytest.raises(IntegrityError, match=message):
        decode("BF16", encoding, parts, num, Tier.DRAFT, memory[64:-64], 1003)
    assert (memory[:64] == 0x5A).all()
    assert (memory[-64:] == 0x5A).all()


@each_isa
def test_a_later_tier_over_another_number_of_values_is_refused(isa: str) -> None:
    _, encoding, _ = parts_of("bf16.sparse.3")
    parts, num, data = hostile("nothing")
    for number in (499, 501):
        there = np.zeros(1003, "<u2")
        there[:number] = 0x3F88
        with decoded_by(isa), pytest.raises(IntegrityError, match="the tiers before have another number"):
            decode("BF16", encoding, parts, num, Tier.REFINE, there.view(np.uint8), 1003)
    out = np.zeros(2006, np.uint8)
    with decoded_by(isa):
        for tier in (Tier.DRAFT, Tier.REFINE):
            decode("BF16", encoding, parts, num, tier, out, 1003)
    assert np.array_equal(out.view("<u2"), data)


@each_isa
@pytest.mark.parametrize("place", [0, 250, 499])
def test_a_value_that_becomes_a_zero_is_refused(isa: str, place: int) -> None:
    _, encoding, _ = parts_of("bf16.sparse.3")
    parts, num, _ = hostile("nothing")
    content, planes = parts[Tier.DRAFT]
    damaged = bytearray(content)
    damaged[planes[2].offset_bytes + place] = 0  # the exponent; sign and mantissa are 0
    out = np.zeros(2006, np.uint8)
    with decoded_by(isa):
        decode("BF16", encoding, {Tier.DRAFT: (bytes(damaged), planes)}, num, Tier.DRAFT, out, 1003)
        with pytest.raises(IntegrityError, match="a value is a zero"):
            decode("BF16", encoding, parts, num, Tier.REFINE, out, 1003)
