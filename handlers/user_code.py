"""Finding a user's function by `module:function` or `path/file.py:function`.

Importing runs the module's top level, once a process, as Python does for any program. What goes wrong becomes
a `HandlerError` that says where; the user's own exception, with its traceback, is its `__cause__`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from ..runtime.errors import HandlerError

_HINT = "Name it as package.module:function or path/file.py:function."


def find_function(spec: str) -> Callable[..., Any]:
    """The object that `spec` names. Raises `HandlerError`.

    The file's folder (or the working directory, for a module) is put on `sys.path`, so that the modules
    beside it can be imported: last, not first as Python does for a script, because a file called `http.py`
    there must not replace the standard library's for a server that is still importing.
    """
    place, separator, attribute = spec.rpartition(":")
    if not (separator and place and attribute):
        raise HandlerError(f"{spec!r} does not name a function", hint=_HINT)
    module = _import_file(Path(place)) if place.endswith(".py") or "/" in place else _import_module(place)
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise HandlerError(f"{place} has no {attribute!r}", hint=_functions_in(module)) from None
    if not callable(found):
        raise HandlerError(f"{spec} is {_a(found)}, not a function", hint=_functions_in(module))
    return found  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise HandlerError(f"there is no file {path}", hint=_HINT)
    # A name of its own: a file called json.py must not become the module `json` for everybody else.
    name = f"teneral_handler_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise HandlerError(f"{path} is not a Python file", hint="Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    _put_on_path(path.parent)
    sys.modules[name] = module  # dataclasses and pickle look a class's module up there
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(str(path), error) from error
    return module


def _import_module(name: str) -> ModuleType:
    _put_on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise HandlerError(f"there is no module {error.name!r}", hint=_HINT) from error
        raise _import_failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_failed(place: str, error: BaseException) -> HandlerError:
    return HandlerError(f"{place} could not be imported: {type(error).__name__}: {error}")


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _functions_in(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    ]
    return f"It has {', '.join(names[:8])}." if names else "It defines no functions."


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
