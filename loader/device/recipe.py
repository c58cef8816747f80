"""How planes become words: the arithmetic of one tier of one encoding, as numbers that a device can follow.

A *word* is an element's bits. The word takes bits of each plane and puts them where they belong:

    word = (word & keep) | fill | (bits of plane 0) << up[0] | (bits of plane 1) << up[1] | …

but for the plane that begins with the sign: its highest bit goes to `sign_up`, and only the others to `up`. This
covers every encoding of the format that is cut at all (`docs/format.md`, "Encodings"), so one kernel a word size
does. Pure; it does not know where planes lie.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from ..format.encoding import Encoding, Tier, cut_field

MAX_PLANES = 8
NO_PLANE = 0xFFFFFFFF  # for `sign_plane`: no plane has a sign

# Named by what they do: `kernels/merge.cu`. The first two are for what most weights are, and as fast as memory; the
# others do anything, words of so many bits.
DRAFT_KERNEL, REFINE_KERNEL = "merge_bf16_draft", "refine_low_nibbles"
GENERAL_KERNELS = {2: "merge_words_16", 4: "merge_words_32", 8: "merge_words_64"}
RESOLVE_KERNEL = "resolve_chunks"  # for who decompresses, before these
KERNELS = (DRAFT_KERNEL, REFINE_KERNEL, *GENERAL_KERNELS.values())

# keep, fill, num_planes, word_bytes, sign_plane, sign_up, bits[8], up[8]: `struct Recipe` in the kernels' source.
_RECIPE = struct.Struct("<QQIIII8I8I")
RECIPE_BYTES = _RECIPE.size


class Recipe(NamedTuple):
    """Of one tier of an encoding. `bits` and `ups` are those of its planes, in the format's order."""

    word_bytes: int  # 2, 4 or 8
    keep: int  # bits that stay as they are; 0: nothing needs to be there
    fill: int
    bits: tuple[int, ...]  # 8, 4, 2 or 1 each
    ups: tuple[int, ...]
    sign_plane: int = NO_PLANE
    sign_up: int = 0

    @property
    def kernel(self) -> str:
        """The name of the kernel that follows it fastest."""
        if self == _BF16_DRAFT:
            return DRAFT_KERNEL
        if self == _LOW_NIBBLES:
            return REFINE_KERNEL
        return GENERAL_KERNELS[self.word_bytes]

    def packed(self) -> bytes:
        """As the kernels read it."""
        unused = (0,) * (MAX_PLANES - len(self.bits))
        numbers = (len(self.bits), self.word_bytes, self.sign_plane, self.sign_up)
        return _RECIPE.pack(self.keep, self.fill, *numbers, *self.bits, *unused, *self.ups, *unused)

    @staticmethod
    def unpack(data: bytes | memoryview) -> Recipe:
        """What `packed` has written, from the front of the data."""
        keep, fill, num_planes, word_bytes, sign_plane, sign_up, *rest = _RECIPE.unpack_from(data)
        bits, ups = rest[:num_planes], rest[MAX_PLANES : MAX_PLANES + num_planes]
        return Recipe(word_bytes, keep, fill, tuple(bits), tuple(ups), sign_plane, sign_up)


def is_flat(encoding: Encoding, element_bytes: int) -> bool:
    """Whether the one plane of a tensor is the tensor itself: it is copied, and needs no recipe."""
    return encoding.is_whole or (encoding.float_format is None and element_bytes == 1)


def recipe_for(encoding: Encoding, tier: Tier, element_bytes: int) -> Recipe:
    """For a tier that the encoding has, and that is not flat."""
    float_format = encoding.float_format
    if float_format is None:
        places = range(element_bytes)
        return Recipe(element_bytes, 0, 0, (8,) * element_bytes, tuple(8 * place for place in places))
    known, before = encoding.mantissa_bits(tier), encoding.bits_before(tier)
    unknown = float_format.mantissa_bits - known
    fill = 1 << unknown - 1 if unknown else 0
    if before is not None:
        ones = (1 << float_format.bits) - 1
        keep = -1 << float_format.mantissa_bits - before & ones
        bits = cut_field(known - before)
        return Recipe(element_bytes, keep, fill, bits, _ups(bits, unknown))
    bits = cut_field(1 + known)
    return Recipe(
        element_bytes,
        0,
        fill,
        (8, *bits),
        (float_format.mantissa_bits, *_ups(bits, unknown)),
        sign_plane=1,
        sign_up=float_format.bits - 1,
    )


def _ups(bits: tuple[int, ...], unknown: int) -> tuple[int, ...]:
    """Where the lowest bit of each plane of a field belongs; below the field are `unknown` bits."""
    return tuple(unknown + sum(bits[place + 1 :]) for place in range(len(bits)))


_BF16_DRAFT = recipe_for(Encoding.BF16_3, Tier.DRAFT, 2)
_LOW_NIBBLES = recipe_for(Encoding.BF16_3, Tier.REFINE, 2)
