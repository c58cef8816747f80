"""The kernels in numpy: for the simulated device, and as the reference for the kernels' source.

It reads the same tables, so it tries these, too. One frame at a time, and slow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from teneral.loader.device.image import (
    CHUNK_ENTRY_BYTES,
    COPY_KERNEL,
    FRAME_ENTRY_BYTES,
    RECIPE_BYTES,
    Chunks,
    Launch,
    Recipe,
)
from teneral.loader.device.stored import (
    CODED_ENTRY_BYTES,
    COPIED_ENTRY_BYTES,
    DIGEST_BYTES,
    DIGEST_DIFFERS,
    FRAME_DAMAGED,
    WRONG_BYTES,
    StoredImage,
)
from teneral.loader.errors import IntegrityError
from teneral.loader.native.frames import decode_frames

Bytes = npt.NDArray[np.uint8]


def run_launch(launch: Launch, image: Bytes, weights: Bytes) -> None:
    """Do what a kernel does with one table of the image."""
    begin = launch.table_bytes
    recipe = Recipe.unpack(image[begin : begin + RECIPE_BYTES].tobytes())
    begin += RECIPE_BYTES
    frames = image[begin : begin + launch.num_frames * FRAME_ENTRY_BYTES].view("<u4").reshape(-1, 12)
    for frame in frames.tolist():
        out, count, pieces = frame[0] | frame[1] << 32, frame[2], frame[4 : 4 + len(recipe.bits)]
        words = weights[out : out + count * recipe.word_bytes].view(f"<u{recipe.word_bytes}")
        words[:] = _merge(
            recipe, words, [_values(image, *each, count) for each in zip(pieces, recipe.bits, strict=True)]
        )


def decompress_chunks(chunks: Chunks, image: Bytes) -> None:
    """Do what a device does that decompresses: the frames of the image's table, each into its room."""
    import zstandard  # only where a device is simulated that can

    begin, decompress = chunks.table_bytes, zstandard.ZstdDecompressor().decompress
    table = image[begin : begin + chunks.num * CHUNK_ENTRY_BYTES].view("<u4").reshape(-1, 4)
    for coded, coded_bytes, out, out_bytes in table.tolist():
        content = decompress(image[coded : coded + coded_bytes].tobytes(), max_output_size=out_bytes)
        image[out : out + out_bytes] = np.frombuffer(content, np.uint8)


def run_stored(image: StoredImage, memory: Bytes, weights: Bytes) -> int:
    """Do what a device does with a stored image in `memory`, (size_bytes,): returns the word `wrong`, and
    leaves it there.
    """
    digest = memory[image.tables_begin :][:DIGEST_BYTES].tobytes()
    wrong = 0 if blake3(memory[: image.part_bytes].tobytes()).digest() == digest else DIGEST_DIFFERS
    begin = image.decode.table_bytes
    table = memory[begin : begin + image.decode.num_frames * CODED_ENTRY_BYTES].view("<u4").reshape(-1, 6)
    for entry in table.tolist():
        wrong |= 0 if _decode(memory, *entry) else FRAME_DAMAGED
    memory[image.wrong_begin : image.wrong_begin + WRONG_BYTES].view("<u4")[0] = wrong
    for launch in image.launches if not wrong else ():
        if launch.kernel == COPY_KERNEL:
            _copy(launch, memory, weights)
        else:
            run_launch(launch, memory, weights)
    return wrong


def _decode(
    memory: Bytes, coded: int, coded_bytes: int, out: int, out_bytes: int, begin: int, masks: int
) -> bool:
    """One entry for `huf_frames`. True if the frame is sound, and its bytes have the bits that they may have."""
    content = memory[out : out + out_bytes]
    if coded_bytes:
        padding_bytes = 8 + -coded_bytes % 8 if coded_bytes % 8 else 0
        try:
            decode_frames(memory[coded : coded + coded_bytes + padding_bytes], content, max(1, out_bytes))
        except IntegrityError:
            return False
    return not (content[:begin] & (masks & 255)).any() and not (content[begin:] & (masks >> 8)).any()


def _copy(launch: Launch, memory: Bytes, weights: Bytes) -> None:
    begin = launch.table_bytes
    entries = memory[begin : begin + launch.num_frames * COPIED_ENTRY_BYTES].view("<u4").reshape(-1, 4)
    for low, high, source, size in entries.tolist():
        out = low | high << 32
        weights[out : out + size] = memory[source : source + size]


def _values(image: Bytes, begin: int, bits: int, count: int) -> npt.NDArray[np.uint64]:
    """A plane's bits of each element of a frame."""
    share = 8 // bits
    row = -(-count // share)
    packed = image[begin : begin + row].astype(np.uint64)
    rows = [packed >> np.uint64(bits * place) & np.uint64((1 << bits) - 1) for place in range(share)]
    return np.concatenate(rows)[:count]


def _merge(
    recipe: Recipe, words: npt.NDArray[np.unsignedinteger], values: list[npt.NDArray[np.uint64]]
) -> npt.NDArray[np.unsignedinteger]:
    merged = words.astype(np.uint64) & np.uint64(recipe.keep) | np.uint64(recipe.fill)
    for plane, (value, bits, up) in enumerate(zip(values, recipe.bits, recipe.ups, strict=True)):
        if plane == recipe.sign_plane:
            merged |= value >> np.uint64(bits - 1) << np.uint64(recipe.sign_up)
            value = value & np.uint64((1 << bits - 1) - 1)
        merged |= value << np.uint64(up)
    return merged.astype(words.dtype)
