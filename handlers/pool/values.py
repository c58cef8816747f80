"""A pool file's frozen values: every consumer (check, render, plan, run, Ray) takes these. And its
errors and warnings, with their codes and the line of each key.

Units are in the names; memory is in bytes. A value is complete: defaults are applied, so that a
consumer never looks at `[defaults]`. `Pool.place` finds the line of a key, which `tomllib` does not
keep, for an error or a warning: it looks at statements of a text that `tomllib` has accepted, not
at values, and never raises.

Knows no platform: `teneral pool render` raises and returns the same errors and warnings, with its
own messages.
"""

from __future__ import annotations

import enum
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from ...loader.errors import UsageError
from .keys import device_of


class Code(enum.StrEnum):
    """E: the command ends with status 2. W: printed to standard error; with `--strict`, an error."""

    E0 = "E0"  # the file cannot be read, or is not TOML
    E1 = "E1"  # unknown key
    E2 = "E2"  # wrong type or out of range, or a required key is missing
    E3 = "E3"  # min_warm > max_instances
    E4 = "E4"  # max_concurrency < target_concurrency
    E5 = "E5"  # traffic, shadow or pins name a version that is not served, or weights do not sum to 100
    E6 = "E6"  # beyond the platform's limit
    E7 = "E7"  # scale to zero on a platform where nothing holds the request
    E8 = "E8"  # min_warm + buffer > max_instances
    E9 = "E9"  # the same served name twice
    E10 = "E10"  # `pool run`: the warm instances do not fit in the node's memory
    E11 = "E11"  # the file's version is newer than this program
    W1 = "W1"  # not available on this platform, left out
    W2 = "W2"  # approximated by something else
    W3 = "W3"  # requests fail while the model wakes
    W4 = "W4"  # a patch changes a value that a key of the file sets
    W5 = "W5"  # an address on each instance's own disk
    W6 = "W6"  # nothing that can be served is at an address
    W7 = "W7"  # the node's memory is too small


@dataclass(frozen=True, slots=True)
class Place:
    """The position of a key in a pool file. `line` counts from 1; 0 means that the key is not
    written there.
    """

    file: str
    key: str
    line: int = 0

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        return f"{where}: {self.key}" if self.key else where


class PoolFileError(UsageError):
    """A pool file that cannot be used. `code` and `place` say why and where, for machines."""

    def __init__(self, code: Code, place: Place, message: str, *, hint: str = "") -> None:
        """`message` continues a sentence that begins with the key: 'must be a whole number from 0
        to 1000'.
        """
        super().__init__(f"{place}: {message} [{code}]", key=place.key, hint=hint)
        self.code = code
        self.place = place
        self.detail = message
        self.others: tuple[PoolFileError, ...] = ()  # of the same file

    def as_json(self) -> dict[str, Any]:
        return _as_json(self.code, self.place, self.detail, self.hint)


@dataclass(frozen=True, slots=True)
class PoolWarning:
    """Something in a pool file that a platform cannot do, or not exactly."""

    code: Code
    place: Place
    message: str

    def __str__(self) -> str:
        return f"{self.place}: {self.message} [{self.code}]"

    def as_error(self) -> PoolFileError:
        """The same as an error, for `--strict`."""
        return PoolFileError(self.code, self.place, self.message, hint="--strict makes warnings errors.")

    def as_json(self) -> dict[str, Any]:
        return _as_json(self.code, self.place, self.message, "")


def _as_json(code: Code, place: Place, message: str, hint: str) -> dict[str, Any]:
    report = {"code": str(code), "file": place.file, "key": place.key, "line": place.line, "message": message}
    return {**report, "hint": hint} if hint else report


_PIECE = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}'
    r"|'''.*?'{3,5}"
    r'|"(?:[^"\\\n]|\\.)*"'
    r"|'[^'\n]*'"
    r"|\#[^\n]*"
    r"|\n"
    r"|[^\n\"'\#\[\]{}=]+"
    r"|.",
    re.DOTALL,
)


class KeyLines:
    """Lines by path: `("models", "a", "min_warm")` → 12. An array of tables has its index in the
    path, from 0.
    """

    def __init__(self, text: str) -> None:
        self._lines: dict[tuple[str, ...], int] = {}
        self._arrays: dict[tuple[str, ...], int] = {}
        table: tuple[str, ...] = ()
        for line, statement, is_header in _statements(text):
            if is_header and statement.startswith("[["):
                table = self._inside(_split(statement[2:-2]))
                index = self._arrays.get(table, -1) + 1
                self._arrays[table] = index
                table = (*table, str(index))
                self._lines[table] = line
            elif is_header:
                table = self._inside(_split(statement[1:-1]))
                self._keep(table, line)
            else:
                self._keep((*table, *_split(statement)), line)

    def line_of(self, path: tuple[str, ...]) -> int:
        """Of the key itself, or of the nearest thing around it that is written; 0 when nothing is."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._lines:
                return self._lines[path[:length]]
        return 0

    def has(self, path: tuple[str, ...]) -> bool:
        """True if this very key is written outside of an inline table."""
        return path in self._lines

    def _keep(self, path: tuple[str, ...], line: int) -> None:
        for length in range(1, len(path) + 1):
            self._lines.setdefault(path[:length], line)
        self._lines[path] = line

    def _inside(self, path: tuple[str, ...]) -> tuple[str, ...]:
        """The path with the index of the last element of each array of tables on the way."""
        full: tuple[str, ...] = ()
        for place, name in enumerate(path):
            full = (*full, name)
            if full in self._arrays and place < len(path) - 1:
                full = (*full, str(self._arrays[full]))
        return full


def _statements(text: str) -> list[tuple[int, str, bool]]:
    """(line, header or key, whether it is a header) of each statement, in order."""
    found: list[tuple[int, str, bool]] = []
    line, depth = 1, 0
    start, current, in_value = 1, "", False
    for match in _PIECE.finditer(text):
        piece = match.group()
        if piece == "\n" and depth == 0:
            if current.strip().startswith("["):
                found.append((start, current.strip(), True))
            current, in_value = "", False
        elif in_value:
            depth += (piece in "[{") - (piece in "]}") if len(piece) == 1 else 0
        elif piece == "=" and not current.strip().startswith("["):
            found.append((start, current.strip(), False))
            current, in_value = "", True
        elif not piece.startswith("#") and piece != "\n":
            start = start if current.strip() else line
            current += piece
        line += piece.count("\n")
    if current.strip().startswith("["):
        found.append((start, current.strip(), True))
    return found


def _split(dotted: str) -> tuple[str, ...]:
    """The names of a dotted key, read as TOML reads them."""
    try:
        table = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return (dotted.strip(),)
    path: list[str] = []
    while isinstance(table, dict):
        name, table = next(iter(table.items()))
        path.append(name)
    return tuple(path)


MAX_RUNNING = 32  # sequences that decode at the same time, as `teneral serve` has it by default


@dataclass(frozen=True, slots=True)
class Versions:
    """The version folders that are served: the newest `latest`, or those in `numbers`, or all (both
    None).
    """

    latest: int | None = 1
    numbers: tuple[int, ...] | None = None

    @classmethod
    def of(cls, written: Any) -> Versions:
        """The file's value, parsed."""
        match written:
            case "latest":
                return cls()
            case "all":
                return cls(latest=None)
            case {"latest": count}:
                return cls(latest=count)
            case _:
                return cls(latest=None, numbers=tuple(written))

    def chosen(self, present: frozenset[int] | set[int]) -> tuple[int, ...]:
        """The versions to serve among those present, oldest first."""
        if self.numbers is not None:
            return tuple(number for number in self.numbers if number in present)
        ordered = sorted(present)
        return tuple(ordered if self.latest is None else ordered[-self.latest :])


@dataclass(frozen=True, slots=True)
class Shadow:
    """Copies of `percent` of a model's requests go to `version`."""

    version: int
    percent: int


@dataclass(frozen=True, slots=True)
class InstanceSize:
    """The resources of one instance. None: not in the file."""

    image: str | None = None
    cpu: float | None = None
    memory_bytes: int | None = None
    gpu: int = 0
    example_event: str | None = None  # JSON

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> InstanceSize:
        """Of parsed keys."""
        event = values.get("example_event")
        return cls(values.get("image"), values.get("cpu"), values.get("memory"), values.get("gpu", 0), event)


class DeviceShare(NamedTuple):
    """The share of a GPU's memory that one instance takes."""

    device: str  # as "cuda:0"
    percent: int


@dataclass(frozen=True, slots=True)
class PoolNode:
    """One machine. `memory_bytes` None: what it has free.

    `standby_base` is an artifact whose weights the standby processes have in memory, and
    `standby_store` the settings of `teneral serve` for the store that it lies in.
    """

    memory_bytes: int | None = None
    standby: int = 0
    standby_memory_bytes: int = 0
    standby_base: str | None = None
    standby_store: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Slo:
    """Objectives for `teneral pool plan`; None: none."""

    ttft_p99_s: float | None = None


@dataclass(frozen=True, slots=True)
class Patch:
    """A JSON merge patch on rendered documents of one platform, kind and, unless None, name.

    `index` is its place among the file's patches, for `Pool.place("patch", str(index))`.
    """

    index: int
    platform: str
    kind: str
    name: str | None
    merge: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Model:
    """One `[models.NAME]`, complete.

    `traffic` is None when all of it goes to the newest version; else weights by version, which sum
    to 100. `drain_s` is None when the platform's own time is meant. `given` names the keys that the
    file sets, here or in `[defaults]`: a platform warns of those only.
    """

    name: str
    source: str
    versions: Versions = Versions()
    base: str | None = None  # the artifact that the source's holds differences to
    traffic: Mapping[int, int] | None = None
    shadow: Shadow | None = None
    min_warm: int = 0
    max_instances: int = 3
    buffer: int = 0
    idle_timeout_s: float = 300.0
    policy: str = "fixed"
    target_concurrency: int = 8
    max_concurrency: int = 32
    queue_timeout_s: float = 60.0
    request_timeout_s: float = 300.0
    drain_s: float | None = None
    ready_when: str = "first-layer"
    priority: int = 0
    pins: Mapping[int, str] = field(default_factory=dict)  # version → 64 hexadecimal digits
    serve: Mapping[str, Any] = field(default_factory=dict)  # settings of `teneral serve`, parsed
    secrets: Mapping[str, str] = field(
        default_factory=dict
    )  # secret settings → environment variables with them
    instance: InstanceSize = InstanceSize()
    given: frozenset[str] = frozenset()

    @property
    def device_share(self) -> DeviceShare | None:
        """Of an instance; None where it takes what is free of its device, or computes on the CPU."""
        device, percent = device_of(self.serve), self.serve.get("device_percent")
        return None if percent is None or not device else DeviceShare(device, percent)

    @property
    def is_versioned(self) -> bool:
        """True if its source has one folder a version."""
        return "{version}" in self.source

    @property
    def weights(self) -> Mapping[int, int]:
        """Traffic by version where the file gives it; empty: all to the newest."""
        return self.traffic or {}

    def named_versions(self) -> tuple[int, ...]:
        """Versions that the file names, oldest first, of those that are served; empty when it names
        none.
        """
        if self.versions.numbers is not None:
            return self.versions.numbers
        shadows = {self.shadow.version} if self.shadow else set()
        return tuple(sorted(set(self.weights) | shadows))

    def address(self, version: int | None = None) -> str:
        """The address of a version's artifact, pinned where the file pins it. A versioned source
        needs a version.
        """
        if not self.is_versioned:
            return self.source
        assert version is not None, "a versioned source has no address without a version"
        address = self.source.replace("{version}", str(version))
        return f"{address}@b3:{self.pins[version]}" if version in self.pins else address

    def serve_settings(self) -> dict[str, Any]:
        """Settings of `teneral serve` for one instance, by name, without the model, the address to
        listen on, and secrets: those of the file's `serve` table, and those that follow from its
        other keys.

        `max_concurrency` becomes places that run and places that wait.
        """
        running = min(self.max_concurrency, int(self.serve.get("max_running", MAX_RUNNING)))
        settings = {
            **self.serve,
            "name": self.name,
            "max_running": running,
            "max_queued": self.max_concurrency - running,
            "request_timeout_s": self.request_timeout_s,
        }
        if self.drain_s is not None:
            settings["drain_timeout_s"] = self.drain_s
        if self.base is not None:
            settings["base"] = self.base
        return settings

    def serve_environment(self) -> dict[str, str]:
        """`serve_settings` as the variables that `teneral serve` reads."""
        return {f"TENERAL_{name.upper()}": _shown(value) for name, value in self.serve_settings().items()}

    @property
    def ready_path(self) -> str:
        """The path that answers 200 when an instance is ready as `ready_when` asks."""
        return "/readyz?when=exact" if self.ready_when == "exact" else "/readyz"


@dataclass(frozen=True, slots=True)
class Pool:
    """A whole pool file. `aliases` are further served names: weights, which sum to 100, by `name`
    or `name@version`.
    """

    file: str
    models: Mapping[str, Model]
    aliases: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    instance: InstanceSize = InstanceSize()
    node: PoolNode = PoolNode()
    slo: Slo = Slo()
    patches: tuple[Patch, ...] = ()
    lines: KeyLines = field(default_factory=lambda: KeyLines(""), compare=False, repr=False)

    def __iter__(self) -> Iterator[Model]:
        return iter(self.models.values())

    @property
    def folder(self) -> Path:
        """Relative addresses are relative to this."""
        return Path(self.file).parent

    def place(self, *path: str) -> Place:
        """Of a key: `pool.place("models", "my-model", "min_warm")`.

        A key that a model has from `[defaults]` (or its instance's from `[instance]`) is found
        there.
        """
        for candidate in _homes(path):
            if self.lines.has(candidate):
                return Place(self.file, _dotted(candidate), self.lines.line_of(candidate))
        return Place(self.file, _dotted(path), self.lines.line_of(path))

    def error(self, code: Code, message: str, *path: str, hint: str = "") -> PoolFileError:
        """An error about the key at `path`, to be raised."""
        return PoolFileError(code, self.place(*path), message, hint=hint)

    def warning(self, code: Code, message: str, *path: str) -> PoolWarning:
        return PoolWarning(code, self.place(*path), message)


def _homes(path: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The paths at which a key may be written, nearest first."""
    yield path
    if path[:1] == ("models",) and len(path) >= 3:
        rest = path[2:]
        if rest[0] == "instance":
            yield rest
            yield ("defaults", *rest[1:])
        else:
            yield ("defaults", *rest)
    elif path[:1] == ("instance",):
        yield ("defaults", *path[1:])


def _dotted(path: tuple[str, ...]) -> str:
    """The path that a user would write: `models.a.min_warm`, `patch[0].merge`."""
    text = ""
    for name in path:
        if name.isdigit() and text == "patch":
            text += f"[{name}]"
        elif all((char.isalnum() and char.isascii()) or char in "-_" for char in name):
            text += f".{name}" if text else name
        else:
            text += f'."{name}"' if text else f'"{name}"'
    return text


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
