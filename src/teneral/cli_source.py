"""The flags of commands that read or write a store, and the options that they make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .loader.sources.base import SourceOptions


def add_source_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags to `command`."""
    group = command.add_argument_group("the store")
    group.add_argument("--endpoint-url", metavar="URL", help="address of an S3-compatible store")
    group.add_argument("--region")
    group.add_argument("--profile", help="AWS profile to take credentials from")
    group.add_argument("--addressing-style", choices=("auto", "path", "virtual"), default="auto")
    group.add_argument("--anonymous", action="store_true", help="send unsigned requests")
    group.add_argument("--requester-pays", action="store_true", help="agree to pay for the requests")


def add_base_flag(command: argparse.ArgumentParser) -> None:
    """Add the flag for artifacts that hold differences only."""
    command.add_argument(
        "--base",
        metavar="ARTIFACT",
        default=None,
        help="the base of a fine-tune that is stored as differences to it, perhaps with …@b3:DIGEST",
    )


def source_options(options: argparse.Namespace) -> SourceOptions:
    """The values of those flags."""
    from .loader.sources.base import SourceOptions

    return SourceOptions(
        endpoint_url=options.endpoint_url,
        region=options.region,
        profile=options.profile,
        addressing_style=options.addressing_style,
        anonymous=options.anonymous,
        requester_pays=options.requester_pays,
        base=getattr(options, "base", None),  # of commands that read weights
    )
