"""Differences to a base: the arithmetic of the encoding `delta`, and one manifest made of a base's and its
fine-tune's.

`docs/format.md`, "Differences to a base", is the norm. The joined manifest has the fine-tune's tensors, and
the parts of both: those of the base, which write the base's values, and those of the fine-tune, of
which the segments with differences come after all of these. So one load reads both, and decodes
nothing twice. Where the base's values are in memory (`join_resident`), the parts are the fine-tune's
alone, and parts without bytes for the elements that are the base's. Pure: nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..errors import ManifestError
from .encoding import Encoding, Tier
from .manifest import Blob, Manifest, Part, Segment, Tensor

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[Any]  # unsigned integers, of an element's bytes each

# No object has a backslash in its name, so these are apart from the fine-tune's own.
BASE_PREFIX = "base\\"
# Of one part without bytes: 8 MB of bf16, copied at a time.
COPIED_ELEMENTS = 4 * 1024 * 1024


def difference(words: Words, base: Words) -> Words:
    """The zigzag differences of elements to those of the base, as new words."""
    word, top = words.dtype, 8 * words.itemsize - 1
    found = words - base
    sign = found >> word.type(top)
    found <<= word.type(1)
    found ^= word.type(0) - sign
    return found


def join(tuned: Manifest, base: Manifest) -> Manifest:
    """The manifest of the fine-tune's weights, whose parts are read from both artifacts: the base's
    blobs have `BASE_PREFIX` before their names.

    Tensors that are the base's, or differ from it, have the encodings of the base. Raises
    `ManifestError` where the base has not what the fine-tune needs.
    """
    tensors, numbers = _tensors(tuned, base)
    num_blobs = len(tuned.blobs)
    of_base = (_of_base(part, tensors, numbers, num_blobs) for part in base.parts)
    parts = [part for part in of_base if part is not None]
    parts += [_of_tuned(part, tuned) for part in tuned.parts]
    parts.sort(key=lambda part: (part.tier, part.has_delta, part.group))
    blobs = tuple(Blob(BASE_PREFIX + blob.name, blob.size_bytes) for blob in base.blobs)
    return tuned._replace(
        blobs=tuned.blobs + blobs,
        tensors=tuple(tensors),
        parts=tuple(part._replace(index=index) for index, part in enumerate(parts)),
    )


def join_resident(tuned: Manifest, base: Manifest) -> Manifest:
    """The manifest of the fine-tune's weights for a load that has the base's in memory: the parts are
    read from the fine-tune's artifact alone, and differences come before anything else has been written.

    Parts of size 0, whose segments have no planes, stand for elements that are the base's. Raises as
    `join` does.
    """
    tensors, _ = _tensors(tuned, base)
    parts = [_of_tuned(part, tuned) for part in tuned.parts] + list(_copied(tuned))
    return tuned._replace(
        tensors=tuple(tensors), parts=tuple(part._replace(index=index) for index, part in enumerate(parts))
    )


def _tensors(tuned: Manifest, base: Manifest) -> tuple[list[Tensor], dict[int, int]]:
    """The joined manifest's tensors, and their numbers by those in the base."""
    if base.base is not None:
        raise ManifestError(
            "the base has a base itself", where="base", hint="Pack the fine-tune against that one."
        )
    own = {tensor.name: tensor for tensor in base.tensors}
    tensors: list[Tensor] = []
    numbers: dict[int, int] = {}
    for tensor in tuned.tensors:
        if tensor.encoding in (Encoding.SAME, Encoding.DELTA):
            found = own.get(tensor.name)
            if found is None or (found.dtype, found.shape) != (tensor.dtype, tensor.shape):
                what = (
                    "has no such tensor" if found is None else f"has it as {found.dtype} {list(found.shape)}"
                )
                raise ManifestError(
                    f"tensor {tensor.name!r}: the base {what}", where=f"tensor {tensor.name!r}"
                )
            numbers[found.index] = tensor.index
            tensors.append(tensor._replace(encoding=found.encoding))
        else:
            tensors.append(tensor)
    return tensors, numbers


def _copied(tuned: Manifest) -> Iterator[Part]:
    """The parts without bytes, each of about `COPIED_ELEMENTS` of one group at most."""
    for group in tuned.groups:
        pieces: list[Segment] = []
        num_elements = 0
        for number in group.tensors:
            tensor = tuned.tensors[number]
            if tensor.encoding is not Encoding.SAME:
                continue
            for start in range(0, tensor.num_elements, COPIED_ELEMENTS):
                count = min(COPIED_ELEMENTS, tensor.num_elements - start)
                pieces.append(Segment(number, start, count, ()))
                num_elements += count
                if num_elements >= COPIED_ELEMENTS:
                    yield Part(0, Tier.REFINE, group.index, 0, 0, 0, None, tuple(pieces))
                    pieces, num_elements = [], 0
        if pieces:
            yield Part(0, Tier.REFINE, group.index, 0, 0, 0, None, tuple(pieces))


def _of_base(part: Part, tensors: list[Tensor], numbers: dict[int, int], num_blobs: int) -> Part | None:
    """The base's part with the segments that are used here; None where none is."""
    segments = tuple(
        segment._replace(tensor=numbers[segment.tensor])
        for segment in part.segments
        if segment.tensor in numbers
    )
    if not segments:
        return None
    groups = {tensors[segment.tensor].group for segment in segments}
    if len(groups) > 1:
        raise ManifestError(
            f"parts[{part.index}] of the base holds tensors that are in several groups here", where="base"
        )
    return part._replace(group=groups.pop(), blob=num_blobs + part.blob, segments=segments)


def _of_tuned(part: Part, tuned: Manifest) -> Part:
    segments = tuple(
        segment._replace(is_delta=tuned.tensors[segment.tensor].encoding is Encoding.DELTA)
        for segment in part.segments
    )
    return part._replace(segments=segments)
