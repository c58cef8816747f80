"""A stream of a model's weights for vLLM: pairs of a checkpoint's name and a tensor, as they
arrive.

The memory of a tensor is reused once it has no references: a consumer copies the ones to keep, as
vLLM does into its parameters. The workers of one tensor-parallel group read a model's weights once:
each group of layers is read, verified and decoded by one worker, which sends it to the others. All
take part in all exchanges, in forward order. Invariant: sent weights were verified by their reader;
an error of one worker is raised by all. This module does not know vLLM.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

import torch
import torch.distributed as dist

from ....loader.errors import LoadError
from ....loader.format.manifest import Manifest
from ....loader.load.windows import SuccessiveLoad, SuccessiveStatistics
from ....loader.tools.progress_bar import format_bytes
from ....runtime.into.files import open_weights
from ....runtime.into.slots import names_of, tensors_in
from .settings import LoaderSettings

_MAX_MESSAGE_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Peers:
    """A process group of vLLM: one for messages between CPUs, one for tensors on `device`."""

    rank: int  # in the group
    # Of all workers, numbered as by torch.distributed.
    ranks: tuple[int, ...]
    cpu_group: dist.ProcessGroup
    device_group: dist.ProcessGroup
    device: torch.device

    @property
    def size(self) -> int:
        return len(self.ranks)


def assign_groups(manifest: Manifest, num_workers: int) -> tuple[int, ...]:
    """The reader of each group: always the worker with the fewest bytes so far, so that neighbours
    have different readers.

    Depends only on the manifest, so all workers compute the same result.
    """
    stored_bytes = [0] * len(manifest.groups)
    for part in manifest.parts:
        stored_bytes[part.group] += part.size_bytes
    taken_bytes = [0] * num_workers
    readers: list[int] = []
    for size_bytes in stored_bytes:
        reader = min(range(num_workers), key=lambda worker: taken_bytes[worker])
        taken_bytes[reader] += size_bytes
        readers.append(reader)
    return tuple(readers)


def shared_slabs(
    load: SuccessiveLoad, manifest: Manifest, readers: Sequence[int], peers: Peers
) -> Iterator[tuple[int, torch.Tensor]]:
    """Each group's number and memory, (slab_bytes,) uint8 on the peers' device, in forward order,
    for every worker.

    `load` reads this worker's groups. Raises its errors, and `LoadError` for another worker's.
    """
    own = _Own(load, peers.device)
    for group, reader in enumerate(readers):
        slab = own.take(group) if reader == peers.rank else None
        message = _tell(peers, reader, own.trouble)
        if reader == peers.rank and own.failure is not None:
            raise own.failure
        if message:
            name = manifest.groups[group].name
            raise LoadError(f"worker {reader}, which reads {name} for all, could not load it: {message}")
        if slab is None:
            slab = torch.empty(manifest.groups[group].slab_bytes, dtype=torch.uint8, device=peers.device)
        if slab.numel():
            dist.broadcast(slab, src=peers.ranks[reader], group=peers.device_group)
        yield group, slab
    own.finish()


class _Own:
    """This worker's reads. An error is kept until this worker's turn to send, when all others
    receive.
    """

    def __init__(self, load: SuccessiveLoad, device: torch.device) -> None:
        self._slabs = load.slabs()
        self._device = device
        self.failure: Exception | None = None
        try:
            # Now, not at this worker's turn.
            load.start()
        except Exception as error:  # noqa: BLE001 - otherwise the others would wait forever
            self.failure = error

    @property
    def trouble(self) -> str:
        return "" if self.failure is None else f"{self.failure}" or type(self.failure).__name__

    def take(self, group: int) -> torch.Tensor | None:
        """The group's memory. Blocks until it is loaded; None after an error."""
        if self.failure is not None:
            return None
        try:
            number, array = next(self._slabs)
            assert number == group
            return torch.from_numpy(array).to(self._device)
        except Exception as error:  # noqa: BLE001 - as above
            self.failure = error
            return None

    def finish(self) -> None:
        """Count the last read, too."""
        next(self._slabs, None)


def _tell(peers: Peers, reader: int, message: str) -> str:
    """Broadcast the reader's message: '' if it has the group."""
    data = message.encode()[:_MAX_MESSAGE_BYTES]
    # vLLM loads with the GPU as torch's default device, but this group communicates between CPUs.
    size = torch.tensor([len(data)], dtype=torch.int64, device="cpu")
    source = peers.ranks[reader]
    dist.broadcast(size, src=source, group=peers.cpu_group)
    if size.item() == 0:
        return ""
    text = torch.zeros(int(size.item()), dtype=torch.uint8, device="cpu")
    if peers.rank == reader:
        text.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(text, src=source, group=peers.cpu_group)
    return bytes(text.tolist()).decode(errors="replace")


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
    ) -> None:
        """Nothing is read yet. With `peers`, all of them must iterate over the same address, at the
        same time.
        """
        self._address = address
        self._settings = settings or LoaderSettings()
        self._peers = peers if peers is not None and peers.size > 1 else None
        self.digest: bytes | None = None  # of the manifest; None: plain safetensors, or not read yet
        self.url = ""  # for people
        self.statistics: SuccessiveStatistics | None = None  # once everything was read

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields the weights.

        Raises `InsufficientMemoryError`, `ModelError` for a dtype that torch lacks, the errors of
        the format and of the source, and `LoadError` if another worker's read failed.
        """
        source, manifest = open_weights(self._address, base=self._settings.base)
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
