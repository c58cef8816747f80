"""aiohttp without its client, which a server does not need: 84 ms of CPU time for the import instead of 140.

`import aiohttp.web` runs the package's `__init__` first, and that imports the client, which reads
the system's certificates into a TLS context. `import_web` installs a package with the same
submodules instead, which runs that `__init__` when another attribute is accessed:
`aiohttp.ClientSession` is available to a user's code, a moment later.
"""

from __future__ import annotations

import re
import sys
import threading
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any

PACKAGE = "aiohttp"
# The only name that the server half imports from the package.
_VERSION = re.compile(rb'__version__ = "([\w.+-]+)"')
_HEAD_BYTES = 4096


def import_web() -> bool:
    """Import `aiohttp.web`. Returns whether the client was left out: not if aiohttp is imported
    already, nor if its version is not at its usual place.
    """
    is_lean = PACKAGE not in sys.modules and _install()
    import_module(f"{PACKAGE}.web")
    return is_lean and f"{PACKAGE}.client" not in sys.modules


def _install() -> bool:
    spec = find_spec(PACKAGE)
    found = None if spec is None or spec.origin is None else _version(spec.origin)
    if spec is None or found is None:
        return False
    package = module_from_spec(spec)
    vars(package)["__version__"] = found
    vars(package)["__getattr__"] = _Rest(package, spec).get
    sys.modules[PACKAGE] = package
    return True


def _version(path: str) -> str | None:
    try:
        with open(path, "rb") as file:
            found = _VERSION.search(file.read(_HEAD_BYTES))
    except OSError:
        return None
    return None if found is None else found[1].decode()


class _Rest:
    """The package's other attributes, imported on first access. Thread-safe."""

    def __init__(self, package: ModuleType, spec: ModuleSpec) -> None:
        self._package = package
        self._spec = spec
        self._lock = threading.RLock()
        self._is_begun = False

    def get(self, name: str) -> Any:
        """The package's attribute `name`, for `__getattr__` of the module."""
        if name.startswith("__") and name != "__all__":
            raise AttributeError(name)
        submodule = f"{PACKAGE}.{name}"
        if name != "__all__" and find_spec(submodule) is not None:
            return import_module(submodule)
        with self._lock:
            if not self._is_begun:
                # This thread will ask again while importing.
                self._is_begun = True
                try:
                    assert self._spec.loader is not None
                    self._spec.loader.exec_module(self._package)
                except BaseException:
                    self._is_begun = False
                    raise
                if vars(self._package)["__getattr__"] == self.get:  # it may define its own
                    del vars(self._package)["__getattr__"]
            elif name not in vars(self._package):
                raise AttributeError(f"module {PACKAGE!r} has no attribute {name!r}")
        return getattr(self._package, name)
