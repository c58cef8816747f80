"""AWS's command line by its own models: whether an operation exists and has these parameters."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

OF_EVERY_COMMAND = {
    "--cli-binary-format", "--cli-read-timeout", "--endpoint-url", "--output", "--profile", "--query", "--region",
}  # fmt: skip
# Commands that aws has besides the operations of services.
CUSTOM = {
    ("cloudformation", "deploy"): {
        "--template-file", "--stack-name", "--capabilities", "--parameter-overrides", "--no-fail-on-empty-changeset",
    },
    ("configure", "export-credentials"): {"--format"},
    ("ecr", "get-login-password"): set(),
    ("s3", "cp"): {"--exclude", "--recursive"},
    ("s3", "mb"): set(),
    ("s3", "rb"): {"--force"},
    ("s3", "rm"): {"--recursive"},
    ("logs", "tail"): set(),
}  # fmt: skip


@cache
def _service(name: str) -> Any:
    from botocore.session import Session

    return Session().get_service_model(name)


@cache
def _waiters(name: str) -> set[str]:
    from botocore import xform_name
    from botocore.session import Session

    return {xform_name(each, "-") for each in Session().get_waiter_model(name).waiter_names}


def check_aws_command(words: Sequence[str]) -> None:
    """Raises `AssertionError` for an operation, a waiter or a flag that aws does not have, or one that is missing."""
    from botocore import xform_name

    service, operation, *rest = words[1:]
    given = {word.partition("=")[0] for word in rest if word.startswith("--")} - OF_EVERY_COMMAND
    if (service, operation) in CUSTOM:
        assert given <= CUSTOM[service, operation], words
        return
    if operation == "wait":
        assert rest[0] in _waiters(service), words
        return
    names = {xform_name(name, "-"): name for name in _service(service).operation_names}
    assert operation in names, words
    shape = _service(service).operation_model(names[operation]).input_shape
    if shape is None:
        assert not given, words
        return
    assert given <= {f"--{xform_name(name, '-')}" for name in shape.members}, words
    assert {f"--{xform_name(name, '-')}" for name in shape.required_members} <= given, words
