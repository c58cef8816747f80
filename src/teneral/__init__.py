"""Teneral: a serverless inference runtime that answers while its weights are still arriving."""

from typing import Any

__version__ = "0.1.0"
# `__init__.pyi` has their types.
__all__ = ["__version__", "empty_weights", "load_file", "load_into"]

_HOMES = {"empty_weights": "slots", "load_file": "files", "load_into": "module_load"}


def __getattr__(name: str) -> Any:
    # These need torch, which costs more to import than the rest of a cold start.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    import_module(f"{__name__}.runtime.torch_import").require_torch(f"teneral.{name}")
    return getattr(import_module(f"{__name__}.runtime.into.{_HOMES[name]}"), name)
