"""The parser of every command, and the flags for the settings of an instance and for stores."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .loader.sources.base import SourceOptions
    from .runtime.setting import Setting


class Parser(argparse.ArgumentParser):
    """A parser whose errors name what was probably meant. `shows_all`: its help has every setting."""

    shows_all = False

    def chosen(self, options: argparse.Namespace) -> Parser:
        """The parser of the command, and of its action, that was given."""
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                found = action.choices.get(getattr(options, action.dest, None) or "")
                return self if found is None else found.chosen(options)
        return self

    def error(self, message: str) -> NoReturn:
        """Print the usage in one line and the error; exit with 2."""
        command = self.prog.removesuffix(" [-h]")
        known = list(self._option_string_actions)
        typed = re.findall(r"(?:unrecognized arguments:|invalid choice:) '?([^ ']+)", message)
        for action in self._actions:
            known += list(action.choices or ()) if isinstance(action, argparse._SubParsersAction) else []
        if typed:
            from difflib import get_close_matches  # only on the way to an error

            message = message.partition(" (choose from")[0]
            if meant := get_close_matches(typed[0].partition("=")[0], known, 1):
                message += f"; did you mean {meant[0]}?"
        self.exit(2, f"{command}: {message}\n  {command} --help lists what it takes.\n")


def add(command: Any, name: str, metavar: str, help_text: str, **more: Any) -> None:
    """Add an argument, or a flag with a value, to a parser or a group of one. `more` is argparse's."""
    command.add_argument(name, metavar=metavar, help=help_text, **more)


def switch(command: Any, name: str, help_text: str, **more: Any) -> None:
    """Add a flag without a value, likewise."""
    command.add_argument(name, action="store_true", help=help_text, **more)


def add_settings(command: Parser, *, model_flag: bool = False) -> None:
    """A flag for every setting of `ServeConfig`; values stay texts here, `resolve` parses and validates
    them. `--help` shows those that people use, `--help-all` all.
    """
    from .runtime.config import SETTINGS

    command.add_argument("--help-all", action="help", help="show all flags, and exit")
    command.add_argument(
        "--config",
        metavar="FILE.toml",
        help="settings by name; flags and TENERAL_* win over it",
    )
    groups: dict[str, Any] = {}
    for name, setting in SETTINGS.items():
        if name == "model" and not model_flag:
            continue
        is_shown = command.shows_all or setting.is_common or name == "model"
        if is_shown and setting.group not in groups:
            groups[setting.group] = command.add_argument_group(setting.group)
        add_setting(groups[setting.group] if is_shown else command, name, setting, is_shown=is_shown)
    if not command.shows_all:
        num_hidden = sum(not setting.is_common for setting in SETTINGS.values())
        command.epilog = f"{command.prog} --help-all shows {num_hidden} settings more."


def add_setting(parser: Any, name: str, setting: Setting, *, is_shown: bool = True) -> None:
    """Add the flag of a setting to a parser or a group of one. Its value stays a text."""
    help_text = argparse.SUPPRESS
    if is_shown:
        help_text = setting.help.replace("%", "%%")
        if setting.default not in (None, "", True, False) and "default" not in help_text:
            help_text += f" (default: {setting.default})"
    how: dict[str, Any] = {"default": argparse.SUPPRESS, "help": help_text}
    if isinstance(setting.default, bool):
        how["action"] = argparse.BooleanOptionalAction
    else:
        how["metavar"] = setting.metavar or name.rpartition("_")[2].upper()
    parser.add_argument(f"--{name.replace('_', '-')}", **how)


class PrintVersion(argparse.Action):
    """`--version`: prints the version and the commit, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from .cli_version import version_line  # lazy: no start pays for asking git

        print(version_line())
        parser.exit()


def add_source_flags(command: argparse.ArgumentParser) -> None:
    """Add the flags of commands that read or write a store."""
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
    """The values of the flags for stores. Raises `UsageError` for invalid ones."""
    from .loader.sources.base import SourceOptions
    from .runtime.config import STORE_SETTINGS
    from .runtime.resolve import parse_flag

    names = [name for name in (*STORE_SETTINGS, "base") if getattr(options, name, None) is not None]
    return SourceOptions(**{name: parse_flag(name, getattr(options, name)) for name in names})
