"""Rows of a GGUF tensor as the pieces of a model directory have them, and back.

    rows of blocks → made_of → rows of a piece
    rows of all pieces of a tensor → restored_from → rows of blocks, where `is_reversible`

Pure functions of arrays; files are unknown here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ...errors import CheckpointError
from ..nibbles import pack_nibbles, unpack_nibbles
from .blocks import MXFP4
from .model import Form, TensorPiece

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from .blocks import Floats
    from .reader import GgufTensor

    Bytes = NDArray[np.uint8]

_REVERSIBLE = ("Q8_0", "Q4_0", MXFP4)  # types whose levels and scales are their blocks' own bits


def lies_in_the_file(piece: TensorPiece) -> bool:
    """True if the piece's bytes are those of the file, in the same order."""
    is_plain = piece.form is Form.FLOATS and piece.source.type.dtype == piece.spec.dtype and not piece.shift
    return not piece.head_rows and (is_plain or piece.form is Form.BLOCKS)


def row_bytes(piece: TensorPiece) -> int:
    """Of a piece that a row of its tensor becomes."""
    columns = piece.source.columns
    if piece.form is Form.BLOCKS:
        return piece.source.row_bytes
    if piece.form in (Form.FLOATS, Form.LOGS, Form.LATENTS):
        # A bias has rows of one number.
        width = piece.spec.shape[-1] if piece.form is Form.LATENTS else columns
        return width * (4 if piece.spec.dtype == "F32" else 2)
    groups = columns // piece.source.type.elements
    return {
        Form.INT8: columns,
        Form.INT4: columns // 2,
        Form.E2M1: columns // 2,
        Form.SCALES: 2 * groups,
        Form.E8M0: groups,
    }[piece.form]


def made_of(piece: TensorPiece, rows: Bytes) -> Bytes:
    """Some rows of blocks as the piece has them, with rows of heads back in transformers' order."""
    if piece.head_rows:
        # In a head, rows 2i and 2i + 1 turn together; transformers has them half a head apart.
        heads = rows.reshape(-1, piece.head_rows // 2, 2, rows.shape[1])
        rows = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
    if piece.form is Form.BLOCKS:
        return rows.reshape(-1)
    kind = piece.source.type
    blocks = rows.reshape(-1, kind.block_bytes)
    if piece.form is Form.SCALES:
        return np.ascontiguousarray(blocks[:, :2]).reshape(-1)
    if piece.form is Form.E8M0:
        return np.ascontiguousarray(blocks[:, 0])
    if piece.form is Form.E2M1:
        # Byte j holds elements j and j + 16; neighbours are to be in one.
        halves = np.concatenate([blocks[:, 1:] & np.uint8(15), blocks[:, 1:] >> np.uint8(4)], axis=1)
        neighbours: Bytes = halves[:, ::2] | halves[:, 1::2] << np.uint8(4)
        return neighbours.reshape(-1)
    if piece.form is Form.FLOATS:
        if kind.dtype == piece.spec.dtype and not piece.shift:
            return rows.reshape(-1)
        return _encode(kind.to_floats(blocks) + np.float32(piece.shift), piece.spec.dtype)
    if piece.form is Form.LOGS:
        decays = -kind.to_floats(blocks).astype(np.float64)
        if not (decays > 0).all():
            where = piece.source.name
            raise CheckpointError(f"{where} has numbers that are not below 0", where=where)
        return _encode(np.log(decays).astype(np.float32), "F32")
    assert kind.to_integers is not None
    levels = kind.to_integers(blocks).levels.reshape(len(rows), -1)
    if piece.form is Form.INT8:
        return levels.view(np.uint8).reshape(-1)
    return pack_nibbles((levels + np.int8(8)).view(np.uint8)).reshape(-1)


def made_of_latents(piece: TensorPiece, tensor: GgufTensor, rows: Bytes) -> Bytes:
    """Some heads of the tensor for keys or that for values as a piece of both has them: (heads, rows, row bytes)."""
    heads = floats_of(tensor, rows).reshape(-1, *tensor.shape[1:])
    if tensor is piece.source:
        heads = np.ascontiguousarray(heads.swapaxes(1, 2))
    return _encode(heads, piece.spec.dtype).reshape(*heads.shape[:2], -1)


def is_reversible(pieces: Sequence[TensorPiece]) -> bool:
    """True if the pieces, all those of one tensor, hold every bit of it."""
    first = pieces[0]
    if first.form is Form.FLOATS:
        return first.source.type.dtype == first.spec.dtype and not first.shift
    if first.form in (Form.LOGS, Form.LATENTS):
        return False
    return first.form is Form.BLOCKS or first.source.type.name in _REVERSIBLE


def restored_from(pieces: Sequence[TensorPiece], made: Sequence[Bytes]) -> Bytes:
    """The tensor's own rows, (rows, row bytes), of which `made` has the bytes of each reversible piece;
    whole heads, where rows of heads were taken apart.
    """
    first = pieces[0]
    rows = made[0].reshape(-1, row_bytes(first))
    if first.form not in (Form.FLOATS, Form.BLOCKS):
        rows = _blocks_of(first, rows, made[1]).reshape(len(rows), -1)
    if first.head_rows:
        heads = rows.reshape(-1, 2, first.head_rows // 2, rows.shape[1])
        rows = np.ascontiguousarray(heads.swapaxes(1, 2)).reshape(rows.shape)
    return rows


def _blocks_of(piece: TensorPiece, levels: Bytes, scales: Bytes) -> Bytes:
    """(blocks, block bytes) of rows of levels, as the piece has them, and the scale of each block."""
    kind = piece.source.type
    if piece.form is Form.INT8 and kind.name == "Q8_0":
        own = levels.reshape(-1, kind.elements)
    else:
        if piece.form is Form.E2M1:
            numbers = np.stack([levels & np.uint8(15), levels >> np.uint8(4)], axis=-1)
        else:
            numbers = unpack_nibbles(levels) if piece.form is Form.INT4 else levels + np.uint8(8)
        numbers = numbers.reshape(-1, 2, kind.elements // 2)
        own = numbers[:, 0] | numbers[:, 1] << np.uint8(4)
    return np.concatenate([scales.reshape(len(own), -1), own], axis=1)


def floats_of(tensor: GgufTensor, rows: Bytes) -> Floats:
    return tensor.type.to_floats(rows.reshape(-1, tensor.type.block_bytes))


def _encode(values: Floats, dtype: str) -> Bytes:
    """The nearest numbers of a dtype, ties to even."""
    if dtype == "F32":
        return values.reshape(-1).view(np.uint8)
    if dtype == "F16":
        with np.errstate(over="ignore"):
            return values.astype("<f2").reshape(-1).view(np.uint8)
    bits = values.reshape(-1).view(np.uint32)
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))) >> 16).astype("<u2")
    rounded[np.isnan(values.reshape(-1))] = 0x7FC0
    return rounded.view(np.uint8)
