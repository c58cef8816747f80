"""An instance as the simulator sees it: how long its start takes, how fast it answers, and what both cost in cores.

`teneral pool measure` writes these figures as `pool.measured.json`; `--assume` gives or changes single ones.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...loader.errors import UsageError

SCHEMA = 1
PACKED_OVERHEAD = 1.09  # time until the weights are exact, relative to stored bytes / link rate: 1.03 to 1.09
MAX_FILE_BYTES = 1 << 20
DETAILS = ("peak_mb",)  # for people
MAX_SAMPLES = 1000
MAY_BE_ZERO = (
    "bytes", "platform_s", "overhead_s", "standby", "refill_s", "start_cpu_s", "cold_start_s", "cold_start_cpu_s",
    "other_cores",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Profile:
    """Times are of a machine that does nothing else; `*_cores` are what that takes of it.

    `decode_tokens_s` are all sequences' tokens a second, by how many decode at the same time.
    """

    start_s: float = 1.0  # that a start adds to the first token of a request that waits for it
    start_cpu_s: float = 1.0
    # Of a start, after which the instance takes requests; their tokens come at its end.
    ready_share: float = 1.0
    bytes: int = 0  # that a start reads
    link_bytes_s: float = math.inf  # of the store; a start takes at least its bytes at this rate
    platform_s: float = 0.0  # before the process begins
    prefill_tokens_s: float = 1000.0
    overhead_s: float = 0.0  # of a request without tokens
    decode_tokens_s: tuple[tuple[int, float], ...] = ((1, 20.0), (8, 80.0))
    work_cores: float = 1.0  # that an instance with requests keeps busy
    # That other processes used while this was measured. They are taken from a host's cores: all figures are of what
    # was left.
    other_cores: float = 0.0
    standby: int = 0  # standby processes of the machine; 0: starts do not need them
    cold_start_s: float = 0.0  # without a standby process, where `start_s` is with one; 0: unknown
    cold_start_cpu_s: float = 0.0
    refill_s: float = 1.0  # until a standby process that was taken has been replaced
    # Single starts; and of an idle instance single first tokens of short and of long prompts, relative to their median.
    starts_s: tuple[float, ...] = ()
    overhead_ratios: tuple[float, ...] = ()
    prompt_ratios: tuple[float, ...] = ()

    @property
    def wire_s(self) -> float:
        """Time of a start's bytes on a link of its own."""
        return 0.0 if math.isinf(self.link_bytes_s) else PACKED_OVERHEAD * self.bytes / self.link_bytes_s

    @property
    def start_work_s(self) -> float:
        """A start's time without the platform's."""
        return max(self.start_s, self.wire_s, 1e-6)

    @property
    def start_cores(self) -> float:
        return self.start_cpu_s / self.start_work_s

    def speed(self, batch: int) -> float:
        """The speed of each of `batch` sequences, relative to one alone. Interpolated between measured batches."""
        points = self.decode_tokens_s
        alone = points[0][1] / points[0][0]
        if batch <= points[0][0]:
            return 1.0
        for (low, low_rate), (high, high_rate) in itertools.pairwise(points):
            if batch <= high:
                rate = low_rate + (high_rate - low_rate) * (batch - low) / (high - low)
                return min(1.0, rate / batch / alone)
        return min(1.0, points[-1][1] / batch / alone)

    def prompt_s(self, prompt_tokens: int) -> float:
        """Time of a prompt's tokens, without the request's overhead."""
        return prompt_tokens / self.prefill_tokens_s

    def decode_s(self, output_tokens: int) -> float:
        """Of a sequence alone."""
        batch, rate = self.decode_tokens_s[0]
        return max(0, output_tokens - 1) / (rate / batch)

    def without_standby(self) -> Profile | None:
        """The same without standby processes. None where it is not known how long a start takes then."""
        if not self.standby:
            return self
        if not self.cold_start_s:
            return None
        return dataclasses.replace(
            self, standby=0, start_s=self.cold_start_s, start_cpu_s=self.cold_start_cpu_s, starts_s=()
        )

    def as_json(self) -> dict[str, Any]:
        values = dataclasses.asdict(self)
        values["decode_tokens_s"] = {str(batch): rate for batch, rate in self.decode_tokens_s}
        return {name: value for name, value in values.items() if value != math.inf}


_NAMES = {field.name for field in dataclasses.fields(Profile)}


def profile_of(values: Mapping[str, Any], where: str, base: Profile | None = None) -> Profile:
    """Of a JSON object or of `--assume`'s settings. Raises `UsageError`."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        if name not in _NAMES:
            raise UsageError(
                f"{where}: unknown figure {name!r}", key=name, hint=f"Known: {', '.join(sorted(_NAMES))}."
            )
        try:
            changes[name] = _figure(name, value)
        except (TypeError, ValueError) as error:
            raise UsageError(
                f"{where}: {name} must be a number above 0; it is {value!r}", key=name
            ) from error
    if "start_s" in changes:  # one that is assumed does not vary
        changes.setdefault("starts_s", ())
    return dataclasses.replace(base or Profile(), **changes)


def _figure(name: str, value: Any) -> Any:
    if name == "decode_tokens_s":
        if not isinstance(value, Mapping):
            return ((1, _positive(value)),)
        points = sorted((int(batch), _positive(rate)) for batch, rate in value.items())
        if not points or points[0][0] < 1 or len(points) > 64:
            raise ValueError
        return tuple(points)
    if name in ("starts_s", "overhead_ratios", "prompt_ratios"):
        if not isinstance(value, list) or len(value) > MAX_SAMPLES:
            raise ValueError
        return tuple(map(_positive, value))
    number = _positive(value, allow_zero=name in MAY_BE_ZERO)
    return int(number) if name in ("bytes", "standby") else number


def _positive(value: Any, *, allow_zero: bool = False) -> float:
    number = float(value)
    if math.isnan(number) or number < 0 or (number == 0 and not allow_zero):
        raise ValueError
    return number


def read_profiles(path: str | Path) -> dict[str, Profile]:
    """By model, of what `teneral pool measure` wrote. Raises `UsageError`."""
    try:
        if Path(path).stat().st_size > MAX_FILE_BYTES:
            raise UsageError(f"{path} is larger than {MAX_FILE_BYTES:,} bytes", key="measured")
        document = json.loads(Path(path).read_text(encoding="utf-8"))
        if document["schema"] != SCHEMA:
            raise UsageError(
                f"{path} has schema {document['schema']!r}; this program reads {SCHEMA}", key="measured"
            )
        return {
            str(name): profile_of({k: v for k, v in values.items() if k not in DETAILS}, f"{path}: {name}")
            for name, values in document["models"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(
            f"cannot read the measured figures {path}: {type(error).__name__}: {error}",
            key="measured",
            hint="Make them with: teneral pool measure pool.toml",
        ) from error


def parse_assumptions(items: list[str]) -> dict[str, str]:
    """Of `--assume name=value`. Raises `UsageError`."""
    found = {}
    for item in items:
        name, equals, value = item.partition("=")
        if not equals:
            raise UsageError(f"--assume {item}: must be NAME=VALUE", key="assume")
        found[name] = value
    return found
