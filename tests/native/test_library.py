"""The library for a processor: chosen by its features, checked against the declarations."""

from __future__ import annotations

import ctypes
import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.load import patience_s
from tests.support.native import SOFT_TILES, each_isa, loaded, path_of

from teneral.loader.errors import NativeLibraryError, UsageError
from teneral.loader.native.library import (
    VERSION,
    Library,
    choose_isa,
    cpu_features,
    open_library,
    prefers_fused_pairs,
    supported_isas,
    usable_isas,
)
from teneral.runtime.backends.native.products import LinearArgs, MatrixRecord

AVX2 = {"avx2", "fma", "f16c", "bmi2"}
AVX512 = {"avx512f", "avx512bw", "avx512dq", "avx512vl"}
AMX = {"avx512_bf16", "avx512_vnni", "avx512vbmi", "amx_tile", "amx_bf16", "amx_int8"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        (
            "x86_64",
            AVX2 | AVX512 | {"avx512_bf16", "avx512_vnni"},
            ["x86_64_v4_bf16", "x86_64_v4", "x86_64_v3"],
        ),
        (
            "x86_64",
            AVX2 | AVX512 | AMX,
            ["x86_64_amx", "x86_64_v4_bf16", "x86_64_v4", "x86_64_v3"],
        ),
        (
            "x86_64",
            AVX2 | AVX512 | AMX - {"amx_int8"},
            ["x86_64_v4_bf16", "x86_64_v4", "x86_64_v3"],
        ),
        ("x86_64", AVX2 | AVX512 | {"avx512_bf16"}, ["x86_64_v4", "x86_64_v3"]),
        ("x86_64", AVX2 | {"avx512f"}, ["x86_64_v3"]),
        ("x86_64", {"sse4_2", "avx"}, []),
        ("aarch64", {"asimd", "bf16", "i8mm"}, ["aarch64_bf16", "aarch64"]),
        ("aarch64", {"asimd"}, ["aarch64"]),
        ("riscv64", {"asimd", *AVX2}, []),
    ],
)
def test_a_processor_has_what_its_features_say(machine: str, features: set[str], expected: list[str]) -> None:
    assert supported_isas(machine, frozenset(features)) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "processor\t: 0\nflags\t\t: fpu avx2 fma\n\nprocessor\t: 1\nflags\t\t: other\n",
            {"fpu", "avx2", "fma"},
        ),
        ("Features\t: fp asimd bf16\nCPU implementer\t: 0x41\n", {"fp", "asimd", "bf16"}),
        ("", set()),
        ("nothing of the kind\n", set()),
    ],
)
def test_features_are_those_of_the_first_processor(text: str, expected: set[str]) -> None:
    assert cpu_features(text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: avx512_bf16\n", True),
        ("processor\t: 0\nvendor_id\t: AuthenticAMD\n\nvendor_id\t: GenuineIntel\n", False),
        ("CPU implementer\t: 0x41\n", False),
        ("", False),
    ],
)
def test_pairs_are_fused_on_intels_processors(text: str, expected: bool) -> None:
    assert prefers_fused_pairs(text) is expected


def test_the_best_is_chosen_and_a_lower_one_by_name() -> None:
    usable = ["x86_64_v4", "x86_64_v3"]
    assert choose_isa(None, usable) == "x86_64_v4"
    assert choose_isa("", usable) == "x86_64_v4"
    assert choose_isa("x86_64_v3", usable) == "x86_64_v3"
    assert choose_isa(None, []) is None


@pytest.mark.parametrize("named", ["x86_64_v4_bf16", "avx2", "../x86_64_v3"])
def test_one_that_cannot_be_used_is_refused_with_those_that_can(named: str) -> None:
    with pytest.raises(UsageError, match="x86_64_v4, x86_64_v3"):
        choose_isa(named, ["x86_64_v4", "x86_64_v3"])


@each_isa
def test_a_library_says_what_it_is(isa: str) -> None:
    library = loaded(isa)
    assert library.isa == isa
    library.check_struct("tn_matrix", MatrixRecord)
    library.check_struct("tn_linear_args", LinearArgs)


# Of the structs' sizes, as a library lists them.
SIZES_OF_VERSION = 4, "40d18b87eb56e48a"


@each_isa
def test_a_version_stands_for_the_sizes_of_all_structs(isa: str) -> None:
    sizes = "".join(f"{name} {size}\n" for name, size in loaded(isa).sizes.items())
    digest = hashlib.sha256(sizes.encode()).hexdigest()[:16]
    assert (VERSION, digest) == SIZES_OF_VERSION, (
        "structs of native/core.h have changed: raise TN_VERSION there and VERSION in loader/native/library.py, once "
        "between two releases, and put the new digest here"
    )


@each_isa
def test_a_struct_of_another_size_is_refused(isa: str) -> None:
    class Longer(ctypes.Structure):
        _fields_ = (*LinearArgs._fields_, ("more", ctypes.c_int64))

    with pytest.raises(NativeLibraryError, match="tn_linear_args"):
        loaded(isa).check_struct("tn_linear_args", Longer)
    linear = Library(path_of(isa)).functions.tn_linear
    assert linear(ctypes.byref(Longer(size=ctypes.sizeof(Longer)))) == 1


def test_a_file_that_is_no_library_is_an_error_with_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "teneral_x86_64_v3.so"
    path.write_bytes(b"no library")
    with pytest.raises(NativeLibraryError, match="TENERAL_ISA"):
        Library(str(path))


@each_isa
def test_the_environment_names_one(isa: str) -> None:
    if isa == SOFT_TILES:
        pytest.skip("it is not part of the package")
    program = "from teneral.loader.native.library import library; print(library().isa)"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "TENERAL_ISA": isa},
        capture_output=True,
        text=True,
        timeout=patience_s(60),
        check=True,
    )
    assert done.stdout.strip() == isa
    assert isa in usable_isas()


def test_importing_it_loads_nothing() -> None:
    program = """
import numpy, sys, threading
before = set(sys.modules)
import teneral.loader.native.library, teneral.runtime.backends.native.products
brought = {name for name in set(sys.modules) - before if not name.startswith("teneral")}
print(sorted(brought), "teneral_" in open("/proc/self/maps").read())
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=patience_s(60), check=True
    )
    assert done.stdout.strip() == "['__future__'] False"


def test_threads_that_ask_at_the_same_time_open_it_once() -> None:
    """Decoding threads and the backend, which sets the number of threads: a second opening would set it again."""
    program = """
import threading, time
from teneral.loader.native import library
start, opened = library.Library.start, []
def slow(self):
    opened.append(self.isa)
    time.sleep(0.2)
    return start(self)
library.Library.start = slow
threads = [threading.Thread(target=library.library) for _ in range(2)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(len(opened))
"""
    environment = {name: value for name, value in os.environ.items() if name != "TENERAL_ISA"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "TENERAL_ISA": usable_isas()[-1]},
        capture_output=True,
        text=True,
        timeout=patience_s(60),
        check=True,
    )
    assert done.stdout.strip() == "1"


def test_a_library_that_the_system_refuses_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hypervisor may show tiles that gVisor, or an older Linux, does not permit."""
    if len(usable_isas()) < 2:
        pytest.skip("this machine can use one library at most")
    best, second = usable_isas()[:2]
    start = Library.start
    monkeypatch.setattr(Library, "start", lambda self: self.isa != best and start(self))
    monkeypatch.delenv("TENERAL_ISA", raising=False)
    chosen = open_library()
    assert chosen is not None
    assert chosen.isa == second
    monkeypatch.setenv("TENERAL_ISA", best)
    with pytest.raises(UsageError, match=best):
        open_library()
