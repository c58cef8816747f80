"""`tuning.json`: what was measured of a model's products, kept beside its artifact, for machines like those it was
measured on (docs/cli.md).

A machine's `libraries` came later than the rest: where it has none they are not written, and files are what they were
before. Versions that do not know them refuse a file that names some, and the backends in it, as a newer one's.

It is not covered by the artifact's digest, and is read with distrust: whatever it says, the most that follows is which
one of the ways to compute a product is taken that this process has anyway, and would check before it takes it. Time and
memory are bounded by constants. Whoever writes it loses nothing of others: entries are exchanged one by one, by
conditional writes.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import logging
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...loader.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ChangedError,
    FormatError,
    NotFoundError,
    SourceClosedError,
    SourceError,
    UnavailableError,
)
from ...loader.format.json_object import Document, JsonObject, is_text
from ..errors import TuningError
from .choice import PRODUCT_SIZES, Figures, LinearBackend

if TYPE_CHECKING:
    from ...loader.sources.base import Source, Store

FILE_NAME = "tuning.json"
FORMAT_NAME, FORMAT_VERSION = "teneral-tuning", 1
MAX_FILE_BYTES = 256 * 1024
MAX_JSON_ITEMS = 65_536
MAX_ENTRIES = 32  # machines; the oldest go
MAX_KINDS = 64
MAX_THREADS = 1024
MAX_TIME_NS = 10**13
MAX_WRITES = 20  # that others may spoil
MAX_CPUINFO_BYTES = 16_384  # the first processor's part

TUNING = Document(
    FILE_NAME,
    TuningError,
    "The file is damaged, or `teneral tune` did not write it. Remove it, and tune again.",
    "A newer Teneral may have written it: upgrade, or remove it and tune again with this version.",
)

_TOP_KEYS = frozenset(("format", "version", "entries"))
_ENTRY_KEYS = frozenset(("machine", "times_ns"))
_MACHINE_KEYS = frozenset(("cpu", "instructions", "threads", "torch", "kernels"))
_LIBRARIES_KEY = "libraries"
NONE = "none"  # where there is no numba, or no library
LIBRARIES = ("onnxruntime", "openvino")  # as packages and as modules
_BACKENDS = {backend.value: backend for backend in LinearBackend}
_SIZES = {str(size): size for size in PRODUCT_SIZES}

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Machine:
    """What a measurement depends on besides the model."""

    cpu: str  # the processor's name
    instructions: str  # of those that it has, a digest, behind what torch makes of them
    threads: int
    torch: str  # its version
    kernels: str  # the version of numba, and a digest of our kernels' source; NONE without numba
    libraries: str = (
        NONE  # those with products over copies and their versions, and a digest of our source for them
    )

    @classmethod
    def here(cls, num_threads: int) -> Machine:
        """This one. Imports torch."""
        import torch  # the format is read without it

        cpu, instructions = _processor()
        return cls(
            cpu,
            f"{torch.backends.cpu.get_cpu_capability()} {instructions}",
            num_threads,
            str(torch.__version__),
            _kernels_version(),
            _libraries_version(),
        )

    def as_json(self) -> dict[str, str | int]:
        """Without what an older version would not know, where it says nothing."""
        told: dict[str, str | int] = asdict(self)
        if self.libraries == NONE:
            del told[_LIBRARIES_KEY]
        return told


@dataclass(frozen=True, slots=True)
class Entry:
    """What was measured on one machine."""

    machine: Machine
    figures: Figures


def parse_tuning(data: bytes) -> tuple[Entry, ...]:
    """The entries, the oldest first, each of another machine. Raises `TuningError`, which names the place."""
    top = JsonObject(TUNING.read(data, max_items=MAX_JSON_ITEMS), FILE_NAME, _TOP_KEYS, document=TUNING)
    if top.text("format") != FORMAT_NAME:
        TUNING.refuse(f"it is not {FORMAT_NAME!r}", "format")
    if top.integer("version") != FORMAT_VERSION:
        TUNING.refuse(f"it is not {FORMAT_VERSION}", "version", hint=TUNING.newer)
    entries = tuple(_entry(value, where) for value, where in top.items("entries", MAX_ENTRIES))
    if len({entry.machine for entry in entries}) < len(entries):
        TUNING.refuse("two entries are of one machine", "entries")
    return entries


def render_tuning(entries: Sequence[Entry]) -> bytes:
    """As `parse_tuning` reads it: the youngest entries, as many as there is room for."""
    kept = list(entries[-MAX_ENTRIES:])
    while True:
        document = {
            "format": FORMAT_NAME,
            "version": FORMAT_VERSION,
            "entries": [{"machine": entry.machine.as_json(), "times_ns": entry.figures} for entry in kept],
        }
        data = json.dumps(document, indent=1).encode()
        if len(data) <= MAX_FILE_BYTES or len(kept) <= 1:
            return data
        del kept[0]


def read_entries(source: Source) -> tuple[tuple[Entry, ...], str | None]:
    """What is kept in the folder, and the file's version; nothing, and None, where no file is. Raises `TuningError`
    where it is none, and the store's errors.
    """
    try:
        data, info = source.read(FILE_NAME, max_bytes=MAX_FILE_BYTES)
    except NotFoundError:
        return (), None
    except AccessDeniedError as error:
        if not error.may_be_absent:
            raise
        return (), None  # where it exists after all, it is only a hint, and is not replaced
    return parse_tuning(data), info.version


def read_figures(source: Source, machine: Machine) -> Figures:
    """What is kept for this machine; nothing where nothing is, or where it cannot be read, of which the log tells."""
    try:
        entries, _ = read_entries(source)
    except SourceClosedError:  # nobody is served any more
        return {}
    except (SourceError, FormatError) as error:
        logger.warning("%s/%s is left alone: %s", source.url.rstrip("/"), FILE_NAME, error.message)
        return {}
    return next((entry.figures for entry in entries if entry.machine == machine), {})


def keep_figures(store: Store, entry: Entry) -> int:
    """Put this entry into the folder's file, in the place of one of the same machine. Returns how many there are then.

    Others may do the same at the same time. Raises as `read_entries` does, having written nothing, and the store's
    errors.
    """
    for attempt in range(MAX_WRITES):
        try:
            before, version = read_entries(store)
        except ChangedError:
            continue
        others = [each for each in before if each.machine != entry.machine]
        data = render_tuning([*others, entry])
        num_entries = len(parse_tuning(data))  # before anything that nobody could read is written
        try:
            store.put(FILE_NAME, data, if_absent=version is None, if_version=version)
        except AlreadyExistsError:
            time.sleep(0.01 * attempt)  # another one was faster: upon what it wrote, then
            continue
        return num_entries
    raise UnavailableError(
        f"{store.url} has a {FILE_NAME} that others write without a pause",
        source=store.url,
        name=FILE_NAME,
        hint="Try again when they are done.",
    )


def _entry(value: Any, where: str) -> Entry:
    JsonObject(value, where, _ENTRY_KEYS, document=TUNING)  # it has these keys, and no others
    told = value["machine"]
    keys = _MACHINE_KEYS
    if type(told) is dict and _LIBRARIES_KEY in told:
        keys |= {_LIBRARIES_KEY}
    machine = JsonObject(told, f"{where}.machine", keys, document=TUNING)
    texts = {key: machine.text(key) for key in keys - {"threads"}}
    return Entry(
        Machine(threads=machine.integer("threads", MAX_THREADS), **texts),
        _figures(value["times_ns"], f"{where}.times_ns"),
    )


def _figures(value: Any, where: str) -> Figures:
    if type(value) is not dict or len(value) > MAX_KINDS:
        TUNING.refuse(f"it is not an object with at most {MAX_KINDS} kinds", where)
    figures: dict[str, dict[int, dict[LinearBackend, int]]] = {}
    for kind, by_size in value.items():
        if not is_text(kind) or type(by_size) is not dict:
            TUNING.refuse(f"{str(kind)[:40]!r} or its value cannot stand here", where)
        figures[kind] = {}
        for size, times in by_size.items():
            place = f"{where}.{kind[:80]}.{size[:8]}"
            if size not in _SIZES:
                TUNING.refuse(f"it is not one of {', '.join(_SIZES)} rows", place, hint=TUNING.newer)
            if type(times) is not dict:
                TUNING.refuse("it is not a JSON object", place)
            if unknown := [name for name in times if name not in _BACKENDS]:
                TUNING.refuse(
                    f"{unknown[0][:40]!r} is not one of {', '.join(_BACKENDS)}", place, hint=TUNING.newer
                )
            for time_ns in times.values():
                if type(time_ns) is not int or not 0 < time_ns <= MAX_TIME_NS:
                    TUNING.refuse(f"a time is not an integer from 1 to {MAX_TIME_NS}", place)
            figures[kind][_SIZES[size]] = {_BACKENDS[name]: times[name] for name in times}
    return figures


def _processor() -> tuple[str, str]:
    """Name and a digest of the instructions of the first processor, as Linux tells them."""
    told: dict[str, str] = {}
    try:
        with open("/proc/cpuinfo", "rb") as file:
            lines = file.read(MAX_CPUINFO_BYTES).decode("ascii", "replace").splitlines()
    except OSError:
        lines = []
    for line in lines:
        key, _, value = line.partition(":")
        told.setdefault(key.strip().lower(), value.strip())
    named = [told[key] for key in ("model name", "cpu implementer", "cpu part") if told.get(key)]
    name = " ".join(named) or platform.processor() or platform.machine() or "unknown"
    flags = sorted((told.get("flags") or told.get("features") or "").split())
    return "".join(letter for letter in name if letter.isprintable())[:200], _digest(" ".join(flags).encode())


def _kernels_version() -> str:
    try:
        numba = metadata.version("numba")
    except metadata.PackageNotFoundError:
        return NONE
    return f"numba {numba} {_digest_of_sources(Path(__file__).parent)}"


def _libraries_version() -> str:
    versions = [
        f"{name} {_version_of(name)}" for name in LIBRARIES if importlib.util.find_spec(name) is not None
    ]
    if not versions:
        return NONE
    return f"{', '.join(versions)} {_digest_of_sources(Path(__file__).parent / 'libraries')}"


def _version_of(name: str) -> str:
    """Of a library that is there; under another name where a package for special devices brought it."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(name)
    others = metadata.packages_distributions().get(name, [])
    return ", ".join(f"of {other} {metadata.version(other)}" for other in others) or "of an unknown version"


def _digest_of_sources(folder: Path) -> str:
    return _digest(b"".join(source.read_bytes() for source in sorted(folder.glob("*.py"))))


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]
