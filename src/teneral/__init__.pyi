from .handlers.asgi import asgi_app
from .handlers.engine import AsyncEngine, Engine
from .handlers.function.context import Context, Model
from .handlers.function.streams import AsyncTextStream, Completion, TextStream
from .loader.errors import NotFoundError, TeneralError, UsageError
from .runtime.errors import (
    CancelledError,
    CapacityError,
    ContextLengthError,
    DrainingError,
    ModelError,
    RequestError,
)
from .runtime.into.files import load_file
from .runtime.into.module_load import load_into
from .runtime.into.slots import empty_weights

__version__: str
__all__ = [
    "AsyncEngine",
    "AsyncTextStream",
    "CancelledError",
    "CapacityError",
    "Completion",
    "Context",
    "ContextLengthError",
    "DrainingError",
    "Engine",
    "Model",
    "ModelError",
    "NotFoundError",
    "RequestError",
    "TeneralError",
    "TextStream",
    "UsageError",
    "__version__",
    "asgi_app",
    "empty_weights",
    "load_file",
    "load_into",
]
