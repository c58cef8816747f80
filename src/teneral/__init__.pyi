from .runtime.into.files import load_file
from .runtime.into.module_load import load_into
from .runtime.into.slots import empty_weights

__version__: str
__all__ = ["__version__", "empty_weights", "load_file", "load_into"]
