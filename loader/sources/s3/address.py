"""The host and path of an S3 bucket, and the settings that decide them.

`settings_from` is the one place that reads S3's environment variables; all else here is pure.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ...errors import AccessDeniedError, UsageError
from ..base import SourceOptions
from ..http.address import Origin, parse_address

DEFAULT_REGION = "us-east-1"
STYLES = ("auto", "path", "virtual")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]")
_HOST_LABEL = r"[a-z0-9][a-z0-9-]{1,61}[a-z0-9]"  # with a dot, TLS's wildcard would not cover it
_REGION = re.compile(r"[a-z0-9][a-z0-9-]{0,62}")


class S3Settings(NamedTuple):
    """The way to reach S3, from options, environment and the profile's configuration, in that order."""

    region: str
    endpoint_url: str | None  # None: Amazon's own
    addressing_style: str
    profile: str | None  # as it was asked for by name
    ca_file: str | None


class BucketAddress(NamedTuple):
    """A bucket's host, and the path before its keys: '' or '/…', encoded."""

    origin: Origin
    path: str


def parse_url(url: str) -> tuple[str, str]:
    """Bucket and prefix of s3://bucket/prefix. The prefix has no '/' at its ends. Raises
    `UsageError`.
    """
    bucket, _, prefix = url.partition("://")[2].partition("/")
    if not _BUCKET.fullmatch(bucket):
        raise UsageError(f"{url}: {bucket!r} is not the name of a bucket", hint="Write s3://bucket/prefix.")
    return bucket, prefix.strip("/")


def settings_from(options: SourceOptions, environment: Mapping[str, str]) -> S3Settings:
    """Raises `UsageError` for invalid values, and `AccessDeniedError` for a profile that is
    unknown.
    """
    profile = options.profile or environment.get("AWS_PROFILE")
    endpoint_url = (
        options.endpoint_url or environment.get("AWS_ENDPOINT_URL_S3") or environment.get("AWS_ENDPOINT_URL")
    )
    region = options.region or environment.get("AWS_REGION") or environment.get("AWS_DEFAULT_REGION")
    style = options.addressing_style
    if not (endpoint_url and region) and _has_configuration(environment):
        configured = _profile_configuration(profile)
        region = region or configured.get("region")
        endpoint_url = endpoint_url or configured.get("endpoint_url")
        style = configured.get("addressing_style", style) if style == "auto" else style
    region = region or DEFAULT_REGION
    if not is_region(region):
        raise UsageError(f"{region!r} is not a region", key="region", hint="Write it as in eu-central-1.")
    if style not in STYLES:
        raise UsageError(
            f"{style!r} is not an addressing style",
            key="addressing_style",
            hint=f"Choose from {', '.join(STYLES)}.",
        )
    endpoint = None if endpoint_url is None else parse_address(endpoint_url)
    if endpoint_url is not None and (endpoint is None or endpoint.query):
        raise UsageError(
            "the S3 endpoint is not a web address", key="endpoint_url", hint="Write http(s)://host:port."
        )
    return S3Settings(region, endpoint_url, style, options.profile, environment.get("AWS_CA_BUNDLE"))


def address_of(bucket: str, region: str, settings: S3Settings) -> BucketAddress:
    """Amazon's own hosts carry the bucket in their name where that works; others get it in the
    path.
    """
    if settings.endpoint_url is None:
        domain = "amazonaws.com.cn" if region.startswith("cn-") else "amazonaws.com"
        endpoint, path = Origin("https", f"s3.{region}.{domain}", 443), ""
        is_virtual = settings.addressing_style != "path" and bool(re.fullmatch(_HOST_LABEL, bucket))
    else:
        address = parse_address(settings.endpoint_url)
        assert address is not None, "settings_from checks it"
        endpoint, path = address.origin, address.path.rstrip("/")
        is_virtual = settings.addressing_style == "virtual"
    if is_virtual:
        return BucketAddress(Origin(endpoint.scheme, f"{bucket}.{endpoint.host}", endpoint.port), path)
    return BucketAddress(endpoint, f"{path}/{bucket}")


def is_region(name: str) -> bool:
    """True if a region's name, which may come from a server, can become part of a host name."""
    return _REGION.fullmatch(name) is not None


def _has_configuration(environment: Mapping[str, str]) -> bool:
    return os.path.exists(os.path.expanduser(environment.get("AWS_CONFIG_FILE", "~/.aws/config")))


def _profile_configuration(profile: str | None) -> dict[str, str]:
    """The profile's region, endpoint_url and addressing_style, as far as the configuration file has
    them.
    """
    # 0.1 s and more of importing, so only where there is a configuration file.
    import botocore.session
    from botocore.exceptions import BotoCoreError

    try:
        session = botocore.session.Session(profile=profile)
        scoped: dict[str, Any] = session.get_scoped_config()
        services: dict[str, Any] = session.full_config.get("services", {}).get(scoped.get("services"), {})
    except BotoCoreError as error:
        hint = "Check the profile's name and ~/.aws/config."
        raise AccessDeniedError(f"the AWS configuration cannot be used: {error}", hint=hint) from error
    found = {
        "region": scoped.get("region"),
        "endpoint_url": _entry(services, "s3", "endpoint_url") or scoped.get("endpoint_url"),
        "addressing_style": _entry(scoped, "s3", "addressing_style"),
    }
    return {key: value for key, value in found.items() if isinstance(value, str)}


def _entry(table: dict[str, Any], section: str, key: str) -> Any:
    nested = table.get(section)
    return nested.get(key) if isinstance(nested, dict) else None
