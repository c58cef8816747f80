"""The address of a bucket's folder and the settings that say where its API is.

`settings_from` is the one place that reads the environment for them; all else here is pure.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

from ...errors import UsageError
from ..base import SourceOptions
from ..http.address import Origin, encode_value, is_loopback, parse_address

_BUCKET = re.compile(r"[a-z0-9][a-z0-9._-]{1,220}[a-z0-9]")
_GOOGLE = Origin("https", "storage.googleapis.com", 443)
MAX_DIGITS = 19  # of a number in an answer

Query = tuple[tuple[str, str], ...]


class GsSettings(NamedTuple):
    """The API's address, whether requests carry a token, and the project that pays for them."""

    origin: Origin
    is_anonymous: bool
    user_project: str | None


def parse_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of gs://bucket/prefix. The prefix has no '/' at its ends. Raises
    `UsageError`.
    """
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{url}: {bucket!r} is not the name of a bucket", hint="Write gs://bucket/prefix.")
    return bucket, prefix.strip("/")


def settings_from(options: SourceOptions, environment: Mapping[str, str]) -> GsSettings:
    """Options before STORAGE_EMULATOR_HOST before Google's own address. Raises `UsageError`.

    An emulator gets no token. No other plain http address does either, unless it is on this
    machine.
    """
    emulator = environment.get("STORAGE_EMULATOR_HOST") or None
    origin, is_anonymous = _GOOGLE, options.anonymous
    if options.endpoint_url is not None:
        origin = _origin_of(options.endpoint_url, "endpoint_url")
        if origin.scheme == "http" and not is_anonymous and not is_loopback(origin):
            raise UsageError(
                f"a token is not sent to {origin} over plain http",
                key="endpoint_url",
                hint="Write https://…, or read a public bucket with --anonymous.",
            )
    elif emulator is not None:
        origin = _origin_of(emulator if "://" in emulator else f"http://{emulator}", "STORAGE_EMULATOR_HOST")
        is_anonymous = True
    return GsSettings(origin, is_anonymous, _user_project(options, environment))


def object_target(bucket: str, key: str, query: Query) -> str:
    """An object's path and query in the JSON API."""
    return _with_query(f"/storage/v1/b/{encode_value(bucket)}/o/{encode_value(key)}", query)


def list_target(bucket: str, query: Query) -> str:
    return _with_query(f"/storage/v1/b/{encode_value(bucket)}/o", query)


def upload_target(bucket: str, query: Query) -> str:
    return _with_query(f"/upload/storage/v1/b/{encode_value(bucket)}/o", query)


def version_of(generation: str) -> str:
    """An object's generation in the form of a strong ETag."""
    return f'"{generation}"'


def generation_of(version: str) -> str | None:
    """The generation in a version; None for a version of another form."""
    digits = version[1:-1]
    return digits if version == f'"{digits}"' and is_number(digits) else None


def is_number(text: object) -> bool:
    return type(text) is str and text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS


def _with_query(path: str, query: Query) -> str:
    pairs = "&".join(f"{encode_value(name)}={encode_value(value)}" for name, value in query)
    return f"{path}?{pairs}" if pairs else path


def _origin_of(url: str, key: str) -> Origin:
    address = parse_address(url)
    if address is None or address.query or address.path.strip("/"):
        raise UsageError(
            f"the endpoint of Cloud Storage in {key} is not a web address",
            key=key,
            hint="Write http(s)://host:port.",
        )
    return address.origin


def _user_project(options: SourceOptions, environment: Mapping[str, str]) -> str | None:
    if not options.requester_pays:
        return None
    project = environment.get("GOOGLE_CLOUD_PROJECT") or None
    if project is None:
        raise UsageError(
            "a bucket whose readers pay needs the project that is billed",
            key="requester_pays",
            hint="Set GOOGLE_CLOUD_PROJECT.",
        )
    return project
