"""`teneral pool`: the flags of its actions, and the function that runs each.

Actions live in `handlers/pool/` and in `infra/`, which may not import each other both ways: this is where they meet.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from .cli_parser import Parser, add, add_source_flags, source_options, switch
from .loader.errors import UsageError

FILE = "pool.toml"


class _ActionParser(Parser):
    """Takes the pool file after flags as well, as in `render knative -o DIR FILE`. Before Python 3.12.7 argparse gives
    an optional argument its default as soon as the argument before it is read, and then refuses the file.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        options, rest = super().parse_known_args(args, namespace)
        if len(rest) == 1 and not rest[0].startswith("-") and getattr(options, "file", None) == FILE:
            options.file = rest.pop()
        return options, rest


def add_flags(command: argparse.ArgumentParser) -> None:
    """The flags of all actions."""
    actions = command.add_subparsers(
        title="actions", required=True, metavar="ACTION", dest="action", parser_class=_ActionParser
    )
    for name, (help_text, add_flags_of, _) in ACTIONS.items():
        add_flags_of(
            actions.add_parser(name, help=help_text, description=help_text[0].upper() + help_text[1:] + ".")
        )


def run_pool_command(options: argparse.Namespace) -> int:
    """Run the action that was given. Returns the exit status; raises `TeneralError`."""
    _, _, run = ACTIONS[options.action]
    return run(options)


def _add_file(command: argparse.ArgumentParser) -> None:
    add(command, "file", "POOL.toml", f"(default: {FILE})", nargs="?", default=FILE)


def _add_check(command: argparse.ArgumentParser) -> None:
    _add_file(command)
    add(command, "--for", "PLATFORM", "with that platform's limits as well", dest="platform")
    switch(command, "--strict", "warnings are errors")
    switch(command, "--deep", "ask the stores whether the models are there, and how large")
    switch(command, "--json", "for machines")


def _check(options: argparse.Namespace) -> int:
    from .handlers.pool.command import check

    if options.platform is None:
        return check(options.file, strict=options.strict, deep=options.deep, as_json=options.json)
    from .infra.render.command import limits

    return check(
        options.file,
        platform=options.platform,
        limits=limits,
        strict=options.strict,
        deep=options.deep,
        as_json=options.json,
    )


def _add_render(command: argparse.ArgumentParser) -> None:
    from .handlers.pool.keys import PLATFORMS

    add(command, "platform", "PLATFORM", ", ".join(PLATFORMS))
    _add_file(command)
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "-o",
        "--output",
        metavar="DIR",
        help="one file a document, and deploy.sh, which applies them (default: documents to standard output)",
    )
    add(where, "--check", "DIR", "write nothing; status 1 and a diff where DIR differs")
    add(command, "--model", "NAME", "this model alone")
    switch(command, "--strict", "warnings are errors")
    switch(
        command,
        "--read-manifests",
        "read the models' manifests, to size instances whose memory the file does not give and check the others",
    )
    around = command.add_argument_group("surroundings that the file does not describe")
    add(around, "--project", "ID", "cloud-run: project of the service accounts", default="")
    add(around, "--prometheus", "URL", "kubernetes, helm: server that KEDA asks")
    add(around, "--gateway", "NAME", "kubernetes, helm: Gateway that divides traffic")
    switch(around, "--ray-zero", "ray, kuberay: no replica stays where min_warm is 0")
    add_source_flags(command)


def _render(options: argparse.Namespace) -> int:
    from .infra.render.command import run_render
    from .infra.render.documents import Options

    around = {name: getattr(options, name) for name in ("project", "prometheus", "gateway", "ray_zero")}
    return run_render(
        options.platform,
        options.file,
        output=options.output,
        check=options.check,
        model=options.model,
        strict=options.strict,
        options=Options(**{name: value for name, value in around.items() if value is not None}),
        manifests=source_options(options) if options.read_manifests else None,
    )


def _add_run(command: argparse.ArgumentParser) -> None:
    _add_file(command)
    add(
        command,
        "--repository",
        "DIR",
        "serve all models of a folder or s3://bucket/prefix: <model>/<version>/; the file is optional then",
    )
    command.add_argument(
        "--host",
        help="address to listen on (default: TENERAL_HOST, else 127.0.0.1, or 0.0.0.0 on a platform)",
    )
    command.add_argument("--port", type=int, default=8080, help="port; 0 takes a free one (default: 8080)")
    switch(command, "--watch", "look for changes of the file and for new versions")
    add(command, "--watch-s", "SECONDS", "how often (default: 10)", type=float, default=10.0)
    switch(
        command,
        "--model-control",
        "let clients put models to sleep, wake and drain them, and promote versions",
    )
    add(
        command,
        "--key-limits",
        "LIMITS",
        "what each key of TENERAL_API_KEY may use: requests_minute=N,tokens_minute=N, and _day "
        "(default: any number)",
    )
    switch(command, "--no-console", "no page at / that shows the pool")
    add(command, "--state-dir", "DIR", "keep KV snapshots there between runs (default: not)")
    command.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    command.add_argument(
        "--log-format",
        choices=("text", "json"),
        default="text",
        help="a line as text, or as a JSON object; of the instances too, where the file does not set it",
    )


def _run(options: argparse.Namespace) -> int:
    import os

    from .handlers.platforms import default_host, is_hosted
    from .handlers.pool.run import RunOptions, run_pool

    if not 0 <= options.port <= 65535:
        raise UsageError(f"--port must be from 0 to 65535; it is {options.port}", key="port")
    if not 0.1 <= options.watch_s <= 86_400:
        raise UsageError(f"--watch-s must be from 0.1 to 86400; it is {options.watch_s}", key="watch-s")
    return run_pool(
        RunOptions(
            file=options.file,
            repository=options.repository,
            host=options.host or os.environ.get("TENERAL_HOST") or default_host(os.environ),
            port=options.port,
            is_hosted=is_hosted(os.environ),
            watch=options.watch,
            watch_s=options.watch_s,
            model_control=options.model_control,
            key_limits=options.key_limits,
            console=not options.no_console,
            state_folder=options.state_dir,
            log_level=options.log_level,
            log_format=options.log_format,
        )
    )


def _add_measure(command: argparse.ArgumentParser) -> None:
    _add_file(command)
    add(command, "--starts", "N", "of each model (default: 5)", type=int, default=5)
    command.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        help="(default: pool.measured.json in the pool file's folder)",
    )


def _measure(options: argparse.Namespace) -> int:
    from .handlers.pool.measure import measure

    return measure(options.file, num_starts=options.starts, output=options.output)


def _add_plan(command: argparse.ArgumentParser) -> None:
    _add_file(command)
    add(command, "--trace", "FILE", "arrivals: JSON lines, CSV, or one of Azure's")
    add(
        command,
        "--synthetic",
        "SPEC",
        "arrivals such as bursty:rate=5,on=40,off=860,duration=21600; poisson: and diurnal: too; may be repeated",
        action="append",
        default=[],
    )
    add(command, "--measured", "FILE", "(default: pool.measured.json in the pool file's folder)")
    add(command, "--assume", "NAME=VALUE", "a figure in place of a measured one", action="append", default=[])
    command.add_argument("--price", default=None, help="yours: 0.10/h an instance, or 0.0000167/GB-s")
    add(command, "--standby-price", "PRICE", "of a standby process: 0.01/h (default: not counted)")
    add(command, "--store-price", "PRICE", "of the store's bytes: 0.02/GB (default: not counted)")
    switch(command, "--ways", "compare a pool kept warm, on standby and cold, instead of a grid of settings")
    add(
        command,
        "--fleet",
        "SPEC",
        "nodes such as nodes=100,per_node=10,zones=3,weights=cache,node_bytes_s=1.25e9,scaling=knative",
    )
    add(command, "--platform-s", "SECONDS", "until a platform begins a start", type=float)
    add(command, "--cores", "N", "of the one host that all instances share (default: own ones)", type=float)
    switch(command, "--json", "for machines")
    add(command, "--html", "FILE", "write a page as well")


def _plan(options: argparse.Namespace) -> int:
    from .infra.plan.command import PlanOptions, plan

    return plan(
        PlanOptions(
            file=options.file,
            trace=options.trace,
            synthetic=tuple(options.synthetic),
            measured=options.measured,
            assume=tuple(options.assume),
            price=options.price,
            standby_price=options.standby_price,
            store_price=options.store_price,
            ways=options.ways,
            fleet=options.fleet,
            platform_s=options.platform_s,
            cores=options.cores,
            as_json=options.json,
            html=options.html,
        )
    )


def _add_url(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--url", default="http://127.0.0.1:8080", help="of the pool (default: http://127.0.0.1:8080)"
    )


def _add_promote(command: argparse.ArgumentParser) -> None:
    command.add_argument("version", metavar="MODEL@VERSION")
    _add_url(command)


def _add_rollback(command: argparse.ArgumentParser) -> None:
    add(command, "version", "MODEL[@VERSION]", "(default: the newest that gets requests)")
    _add_url(command)


def _control(options: argparse.Namespace) -> int:
    from .handlers.pool.command import control

    return control(options.url, options.version, options.action)


def _add_status(command: argparse.ArgumentParser) -> None:
    _add_url(command)
    switch(command, "--json", "for machines")


def _status(options: argparse.Namespace) -> int:
    from .handlers.pool.command import status

    return status(options.url, as_json=options.json)


# Action → help, what adds its flags, and what runs it: a function of the options that returns the exit status. Imports
# of `infra` stay inside of these functions.
ACTIONS: dict[
    str, tuple[str, Callable[[argparse.ArgumentParser], None], Callable[[argparse.Namespace], int]]
] = {
    "run": ("serve all models of a pool file on this machine, behind one port", _add_run, _run),
    "status": ("print the models and instances of a pool that runs", _add_status, _status),
    "promote": ("send a running pool's requests to this version of a model", _add_promote, _control),
    "rollback": (
        "send a running pool's requests to other versions than this one",
        _add_rollback,
        _control,
    ),
    "measure": ("start instances here, and write how fast they start and answer", _add_measure, _measure),
    "plan": ("say how a pool does under a trace of arrivals, and what it costs", _add_plan, _plan),
    "check": ("read a pool file, and name all that is wrong with it", _add_check, _check),
    "render": ("write a platform's documents for a pool file", _add_render, _render),
}
