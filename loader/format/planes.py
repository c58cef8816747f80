"""Elements ↔ planes: fields of 1 to 7 bits packed into bytes, and floats taken apart tier by tier.

Fields: a frame of c elements takes h = ceil(c / share) bytes, where 2, 4 or 8 elements share a
byte; byte j holds element j in its lowest bits, element j + h in the next ones, and so on. So a
frame is unpacked by a few shifts of whole rows, eight bytes at a time: what a shift moves across
the bytes of such a lane, a mask takes away. Works on buffers of the caller's, without the GIL.
`docs/format.md`, "Packed planes", is the norm.

Floats: the first tier makes floats of exponents, signs and a few mantissa bits; each later one
replaces mantissa bits. What is not known yet is filled with the middle of what it can be: a 1, then
zeros. Bits are assigned under a mask, never added or XORed: what is decoded twice must give the
same weights. Works on batches: whole frames, or a single shorter one. Fields are brought together
one byte an element first, which costs little, and only then widened to elements.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..native import merge as native
from .encoding import Encoding, FloatFormat, Tier, cut_field
from .manifest import FRAME_ELEMENTS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]
    Words = NDArray[Any]  # the floats' bit patterns: uint16 or uint32

_LANE = np.dtype("<u8")
_EACH_BYTE = 0x0101010101010101


def pack(values: Bytes, bits: int, out: Bytes) -> None:
    """Whole frames of values below 2^bits, or a shorter one, into `out`, ceil(values.size · bits /
    8) bytes.
    """
    share = 8 // bits
    row = min(out.size, FRAME_ELEMENTS // share)
    if values.size != share * out.size:  # a shorter frame: what it lacks is 0
        values = np.concatenate([values, np.zeros(share * out.size - values.size, np.uint8)])
    rows, packed = values.reshape(-1, share, row), out.reshape(-1, row)
    np.copyto(packed, rows[:, 0])
    for place in range(1, share):
        np.bitwise_or(packed, rows[:, place] << np.uint8(place * bits), out=packed)


def unpack(plane: Bytes, bits: int, out: Bytes, *, up: int = 0) -> None:
    """The values of whole frames, or of a shorter one, each shifted `up`, into the front of `out`:
    one a byte.

    `out` must have room for 8 / bits values a byte of the plane, also where the frame has fewer
    elements.
    """
    share = 8 // bits
    row = min(plane.size, FRAME_ELEMENTS // share)
    lane = _LANE if row % _LANE.itemsize == 0 else plane.dtype
    packed = plane.view(lane).reshape(-1, 1, row // lane.itemsize)
    rows = out[: share * plane.size].view(lane).reshape(-1, share, row // lane.itemsize)
    shifts = np.arange(0, 8, bits, dtype=lane).reshape(share, 1)
    np.right_shift(packed, shifts, out=rows)
    np.bitwise_and(rows, in_each_byte((1 << bits) - 1, lane), out=rows)
    if up:
        np.left_shift(rows, lane.type(up), out=rows)


def has_unused_bits(plane: Bytes, bits: int, count: int) -> bool:
    """True if bits behind the last of `count` elements are not 0: those of the last frame, where it
    is shorter.
    """
    share, rest = 8 // bits, count % FRAME_ELEMENTS
    if rest % share == 0:
        return False
    row = -(-rest // share)
    full, more = divmod(rest, row)  # rows of elements, and elements of the row behind these
    frame = plane[plane.size - row :]
    above = (frame[:more] >> (full + 1) * bits).any() if full + 1 < share else False
    return bool(above or (frame[more:] >> full * bits).any())


def as_lanes(*arrays: Bytes) -> tuple[NDArray[Any], ...]:
    """Views of arrays of one size, whose bytes are worked on alike: eight bytes a lane where that
    goes.
    """
    lane = _LANE if arrays[0].size % _LANE.itemsize == 0 else arrays[0].dtype
    return tuple(array.view(lane) for array in arrays)


def in_each_byte(value: int, lane: np.dtype[Any]) -> Any:
    """A lane that holds the value in each of its bytes."""
    return lane.type(value * _EACH_BYTE & (1 << 8 * lane.itemsize) - 1)


_NIBBLE = (4,)
# Of a byte: where the first chunk holds the sign, and mantissa bits.
_SIGN, _ALL_BUT_SIGN = 0x80, 0x7F


class Room(NamedTuple):
    """Working memory of one thread for batches of `count` elements: `words` has as many bytes as
    they take.
    """

    words: Bytes
    field: Bytes  # (count,)
    spare: Bytes  # (count,)


class Chunk(NamedTuple):
    """Up to 8 bits of a field: the planes that hold them, and how many of the field's bits stand
    below.
    """

    places: tuple[int, ...]  # of its planes among the field's
    bits: tuple[int, ...]  # of each
    below: int


def word_type(float_format: FloatFormat) -> np.dtype[Any]:
    return np.dtype(f"<u{float_format.bits // 8}")


def cut_chunks(field_bits: int) -> tuple[Chunk, ...]:
    """A field's chunks, its highest bits first: whole bytes, then all smaller planes together."""
    sizes = cut_field(field_bits)
    num_bytes = sizes.count(8)
    chunks = [Chunk((place,), (8,), field_bits - 8 * (place + 1)) for place in range(num_bytes)]
    if sizes[num_bytes:]:
        chunks.append(Chunk(tuple(range(num_bytes, len(sizes))), sizes[num_bytes:], 0))
    return tuple(chunks)


def kept_bits(encoding: Encoding, tier: Tier) -> int:
    """The bits of a word that a later tier leaves as they are: those that are known before it."""
    float_format, before = _format_of(encoding), encoding.bits_before(tier)
    assert before is not None
    return -1 << float_format.mantissa_bits - before & (1 << float_format.bits) - 1


# Floats → planes


def split_floats(words: Words, encoding: Encoding, tier: Tier, planes: list[Bytes]) -> None:
    """One tier of a batch of floats into its planes, which have exactly the size that they need."""
    float_format, known = _format_of(encoding), encoding.mantissa_bits(tier)
    before = encoding.bits_before(tier)
    unknown = float_format.mantissa_bits - known
    field = words >> words.dtype.type(unknown)
    if before is None:
        exponents, *planes = planes
        np.copyto(exponents, words >> words.dtype.type(float_format.mantissa_bits), casting="unsafe")
        np.bitwise_and(exponents, np.uint8((1 << float_format.exponent_bits) - 1), out=exponents)
        field &= words.dtype.type((1 << known) - 1)
        field |= words >> words.dtype.type(float_format.bits - 1) << words.dtype.type(known)
        field_bits = 1 + known
    else:
        field_bits = known - before
        field &= words.dtype.type((1 << field_bits) - 1)
    below = field_bits
    for plane, bits in zip(planes, cut_field(field_bits), strict=True):
        below -= bits
        values = (field >> words.dtype.type(below) & words.dtype.type((1 << bits) - 1)).astype(np.uint8)
        pack(values, bits, plane)


# Planes → floats


def merge_floats(out: Bytes, pieces: list[Bytes], encoding: Encoding, tier: Tier, room: Room) -> None:
    """Write what one tier says about a batch into its floats, from the pieces of the tier's planes.

    A later tier needs what the tiers before it wrote, and may be repeated. Exponents must have no
    bit too many. One pass in the native core; without it, or for floats that are not aligned,
    numpy's passes, which write the same.
    """
    float_format = _format_of(encoding)
    # Planes before the field's: that of the exponents.
    num_before = int(encoding.bits_before(tier) is None)
    done = native.merge(
        out.view(word_type(float_format)),
        pieces[0] if num_before else None,
        pieces[num_before:],
        encoding.plane_bits(tier, float_format.bits // 8)[num_before:],
        frame_elements=FRAME_ELEMENTS,
        mantissa_bits=float_format.mantissa_bits,
        known_bits=encoding.mantissa_bits(tier),
    )
    if not done:
        merge_in_numpy(out, pieces, encoding, tier, room)


def merge_in_numpy(out: Bytes, pieces: list[Bytes], encoding: Encoding, tier: Tier, room: Room) -> None:
    """The same in numpy."""
    recipe = _recipe_for(encoding, tier)
    words: Words = out.view(recipe.word)
    bits: Words = room.words.view(recipe.word)[: words.size]
    keep = recipe.keep
    if recipe.first is not None:
        exponents, *pieces = pieces
        _merge_first(words, exponents, recipe.first, pieces, bits, room)
    for chunk, factor in recipe.chunks:
        if factor is None and chunk.bits == _NIBBLE:
            low, high = _widen_nibbles(pieces[chunk.places[0]], recipe.word, room)
            np.bitwise_and(high, 0b1111, out=low)
            np.right_shift(high, 4, out=high)
        else:
            np.copyto(bits, _join(chunk, pieces, words.size, room))
            if factor is not None:
                np.multiply(bits, factor, out=bits)
        if keep is not None:  # only now: what is written next is still in the cache
            np.bitwise_and(words, keep, out=words)
            keep = None
        np.bitwise_or(words, bits, out=words)
    if recipe.fill is not None:
        np.bitwise_or(words, recipe.fill, out=words)


class _First(NamedTuple):
    """How the first tier's exponents, and the chunk with the sign, become words.

    That chunk stands at the top of a byte: its highest bit is the sign, the others are the
    mantissa's highest. numpy multiplies faster than it shifts left, and a multiplication puts two
    copies of the byte into a word at once: one where its sign belongs, one where its mantissa bits
    do. They do not overlap, so nothing is carried.
    """

    chunk: Chunk
    exponent_factor: np.integer[Any]
    factor: np.integer[Any]
    low_factor: np.integer[Any]  # for a nibble that is not at the top of its byte
    # None where the sign goes with the exponent: it is too short for two copies.
    mask: np.integer[Any] | None
    # Where it does: from the top of the byte to where it stands before the exponent.
    sign_shift: int


class _Recipe(NamedTuple):
    """The steps of `merge_floats` for one tier of an encoding; numbers are words."""

    word: np.dtype[Any]
    first: _First | None  # in the first tier
    keep: np.integer[Any] | None  # the bits that a later tier leaves as they are
    chunks: tuple[
        tuple[Chunk, np.integer[Any] | None], ...
    ]  # each with the factor that moves it to its place
    fill: np.integer[Any] | None


@functools.cache  # of some hundred encodings, two or three tiers each
def _recipe_for(encoding: Encoding, tier: Tier) -> _Recipe:
    float_format, known = _format_of(encoding), encoding.mantissa_bits(tier)
    word, before = word_type(float_format), encoding.bits_before(tier)
    unknown = float_format.mantissa_bits - known
    chunks = cut_chunks(1 + known if before is None else known - before)
    first = None
    if before is None:
        first, chunks = _first_of(chunks[0], float_format), chunks[1:]
    ups = [unknown + chunk.below for chunk in chunks]
    return _Recipe(
        word,
        first,
        keep=None if before is None else word.type(kept_bits(encoding, tier)),
        chunks=tuple(
            (chunk, word.type(1 << up) if up else None) for chunk, up in zip(chunks, ups, strict=True)
        ),
        fill=word.type(1 << unknown - 1) if unknown else None,
    )


def _first_of(chunk: Chunk, float_format: FloatFormat) -> _First:
    word = word_type(float_format)
    mantissa_up, sign_up = float_format.mantissa_bits - 7, float_format.bits - 8
    factor, mask = 1 << mantissa_up, None
    if float_format.exponent_bits == 8:
        known = 0xFF & -1 << 8 - sum(chunk.bits)  # bits of the byte that are the chunk's
        factor |= 1 << sign_up
        mask = word.type((known & _SIGN) << sign_up | (known & _ALL_BUT_SIGN) << mantissa_up)
    return _First(
        chunk,
        exponent_factor=word.type(1 << float_format.mantissa_bits),
        factor=word.type(factor),
        low_factor=word.type(factor << 4 & _ones(word)),
        mask=mask,
        sign_shift=7 - float_format.exponent_bits,
    )


def _ones(word: np.dtype[Any]) -> int:
    return (1 << 8 * word.itemsize) - 1


def _merge_first(
    words: Words, exponents: Bytes, first: _First, pieces: list[Bytes], bits: Words, room: Room
) -> None:
    if first.mask is None:
        top = _join(first.chunk, pieces, words.size, room, to_top=True)
        exponents, top = _move_sign(exponents, top, first.sign_shift, room)
        np.copyto(bits, top)
        np.multiply(bits, first.factor, out=bits)
    else:
        if first.chunk.bits == _NIBBLE:
            low, high = _widen_nibbles(pieces[0], words.dtype, room)
            np.multiply(high, first.low_factor, out=low)
            np.multiply(high, first.factor, out=high)
        else:
            np.copyto(bits, _join(first.chunk, pieces, words.size, room, to_top=True))
            np.multiply(bits, first.factor, out=bits)
        np.bitwise_and(bits, first.mask, out=bits)
    np.copyto(words, exponents)
    np.multiply(words, first.exponent_factor, out=words)
    np.bitwise_or(words, bits, out=words)


def _widen_nibbles(packed: Bytes, word: np.dtype[Any], room: Room) -> tuple[Words, Words]:
    """Room for the elements of the low and of the high nibbles, (frames, half) each; the bytes
    stand in the latter.

    Together they are the front of the room's words, frame by frame: of an odd count, the unused
    nibble is last. Most drafts are of nibbles: widening these by halves is quicker than `_join`.
    """
    half = min(packed.size, FRAME_ELEMENTS // 2)
    words = room.words.view(word)[: 2 * packed.size].reshape(-1, 2, half)
    np.copyto(words[:, 1], packed.reshape(-1, half))
    return words[:, 0], words[:, 1]


def _move_sign(exponents: Bytes, top: Bytes, sign_shift: int, room: Room) -> tuple[Bytes, Bytes]:
    """The sign goes from the top of its own byte to where it stands before a short exponent."""
    high, low = room.spare[: top.size], room.field[: top.size]
    from_exponents, from_top, to_high, to_low = as_lanes(exponents, top, high, low)
    lane = to_high.dtype
    np.right_shift(from_top, lane.type(sign_shift), out=to_high)
    np.bitwise_and(to_high, in_each_byte(_SIGN >> sign_shift, lane), out=to_high)
    np.bitwise_or(to_high, from_exponents, out=to_high)
    np.bitwise_and(from_top, in_each_byte(_ALL_BUT_SIGN, lane), out=to_low)
    return high, low


def _join(chunk: Chunk, pieces: list[Bytes], count: int, room: Room, *, to_top: bool = False) -> Bytes:
    """A chunk's value for each element, a byte each; with `to_top` moved up so far that its first
    bit is the byte's.
    """
    if chunk.bits == (8,):
        return pieces[chunk.places[0]]
    up = 8 if to_top else sum(chunk.bits)
    field, spare = room.field[:count], room.spare[:count]
    for number, (place, bits) in enumerate(zip(chunk.places, chunk.bits, strict=True)):
        up -= bits
        unpack(pieces[place], bits, room.spare if number else room.field, up=up)
        if number:
            to_field, from_spare = as_lanes(field, spare)
            np.bitwise_or(to_field, from_spare, out=to_field)
    return field


def _format_of(encoding: Encoding) -> FloatFormat:
    assert encoding.float_format is not None
    return encoding.float_format
