"""Importing torch, whole or without what serving does not need.

A fifth of the import (0.2 to 0.4 s) is `torch._meta_registrations`: what operators do to shapes, in Python, for tracing
and for tensors without memory. Running a model needs none of it. Leaving it out is opt-in, since a user's code may
trace; and only for versions of torch in which the rest was seen to work without it.
"""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType

from ..loader.errors import UsageError

LEFT_OUT = "torch._meta_registrations"
TRIMMABLE = frozenset({"2.13"})  # by tests/runtime/test_torch_import.py; the module is torch's own affair


def import_torch(*, trim: bool = False) -> bool:
    """Import torch; with `trim`, without what serving does not need, where the version is known to work so.

    Returns whether something was left out. A torch that is imported already stays as it is. What was left out is
    imported, as ever, by who asks for it by name: `import torch._meta_registrations` before tracing.
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
    """Raises `UsageError` with how to install torch, which `what` needs, where it is not there. Does not import it."""
    if find_spec("torch") is None:
        raise UsageError(f"{what} needs torch, which is not installed", hint="pip install 'teneral[torch]'")


def torch_version() -> str:
    """Of the torch that would be imported, as "2.13"; "" where there is none."""
    try:
        return ".".join(version("torch").split(".")[:2])
    except PackageNotFoundError:
        return ""
