"""The kernels that verify and decode stored parts, on a CPU: digests as blake3's, frames as libzstd's, and no byte read
or written elsewhere, whatever a frame holds.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import zstandard
from blake3 import blake3
from tests.support.kernels_on_cpu import HASHED_BYTES, KernelsOnCpu, aligned_zeros, compiler
from tests.support.load import patience_s

from teneral.loader.device.image import COPY_KERNEL, KERNELS, Launch
from teneral.loader.errors import IntegrityError
from teneral.loader.native.frames import decode_frames, encode_frames, find_frames

ROOT = Path(__file__).parents[3]
FRAME_BYTES = 65_536
GUARD, GUARD_BYTES = 0xA5, 64
DIGEST_DIFFERS, FRAME_DAMAGED = 1, 2
LENGTHS = (
    *(1, 63, 64, 65, 1023, 1024, 1025, 2048, 2049, 3073, 7 * 1024, 31 * 1024 + 1),
    *(HASHED_BYTES - 1, HASHED_BYTES, HASHED_BYTES + 1, 3 * HASHED_BYTES + 5000, 130 * HASHED_BYTES + 77),
)
IN_BOTH_ORDERS = pytest.mark.parametrize(
    "reversed", [False, True], ids=["first lane first", "last lane first"]
)


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> KernelsOnCpu:
    if compiler() is None:
        pytest.skip("there is no C++ compiler to run the kernels' source on the CPU with")
    return KernelsOnCpu(tmp_path_factory.mktemp("kernels"))


def copied(data: bytes | np.ndarray) -> np.ndarray:
    memory = aligned_zeros(len(data))
    memory[:] = np.frombuffer(data, np.uint8)
    return memory


# digests


def found_wrong(kernels: KernelsOnCpu, part: np.ndarray, digest: bytes, *, reversed: bool = False) -> int:
    nodes, wrong = aligned_zeros(32 * (part.size // HASHED_BYTES + 1)), np.zeros(1, np.uint32)
    expected = copied(digest)
    addresses = (each.ctypes.data for each in (expected, nodes, wrong))
    kernels.hash_at(part.ctypes.data, part.size, *addresses, reversed=reversed)
    return int(wrong[0])


@IN_BOTH_ORDERS
@pytest.mark.parametrize("length", LENGTHS)
def test_a_part_has_blake3s_digest(kernels: KernelsOnCpu, length: int, reversed: bool) -> None:
    part = copied(np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8))
    digest = blake3(part.tobytes()).digest()
    assert found_wrong(kernels, part, digest, reversed=reversed) == 0


def test_a_flipped_bit_is_seen_wherever_it_is(kernels: KernelsOnCpu) -> None:
    rng = np.random.default_rng(0)
    part = copied(rng.integers(0, 256, HASHED_BYTES + 5000, dtype=np.uint8))
    digest = blake3(part.tobytes()).digest()
    for at in (0, part.size - 1, *rng.integers(0, part.size, 100).tolist()):
        part[at] ^= 1 << at % 8
        assert found_wrong(kernels, part, digest) == DIGEST_DIFFERS
        part[at] ^= 1 << at % 8
    assert found_wrong(kernels, part, digest) == 0


def test_each_bit_of_a_digest_counts(kernels: KernelsOnCpu) -> None:
    part = copied(b"some bytes")
    digest = blake3(part.tobytes()).digest()
    for bit in range(256):
        other = bytearray(digest)
        other[bit // 8] ^= 1 << bit % 8
        assert found_wrong(kernels, part, bytes(other)) == DIGEST_DIFFERS


# frames


class Decoded:
    """Frames behind one another in an image, each with its room, and guards around it."""

    def __init__(
        self,
        kernels: KernelsOnCpu,
        frames: Sequence[bytes],
        sizes: Sequence[int],
        *,
        checks: Sequence[tuple[int, int, int]] = (),
        reversed: bool = False,
        grid: int = 2,
    ) -> None:
        """`checks`: from which byte on, and the bits that bytes before and from there on must not have."""
        table = np.zeros((len(frames), 6), "<u4")
        at = GUARD_BYTES + table.nbytes
        for number, frame in enumerate(frames):
            at += -at % 8
            table[number, :2] = at, len(frame)
            at += len(frame)
        for number, size in enumerate(sizes):
            at += -at % 16 + GUARD_BYTES
            table[number, 2:4] = at, size
            at += size
        for number, (begin, before, behind) in enumerate(checks):
            table[number, 4:] = begin, before | behind << 8
        image = aligned_zeros(at + GUARD_BYTES)
        image[:] = GUARD
        image[GUARD_BYTES : GUARD_BYTES + table.nbytes] = table.view(np.uint8).ravel()
        for frame, begin in zip(frames, table[:, 0].tolist(), strict=True):
            image[begin : begin + len(frame)] = np.frombuffer(frame, np.uint8)
        before = image.copy()
        wrong = np.zeros(1, np.uint32)
        kernels.decode_at(
            grid, image.ctypes.data, GUARD_BYTES, len(frames), wrong.ctypes.data, reversed=reversed
        )
        self.wrong = int(wrong[0])
        self.contents = []
        for begin, size in table[:, 2:4].tolist():
            self.contents.append(image[begin : begin + size].tobytes())
            image[begin : begin + size] = GUARD
        assert np.array_equal(image, before), "a kernel wrote outside of its room"


def exponents(count: int, seed: int = 0) -> bytes:
    floats = np.random.default_rng(seed).normal(0, 0.02, count).astype(np.float32)
    return (floats.view(np.uint32) >> 23 & 255).astype(np.uint8).tobytes()


def contents() -> list[bytes]:
    rng = np.random.default_rng(1)
    whole = exponents(6 * FRAME_BYTES)
    found = [
        whole[:FRAME_BYTES],
        *(whole[:size] for size in (1, 5, 6, 63, 255, 256, 257, 700, 1025, 40_000, 65_535)),
    ]
    found += [rng.choice(np.array([1, 2, 3], np.uint8), FRAME_BYTES, p=[0.9, 0.06, 0.04]).tobytes()]
    found += [rng.choice(np.array([1, 2], np.uint8), FRAME_BYTES, p=[0.99, 0.01]).tobytes()]
    found += [
        rng.integers(0, top, size).astype(np.uint8).tobytes() for top, size in ((6, FRAME_BYTES), (256, 3000))
    ]
    found += [
        np.clip(rng.normal(128, width, FRAME_BYTES), 0, 255).astype(np.uint8).tobytes() for width in (4, 30)
    ]
    found += [np.minimum(rng.geometric(0.4, 20_000), 255).astype(np.uint8).tobytes()]
    return [*found, bytes(FRAME_BYTES), bytes([7]) * 100]


def packed(content: bytes) -> bytes:
    """A frame of the packer's own coder, without its padding."""
    made = encode_frames(np.frombuffer(content, np.uint8), FRAME_BYTES)
    ((begin, end),) = find_frames(made, len(content), FRAME_BYTES).tolist()
    return bytes(made[begin:end])


def by_libzstd(content: bytes, **options: int) -> bytes:
    parameters = zstandard.ZstdCompressionParameters(
        strategy=zstandard.STRATEGY_FAST, min_match=7, hash_log=6, chain_log=6, search_log=1,
        window_log=16, write_content_size=True, write_checksum=False, **options,
    )  # fmt: skip
    return zstandard.ZstdCompressor(compression_params=parameters).compress(content)


@IN_BOTH_ORDERS
def test_the_packers_frames_are_decoded(kernels: KernelsOnCpu, reversed: bool) -> None:
    expected = contents()
    frames = [packed(content) for content in expected]
    decoded = Decoded(kernels, frames, list(map(len, expected)), reversed=reversed)
    assert decoded.wrong == 0
    assert decoded.contents == expected


def test_frames_of_libzstd_are_decoded_or_refused_where_they_have_sequences(kernels: KernelsOnCpu) -> None:
    num_decoded = 0
    for target_length in (0, 131_072):
        for content in contents():
            decoded = Decoded(kernels, [by_libzstd(content, target_length=target_length)], [len(content)])
            assert decoded.wrong == FRAME_DAMAGED or decoded.contents == [content]
            num_decoded += decoded.wrong == 0
    assert num_decoded > 10


def test_a_frame_of_several_blocks_may_use_the_tree_of_the_one_before(kernels: KernelsOnCpu) -> None:
    content = exponents(3000)
    frame = packed(content)
    block = frame[7 + 3 :]  # behind the frame's header and the block's
    head = int.from_bytes(block[:4], "little")
    assert head & 15 == 2 | 2 << 2, "its literals have a tree, and two numbers of 14 bits"
    stored = head >> 18
    tree_bytes = 1 + (block[4] if block[4] < 128 else (block[4] - 126) // 2)
    again = (head & 0x3FFFF | 3 | stored - tree_bytes << 18).to_bytes(4, "little") + block[4 + tree_bytes :]
    both = frame[:5] + (2 * len(content) - 256).to_bytes(2, "little")
    for is_last, each in ((0, block), (1, again)):
        both += (is_last | 2 << 1 | len(each) << 3).to_bytes(3, "little") + each
    assert zstandard.ZstdDecompressor().decompress(both) == content + content
    decoded = Decoded(kernels, [both], [2 * len(content)])
    assert decoded.wrong == 0
    assert decoded.contents == [content + content]


@pytest.mark.parametrize("seed", range(4))
def test_damaged_frames_are_refused_or_decoded_as_the_host_does(kernels: KernelsOnCpu, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_refused = 0
    sound = [packed(exponents(size)) for size in (FRAME_BYTES, 3000, 700, 200)]
    sizes = (FRAME_BYTES, 3000, 700, 200)
    for number in range(120):
        frame, size = bytearray(sound[number % 4]), sizes[number % 4]
        for _ in range(1 + number % 3):
            frame[rng.integers(0, min(len(frame), 120) if number % 2 else len(frame))] ^= 1 << rng.integers(
                0, 8
            )
        if number % 10 == 0:
            frame = frame[: rng.integers(0, len(frame))]
        decoded = Decoded(kernels, [bytes(frame)], [size])
        num_refused += decoded.wrong != 0
        out = np.empty(size, np.uint8)
        padded = bytes(frame) + skippable(-len(frame) % 8)
        try:
            decode_frames(np.frombuffer(padded, np.uint8), out, FRAME_BYTES, where="a test")
        except IntegrityError:
            assert decoded.wrong == FRAME_DAMAGED, "the host refuses what the device takes"
        else:
            if decoded.wrong == 0:
                assert decoded.contents == [out.tobytes()]
    assert num_refused > 20


def skippable(num_bytes: int) -> bytes:
    return b"" if num_bytes == 0 else b"\x50\x2a\x4d\x18" + bytes([num_bytes, 0, 0, 0]) + bytes(num_bytes)


def test_one_damaged_frame_of_many_is_seen(kernels: KernelsOnCpu) -> None:
    frames = [packed(exponents(700 + number, number)) for number in range(9)]
    frames[5] = frames[5][:-1]
    assert Decoded(kernels, frames, [700 + number for number in range(9)], grid=4).wrong == FRAME_DAMAGED


def test_bits_that_must_be_zero_are_checked(kernels: KernelsOnCpu) -> None:
    """The 3 that fp16's exponents have not, and those behind the last element."""
    content = (np.frombuffer(exponents(5000), np.uint8) & 31).copy()
    content[4000:] &= 15
    frame = packed(content.tobytes())
    for check, is_right in (
        ((0, 0, 0xE0), True),
        ((4000, 0xE0, 0xF0), True),
        ((3999, 0, 0xF0), content[3999] < 16),
        ((0, 0, 0x10), False),
        ((5000, 0x10, 0), False),
        ((4000, 0x02, 0), False),
        ((0, 0, 0), True),
    ):
        decoded = Decoded(kernels, [frame], [5000], checks=[check])
        assert (decoded.wrong == 0) == is_right, check
        assert decoded.contents == [content.tobytes()]


def test_raw_planes_are_checked_where_they_lie(kernels: KernelsOnCpu) -> None:
    for masks, expected in (((0, 0x55), 0), ((0, 0xAA), FRAME_DAMAGED)):
        image, wrong = aligned_zeros(24 + 104), np.zeros(1, np.uint32)
        image[:24] = np.array([0, 0, 24, 104, 100, masks[0] | masks[1] << 8], "<u4").view(np.uint8)
        image[24:] = 0x0A
        image[124:] = 0xA0
        kernels.decode_at(1, image.ctypes.data, 0, 1, wrong.ctypes.data)
        assert wrong[0] == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_sanitizer_finds_anything() -> None:
    if shutil.which("gcc") is None or shutil.which("g++") is None:
        pytest.skip("there is no gcc")
    environment = {**os.environ, "CASES": "1000"}
    script = ROOT / "scripts" / "sanitize-kernels"
    done = subprocess.run(
        [str(script)], env=environment, capture_output=True, text=True, timeout=patience_s(200), check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "nothing was read or written elsewhere" in done.stdout


# what is wrong changes no weight


@pytest.mark.parametrize("kernel", [*KERNELS, COPY_KERNEL])
def test_kernels_write_nothing_behind_what_was_found_wrong(kernels: KernelsOnCpu, kernel: str) -> None:
    image, weights = aligned_zeros(1 << 20), aligned_zeros(1 << 20)
    weights[:] = GUARD
    image[8] = 1  # a recipe with one plane, or an entry of some bytes
    for wrong in (DIGEST_DIFFERS, FRAME_DAMAGED, DIGEST_DIFFERS | FRAME_DAMAGED):
        kernels.run(Launch(kernel, 0, 1), image, weights, wrong=wrong)
    assert (weights == GUARD).all()


@pytest.mark.parametrize("num_bytes", [0, 1, 7, 8, 9, 2048, 100_003])
def test_bytes_are_copied_to_the_weights(kernels: KernelsOnCpu, num_bytes: int) -> None:
    content = np.random.default_rng(0).integers(0, 256, num_bytes, dtype=np.uint8)
    image, weights = aligned_zeros(64 + num_bytes), aligned_zeros(256 + num_bytes)
    image[:16] = np.array([128, 0, 64, num_bytes], "<u4").view(np.uint8)
    image[64:] = content
    weights[:] = GUARD
    kernels.run(Launch(COPY_KERNEL, 0, 1), image, weights)
    assert np.array_equal(weights[128 : 128 + num_bytes], content)
    assert (weights[:128] == GUARD).all()
    assert (weights[128 + num_bytes :] == GUARD).all()
