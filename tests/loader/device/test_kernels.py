"""The kernels' source: it compiles for every GPU that is meant, and on a CPU it gives the decoder's bits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import zstandard
from tests.support.device_encodings import COUNTS, FLOATS, OTHERS
from tests.support.device_parts import CodedTensors, code_tensors, every_word, weights_like
from tests.support.image_programs import run_launch
from tests.support.kernels_on_cpu import KernelsOnCpu, aligned_zeros, compiler

from teneral.loader.device.image import (
    DRAFT_KERNEL,
    GENERAL_KERNELS,
    KERNELS,
    REFINE_KERNEL,
    plan_image,
    recipe_for,
    slab_starts,
)
from teneral.loader.device.sink import fill_image
from teneral.loader.errors import LoadError
from teneral.loader.format.manifest import DTYPE_BITS, FRAME_ELEMENTS, Encoding, Tier

GUARD = 0xA5


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelsOnCpu:
    if compiler() is None:
        pytest.skip("there is no C++ compiler to run the kernels' source on the CPU with")
    return KernelsOnCpu(tmp_path_factory.mktemp("kernels"))


def place_all(coded: CodedTensors, upto: Tier, run: object) -> np.ndarray:
    """The weights after all parts up to that tier, by images whose launches `run` does; a guard stands behind them."""
    starts, weights_bytes = slab_starts(coded.manifest.groups)
    weights = aligned_zeros(weights_bytes + 64)
    weights[weights_bytes:] = GUARD
    for part, stored in zip(coded.manifest.parts, coded.stored, strict=True):
        if part.tier > upto:
            continue
        plan = plan_image(coded.manifest, part, starts)
        image = aligned_zeros(plan.size_bytes)
        image[:] = GUARD
        fill_image(plan, coded.manifest, part, starts, memoryview(stored), image.data)
        for launch in plan.launches:
            run(launch, image, weights)
        for copy in plan.copies:
            data = image[copy.image_bytes : copy.image_bytes + copy.size_bytes]
            weights[copy.weights_bytes : copy.weights_bytes + copy.size_bytes] = data
    assert (weights[weights_bytes:] == GUARD).all(), "something wrote behind the weights"
    return weights[:weights_bytes]


def agree(kernels: KernelsOnCpu, coded: CodedTensors) -> None:
    for upto in Tier:
        expected = coded.expected(upto)
        assert np.array_equal(place_all(coded, upto, kernels.run), expected), f"kernels, up to {upto.name}"
        assert np.array_equal(place_all(coded, upto, run_launch), expected), f"numpy, up to {upto.name}"
    tensor = coded.manifest.tensors[0]
    end = tensor.offset_bytes + tensor.size_bytes
    assert (
        coded.expected(Tier.REFINE)[tensor.offset_bytes : end].tobytes()
        == coded.contents[tensor.name].tobytes()
    )


@pytest.mark.parametrize(("dtype", "encoding"), FLOATS)
def test_every_split_of_a_float_is_merged_as_the_decoder_does_it(
    kernels: KernelsOnCpu, dtype: str, encoding: str
) -> None:
    # The last bits, whole frames, and what is left of one.
    for count in (FRAME_ELEMENTS + 4099, 13):
        agree(kernels, code_tensors({"w": (dtype, encoding, weights_like(dtype, count))}))


@pytest.mark.parametrize(("dtype", "encoding"), OTHERS)
def test_what_is_no_split_float_is_merged_or_copied(kernels: KernelsOnCpu, dtype: str, encoding: str) -> None:
    agree(kernels, code_tensors({"w": (dtype, encoding, weights_like(dtype, FRAME_ELEMENTS + 4099))}))


@pytest.mark.parametrize("count", COUNTS)
def test_the_default_encoding_is_merged_at_every_length(kernels: KernelsOnCpu, count: int) -> None:
    agree(kernels, code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", count))}))


@pytest.mark.parametrize(("dtype", "encoding"), [("BF16", "bf16.3"), ("BF16", "bf16.1.4"), ("F16", "f16.3")])
def test_every_bit_pattern_comes_back(kernels: KernelsOnCpu, dtype: str, encoding: str) -> None:
    """Infinities, all NaNs, both zeros and the subnormal numbers, in a whole frame and in a short one."""
    words = np.concatenate([every_word(), every_word()[: 2 * 40_001]])
    agree(kernels, code_tensors({"w": (dtype, encoding, words)}))


def test_a_part_of_many_tensors_is_placed_whole(kernels: KernelsOnCpu) -> None:
    """Several recipes, tensors that are copied between them, odd places in the slab, segments that are cut."""
    tensors = {
        f"{name}{number}": (dtype, encoding, weights_like(dtype, 70_001 + 301 * number, number))
        for number in range(2)
        for name, dtype, encoding in (
            ("q", "BF16", "bf16.3"),
            ("norm", "BF16", "whole"),
            ("scales", "F32", "f32.7"),
            ("codes", "I8", "bytes"),
            ("steps", "I16", "bytes"),
        )
    }
    agree(kernels, code_tensors(tensors, cut_at=FRAME_ELEMENTS))


def test_a_part_may_be_applied_again(kernels: KernelsOnCpu) -> None:
    """A load that fetches a part twice must not end with other weights: bits are assigned, not added."""
    coded = code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", FRAME_ELEMENTS + 77))})

    def twice(launch: object, image: np.ndarray, weights: np.ndarray) -> None:
        kernels.run(launch, image, weights)
        kernels.run(launch, image, weights)

    assert np.array_equal(place_all(coded, Tier.REFINE, twice), coded.expected(Tier.REFINE))


@pytest.mark.parametrize("grid", [(1, 1), (7, 2), (40, 5)])
def test_the_grid_changes_nothing(kernels: KernelsOnCpu, grid: tuple[int, int]) -> None:
    words, others = weights_like("BF16", 2 * FRAME_ELEMENTS + 77), weights_like("F32", 70_000)
    coded = code_tensors({"w": ("BF16", "bf16.3", words), "x": ("F32", "f32.7", others)})
    placed = place_all(coded, Tier.REFINE, lambda *given: kernels.run(*given, grid=grid))
    assert np.array_equal(placed, coded.expected(Tier.REFINE))


def test_the_quick_kernels_do_what_the_general_one_does(kernels: KernelsOnCpu) -> None:
    coded = code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", 2 * FRAME_ELEMENTS + 77))})
    general = place_all(coded, Tier.REFINE, lambda *given: kernels.run(*given, kernel=GENERAL_KERNELS[2]))
    assert np.array_equal(general, coded.expected(Tier.REFINE))


def test_the_quick_kernels_are_taken_for_what_they_do() -> None:
    def kernel_of(name: str, tier: Tier, element_bytes: int = 2) -> str:
        encoding = Encoding.find(name)
        assert encoding is not None
        return recipe_for(encoding, tier, element_bytes).kernel

    assert kernel_of("bf16.3", Tier.DRAFT) == DRAFT_KERNEL
    assert kernel_of("bf16.3", Tier.REFINE) == kernel_of("bf16.1.3", Tier.REFINE) == REFINE_KERNEL
    assert kernel_of("f16.6", Tier.REFINE) == REFINE_KERNEL  # 4 bits of a word, whatever the word means
    assert kernel_of("bf16.1.3", Tier.SKETCH) == kernel_of("bf16.4", Tier.REFINE) == GENERAL_KERNELS[2]
    assert kernel_of("f32.7", Tier.DRAFT, 4) == GENERAL_KERNELS[4]


def test_a_decompressor_gets_each_frame_s_place_and_destination(kernels: KernelsOnCpu) -> None:
    coded = code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", 3 * FRAME_ELEMENTS + 77))})
    part, (starts, _) = coded.manifest.parts[0], slab_starts(coded.manifest.groups)
    plan = plan_image(coded.manifest, part, starts, coded=True)
    image = aligned_zeros(plan.size_bytes)
    fill_image(plan, coded.manifest, part, starts, memoryview(coded.stored[0]), image.data)
    assert plan.chunks is not None
    begins, sizes, outs, out_sizes = kernels.resolve(image, plan.chunks.table_bytes, plan.chunks.num)
    exponents = np.empty(0, np.uint8)
    for begin, size, out, out_size in zip(begins, sizes, outs, out_sizes, strict=True):
        at = int(begin) - image.ctypes.data
        assert at % 8 == 0
        content = zstandard.ZstdDecompressor().decompress(image[at : at + int(size)].tobytes())
        assert int(out) - image.ctypes.data == plan.planes[0][0].offset_bytes + exponents.size
        assert len(content) == out_size
        exponents = np.concatenate([exponents, np.frombuffer(content, np.uint8)])
    words = coded.contents["w"].view("<u2")
    assert np.array_equal(exponents, (words >> 7 & 0xFF).astype(np.uint8))


def test_every_encoding_takes_all_bits_of_its_words_exactly_once() -> None:
    for dtype, name in [*FLOATS, *OTHERS]:
        encoding = Encoding.find(name)
        assert encoding is not None
        if encoding.is_whole or DTYPE_BITS[dtype] < 16:
            continue
        taken = 0
        for tier in encoding.tiers:
            recipe = recipe_for(encoding, tier, DTYPE_BITS[dtype] // 8)
            for plane, (bits, up) in enumerate(zip(recipe.bits, recipe.ups, strict=True)):
                is_sign = plane == recipe.sign_plane
                is_exponent = dtype == "F16" and tier is encoding.tiers[0] and plane == 0 and name != "bytes"
                mask = (1 << (5 if is_exponent else bits - is_sign)) - 1 << up | is_sign << recipe.sign_up
                assert taken & mask == 0, f"{name}: {tier.name}'s plane {plane} takes bits that others have"
                taken |= mask
        assert taken == (1 << DTYPE_BITS[dtype]) - 1, name


def test_a_compile_error_has_the_compilers_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed, so that nothing can be compiled for a GPU")
    from teneral.loader.device import compile as compiling

    wrong = tmp_path / "merge.cu"
    wrong.write_text("this is no kernel;")
    monkeypatch.setattr(compiling, "SOURCES", (wrong,))
    with pytest.raises(LoadError, match=r"sm_90(.|\n)*this is no kernel"):
        compiling.compile_kernels(90)


@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_kernels_compile_for_every_gpu_that_is_meant(architecture: int, tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="CuPy is not installed, so that nothing can be compiled for a GPU")
    from teneral.loader.device.compile import compile_kernels, find_cubin, keep_cubin

    cubin = compile_kernels(architecture)
    assert cubin[:4] == b"\x7fELF"
    assert all(
        name.encode() in cubin
        for name in (*KERNELS, "resolve_chunks", "copy_if", "blake3_chunks", "blake3_root", "huf_frames")
    )
    assert find_cubin(architecture, [tmp_path]) is None
    path = keep_cubin(architecture, cubin, tmp_path)
    assert find_cubin(architecture, [tmp_path]) == find_cubin(architecture + 6, [tmp_path]) == path
    assert find_cubin(architecture - 10, [tmp_path]) is None
