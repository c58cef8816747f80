"""The digests of an artifact's tensors as they were before packing: a small file next to the
weights.

Parts have digests of what is stored. These are of what it must become: they show
that weights in memory are the original's, bit for bit, whatever was decoded, merged and refined on
the way. `docs/format.md`, "Digests of tensors", is the norm. Nothing here does I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from blake3 import blake3

from .json_object import refuse
from .manifest import Manifest, Tensor

FILE_NAME = "tensors.b3"
_NUM_HEX_DIGITS = 64


def dump_tensor_digests(digests: Iterable[tuple[Tensor, bytes]]) -> bytes:
    """The file's content."""
    return "".join(f"{digest.hex()}  {tensor.name}\n" for tensor, digest in digests).encode()


def parse_tensor_digests(data: bytes, manifest: Manifest) -> tuple[bytes, ...]:
    """The digest of each of the manifest's tensors, in their order. Raises `ManifestError` unless
    all are there.
    """
    try:
        lines = data.decode().split("\n")
    except UnicodeDecodeError:
        refuse("it is not UTF-8", FILE_NAME)
    if len(lines) != len(manifest.tensors) + 1 or lines[-1]:
        refuse(f"it should have a line for each of the {len(manifest.tensors)} tensors", FILE_NAME)
    digests: list[bytes] = []
    for tensor, line in zip(manifest.tensors, lines, strict=False):
        text, gap, name = line[:_NUM_HEX_DIGITS], line[_NUM_HEX_DIGITS : _NUM_HEX_DIGITS + 2], line[66:]
        if name != tensor.name or gap != "  " or set(text) - set("0123456789abcdef"):
            refuse(f"its line for tensor {tensor.name!r} does not fit", FILE_NAME)
        digests.append(bytes.fromhex(text))
    return tuple(digests)


def wrong_tensors(
    manifest: Manifest, digests: Iterable[bytes], content: Callable[[Tensor], memoryview]
) -> list[Tensor]:
    """Those whose content has another digest. Hashes in as many threads as there are cores, without
    the GIL.
    """
    return [
        tensor
        for tensor, digest in zip(manifest.tensors, digests, strict=True)
        if blake3(content(tensor), max_threads=blake3.AUTO).digest() != digest
    ]
