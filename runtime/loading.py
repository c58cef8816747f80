"""What an instance asks of its load: one in its own threads, proof that it was exact, and what is to be told of it.

It does not know the instance, nor what the weights are for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..loader.device.detect import CPU, choose_device
from ..loader.errors import IntegrityError, UsageError
from .start import opener

if TYPE_CHECKING:
    from ..loader.device.base import DeviceStatistics
    from ..loader.format.manifest import Manifest, Tensor
    from ..loader.load.device_load import DeviceLoad
    from ..loader.load.load import WeightLoad
    from ..loader.sources.base import Source
    from ..loader.timeline import Timeline
    from .config import ServeConfig
    from .files import ModelFiles
    from .weights import AnyLoad


def load_here(
    source: Source, digest: bytes | None, config: ServeConfig, timeline: Timeline
) -> WeightLoad | DeviceLoad:
    """A load in this process's own threads, begun."""
    from ..loader.artifact import open_artifact  # these are the loader's process's business, as a rule

    with timeline.span("manifest", "open"):
        manifest = open_artifact(source, digest=digest)
    options, device = config.load_options, choose_device(config.device)
    if device != CPU:
        from ..loader.load.device_load import DeviceLoad  # as above

        open_device = opener(device, config.kernel_dir, timeline)
        return DeviceLoad.in_threads(source, manifest, open_device, options=options, timeline=timeline)
    from ..loader.load.load import WeightLoad  # as above

    load = WeightLoad(source, manifest, options=options, timeline=timeline)
    load.start()
    return load


def wait_exact(load: AnyLoad) -> None:
    """Block until all weights are exact, where they are to be. Raises the load's error."""
    from ..loader.load.device_load import DeviceLoad

    for group in range(len(load.manifest.groups)):
        load.wait(group)
    if isinstance(load, DeviceLoad):
        load.wait_done()


def tensor_digests(files: ModelFiles, manifest: Manifest) -> tuple[bytes, ...]:
    """Raises `UsageError` when nothing is known of the original."""
    from ..loader.format.tensor_digests import (
        FILE_NAME,
        parse_tensor_digests,
    )  # who verifies this is in no hurry

    data = files.read(FILE_NAME)
    if data is None:
        raise UsageError(
            "nothing says what the exact tensors' digests are: this is no artifact, or one of an older version",
            key="verify_exact",
            hint="Pack the model (again), or leave verify_exact out.",
        )
    return parse_tensor_digests(data, manifest)


def verify_exact(load: AnyLoad, expected: tuple[bytes, ...]) -> None:
    """Raises `IntegrityError` naming a tensor that is not what was packed."""
    from ..loader.format.tensor_digests import wrong_tensors
    from ..loader.load.device_load import DeviceLoad

    def content(tensor: Tensor) -> memoryview:
        end_bytes = tensor.offset_bytes + tensor.size_bytes
        if isinstance(load, DeviceLoad):
            return load.read_back(tensor.group, tensor.offset_bytes, end_bytes)
        return load.slab(tensor.group)[tensor.offset_bytes : end_bytes].data

    wrong = wrong_tensors(load.manifest, expected, content)
    if wrong:
        raise IntegrityError(
            f"tensor {wrong[0].name!r} is in memory not what was packed; {len(wrong)} of {len(expected)} are not",
            where=wrong[0].name,
            hint="Each part was right when it arrived, so this is a defect of Teneral or of the machine's memory.",
        )


def untaken_bytes(load: AnyLoad) -> int:
    """The weights' memory, but for what a standby process had taken from the system before the load."""
    from ..loader.load.process_load import ProcessLoad

    ahead_bytes = load.reserved_bytes if isinstance(load, ProcessLoad) else 0
    return load.manifest.weight_bytes - ahead_bytes


def placement_statistics(load: AnyLoad) -> DeviceStatistics | None:
    """What another device did and holds; None where there is none, or while it is being opened."""
    from ..loader.load.device_load import DeviceLoad  # who loads in another process has it not

    return load.device_statistics() if isinstance(load, DeviceLoad) else None


def warn_of_cache(load: AnyLoad) -> None:
    import logging  # only where there is a cache

    statistics = load.statistics()
    if statistics is not None and statistics.cache is not None:
        for trouble in statistics.cache.troubles:
            logging.getLogger(__name__).warning("%s", trouble)
