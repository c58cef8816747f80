"""The chain of S3 credentials: the environment at once, or a container's platform; else boto3's
whole chain, which takes its time.

The chain covers profiles, SSO, assumed roles, web identities, container and instance roles; it
renews what expires.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import AccessDeniedError
from .sigv4 import Credentials

if TYPE_CHECKING:
    from .container_credentials import ContainerCredentials

CONTAINER_VARIABLES = ("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI", "AWS_CONTAINER_CREDENTIALS_FULL_URI")
WAYS_TO_GIVE = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, name a profile (--profile or AWS_PROFILE), "
    "run under a role, or read a public bucket with --anonymous."
)


class CredentialChain:
    """Thread-safe. Looks for credentials when they are first needed."""

    def __init__(self, environment: Mapping[str, str], *, profile: str | None) -> None:
        """A `profile` that was asked for by name goes before credentials in the environment, as in
        boto3.
        """
        self._environment = environment
        self._profile = profile
        self._container: ContainerCredentials | None = None
        if not profile and any(environment.get(name) for name in CONTAINER_VARIABLES):
            # 2 ms, only in such containers.
            from .container_credentials import ContainerCredentials

            self._container = ContainerCredentials(environment)
        # From the environment: these are never renewed by themselves.
        self._found: Credentials | None = None
        self._provider: Any = None  # botocore.credentials.Credentials, which may renew themselves
        self._lock = threading.Lock()

    def get(self) -> Credentials:
        """Credentials that are valid now. May ask a credential service. Raises `AccessDeniedError`."""
        with self._lock:
            return self._get()

    def renew(self, expired_token: str) -> bool:
        """Look again, after a store refused this session token. Whether there is another one now."""
        with self._lock:
            if self._get().session_token == expired_token:
                self._forget()
            return self._get().session_token != expired_token

    def forget(self) -> None:
        """Look everywhere again when they are next needed."""
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        self._found = self._provider = None
        if self._container is not None:
            self._container.forget()

    def _get(self) -> Credentials:
        if self._found is None and self._provider is None:
            self._found = self._from_environment()
        if self._found is not None:
            return self._found
        if self._container is not None and (found := self._container.get()) is not None:
            return found
        return self._from_boto()

    def _from_environment(self) -> Credentials | None:
        access_key_id = self._environment.get("AWS_ACCESS_KEY_ID")
        secret_access_key = self._environment.get("AWS_SECRET_ACCESS_KEY")
        if self._profile or not access_key_id or not secret_access_key:
            return None
        return Credentials(
            access_key_id, secret_access_key, self._environment.get("AWS_SESSION_TOKEN") or None
        )

    def _from_boto(self) -> Credentials:
        # 0.3 s of importing, which a container with credentials of its own need not pay.
        import boto3
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            if self._provider is None:
                self._provider = boto3.session.Session(profile_name=self._profile).get_credentials()
            if self._provider is None:
                raise AccessDeniedError("there are no credentials for S3", hint=WAYS_TO_GIVE)
            frozen = self._provider.get_frozen_credentials()
        except (BotoCoreError, ClientError) as error:
            raise AccessDeniedError(f"no credentials for S3: {error}", hint=WAYS_TO_GIVE) from error
        if not frozen.access_key or not frozen.secret_key:
            raise AccessDeniedError("the credentials for S3 are incomplete", hint=WAYS_TO_GIVE)
        return Credentials(frozen.access_key, frozen.secret_key, frozen.token or None)
