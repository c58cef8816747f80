"""Credentials for a store that checks none, and nothing else of what the machine's user has set up."""

from __future__ import annotations

import pytest

FOREIGN = (
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_SESSION_TOKEN",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
)


def use_test_credentials(patch: pytest.MonkeyPatch) -> None:
    """Have this process, and those that it starts, see only these, as long as the patch lasts."""
    for name in FOREIGN:
        patch.delenv(name, raising=False)
    patch.setenv("AWS_ACCESS_KEY_ID", "AKIATEST")
    patch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    patch.setenv("AWS_CONFIG_FILE", "/nonexistent")
    patch.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
    patch.setenv("AWS_EC2_METADATA_DISABLED", "true")
