"""The content of tensors as they are to be packed: read from a checkpoint, quantised or pruned on
the way, or as differences to a base.

Of a fine-tune, some tensors are the base's and some differ a little. The base is read twice, in
forward order and in bounded memory: once to compare, and once while the differences are encoded.
This module does not know where the fine-tune comes from, nor encodings, parts or where the content
goes.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from ...artifact import open_artifact
from ...errors import UsageError
from ...format.checkpoint import Checkpoint
from ...format.codec import encode_differences, encode_segment
from ...format.encoding import Encoding
from ...format.layout import Stretch
from ...format.manifest import FRAME_ELEMENTS, Manifest, Tensor
from ...load.windows import SuccessiveLoad
from ...sources.base import Source, SourceOptions
from ...sources.open import model_address, open_source, split_pin
from .plan import Job, PackPlan
from .prune import Pruner
from .quantize_plan import QuantizingReader

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_SAMPLE_FRAMES = 8
_PIECE_ELEMENTS = 16 * FRAME_ELEMENTS  # compared at a time


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
        """Have waits for other stretches end with `LoadCancelledError`."""
        if self._quantizing is not None:
            self._quantizing.stop()


class Base:
    """An artifact, and its tensors by their own names."""

    def __init__(self, source: Source, *, digest: bytes | None = None) -> None:
        """Reads the manifest. Raises `UsageError` where it cannot be a base."""
        self.source = source
        self.manifest = open_artifact(source, digest=digest)
        if self.manifest.digest is None:
            raise UsageError(
                f"--base {source.url} is not packed: only an artifact can be a base",
                key="base",
                hint="Pack it first, and give the artifact.",
            )
        if self.manifest.base is not None:
            raise UsageError(
                f"--base {source.url} has a base itself",
                key="base",
                hint="Give that one, or pack this one whole.",
            )
        self._own = {tensor.name: tensor for tensor in self.manifest.tensors}

    @staticmethod
    def at(address: str, options: SourceOptions) -> Base:
        """The base at an address, which may be pinned. Raises as a `Base` does, and as sources do."""
        url, digest = split_pin(model_address(address))
        return Base(open_source(url, options), digest=digest)

    def find(self, tensor: Tensor) -> Tensor | None:
        """The base's tensor of that name, where it has the same dtype and shape."""
        found = self._own.get(tensor.name)
        if found is None or (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
            return None
        return found if found.num_elements else None


def plan_differences(plan: PackPlan, content: ContentReader, base: Base) -> PackPlan:
    """The plan with the encodings `same` and `delta` where they pay. Reads all of both models.

    Raises `UsageError` where nothing is in common.
    """
    groups = _groups_here(plan.manifest, base)
    chosen: dict[int, Encoding] = {}
    for found, values in _base_tensors(base, groups):
        tensor = groups[found.index]
        chosen[tensor.index] = _choose(tensor, content, values)
    if Encoding.SAME not in chosen.values() and Encoding.DELTA not in chosen.values():
        _refuse_other_dtype(plan.manifest, base)
        raise UsageError(
            f"{base.source.url} has no weights in common with the model",
            key="base",
            hint="Leave --base out: the model is no fine-tune of it.",
        )
    tensors = tuple(
        tensor._replace(encoding=chosen.get(tensor.index, tensor.encoding))
        for tensor in plan.manifest.tensors
    )
    jobs = tuple(
        tuple(stretch._replace(tensor=tensors[stretch.tensor.index]) for stretch in job) for job in plan.jobs
    )
    return PackPlan(plan.manifest._replace(tensors=tensors, base=base.manifest.digest), jobs)


def _refuse_other_dtype(manifest: Manifest, base: Base) -> None:
    """Raises `UsageError` where the base stores tensors of the same names and shapes in another dtype."""
    for tensor in manifest.tensors:
        own = base.manifest.by_name.get(tensor.name)
        if own is not None and own.shape == tensor.shape and own.dtype != tensor.dtype:
            raise UsageError(
                f"{tensor.name} is {tensor.dtype} here and {own.dtype} in the base "
                f"{base.source.url}: differences are between numbers of one dtype",
                key="base",
                hint="Convert the model to the base's dtype, or pack the base again from weights of the model's.",
            )


def _groups_here(manifest: Manifest, base: Base) -> dict[int, Tensor]:
    """The fine-tune's tensors that may have one of the base, by that one's number. Tensors of one
    group of the base are left out unless they belong to one group here.
    """
    found: dict[int, Tensor] = {}
    groups: dict[int, set[int]] = defaultdict(set)
    for tensor in manifest.tensors:
        if (own := base.find(tensor)) is not None:
            found[own.index] = tensor
            groups[own.group].add(tensor.group)
    return {
        number: tensor
        for number, tensor in found.items()
        if len(groups[base.manifest.tensors[number].group]) == 1
    }


def _base_tensors(base: Base, wanted: dict[int, Tensor]) -> Iterator[tuple[Tensor, Bytes]]:
    """The base's wanted tensors with their bytes, in forward order."""
    groups = sorted({base.manifest.tensors[number].group for number in wanted})
    with SuccessiveLoad(base.source, base.manifest, groups=groups) as load:
        for group, slab in load.slabs():
            for number in base.manifest.groups[group].tensors:
                tensor = base.manifest.tensors[number]
                if number in wanted:
                    yield tensor, slab[tensor.offset_bytes : tensor.offset_bytes + tensor.size_bytes]


def _choose(tensor: Tensor, content: ContentReader, base: Bytes) -> Encoding:
    """`same` where every byte is; else `delta` where a sample says that it is smaller."""
    width = tensor.element_bytes
    is_same = True
    for start in range(0, tensor.num_elements, _PIECE_ELEMENTS):
        count = min(_PIECE_ELEMENTS, tensor.num_elements - start)
        if not np.array_equal(
            read_elements(tensor, start, count, content), base[start * width : (start + count) * width]
        ):
            is_same = False
            break
    if is_same:
        return Encoding.SAME
    num_frames = -(-tensor.num_elements // FRAME_ELEMENTS)
    num = min(_SAMPLE_FRAMES, num_frames)
    delta_bytes = own_bytes = 0
    for index in range(num):
        start = index * num_frames // num * FRAME_ELEMENTS
        count = min(FRAME_ELEMENTS, tensor.num_elements - start)
        data = read_elements(tensor, start, count, content)
        delta = encode_differences(tensor.dtype, data, base[start * width : (start + count) * width])
        delta_bytes += _size_of(delta)
        own_bytes += _size_of(encode_segment(tensor.dtype, tensor.encoding, data))
    return Encoding.DELTA if delta_bytes < own_bytes else tensor.encoding


def _size_of(coded: dict[Any, list[Any]]) -> int:
    return sum(memoryview(content).nbytes for planes in coded.values() for _, content in planes)


def read_elements(tensor: Tensor, start: int, count: int, content: ContentReader) -> Bytes:
    data = np.empty(count * tensor.element_bytes, np.uint8)
    content.read(Stretch(tensor, start, count), data)
    return data


class BaseReader:
    """The base's values of the stretches of `jobs` that are differences. Thread-safe.

    Groups are read as the first stretch asks for them, in forward order, and dropped with their last
    one. Stretches must be begun in the jobs' order.
    """

    def __init__(self, base: Base, jobs: tuple[Job, ...]) -> None:
        self._base = base
        stretches = [stretch for job in jobs for stretch in job if stretch.tensor.encoding is Encoding.DELTA]
        self._left = Counter(self._tensor(stretch).group for stretch in stretches)
        self._load = SuccessiveLoad(base.source, base.manifest, groups=sorted(self._left))
        self._coming = self._load.slabs()
        self._slabs: dict[int, Bytes] = {}
        self._lock = threading.Lock()

    def read(self, stretch: Stretch) -> Bytes:
        """The stretch's bytes in the base, (size_bytes,), a view that stays as long as it is used.
        Blocks; raises the base's errors.
        """
        tensor = self._tensor(stretch)
        with self._lock:
            while tensor.group not in self._slabs:
                group, slab = next(self._coming)
                self._slabs[group] = slab
            slab = self._slabs[tensor.group]
            self._left[tensor.group] -= 1
            if not self._left[tensor.group]:
                del self._slabs[tensor.group]
        begin = tensor.offset_bytes + stretch.offset_bytes
        return slab[begin : begin + stretch.size_bytes]

    def close(self) -> None:
        """Stop reading; once all was read, nothing is on its way, and the base stays open. Idempotent."""
        if not any(self._left.values()):
            for _ in self._coming:
                pass
        self._load.close()

    def _tensor(self, stretch: Stretch) -> Tensor:
        found = self._base.find(stretch.tensor)
        assert found is not None
        return found
