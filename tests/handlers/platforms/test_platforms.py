from __future__ import annotations

import pytest

from teneral.handlers.platforms import HTTP, PLATFORMS, Platform, imported, platform_of, routes_of
from teneral.loader.errors import UsageError


def test_names_and_signs_are_unique() -> None:
    assert len({row.name for row in PLATFORMS}) == len(PLATFORMS)
    signs = [row.sign for row in PLATFORMS if row.sign]
    assert len(set(signs)) == len(signs)


@pytest.mark.parametrize("row", PLATFORMS, ids=lambda row: row.name)
def test_every_address_of_a_row_names_something(row: Platform) -> None:
    for address in (row.api, row.error_response, row.run):
        assert not address or callable(imported(address))
    api = imported(row.api) if row.api else None
    assert all(callable(getattr(api, route.handler)) for route in routes_of(row))


@pytest.mark.parametrize(
    ("environment", "platform"),
    [
        ({}, HTTP),
        ({"PORT": "8080"}, HTTP),
        ({"K_SERVICE": "summaries"}, platform_of("cloud-run", {})),
        ({"RUNPOD_ENDPOINT_ID": "abc"}, platform_of("runpod", {})),
        (
            {"RUNPOD_ENDPOINT_ID": "abc", "RUNPOD_WEBHOOK_GET_JOB": "http://x"},
            platform_of("runpod-queue", {}),
        ),
        ({"AWS_LAMBDA_RUNTIME_API": "127.0.0.1:9001"}, platform_of("lambda", {})),
        ({"AWS_LAMBDA_RUNTIME_API": ""}, HTTP),
    ],
)
def test_a_platform_is_known_by_what_it_sets(environment: dict[str, str], platform: Platform) -> None:
    assert platform_of("auto", environment) is platform
    assert platform_of("sagemaker", environment) is platform_of("sagemaker", {})


def test_an_unknown_platform_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match="unknown platform 'azure'") as caught:
        platform_of("azure", {})
    assert "cloud-run" in str(caught.value)
