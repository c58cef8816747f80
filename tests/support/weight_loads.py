"""Loads of small layouts, and checks of the content of their slabs."""

from __future__ import annotations

import numpy as np
from tests.support.artifacts import BuiltArtifact

from teneral.loader.format.manifest import Tier
from teneral.loader.load.load import WeightLoad

LAYERS = [
    ("embed", {"embed": ("BF16", (300, 64))}),
    ("layers.0", {"a": ("BF16", (200, 64)), "norm": ("F32", (64,)), "b": ("BF16", (96, 128))}),
    ("layers.1", {"c": ("BF16", (200, 64)), "d": ("F16", (100, 64))}),
    ("head", {"norm_f": ("BF16", (64,))}),
]


def poisoned(load: WeightLoad) -> WeightLoad:
    """Fill the slabs with ones, so that what is not written shows."""
    for group in load.manifest.groups:
        load.slab(group.index)[:] = 0xFF
    return load


def assert_group_holds(load: WeightLoad, built: BuiltArtifact, group: int, tier: Tier) -> None:
    for index in built.manifest.groups[group].tensors:
        tensor = built.manifest.tensors[index]
        held = load.slab(group)[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]
        assert np.array_equal(held, built.expected(tensor.name, tier)), (
            f"{tensor.name} is not its {tier.name} value"
        )
