"""Cubins are found by what they were made of, made where they are missing, and kept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.load import patience_s

from teneral.loader.errors import LoadError
from teneral.runtime.backends.cuda.direct import compile as compiling
from teneral.runtime.backends.cuda.direct.compile import CompiledKernels, compile_module, cubin_name
from teneral.runtime.backends.cuda.direct.sources import ROWS, KernelModule
from teneral.runtime.tensors import DType

MODULE = KernelModule(ROWS, DType.BF16)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[KernelModule, int]]:
    """The modules that were compiled, which are made of nothing."""
    made: list[tuple[KernelModule, int]] = []

    def compile_nothing(module: KernelModule, architecture: int) -> bytes:
        made.append((module, architecture))
        return b"cubin"

    monkeypatch.setattr(compiling, "compile_module", compile_nothing)
    return made


def test_a_module_is_compiled_once_and_kept(compiled: list[object], tmp_path: Path) -> None:
    folders = [tmp_path / "image", tmp_path / "cache"]
    assert CompiledKernels(90, folders).image(MODULE) == b"cubin"
    assert [path.name for path in folders[1].iterdir()] == [cubin_name(MODULE, 90)]
    assert CompiledKernels(90, folders).image(MODULE) == b"cubin"
    assert compiled == [(MODULE, 90)]


def test_a_device_takes_cubins_of_earlier_minor_versions_alone(
    compiled: list[object], tmp_path: Path
) -> None:
    (tmp_path / cubin_name(MODULE, 80)).write_bytes(b"for 8.0")
    assert CompiledKernels(89, [tmp_path]).image(MODULE) == b"for 8.0"
    assert compiled == []
    assert CompiledKernels(90, [tmp_path]).image(MODULE) == b"cubin"


def test_what_cannot_be_kept_is_used_anyway(compiled: list[object], tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert CompiledKernels(90, [tmp_path / "file"]).image(MODULE) == b"cubin"
    assert CompiledKernels(90, []).image(MODULE) == b"cubin"
    assert len(compiled) == 2


def test_names_tell_modules_dtypes_and_architectures_apart() -> None:
    names = {
        cubin_name(KernelModule(name, dtype), architecture)
        for name in ("rows", "choose")
        for dtype in (DType.BF16, DType.F16)
        for architecture in (80, 90)
    }
    assert len(names) == 8


@pytest.mark.slow
def test_nvrtc_compiles_for_each_device(tmp_path: Path) -> None:
    pytest.importorskip("cupy")
    for architecture in (80, 90, 100):
        assert compile_module(MODULE, architecture)[:4] == b"\x7fELF"
    with pytest.raises(LoadError, match=r"rows do not compile for sm_11: .*\n  Compile them where NVRTC is"):
        compile_module(MODULE, 11)


COMPILE_IN_THREADS = """
from concurrent.futures import ThreadPoolExecutor
from teneral.runtime.backends.cuda.direct.compile import compile_module
from teneral.runtime.backends.cuda.direct.sources import CHOOSE, ROWS, KernelModule
from teneral.runtime.tensors import DType
with ThreadPoolExecutor(2) as pool:
    for cubin in pool.map(lambda name: compile_module(KernelModule(name, DType.BF16), 80), [ROWS, CHOOSE]):
        assert cubin[:4] == bytes([0x7F]) + b"ELF"
"""


@pytest.mark.slow
def test_the_first_threads_that_compile_find_nvrtc_whole() -> None:
    """In a process of its own: CuPy loads NVRTC once, its builtins a moment later."""
    pytest.importorskip("cupy")
    subprocess.run([sys.executable, "-c", COMPILE_IN_THREADS], check=True, timeout=patience_s(120))
