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
    command.add_argument(
        "--for", dest="platform", metavar="PLATFORM", help="with that platform's limits as well"
    )
    command.add_argument("--strict", action="store_true", help="warnings are errors")
    command.add_argument("--json", action="store_true", help="for machines")


def _check(options: argparse.Namespace) -> int:
    from .handlers.pool.command import check

    if options.platform is None:
        return check(options.file, strict=options.strict, as_json=options.json)
    from .infra.render.command import limits

    return check(
        options.file, platform=options.platform, limits=limits, strict=options.strict, as_json=options.json
    )


def _add_render(command: argparse.ArgumentParser) -> None:
    from .handlers.pool.keys import PLATFORMS

    command.add_argument("platform", metavar="PLATFORM", help=", ".join(PLATFORMS))
    _add_file(command)
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "-o", "--output", metavar="DIR", help="one file a document (default: all to standard output)"
    )
    where.add_argument("--check", metavar="DIR", help="write nothing; status 1 and a diff where DIR differs")
    command.add_argument("--model", metavar="NAME", help="this model alone")
    command.add_argument("--strict", action="store_true", help="warnings are errors")
    command.add_argument(
        "--read-manifests",
        action="store_true",
        help="read the models' manifests, to size instances whose memory the file does not give and check the others",
    )
    around = command.add_argument_group("surroundings that the file does not describe")
    around.add_argument(
        "--project", default="", metavar="ID", help="cloud-run: project of the service accounts"
    )
    around.add_argument("--prometheus", metavar="URL", help="kubernetes, helm: server that KEDA asks")
    around.add_argument("--gateway", metavar="NAME", help="kubernetes, helm: Gateway that divides traffic")
    _add_store(command)


def _add_store(command: argparse.ArgumentParser) -> None:
    from .cli_flags import _add_source_flags

    _add_source_flags(command)


def _render(options: argparse.Namespace) -> int:
    from .cli import _source_options
    from .infra.render.command import run_render
    from .infra.render.documents import Options

    around = {name: getattr(options, name) for name in ("project", "prometheus", "gateway")}
    return run_render(
        options.platform,
        options.file,
        output=options.output,
        check=options.check,
        model=options.model,
        strict=options.strict,
        options=Options(**{name: value for name, value in around.items() if value is not None}),
        manifests=_source_options(options) if options.read_manifests else None,
    )


# Action → help, what adds its flags, and what runs it: a function of the options that returns the exit status. Imports
# of `infra` stay inside of these functions.
ACTIONS: dict[
    str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
] = {
    "check": ("read a pool file, and name the first thing that is wrong with it", _add_check, _check),
    "render": ("write a platform's documents for a pool file", _add_render, _render),
}
