"""Weights of which some tiers are there have the values that a load leaves at that moment."""

from __future__ import annotations

import numpy as np
import pytest
from tests.support.artifacts import BuiltArtifact, build_artifact
from tests.support.memory_store import MemoryStore

from teneral.loader.errors import IntegrityError
from teneral.loader.format.manifest import Part, Tier
from teneral.loader.tools.part_reader import PartReader
from teneral.runtime.quality.tiers import TieredWeights, usable_tiers

LAYOUT = [
    ("embed", {"words": ("BF16", (1000, 128)), "norm": ("F32", (128,))}),
    ("layers.0", {"up": ("BF16", (300, 257)), "bias": ("BF16", (33,)), "mask": ("I64", (3, 5))}),
]


@pytest.fixture(scope="module")
def built() -> BuiltArtifact:
    return build_artifact(LAYOUT)


def filled(built: BuiltArtifact, tier: Tier) -> TieredWeights:
    weights = TieredWeights(built.manifest)
    weights.fill(tier, PartReader(built.store, built.manifest), threads=2)
    return weights


def content(weights: TieredWeights, name: str) -> bytes:
    return weights.tensors().tensor(name).array.tobytes()


@pytest.mark.parametrize("tier", [Tier.DRAFT, Tier.REFINE])
def test_every_tensor_has_the_values_of_the_tier_that_is_there(built, tier):
    weights = filled(built, tier)
    for name in built.originals:
        assert content(weights, name) == built.expected(name, tier).tobytes(), name


def test_copied_values_are_refined_without_the_first_ones(built):
    draft, exact = filled(built, Tier.DRAFT), TieredWeights(built.manifest)
    reported: list[Part] = []

    exact.copy_(draft)
    exact.fill(Tier.REFINE, PartReader(built.store, built.manifest), on_part=reported.append)

    assert {part.tier for part in reported} == {Tier.REFINE}
    assert content(exact, "up") == built.expected("up", Tier.REFINE).tobytes()
    assert content(draft, "up") == built.expected("up", Tier.DRAFT).tobytes()


def test_tensors_that_were_taken_before_a_tier_came_get_its_values(built):
    weights = filled(built, Tier.DRAFT)
    array = weights.tensors().tensor("words").array
    before = array.copy()

    weights.fill(Tier.REFINE, PartReader(built.store, built.manifest))

    assert not np.array_equal(array, before)


def test_a_tier_is_usable_when_no_tensor_is_without_values(built):
    assert usable_tiers(built.manifest) == [Tier.DRAFT, Tier.REFINE]
    late = tuple(
        part._replace(tier=Tier.REFINE) if part.group == 1 else part for part in built.manifest.parts
    )
    assert usable_tiers(built.manifest._replace(parts=late)) == [Tier.REFINE]


def test_every_part_of_a_tier_is_reported_once(built):
    reported: list[Part] = []
    TieredWeights(built.manifest).fill(
        Tier.DRAFT, PartReader(built.store, built.manifest), on_part=reported.append
    )
    assert reported == [part for part in built.manifest.parts if part.tier is Tier.DRAFT]


def test_a_damaged_part_is_named(built):
    objects = {
        blob.name: bytearray(built.store.read(blob.name, max_bytes=blob.size_bytes)[0])
        for blob in built.manifest.blobs
    }
    part = next(part for part in built.manifest.parts if part.tier is Tier.DRAFT and part.group == 1)
    objects[built.manifest.blobs[part.blob].name][part.offset_bytes] ^= 1
    store = MemoryStore({name: bytes(data) for name, data in objects.items()})
    with pytest.raises(IntegrityError, match=r"layers\.0"):
        TieredWeights(built.manifest).fill(Tier.DRAFT, PartReader(store, built.manifest))
