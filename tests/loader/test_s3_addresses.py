"""Addresses and settings of S3, and the documents that it answers with."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral.loader.errors import (
    FormatError,
    UsageError,
)
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.http.xml import parse_page, parse_problem
from teneral.loader.sources.s3.address import S3Settings, address_of, parse_url, settings_from


@settings(deadline=None)
@given(
    st.binary(max_size=400) | st.text(alphabet="<>/&;#xCodeErrorMessage0123", max_size=200).map(str.encode)
)
def test_any_error_document_is_survived(document: bytes) -> None:
    problem = parse_problem(document)
    assert len(problem.code) <= 500
    assert len(problem.message) <= 500


def test_an_error_document_cannot_expand_entities() -> None:
    bomb = b'<!DOCTYPE x [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;">]><Error><Code>&b;&amp;&#65;</Code></Error>'
    assert parse_problem(bomb).code == "&b;&A"


@pytest.mark.parametrize(
    "document",
    [
        b"",
        b"<html>not S3</html>",
        b"<ListBucketResult><Contents><Key>a</Key></Contents></ListBucketResult>",
        b"<ListBucketResult><Contents><Key>a</Key><Size>-1</Size></Contents></ListBucketResult>",
        b"<ListBucketResult><IsTruncated>true</IsTruncated></ListBucketResult>",
    ],
)
def test_a_list_that_is_none_is_refused(document: bytes) -> None:
    with pytest.raises(FormatError, match="here"):
        parse_page(document, where="here")


@pytest.mark.parametrize(
    ("bucket", "region", "style", "endpoint", "expected"),
    [
        ("models", "eu-west-1", "auto", None, "https://models.s3.eu-west-1.amazonaws.com"),
        ("models", "eu-west-1", "path", None, "https://s3.eu-west-1.amazonaws.com/models"),
        ("my.models", "eu-west-1", "auto", None, "https://s3.eu-west-1.amazonaws.com/my.models"),
        ("Old_Name", "us-east-1", "virtual", None, "https://s3.us-east-1.amazonaws.com/Old_Name"),
        ("models", "cn-north-1", "auto", None, "https://models.s3.cn-north-1.amazonaws.com.cn"),
        ("models", "us-east-1", "auto", "http://minio:9000", "http://minio:9000/models"),
        ("models", "us-east-1", "virtual", "http://minio:9000", "http://models.minio:9000"),
        ("models", "us-east-1", "auto", "https://gw.example.com/s3/", "https://gw.example.com/s3/models"),
    ],
)
def test_a_bucket_has_its_host_and_path(
    bucket: str, region: str, style: str, endpoint: str | None, expected: str
) -> None:
    settings = S3Settings(region, endpoint, style, profile=None, ca_file=None)
    address = address_of(bucket, region, settings)
    assert f"{address.origin}{address.path}" == expected


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("s3://models", ("models", "")),
        ("s3://models/", ("models", "")),
        ("s3://models/a b/c?d#e/", ("models", "a b/c?d#e")),
        ("S3://models//x", ("models", "x")),
    ],
)
def test_an_address_has_a_bucket_and_a_prefix(url: str, expected: tuple[str, str]) -> None:
    assert parse_url(url) == expected


@pytest.mark.parametrize(
    "url", ["s3://", "s3:///x", "s3://a", "s3://arn:aws:s3:::x/y", "s3://a b/c", "s3://.../x"]
)
def test_an_address_without_a_usable_bucket_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="bucket"):
        parse_url(url)


def test_options_go_before_the_environment_and_that_before_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tmp_path / "aws-config"
    config.write_text(
        "[default]\nregion = eu-south-1\nservices = local\ns3 =\n  addressing_style = virtual\n"
        "[services local]\ns3 =\n  endpoint_url = http://configured:1\n"
    )
    environment = {"AWS_CONFIG_FILE": str(config)}
    monkeypatch.setenv("AWS_CONFIG_FILE", str(config))  # botocore reads its own environment
    found = settings_from(SourceOptions(), environment)
    assert (found.region, found.endpoint_url, found.addressing_style) == (
        "eu-south-1",
        "http://configured:1",
        "virtual",
    )
    environment |= {"AWS_REGION": "eu-north-1", "AWS_ENDPOINT_URL": "http://general:1"}
    found = settings_from(SourceOptions(), environment)
    assert (found.region, found.endpoint_url) == ("eu-north-1", "http://general:1")
    environment["AWS_ENDPOINT_URL_S3"] = "http://specific:1"
    assert settings_from(SourceOptions(), environment).endpoint_url == "http://specific:1"
    options = SourceOptions(region="us-west-2", endpoint_url="http://given:1", addressing_style="path")
    found = settings_from(options, environment)
    assert (found.region, found.endpoint_url, found.addressing_style) == (
        "us-west-2",
        "http://given:1",
        "path",
    )


@pytest.mark.parametrize(
    ("options", "key"),
    [
        (SourceOptions(region="Europe!"), "region"),
        (SourceOptions(endpoint_url="minio:9000"), "endpoint_url"),
        (SourceOptions(endpoint_url="http://user:pass@minio"), "endpoint_url"),
        (SourceOptions(addressing_style="sideways"), "addressing_style"),
    ],
)
def test_an_invalid_setting_is_named(options: SourceOptions, key: str) -> None:
    with pytest.raises(UsageError) as caught:
        settings_from(options, {})
    assert caught.value.key == key
