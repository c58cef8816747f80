"""How a tensor's elements are cut into planes, tier by tier: a value with a name, and the bit
counts that follow.

`docs/format.md`, "Encodings", is the norm. Floats are cut into their exponents, one byte each, and
*fields*: some of the other bits of an element, the sign and the first mantissa bits in the first
tier, more mantissa bits in each later one. A field is stored as planes of 8, 4, 2 or 1 bits an
element. Nothing here knows bytes or buffers.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from typing import ClassVar, NamedTuple


class Tier(enum.IntEnum):
    """A share of a weight's bits, the first ones first. A group *holds* a tier when it holds all
    bits up to it.
    """

    SKETCH = 0  # optional: so few that they are there very early
    DRAFT = 1  # a usable model, of fp8 quality by default
    REFINE = 2  # the rest, which makes it exact


class FloatFormat(NamedTuple):
    """The bits of a float, the highest first: one sign bit, the exponent, the mantissa."""

    dtype: str
    exponent_bits: int
    mantissa_bits: int

    @property
    def bits(self) -> int:
        return 1 + self.exponent_bits + self.mantissa_bits


FLOAT_FORMATS = {
    "bf16": FloatFormat("BF16", 8, 7),
    "f16": FloatFormat("F16", 5, 10),
    "f32": FloatFormat("F32", 8, 23),
}
_FLOAT_NAME = re.compile(r"(bf16|f16|f32)(\.sparse)?\.(?:(0|[1-9][0-9]?)\.)?(0|[1-9][0-9]?)")
_WHOLE, _BYTES, _SPARSE = "whole", "bytes", "sparse"


class Encoding:
    """One encoding. There is only one object of each name, so that they can be compared with `is`.

    `tiers` are those in which it has planes. `float_format` is None where elements are not cut into
    bits.
    """

    __slots__ = ("_mantissa_bits", "float_format", "is_sparse", "is_whole", "tiers", "value")

    WHOLE: ClassVar[Encoding]  # one plane: the bytes as they are
    BYTES: ClassVar[Encoding]  # one plane a byte of the element, little end first
    WHOLE_SKETCH: ClassVar[Encoding]  # the same two, for artifacts that have a sketch: in that tier
    BYTES_SKETCH: ClassVar[Encoding]
    # In artifacts with a base: the base's elements, and zigzag differences to them as BYTES.
    SAME: ClassVar[Encoding]
    DELTA: ClassVar[Encoding]
    BYTES_SPARSE: ClassVar[Encoding]  # one byte an element, of those that are not 0
    # Draft: exponent bytes, then sign + 3 mantissa bits; refine: 4 mantissa bits.
    BF16_3: ClassVar[Encoding]

    def __init__(
        self, name: str, float_format: FloatFormat | None, mantissa_bits: Mapping[Tier, int]
    ) -> None:
        """For this module. `mantissa_bits` are those known once a tier is there, of each tier that
        there is.
        """
        self.value = name
        self.float_format = float_format
        self.is_whole = name.startswith(_WHOLE)
        self.is_sparse = f".{_SPARSE}" in name
        self.tiers = tuple(mantissa_bits)
        self._mantissa_bits = mantissa_bits

    @staticmethod
    def find(name: str) -> Encoding | None:
        """The encoding of that name; None when there is none."""
        found = _KNOWN.get(name)
        if found is None and (match := _FLOAT_NAME.fullmatch(name)):
            family, _, sketch, draft = match.groups()
            bits = {} if sketch is None else {Tier.SKETCH: int(sketch)}
            found = _make_float(name, FLOAT_FORMATS[family], {**bits, Tier.DRAFT: int(draft)})
            if found is not None:
                found = _KNOWN.setdefault(name, found)
        return found

    @staticmethod
    def of_float(dtype: str, draft_bits: int, sketch_bits: int | None = None) -> Encoding:
        """The encoding of a float dtype, by the mantissa bits in its draft and, where it has one,
        in its sketch.

        More draft bits than the dtype has mean all of them. Raises `ValueError` for invalid
        bits.
        """
        family = next(name for name, known in FLOAT_FORMATS.items() if known.dtype == dtype)
        draft_bits = min(draft_bits, FLOAT_FORMATS[family].mantissa_bits)
        name = ".".join(str(part) for part in (family, sketch_bits, draft_bits) if part is not None)
        return _named(name)

    @property
    def dense(self) -> Encoding:
        """The encoding of a sparse one's values; of others, itself."""
        return _named(self.value.replace(f".{_SPARSE}", "")) if self.is_sparse else self

    @property
    def sparse(self) -> Encoding | None:
        """The sparse encoding whose values are coded so; None where there is none."""
        family, _, bits = self.value.partition(".")
        return Encoding.find(".".join(part for part in (family, _SPARSE, bits) if part))

    def fits(self, dtype: str) -> bool:
        return self.float_format is None or self.float_format.dtype == dtype

    def mantissa_bits(self, tier: Tier) -> int:
        """How many are known once this tier is there, one of `tiers`."""
        return self._mantissa_bits[tier]

    def bits_before(self, tier: Tier) -> int | None:
        """How many mantissa bits are known before this tier, one of `tiers`; None when it is the
        first.
        """
        place = self.tiers.index(tier)
        return self._mantissa_bits[self.tiers[place - 1]] if place else None

    def plane_bits(self, tier: Tier, element_bytes: int) -> tuple[int, ...]:
        """Of each plane in that tier: how many bits of an element it holds; of a sparse encoding,
        of each plane of values. A whole plane is not cut, and has none.
        """
        if tier not in self._mantissa_bits or self.is_whole:
            return ()
        if self.float_format is None:
            return (8,) * element_bytes
        before = self.bits_before(tier)
        if before is None:
            return (8, *cut_field(1 + self._mantissa_bits[tier]))
        return cut_field(self._mantissa_bits[tier] - before)

    def __repr__(self) -> str:
        return f"Encoding({self.value!r})"

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return _named, (self.value,)


def cut_field(bits: int) -> tuple[int, ...]:
    """The planes of a field of `bits` bits, its highest bits first: whole bytes, then powers of
    two.
    """
    return (8,) * (bits // 8) + tuple(size for size in (4, 2, 1) if bits % 8 & size)


def _make_float(name: str, float_format: FloatFormat, bits: dict[Tier, int]) -> Encoding | None:
    """None where a tier would have no bits, or more than there are."""
    draft_bits, all_bits = bits[Tier.DRAFT], float_format.mantissa_bits
    if not bits.get(Tier.SKETCH, -1) < draft_bits <= all_bits:
        return None
    return Encoding(name, float_format, bits if draft_bits == all_bits else {**bits, Tier.REFINE: all_bits})


def _named(name: str) -> Encoding:
    found = Encoding.find(name)
    if found is None:
        raise ValueError(f"there is no encoding {name!r}")
    return found


_KNOWN = {
    name: Encoding(name, None, {} if tier is None else {tier: 0})
    for name, tier in (
        (_WHOLE, Tier.DRAFT),
        (_BYTES, Tier.DRAFT),
        (f"{_WHOLE}.sketch", Tier.SKETCH),
        (f"{_BYTES}.sketch", Tier.SKETCH),
        (f"{_BYTES}.{_SPARSE}", Tier.DRAFT),
        ("same", None),
        ("delta", Tier.REFINE),
    )
}
Encoding.WHOLE = _named(_WHOLE)
Encoding.BYTES = _named(_BYTES)
Encoding.WHOLE_SKETCH = _named(f"{_WHOLE}.sketch")
Encoding.BYTES_SKETCH = _named(f"{_BYTES}.sketch")
Encoding.SAME = _named("same")
Encoding.DELTA = _named("delta")
Encoding.BYTES_SPARSE = _named(f"{_BYTES}.{_SPARSE}")
Encoding.BF16_3 = _named("bf16.3")
