"""The build of the native core: a shared library for each instruction set, by one compiler call each.

`setup.py` calls it; `python build_native.py` builds in place, for a tree that is already installed. It needs nothing
but the standard library. Settings, from the environment:

- `TENERAL_CC`: the compiler's command. Otherwise the `ziglang` package where it is installed, else `cc`.
- `TENERAL_TARGET`: a triple of zig's, such as `aarch64-linux-gnu.2.28`, to build for another machine.

A library that does not compile is left out with a warning. Without any, weights can be neither decoded nor packed.
"""

from __future__ import annotations

import concurrent.futures
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
LIBRARY_DIR = Path("loader", "native", "lib")  # of the package
GLIBC = "2.28"  # the oldest that the libraries run on, where zig builds them

FLAGS = "-std=c17 -O3 -DNDEBUG -ffp-contract=off -fno-math-errno -fvisibility=hidden -shared -fPIC -s -Wall -Wextra"
_AVX2 = "-mavx2 -mfma -mf16c -mbmi2"
_AVX512 = f"{_AVX2} -mavx512f -mavx512bw -mavx512dq -mavx512vl"
_AVX512_BF16 = f"{_AVX512} -mavx512bf16 -mavx512vnni"
# Features, not processors' names: older compilers lack those.
ISA_FLAGS = {
    "x86_64": {
        "x86_64_v3": _AVX2,
        "x86_64_v4": _AVX512,
        "x86_64_v4_bf16": _AVX512_BF16,
        "x86_64_amx": f"{_AVX512_BF16} -mavx512vbmi -mamx-tile -mamx-bf16 -mamx-int8",
    },
    "aarch64": {"aarch64": "", "aarch64_bf16": "-mcpu=generic+bf16+i8mm"},
}
# The tiles of x86_64_amx in software, bit for bit: for tests, where the processor has none. Not in packages.
SOFT_TILES = ("x86_64_amx_soft", f"{_AVX512_BF16} -DTN_SOFT_TILES")


def target_machine() -> str:
    """`x86_64`, `aarch64`, or another machine's name, for which there are no libraries."""
    machine = os.environ.get("TENERAL_TARGET", "").partition("-")[0] or platform.machine()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(machine.lower(), machine)


def wheel_platform() -> str:
    """The platform tag of a wheel with libraries that zig built, or another compiler on this machine."""
    if _is_zig(find_compiler() or []):
        return f"manylinux_{GLIBC.replace('.', '_')}_{target_machine()}"
    return f"linux_{target_machine()}"


def find_compiler() -> list[str] | None:
    """The compiler's command; None where there is none."""
    if command := os.environ.get("TENERAL_CC"):
        return shlex.split(command)
    if importlib.util.find_spec("ziglang") is not None:
        return [sys.executable, "-m", "ziglang", "cc"]
    return ["cc"] if shutil.which("cc") else None


def build(folder: Path) -> list[Path]:
    """Compile all libraries for the target into `folder`, side by side; returns those that were built."""
    compiler, isas = find_compiler(), ISA_FLAGS.get(target_machine(), {})
    if not isas or sys.platform != "linux":
        _warn(f"no native core for {target_machine()}: weights can be neither decoded nor packed")
        return []
    if compiler is None:
        _warn(
            "no C compiler (TENERAL_CC, the ziglang package, cc): weights can be neither decoded nor packed"
        )
        return []
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        built = [
            path
            for path in pool.map(lambda isa: compile_library(compiler, isa, isas[isa], folder), isas)
            if path
        ]
    if not built:
        _warn("no native library could be built: weights can be neither decoded nor packed")
    return built


def compile_library(compiler: list[str], isa: str, flags: str, folder: Path) -> Path | None:
    """Compile the library for one instruction set; None, with a warning, where that fails."""
    path = folder / f"teneral_{isa}.so"
    sources = [str(source) for source in sorted((ROOT / "native").glob("*.c"))]
    target = os.environ.get("TENERAL_TARGET") or f"{target_machine()}-linux-gnu.{GLIBC}"
    command = [*compiler, *(["-target", target] if _is_zig(compiler) else []), *FLAGS.split()]
    command += [*flags.split(), f"-DTN_ISA={isa}", *sources, "-lpthread", "-lm"]
    with tempfile.TemporaryDirectory(dir=folder) as scratch:  # a running process may have the old one mapped
        made = Path(scratch, path.name)
        try:
            done = subprocess.run([*command, "-o", str(made)], capture_output=True, text=True, check=False)
        except OSError as error:
            _warn(f"{path.name} is left out: {error}")
            return None
        if done.returncode:
            _warn(f"{path.name} is left out: {shlex.join(command)} failed:\n{done.stderr[-4000:]}")
            return None
        if done.stderr:
            _warn(f"{path.name}: {done.stderr[-4000:]}")
        made.replace(path)
    return path


def _is_zig(compiler: list[str]) -> bool:
    return "ziglang" in compiler or Path(compiler[0]).name == "zig" if compiler else False


def _warn(text: str) -> None:
    print(f"build_native: {text}", file=sys.stderr)


if __name__ == "__main__":
    for path in build(ROOT / LIBRARY_DIR):
        print(f"{path.relative_to(ROOT)}: {path.stat().st_size / 1024:.0f} KiB")
