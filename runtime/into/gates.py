"""The gates of a module: where its forward pass waits, and for which tensors, derived from the
module's structure.

A gate is placed before each block of a stack of blocks (the items of a `ModuleList`, or of a
`Sequential` of similar blocks), before every subtree without such a stack, and before a module's
own parameters if it has some in addition to a stack. A module may therefore read its descendants'
parameters outside their forward, as attention and tied heads do: coarse gates are correct where one
gate a leaf would let it read tensors that have not arrived.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Gate:
    """A gate. `members`, a module and its descendants, which may be called separately, wait until
    all of `tensors` have arrived.
    """

    name: str  # of the outermost member, '' for the root
    members: tuple[nn.Module, ...]
    tensors: tuple[torch.Tensor, ...]


def find_gates(root: nn.Module) -> list[Gate]:
    """The gates in the module's order. A module is a member of at most one gate."""
    walk = _Walk()
    loose = walk.visit("", root)
    # The root has no forward of its own: no call waits, but the load tracks them.
    if loose:
        walk.gates.append(Gate("", (), tuple(loose)))
    return walk.gates


class _Walk:
    def __init__(self) -> None:
        self.gates: list[Gate] = []
        self._seen: set[nn.Module] = set()  # shared modules occur in a tree several times

    def visit(self, path: str, module: nn.Module) -> list[torch.Tensor]:
        """Find the gates of a subtree. Returns the tensors that the nearest ancestor with a forward
        has to wait for.
        """
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
    """True if the module is ever called, unlike lists and dicts of modules or parameters."""
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def is_stack(module: nn.Module) -> bool:
    """True if the module holds blocks that run one after another. Blocks have modules of their own."""
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
