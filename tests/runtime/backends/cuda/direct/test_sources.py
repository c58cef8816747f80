"""The kernels' sources: Python mirrors their structures, and each module compiles for each device."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.support.cuda_driver import COMPILER, HERE, compile_library
from tests.support.direct_kernels import image_of
from tests.support.load import patience_s

from teneral.runtime.backends.cuda.direct import arguments
from teneral.runtime.backends.cuda.direct.attention import shared_bytes
from teneral.runtime.backends.cuda.direct.sources import (
    FOLDER,
    HEAD_DIMS,
    LATENT_DIM,
    NAMES,
    KernelModule,
    attention_module,
)
from teneral.runtime.errors import ModelError
from teneral.runtime.tensors import DType

STRUCTURES = {
    name: kind
    for name, kind in vars(arguments).items()
    if isinstance(kind, type) and issubclass(kind, ctypes.Structure)
}
KINDS = {"u32": ctypes.c_uint32, "i64": ctypes.c_int64, "float": ctypes.c_float, "double": ctypes.c_double}


def declared(name: str) -> list[tuple[str, type]]:
    """The fields of a structure in the sources."""
    text = "".join(path.read_text() for path in sorted(FOLDER.glob("*.cuh")))
    (body,) = re.findall(rf"^struct {name} \{{.*?\n(.*?)^\}};", text, re.MULTILINE | re.DOTALL)
    fields: list[tuple[str, type]] = []
    for line in re.sub(r"//.*", "", body).split(";"):
        match = re.fullmatch(r"\s*(?:const )?(\w+)(\*?) ([\w, ]+)\s*", line)
        if match is None:
            assert not line.strip(), line
            continue
        kind = ctypes.c_uint64 if match[2] else KINDS.get(match[1]) or STRUCTURES[match[1]]
        fields += [(field.strip(), kind) for field in match[3].split(",")]
    return fields


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_are_those_of_the_sources(name: str) -> None:
    assert list(STRUCTURES[name]._fields_) == declared(name)


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_structures_have_the_compilers_sizes(tmp_path: Path) -> None:
    for module, kernel, kind in (
        ("rows", "place_heads", arguments.PlaceHeads),
        ("rows", "embed", arguments.Embed),
        ("rows", "norm_rows", arguments.NormRows),
        ("rows", "add_rows", arguments.AddRows),
        ("rows", "scale_logits", arguments.ScaleLogits),
        ("rows", "gate", arguments.Gate),
        ("rows", "pool_rows", arguments.PoolRows),
        ("rows", "adapter_low", arguments.Adapt),
        ("rows", "place_latents", arguments.PlaceLatents),
        ("latent", "absorb_queries", arguments.AbsorbQueries),
        ("latent", "latent_8", arguments.HeadProduct),
        ("latent", "transpose_matrix", arguments.TransposeMatrix),
        ("product_float", "product_float_8", arguments.Product),
        ("experts_float", "experts_float_8", arguments.ExpertProduct),
        ("experts", "route", arguments.RouteExperts),
        ("experts", "group_pairs", arguments.GroupPairs),
        ("experts", "add_experts", arguments.AddExperts),
        ("attention_32", "merge_splits", arguments.Attention),
        ("choose", "weigh", arguments.Choose),
        ("choose", "adjust", arguments.Adjust),
        ("blocks", "copy_blocks", arguments.CopyBlocks),
        ("blocks", "copy_tokens", arguments.CopyTokens),
    ):
        path = tmp_path / f"{kernel}.so"
        path.write_bytes(image_of(KernelModule(module, DType.BF16)))
        size = ctypes.c_uint32.in_dll(ctypes.CDLL(str(path)), f"{kernel}_bytes").value
        assert size == ctypes.sizeof(kind), kernel


@pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")
def test_a_block_of_attention_is_given_the_shared_memory_that_it_takes(tmp_path: Path) -> None:
    blocks = [*((dim, pairs) for dim in HEAD_DIMS for pairs in (16, 64)), (LATENT_DIM, 16)]
    sizes = {block: shared_bytes(*block) for block in blocks}
    rooms = "".join(
        f'extern "C" const unsigned room_{dim}_{pairs};'
        f"const unsigned room_{dim}_{pairs} = sizeof(Room<{dim}, {pairs // 16}>);\n"
        for dim, pairs in sizes
    )
    source = tmp_path / "rooms.cpp"
    text = KernelModule("attention_32", DType.BF16).text
    source.write_text(f'#include "{HERE / "on_cpu.h"}"\n{text}{rooms}', encoding="utf-8")
    library = ctypes.CDLL(str(compile_library(source, tmp_path / "rooms.so")))
    for (dim, pairs), size in sizes.items():
        assert ctypes.c_uint32.in_dll(library, f"room_{dim}_{pairs}").value == size
        assert size <= 99 << 10 or dim == 256  # of sm_86 and sm_89


def test_heads_have_the_module_of_the_next_size() -> None:
    assert [attention_module(dim) for dim in (16, 32, 80, 128, 256)] == [
        "attention_32", "attention_32", "attention_128", "attention_128", "attention_256",
    ]  # fmt: skip
    with pytest.raises(ModelError, match="heads of 512 numbers are too large"):
        attention_module(512)


# Registers that did not fit, in bytes; kernels that are not listed have none. Rarely used: heads of 256, and many rows
# of integers. For sm_80 ptxas takes 80 registers, so that one block more fits.
SPILLS = {
    **{"attention_256_64": 1200, "attention_256_int8_64": 1200},
    **{"attention_256_16": 60, "attention_128_int8_16": 70},
}
MAX_SHARED_BYTES = 48 << 10  # that is not asked for
DEVICES = [(80, DType.F16), (90, DType.BF16), (100, DType.BF16)]
# A module takes some seconds: each is compiled for two of the three, which neighbours in the list take in turn.
IN_TURN = [(name, *DEVICES[(n + k) % 3]) for n, name in enumerate(NAMES) for k in (0, 1)]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
@pytest.mark.parametrize(("name", "architecture", "dtype"), IN_TURN)
def test_modules_compile_for_devices_without_spills(
    name: str, architecture: int, dtype: DType, tmp_path: Path
) -> None:
    source = tmp_path / f"{name}.cu"
    source.write_text(KernelModule(name, dtype).text, encoding="utf-8")
    command = ["nvcc", "-std=c++17", f"-arch=sm_{architecture}", "-cubin", "-Xptxas", "-v"]
    done = subprocess.run(
        [*command, "-o", tmp_path / "out.cubin", source],
        capture_output=True, text=True, timeout=patience_s(100),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = re.findall(
        r"properties for (\w+)\s+\d+ bytes stack frame, (\d+) bytes spill stores.*?(?:(\d+) bytes smem)?\n",
        done.stderr,
    )
    assert report
    for kernel, spilled, shared in report:
        allowed = SPILLS.get(kernel, 500 if kernel.endswith("_many") else 64)
        assert int(spilled) <= allowed, kernel
        assert int(shared or 0) <= MAX_SHARED_BYTES, kernel
