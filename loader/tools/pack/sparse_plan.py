"""The tensors of a packing that are stored sparse: those where that saves 3 % over the dense encoding.

A few frames of each tensor are encoded both ways. Only a tensor that gains is looked at further: each
of its stretches must hold a value, or its later tiers would be empty. So what is dense costs reading
two frames of each tensor once more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from ...format.codec import MIN_PLANE_GAIN, encode_segment, num_values
from ...format.encoding import Encoding
from ...format.layout import Stretch
from ...format.manifest import FRAME_ELEMENTS, Tensor
from .content import ContentReader, read_elements
from .plan import PackPlan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

_FIRST_FRAMES, _MORE_FRAMES = 2, 8  # of a tensor, from all over it
_MIN_ZEROS = 0.05  # of the first frames; with fewer a mask costs more than it saves
_FRAMES_A_READ = 16  # when a value is looked for


def choose_sparse(plan: PackPlan, content: ContentReader, threads: int) -> PackPlan:
    """The plan with sparse encodings where they pay. Reads; raises the source's errors."""
    stretches: dict[int, list[Stretch]] = defaultdict(list)
    for job in plan.jobs:
        for stretch in job:
            stretches[stretch.tensor.index].append(stretch)

    def choose(tensor: Tensor) -> Tensor:
        sparse = tensor.encoding.sparse
        if sparse is None or not tensor.num_elements or content.is_quantized(tensor.name):
            return tensor
        if tensor.element_bytes != 1 and tensor.encoding is Encoding.BYTES:
            return tensor
        if not _gains(tensor, sparse, content):
            return tensor
        if not all(_has_value(stretch, sparse, content) for stretch in stretches[tensor.index]):
            return tensor
        return tensor._replace(encoding=sparse)

    with ThreadPoolExecutor(threads, thread_name_prefix="teneral-pack") as pool:
        tensors = tuple(pool.map(choose, plan.manifest.tensors))
    jobs = tuple(
        tuple(stretch._replace(tensor=tensors[stretch.tensor.index]) for stretch in job) for job in plan.jobs
    )
    return PackPlan(plan.manifest._replace(tensors=tensors), jobs)


def _gains(tensor: Tensor, sparse: Encoding, content: ContentReader) -> bool:
    few = _sample(tensor, _FIRST_FRAMES, content)
    num = num_values(sparse, few) or 0
    if num > (1 - _MIN_ZEROS) * few.size // tensor.element_bytes:
        return False
    sample = _sample(tensor, _MORE_FRAMES, content)
    return _coded_bytes(tensor, sparse, sample) <= (1 - MIN_PLANE_GAIN) * _coded_bytes(
        tensor, tensor.encoding, sample
    )


def _coded_bytes(tensor: Tensor, encoding: Encoding, sample: Bytes) -> int:
    coded = encode_segment(tensor.dtype, encoding, sample)
    return sum(memoryview(content).nbytes for planes in coded.values() for _, content in planes)


def _sample(tensor: Tensor, num: int, content: ContentReader) -> Bytes:
    """Up to `num` frames from all over the tensor, one behind another."""
    num_frames = -(-tensor.num_elements // FRAME_ELEMENTS)
    num = min(num, num_frames)
    pieces = []
    for index in range(num):
        start = index * num_frames // num * FRAME_ELEMENTS
        pieces.append(read_elements(tensor, start, min(FRAME_ELEMENTS, tensor.num_elements - start), content))
    return np.concatenate(pieces)


def _has_value(stretch: Stretch, sparse: Encoding, content: ContentReader) -> bool:
    return any(num_values(sparse, piece) for piece in _pieces(stretch, content))


def _pieces(stretch: Stretch, content: ContentReader) -> Iterator[Bytes]:
    end = stretch.start + stretch.count
    step = FRAME_ELEMENTS
    start = stretch.start
    while start < end:
        count = min(step, end - start)
        yield read_elements(stretch.tensor, start, count, content)
        start, step = start + count, _FRAMES_A_READ * FRAME_ELEMENTS
