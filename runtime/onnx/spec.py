"""The description of a packed ONNX model: `onnx.json` among an artifact's files, in the order of a forward pass.

A *segment* is a stretch of the graph's nodes. It has a skeleton, a small ONNX file whose large initialisers are
external, and these are tensors of the artifact, under their own names. Segment n needs the weights of the groups up to
its own. `whole.onnx` has all nodes. What is read here is distrusted: sizes and names are bounded, and a segment can
use only what comes before it. Imports neither onnx nor ONNX Runtime.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ...loader.errors import CheckpointError
from ...loader.format.manifest import Manifest
from ..files import ONNX_NAME

FILE_NAME = ONNX_NAME
WHOLE_NAME = "whole.onnx"
PLACEHOLDER_NAME = "weights"  # the file that external initialisers of skeletons name; nothing ever reads it
# From 1.29 on, ONNX Runtime's wheels report to their maker over HTTPS unless this is set before they are imported.
NO_TELEMETRY = "ORT_DISABLE_TELEMETRY"
VERSION = 1
METADATA = {"format": "onnx"}

MIN_EXTERNAL_BYTES = 1024
MAX_SEGMENTS = 64
MAX_CUT_SEGMENTS = 24  # that packing makes
MAX_VALUES = 512  # inputs, outputs, or values between two segments
MAX_NAME_CHARS = 1024
MAX_DIMENSIONS = 32

# ONNX Runtime's names of the types that cross the edge of a model, as artifacts and as numpy have them.
NUMPY_TYPES: dict[str, str] = {
    "tensor(float)": "<f4",
    "tensor(float16)": "<f2",
    "tensor(double)": "<f8",
    "tensor(bool)": "?",
    **{
        f"tensor({sign}int{8 * size})": f"<{kind}{size}"
        for sign, kind in (("", "i"), ("u", "u"))
        for size in (1, 2, 4, 8)
    },
    "tensor(string)": "O",
}

Dimension = int | str | None  # a size, the name of one that each call chooses, or one without a name


class Value(NamedTuple):
    """An input or an output: a tensor. `shape` is None where even its rank is open."""

    name: str
    type: str  # a key of NUMPY_TYPES
    shape: tuple[Dimension, ...] | None


class SegmentSpec(NamedTuple):
    """One segment. Its number is its place, and its group's name `segments.NUMBER`, if it has weights of its own."""

    file: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    weights: tuple[str, ...]


class OnnxSpec(NamedTuple):
    """A checked description."""

    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]
    segments: tuple[SegmentSpec, ...]

    @property
    def weights(self) -> tuple[str, ...]:
        """All weights, each once, in the order of their first use."""
        return tuple(dict.fromkeys(name for segment in self.segments for name in segment.weights))

    @property
    def batch_axis(self) -> str | None:
        """The name of the first dimension that all inputs and all outputs have, along which calls can share a run;
        None: there is no such dimension.
        """
        names: set[Dimension] = set()
        for value in (*self.inputs, *self.outputs):
            names.add(value.shape[0] if value.shape else None)
        name = names.pop() if len(names) == 1 else None
        return name if isinstance(name, str) else None

    def dump(self) -> bytes:
        return (
            json.dumps(
                {
                    "version": VERSION,
                    "inputs": [_value_json(value) for value in self.inputs],
                    "outputs": [_value_json(value) for value in self.outputs],
                    "segments": [segment._asdict() for segment in self.segments],
                },
                indent=1,
            )
            + "\n"
        ).encode()


def parse_spec(data: bytes, manifest: Manifest) -> OnnxSpec:
    """The description in `data`, which belongs to `manifest`. Raises `CheckpointError` saying what is wrong in it."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise _wrong(f"it is not JSON: {error}") from error
    if not isinstance(value, dict) or value.get("version") != VERSION:
        raise _wrong("it is of another version than this program reads", hint="Pack the model again.")
    inputs = tuple(_parse_value(each) for each in _items(value, "inputs", MAX_VALUES))
    outputs = tuple(_parse_value(each) for each in _items(value, "outputs", MAX_VALUES))
    segments = tuple(_parse_segment(each) for each in _items(value, "segments", MAX_SEGMENTS))
    for kind, values in (("inputs", inputs), ("outputs", outputs)):
        if len({each.name for each in values}) != len(values):
            raise _wrong(f"two {kind} have one name")
    spec = OnnxSpec(inputs, outputs, segments)
    _check_flow(spec, manifest)
    return spec


def _check_flow(spec: OnnxSpec, manifest: Manifest) -> None:
    """Each segment takes what there is before it, and all outputs are made."""
    if not spec.outputs or not spec.segments:
        raise _wrong("the model has no outputs, or no segments")
    known = {value.name for value in spec.inputs}
    files = {file.name for file in manifest.files}
    for number, segment in enumerate(spec.segments):
        if segment.file not in files:
            raise _wrong(
                f"segment {number} is in a file {segment.file[:100]!r} that the artifact does not have"
            )
        if missing := [name for name in segment.inputs if name not in known]:
            raise _wrong(f"segment {number} takes {missing[0][:100]!r}, which nothing before it makes")
        if missing := [name for name in segment.weights if name not in manifest.by_name]:
            raise _wrong(
                f"segment {number} uses a tensor {missing[0][:100]!r} that the artifact does not have"
            )
        if again := known.intersection(segment.outputs):
            raise _wrong(f"segment {number} makes {min(again)[:100]!r} once more")
        known.update(segment.outputs)
    if missing := [value.name for value in spec.outputs if value.name not in known]:
        raise _wrong(f"no segment makes the output {missing[0][:100]!r}")
    if WHOLE_NAME not in files:
        raise _wrong(f"the artifact has no {WHOLE_NAME}")


def _parse_value(given: Any) -> Value:
    if not isinstance(given, dict) or given.get("type") not in NUMPY_TYPES:
        raise _wrong("an input or output has no type that can be served")
    shape = given.get("shape")
    if shape is not None:
        if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS or not all(map(_is_dimension, shape)):
            raise _wrong("a shape is not a list of sizes and names")
        shape = tuple(shape)
    return Value(_name(given.get("name")), given["type"], shape)


def _is_dimension(size: Any) -> bool:
    if isinstance(size, str):
        return 0 < len(size) <= MAX_NAME_CHARS
    return size is None or (isinstance(size, int) and not isinstance(size, bool) and 0 <= size < 1 << 48)


def _parse_segment(given: Any) -> SegmentSpec:
    if not isinstance(given, dict):
        raise _wrong("a segment is not an object")
    inputs, outputs = _names(given, "inputs", MAX_VALUES), _names(given, "outputs", MAX_VALUES)
    return SegmentSpec(_name(given.get("file")), inputs, outputs, _names(given, "weights", 1_000_000))


def _names(given: Mapping[str, Any], key: str, most: int) -> tuple[str, ...]:
    names = tuple(map(_name, _items(given, key, most)))
    if len(set(names)) != len(names):
        raise _wrong(f"a segment's {key} have one name twice")
    return names


def _items(given: Mapping[str, Any], key: str, most: int) -> list[Any]:
    items = given.get(key)
    if not isinstance(items, list) or len(items) > most:
        raise _wrong(f"{key} is not a list of up to {most}")
    return items


def _name(given: Any) -> str:
    if not isinstance(given, str) or not 0 < len(given) <= MAX_NAME_CHARS:
        raise _wrong(f"a name is not a text of 1 to {MAX_NAME_CHARS} characters")
    return given


def _value_json(value: Value) -> dict[str, Any]:
    return {
        "name": value.name,
        "type": value.type,
        "shape": None if value.shape is None else list(value.shape),
    }


def _wrong(problem: str, *, hint: str = "") -> CheckpointError:
    return CheckpointError(f"{FILE_NAME}: {problem}", where=FILE_NAME, hint=hint)


def choose_cuts(weight_bytes: Sequence[int], crossing: Sequence[int], *, target_bytes: int) -> list[int]:
    """Places at which to cut a graph: numbers of nodes before which a segment ends.

    `weight_bytes[n]` is what node n is the first to use, `crossing[n]` how many tensors cross a cut before node n (a
    negative number: no cut may be there). A segment has about `target_bytes`: the cut with the fewest crossings where
    it has between a half of it and one and a half times that, the last of equals. Pure.
    """
    total_bytes = sum(weight_bytes)
    target_bytes = max(target_bytes, -(-2 * total_bytes // MAX_CUT_SEGMENTS), 1)
    cuts: list[int] = []
    start_bytes = taken_bytes = best_bytes = 0
    best: int | None = None
    for node, size_bytes in enumerate(weight_bytes):
        filled = taken_bytes - start_bytes
        # A cut between nodes that bring no weights gains nothing.
        may_cut = size_bytes and filled * 2 >= target_bytes and crossing[node] >= 0 and node
        if may_cut and (best is None or crossing[node] <= crossing[best]):
            best, best_bytes = node, taken_bytes
        if best is not None and (filled + size_bytes) * 2 > target_bytes * 3:
            cuts.append(best)
            start_bytes, best = best_bytes, None
        taken_bytes += size_bytes
    if best is not None and len(cuts) < MAX_CUT_SEGMENTS - 1:
        cuts.append(best)
    return cuts


def by_first_use(uses: Iterable[Iterable[str]]) -> dict[str, int]:
    """Name → the number of the first of several users."""
    first: dict[str, int] = {}
    for number, names in enumerate(uses):
        for name in names:
            first.setdefault(name, number)
    return first
