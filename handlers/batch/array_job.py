"""Which worker of how many this process is, where a platform starts several of one job: AWS Batch's array jobs.

Pure: it is given the environment, whose variables AWS Batch sets in each child of an array job.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...loader.errors import UsageError
from .spec import Share

INDEX_VARIABLE = "AWS_BATCH_JOB_ARRAY_INDEX"
SIZE_VARIABLE = "AWS_BATCH_JOB_ARRAY_SIZE"


def share_of(environment: Mapping[str, str]) -> Share | None:
    """None where this is no array job's child. Raises `UsageError` for invalid variables."""
    index, size = environment.get(INDEX_VARIABLE, ""), environment.get(SIZE_VARIABLE, "")
    if not index:
        return None
    try:
        return Share.parse(f"{index}/{size}")
    except UsageError as error:
        raise UsageError(
            f"{INDEX_VARIABLE} is {index[:20]!r} and {SIZE_VARIABLE} is {size[:20]!r}",
            key=INDEX_VARIABLE,
            hint="Say with --worker which one of how many this is, or --worker 0/1 for all parts.",
        ) from error
