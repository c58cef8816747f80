"""Signatures for clients: AWS's SigV4, which the URL of a Lambda function asks for.

For programs that send requests; nothing that serves imports this. Knows no client library: an `auth` of httpx and of
requests is anything that is called with a request and returns it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, TypeVar

from .loader.errors import UsageError

if TYPE_CHECKING:
    from botocore.credentials import Credentials

__all__ = ["AwsSignature"]

# https://docs.aws.amazon.com/lambda/latest/dg/urls-configuration.html: <id>.lambda-url.<region>.on.aws
_FUNCTION_URL = re.compile(r"https://[a-z0-9]+\.lambda-url\.([a-z0-9-]+)\.on\.aws(?:[:/?]|$)")
Request = TypeVar("Request")


class AwsSignature:
    """AWS's signature (SigV4) of each request, by the credentials that boto3 finds: variables, a login, a role.

    Use it as `auth` of an httpx client, which OpenAI's client takes as `http_client`, or of requests. It replaces the
    header `authorization`: an API key of the server's own goes into `x-api-key`. A request's body must be in memory.

    `region` is that of a function's URL, if that is what is called, else of the profile. `service` is AWS's name of the
    service that checks the signature. Credentials are read at the first request, and renewed before they expire.
    """

    def __init__(self, region: str = "", *, service: str = "lambda", profile: str | None = None) -> None:
        self._region, self._service, self._profile = region, service, profile
        self._found: tuple[Credentials, str] | None = None

    def __call__(self, request: Request) -> Request:
        """The same request with the headers of its signature.

        Raises `UsageError` without credentials or a region, and for a body that is a stream.
        """
        from botocore.auth import SigV4Auth  # lazy: only callers of AWS pay for it
        from botocore.awsrequest import AWSRequest

        message: Any = request
        url = str(message.url)
        credentials, region = self._credentials(url)
        signed = AWSRequest(method=message.method, url=url, data=_body(message))
        SigV4Auth(credentials.get_frozen_credentials(), self._service, region).add_auth(signed)
        for name, value in signed.headers.items():
            message.headers[name] = value
        return request

    def _credentials(self, url: str) -> tuple[Credentials, str]:
        from botocore.session import Session

        if self._found is None:
            session = Session(profile=self._profile)
            credentials = session.get_credentials()
            if credentials is None:
                raise UsageError(
                    "no credentials of AWS",
                    hint="Log in (aws login), or set AWS_ACCESS_KEY_ID and its secret.",
                )
            self._found = credentials, self._region or str(session.get_config_variable("region") or "")
        credentials, region = self._found
        if not self._region and (match := _FUNCTION_URL.match(url)):
            region = match[1]
        if not region:
            raise UsageError(f"{url} names no region of AWS", hint='Name it: AwsSignature("eu-central-1").')
        return credentials, region


def _body(message: Any) -> bytes | str:
    """httpx has the bytes in `content`, and refuses a stream's itself; requests has them in `body`."""
    body = message.content if hasattr(message, "content") else message.body
    if body is None:
        return b""
    if not isinstance(body, bytes | str):
        raise UsageError("a body that is a stream cannot be signed", hint="Send bytes.")
    return body
