"""The kernels' very source, compiled for this machine's CPU behind a small header, and run block by block.

Accesses that are not aligned as a GPU needs them end the
process: the compiler is asked to check each.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tests.support.load import patience_s

from teneral.loader.device.compile import program_text
from teneral.loader.device.image import Launch

HASHED_BYTES = 128 << 10  # by a block

HEADER = Path(__file__).with_suffix(".hpp")
RUNNER = """
typedef void (*Merge)(const u8*, u32, u32, u8*, const u32*);
extern "C" void run_resolve(u32 grid_x, u8* image, u32 table, u32 num, u64* a, u64* b, u64* c, u64* d) {
  every_thread(grid_x, 1, THREADS, [=] { resolve_chunks(image, table, num, a, b, c, d); });
}
extern "C" void run_merge(u32 grid_x, u32 grid_y, Merge kernel, const u8* image, u32 table, u32 num, u8* weights,
                          const u32* wrong) {
  every_thread(grid_x, grid_y, THREADS, [=] { kernel(image, table, num, weights, wrong); });
}
extern "C" void run_blake3_chunks(u32 grid, u32 reversed, const u8* image, u32 part_bytes, u32* nodes) {
  every_lane(grid, HASH_THREADS, reversed, [=] { blake3_chunks(image, part_bytes, nodes); });
}
extern "C" void run_blake3_root(u32 reversed, u32* nodes, u32 part_bytes, const u32* digest, u32* wrong) {
  every_lane(1, ROOT_THREADS, reversed, [=] { blake3_root(nodes, part_bytes, digest, wrong); });
}
extern "C" void run_huf_frames(u32 grid, u32 reversed, u8* image, u32 table, u32 num, u32* wrong) {
  every_lane(grid, LANES, reversed, [=] { huf_frames(image, table, num, wrong); });
}
"""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


class KernelsOnCpu:
    """The kernels as a library of this process."""

    def __init__(self, folder: Path) -> None:
        """Compiles, a second or two. `folder` is for the files."""
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        header = f'#include "{HEADER}"\n'
        source.write_text(f'{header}{program_text()}#line 1 "runner"\n{RUNNER}', encoding="ascii")
        program = compiler()
        assert program is not None
        checks = [
            "-fsanitize=alignment,shift",
            "-fno-sanitize-recover=all",
            "-fsanitize-undefined-trap-on-error",
        ]
        options = [
            "-std=c++17",
            "-O1",
            "-fno-strict-aliasing",
            "-Wall",
            "-Wno-unknown-pragmas",
            "-Werror",
            *checks,
        ]
        subprocess.run(
            [program, *options, "-shared", "-fPIC", "-o", library, source],
            check=True,
            timeout=patience_s(100),
        )
        self._library = ctypes.CDLL(str(library))

    def run(
        self,
        launch: Launch,
        image: npt.NDArray[np.uint8],
        weights: npt.NDArray[np.uint8],
        *,
        grid: tuple[int, int] = (4, 3),
        kernel: str | None = None,
        wrong: int = 0,
    ) -> None:
        """Both arrays must begin at a multiple of 64 bytes, as device memory does."""
        word = np.array([wrong], np.uint32)
        at = image.ctypes.data, weights.ctypes.data, word.ctypes.data
        self.run_at(launch, *at, grid=grid, kernel=kernel)

    def run_at(
        self,
        launch: Launch,
        image: int,
        weights: int,
        wrong: int,
        *,
        grid: tuple[int, int],
        kernel: str | None = None,
    ) -> None:
        """The same, by addresses; that of `wrong` may be 0."""
        self._library.run_merge(
            *map(ctypes.c_uint, grid),
            getattr(self._library, kernel or launch.kernel),
            ctypes.c_void_p(image),
            ctypes.c_uint(launch.table_bytes),
            ctypes.c_uint(launch.num_frames),
            ctypes.c_void_p(weights),
            ctypes.c_void_p(wrong),
        )

    def hash_at(
        self, image: int, part_bytes: int, digest: int, nodes: int, wrong: int, *, reversed: bool = False
    ) -> None:
        """Both kernels of blake3.cu, by addresses."""
        self.hash_chunks_at(
            -(-max(1, part_bytes) // HASHED_BYTES), image, part_bytes, nodes, reversed=reversed
        )
        self.hash_root_at(nodes, part_bytes, digest, wrong, reversed=reversed)

    def hash_chunks_at(
        self, grid: int, image: int, part_bytes: int, nodes: int, *, reversed: bool = False
    ) -> None:
        self._library.run_blake3_chunks(
            *map(ctypes.c_uint, (grid, reversed)),
            ctypes.c_void_p(image),
            ctypes.c_uint(part_bytes),
            ctypes.c_void_p(nodes),
        )

    def hash_root_at(
        self, nodes: int, part_bytes: int, digest: int, wrong: int, *, reversed: bool = False
    ) -> None:
        self._library.run_blake3_root(
            ctypes.c_uint(reversed),
            ctypes.c_void_p(nodes),
            ctypes.c_uint(part_bytes),
            *map(ctypes.c_void_p, (digest, wrong)),
        )

    def decode_at(
        self, grid: int, image: int, table_bytes: int, num: int, wrong: int, *, reversed: bool = False
    ) -> None:
        """The kernel of huf_frames.cu, by addresses."""
        self._library.run_huf_frames(
            *map(ctypes.c_uint, (grid, reversed)),
            ctypes.c_void_p(image),
            *map(ctypes.c_uint, (table_bytes, num)),
            ctypes.c_void_p(wrong),
        )

    def resolve(
        self, image: npt.NDArray[np.uint8], table_bytes: int, num: int
    ) -> list[npt.NDArray[np.uint64]]:
        """The four arrays of a decompressor's input."""
        arrays = [np.zeros(num, np.uint64) for _ in range(4)]
        self.resolve_at(image.ctypes.data, table_bytes, num, *(array.ctypes.data for array in arrays))
        return arrays

    def resolve_at(self, image: int, table_bytes: int, num: int, *arrays: int) -> None:
        """The same, by addresses."""
        numbers = ctypes.c_uint(table_bytes), ctypes.c_uint(num)
        self._library.run_resolve(
            ctypes.c_uint(2), ctypes.c_void_p(image), *numbers, *map(ctypes.c_void_p, arrays)
        )


def aligned_zeros(size_bytes: int) -> npt.NDArray[np.uint8]:
    """Zeros at a multiple of 64 bytes."""
    data = np.zeros(size_bytes + 64, np.uint8)
    begin = -data.ctypes.data % 64
    return data[begin : begin + size_bytes]
