"""A base whose weights are in memory: the values that loads of its fine-tunes add differences to.

The load of a fine-tune then reads nothing but the fine-tune's artifact. Each decode thread adds
differences while it copies, a batch of a few frames at a time, into memory of the fine-tune's own: the
base's is never written, and may be computed with meanwhile. It does not know what is loaded, or why.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Self

import numpy as np

from ..errors import IntegrityError, UsageError
from ..format.delta import join_resident
from ..format.limits import MANIFEST_NAME
from ..format.manifest import Manifest, Segment, Tensor

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]


class ResidentBase:
    """Exact weights. Thread-safe: nothing here changes."""

    def __init__(self, manifest: Manifest, slabs: Sequence[Bytes]) -> None:
        """`slabs` are the memory of its groups, (slab_bytes,) each, which it keeps alive. Their content
        must have been verified, and must not change any more.
        """
        self.manifest = manifest
        self._slabs = tuple(slabs)
        self._own = {tensor.name: tensor for tensor in manifest.tensors}

    @classmethod
    def of(cls, manifest: Manifest, slab: Callable[[int], Bytes]) -> Self:
        """The weights of a load that is exact, whose `slab` gives the memory of a group."""
        return cls(manifest, [slab(group.index) for group in manifest.groups])

    def join(self, tuned: Manifest, url: str) -> Manifest:
        """The manifest with which a load of the fine-tune at `url` reads its differences alone.

        Raises `IntegrityError` where they are differences to another base, `UsageError` where it is no
        fine-tune, or the weights in memory are no artifact's, and `ManifestError` as `join_resident` does.
        """
        own = self.manifest.digest
        if own is None:
            raise UsageError(
                "the model in memory is plain safetensors, and only an artifact can be a base",
                key="model",
                hint="Pack it, and the fine-tune against it.",
            )
        if tuned.base is None:
            raise UsageError(
                f"{url} is whole: it holds no differences to the model in memory",
                key="model",
                hint="Pack it with --base, or start a server with it.",
            )
        if tuned.base != own:
            raise IntegrityError(
                f"the model in memory is not the base of {url}",
                where=MANIFEST_NAME,
                expected=tuned.base.hex(),
                got=own.hex(),
                hint="Switch a server of that base, or start one with the fine-tune and its --base.",
            )
        return join_resident(tuned, self.manifest)

    def values(self, tensor: Tensor, segment: Segment) -> Bytes:
        """The base's bytes of this segment of the fine-tune's tensor: a view."""
        own = self._own[tensor.name]
        begin = own.offset_bytes + segment.start * own.element_bytes
        return self._slabs[own.group][begin : begin + segment.count * own.element_bytes]

    def copy(self, tensor: Tensor, segment: Segment, out: memoryview) -> None:
        """Write the base's values of a segment into its own bytes in the slab. Without the GIL."""
        np.copyto(np.frombuffer(out, np.uint8), self.values(tensor, segment))
