"""Loads of small layouts, and checks of the content of their slabs."""

from __future__ import annotations

import numpy as np
from tests.support.artifacts import BuiltArtifact

from teneral.loader.format.manifest import Manifest, Tier
from teneral.loader.load.launch import Task, launch
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.load.process_load import ProcessLoad
from teneral.loader.load.targets.mapped import MappedFiles, MappedTarget
from teneral.loader.load.targets.shared import NothingToRead, SharedBase, SharedTarget
from teneral.loader.sources.base import Mappable, SourceOptions
from teneral.loader.timeline import Timeline

LAYERS = [
    ("embed", {"embed": ("BF16", (300, 64))}),
    ("layers.0", {"a": ("BF16", (200, 64)), "norm": ("F32", (64,)), "b": ("BF16", (96, 128))}),
    ("layers.1", {"c": ("BF16", (200, 64)), "d": ("F16", (100, 64))}),
    ("head", {"norm_f": ("BF16", (64,))}),
]


def start_process_load(
    url: str,
    *,
    source_options: SourceOptions | None = None,
    options: LoadOptions | None = None,
    timeline: Timeline | None = None,
) -> ProcessLoad:
    """A load of the model at `url`, in a process of its own. Returns at once."""
    timeline = timeline or Timeline()
    task = Task(url, None, source_options or SourceOptions(), options or LoadOptions(), timeline.started_at)
    return ProcessLoad(launch(task), timeline=timeline)


def mapped_load(source: Mappable, manifest: Manifest, *, options: LoadOptions | None = None) -> WeightLoad:
    """A load of plain files where they lie."""
    files = MappedFiles(source)
    return WeightLoad(files, manifest, target=MappedTarget(manifest, files), options=options)


def shared_load(base: SharedBase, manifest: Manifest) -> WeightLoad:
    """The load of weights that a memory file holds."""
    return WeightLoad(NothingToRead(base.address), manifest, target=SharedTarget(base, manifest))


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
