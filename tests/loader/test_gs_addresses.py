"""Addresses and endpoints of Cloud Storage, and where its tokens may go."""

from __future__ import annotations

import pytest

from teneral.loader.errors import (
    UsageError,
)
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.gs.address import parse_url, settings_from
from teneral.loader.sources.http.tokens import Token


def test_a_token_never_goes_over_plain_http_to_another_machine() -> None:
    with pytest.raises(UsageError, match="plain http") as caught:
        settings_from(SourceOptions(endpoint_url="http://storage.example"), {})
    assert caught.value.key == "endpoint_url"
    settings_from(SourceOptions(endpoint_url="http://storage.example", anonymous=True), {})
    settings_from(SourceOptions(endpoint_url="https://storage.example"), {})


def test_a_token_is_not_shown() -> None:
    assert "abc" not in f"{Token('abc', 10)!r}"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("gs://models", ("models", "")),
        ("GS://my_models-1.example//a b/", ("my_models-1.example", "a b")),
    ],
)
def test_an_address_has_a_bucket_and_a_prefix(url: str, expected: tuple[str, str]) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    "url", ["gs://", "gs:///x", "gs://a", "gs://Models", "gs://a b", "gs://x@y/z", "gs://../x"]
)
def test_an_address_without_a_usable_bucket_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="bucket"):
        parse_url(url)


@pytest.mark.parametrize("endpoint", ["minio:9000", "http://user:pass@127.0.0.1", "http://127.0.0.1/path"])
def test_an_endpoint_that_is_not_one_is_named(endpoint: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings_from(SourceOptions(endpoint_url=endpoint), {})
    assert caught.value.key == "endpoint_url"
