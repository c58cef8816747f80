"""The `Driver` for a device: over CuPy's bindings where they are installed, over libcuda elsewhere."""

from __future__ import annotations

from .base import Driver


def open_driver(index: int) -> Driver:
    """Open device `index`, some tenths of a second. Raises `CudaError`."""
    try:
        from .bindings import BindingsDriver  # lazy: only with a device

        return BindingsDriver(index)
    except ImportError:
        from .libcuda import LibcudaDriver

        return LibcudaDriver(index)
