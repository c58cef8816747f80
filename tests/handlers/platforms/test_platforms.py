from __future__ import annotations

import pytest

from teneral.handlers.platforms import TRAITS, Platform, platform_of
from teneral.loader.errors import UsageError


def test_every_platform_has_its_traits() -> None:
    assert set(TRAITS) == set(Platform)


@pytest.mark.parametrize(
    ("environment", "platform"),
    [
        ({}, Platform.HTTP),
        ({"PORT": "8080"}, Platform.HTTP),
        ({"K_SERVICE": "summaries"}, Platform.CLOUD_RUN),
        ({"RUNPOD_ENDPOINT_ID": "abc"}, Platform.RUNPOD),
        ({"RUNPOD_ENDPOINT_ID": "abc", "RUNPOD_WEBHOOK_GET_JOB": "http://x"}, Platform.RUNPOD_QUEUE),
        ({"AWS_LAMBDA_RUNTIME_API": "127.0.0.1:9001"}, Platform.LAMBDA),
        ({"AWS_LAMBDA_RUNTIME_API": ""}, Platform.HTTP),
    ],
)
def test_a_platform_is_known_by_what_it_sets(environment: dict[str, str], platform: Platform) -> None:
    assert platform_of("auto", environment) is platform
    assert platform_of("sagemaker", environment) is Platform.SAGEMAKER


def test_an_unknown_platform_is_refused_with_those_that_exist() -> None:
    with pytest.raises(UsageError, match="no platform") as caught:
        platform_of("azure", {})
    assert "cloud-run" in str(caught.value)
