"""A batch job's specification, the share of one worker, its report, and its errors: values without I/O.

Where a platform starts several workers, each takes its share from the variables that AWS Batch sets in a child of
an array job.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ...loader.errors import (
    AlreadyExistsError,
    FormatError,
    LoadError,
    NoSpaceError,
    SourceClosedError,
    UnavailableError,
    UsageError,
)
from ...loader.sources.base import SourceOptions
from ...loader.tools.progress_bar import format_duration
from ...runtime.errors import CancelledError, CapacityError, DrainingError, ModelError, UnloadedError

# Of any job: a hash of 16 bytes for each is held during the scan.
MAX_LINES = 5_000_000
MAX_LINE_BYTES = 64 << 20
MAX_PART_LINES = 100_000
# The maximum of children of an array job.
MAX_WORKERS = 10_000
_SHARE = re.compile(r"(\d{1,6})/(\d{1,6})")


@dataclass(frozen=True, slots=True)
class Share:
    """The parts of one of several workers: those whose number modulo `count` is `index`."""

    index: int
    count: int

    def __post_init__(self) -> None:
        if not 0 <= self.index < self.count <= MAX_WORKERS:
            raise UsageError(
                f"worker {self.index} of {self.count} is invalid",
                key="worker",
                hint=f"Workers are numbered from 0, up to {MAX_WORKERS} of them: 0/4, 1/4, 2/4 and 3/4 for four.",
            )

    @classmethod
    def parse(cls, text: str) -> Share:
        """Parse 'I/N'. Raises `UsageError`."""
        match = _SHARE.fullmatch(text)
        if match is None:
            raise UsageError(
                f"{text[:40]!r} is not a worker's share, I/N",
                key="worker",
                hint="Write 0/4 for the first of four.",
            )
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A job, and this worker's share of it. Raises `UsageError` for invalid values.

    The input, the model, and the limits of lines and of their number identify the job: they must be
    the same for all of its workers. The other fields are each worker's own.
    """

    # A JSONL file or object, one of sound, or a folder of it: a path, s3://bucket/key or http(s)://…
    input: str
    output: str  # a folder or prefix, or a name that ends in .jsonl
    input_version: str | None = None  # the input's expected ETag, if known; a different one is an error
    # How to reach both; None: as the model is reached.
    source_options: SourceOptions | None = None
    max_line_bytes: int = 1 << 20
    max_lines: int = 1_000_000
    part_lines: int | None = None  # None: about twice the engine's max_running
    share: Share | None = None  # None: all parts
    # For the lines in progress when the job is asked to stop.
    drain_s: float = 8.0
    model_identity: str | None = None  # None: the digest of the model's artifact

    def __post_init__(self) -> None:
        _check_range("max_line_bytes", self.max_line_bytes, 64, MAX_LINE_BYTES)
        _check_range("max_lines", self.max_lines, 1, MAX_LINES)
        if self.part_lines is not None:
            _check_range("part_lines", self.part_lines, 1, MAX_PART_LINES)
        if not 0 <= self.drain_s <= 86_400:
            raise UsageError(f"drain_s is {self.drain_s:g}, but must be from 0 to 86400", key="drain_s")


class Status(enum.StrEnum):
    # Every record exists, and the manifest; of a .jsonl output, the file.
    COMPLETE = "complete"
    # This worker's parts exist; others are missing, and another worker ends the job.
    SHARE_DONE = "share_done"
    # The deadline passed, or the job was stopped: run it again.
    INCOMPLETE = "incomplete"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport:
    """The result of a worker's run. Counts of records are the job's; those with the prefix `run_`
    are this run's.
    """

    status: Status
    output: str
    # The idempotency key: the same for every run of the same job; '' if the run ended before it was
    # known.
    key: str
    records: int = 0
    records_done: int = 0
    failed: int | None = None  # records that are errors; known when the job is complete
    parts: int = 0
    parts_done: int = 0
    stopped_by: str | None = None  # deadline | stop | draining
    run_records: int = 0  # computed by this run
    run_failed: int = 0
    run_tokens: int = 0  # that were generated
    run_s: float = 0.0

    @property
    def ok(self) -> bool:
        """True if nothing is left for this worker."""
        return self.status is not Status.INCOMPLETE

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "status": str(self.status), "run_s": round(self.run_s, 3)}

    def render(self) -> str:
        """The report as text."""
        lines = [f"{self.output}  {self.status}"]
        if self.stopped_by is not None:
            lines[0] += f" ({self.stopped_by})"
        lines.append(
            f"  {self.records_done:,} of {self.records:,} records in {self.parts_done:,} of {self.parts:,} parts"
        )
        if self.failed is not None:
            lines[-1] += f", {self.failed:,} of them errors"
        if self.run_records:
            took = format_duration(self.run_s)
            lines.append(f"  {self.run_records:,} computed in {took}, {self.run_tokens:,} tokens generated")
        return "\n".join(lines)


def _check_range(key: str, value: int, low: int, high: int) -> None:
    if not low <= value <= high:
        raise UsageError(f"{key} is {value}, but must be from {low} to {high}", key=key)


INDEX_VARIABLE = "AWS_BATCH_JOB_ARRAY_INDEX"
SIZE_VARIABLE = "AWS_BATCH_JOB_ARRAY_SIZE"


def share_of(environment: Mapping[str, str]) -> Share | None:
    """The share; None outside an array job. Raises `UsageError` for invalid variables."""
    index, size = environment.get(INDEX_VARIABLE, ""), environment.get(SIZE_VARIABLE, "")
    if not index:
        return None
    try:
        return Share.parse(f"{index}/{size}")
    except UsageError as error:
        raise UsageError(
            f"{INDEX_VARIABLE} is {index[:20]!r} and {SIZE_VARIABLE} is {size[:20]!r}",
            key=INDEX_VARIABLE,
            hint="Set --worker I/N for this worker's share, or --worker 0/1 for all parts.",
        ) from error


class JobMismatchError(AlreadyExistsError):
    """The output belongs to a job of another input, model or options, or is not a job's."""


class JobFormatError(FormatError):
    """A file in the job's work folder is damaged, hostile, or from a newer version. It was not
    used.
    """


class ModelBrokenError(ModelError):
    """The model stopped answering while it ran. Finished parts are kept; another instance can
    continue.
    """


# Errors after which another run can continue: exit code 75, and `JobRetryError` for events.
WORTH_ANOTHER_RUN = (
    UnavailableError,
    NoSpaceError,
    SourceClosedError,
    LoadError,
    DrainingError,
    CapacityError,
    UnloadedError,
    CancelledError,
    ModelBrokenError,
)
