"""The order of a graph's nodes, and the values that each takes. Pure functions over ONNX's messages; imports onnx."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

import onnx


class Node(NamedTuple):
    """A node and all values that it takes, those of graphs in it included."""

    proto: onnx.NodeProto
    uses: tuple[str, ...]


def nodes_of(graph: onnx.GraphProto) -> list[Node]:
    """The graph's nodes, in its order."""
    return [Node(node, tuple(dict.fromkeys(_uses(node)))) for node in graph.node]


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


def _uses(node: onnx.NodeProto) -> Iterator[str]:
    """Names of values that a node takes, also by graphs in it."""
    yield from (name for name in node.input if name)
    for attribute in node.attribute:
        for graph in (*([attribute.g] if attribute.HasField("g") else ()), *attribute.graphs):
            yield from _captured(graph)


def _captured(graph: onnx.GraphProto) -> Iterable[str]:
    """Names that a graph in a node takes from outside."""
    own = {value.name for value in graph.input} | {tensor.name for tensor in graph.initializer}
    own.update(name for inner in graph.node for name in inner.output)
    wanted = [name for inner in graph.node for name in _uses(inner)]
    return [name for name in (*wanted, *(value.name for value in graph.output)) if name not in own]
