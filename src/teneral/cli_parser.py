"""The parser of every command, and the flags for the settings of an instance."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from .runtime.setting import Setting

# The settings that `serve --help` shows, by task; `--help-all` shows all of them.
SHOWN_SETTINGS = {
    "what is served, and where": ("name", "host", "port", "api_key", "handler"),
    "the store and the start": ("endpoint_url", "cache_dir", "first_token", "standby"),
    "memory and speed": ("device", "threads", "max_context", "kv_bytes"),
}


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


def add_settings(command: Parser, *, model_flag: bool = False) -> None:
    """A flag for every setting of `ServeConfig`; values stay texts here, `resolve` parses and validates
    them. `--help` shows those that people use, `--help-all` all.
    """
    from .runtime.config import SETTINGS

    command.add_argument("--help-all", action="help", help="show all flags, and exit")
    command.add_argument(
        "--config",
        metavar="FILE.toml",
        default=None,
        help="settings by name; flags and TENERAL_* win over it",
    )
    groups = {
        name: group
        for title, names in SHOWN_SETTINGS.items()
        for group in [command.add_argument_group(title)]
        for name in names
    }
    others = command.add_argument_group("all other settings")
    for name, setting in SETTINGS.items():
        if name == "model" and not model_flag:
            continue
        flags, how = _flag_of(name, setting)
        help_text = setting.help.replace("%", "%%")
        if name not in groups and name != "model" and not command.shows_all:
            help_text = argparse.SUPPRESS
        elif setting.default not in (None, "", True, False) and "default" not in help_text:
            help_text += f" (default: {setting.default})"
        groups.get(name, others).add_argument(*flags, help=help_text, **how)
    if not command.shows_all:
        command.epilog = f"{command.prog} --help-all shows {len(SETTINGS) - len(groups)} settings more."


def _flag_of(name: str, setting: Setting) -> tuple[list[str], dict[str, Any]]:
    """A setting's flag, and how argparse takes it."""
    how: dict[str, Any] = {"default": argparse.SUPPRESS}
    if isinstance(setting.default, bool):
        how["action"] = argparse.BooleanOptionalAction
    else:
        how["metavar"] = setting.metavar or name.rpartition("_")[2].upper()
    return [f"--{name.replace('_', '-')}"], how


class PrintVersion(argparse.Action):
    """`--version`: prints the version and the commit, and ends the process."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from .cli_version import version_line  # lazy: no start pays for asking git

        print(version_line())
        parser.exit()
