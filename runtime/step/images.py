"""Images of a prompt: pixels, the places of their tokens, and the rows that a vision tower makes of them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ..errors import RequestError
from ..images.processor import TileLayout

_KEY_BIT = 1 << 62  # of an image's keys: above every token's id


class PromptImage(Struct, eq=False):
    """One image of a prompt, or a window of sound, which all choices of it share. `rows` is set once, by the thread
    that encodes it, before any step reads them.
    """

    digest: bytes  # of the image's bytes and layout: equal digests have equal tiles
    # (N, 3, height, width) of bytes, until there are rows; of sound, a spectrogram (1, bands, columns) in fp32
    tiles: npt.NDArray[Any] | None
    levels: npt.NDArray[np.float32]  # (3, 256): a channel's number for each value of a pixel
    places: npt.NDArray[np.int64]  # (T,), ascending: the prompt's tokens that it takes the places of
    layout: TileLayout | None = None  # None: the rows are those of the tiles
    rows: Any = None  # (T, hidden_size) or wider, as `ImageRows.values`
    # [first, end) of each run of places whose tokens see one another; set before the rows, none where tokens see
    # those before them only.
    runs: tuple[tuple[int, int], ...] = ()
    # Rows and columns of its tokens, whose places are adjacent, where the decoder turns them by these; likewise.
    grid: tuple[int, int] | None = None
    attention: SoundAttention | None = None  # of sound: what is kept of the attention over it; None: nothing

    def within(self, first: int, end: int) -> slice:
        """Those of its places that are in [first, end), by their numbers."""
        begin, stop = np.searchsorted(self.places, (first, end))
        return slice(int(begin), int(stop))

    def find_runs(self) -> tuple[tuple[int, int], ...]:
        """[first, end) of each run of its places."""
        parts = np.split(self.places, np.flatnonzero(np.diff(self.places) > 1) + 1)
        return tuple((int(part[0]), int(part[-1]) + 1) for part in parts if len(part))

    def cache_keys(self) -> array[int]:
        """A number for each place by which caches tell images apart: of 62 bits from the digest, and no token's id."""
        stream = hashlib.shake_256(b"image" + self.digest).digest(8 * len(self.places))
        return array("q", (np.frombuffer(stream, "<i8") & (_KEY_BIT - 1) | _KEY_BIT).tolist())


class SoundAttention:
    """Some heads' keys of a window of sound, and queries of the text behind it, as a sequence's steps compute them. Of
    one sequence; it is whole once that has its next token. Steps may repeat rows.
    """

    def __init__(self, heads: Sequence[tuple[int, int]], num_places: int, num_rows: int) -> None:
        """`heads` are layers and heads in them. Rows are the `num_rows` tokens behind the sound's places."""
        self.heads = tuple(heads)
        self.num_places = num_places
        self.num_rows = num_rows
        # Of each head (num_places, head_dim), and (num_rows, head_dim), scaled.
        self.keys: list[npt.NDArray[np.float32] | None] = [None] * len(heads)
        self.queries: list[npt.NDArray[np.float32] | None] = [None] * len(heads)

    def add(
        self, number: int, position: int, queries: npt.NDArray[np.float32], keys: npt.NDArray[np.float32]
    ) -> None:
        """Take queries (T, head_dim) of the head of this number, of the sequence's tokens from `position` on."""
        kept = self.queries[number]
        if kept is None:
            kept = self.queries[number] = np.zeros((self.num_rows, keys.shape[1]), np.float32)
        own = queries[: self.num_places + self.num_rows - position]
        kept[position - self.num_places :][: len(own)] = own
        self.keys[number] = keys

    def shares(self) -> Iterator[npt.NDArray[np.float32]]:
        """(num_rows, num_places) of each head in turn: the shares of each place. Each row is computed by itself."""
        for queries, keys in zip(self.queries, self.keys, strict=True):
            assert queries is not None
            assert keys is not None
            made = np.empty((self.num_rows, self.num_places), np.float32)
            for row, query in enumerate(queries):
                scores = np.einsum("kd,d->k", keys, query)
                powers = np.exp(scores - scores.max())
                made[row] = powers / powers.sum()
            yield made


def axes_of(images: Sequence[PromptImage], first: int, end: int) -> npt.NDArray[np.int64]:
    """(3, end - first): the positions by which a sequence's tokens [first, end) turn, on the axes of time, rows and
    columns, as M-RoPE has them (arXiv 2409.12191, section 2.1).

    An image stays at one time, and takes as many positions as the longer of its sides has tokens; so those of the
    tokens behind it are lower than their places. Images without a grid are like text.
    """
    axes = np.tile(np.arange(first, end, dtype=np.int64), (3, 1))
    num_skipped = 0  # positions that the images so far do without
    for image in sorted((each for each in images if each.grid is not None), key=lambda each: each.places[0]):
        assert image.grid is not None
        begin, (rows, columns) = int(image.places[0]), image.grid
        stop = begin + rows * columns
        if begin >= end:
            break
        own = np.arange(max(begin, first), min(stop, end), dtype=np.int64) - begin
        if len(own):
            at = max(begin - first, 0)
            row, column = np.divmod(own, columns)
            axes[:, at : at + len(own)] = np.stack((np.zeros_like(own), row, column)) + (begin - num_skipped)
        num_skipped += rows * columns - max(rows, columns)
        axes[:, max(stop - first, 0) :] = np.arange(max(stop, first), end) - num_skipped
    return axes


def prompt_keys(tokens: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """The prompt's tokens, with the keys of its images in their places."""
    keys = list(tokens)
    for image in images:
        for place, key in zip(image.places.tolist(), image.cache_keys(), strict=True):
            keys[place] = key
    return keys


def uncut(images: Sequence[PromptImage], first: int, end: int) -> int:
    """The end, at most this one, at which the tokens from `first` on cut no run of an image that sees itself. Where
    there is none behind `first`, the end of that run: it is computed at once, though it exceeds a step's limit.

    A run may be computed behind its first tokens, where a cache has these: it has them of the same image, whole.
    """
    for image in images:
        for begin, stop in image.runs:
            if begin < end < stop:
                return begin if begin > first else stop
    return end


def check_images(images: Sequence[PromptImage], num_tokens: int) -> None:
    """Raise RequestError unless every image has places of its own in a prompt of `num_tokens`."""
    places = np.concatenate([image.places for image in images])
    if len(places) != len(np.unique(places)) or (places < 0).any() or (places >= num_tokens).any():
        raise RequestError("images do not fit the prompt's tokens", param="prompt")
