"""`teneral pool`: the flags of its actions, and the function that runs each.

Actions live in `handlers/pool/` and in `infra/`, which may not import each other both ways: this is where they meet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable


def add_flags(command: argparse.ArgumentParser) -> None:
    """The flags of all actions."""
    actions = command.add_subparsers(title="actions", required=True, metavar="ACTION", dest="action")
    for name, (help_text, add, _) in ACTIONS.items():
        add(actions.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + "."))


def run_pool_command(options: argparse.Namespace) -> int:
    """Run the action that was given. Returns the exit status; raises `TeneralError`."""
    _, _, run = ACTIONS[options.action]
    return run(options)


def _add_file(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "file", metavar="POOL.toml", nargs="?", default="pool.toml", help="(default: pool.toml)"
    )


def _add_check(command: argparse.ArgumentParser) -> None:
    _add_file(command)
    command.add_argument("--strict", action="store_true", help="warnings are errors")
    command.add_argument("--json", action="store_true", help="for machines")


def _check(options: argparse.Namespace) -> int:
    from .handlers.pool.command import check

    return check(options.file, strict=options.strict, as_json=options.json)


# Action → help, what adds its flags, and what runs it: a function of the options that returns the exit status. Imports
# of `infra` stay inside of these functions.
ACTIONS: dict[
    str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
] = {
    "check": ("read a pool file, and name the first thing that is wrong with it", _add_check, _check),
}
