"""The kernels in numpy: for the simulated device, and as the reference for the kernels' source.

It reads the same tables, so it tries these, too. One frame at a time, and slow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from teneral.loader.device.image import (
    CHUNK_ENTRY_BYTES,
    FRAME_ENTRY_BYTES,
    RECIPE_BYTES,
    Chunks,
    Launch,
    Recipe,
)

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
