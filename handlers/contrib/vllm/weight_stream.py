"""A stream of a model's weights for vLLM: pairs of a checkpoint's name and a tensor, as they
arrive.

This module does not know vLLM. The memory of a tensor is reused once it has no references: a
consumer copies the ones to keep, as vLLM does into its parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

import torch

from ....loader.load.windows import SuccessiveLoad, SuccessiveStatistics
from ....loader.sources.base import SourceOptions
from ....loader.timeline import Timeline
from ....loader.tools.progress_bar import format_bytes
from ....runtime.into.files import open_weights
from ....runtime.into.slots import names_of, tensors_in
from .settings import LoaderSettings
from .share import Peers, assign_groups, shared_slabs


class WeightStream:
    """The weights at `address`, each tensor once under each of its names, groups in forward order.
    For one thread.
    """

    def __init__(
        self,
        address: str,
        settings: LoaderSettings | None = None,
        *,
        peers: Peers | None = None,
        source_options: SourceOptions | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """Nothing is read yet. With `peers`, all of them must iterate over the same address, at the
        same time.
        """
        self._address = address
        self._settings = settings or LoaderSettings()
        self._peers = peers if peers is not None and peers.size > 1 else None
        self._source_options = source_options
        self._timeline = timeline
        self.digest: bytes | None = None  # of the manifest; None: plain safetensors, or not read yet
        self.url = ""  # for people
        self.statistics: SuccessiveStatistics | None = None  # once everything was read

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights.

        Raises `InsufficientMemoryError`, `ModelError` for a dtype that torch lacks, the errors of
        the format and of the source, and `LoadError` if another worker's read failed.
        """
        source, manifest = open_weights(self._address, self._source_options, self._settings.base)
        self.digest, self.url = manifest.digest, source.url
        names, peers = names_of(manifest), self._peers
        readers = assign_groups(manifest, 1 if peers is None else peers.size)
        rank = 0 if peers is None else peers.rank
        load = SuccessiveLoad(
            source,
            manifest,
            groups=[group for group, reader in enumerate(readers) if reader == rank],
            window_bytes=self._settings.memory_bytes // 2,
            options=self._settings.load_options,
            timeline=self._timeline,
        )
        with closing(source), load:
            for group, slab in (
                _own_slabs(load) if peers is None else shared_slabs(load, manifest, readers, peers)
            ):
                yield from tensors_in(manifest, group, slab, names)
            self.statistics = load.statistics()

    def summary(self) -> str:
        """A line for logs, once everything was read."""
        done = self.statistics
        if done is None:
            return f"the weights at {self.url or self._address} were not read to their end"
        rate = done.stored_bytes / done.elapsed_s if done.elapsed_s > 0 else 0.0
        parts = [
            f"read {format_bytes(done.stored_bytes)} from {self.url} in {done.elapsed_s:.1f} s "
            f"({format_bytes(rate)}/s), {format_bytes(done.weight_bytes)} of weights"
        ]
        if done.cached_bytes:
            parts.append(f"{format_bytes(done.cached_bytes)} of it from this node's cache")
        if self._peers is not None:
            parts.append(f"this worker's share of {self._peers.size}")
        if self.digest is not None:
            parts.append(f"all of it verified by b3:{self.digest.hex()[:12]}…")
        else:
            parts.append("NOT verified: plain safetensors carry no digests; `teneral pack` the model")
        return "; ".join(parts)


def _own_slabs(load: SuccessiveLoad) -> Iterator[tuple[int, torch.Tensor]]:
    for group, array in load.slabs():
        yield group, torch.from_numpy(array)
