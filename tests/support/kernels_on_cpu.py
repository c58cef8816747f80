"""The kernels' very source, compiled for this machine's CPU behind a small header, and run block by block.

`__global__` means nothing here, and threads are a loop. Accesses that are not aligned as a GPU needs them end the
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

from teneral.loader.device.compile import SOURCE
from teneral.loader.device.image import Launch

THREADS = 256

HEADER = """
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
static inline uint2 make_uint2(unsigned x, unsigned y) { return uint2{x, y}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return uint4{x, y, z, w}; }
struct Place { unsigned x, y, z; };
static Place threadIdx, blockIdx, blockDim, gridDim;
#define __global__
#define __device__
#define __launch_bounds__(n)
"""

RUNNER = """
typedef void (*Merge)(const unsigned char*, unsigned, unsigned, unsigned char*);
static void every_thread(unsigned grid_x, unsigned grid_y, void (*run)(void*), void* arguments) {
  gridDim = Place{grid_x, grid_y, 1};
  blockDim = Place{THREADS, 1, 1};
  for (blockIdx.y = 0; blockIdx.y < grid_y; blockIdx.y++)
    for (blockIdx.x = 0; blockIdx.x < grid_x; blockIdx.x++)
      for (threadIdx.x = 0; threadIdx.x < THREADS; threadIdx.x++) run(arguments);
}
struct Chunks { unsigned char* image; unsigned table, num; unsigned long long *a, *b, *c, *d; };
static void call_resolve(void* given) {
  Chunks* a = (Chunks*)given;
  resolve_chunks(a->image, a->table, a->num, a->a, a->b, a->c, a->d);
}
extern "C" void run_resolve(unsigned grid_x, unsigned char* image, unsigned table, unsigned num,
                            unsigned long long* a, unsigned long long* b, unsigned long long* c,
                            unsigned long long* d) {
  Chunks arguments = {image, table, num, a, b, c, d};
  every_thread(grid_x, 1, call_resolve, &arguments);
}
struct Arguments { Merge kernel; const unsigned char* image; unsigned table, num; unsigned char* weights; };
static void call(void* given) {
  Arguments* a = (Arguments*)given;
  a->kernel(a->image, a->table, a->num, a->weights);
}
extern "C" void run_merge(unsigned grid_x, unsigned grid_y, Merge kernel, const unsigned char* image, unsigned table,
                          unsigned num, unsigned char* weights) {
  Arguments arguments = {kernel, image, table, num, weights};
  every_thread(grid_x, grid_y, call, &arguments);
}
"""


def compiler() -> str | None:
    return shutil.which("g++") or shutil.which("clang++")


class KernelsOnCpu:
    """The kernels as a library of this process."""

    def __init__(self, folder: Path) -> None:
        """Compiles, a second or two. `folder` is for the files."""
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        source.write_text(HEADER + SOURCE.read_text(encoding="ascii") + RUNNER, encoding="ascii")
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
    ) -> None:
        """Both arrays must begin at a multiple of 64 bytes, as device memory does."""
        self.run_at(launch, image.ctypes.data, weights.ctypes.data, grid=grid, kernel=kernel)

    def run_at(
        self, launch: Launch, image: int, weights: int, *, grid: tuple[int, int], kernel: str | None = None
    ) -> None:
        """The same, by addresses."""
        self._library.run_merge(
            *map(ctypes.c_uint, grid),
            getattr(self._library, kernel or launch.kernel),
            ctypes.c_void_p(image),
            ctypes.c_uint(launch.table_bytes),
            ctypes.c_uint(launch.num_frames),
            ctypes.c_void_p(weights),
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
