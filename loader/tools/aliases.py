"""Tensors that a checkpoint stores twice: tied embeddings, written out under both of their names.

Only bytes decide: two tensors are one when dtype, shape and every byte agree. Knows no model architecture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ..format.checkpoint import Checkpoint, StoredTensor
from ..sources.base import Source

# A shape that many tensors share is that of a layer's weights, which are not tied: reading those would be in
# vain. Encoder-decoder models tie four: a shared embedding, the two stacks' own, and the head.
_MAX_SHARING = 4
_FIRST_PIECE_BYTES = 64 * 1024  # tensors that differ do so almost always at once
_PIECE_BYTES = 4 * 1024 * 1024


def find_aliases(source: Source, checkpoint: Checkpoint, order: Sequence[str]) -> dict[str, str]:
    """Name → the name, earlier in `order`, of the tensor that it equals.

    Reads tied tensors whole, 8 MiB at a time, and little of others. Raises the source's errors.
    """
    alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for name in order:
        entry = checkpoint.tensors[name].entry
        if len(entry.shape) == 2 and entry.size_bytes:
            alike.setdefault((entry.dtype, entry.shape), []).append(name)
    aliases: dict[str, str] = {}
    for names in alike.values():
        if len(names) > _MAX_SHARING:
            continue
        distinct: list[str] = []
        for name in names:
            twin = next((other for other in distinct if _are_equal(source, checkpoint, name, other)), None)
            if twin is None:
                distinct.append(name)
            else:
                aliases[name] = twin
    return aliases


def _are_equal(source: Source, checkpoint: Checkpoint, name: str, other: str) -> bool:
    one, two = checkpoint.tensors[name], checkpoint.tensors[other]
    for start, end in _pieces(one.entry.size_bytes):
        if _read(source, checkpoint, one, start, end) != _read(source, checkpoint, two, start, end):
            return False
    return True


def _pieces(size_bytes: int) -> Iterator[tuple[int, int]]:
    start, end = 0, min(size_bytes, _FIRST_PIECE_BYTES)
    while start < size_bytes:
        yield start, end
        start, end = end, min(size_bytes, end + _PIECE_BYTES)


def _read(source: Source, checkpoint: Checkpoint, stored: StoredTensor, start: int, end: int) -> bytearray:
    piece = bytearray(end - start)
    shard = checkpoint.shards[stored.shard]
    source.read_into(shard.name, stored.entry.begin + start, memoryview(piece), version=shard.version)
    return piece
