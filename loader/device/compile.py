"""Compiled kernels: made of their source by NVRTC, without a device, for an architecture; kept by
what they depend on.

    python -m teneral.loader.device.compile FOLDER [ARCHITECTURE ...]

A program for an image's build: it leaves a cubin for each architecture (90 is Hopper's) in the
folder, which the server is then given (`kernel_dir`). Their names carry a digest of the source and
of the compiler's options, so that a cubin of other kernels is never taken. Without one, a server
compiles when it starts, during the fetch, which takes some tenths of a second, and leaves what it
made where the next one finds it.

A cubin runs on its own architecture and on later minor versions of it: on 9.0 one for 90, on 8.9
one for 80.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from ..errors import LoadError

# One program: each goes on where the one before ends.
SOURCES = tuple(
    Path(__file__).with_name("kernels") / name for name in ("blake3.cu", "huf_frames.cu", "merge.cu")
)
OPTIONS = ("--std=c++17", "--restrict")
USUAL_ARCHITECTURES = (80, 90, 100)
# CuPy loads NVRTC at the first call of any thread, then the library of its builtins: no other may compile in between.
_LOADING_NVRTC = threading.Lock()


def program_text() -> str:
    """All kernels' source; the compiler's messages name the files."""
    return "".join(f'#line 1 "{path.name}"\n{path.read_text(encoding="ascii")}' for path in SOURCES)


def cubin_name(architecture: int) -> str:
    """The file of compiled kernels for 10 · major + minor of a compute capability."""
    what = program_text().encode() + repr(OPTIONS).encode()
    return f"loader-{hashlib.sha256(what).hexdigest()[:16]}-sm{architecture}.cubin"


def compile_kernels(architecture: int) -> bytes:
    """The cubin for an architecture; raises the errors of `compile_text`."""
    return compile_text(
        "the loader's kernels", program_text(), OPTIONS, architecture, by="teneral.loader.device.compile"
    )


def compile_text(what: str, text: str, options: Sequence[str], architecture: int, *, by: str) -> bytes:
    """The cubin of a source text for an architecture. Needs NVRTC, and no device. Raises `LoadError` with
    the compiler's own words, and with `by`, the module that compiles ahead.
    """
    made, log = None, ""
    try:
        from cupy.cuda import nvrtc  # lazy: some hundred ms, only for compiling

        with _LOADING_NVRTC:
            nvrtc.getVersion()
        made = nvrtc.createProgram(text, "kernels.cu", (), ())
        try:
            nvrtc.compileProgram(made, (*options, f"--gpu-architecture=sm_{architecture}"))
        except nvrtc.NVRTCError:
            log = nvrtc.getProgramLog(made)
            raise
        cubin: bytes = nvrtc.getCUBIN(made)
    except (ImportError, RuntimeError) as error:  # the compiler's own errors are such, and its absence is one
        raise LoadError(
            f"{what} do not compile for sm_{architecture}: {error} {log}".rstrip(),
            hint=f"Compile them where NVRTC is, with `python -m {by}`, and name their folder with --kernel-dir.",
        ) from error
    finally:
        if made is not None:
            nvrtc.destroyProgram(made)
    return cubin


def find_cubin(architecture: int, folders: Sequence[Path]) -> Path | None:
    """The first that runs there: for that very architecture, or for an earlier minor version of it."""
    for each in that_run_on(architecture):
        for folder in folders:
            if (folder / cubin_name(each)).is_file():
                return folder / cubin_name(each)
    return None


def that_run_on(architecture: int) -> range:
    """The architectures whose cubins run on this one: itself, then earlier minor versions."""
    return range(architecture, architecture // 10 * 10 - 1, -1)


def keep_cubin(architecture: int, cubin: bytes, folder: Path) -> Path:
    """Write it, whole or not at all; several processes may write the same. Raises `OSError` where
    it cannot be written.
    """
    return keep(cubin, folder / cubin_name(architecture))


def keep(cubin: bytes, path: Path) -> Path:
    """Write it to this path, likewise."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".{os.getpid()}")
    part.write_bytes(cubin)
    part.replace(path)
    return path


def kernel_folders(kernel_dir: str | None) -> list[Path]:
    """The folders of compiled kernels: that of the setting, and the user's cache, where new ones are kept."""
    folders = [Path(kernel_dir)] if kernel_dir else []
    with suppress(RuntimeError):  # a user without a home: kernels are then compiled each time
        folders.append(Path.home() / ".cache" / "teneral" / "kernels")
    return folders


def cubin_for(architecture: int, folders: Sequence[Path]) -> tuple[Path, bool]:
    """A file with the kernels, and whether they had to be compiled: then they are kept in the last
    of the folders that can be written, or in a temporary one. Raises `LoadError`.
    """
    found = find_cubin(architecture, folders)
    if found is not None:
        return found, False
    cubin = compile_kernels(architecture)
    for folder in reversed(folders):
        try:
            return keep_cubin(architecture, cubin, folder), True
        except OSError:
            continue
    import tempfile  # few get here

    return keep_cubin(architecture, cubin, Path(tempfile.mkdtemp(prefix="teneral-kernels-"))), True


def main() -> None:
    """Compile for what the arguments name; print the files."""
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    folder, *architectures = sys.argv[1:]
    for architecture in map(int, architectures or USUAL_ARCHITECTURES):
        path = keep_cubin(architecture, compile_kernels(architecture), Path(folder))
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
