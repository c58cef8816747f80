"""AWS Signature Version 4 for S3 requests without a body. Pure: no clock, no environment, no
network.

A signing of our own, because importing boto3 takes several times as long as fetching a manifest
does. Follows "Signature Calculations for the Authorization Header" of the Amazon S3 API reference,
and is tested against botocore's signer.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import NamedTuple, cast

from ..http.address import encode_value
from ..http.head import Headers

# Python's own SHA-256: hashlib would bring OpenSSL along, 4 ms of a cold start's first 60, for some
# hundred bytes.
try:
    from _sha2 import sha256
except ImportError:
    try:
        from _sha256 import sha256  # before Python 3.12
    except ImportError:  # a build without it
        from hashlib import sha256

ALGORITHM = "AWS4-HMAC-SHA256"
EMPTY_SHA256: str = sha256(b"").hexdigest()
_BLOCK_BYTES = 64
_INNER, _OUTER = (bytes(byte ^ pad for byte in range(256)) for pad in (0x36, 0x5C))
_SCOPE = r"Credential=[^/,]+/\d{8}/([^/,]+)/s3/"

Query = Sequence[tuple[str, str]]


class Credentials(NamedTuple):
    """Long-lived, or with a session token. Their secrets are not shown."""

    access_key_id: str
    secret_access_key: str
    session_token: str | None = None

    def __repr__(self) -> str:
        return f"Credentials(access_key_id={self.access_key_id!r})"


def encode_query(query: Query) -> str:
    """A query as it stands in a request, and in its signature: sorted."""
    pairs = sorted((encode_value(name), encode_value(value)) for name, value in query)
    return "&".join(f"{name}={value}" for name, value in pairs)


def sign(
    *,
    method: str,
    host: str,
    path: str,
    query: str,
    headers: Headers,
    credentials: Credentials,
    region: str,
    unix_s: float,
) -> Headers:
    """The headers to send: `headers` (names in lower case, all of them signed) and those of the
    signature.

    `path` and `query` are encoded, `host` is the Host field. Others may be sent unsigned.
    """
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime(unix_s))
    sent = [*headers, ("x-amz-content-sha256", EMPTY_SHA256), ("x-amz-date", stamp)]
    if credentials.session_token:
        sent.append(("x-amz-security-token", credentials.session_token))
    signed = sorted([*sent, ("host", host)])
    names = ";".join(name for name, _ in signed)
    fields = "".join(f"{name}:{' '.join(value.split())}\n" for name, value in signed)
    canonical = f"{method}\n{path}\n{query}\n{fields}\n{names}\n{EMPTY_SHA256}"
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    to_sign = f"{ALGORITHM}\n{stamp}\n{scope}\n{sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret_access_key}".encode()
    for part in scope.split("/"):
        key = hmac_sha256(key, part.encode())
    signature = hmac_sha256(key, to_sign.encode()).hex()
    credential = f"{credentials.access_key_id}/{scope}"
    authorization = f"{ALGORITHM} Credential={credential}, SignedHeaders={names}, Signature={signature}"
    return (*sent, ("Authorization", authorization))


def hmac_sha256(key: bytes, message: bytes) -> bytes:
    """RFC 2104 over SHA-256."""
    block = (sha256(key).digest() if len(key) > _BLOCK_BYTES else key).ljust(_BLOCK_BYTES, b"\0")
    inner = sha256(block.translate(_INNER) + message).digest()
    return cast(bytes, sha256(block.translate(_OUTER) + inner).digest())


def signed_region(headers: Headers) -> str | None:
    """The region that a request was signed for; None when it was not signed."""
    found = re.search(_SCOPE, dict(headers).get("Authorization", ""))
    return found[1] if found else None


def signed_unix_s(headers: Headers) -> int | None:
    """The time of a request's signature; None when it was not signed."""
    import calendar  # only after a refusal

    stamp = dict(headers).get("x-amz-date")
    return None if stamp is None else calendar.timegm(time.strptime(stamp, "%Y%m%dT%H%M%SZ"))
