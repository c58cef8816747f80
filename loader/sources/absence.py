"""The absence of an object, at stores that deny what they do not have.

Amazon S3 answers 403 instead of 404 to a reader without s3:ListBucket, and some web servers do so to everyone. A denial
alone is therefore no proof that an object is absent; these functions look for one.
"""

from __future__ import annotations

import os

from ..errors import AccessDeniedError, NotFoundError, UsageError
from .base import Source

LIST_HINT = (
    "Grant s3:ListBucket on the bucket, so that the store says which objects exist, and s3:GetObject on them."
)


def is_listed(source: Source, name: str) -> bool | None:
    """Whether the folder's list has the object; None where the folder cannot be listed. Blocks for one request.

    Raises `AccessDeniedError` for credentials that are not valid, and the source's other errors.
    """
    try:
        first = next(iter(source.list(name)), None)  # in name order: no longer name comes before it
    except UsageError:
        return None
    except AccessDeniedError as error:
        if not error.may_be_absent:
            raise
        return None
    return first is not None and first.name == name


def denies_absent(source: Source) -> bool:
    """Whether the source denies an object that surely does not exist. Blocks for one request. Raises as `is_listed`."""
    try:
        source.stat(f"absent-{os.urandom(8).hex()}.json")
    except NotFoundError:
        return False
    except AccessDeniedError as error:
        if not error.may_be_absent:
            raise
        return True
    return False


def undecided(source: Source, names: str) -> AccessDeniedError:
    """The error where no other object shows whether `names` exist."""
    return AccessDeniedError(
        f"access to {names} in {source.url} is denied, and the folder cannot be listed: "
        "it is unknown whether there is such an object",
        source=source.url,
        name=names,
        hint=LIST_HINT,
    )
