"""The address of a container's folder, and the settings and keys of its account.

`settings_from` is the one place that reads the environment for them; all else here is pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...errors import AccessDeniedError, UsageError
from ..base import SourceOptions
from ..http.address import Origin, WebAddress, encode_path, encode_value, is_loopback, parse_address

_ACCOUNT = re.compile(r"[a-z0-9]{3,24}")
_CONTAINER = re.compile(r"\$root|\$web|[a-z0-9](?:-?[a-z0-9]){2,62}")
_KEY = re.compile(r"[A-Za-z0-9+/]{1,200}={0,2}")
_SAS = re.compile(r"[A-Za-z0-9%&=._~:/+-]{1,4096}")
_SUFFIX = re.compile(r"[a-z0-9][a-z0-9.-]{1,100}")
_CONNECTION = "AZURE_STORAGE_CONNECTION_STRING"
_HINT = "Write az://account/container/prefix, or az://container/prefix with AZURE_STORAGE_ACCOUNT."

Query = tuple[tuple[str, str], ...]


class AzSettings:
    """An account's address, and its key or signature where the environment gives one. Secrets are
    not shown.
    """

    def __init__(self, account: str, endpoint: WebAddress, key: str, sas: str, is_anonymous: bool) -> None:
        self.account = account
        self.origin: Origin = endpoint.origin
        self.path = endpoint.path.rstrip("/")
        self.key = key
        self.sas = sas
        self.is_anonymous = is_anonymous

    def __repr__(self) -> str:
        return f"Settings({self.account!r}, {str(self.origin)!r})"


def parse_url(url: str) -> tuple[str, str, str]:
    """Account, container and prefix of az://account/container/prefix, in this whole form. The prefix
    has no '/' at its ends. Raises `UsageError`.
    """
    account, _, rest = url.partition("://")[2].partition("/")
    container, _, prefix = rest.partition("/")
    _check_names(url, account, container)
    return account, container, prefix.strip("/")


def _check_names(url: str, account: str, container: str) -> None:
    if not _ACCOUNT.fullmatch(account):
        raise UsageError(f"{url}: {account!r} is not the name of a storage account", hint=_HINT)
    if not _CONTAINER.fullmatch(container):
        raise UsageError(f"{url}: {container!r} is not the name of a container", hint=_HINT)


def settings_from(
    url: str, options: SourceOptions, environment: Mapping[str, str]
) -> tuple[AzSettings, str, str]:
    """The account's settings, the container, and the prefix without '/' at its ends. Raises
    `UsageError`.
    """
    given = _connection_string(environment.get(_CONNECTION) or "")
    known = given.get("accountname") or environment.get("AZURE_STORAGE_ACCOUNT") or ""
    first, _, rest = url.partition("://")[2].partition("/")
    account = known or first
    if first == account:
        first, _, rest = rest.partition("/")
    _check_names(url, account, first)
    key, sas = given.get("accountkey", ""), given.get("sharedaccesssignature", "")
    if not key and not sas:
        key = environment.get("AZURE_STORAGE_KEY") or ""
        sas = "" if key else environment.get("AZURE_STORAGE_SAS_TOKEN") or ""
    sas = sas.removeprefix("?")
    if (key and not _KEY.fullmatch(key)) or (sas and not _SAS.fullmatch(sas)):
        raise AccessDeniedError("the account's key or signature is malformed", hint="Copy it once more.")
    endpoint = _endpoint(account, options, given)
    if endpoint.origin.scheme == "http" and not options.anonymous and not is_loopback(endpoint.origin):
        raise UsageError(
            f"credentials are not sent to {endpoint.origin} over plain http",
            key="endpoint_url",
            hint="Write https://…, or read a public container with --anonymous.",
        )
    if options.anonymous:
        key = sas = ""
    return AzSettings(account, endpoint, key, sas, options.anonymous), first, rest.strip("/")


def encoded(path: str, query: Query, sas: str) -> str:
    """A request's target: the signature, if any, behind the query."""
    pairs = [f"{encode_value(name)}={encode_value(value)}" for name, value in query]
    whole = "&".join([*pairs, sas] if sas else pairs)
    return f"{path}?{whole}" if whole else path


def blob_path(settings: AzSettings, container: str, key: str) -> str:
    return f"{settings.path}/{container}/{encode_path(key)}" if key else f"{settings.path}/{container}"


def _connection_string(text: str) -> dict[str, str]:
    """Its settings by name in lower case."""
    fields = {}
    for field in text.split(";") if text else ():
        name, mark, value = field.strip().partition("=")
        if not mark and name:
            raise UsageError(
                f"{_CONNECTION} is malformed", key=_CONNECTION, hint="Copy it from the account once more."
            )
        fields[name.lower()] = value
    if fields.get("usedevelopmentstorage"):
        raise UsageError(
            "UseDevelopmentStorage is not supported",
            key=_CONNECTION,
            hint="Write AccountName, AccountKey and BlobEndpoint.",
        )
    return fields


def _endpoint(account: str, options: SourceOptions, given: Mapping[str, str]) -> WebAddress:
    """Options before the connection string before Azure's own address."""
    suffix = given.get("endpointsuffix") or "core.windows.net"
    if not _SUFFIX.fullmatch(suffix):
        raise UsageError("the EndpointSuffix is not a host name", key=_CONNECTION)
    url = options.endpoint_url or given.get("blobendpoint") or f"https://{account}.blob.{suffix}"
    address = parse_address(url)
    if address is None or address.query:
        raise UsageError(
            "the endpoint of Blob Storage is not a web address",
            key="endpoint_url",
            hint="Write https://host.",
        )
    return address
