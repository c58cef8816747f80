"""Pruning by magnitude: the matrices that lose their smallest weights, and how they do, as they are packed.

Either a share of each matrix, or two of each four neighbours in a row ("2:4"). Names, shapes and
groups decide which matrices; no data is needed but the weights. What is pruned becomes 0.0. Memory:
a piece of a matrix that is being read, and 256 KiB a matrix.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import UsageError
from ...format.checkpoint import Checkpoint
from ...format.codec import DEFAULT_DRAFT_BITS, MIN_SPLIT_ELEMENTS
from ...format.layout import EMBED, HEAD, Stretch, group_tensors
from ...format.manifest import DTYPE_BITS
from ...sources.base import Source

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[Any]

TWO_OF_FOUR = "2:4"
METADATA_KEY = "teneral.pruned"  # of the manifest: what was done, in words
_KEY_BITS = 15  # of a magnitude: all of 16-bit floats, of fp32 those that bf16 has, too
_PIECE_BYTES = 4 * 1024 * 1024
_SORTED_ELEMENTS = 1024 * 1024  # at a time: sorting takes 8 bytes for each
# Tables of rows, routers, and what decays states, which are small and must not fail, and experts' biases in one tensor.
_KEPT = re.compile(
    r"(?:^|\.)(?:router|shared_expert_gate|(?:mlp|block_sparse_moe|feed_forward)\.gate)\.|embed|rel_|"
    r"conv\.conv\.|conv1d\.|in_proj_(?:a|b|ba)\.|altup|bias$"
)


@dataclass(frozen=True, slots=True)
class PruneOptions:
    """The options of `pack --prune`. Raises `UsageError` for invalid ones."""

    share: float | None  # of each matrix; None: two of each four
    everything: bool = False  # embeddings and the head, too

    def __post_init__(self) -> None:
        if self.share is not None and not 0 < self.share < 1:
            raise UsageError(
                f"--prune {self.share}: a share between 0 and 1 of each matrix can be pruned",
                key="prune",
                hint="0.5 for half of the weights, or 2:4.",
            )

    @staticmethod
    def from_flags(text: str | None, everything: bool) -> PruneOptions | None:
        """From the values of `--prune`, like "0.5" or "2:4", and `--prune-all`. Raises `UsageError`."""
        if text is None:
            if everything:
                raise UsageError(
                    "--prune-all says where to prune", key="prune", hint="Add --prune 0.5 or 2:4."
                )
            return None
        if text == TWO_OF_FOUR:
            return PruneOptions(None, everything)
        try:
            return PruneOptions(float(text), everything)
        except ValueError:
            raise UsageError(
                f"--prune {text[:40]!r} is neither a share nor {TWO_OF_FOUR}",
                key="prune",
                hint="0.5 for half of the weights, or 2:4.",
            ) from None

    def describe(self, num_matrices: int) -> str:
        """Like "2:4 by magnitude, 210 matrices of layers"."""
        what = TWO_OF_FOUR if self.share is None else f"{self.share:g} of each"
        where = "" if self.everything else " of layers"
        return f"{what} by magnitude, {num_matrices} {'matrix' if num_matrices == 1 else 'matrices'}{where}"


def find_prunable(
    checkpoint: Checkpoint, aliases: Mapping[str, str], options: PruneOptions
) -> frozenset[str]:
    """The names of the matrices that are pruned: of floats, in layers unless all are wanted. A tied
    one counts by the name that is stored.

    Raises `UsageError` where there is none.
    """
    shapes = {name: stored.entry.shape for name, stored in checkpoint.tensors.items()}
    outside: set[str] = set()
    found: set[str] = set()
    for group, names in group_tensors(shapes):
        for name in names:
            entry = checkpoint.tensors[name].entry
            is_matrix = len(entry.shape) >= 2 and math.prod(entry.shape) >= MIN_SPLIT_ELEMENTS
            fits = options.share is not None or entry.shape[-1] % 4 == 0
            if is_matrix and fits and entry.dtype in DEFAULT_DRAFT_BITS:
                is_end = group in (EMBED, HEAD) or _KEPT.search(name)
                (outside if is_end else found).add(aliases.get(name, name))
    found = found | outside if options.everything else found - outside
    if not found:
        raise UsageError(
            "--prune: the model has no matrices of floats in its layers",
            key="prune",
            hint="Add --prune-all for embeddings and the head, or leave --prune out.",
        )
    return frozenset(found)


class Pruner:
    """Prunes stretches of the matrices `names` as they are read. Thread-safe."""

    def __init__(
        self, source: Source, checkpoint: Checkpoint, names: frozenset[str], options: PruneOptions
    ) -> None:
        self._source = source
        self._checkpoint = checkpoint
        self._share = options.share
        self._locks = {name: threading.Lock() for name in names}
        self._least: dict[str, int] = {}  # the key of the smallest magnitude that stays

    def prune(self, stretch: Stretch, data: Bytes) -> None:
        """Make some of a stretch's elements 0; nothing of a tensor that is not to be pruned.

        Reads the whole tensor at its first stretch. Raises the source's errors.
        """
        tensor = stretch.tensor
        if tensor.name not in self._locks:
            return
        words = data.view(f"<u{DTYPE_BITS[tensor.dtype] // 8}")
        if self._share is None:
            prune_two_of_four(words)
            return
        with self._locks[tensor.name]:  # one thread reads the tensor, and the others wait for it
            if tensor.name not in self._least:
                self._least[tensor.name] = self._find_least(tensor.name)
        words[magnitude_keys(words) < self._least[tensor.name]] = 0

    def _find_least(self, name: str) -> int:
        """The key of the smallest magnitude that stays: the one with which the share comes nearest
        to the one wanted.
        """
        assert self._share is not None
        stored = self._checkpoint.tensors[name]
        shard, entry = self._checkpoint.shards[stored.shard], stored.entry
        counts = np.zeros(1 << _KEY_BITS, np.int64)
        piece = np.empty(min(entry.size_bytes, _PIECE_BYTES), np.uint8)
        for start in range(0, entry.size_bytes, _PIECE_BYTES):
            part = piece[: entry.size_bytes - start]
            self._source.read_into(shard.name, entry.begin + start, part.data, version=shard.version)
            keys = magnitude_keys(part.view(f"<u{DTYPE_BITS[entry.dtype] // 8}"))
            counts += np.bincount(keys, minlength=counts.size)
        pruned = np.concatenate([[0], np.cumsum(counts)])  # of each key: elements below it
        return int(np.abs(pruned - self._share * pruned[-1]).argmin())


def magnitude_keys(words: Words) -> NDArray[np.uint16]:
    """Of each float a number that grows with its magnitude; NaN's is the largest."""
    down = 8 * words.itemsize - 1 - _KEY_BITS
    keys = words >> words.dtype.type(down) if down else words
    found: NDArray[np.uint16] = (keys & words.dtype.type((1 << _KEY_BITS) - 1)).astype(np.uint16, copy=False)
    return found


def prune_two_of_four(words: Words) -> None:
    """Make the two smallest of each four neighbours 0, of equal ones the first. Rows must be
    multiples of four.
    """
    sign = words.dtype.type(1 << 8 * words.itemsize - 1)
    for start in range(0, words.size, _SORTED_ELEMENTS):
        fours = words[start : start + _SORTED_ELEMENTS].reshape(-1, 4)
        # The last bits of a magnitude may count: all of fp32 are compared.
        order = np.argsort(fours & ~sign, axis=1, kind="stable")[:, :2]
        np.put_along_axis(fours, order, words.dtype.type(0), axis=1)
