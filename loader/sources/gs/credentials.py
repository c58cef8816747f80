"""Access tokens for Cloud Storage: from a credential file, else from the metadata server.

The metadata server is asked over a connection of our own, so that a container on Cloud Run or a pod
of GKE imports nothing for its token. Files are read by `credential_files.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ...errors import AccessDeniedError, UsageError
from ..http.address import parse_address
from ..http.connections import BodyTooLargeError
from ..http.head import Head, Request
from ..http.tokens import Token, TokenCache, ask_service
from ..http.wire import WireError

RENEW_S = 225.0  # before a token ends: the metadata server has the next one from 300 s before
PAUSE_S = 0.2
METADATA_HOST = "metadata.google.internal"
_TOKEN_TARGET = "/computeMetadata/v1/instance/service-accounts/default/token"  # noqa: S105 - a path
_FLAVOR = ("Metadata-Flavor", "Google")
_FILE = "application_default_credentials.json"


def token_chain(environment: Mapping[str, str]) -> TokenCache:
    """The place where tokens come from. Looks for credentials when a token is first needed."""
    return TokenCache(lambda: _ask(environment), renew_s=RENEW_S)


def _ask(environment: Mapping[str, str]) -> Token:
    path = find_file(environment)
    if path is None:
        return ask_metadata(environment)
    from .credential_files import ask_with_file  # lazy: pulls in google-auth

    return ask_with_file(path)


def find_file(environment: Mapping[str, str]) -> str | None:
    """The credential file: named by GOOGLE_APPLICATION_CREDENTIALS, else gcloud's own where it
    exists.
    """
    if named := environment.get("GOOGLE_APPLICATION_CREDENTIALS"):
        return named
    folder = environment.get("CLOUDSDK_CONFIG") or os.path.join(
        environment.get("HOME") or "~", ".config", "gcloud"
    )
    path = os.path.join(os.path.expanduser(folder), _FILE)
    return path if os.path.exists(path) else None


def ask_metadata(environment: Mapping[str, str]) -> Token:
    """The token of the machine's, the pod's or the service's own account."""
    host = environment.get("GCE_METADATA_HOST") or METADATA_HOST
    address = parse_address(f"http://{host}")
    if address is None or address.path or address.query:
        raise UsageError(
            "GCE_METADATA_HOST is not a host", key="GCE_METADATA_HOST", hint="Write host or host:port."
        )
    request = Request("GET", address.origin, _TOKEN_TARGET, (_FLAVOR,))
    hint = "Give the machine, the pod or the service a service account."
    try:
        head, body = ask_service(request, "the metadata server", hint=hint, pause_s=PAUSE_S)
    except (WireError, BodyTooLargeError, OSError) as error:
        from .answers import WAYS_TO_GIVE

        message = "there are no credentials for Cloud Storage, and no metadata server answers"
        raise AccessDeniedError(f"{message} ({error})", hint=WAYS_TO_GIVE) from error
    return _token_from(head, body)


def _token_from(head: Head, body: bytes) -> Token:
    import json  # not before the first request is on its way

    try:
        if head.headers.get("metadata-flavor") != "Google":
            raise ValueError("the answer is not one of Google's metadata server")
        fields: Any = json.loads(body.decode())
        return Token(fields["access_token"], fields["expires_in"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise AccessDeniedError(
            f"the metadata server gives no token: {error}",
            hint="Check GCE_METADATA_HOST and the account of the machine, the pod or the service.",
        ) from None
