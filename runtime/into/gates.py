"""Where in a module the forward pass must wait, and for which tensors: decided from the module's structure.

A gate stands before each block of a stack of blocks (the items of a `ModuleList`, or of a `Sequential` of blocks that
are alike), before every subtree that has no such stack, and before a module's own parameters where it has some beside
a stack. So a module may read its descendants' parameters outside their forward, as attention and tied heads do: coarse
gates are right where one gate a leaf would let it read what is not there yet.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Gate:
    """`members` wait until all of `tensors` are there: a module, and what is below it, which may be called alone."""

    name: str  # of the outermost member, '' for the root
    members: tuple[nn.Module, ...]
    tensors: tuple[torch.Tensor, ...]


def find_gates(root: nn.Module) -> list[Gate]:
    """In the module's order. A module is a member of one gate at most."""
    walk = _Walk()
    loose = walk.visit("", root)
    if loose:  # the root has no forward of its own: nobody waits, but the load knows of them
        walk.gates.append(Gate("", (), tuple(loose)))
    return walk.gates


class _Walk:
    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self._seen: set[nn.Module] = set()  # shared modules stand in a tree several times

    def visit(self, path: str, module: nn.Module) -> list[torch.Tensor]:
        """Returns the tensors that the nearest ancestor with a forward has to wait for."""
        if module in self._seen:
            return []
        if has_forward(module) and not any(is_stack(each) for each in module.modules()):
            self.gates.append(self._whole(path, module))
            return []
        self._seen.add(module)
        loose = _own_tensors(module)
        for name, child in module.named_children():
            child_path = f"{path}.{name}" if path else name
            if not (is_stack(module) and has_forward(child)):
                loose += self.visit(child_path, child)
            elif child not in self._seen:
                self.gates.append(self._whole(child_path, child))
        if has_forward(module) and loose:
            self.gates.append(Gate(path, (module,), tuple(loose)))
            return []
        return loose

    def _whole(self, path: str, module: nn.Module) -> Gate:
        members = tuple(each for each in module.modules() if each not in self._seen)
        self._seen.update(members)
        tensors = [tensor for each in module.modules() for tensor in _own_tensors(each)]
        return Gate(path, members, tuple(tensors))


def has_forward(module: nn.Module) -> bool:
    """Whether it is ever called: lists and dicts of modules or parameters are not."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_stack(module: nn.Module) -> bool:
    """Whether it holds blocks that run one after another. Blocks have modules of their own."""
    blocks = [child for child in module.children() if next(child.children(), None) is not None]
    if isinstance(module, nn.ModuleList):
        return bool(blocks)
    if type(module).forward is not nn.Sequential.forward:
        return False
    return max(Counter(map(type, blocks)).values(), default=0) > 1


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [
        tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None
    ]
