"""Checks that all weights are in memory, and are what was packed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...loader.errors import IntegrityError, UsageError

if TYPE_CHECKING:
    from ...loader.format.manifest import Manifest, Tensor
    from ...loader.load.base import AnyLoad
    from ..files import ModelFiles


def wait_exact(load: AnyLoad) -> None:
    """Block until all weights that stay in memory are exact, if they will be, and files whose digests
    their store states were compared with them; then log the names of files that nothing will use.
    Raises the load's error.
    """
    for group in range(len(load.manifest.groups)):
        if group not in load.paged_groups:
            load.wait(group)
    if load.place == "device":
        load.wait_done()
    load.wait_checks()
    _warn_of_files(load.manifest)


def check_whole(load: AnyLoad) -> None:
    """Raise `UsageError` if not all weights are in memory, which are to be compared with their digests."""
    if load.paged_groups:
        raise UsageError(
            "verify_exact compares all weights, but weights_bytes leaves some of them out",
            key="verify_exact",
            hint="Leave one of the two out. `teneral verify` reads the whole artifact.",
        )


def tensor_digests(files: ModelFiles, manifest: Manifest) -> tuple[bytes, ...]:
    """The digests of the original tensors. Raises `UsageError` if they are unknown."""
    from ...loader.format.tensor_digests import (
        FILE_NAME,
        parse_tensor_digests,
        # Verification is not urgent.
    )

    data = files.read(FILE_NAME)
    if data is None:
        raise UsageError(
            "the exact tensors' digests are unknown: this is not an artifact, or one of an older version",
            key="verify_exact",
            hint="Pack the model (again), or leave verify_exact out.",
        )
    return parse_tensor_digests(data, manifest)


def verify_exact(load: AnyLoad, expected: tuple[bytes, ...]) -> None:
    """Compare all tensors with their digests. Raises `IntegrityError`, naming the first wrong
    tensor.
    """
    from ...loader.format.tensor_digests import wrong_tensors

    def content(tensor: Tensor) -> memoryview:
        end_bytes = tensor.offset_bytes + tensor.size_bytes
        if load.place == "device":
            return load.read_back(tensor.group, tensor.offset_bytes, end_bytes)
        return load.slab(tensor.group)[tensor.offset_bytes : end_bytes].data

    wrong = wrong_tensors(load.manifest, expected, content)
    if wrong:
        raise IntegrityError(
            f"tensor {wrong[0].name!r} is in memory not what was packed; {len(wrong)} of {len(expected)} are not",
            where=wrong[0].name,
            hint="Each part was correct when it arrived, so this is a defect of Teneral or of the machine's memory.",
        )


def _warn_of_files(manifest: Manifest) -> None:
    """Log the names of an artifact's small files that nothing will use."""
    # Only needed when the load has ended.
    from ...loader.format.checkpoint_files import shorten, unknown_names

    if unknown := unknown_names(file.name for file in manifest.files):
        import logging

        message = "the model has small files that nothing uses, as their names are not known: %s"
        logging.getLogger(__name__).warning(message, shorten(unknown))


def warn_of_cache(load: AnyLoad) -> None:
    # Only needed with a cache.
    import logging

    statistics = load.statistics()
    if statistics is not None and statistics.cache is not None:
        for trouble in statistics.cache.troubles:
            logging.getLogger(__name__).warning("%s", trouble)
