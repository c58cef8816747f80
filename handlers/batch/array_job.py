"""This worker's share in an array job, where a platform starts several workers: AWS Batch.

Pure: reads the environment variables that AWS Batch sets in each child of an array job.
"""

from __future__ import annotations

from collections.abc import Mapping

from ...loader.errors import UsageError
from .spec import Share

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
