"""Parts as they are stored become weights on a device: every encoding, by the kernels' source and by numpy. And
whatever bit of a part is flipped, no weight is changed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from tests.support.device_encodings import COUNTS, FLOATS, OTHERS
from tests.support.device_parts import CodedTensors, code_tensors, every_word, weights_like
from tests.support.image_programs import run_stored
from tests.support.kernels_on_cpu import KernelsOnCpu, aligned_zeros, compiler

from teneral.loader.device.image import slab_starts
from teneral.loader.device.stored import (
    DIGEST_DIFFERS,
    FRAME_DAMAGED,
    StoredImage,
    can_be_stored,
    max_tables_bytes,
    plan_plain,
    plan_stored,
    write_tables,
)
from teneral.loader.format.manifest import FRAME_ELEMENTS, Codec, Part, Tier

GUARD = 0xA5
Run = Callable[[StoredImage, np.ndarray, np.ndarray], int]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelsOnCpu:
    if compiler() is None:
        pytest.skip("there is no C++ compiler to run the kernels' source on the CPU with")
    return KernelsOnCpu(tmp_path_factory.mktemp("kernels"))


def by_kernels(kernels: KernelsOnCpu) -> Run:
    def run(image: StoredImage, memory: np.ndarray, weights: np.ndarray) -> int:
        at, wrong = memory.ctypes.data, memory.ctypes.data + image.wrong_begin
        kernels.hash_at(at, image.part_bytes, at + image.tables_begin, at + image.nodes_begin, wrong)
        kernels.decode_at(3, at, image.decode.table_bytes, image.decode.num_frames, wrong)
        for launch in image.launches:
            kernels.run_at(launch, at, weights.ctypes.data, wrong, grid=(4, 3))
        return int(memory[image.wrong_begin : image.wrong_begin + 4].view("<u4")[0])

    return run


def sent(coded: CodedTensors, part: Part, stored: bytes) -> tuple[StoredImage, np.ndarray] | None:
    """The image, and the device's memory with what crosses the link."""
    starts, _ = slab_starts(coded.manifest.groups)
    tables = aligned_zeros(max_tables_bytes(part))
    tables[:] = GUARD
    image = write_tables(coded.manifest, part, starts, memoryview(stored), tables.data)
    if image is None:
        return None
    assert image == plan_stored(coded.manifest, part)
    memory = aligned_zeros(image.size_bytes)
    memory[:] = GUARD
    memory[: image.part_bytes] = np.frombuffer(stored, np.uint8)
    memory[image.tables_begin : image.tables_begin + image.tables_bytes] = tables[: image.tables_bytes]
    return image, memory


def guarded_weights(coded: CodedTensors) -> np.ndarray:
    _, weights_bytes = slab_starts(coded.manifest.groups)
    weights = aligned_zeros(weights_bytes + 64)
    weights[weights_bytes:] = GUARD
    return weights


def agree(run: Run, coded: CodedTensors) -> None:
    """Tier by tier, the weights are those of the host's decoder."""
    weights = guarded_weights(coded)
    for part, stored in zip(coded.manifest.parts, coded.stored, strict=True):
        assert can_be_stored(coded.manifest, part)
        made = sent(coded, part, stored)
        assert made is not None
        image, memory = made
        part_before = memory[: image.part_bytes].copy()
        assert run(image, memory, weights) == 0
        assert np.array_equal(memory[: image.part_bytes], part_before), "the part was written to"
        assert np.array_equal(weights[:-64], coded.expected(part.tier)), part.tier.name
        assert (weights[-64:] == GUARD).all(), "something wrote behind the weights"


@pytest.mark.parametrize(("dtype", "encoding"), [*FLOATS, *OTHERS])
def test_every_encoding_is_what_the_hosts_decoder_makes_of_it(
    kernels: KernelsOnCpu, dtype: str, encoding: str
) -> None:
    for count in (FRAME_ELEMENTS + 4099, 13):
        coded = code_tensors({"w": (dtype, encoding, weights_like(dtype, count))})
        agree(by_kernels(kernels), coded)
        agree(run_stored, coded)


@pytest.mark.parametrize("count", COUNTS)
def test_the_default_encoding_is_right_at_every_length(kernels: KernelsOnCpu, count: int) -> None:
    agree(by_kernels(kernels), code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", count))}))


@pytest.mark.parametrize(("dtype", "encoding"), [("BF16", "bf16.3"), ("BF16", "bf16.1.4"), ("F16", "f16.3")])
def test_every_bit_pattern_comes_back(kernels: KernelsOnCpu, dtype: str, encoding: str) -> None:
    words = np.concatenate([every_word(), every_word()[: 2 * 40_001]]).view("<u2")
    words = np.random.default_rng(0).permutation(words).view(np.uint8)  # so that there are no matches
    agree(by_kernels(kernels), code_tensors({"w": (dtype, encoding, words)}))


@pytest.mark.parametrize("encoding", ["bf16.3", "bf16.4", "bf16.1.2", "bf16.0.6"])
def test_planes_of_a_few_bits_may_be_coded_too(kernels: KernelsOnCpu, encoding: str) -> None:
    """Weights of which most are alike: the planes of signs and mantissas are frames of half the bytes and fewer."""
    rng = np.random.default_rng(0)
    for count in (2 * FRAME_ELEMENTS, FRAME_ELEMENTS + 4097, 40_003, 20_001):
        floats = np.where(rng.random(count) < 0.3, 0.37, 0.25).astype("<f4")
        coded = code_tensors(
            {"w": ("BF16", encoding, (floats.view("<u4") >> 16).astype("<u2").view(np.uint8))}
        )
        codecs = [plane.codec for part in coded.manifest.parts for plane in part.segments[0].planes]
        assert Codec.ZSTD in codecs[1:]
        agree(by_kernels(kernels), coded)


MIXED = {
    f"{name}{number}": (dtype, encoding, weights_like(dtype, 70_001 + 301 * number, number))
    for number in range(2)
    for name, dtype, encoding in (
        ("q", "BF16", "bf16.3"),
        ("norm", "BF16", "whole"),
        ("half", "F16", "f16.3"),
        ("scales", "F32", "f32.7"),
        ("codes", "I8", "bytes"),
        ("steps", "I16", "bytes"),
    )
}


def test_a_part_of_many_tensors_is_placed_whole(kernels: KernelsOnCpu) -> None:
    coded = code_tensors(MIXED, cut_at=FRAME_ELEMENTS)
    agree(by_kernels(kernels), coded)
    agree(run_stored, coded)
    image = plan_stored(coded.manifest, coded.manifest.parts[0])
    assert image.sent_bytes < len(coded.stored[0]) + image.written_bytes // 100


@pytest.mark.parametrize("seed", range(10))
def test_no_flipped_bit_changes_a_weight(kernels: KernelsOnCpu, seed: int) -> None:
    """100 places a seed: the host's walk or the device's digest finds each, and the weights stay as they were."""
    rng, run = np.random.default_rng(seed), by_kernels(kernels)
    tensors = {
        "w": ("BF16", "bf16.3", weights_like("BF16", 5000, seed)),
        "half": ("F16", "f16.3", weights_like("F16", 3001, seed)),
        "norm": ("BF16", "whole", weights_like("BF16", 77, seed)),
        "codes": ("I8", "bytes", np.minimum(rng.geometric(0.5, 900), 255).astype(np.uint8)),
    }
    coded = code_tensors(tensors)
    weights = guarded_weights(coded)
    weights[:] = rng.integers(0, 256, weights.size, dtype=np.uint8)
    before = weights.copy()
    num_walked = 0
    for number in range(100):
        part = coded.manifest.parts[number % len(coded.manifest.parts)]
        spoilt = bytearray(coded.stored[part.index])
        at = int(rng.integers(0, len(spoilt)))
        spoilt[at] ^= 1 << int(rng.integers(0, 8))
        made = sent(coded, part, bytes(spoilt))
        if made is not None:
            num_walked += 1
            assert run(made[0], made[1], weights) & DIGEST_DIFFERS
        assert np.array_equal(weights, before), (part.tier, at)
    assert num_walked > 80


def with_digest(coded: CodedTensors, part: Part, stored: bytes) -> tuple[CodedTensors, Part]:
    """The same, by a packer that has written these bytes."""
    other = part._replace(digest=blake3(stored).digest())
    parts = tuple(other if each.index == part.index else each for each in coded.manifest.parts)
    contents = tuple(stored if number == part.index else each for number, each in enumerate(coded.stored))
    return CodedTensors(coded.manifest._replace(parts=parts), contents, coded.contents), other


def test_a_right_digest_over_bits_that_must_be_zero_changes_nothing(kernels: KernelsOnCpu) -> None:
    """Behind the last element; and in fp16's exponents, raw ones, too."""
    rng = np.random.default_rng(0)
    few = code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", 4097))})
    half = code_tensors({"w": ("F16", "f16.3", rng.integers(0, 256, 2 * 40, dtype=np.uint8))})
    assert half.manifest.parts[0].segments[0].planes[0].codec is Codec.RAW
    refine = few.manifest.parts[1].segments[0].planes[0]
    for coded, number, at, bit in (
        (few, 1, refine.offset_bytes + refine.size_bytes - 1, 0x10),
        (half, 0, half.manifest.parts[0].segments[0].planes[0].offset_bytes + 17, 0x20),
    ):
        part = coded.manifest.parts[number]
        spoilt = bytearray(coded.stored[number])
        spoilt[at] |= bit
        changed, part = with_digest(coded, part, bytes(spoilt))
        made = sent(changed, part, bytes(spoilt))
        assert made is not None
        weights = guarded_weights(coded)
        for run in (by_kernels(kernels), run_stored):
            assert run(made[0], made[1].copy(), weights) == FRAME_DAMAGED
            assert not weights[:-64].any()


def test_a_part_with_sequences_is_left_to_the_host() -> None:
    coded = code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", FRAME_ELEMENTS))})
    part, stored = coded.manifest.parts[0], coded.stored[0]
    plane = part.segments[0].planes[0]
    words = coded.contents["w"].view("<u2")
    exponents = (words >> 7 & 255).astype(np.uint8)
    exponents[30_000:60_000] = exponents[:30_000]  # a match
    parameters = zstandard.ZstdCompressionParameters.from_level(
        3, window_log=16, write_content_size=True, write_checksum=False
    )
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(exponents.tobytes())
    assert len(frame) < plane.size_bytes
    padding = -len(frame) % 8
    frame += b"" if not padding else b"\x50\x2a\x4d\x18" + bytes([padding, 0, 0, 0]) + bytes(padding)
    rest = stored[plane.offset_bytes + plane.size_bytes :]
    made = stored[: plane.offset_bytes] + frame + rest
    shift = len(frame) - plane.size_bytes
    planes = [plane._replace(size_bytes=len(frame))]
    planes += [each._replace(offset_bytes=each.offset_bytes + shift) for each in part.segments[0].planes[1:]]
    segment = part.segments[0]._replace(planes=tuple(planes))
    part = part._replace(size_bytes=len(made), segments=(segment,), digest=blake3(made).digest())
    tables = aligned_zeros(max_tables_bytes(part))
    assert write_tables(coded.manifest, part, [0], memoryview(made), tables.data) is None


@pytest.mark.parametrize("seed", range(5))
def test_the_walk_writes_nothing_outside_of_its_tables(seed: int) -> None:
    """Of parts whose bytes are any, and whose manifest may lie about where planes are."""
    rng = np.random.default_rng(seed)
    coded = code_tensors(MIXED, cut_at=FRAME_ELEMENTS)
    for part, stored in zip(coded.manifest.parts, coded.stored, strict=True):
        for _ in range(30):
            spoilt = bytearray(stored)
            for at in rng.integers(0, len(spoilt), 50).tolist():
                spoilt[at] = int(rng.integers(0, 256))
            lying = list(part.segments)
            place = int(rng.integers(0, len(lying)))
            plane = (
                lying[place]
                .planes[0]
                ._replace(
                    offset_bytes=int(rng.integers(0, 1 << 40)),
                    codec=Codec.ZSTD if rng.integers(2) else Codec.RAW,
                )
            )
            if rng.integers(2):
                lying[place] = lying[place]._replace(planes=(plane, *lying[place].planes[1:]))
            other = part._replace(segments=tuple(lying))
            size_bytes = max_tables_bytes(other)
            tables = aligned_zeros(size_bytes + 64)
            tables[:] = GUARD
            write_tables(coded.manifest, other, [0], memoryview(spoilt), tables[:size_bytes].data)
            assert (tables[size_bytes:] == GUARD).all()


def test_plain_parts_are_copied_and_neighbours_together() -> None:
    coded = code_tensors(
        {
            "a": ("BF16", "whole", weights_like("BF16", 64)),
            "b": ("F32", "whole", weights_like("F32", 33)),
            "c": ("F32", "whole", weights_like("F32", 5)),
        }
    )
    part = coded.manifest.parts[0]
    starts, weights_bytes = slab_starts(coded.manifest.groups)
    assert plan_plain(coded.manifest, part, starts) is None, "it has a digest to be compared"
    plain = part._replace(digest=None)
    assert not can_be_stored(coded.manifest, plain)
    image = plan_plain(coded.manifest, plain, starts)
    assert image is not None
    assert len(image.copies) == 2  # between the last two are bytes of no tensor, in the weights only
    weights = np.zeros(weights_bytes, np.uint8)
    stored = np.frombuffer(coded.stored[0], np.uint8)
    for copy in image.copies:
        data = stored[copy.image_bytes : copy.image_bytes + copy.size_bytes]
        weights[copy.weights_bytes : copy.weights_bytes + copy.size_bytes] = data
    assert np.array_equal(weights, coded.expected(Tier.REFINE))


def test_coded_parts_are_no_plain_ones() -> None:
    coded = code_tensors({"w": ("BF16", "bf16.3", weights_like("BF16", 100))})
    part = coded.manifest.parts[0]._replace(digest=None)
    assert plan_plain(coded.manifest, part, [0]) is None
    assert max_tables_bytes(part) == 0
