"""S3's refusals as the loader's errors: from an error code to a message with what to do."""

from __future__ import annotations

from ...errors import AccessDeniedError, NoSpaceError, NotFoundError, SourceError
from ..base import shown_text
from ..http.source import status_error
from .address import is_region

# Another request to the same object was under way: 409, worth another try.
CONFLICTS = frozenset({"ConditionalRequestConflict", "OperationAborted"})
_BUSY = CONFLICTS | {
    "SlowDown",
    "ServiceUnavailable",
    "InternalError",
    "RequestTimeout",
    "Throttling",
    "TooManyRequests",
}
_WRONG_REGION = frozenset(
    {
        "PermanentRedirect",
        "AuthorizationHeaderMalformed",
        "TemporaryRedirect",
        "IllegalLocationConstraintException",
    }
)
_FULL = frozenset({"QuotaExceeded", "XMinioStorageFull", "InsufficientStorage", "EntityTooLarge"})

# Refusals of the caller, by code: what is wrong, and what to do.
_DENIALS = {
    "AccessDenied": (
        "access is denied",
        "The credentials need s3:GetObject here (s3:PutObject to write); without s3:ListBucket, S3 says the "
        "same of objects that do not exist. Use --anonymous for a public bucket, --requester-pays for one "
        "whose readers pay.",
    ),
    "InvalidAccessKeyId": (
        "the access key is not known to this store",
        "Check AWS_ACCESS_KEY_ID or the profile, and that they belong to this endpoint.",
    ),
    "SignatureDoesNotMatch": (
        "the signature is wrong",
        "Check the secret access key: it must be the one of this access key, without spaces around it.",
    ),
    "ExpiredToken": (
        "the session token has expired",
        "Get new credentials (for SSO: aws sso login) and start again.",
    ),
    "InvalidToken": (
        "the session token is not valid",
        "Check AWS_SESSION_TOKEN: it must belong to the access key, or be unset with a long-lived one.",
    ),
    "RequestTimeTooSkewed": (
        "this machine's clock differs too much from the store's",
        "Set the clock (for example with chrony or systemd-timesyncd) and start again.",
    ),
}


def explain(
    code: str,
    status: int,
    message: str,
    *,
    source: str,
    name: str,
    region: str = "",
    retry_after_s: float | None = None,
) -> SourceError:
    """The error for an answer of this status and code ('' for none); `region` is the right one, if
    known. All three texts may be the store's own words.
    """
    code, message = shown_text(code), shown_text(message)
    what = f"{name} in {source}" if name else source
    detail = " ".join(text for text in (str(status), code, message) if text)
    if code in _DENIALS:
        problem, hint = _DENIALS[code]
        detail = f" ({message})" if message else ""
        return AccessDeniedError(
            f"{what}: {problem}{detail}",
            source=source,
            name=name,
            hint=hint,
            may_be_absent=code == "AccessDenied",
        )
    if code in _WRONG_REGION or status == 301:
        return _wrong_region(source, name, region)
    if code in _FULL or status == 507:
        hint = "Free some space or choose another place; what was being written has been removed."
        return NoSpaceError(f"{what} could not be written: {detail}", source=source, name=name, hint=hint)
    if code == "NoSuchBucket":
        hint = "Check the bucket's name, the endpoint and the account."
        return NotFoundError(
            f"the bucket of {source} does not exist", source=source, hint=hint, is_bucket=True
        )
    if code == "InvalidObjectState":
        hint = "Restore it first (aws s3api restore-object), and wait until that is done."
        return SourceError(f"{what} is archived and cannot be read", source=source, name=name, hint=hint)
    if status in (401, 403) and code not in _BUSY:
        hint = _DENIALS["AccessDenied"][1]
        return AccessDeniedError(
            f"{what}: access is denied ({detail})",
            source=source,
            name=name,
            hint=hint,
            may_be_absent=status == 403 and not code,
        )
    means = 404 if code == "NoSuchKey" else 503 if code in _BUSY else status
    return status_error(source, name, means, detail=detail, retry_after_s=retry_after_s)


def _wrong_region(source: str, name: str, region: str) -> SourceError:
    if is_region(region):
        message, hint = f"the bucket of {source} is in the region {region}", f"Set AWS_REGION={region}."
    else:
        message, hint = (
            f"the bucket of {source} is in another region",
            "Set AWS_REGION to the bucket's region.",
        )
    return SourceError(message, source=source, name=name, hint=hint)
