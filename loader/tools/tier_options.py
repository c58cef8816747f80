"""How many bits the tiers of an artifact have: what `pack` is asked for, checked, and what follows for a tensor."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass

from ..errors import UsageError
from ..format.codec import DEFAULT_DRAFT_BITS, MIN_SPLIT_ELEMENTS, choose_encoding
from ..format.encoding import Encoding
from ..format.grouping import EMBED, HEAD

MAX_DRAFT_BITS = 7  # all that bf16 has


@dataclass(frozen=True, slots=True)
class TierOptions:
    """Mantissa bits. None in `draft_bits` is what suits a tensor's dtype, in `embed_bits` and `head_bits` the same as
    for all others, in `sketch_bits` that there is no sketch. Raises `UsageError` for what cannot be meant.
    """

    draft_bits: int | None = None
    embed_bits: int | None = None  # of matrices before the first layer
    head_bits: int | None = None  # of matrices behind the last one
    sketch_bits: int | None = None

    def __post_init__(self) -> None:
        for key, most in (
            ("draft_bits", MAX_DRAFT_BITS),
            ("embed_bits", MAX_DRAFT_BITS),
            ("head_bits", MAX_DRAFT_BITS),
            ("sketch_bits", MAX_DRAFT_BITS - 1),
        ):
            bits = getattr(self, key)
            if bits is not None and not 0 <= bits <= most:
                raise UsageError(
                    f"{_flag(key)} {bits}: a tier has 0 to {most} mantissa bits",
                    key=key,
                    hint="Default: see --help.",
                )
        if self.sketch_bits is not None:
            self._check_sketch(self.sketch_bits)

    def encoding(self, groups: Collection[str], dtype: str, shape: tuple[int, ...]) -> Encoding:
        """Of a tensor that a forward pass uses in these groups: where it is tied, the one that asks for more counts."""
        own = {EMBED: self.embed_bits, HEAD: self.head_bits}
        default = self.draft_bits if self.draft_bits is not None else DEFAULT_DRAFT_BITS.get(dtype, 0)
        bits = [own.get(group) for group in groups]
        draft_bits = max((default if wanted is None else wanted for wanted in bits), default=default)
        return choose_encoding(dtype, shape, draft_bits=draft_bits, sketch_bits=self.sketch_bits)

    def exact_encoding(self, dtype: str, shape: tuple[int, ...]) -> Encoding:
        """Of a tensor whose bits are not cut: it is exact as soon as it is there."""
        if dtype not in DEFAULT_DRAFT_BITS:
            return choose_encoding(dtype, shape, sketch_bits=self.sketch_bits)
        is_large = len(shape) >= 2 and math.prod(shape) >= MIN_SPLIT_ELEMENTS
        if self.sketch_bits is not None:
            return Encoding.BYTES_SKETCH if is_large else Encoding.WHOLE_SKETCH
        return Encoding.BYTES if is_large else Encoding.WHOLE

    def _check_sketch(self, sketch_bits: int) -> None:
        fewest = self.draft_bits if self.draft_bits is not None else min(DEFAULT_DRAFT_BITS.values())
        for key, bits in (
            ("draft_bits", fewest),
            ("embed_bits", self.embed_bits),
            ("head_bits", self.head_bits),
        ):
            if bits is not None and bits <= sketch_bits:
                raise UsageError(
                    f"--sketch-bits {sketch_bits} leaves a draft of {bits} mantissa bits nothing to add",
                    key="sketch_bits",
                    hint=f"Give fewer, or more {_flag(key)}.",
                )


def _flag(key: str) -> str:
    return f"--{key.replace('_', '-')}"
