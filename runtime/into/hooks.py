"""The hooks by which the modules of one gate wait until it opens; then they are removed.

They wait before their forward, and before other uses of the values: `state_dict`, and moves and
conversions such as `to` and `half`. Copying or pickling such a module is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from ...loader.errors import UsageError
from .gates import Gate


class GateHooks:
    """The hooks of one gate. `wait` returns once its tensors have arrived, or raises; `is_lost`
    tells whether they never will.
    """

    def __init__(self, gate: Gate, wait: Callable[[], None], *, is_lost: Callable[[], bool]) -> None:
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
