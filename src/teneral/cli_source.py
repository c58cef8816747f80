"""The flags of commands that read or write a store, and the options that they make."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .cli_parser import add_setting

if TYPE_CHECKING:
    from .loader.sources.base import SourceOptions


def add_source_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags to `command`."""
    from .runtime.config import SETTINGS, STORE_SETTINGS

    group = command.add_argument_group("the store")
    for name in STORE_SETTINGS:
        add_setting(group, name, SETTINGS[name])


def add_base_flag(command: argparse.ArgumentParser) -> None:
    """Add the flag for artifacts that hold differences only."""
    from .runtime.config import SETTINGS

    command.set_defaults(base=None)
    add_setting(command, "base", SETTINGS["base"])


def source_options(options: argparse.Namespace) -> SourceOptions:
    """The values of those flags. Raises `UsageError` for invalid ones."""
    from .loader.sources.base import SourceOptions
    from .runtime.config import STORE_SETTINGS
    from .runtime.resolve import parse_flag

    names = [name for name in (*STORE_SETTINGS, "base") if getattr(options, name, None) is not None]
    return SourceOptions(**{name: parse_flag(name, getattr(options, name)) for name in names})
