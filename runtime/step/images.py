"""Images of a prompt: pixels, the places of their tokens, and the rows that a vision tower makes of them."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from ..errors import RequestError

_KEY_BIT = 1 << 62  # of an image's keys: above every token's id


class PromptImage(Struct, eq=False):
    """One image of a prompt, which all choices of it share. `rows` is set once, by the thread that encodes it, before
    any step reads them.
    """

    digest: bytes  # of the image's bytes: equal digests have equal tiles
    tiles: npt.NDArray[np.uint8] | None  # (N, 3, size, size), until there are rows
    levels: npt.NDArray[np.float32]  # (3, 256): a channel's number for each value of a pixel
    places: npt.NDArray[np.int64]  # (T,), ascending: the prompt's tokens that it takes the places of
    rows: Any = None  # (T, hidden_size) in the model's dtype

    def within(self, first: int, end: int) -> slice:
        """Those of its places that are in [first, end), by their numbers."""
        begin, stop = np.searchsorted(self.places, (first, end))
        return slice(int(begin), int(stop))

    def cache_keys(self) -> array[int]:
        """A number for each place by which caches tell images apart: of 62 bits from the digest, and no token's id."""
        stream = hashlib.shake_256(b"image" + self.digest).digest(8 * len(self.places))
        return array("q", (np.frombuffer(stream, "<i8") & (_KEY_BIT - 1) | _KEY_BIT).tolist())


def prompt_keys(tokens: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """The prompt's tokens, with the keys of its images in their places."""
    keys = list(tokens)
    for image in images:
        for place, key in zip(image.places.tolist(), image.cache_keys(), strict=True):
            keys[place] = key
    return keys


def check_images(images: Sequence[PromptImage], num_tokens: int) -> None:
    """Raise RequestError unless every image has places of its own in a prompt of `num_tokens`."""
    places = np.concatenate([image.places for image in images])
    if len(places) != len(np.unique(places)) or (places < 0).any() or (places >= num_tokens).any():
        raise RequestError("images do not fit the prompt's tokens", param="prompt")
