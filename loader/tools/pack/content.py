"""The content of tensors as they are to be packed: read from a checkpoint, quantised or pruned on the way.

It does not know encodings, parts or where the content goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...format.checkpoint import Checkpoint
from ...format.layout import Stretch
from ...sources.base import Source
from .prune import Pruner
from .quantize_plan import QuantizingReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class ContentReader:
    """Thread-safe. Stretches may be asked for in any order, and more than once unless they are
    quantised.
    """

    def __init__(
        self,
        source: Source,
        checkpoint: Checkpoint,
        *,
        quantizing: QuantizingReader | None = None,
        pruner: Pruner | None = None,
    ) -> None:
        """`quantizing` has the content of tensors that the checkpoint does not have so."""
        self._source = source
        self._checkpoint = checkpoint
        self._quantizing = quantizing
        self._pruner = pruner

    def read(self, stretch: Stretch, data: Bytes) -> None:
        """Fill `data`, `stretch.size_bytes` long. Raises the source's errors."""
        if self.is_quantized(stretch.tensor.name):
            assert self._quantizing is not None
            self._quantizing.read(stretch, data)
            return
        stored = self._checkpoint.tensors[stretch.tensor.name]
        shard = self._checkpoint.shards[stored.shard]
        start = stored.entry.begin + stretch.offset_bytes
        self._source.read_into(shard.name, start, data.data, version=shard.version)
        if self._pruner is not None:
            self._pruner.prune(stretch, data)

    def is_quantized(self, name: str) -> bool:
        """True if it is made of the checkpoint's tensors, and can be read only once."""
        return self._quantizing is not None and name in self._quantizing

    def stop(self) -> None:
        """Make those who wait for other stretches end with `LoadCancelledError`."""
        if self._quantizing is not None:
            self._quantizing.stop()
