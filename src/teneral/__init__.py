"""Teneral: a serverless inference runtime that answers while its weights are still arriving.

    import teneral

    with teneral.Engine("Qwen/Qwen2.5-0.5B-Instruct") as engine:
        print(engine.chat([{"role": "user", "content": "Hello"}], max_tokens=50).text)

`Engine` and `AsyncEngine` are a model in your own program; `asgi_app` is the server's HTTP API as an ASGI application;
`load_into` and `load_file` stream weights into any PyTorch module (they need torch). A function that `teneral serve
--handler` calls gets a `Context`, whose `model` is a `Model`. Every error is a `TeneralError`.
"""

from typing import Any

__version__ = "0.1.0"
# `__init__.pyi` has their types. Imported by their first use: a cold start pays for every module.
_INTO = {"empty_weights": "slots", "load_file": "files", "load_into": "module_load"}
_HOMES = {
    "AsyncEngine": "handlers.engine",
    "AsyncTextStream": "handlers.function.streams",
    "CancelledError": "runtime.errors",
    "CapacityError": "runtime.errors",
    "Completion": "handlers.function.streams",
    "Context": "handlers.function.context",
    "ContextLengthError": "runtime.errors",
    "DrainingError": "runtime.errors",
    "Engine": "handlers.engine",
    "Model": "handlers.function.context",
    "ModelError": "runtime.errors",
    "NotFoundError": "loader.errors",
    "RequestError": "runtime.errors",
    "TeneralError": "loader.errors",
    "TextStream": "handlers.function.streams",
    "UsageError": "loader.errors",
    "asgi_app": "handlers.asgi",
    **{name: f"runtime.into.{home}" for name, home in _INTO.items()},
}
__all__ = ["__version__"]
__all__ += list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    if name in _INTO:
        import_module(f"{__name__}.runtime.torch_import").require_torch(f"teneral.{name}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    from importlib.util import find_spec

    # `help` looks at each: those that need torch are not there without it.
    absent = _INTO if find_spec("torch") is None else ()
    return [name for name in (*globals(), *_HOMES) if name not in absent]
