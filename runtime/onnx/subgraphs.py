"""Graphs inside of nodes, such as an If's branches and a Loop's body: the values that they take from
outside, and their weights, which move to the outermost graph.

Imports onnx.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import onnx

from .check import BITS, all_graphs, graphs_of, refuse, tensor_bytes
from .spec import MIN_EXTERNAL_BYTES


def uses_of(node: onnx.NodeProto) -> Iterator[str]:
    """Names of the values that a node takes, those taken by graphs in it included."""
    yield from (name for name in node.input if name)
    for graph in graphs_of(node):
        yield from _captured(graph)


def _captured(graph: onnx.GraphProto) -> Iterable[str]:
    """Names that a graph in a node takes from outside."""
    own = _own_names(graph)
    wanted = [name for inner in graph.node for name in uses_of(inner)]
    return [name for name in (*wanted, *(value.name for value in graph.output)) if name not in own]


def _own_names(graph: onnx.GraphProto) -> set[str]:
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own.update(name for inner in graph.node for name in inner.output)
    return own


def lift_weights(graph: onnx.GraphProto) -> None:
    """Move the weights of graphs in nodes to `graph` itself: a session takes only those from outside.

    A weight whose name occurs elsewhere gets a new one. Raises `CheckpointError` for a weight that is
    also an input of its graph.
    """
    taken: Counter[str] = Counter(tensor.name for tensor in graph.initializer)
    for each in all_graphs(graph):
        if each is not graph:
            taken.update(tensor.name for tensor in each.initializer)
        taken.update(value.name for value in each.input)
        taken.update(name for node in each.node for name in node.output)
    for each in list(all_graphs(graph))[1:]:
        inputs = {value.name for value in each.input}
        outputs = {value.name for value in each.output}
        kept: list[onnx.TensorProto] = []
        new_names: dict[str, str] = {}
        for tensor in each.initializer:
            if not _is_weight(tensor):
                kept.append(tensor)
                continue
            if tensor.name in inputs:
                raise refuse(f"initialiser {tensor.name[:100]!r} is also an input of a graph in a node")
            name = tensor.name
            if taken[name] > 1 or name in outputs:
                name = _free_name(name, taken)
                new_names[tensor.name] = name
            lifted = graph.initializer.add()
            lifted.CopyFrom(tensor)
            lifted.name = name
        if len(kept) == len(each.initializer):
            continue
        remaining = onnx.GraphProto(initializer=kept)
        del each.initializer[:]
        each.initializer.extend(remaining.initializer)
        _rename_uses(each, new_names)
        for name in outputs & new_names.keys():
            each.node.append(onnx.helper.make_node("Identity", [new_names[name]], [name]))


def _is_weight(tensor: onnx.TensorProto) -> bool:
    if tensor.data_location == onnx.TensorProto.EXTERNAL:
        return True
    return tensor.data_type in BITS and tensor_bytes(tensor) >= MIN_EXTERNAL_BYTES


def _free_name(name: str, taken: Counter[str]) -> str:
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    taken[f"{name}_{number}"] += 1
    return f"{name}_{number}"


def _rename_uses(graph: onnx.GraphProto, new_names: Mapping[str, str]) -> None:
    """Give the nodes of a graph, and of those in it, new names of values from outside."""
    if not new_names:
        return
    for node in graph.node:
        for number, name in enumerate(node.input):
            node.input[number] = new_names.get(name, name)
        for inner in graphs_of(node):
            own = _own_names(inner)
            reaching = {name: new for name, new in new_names.items() if name not in own}
            _rename_uses(inner, reaching)
            for value in inner.output:
                if value.name in reaching:
                    value.name = reaching[value.name]
