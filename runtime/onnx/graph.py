"""An ONNX file into segments: checked, optimised offline, put in order, cut, and written as
skeletons and one file of weights.

Everything about the file is distrusted: where its external data lie, how long they are, what its
shapes and names say. ONNX Runtime reads it only after that, and its own parser and constant folding
run in a process with limits (`pack.py`). Imports onnx and onnxruntime.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import onnx
import onnxruntime as ort

from ...loader.errors import CheckpointError
from .check import DTYPES, check_model, external_of, locations, read_model, refuse, tensor_bytes
from .spec import (
    FILE_NAME,
    MIN_EXTERNAL_BYTES,
    NUMPY_TYPES,
    PLACEHOLDER_NAME,
    WHOLE_NAME,
    OnnxSpec,
    SegmentSpec,
    Value,
    by_first_use,
    choose_cuts,
)
from .subgraphs import lift_weights, uses_of

SEGMENT_BYTES = 4 << 20  # fewer weights are not worth a segment of their own
MAX_INLINE_BYTES = 64 << 20  # of what stays in one skeleton
GROWTH = 1.02  # folding constants may make as much more of the weights
FOLDED_BYTES = 64 << 10  # else: the largest constant that folding may make
WEIGHTS_NAME, TENSORS_NAME = "weights.bin", "tensors.json"


class Node(NamedTuple):
    """A node and all values that it takes, those of graphs in it included."""

    proto: onnx.NodeProto
    uses: tuple[str, ...]


def nodes_of(graph: onnx.GraphProto) -> list[Node]:
    """The graph's nodes, in its order."""
    return [Node(node, tuple(dict.fromkeys(uses_of(node)))) for node in graph.node]


def late_constants(nodes: Sequence[Node], initializers: Collection[str]) -> list[Node]:
    """The nodes in an order in which those that depend on initialisers alone, such as casts of weights, come right
    before the first node that needs them: in ONNX Runtime's order they may all come first, and with them all weights.
    """
    constant_values = set(initializers)
    is_constant: list[bool] = []
    for node in nodes:
        is_constant.append(all(name in constant_values for name in node.uses))
        if is_constant[-1]:
            constant_values.update(node.proto.output)
    needed_at = list(range(len(nodes)))
    first_use: dict[str, int] = {}
    for number in reversed(range(len(nodes))):
        node = nodes[number]
        if is_constant[number]:
            uses = [first_use[name] for name in node.proto.output if name in first_use]
            needed_at[number] = min(uses, default=len(nodes))
        for name in node.uses:
            first_use[name] = min(first_use.get(name, len(nodes)), needed_at[number])
    order = sorted(range(len(nodes)), key=lambda number: (needed_at[number], not is_constant[number], number))
    return [nodes[number] for number in order]


def optimise(path: Path, out: Path, size_bytes: int) -> Path:
    """The file after ONNX Runtime's basic optimisations, with its weights in a file of their own, in the folder `out`.

    Where folding constants makes the weights grow (a matrix that is used as it is and transposed), only small ones are
    folded. Raises `CheckpointError` for a model that ONNX Runtime refuses.
    """
    made = _optimised(path, out / "optimised", {})
    if (out / "optimised.bin").exists() and (out / "optimised.bin").stat().st_size > size_bytes * GROWTH:
        key = "optimization.constant_folding_max_output_size_in_bytes"
        small = _optimised(path, out / "folded", {key: str(FOLDED_BYTES)})
        if _weights_size(small) < _weights_size(made):
            return small
    return made


def _weights_size(path: Path) -> int:
    data = path.with_suffix(".bin")
    return data.stat().st_size if data.exists() else 0


def _optimised(path: Path, stem: Path, entries: dict[str, str]) -> Path:
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(stem.with_suffix(".onnx"))
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_file_name", stem.with_suffix(".bin").name
    )
    options.add_session_config_entry(
        "session.optimized_model_external_initializers_min_size_in_bytes", str(MIN_EXTERNAL_BYTES)
    )
    options.add_session_config_entry("session.disable_prepacking", "1")
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    try:
        ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime's own classes have no base but this one
        detail = str(error).replace("\n", " ")[:400]
        raise refuse(f"ONNX Runtime {ort.__version__} refuses it: {detail}") from error
    return stem.with_suffix(".onnx")


def prepare(path: Path, out: Path, segment_bytes: int = SEGMENT_BYTES) -> None:
    """Make all files of the artifact of `path` in the empty folder `out`: skeletons, weights, their
    description. Segments have about `segment_bytes` of weights, or more.

    Raises `CheckpointError`. Memory: the model's file, and what ONNX Runtime takes for its weights.
    """
    size_bytes = check_model(read_model(path), path.parent)
    optimised = optimise(path, out, size_bytes)
    model = read_model(optimised)
    if model.graph.sparse_initializer:
        raise refuse("it has sparse initialisers", hint="Export them as dense tensors.")
    lift_weights(model.graph)
    _Cutter(model, optimised.parent, out).write(segment_bytes)
    for stem in ("optimised", "folded"):
        for suffix in (".onnx", ".bin"):
            (out / stem).with_suffix(suffix).unlink(missing_ok=True)


class _Cutter:
    """One model's way from an optimised file to segments."""

    def __init__(self, model: onnx.ModelProto, folder: Path, out: Path) -> None:
        self._model = model
        self._folder = folder
        self._out = out
        graph = model.graph
        self._initializers = {tensor.name: tensor for tensor in graph.initializer}
        self._nodes = late_constants(nodes_of(graph), self._initializers)
        self._inputs = [value for value in graph.input if value.name not in self._initializers]
        self._outputs = [value.name for value in graph.output]
        self._external = {
            name for name, tensor in self._initializers.items() if self._is_external(name, tensor)
        }

    def _is_external(self, name: str, tensor: onnx.TensorProto) -> bool:
        if tensor.data_type not in DTYPES or name in self._outputs:
            return False
        return tensor_bytes(tensor) >= MIN_EXTERNAL_BYTES

    def write(self, segment_bytes: int) -> None:
        first = by_first_use([[name for name in node.uses if name in self._external] for node in self._nodes])
        sizes = [0] * len(self._nodes)
        for name, number in first.items():
            tensor = self._initializers[name]
            sizes[number] += tensor_bytes(tensor)
        spans = self._crossing_spans()
        types = self._types(list(spans))
        cuts = choose_cuts(sizes, self._crossings(spans, types), target_bytes=segment_bytes)
        bounds = [0, *cuts, len(self._nodes)]
        segments = [
            self._segment(number, begin, end, types) for number, (begin, end) in enumerate(pairwise(bounds))
        ]
        self._write_whole(types)
        spec = OnnxSpec(
            tuple(self._value(value) for value in self._inputs),
            tuple(self._value(value) for value in self._model.graph.output),
            tuple(segments),
        )
        (self._out / FILE_NAME).write_bytes(spec.dump())
        self._write_weights(spec)

    def _write_whole(self, types: dict[str, str]) -> None:
        """The skeleton of all nodes, in ONNX Runtime's order, as a default session of the original file has them."""
        inputs = [value.name for value in self._inputs]
        self._skeleton(WHOLE_NAME, nodes_of(self._model.graph), inputs, self._outputs, types)

    def _crossing_spans(self) -> dict[str, tuple[int, int]]:
        """Values that nodes make: the node that makes each, and its last user (of an output: behind all nodes)."""
        made = {name: number for number, node in enumerate(self._nodes) for name in node.proto.output if name}
        last = {name: len(self._nodes) for name in self._outputs if name in made}
        for number, node in enumerate(self._nodes):
            for name in node.uses:
                if name in made:
                    if made[name] >= number:
                        raise refuse(f"its graph has a cycle: {name[:100]!r} is used before it is made")
                    last[name] = max(number, last.get(name, 0))
        return {name: (made[name], number) for name, number in last.items()}

    def _crossings(self, spans: dict[str, tuple[int, int]], types: dict[str, str]) -> list[int]:
        """The number of values that cross a cut before each node; -1 where one is no tensor, or has a type that cannot
        be handed on.
        """
        change = [0] * (len(self._nodes) + 2)
        forbidden = [0] * (len(self._nodes) + 2)
        for name, (begin, end) in spans.items():
            counts = change if types.get(name) in NUMPY_TYPES else forbidden
            counts[begin + 1] += 1
            counts[end + 1] -= 1
        crossing, open_values, open_forbidden = [], 0, 0
        for number in range(len(self._nodes)):
            open_values += change[number]
            open_forbidden += forbidden[number]
            crossing.append(-1 if open_forbidden else open_values)
        return crossing

    def _types(self, names: Sequence[str]) -> dict[str, str]:
        """The types of values, as ONNX Runtime infers them."""
        probe = onnx.ModelProto()
        probe.CopyFrom(self._model)
        have = set(self._outputs)
        probe.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names if name not in have)
        session = self._open(probe)
        self._types_found = {
            value.name: value.type for value in (*session.get_inputs(), *session.get_outputs())
        }
        self._shapes = {value.name: value.shape for value in (*session.get_inputs(), *session.get_outputs())}
        return self._types_found

    def _open(self, model: onnx.ModelProto) -> ort.InferenceSession:
        """A session that only says what the model's values are."""
        options = ort.SessionOptions()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.log_severity_level = 4
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self._folder)
        )
        return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])

    def _segment(self, number: int, begin: int, end: int, types: dict[str, str]) -> SegmentSpec:
        nodes = self._nodes[begin:end]
        made = {name for node in nodes for name in node.proto.output if name}
        used = list(dict.fromkeys(name for node in nodes for name in node.uses))
        inputs = [name for name in used if name not in made and name not in self._initializers]
        later = {name for node in self._nodes[end:] for name in node.uses}
        outputs = [name for name in made if name in later or name in self._outputs]
        if end == len(self._nodes):  # constants that are outputs
            outputs += [name for name in self._outputs if name in self._initializers]
        file = f"segment-{number:03}.onnx"
        ordered = sorted(dict.fromkeys(outputs))
        self._skeleton(file, nodes, inputs, ordered, types)
        weights = tuple(name for name in used if name in self._external)
        return SegmentSpec(file, tuple(inputs), tuple(ordered), weights)

    def _skeleton(
        self,
        file: str,
        nodes: Sequence[Node],
        inputs: Sequence[str],
        outputs: Sequence[str],
        types: dict[str, str],
    ) -> None:
        model = onnx.ModelProto(ir_version=self._model.ir_version, producer_name="teneral")
        model.opset_import.extend(self._model.opset_import)
        model.functions.extend(self._model.functions)
        graph = model.graph
        graph.name = file
        graph.node.extend(node.proto for node in nodes)
        if file == WHOLE_NAME:  # optimisations of the serving process need the shapes that are known
            graph.value_info.extend(self._model.graph.value_info)
        own = {value.name: value for value in (*self._inputs, *self._model.graph.output)}
        for values, names in ((graph.input, inputs), (graph.output, outputs)):
            for name in names:
                values.append(own[name] if name in own else _value_info(name, types[name]))
        used = dict.fromkeys(name for node in nodes for name in node.uses)
        used.update(dict.fromkeys(outputs))
        inline_bytes = 0
        for name in used:
            if name not in self._initializers:
                continue
            tensor = self._initializers[name]
            if name in self._external:
                graph.initializer.append(_placeholder(tensor))
            else:
                graph.initializer.append(self._inline(tensor))
                inline_bytes += graph.initializer[-1].ByteSize()
        if inline_bytes > MAX_INLINE_BYTES:
            raise refuse(
                f"{inline_bytes} bytes of its constants have types that cannot lie outside of the graph"
            )
        (self._out / file).write_bytes(model.SerializeToString())

    def _inline(self, tensor: onnx.TensorProto) -> onnx.TensorProto:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            return tensor
        copy = onnx.TensorProto()
        copy.CopyFrom(tensor)
        del copy.external_data[:]
        copy.ClearField("data_location")
        copy.raw_data = b"".join(self._pieces(tensor))
        return copy

    def _write_weights(self, spec: OnnxSpec) -> None:
        """All weights in the order of their first use, and a list that says which is where."""
        listed: list[dict[str, Any]] = []
        done: set[str] = set()
        position = 0
        with open(self._out / WEIGHTS_NAME, "wb") as file:
            for number, segment in enumerate(spec.segments):
                for name in segment.weights:
                    if name in done:
                        continue
                    done.add(name)
                    tensor = self._initializers[name]
                    size_bytes = self._copy(tensor, file)
                    dtype, _ = DTYPES[tensor.data_type]
                    if size_bytes != tensor_bytes(tensor):
                        raise refuse(
                            f"initialiser {name[:100]!r} does not have the bytes that its shape says"
                        )
                    listed.append(
                        {"name": name, "dtype": dtype, "shape": list(tensor.dims), "group": number,
                         "begin": position, "end": position + size_bytes}
                    )  # fmt: skip
                    position += size_bytes
        (self._out / TENSORS_NAME).write_text(json.dumps(listed))

    def _copy(self, tensor: onnx.TensorProto, file: BinaryIO) -> int:
        return sum(file.write(piece) for piece in self._pieces(tensor))

    def _pieces(self, tensor: onnx.TensorProto) -> Iterator[bytes]:
        if tensor.data_location != onnx.TensorProto.EXTERNAL:
            yield (
                tensor.raw_data
                if tensor.HasField("raw_data")
                else onnx.numpy_helper.to_array(tensor).tobytes()
            )
            return
        size_bytes = tensor_bytes(tensor)
        external = external_of(tensor, f"initialiser {tensor.name[:100]!r}", size_bytes)
        with open(self._folder / external.location, "rb") as source:
            source.seek(external.offset)
            left = external.length
            while left:
                piece = source.read(min(left, 16 << 20))
                if not piece:
                    raise refuse(f"{external.location} ends early")
                left -= len(piece)
                yield piece

    def _value(self, value: onnx.ValueInfoProto) -> Value:
        kind = self._types_found[value.name]
        if kind not in NUMPY_TYPES:
            raise refuse(f"{value.name[:100]!r} is of type {kind}, and only tensors can be served")
        shape = self._shapes.get(value.name)
        dims = None if shape is None else tuple(_dimension(size) for size in shape)
        return Value(value.name, kind, dims)


def _dimension(size: Any) -> int | str | None:
    if isinstance(size, int):
        return size if size >= 0 else None
    return size[:200] if isinstance(size, str) and size else None


def _placeholder(tensor: onnx.TensorProto) -> onnx.TensorProto:
    """The initialiser with its data in the file that is never read, wherever they lie in the artifact."""
    size_bytes = tensor_bytes(tensor)
    copy = onnx.TensorProto(name=tensor.name, data_type=tensor.data_type, dims=tensor.dims)
    copy.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", PLACEHOLDER_NAME), ("offset", "0"), ("length", str(size_bytes))):
        copy.external_data.add(key=key, value=value)
    return copy


def _value_info(name: str, kind: str) -> onnx.ValueInfoProto:
    words = {"float": "FLOAT", "double": "DOUBLE"}
    word = kind.removeprefix("tensor(").removesuffix(")")
    number = onnx.TensorProto.DataType.Value(words.get(word, word.upper()))
    return onnx.helper.make_tensor_value_info(name, number, None)


def main() -> None:
    """The work of `pack.py`'s child: `python -m … MODEL FOLDER LIMIT_BYTES`, or
    `--locations MODEL LIMIT_BYTES`. An error is printed as JSON.
    """
    import resource
    import sys

    only_locations = sys.argv[1] == "--locations"
    path, limit_bytes = Path(sys.argv[2 if only_locations else 1]), int(sys.argv[3])
    resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.umask(0o077)
    try:
        if only_locations:
            print(json.dumps(locations(read_model(path))))  # noqa: T201 - read by the parent
        else:
            prepare(path, Path(sys.argv[2]))
    except CheckpointError as error:
        print(json.dumps({"message": error.message, "hint": error.hint}))  # noqa: T201 - read by the parent
        sys.exit(3)
    except MemoryError:
        sys.exit(4)


if __name__ == "__main__":
    main()
