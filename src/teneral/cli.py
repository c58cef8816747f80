"""The command line: parses, calls, prints, and turns errors into exit codes. Every command's work lives
elsewhere.

Imports are lazy throughout: `teneral serve` asks its store for the first bytes long before most of the
program is imported.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from .loader import errors as loading

if TYPE_CHECKING:
    from .loader.sources.base import SourceOptions

# One table: errors become exit codes here and nowhere else. The first class that fits counts; documented in
# docs/cli.md.
EXIT_INTERNAL = 1
EXIT_USAGE = 2
EXIT_CODES: tuple[tuple[type[loading.TeneralError], int], ...] = (
    (loading.UsageError, EXIT_USAGE),
    (loading.NotFoundError, 3),
    (loading.AccessDeniedError, 4),
    (loading.UnavailableError, 5),
    (loading.AlreadyExistsError, 6),
    (loading.NoSpaceError, 7),
    (loading.IntegrityError, 8),
    (loading.ManifestError, 9),
    (loading.CheckpointError, 10),
    (loading.ChangedError, 11),
    (loading.InsufficientMemoryError, 16),
)
EXIT_CODES_BY_NAME = {  # classes of the runtime, by name so that `teneral pack` need not import it
    "ModelError": 12,
    "PortInUseError": 13,
    "HandlerError": 14,
    "RequestError": 15,
    "ContextLengthError": 15,
}
EXIT_INTERRUPTED = 130


def run(arguments: list[str]) -> int:
    """Run one command. Returns the exit code; never raises for an error that a user can cause."""
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: `teneral inspect … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except loading.TeneralError as error:
        if options.debug:
            raise
        notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
        print(f"teneral: {error}{notes}", file=sys.stderr)
        return exit_code(error)
    except Exception as error:
        if options.debug:
            raise
        print(
            f"teneral: internal error: {type(error).__name__}: {error}\n  Run it again with --debug to see where.",
            file=sys.stderr,
        )
        return EXIT_INTERNAL


def exit_code(error: loading.TeneralError) -> int:
    for kind in type(error).__mro__:
        if kind.__name__ in EXIT_CODES_BY_NAME:
            return EXIT_CODES_BY_NAME[kind.__name__]
    return next((code for kind, code in EXIT_CODES if isinstance(error, kind)), EXIT_INTERNAL)


# commands


def _pack(options: argparse.Namespace) -> int:
    from .loader.sources.open import open_source, open_store
    from .loader.tools.pack import pack
    from .loader.tools.progress_bar import ProgressBar

    source = open_source(options.model, _source_options(options))
    store = open_store(options.artifact, _source_options(options))
    with ProgressBar("packing", quiet=options.quiet) as bar:
        result = pack(source, store, force=options.force, threads=options.threads, progress=bar.update)
    print(result.render())
    return 0


def _unpack(options: argparse.Namespace) -> int:
    from .loader.pin import split_pin
    from .loader.sources.open import open_source
    from .loader.tools.progress_bar import ProgressBar
    from .loader.tools.unpack import unpack

    address, digest = split_pin(options.artifact)
    source = open_source(address, _source_options(options))
    with ProgressBar("unpacking", quiet=options.quiet) as bar:
        result = unpack(source, options.directory, digest=digest, force=options.force, progress=bar.update)
    print(result.render())
    return 0


def _verify(options: argparse.Namespace) -> int:
    from .loader.pin import split_pin
    from .loader.sources.open import open_source
    from .loader.tools.progress_bar import ProgressBar
    from .loader.tools.verify import verify

    address, digest = split_pin(options.artifact)
    source = open_source(address, _source_options(options))
    with ProgressBar("verifying", quiet=options.quiet) as bar:
        report = verify(source, digest=digest, threads=options.threads, progress=bar.update)
    print(report.render())
    return 0 if report.ok else exit_code(loading.IntegrityError("damaged"))


def _inspect(options: argparse.Namespace) -> int:
    from .loader.artifact import open_artifact
    from .loader.pin import split_pin
    from .loader.sources.open import open_source
    from .loader.tools.inspect import describe, render_table

    address, digest = split_pin(options.artifact)
    source = open_source(address, _source_options(options))
    description = describe(open_artifact(source, digest=digest), source.url)
    _print_json(description) if options.json else print(render_table(description))
    return 0


def _serve(options: argparse.Namespace) -> int:
    from .handlers.http.command import run_server
    from .runtime.config import resolve

    return run_server(resolve(_settings(options), os.environ, options.config))


def _invoke(options: argparse.Namespace) -> int:
    from .handlers.local import invoke_once
    from .runtime.config import resolve

    config = resolve(_settings(options), os.environ, options.config)
    return invoke_once(options.function, options.event, config, timeout_s=options.timeout_s)


def _timeline(options: argparse.Namespace) -> int:
    from .runtime.waterfall.command import show_timeline

    return show_timeline(
        options.snapshot,
        output=options.output,
        width=options.width,
        color=options.color,
        api_key=os.environ.get("TENERAL_API_KEY"),
    )


def _synth(options: argparse.Namespace) -> int:
    from .loader.tools.progress_bar import ProgressBar
    from .runtime.synth import synthesize

    with ProgressBar("writing", quiet=options.quiet) as bar:
        result = synthesize(
            options.like, options.directory, seed=options.seed, num_layers=options.layers, progress=bar.update
        )
    print(result.render())
    return 0


# the parser


def _parser() -> argparse.ArgumentParser:
    from . import __version__

    parser = argparse.ArgumentParser(
        prog="teneral",
        description="Serve models from object storage that answer while their weights are still arriving.",
    )
    parser.add_argument("--version", action="version", version=f"teneral {__version__}")
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_artifact_commands(commands)
    _add_model_commands(commands)
    return parser


def _add_artifact_commands(commands: Any) -> None:
    command = _command(commands, "pack", _pack, "turn a Hugging Face directory into an artifact")
    command.add_argument(
        "model", metavar="MODEL", help="directory with config.json and *.safetensors; path, s3://, http(s)://"
    )
    command.add_argument(
        "artifact", metavar="ARTIFACT", help="where to write it: a path or s3://bucket/prefix"
    )
    command.add_argument(
        "--force", action="store_true", help="replace the artifact that is there, atomically"
    )
    _add_work_flags(command)

    command = _command(commands, "unpack", _unpack, "turn an artifact back into safetensors, bit for bit")
    command.add_argument("artifact", metavar="ARTIFACT")
    command.add_argument("directory", metavar="DIRECTORY")
    command.add_argument(
        "--force", action="store_true", help="write into a directory that has files of these names"
    )
    _add_work_flags(command)

    command = _command(
        commands, "verify", _verify, "read a whole artifact and name every part that is damaged"
    )
    command.add_argument("artifact", metavar="ARTIFACT")
    _add_work_flags(command)

    command = _command(commands, "inspect", _inspect, "print layers, tiers, bytes and ratios")
    command.add_argument("artifact", metavar="ARTIFACT", help="an artifact, or a directory of safetensors")
    command.add_argument("--json", action="store_true", help="for machines")
    _add_source_flags(command)


def _add_model_commands(commands: Any) -> None:
    command = _command(commands, "serve", _serve, "serve a model over HTTP, as OpenAI's API does")
    command.add_argument(
        "model",
        metavar="MODEL",
        nargs="?",
        default=argparse.SUPPRESS,
        help="an artifact or a model directory",
    )
    _add_settings(command)

    command = _command(commands, "invoke", _invoke, "call a function handler once, here")
    command.add_argument("function", metavar="FUNCTION", help="module:function or path/file.py:function")
    command.add_argument(
        "--event", metavar="FILE", default="-", help="JSON file with the event, - for standard input"
    )
    command.add_argument(
        "--timeout-s", type=float, default=600.0, metavar="SECONDS", help="time the handler has"
    )
    _add_settings(command, model_flag=True)

    command = _command(commands, "timeline", _timeline, "draw a cold start as a waterfall")
    command.add_argument("snapshot", metavar="URL-OR-FILE", help="a server's address, or a saved /timeline")
    command.add_argument("-o", "--output", metavar="FILE.html", help="write a self-contained page instead")
    command.add_argument("--width", type=int, default=None, help="columns (default: the terminal's)")
    command.add_argument("--color", choices=("auto", "always", "never"), default="auto")

    command = _command(
        commands, "synth", _synth, "write a model of a real architecture's shape with random weights"
    )
    command.add_argument("directory", metavar="DIRECTORY")
    command.add_argument(
        "--like",
        required=True,
        metavar="SHAPE",
        help="qwen2.5-0.5b, qwen3-0.6b, llama-3.2-1b, llama-3.1-8b or minilm",
    )
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--layers", type=int, default=None, help="fewer layers than the real one has")
    command.add_argument("--quiet", action="store_true", help="no progress")


def _command(commands: Any, name: str, function: Any, help: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(
        name, help=help, description=help[0].upper() + help[1:] + "."
    )
    command.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    command.set_defaults(run=function)
    return command


def _add_work_flags(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--threads", type=int, default=None, metavar="N", help="threads (default: the cores at hand)"
    )
    command.add_argument("--quiet", action="store_true", help="no progress")
    _add_source_flags(command)


def _add_source_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("the store")
    group.add_argument("--endpoint-url", metavar="URL", help="address of an S3-compatible store")
    group.add_argument("--region")
    group.add_argument("--profile", help="AWS profile to take credentials from")
    group.add_argument("--addressing-style", choices=("auto", "path", "virtual"), default="auto")
    group.add_argument("--anonymous", action="store_true", help="send unsigned requests")
    group.add_argument("--requester-pays", action="store_true", help="agree to pay for the requests")


def _source_options(options: argparse.Namespace) -> SourceOptions:
    from .loader.sources.base import SourceOptions

    return SourceOptions(
        endpoint_url=options.endpoint_url,
        region=options.region,
        profile=options.profile,
        addressing_style=options.addressing_style,
        anonymous=options.anonymous,
        requester_pays=options.requester_pays,
    )


def _add_settings(command: argparse.ArgumentParser, *, model_flag: bool = False) -> None:
    """A flag for every setting of `ServeConfig`; values stay texts here, `resolve` parses and validates
    them.
    """
    from .runtime.config import SETTINGS

    command.add_argument(
        "--config",
        metavar="FILE.toml",
        default=None,
        help="settings by name; flags and TENERAL_* win over it",
    )
    for name, setting in SETTINGS.items():
        if name == "model" and not model_flag:
            continue
        flag = f"--{name.replace('_', '-')}"
        help_text = setting.metadata["help"].replace("%", "%%")
        if setting.default is False:
            command.add_argument(
                flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=help_text
            )
        else:
            shown = (
                ""
                if setting.default in (None, "") or "default" in help_text
                else f" (default: {setting.default})"
            )
            metavar = setting.metadata["metavar"] or name.rpartition("_")[2].upper()
            command.add_argument(flag, metavar=metavar, default=argparse.SUPPRESS, help=help_text + shown)


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    from .runtime.config import SETTINGS

    return {name: value for name, value in vars(options).items() if name in SETTINGS}


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))
