"""An ONNX model of one operator, MatMulNBits, as the bytes that ONNX Runtime reads.

A few fields of a few of protobuf's messages (onnx.proto), so they are written here rather than by a package for all of
them. It knows nothing of what the weights mean.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

INPUT, OUTPUT = "x", "y"  # (T, K) and (T, N) float32
_IR_VERSION, _OPSET, _CONTRIB = 8, 17, b"com.microsoft"
_FLOAT, _UINT8 = 1, 2  # TensorProto.DataType
_DTYPES = {torch.float32: _FLOAT, torch.uint8: _UINT8}
_ATTRIBUTE_INT = 2  # AttributeProto.AttributeType
_VARINT, _DELIMITED = 0, 2  # protobuf's wire types

Pieces = Sequence[bytes | memoryview]  # of a message; large ones are not copied before all are joined


def matmul_n_bits(
    num_in: int, num_out: int, *, bits: int, block_size: int, weights: Mapping[str, torch.Tensor]
) -> bytes:
    """y = x @ w.T, with inputs rounded to 8 bits, block by block (accuracy level 4). `weights` are the operator's
    further inputs, in its order; their content is copied once.
    """
    attributes = {"K": num_in, "N": num_out, "bits": bits, "block_size": block_size, "accuracy_level": 4}
    node = [*_message(4, [b"MatMulNBits"]), *_message(7, [_CONTRIB])]
    for name in (INPUT, *weights):
        node += _message(1, [name.encode()])
    node += _message(2, [OUTPUT.encode()])
    for name, value in attributes.items():
        node += _message(5, [*_message(1, [name.encode()]), _integer(3, value), _integer(20, _ATTRIBUTE_INT)])
    graph = [*_message(1, node), *_message(2, [b"product"])]
    for name, tensor in weights.items():
        graph += _message(5, list(_tensor(name, tensor)))
    graph += [*_message(11, _rows(INPUT, num_in)), *_message(12, _rows(OUTPUT, num_out))]
    model = [_integer(1, _IR_VERSION), *_message(7, graph)]
    for domain, version in ((b"", _OPSET), (_CONTRIB, 1)):
        model += _message(8, [*_message(1, [domain]), _integer(2, version)])
    return b"".join(model)


def _tensor(name: str, tensor: torch.Tensor) -> Iterator[bytes | memoryview]:
    """A TensorProto."""
    yield from (_integer(1, size) for size in tensor.shape)
    yield _integer(2, _DTYPES[tensor.dtype])
    yield from _message(8, [name.encode()])
    yield from _message(9, [tensor.contiguous().numpy().data.cast("B")])


def _rows(name: str, width: int) -> Pieces:
    """A ValueInfoProto of (T, width) float32 with any T."""
    shape = [*_message(1, _message(2, [b"T"])), *_message(1, [_integer(1, width)])]
    tensor = [_integer(1, _FLOAT), *_message(2, shape)]
    return [*_message(1, [name.encode()]), *_message(2, _message(1, tensor))]


def _message(field: int, content: Pieces) -> Pieces:
    return [_varint(field << 3 | _DELIMITED) + _varint(sum(map(len, content))), *content]


def _integer(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _varint(value: int) -> bytes:
    """`value` >= 0, seven bits a byte, the lowest first."""
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
