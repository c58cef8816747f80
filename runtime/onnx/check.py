"""The checks of an ONNX file before anything acts on what it says: sizes, shapes, names, external data, opsets.

Every statement of the file is distrusted. Nothing but its graph is read here. Imports onnx.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import onnx

from ...loader.errors import CheckpointError, UsageError
from ...loader.sources.base import check_name
from ...loader.sources.file.store import leads_out

MIN_OPSET, MAX_OPSET = 11, 23
MAX_MODEL_BYTES = (1 << 31) - 1  # protobuf's own limit
MAX_NODES = 200_000
MAX_ELEMENTS = 1 << 48
DEFAULT_DOMAINS = ("", "ai.onnx")

# ONNX's types that an artifact has a dtype for, with their bits; others stay in the skeletons.
DTYPES = {
    onnx.TensorProto.FLOAT: ("F32", 32), onnx.TensorProto.UINT8: ("U8", 8), onnx.TensorProto.INT8: ("I8", 8),
    onnx.TensorProto.UINT16: ("U16", 16), onnx.TensorProto.INT16: ("I16", 16), onnx.TensorProto.INT32: ("I32", 32),
    onnx.TensorProto.INT64: ("I64", 64), onnx.TensorProto.BOOL: ("BOOL", 8), onnx.TensorProto.FLOAT16: ("F16", 16),
    onnx.TensorProto.DOUBLE: ("F64", 64), onnx.TensorProto.UINT32: ("U32", 32), onnx.TensorProto.UINT64: ("U64", 64),
    onnx.TensorProto.BFLOAT16: ("BF16", 16),
}  # fmt: skip
BITS = {
    **{number: bits for number, (_, bits) in DTYPES.items()},
    onnx.TensorProto.COMPLEX64: 64, onnx.TensorProto.COMPLEX128: 128,
    **dict.fromkeys(
        (onnx.TensorProto.FLOAT8E4M3FN, onnx.TensorProto.FLOAT8E4M3FNUZ, onnx.TensorProto.FLOAT8E5M2,
         onnx.TensorProto.FLOAT8E5M2FNUZ), 8),
    onnx.TensorProto.UINT4: 4, onnx.TensorProto.INT4: 4, onnx.TensorProto.FLOAT4E2M1: 4,
}  # fmt: skip


class External(NamedTuple):
    """The bytes [offset, offset + length) of a file next to the model."""

    location: str
    offset: int
    length: int


def read_model(path: Path) -> onnx.ModelProto:
    """The model's graph, without the data that lie in other files. Raises `CheckpointError`."""
    size_bytes = path.stat().st_size
    if size_bytes > MAX_MODEL_BYTES:
        raise CheckpointError(
            f"{path.name} has {size_bytes} bytes, of {MAX_MODEL_BYTES} allowed",
            where=path.name,
            hint="Export it with external data: onnx.save(model, path, save_as_external_data=True).",
        )
    model = onnx.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except Exception as error:  # protobuf's classes differ between its implementations
        raise CheckpointError(f"{path.name} is not an ONNX model: {error}", where=path.name) from error
    if not model.HasField("graph") or not (model.graph.node or model.graph.output):
        raise CheckpointError(f"{path.name} is not an ONNX model: it has no graph", where=path.name)
    return model


def check_model(model: onnx.ModelProto, folder: Path) -> int:
    """A check that the model's own statements can be true, before anything acts on them. Returns its weights' bytes.

    Raises `CheckpointError` for external data outside of the folder, sizes that do not agree, huge shapes, too many
    nodes, and other opsets than 11 to 23.
    """
    _check_opset(model)
    names: set[str] = set()
    total_bytes = 0
    file_bytes: dict[str, int] = {}  # by the names of files with external data
    num_nodes = 0
    for graph in all_graphs(model.graph):
        num_nodes += len(graph.node)
        if graph.sparse_initializer:
            raise refuse("it has sparse initialisers", hint="Export them as dense tensors.")
        for tensor in graph.initializer:
            where = f"initialiser {tensor.name[:100]!r}"
            if graph is model.graph and (not tensor.name or tensor.name in names):
                raise refuse(f"{where} has no name, or one that another has")
            names.add(tensor.name)
            total_bytes += _check_tensor(tensor, where, folder, file_bytes)
    for tensor in _attribute_tensors(model):
        total_bytes += _check_tensor(tensor, f"constant {tensor.name[:100]!r}", folder, file_bytes)
    if num_nodes > MAX_NODES:
        raise refuse(f"it has {num_nodes} nodes, of {MAX_NODES} allowed")
    if sum(file_bytes.values()) * 4 + MAX_MODEL_BYTES < total_bytes:
        raise refuse(f"its tensors say {total_bytes} bytes, which its files do not have")
    return total_bytes


def _check_opset(model: onnx.ModelProto) -> None:
    versions = [each.version for each in model.opset_import if each.domain in DEFAULT_DOMAINS]
    if len(versions) != 1 or not MIN_OPSET <= versions[0] <= MAX_OPSET:
        shown = versions[0] if versions else "none"
        raise refuse(
            f"its opset is {shown}, and {MIN_OPSET} to {MAX_OPSET} are supported",
            hint="Export it again, or convert it: onnx.version_converter.convert_version(model, 17).",
        )


def _check_tensor(tensor: onnx.TensorProto, where: str, folder: Path, file_bytes: dict[str, int]) -> int:
    """Its bytes, as its shape says them."""
    if any(size < 0 for size in tensor.dims) or len(tensor.dims) > 32:
        raise refuse(f"{where} has a shape that no tensor can have: {list(tensor.dims)[:40]}")
    if math.prod(max(1, size) for size in tensor.dims) > MAX_ELEMENTS:
        raise refuse(f"{where} has a huge shape: {list(tensor.dims)}")
    if tensor.data_type == onnx.TensorProto.STRING:
        return 0
    if tensor.data_type not in BITS:
        raise refuse(f"{where} has an unknown type, {tensor.data_type}")
    size_bytes = tensor_bytes(tensor)
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        _check_external(tensor, where, size_bytes, folder, file_bytes)
    elif tensor.HasField("raw_data") and len(tensor.raw_data) != size_bytes:
        raise refuse(f"{where} has {len(tensor.raw_data)} bytes, and its shape says {size_bytes}")
    elif not tensor.HasField("raw_data") and size_bytes > MAX_MODEL_BYTES:
        raise refuse(f"{where} has a huge shape: {list(tensor.dims)}")
    return size_bytes


def _check_external(
    tensor: onnx.TensorProto, where: str, size_bytes: int, folder: Path, file_bytes: dict[str, int]
) -> None:
    external = external_of(tensor, where, size_bytes)
    if external.length != size_bytes:
        raise refuse(f"{where} has {external.length} bytes of external data, and its shape says {size_bytes}")
    if external.location not in file_bytes:
        file_bytes[external.location] = _file_bytes(folder, external.location, where)
    if external.offset + external.length > file_bytes[external.location]:
        raise refuse(
            f"{where} ends at byte {external.offset + external.length} of {external.location}, "
            f"which has {file_bytes[external.location]}",
            hint="It was cut off, perhaps by an interrupted download: fetch it again.",
        )


def locations(model: onnx.ModelProto) -> list[str]:
    """The files with external data that the model names, each a name that stays in its folder."""
    tensors = [tensor for graph in all_graphs(model.graph) for tensor in graph.initializer]
    tensors += _attribute_tensors(model)
    external = (tensor for tensor in tensors if tensor.data_location == onnx.TensorProto.EXTERNAL)
    return list(
        {external_of(tensor, f"initialiser {tensor.name[:100]!r}", 0).location: None for tensor in external}
    )


def external_of(tensor: onnx.TensorProto, where: str, size_bytes: int) -> External:
    """The place of a tensor's data; as long as `size_bytes` where it does not say. Raises `CheckpointError` for one
    that is none, or outside of the folder.
    """
    fields = {entry.key: entry.value for entry in tensor.external_data}
    try:
        location = check_name(fields.get("location", ""))
    except UsageError as error:
        raise refuse(
            f"{where} lies in {fields.get('location', '')[:200]!r}, which is not a file of the model's folder",
            hint="Export the model again, with its external data next to it.",
        ) from error
    numbers = []
    for key in ("offset", "length"):
        text = fields.get(key, "0" if key == "offset" else str(size_bytes))
        if not (text.isascii() and text.isdigit() and len(text) <= 15):
            raise refuse(f"{where} has no valid {key} of its external data: {text[:40]!r}")
        numbers.append(int(text))
    return External(location, *numbers)


def _file_bytes(folder: Path, location: str, where: str) -> int:
    path = folder / location
    try:
        inside = leads_out(str(folder), str(path)) is None
        found = path.stat()
    except OSError:
        raise refuse(
            f"{where} lies in {location!r}, which is missing",
            hint="Give the folder that has all of the model's files.",
        ) from None
    if not inside or not path.is_file():
        raise refuse(f"{where} lies in {location!r}, which is not a file of the model's folder")
    return found.st_size


def all_graphs(graph: onnx.GraphProto, depth: int = 0) -> Iterator[onnx.GraphProto]:
    """A graph and all those in its nodes."""
    if depth > 16:
        raise refuse("its graphs are nested too deeply")
    yield graph
    for node in graph.node:
        for inner in graphs_of(node):
            yield from all_graphs(inner, depth + 1)


def graphs_of(node: onnx.NodeProto) -> Iterator[onnx.GraphProto]:
    """The graphs in a node, such as an If's branches."""
    for attribute in node.attribute:
        yield from (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs)


def _attribute_tensors(model: onnx.ModelProto) -> Iterator[onnx.TensorProto]:
    nodes = [node for graph in all_graphs(model.graph) for node in graph.node]
    nodes += [node for function in model.functions for node in function.node]
    for node in nodes:
        for attribute in node.attribute:
            if attribute.HasField("t"):
                yield attribute.t
            yield from attribute.tensors


def tensor_bytes(tensor: onnx.TensorProto) -> int:
    """Those of its elements, of a type that `BITS` has."""
    return -(-math.prod(int(size) for size in tensor.dims) * BITS[tensor.data_type] // 8)


def refuse(problem: str, *, hint: str = "") -> CheckpointError:
    return CheckpointError(f"the ONNX model cannot be packed: {problem}", where="model.onnx", hint=hint)
