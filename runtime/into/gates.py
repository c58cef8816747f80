"""The gates of a module: where its forward pass waits, and for which tensors, derived from the
module's structure; and the hooks that wait, which are removed once the gate opens.

A gate is placed before each block of a stack of blocks (the items of a `ModuleList`, or of a
`Sequential` of similar blocks), before every subtree without such a stack, and before a module's
own parameters if it has some in addition to a stack. A module may therefore read its descendants'
parameters outside their forward, as attention and tied heads do: coarse gates are correct where one
gate a leaf would let it read tensors that have not arrived.

Modules wait before their forward, and before other uses of the values: `state_dict`, and moves and
conversions such as `to` and `half`. Copying or pickling a module that waits is refused.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import nn

from ...loader.errors import UsageError


@dataclass(frozen=True, slots=True)
class ModuleGate:
    """A gate. `members`, a module and its descendants, which may be called separately, wait until
    all of `tensors` have arrived.
    """

    name: str  # of the outermost member, '' for the root
    members: tuple[nn.Module, ...]
    tensors: tuple[torch.Tensor, ...]


def find_gates(root: nn.Module) -> list[ModuleGate]:
    """The gates in the module's order. A module is a member of at most one gate."""
    walk = _ModuleWalk()
    loose = walk.visit("", root)
    # The root has no forward of its own: no call waits, but the load tracks them.
    if loose:
        walk.gates.append(ModuleGate("", (), tuple(loose)))
    return walk.gates


class _ModuleWalk:
    def __init__(self) -> None:
        self.gates: list[ModuleGate] = []
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
            self.gates.append(ModuleGate(path, (module,), tuple(loose)))
            return []
        return loose

    def _whole(self, path: str, module: nn.Module) -> ModuleGate:
        members = tuple(each for each in module.modules() if each not in self._seen)
        self._seen.update(members)
        tensors = [tensor for each in module.modules() for tensor in _own_tensors(each)]
        return ModuleGate(path, members, tuple(tensors))


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


class GateHooks:
    """The hooks of one gate. `wait` returns once its tensors have arrived, or raises; `is_lost`
    tells whether they never will.
    """

    def __init__(self, gate: ModuleGate, wait: Callable[[], None], *, is_lost: Callable[[], bool]) -> None:
        self._members = gate.members
        self._wait = wait
        self.is_lost = is_lost
        self._lock = threading.Lock()
        # First of all hooks: others may compute with the weights, as spectral norm's does.
        self._handles = [
            handle
            for module in gate.members
            for handle in (
                module.register_forward_pre_hook(self._on_call, prepend=True),
                module.register_state_dict_pre_hook(self._on_state_dict),  # type: ignore[no-untyped-call]
            )
        ]
        for module in gate.members:
            self._guard_conversion(module)

    def remove(self) -> None:
        """Idempotent; may be called from a hook."""
        with self._lock:
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.remove()
            if handles:
                for module in self._members:
                    vars(module).pop("_apply", None)

    @staticmethod
    def find(root: nn.Module) -> set[GateHooks]:
        """The hooks of all gates in a module."""
        hooks = (hook for module in root.modules() for hook in module._forward_pre_hooks.values())
        owners = (getattr(hook, "__self__", None) for hook in hooks)
        return {owner for owner in owners if isinstance(owner, GateHooks)}

    def _pass(self) -> None:
        self._wait()
        self.remove()

    def _on_call(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        self._pass()

    def _on_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        self._pass()

    def _guard_conversion(self, module: nn.Module) -> None:
        """Make conversions wait. torch has no hook for `_apply`, through which all of them go, so a
        function on the object shadows its class's.
        """

        def apply(*args: Any, **kwargs: Any) -> nn.Module:
            self._pass()
            applied: nn.Module = type(module)._apply(module, *args, **kwargs)  # type: ignore[no-untyped-call]
            return applied

        vars(module)["_apply"] = apply

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise UsageError(
            "a module cannot be copied or pickled while its weights are still arriving",
            hint="Wait for the load first: `load.wait()`.",
        )
