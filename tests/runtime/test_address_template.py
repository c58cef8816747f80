"""Addresses with gaps: what may stand in them, and what they become."""

from __future__ import annotations

import pytest

from teneral.loader.errors import UsageError
from teneral.runtime.address_template import MAX_TEMPLATE_CHARS, AddressTemplate
from teneral.runtime.resolve import resolve


def parse(text: str) -> AddressTemplate:
    return AddressTemplate.parse(text, allowed=("bucket", "key", "etag"), required="key")


def test_gaps_are_filled_with_the_values_as_they_are() -> None:
    template = parse("s3://results/a/{bucket}/{key}/{etag}.jsonl")
    assert template.fields == {"bucket", "key", "etag"}
    assert (
        template.fill(bucket="b", key="x/{etag} +%.jsonl", etag="1-2")
        == "s3://results/a/b/x/{etag} +%.jsonl/1-2.jsonl"
    )


@pytest.mark.parametrize(
    ("text", "folder"),
    [
        ("s3://results/{key}", ""),
        ("s3://results/answers-{key}", ""),
        ("s3://{bucket}/answers/{key}.jsonl", "answers/"),
        ("s3://results/a/b/c-{bucket}/{key}", "a/b/"),
    ],
)
def test_the_folder_is_what_all_keys_begin_with(text: str, folder: str) -> None:
    assert parse(text).folder == folder


def test_it_is_known_in_which_buckets_an_address_can_be() -> None:
    assert parse("s3://results/{key}").may_hold("s3://results")
    assert not parse("s3://results/{key}").may_hold("s3://results2")
    assert parse("s3://{bucket}/a/{key}").may_hold("s3://anything")
    assert parse("s3://{bucket}-out/{key}").may_hold("s3://in-out")
    assert not parse("s3://{bucket}-out/{key}").may_hold("s3://in")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "at most"),
        ("s3://results/{key}" + "x" * MAX_TEMPLATE_CHARS, "at most"),
        ("/tmp/{key}", "must be s3://bucket/key"),
        ("https://host/{key}", "must be s3://bucket/key"),
        ("s3://results", "must be s3://bucket/key"),
        ("s3://results/", "must be s3://bucket/key"),
        ("s3://results/out.jsonl", "must contain {key}"),
        ("s3://results/{kye}", "has the unknown field {kye}"),
        ("s3://{key}/{key}", "before the first /"),
        ("s3://results/{key", "expected '}'"),
        ("s3://results/key}", "Single '}'"),
        ("s3://results/{}", "plain names"),
        ("s3://results/{0}", "plain names"),
        ("s3://results/{key.__class__}", "plain names"),
        ("s3://results/{key[0]}", "plain names"),
        ("s3://results/{key!r}", "plain names"),
        ("s3://results/{key:>9999}", "plain names"),
        ("s3://results/{{{key}", "no spaces, braces"),
        ("s3://results/a b{key}", "no spaces, braces"),
    ],
)
def test_invalid_values_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=r".") as caught:
        parse(text)
    assert message in str(caught.value)


@pytest.mark.parametrize("variable", ["TENERAL_BATCH_OUTPUT", "TENERAL_BATCH_ANSWERS"])
def test_a_wrong_template_is_an_error_when_the_configuration_is_read(variable: str) -> None:
    good = {
        "TENERAL_BATCH_OUTPUT": "s3://out/{bucket}/{key}",
        "TENERAL_BATCH_ANSWERS": "s3://out/{queue}/{id}",
    }
    config = resolve({"model": "m"}, good)
    assert (config.batch_output, config.batch_answers) == tuple(good.values())
    with pytest.raises(UsageError, match=variable):
        resolve({"model": "m"}, {variable: "s3://out/{nothing}"})
