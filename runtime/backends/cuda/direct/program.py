"""Programs: the launches of a step, packed once and repeated as they are or as a graph.

KernelParameters are addresses that never change, so a launch sets nothing. What varies between steps lies
behind those addresses; grids are made for a bucket of rows, and blocks without rows end at once.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Protocol

from .....loader.device.driver.base import Driver, KernelLaunch, KernelParameters
from ....tensors import DType
from .sources import KernelModule

Grid = tuple[int, ...]
# A step that came so often is worth a graph.
MIN_GRAPH_STEPS = 8


class KernelSource(Protocol):
    """A provider of binaries for one device."""

    def image(self, module: KernelModule) -> bytes:
        """The compiled module. May take seconds. Raises `LoadError` where it cannot be compiled."""


class Kernels:
    """The kernels of one device and dtype, loaded as they are first asked for. Not thread-safe."""

    def __init__(self, driver: Driver, source: KernelSource, dtype: DType) -> None:
        self.driver = driver
        self.dtype = dtype
        self._source = source
        self._modules: dict[str, int] = {}
        self._functions: dict[str, int] = {}

    def load(self, modules: Iterable[str]) -> None:
        """Load these modules now: `sources.NAMES`."""
        for name in modules:
            if name not in self._modules:
                image = self._source.image(KernelModule(name, self.dtype))
                self._modules[name] = self.driver.module(image)

    def launch(
        self,
        module: str,
        kernel: str,
        grid: Grid,
        block: int,
        arguments: ctypes.Structure,
        *,
        shared_bytes: int = 0,
    ) -> KernelLaunch:
        """A launch of a module's kernel. Raises `CudaError`."""
        function = self._functions.get(kernel)
        if function is None:
            self.load([module])
            function = self.driver.function(self._modules[module], kernel, shared_bytes=shared_bytes)
            self._functions[kernel] = function
        x, y, z = (*grid, 1, 1)[:3]
        return KernelLaunch(function, (x, y, z), block, shared_bytes, KernelParameters(arguments))


class Program:
    """Launches in stages, which run in order: those of the embeddings, of each layer, of the head."""

    def __init__(self, driver: Driver, stages: Iterable[Iterable[KernelLaunch]]) -> None:
        self._driver = driver
        self.stages = tuple(tuple(stage) for stage in stages)

    def launch(self, stream: int, first: int = 0, end: int | None = None) -> None:
        """KernelLaunch the stages [first, end)."""
        for stage in self.stages[first:end]:
            for launch in stage:
                self._driver.launch(launch, stream)

    def graph(self) -> Graph:
        """All stages as a graph. Nothing runs. Raises `CudaError`, which leaves the program usable."""
        return Graph(self._driver, [launch for stage in self.stages for launch in stage])


class Graph:
    """Launches that the device runs as one."""

    def __init__(self, driver: Driver, launches: list[KernelLaunch]) -> None:
        self._driver = driver
        self._handle: int | None = driver.graph(launches)
        self.num_launches = len(launches)

    def launch(self, stream: int) -> None:
        assert self._handle is not None, "the graph is closed"
        self._driver.launch_graph(self._handle, stream)

    def close(self) -> None:
        """Free it. Waits for nothing: the caller knows that it does not run. Idempotent."""
        if self._handle is not None:
            self._driver.free_graph(self._handle)
            self._handle = None
