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

from .....loader.errors import LoadError
from .sources import DTYPES, NAMES, KernelModule

OPTIONS = ("--std=c++17",)
USUAL_ARCHITECTURES = (80, 90, 100)
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
        major = self._architecture // 10 * 10
        for minor in range(self._architecture % 10, -1, -1):
            for folder in self._folders:
                yield folder / cubin_name(module, major + minor)


def compile_module(module: KernelModule, architecture: int) -> bytes:
    """The cubin for an architecture. Needs NVRTC, and no device. Raises `LoadError` with the
    compiler's own words.
    """
    program, log = None, ""
    try:
        from cupy.cuda import nvrtc  # lazy: some hundred ms, only for compiling

        program = nvrtc.createProgram(module.text, f"{module.name}.cu", (), ())
        try:
            nvrtc.compileProgram(program, (*OPTIONS, f"--gpu-architecture=sm_{architecture}"))
        except nvrtc.NVRTCError:
            log = nvrtc.getProgramLog(program)
            raise
        cubin: bytes = nvrtc.getCUBIN(program)
    except (ImportError, RuntimeError) as error:  # the compiler's own errors are such
        raise LoadError(
            f"the kernels of {module.name} do not compile for sm_{architecture}: {error} {log}".rstrip(),
            hint="Compile them where NVRTC is, with `python -m teneral.runtime.backends.cuda.direct.compile`, and "
            "name their folder with --kernel-dir.",
        ) from error
    finally:
        if program is not None:
            nvrtc.destroyProgram(program)
    return cubin


def keep(cubin: bytes, path: Path) -> None:
    """Write it, whole or not at all; several processes may write the same. Raises `OSError`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(cubin)
    part.replace(path)


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
