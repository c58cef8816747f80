"""One adapter's way from a store into memory, layer by layer in the order in which a forward pass needs them.

A folder has what PEFT saves, or a packed adapter (`packed.py`). Of the former, ranges of the file are read in a few
threads, the first layers' first, and a layer is reported as soon as its bytes are there. The last ranges are small,
because threads share the link, and what they read last is all computed after the last byte. It knows no registry and
no engine.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import NamedTuple

from ...loader.artifact import parse_or_reread
from ...loader.errors import AccessDeniedError, FormatError, NotFoundError, TeneralError
from ...loader.format.limits import MANIFEST_NAME
from ...loader.format.safetensors import FIRST_READ_BYTES, SafetensorsFile, read_header
from ...loader.process.cpu import parallel_map
from ...loader.sources.base import ObjectInfo, Source
from ...loader.sources.open import Subfolder
from ..errors import AdapterError, AdapterNotFoundError, AdapterUnavailableError
from ..models.adapter import AdapterWeights
from ..models.decoder_config import DecoderConfig
from .packed import PackedAdapter, open_packed, too_big
from .peft import CONFIG_NAME, MAX_CONFIG_BYTES, WEIGHTS_NAME, AdapterPlan, PeftConfig, plan_adapter

NUM_CONNECTIONS = 4
MAX_MANIFEST_BYTES = 8 << 20
HEADER_BYTES = 16 << 20  # that a file may have more than its matrices take in memory
RANGE_BYTES = 1 << 20  # of one read, at most
LAST_RANGE_BYTES = 256 << 10  # of the last ones: less costs more requests than it is worth
_BEGINNING = ""  # of the weights' file, as no object is called


class OpenedFile(NamedTuple):
    """An adapter as PEFT saves it, of which all is known but its content."""

    source: Source
    name: str  # of the weights' file in the source
    info: ObjectInfo
    config: bytes
    file: SafetensorsFile
    plan: AdapterPlan
    start: bytes = b""  # of the weights' file, as far as it has been read

    @property
    def stored_bytes(self) -> int:
        return self.info.size_bytes

    def read(self, weights: AdapterWeights, on_layer: Callable[[int], None]) -> bytes:
        """Fill `weights`, reporting each layer, in order, once it is there; returns the content's digest. Holds the
        whole file meanwhile. Raises the source's errors.
        """
        plan = self.plan
        content = bytearray(self.info.size_bytes)
        content[: len(self.start)] = self.start
        ranges, last_range = split_ranges(plan, self.file, len(self.start))
        done: set[int] = set()
        num_filled = 0
        lock = threading.Lock()
        with memoryview(content) as view:

            def read(number: int) -> None:
                begin, end = ranges[number]
                self.source.read_into(self.name, begin, view[begin:end], version=self.info.version)
                done.add(number)
                fill()

            def fill() -> None:
                nonlocal num_filled
                with lock:
                    while num_filled < len(plan.layers) and last_range[num_filled] <= done:
                        plan.fill(weights, num_filled, lambda entry: view[entry.begin : entry.end])
                        on_layer(num_filled)
                        num_filled += 1

            parallel_map(read, range(len(ranges)), num_threads=NUM_CONNECTIONS)
            fill()
            return _digest(self.config, content)


def open_adapter(
    source: Source,
    folder: str,
    base: DecoderConfig,
    *,
    max_bytes: int,
    base_digest: bytes | None = None,
    digest: bytes | None = None,
) -> OpenedFile | PackedAdapter:
    """The adapter in this folder of the source ('': the source itself), in either form, checked against the base.

    A packed one must be of the base with `base_digest`; with `digest`, it must be packed, and have it. Reads its config
    and its header or manifest. Raises `AdapterError`, or the source's own errors.
    """
    own = Subfolder(source, folder)
    names = (MANIFEST_NAME, CONFIG_NAME, WEIGHTS_NAME, _BEGINNING)
    found = parallel_map(lambda name: _first_look(own, name), names, num_threads=len(names))
    manifest, config, weights, beginning = found
    if isinstance(manifest, bytes):
        packed = parse_or_reread(own, manifest, digest=digest)
        return open_packed(own, packed, base, base_digest, max_bytes=max_bytes)
    assert isinstance(manifest, TeneralError)
    if digest is not None or not _may_be_absent(manifest):
        raise manifest
    for each in (config, weights):
        if isinstance(each, TeneralError):
            raise each
    assert isinstance(config, bytes)
    assert isinstance(weights, ObjectInfo)
    if weights.size_bytes > max_bytes + HEADER_BYTES:
        raise too_big(weights.size_bytes, max_bytes)
    peft = PeftConfig.parse(config)
    start = b""
    if isinstance(beginning, _Beginning) and beginning.version == weights.version:
        start = beginning.data
    file = read_header(own, weights, start=start)
    return OpenedFile(own, WEIGHTS_NAME, weights, config, file, plan_adapter(peft, file.entries, base), start)


class _Beginning(NamedTuple):
    """The first bytes of a file, and the version that they are of."""

    data: bytes
    version: str | None


def _first_look(source: Source, name: str) -> bytes | ObjectInfo | _Beginning | TeneralError:
    """The content of an object, of weights what the store knows of them, or their beginning; or why there is none."""
    try:
        if name == WEIGHTS_NAME:
            return source.stat(name)
        if name == _BEGINNING:  # most likely it is longer, and its header is all in there
            data = bytearray(FIRST_READ_BYTES)
            version = source.read_into(WEIGHTS_NAME, 0, memoryview(data))
            return _Beginning(bytes(data), version)
        return source.read(name, max_bytes=MAX_CONFIG_BYTES if name == CONFIG_NAME else MAX_MANIFEST_BYTES)[0]
    except TeneralError as error:
        return error


def _may_be_absent(error: TeneralError) -> bool:
    return isinstance(error, NotFoundError) or (isinstance(error, AccessDeniedError) and error.may_be_absent)


def split_ranges(
    plan: AdapterPlan, file: SafetensorsFile, start: int
) -> tuple[list[tuple[int, int]], list[set[int]]]:
    """Ranges [begin, end) of the file from `start` on in the order of the layers, the header first; and the numbers of
    those that hold each layer.
    """
    ranges: list[tuple[int, int]] = []
    of_layers: list[set[int]] = []
    most_bytes = 0  # of the last range
    left_bytes = file.size_bytes - file.data_start

    def take(begin: int, end: int) -> set[int]:
        """The numbers of the ranges that hold these bytes."""
        nonlocal most_bytes
        own: set[int] = set()
        place = max(begin, start)
        while place < end:
            first, last = ranges[-1] if ranges else (0, 0)
            if last != place or last - first >= most_bytes:
                share = (left_bytes - (place - begin)) // NUM_CONNECTIONS
                most_bytes = min(RANGE_BYTES, max(LAST_RANGE_BYTES, share))
                ranges.append((place, place))
                first = place
            place = min(end, first + most_bytes)
            ranges[-1] = (first, place)
            own.add(len(ranges) - 1)
        return own

    take(0, file.data_start)
    for layer in plan.layers:
        own: set[int] = set()
        for begin, end in sorted((entry.begin, entry.end) for each in layer for entry in (each.a, each.b)):
            own |= take(begin, end)
            left_bytes -= end - begin
        of_layers.append(own)
    return ranges, of_layers


def _digest(config: bytes, content: bytearray) -> bytes:
    from blake3 import blake3  # only where there are adapters

    return blake3(len(config).to_bytes(8, "little") + config).update(content).digest()


def as_adapter_error(name: str, error: TeneralError) -> TeneralError:
    """The error of a load as the requests for this adapter get it. Never one that would mean the base's weights."""
    may_be_absent = isinstance(error, AccessDeniedError) and error.may_be_absent
    if isinstance(error, NotFoundError) or may_be_absent:
        translated: TeneralError = AdapterNotFoundError(
            f"the adapter {name!r} does not exist: {error.message}", param="model", hint=error.hint
        )
    elif isinstance(error, AdapterError | FormatError):
        translated = AdapterError(
            f"the adapter {name!r} cannot be used: {error.message}", param="model", hint=error.hint
        )
    elif isinstance(error, AdapterUnavailableError):
        return error
    else:
        translated = AdapterUnavailableError(f"the adapter {name!r} could not be read: {error.message}")
    translated.__cause__ = error
    return translated
