"""The import of torch, complete or without the parts that serving does not need.

A fifth of the import (0.2 to 0.4 s) is `torch._meta_registrations`: the shape functions of
operators, in Python, for tracing and for tensors without memory. Running a model needs none of it.
Leaving it out is opt-in, since a user's code may trace; and only for versions of torch with which
this was tested.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

from ..loader.errors import UsageError

LEFT_OUT = "torch._meta_registrations"
# By tests/runtime/test_torch_import.py; the module is private to torch.
TRIMMABLE = frozenset({"2.13"})


def import_torch(*, trim: bool = False) -> bool:
    """Import torch; with `trim`, without the parts that serving does not need, for tested versions.

    Returns whether parts were left out. An imported torch stays unchanged. The missing parts can
    still be imported by name: `import torch._meta_registrations` before tracing.
    """
    if not trim or "torch" in sys.modules or torch_version() not in TRIMMABLE:
        import torch

        return False
    placeholder = ModuleType(LEFT_OUT)
    sys.modules[LEFT_OUT] = placeholder
    try:
        import torch  # noqa: F401
    finally:
        if sys.modules.get(LEFT_OUT) is placeholder:
            del sys.modules[LEFT_OUT]
    return True


def require_torch(what: str) -> None:
    """Raise `UsageError` with the command to install torch, if it is missing. `what` needs it. Does
    not import it.
    """
    if find_spec("torch") is None:
        raise UsageError(f"{what} needs torch, which is not installed", hint="pip install 'teneral[torch]'")


def torch_version() -> str:
    """The version of torch that would be imported, as "2.13"; "" if it is missing."""
    try:
        return ".".join(version("torch").split(".")[:2])
    except PackageNotFoundError:
        return ""
