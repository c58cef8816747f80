"""Compiled kernels of the direct path: made of their sources by NVRTC, without a device, and kept by
what they depend on.

    python -m teneral.runtime.backends.cuda.direct.compile FOLDER [ARCHITECTURE ...]

leaves a cubin of each module, dtype and architecture (90 is Hopper's) in the folder, which a server is
given by `--kernel-dir`. Names carry a digest of the source, so that a cubin of other kernels is never
taken. Without one, a module is compiled when a model needs it, some seconds, and kept in the last
folder that can be written.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .....loader.device.compile import USUAL_ARCHITECTURES, compile_text, keep, that_run_on
from .sources import DTYPES, NAMES, KernelModule

OPTIONS = ("--std=c++17",)
MAX_CUBIN_BYTES = 16 << 20


def cubin_name(module: KernelModule, architecture: int) -> str:
    """The file of the compiled module, for 10 · major + minor of a compute capability."""
    digest = hashlib.sha256(f"{module.text}{OPTIONS!r}".encode()).hexdigest()[:16]
    return f"direct-{module.name}-{module.dtype.value.lower()}-{digest}-sm{architecture}.cubin"


class CompiledKernels:
    """A `KernelSource` for devices of one architecture."""

    def __init__(self, architecture: int, folders: Sequence[Path]) -> None:
        """`folders` are searched in order; what is compiled is kept in the last that can be written."""
        self._architecture = architecture
        self._folders = folders

    def image(self, module: KernelModule) -> bytes:
        for path in self._candidates(module):
            if path.is_file() and path.stat().st_size <= MAX_CUBIN_BYTES:
                return path.read_bytes()
        cubin = compile_module(module, self._architecture)
        for folder in reversed(self._folders):
            try:
                keep(cubin, folder / cubin_name(module, self._architecture))
            except OSError:
                continue
            break
        return cubin

    def _candidates(self, module: KernelModule) -> Iterator[Path]:
        """For this very architecture, then for earlier minor versions, which run on it."""
        for architecture in that_run_on(self._architecture):
            for folder in self._folders:
                yield folder / cubin_name(module, architecture)


def compile_module(module: KernelModule, architecture: int) -> bytes:
    """The cubin for an architecture; raises the errors of `compile_text`."""
    program = "teneral.runtime.backends.cuda.direct.compile"
    return compile_text(f"the kernels of {module.name}", module.text, OPTIONS, architecture, by=program)


def main() -> None:
    """Compile all modules for the architectures that the arguments name; print the files."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    folder, *numbers = sys.argv[1:]
    wanted = [
        (KernelModule(name, dtype), architecture)
        for architecture in (map(int, numbers) if numbers else USUAL_ARCHITECTURES)
        for dtype in DTYPES
        for name in NAMES
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for each, cubin in zip(wanted, pool.map(lambda each: compile_module(*each), wanted), strict=True):
            path = Path(folder) / cubin_name(*each)
            keep(cubin, path)
            sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
