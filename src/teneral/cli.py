"""The command line: parses, calls, prints, and turns errors into exit codes. Every command's work lives
elsewhere.

Imports are lazy throughout: `teneral serve` asks its store for the first bytes long before most of the
program is imported.
"""

from __future__ import annotations

import argparse
import errno
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from .cli_flags import parse
from .cli_parser import source_options
from .cli_report import EXIT_INTERNAL, exit_code, print_result, report_error
from .loader import errors as loading

EXIT_INTERRUPTED, EXIT_TERMINATED = 130, 143
UNPACKED_SUFFIXES = (".onnx", ".pt", ".pth", ".torchscript", ".pt2", ".pb", ".tflite")


class Terminated(KeyboardInterrupt):
    """SIGTERM came: to be cleaned up after as Ctrl-C is."""


def run(arguments: list[str]) -> int:
    """Run one command. Returns the exit code; never raises for an error that a user can cause."""
    debug = "--debug" in arguments
    try:
        with _sigterm_raising():
            options = parse(arguments)  # in here: it imports, which Ctrl-C may interrupt
            code = COMMANDS[options.command](options) if options.command else 0
        if sys.stdout is not None:
            sys.stdout.flush()  # in here, where an error can still be reported
        return code
    except Terminated:
        print("terminated", file=sys.stderr)
        return EXIT_TERMINATED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: `teneral inspect … | head`
        _discard_output()
        return 0
    except loading.TeneralError as error:
        if debug:
            raise
        return report_error(error)
    except Exception as error:
        if debug:
            raise
        if (short := loading.memory_error(error)) is not None:
            return report_error(short)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _discard_output()
            print("teneral: no space is left where the output is written", file=sys.stderr)
            return exit_code(loading.NoSpaceError("the output"))
        print(
            f"teneral: internal error: {type(error).__name__}: {error}\n  Run it again with --debug to see where.",
            file=sys.stderr,
        )
        return EXIT_INTERNAL


@contextmanager
def _sigterm_raising() -> Iterator[None]:
    """While in here, SIGTERM raises `Terminated`, so that what is half written is removed; a second one ends the
    process. `serve` has handlers of its own. Does nothing outside of the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def terminate(number: int, frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        raise Terminated

    before = signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) in (
            terminate,
            signal.SIG_DFL,
        ):  # else a server's failure keeps it
            signal.signal(signal.SIGTERM, before)


def _discard_output() -> None:
    """Or Python would try to write it once more when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# commands


def _pack(options: argparse.Namespace) -> int:
    from .cli_pack import run_pack

    return run_pack(options)


def _unpack(options: argparse.Namespace) -> int:
    from .loader.artifact import open_model
    from .loader.sources.open import split_pin
    from .loader.tools.progress_bar import ProgressBar
    from .loader.tools.unpack import unpack

    address, digest = split_pin(options.artifact)
    source = open_model(address, source_options(options))
    with ProgressBar("unpacking", quiet=options.quiet) as bar:
        result = unpack(source, options.directory, digest=digest, force=options.force, progress=bar.update)
    print_result(result, as_json=options.json)
    return 0


def _verify(options: argparse.Namespace) -> int:
    from .loader.artifact import open_model
    from .loader.sources.open import split_pin
    from .loader.tools.progress_bar import ProgressBar
    from .loader.tools.verify import verify

    address, digest = split_pin(options.artifact)
    source = open_model(address, source_options(options))
    with ProgressBar("verifying", quiet=options.quiet) as bar:
        report = verify(source, digest=digest, threads=options.threads, progress=bar.update)
    print_result(report, as_json=options.json)
    return 0 if report.ok else exit_code(loading.IntegrityError("damaged"))


def _gc(options: argparse.Namespace) -> int:
    from .loader.sources.open import open_store
    from .loader.tools.garbage import collect_garbage

    store = open_store(options.artifact, source_options(options))
    report = collect_garbage(store, older_than_s=options.older_than, dry_run=options.dry_run)
    print_result(report, as_json=options.json)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    from .loader.artifact import find_file, open_artifact, open_model, read_file
    from .loader.sources.open import split_pin
    from .loader.tools.inspect import describe, render_table
    from .runtime.backends.describe import describe_model

    address, digest = split_pin(options.artifact)
    source = open_model(address, source_options(options))
    manifest = open_artifact(source, digest=digest, without_base=True)
    description = describe(manifest, source.url)
    # Whose config.json describes no family of the runtime's.
    is_onnx = find_file(manifest, "onnx.json") is not None
    if find_file(manifest, "config.json") is not None and not is_onnx:
        description["model"] = describe_model(read_file(source, manifest, "config.json"))
    _print_json(description) if options.json else print(render_table(description))
    return 0


def _eval_draft(options: argparse.Namespace) -> int:
    from .loader.artifact import open_model
    from .loader.sources.open import split_pin
    from .loader.tools.progress_bar import ProgressBar
    from .runtime.quality.evaluate import evaluate_draft
    from .runtime.quality.text import read_text

    text = read_text(options.text)
    address, digest = split_pin(options.artifact)
    source = open_model(address, source_options(options))
    with ProgressBar("reading", quiet=options.quiet) as bar:
        report = evaluate_draft(
            source,
            text,
            digest=digest,
            max_tokens=options.max_tokens,
            threads=options.threads,
            progress=bar.update,
        )
    _print_json(report.as_json()) if options.json else print(report.render())
    return 0


def _eval(options: argparse.Namespace) -> int:
    from .loader.artifact import open_artifact, open_model
    from .loader.sources.open import split_pin
    from .loader.tools.progress_bar import ProgressBar
    from .runtime.kv.storage import KVKind
    from .runtime.quality.against import ComparedModel, evaluate_against
    from .runtime.quality.text import read_text

    text = read_text(options.text)

    own = source_options(options)._replace(base=None)
    needs_base: list[bool] = []

    def candidate(argument: str) -> ComparedModel:
        """The model, with the base where it is stored as differences."""
        address, digest = split_pin(argument)
        source = open_model(address, own)
        is_based = options.base is not None and open_artifact(source, without_base=True).base is not None
        needs_base.append(is_based)
        if is_based:
            source.close()
            source = open_model(address, own._replace(base=options.base))
        return ComparedModel(source, digest)

    candidates = candidate(options.artifact), candidate(options.against)
    if options.base is not None and not any(needs_base):
        raise loading.UsageError("neither of the two has a base", key="base", hint="Leave --base out.")
    with ProgressBar("reading", quiet=options.quiet) as bar:
        report = evaluate_against(
            *candidates,
            text,
            max_tokens=options.max_tokens,
            kv=KVKind(options.kv_dtype),
            threads=options.threads,
            progress=bar.update,
        )
    _print_json(report.as_json()) if options.json else print(report.render())
    return 0


def _serve(options: argparse.Namespace) -> int:
    from .handlers.platforms import resolve_settings
    from .handlers.serve import run_server

    config = resolve_settings(_settings(options), os.environ, options.config)
    if config.model.lower().endswith(UNPACKED_SUFFIXES):
        from .runtime.onnx.pack import refuse_other_formats, temporary_artifact  # few are served so

        refuse_other_formats(config.model)
        with temporary_artifact(config.model) as folder:
            return run_server(config.replace(model=str(folder), name=config.served_name))
    return run_server(config)


def _standby(options: argparse.Namespace) -> int:
    from .cli_parser import source_options
    from .handlers.serve import run_standby
    from .runtime.setting import parse_bytes

    if options.status:
        import json

        from .handlers.standby.handover import ask_status

        print(json.dumps(ask_status(options.socket), indent=2))
        return 0
    base = None if options.base is None else (options.base, source_options(options)._replace(base=None))
    try:
        reserve_bytes = 0 if options.memory is None else parse_bytes(options.memory)
    except ValueError as error:
        raise loading.UsageError(f"--memory {options.memory}: it {error}", key="memory") from error
    return run_standby(
        options.socket, options.processes, reserve_bytes=reserve_bytes, base=base, report=report_error
    )


def _invoke(options: argparse.Namespace) -> int:
    from .handlers.function.invoke import invoke_once
    from .handlers.platforms import resolve_settings

    config = resolve_settings(_settings(options), os.environ, options.config)
    timeout_s = config.request_timeout_s if options.timeout_s is None else options.timeout_s
    return invoke_once(options.function, options.event, config, timeout_s=timeout_s)


def _batch(options: argparse.Namespace) -> int:
    from .handlers.batch.spec import JobSpec, Share, share_of
    from .handlers.platforms import resolve_settings

    config = resolve_settings({**_settings(options), "model": options.artifact}, os.environ, options.config)
    spec = JobSpec(
        input=options.input,
        output=options.output,
        max_line_bytes=options.max_line_bytes,
        max_lines=options.max_lines,
        part_lines=options.part_lines,
        share=Share.parse(options.worker) if options.worker is not None else share_of(os.environ),
        drain_s=8.0 if config.drain_timeout_s is None else config.drain_timeout_s,
    )
    from .handlers.batch.command import EXIT_INCOMPLETE, run_batch  # imports the server
    from .handlers.batch.command import exit_code as batch_exit_code
    from .handlers.batch.spec import WORTH_ANOTHER_RUN

    try:
        report = run_batch(spec, config, deadline_s=options.deadline_s, quiet=options.quiet)
    except WORTH_ANOTHER_RUN as error:
        if options.debug:
            raise
        report_error(error)
        return EXIT_INCOMPLETE
    is_read = sys.stdout.isatty() and not options.json
    print(report.render()) if is_read else _print_json(report.as_json())
    return batch_exit_code(report)


def _kv(options: argparse.Namespace) -> int:
    from .cli_kv import run_kv_command

    return run_kv_command(options)


def _timeline(options: argparse.Namespace) -> int:
    from .handlers.console.files import standalone
    from .handlers.http.keys import parse_keys
    from .runtime.waterfall.command import show_timeline

    keys = os.environ.get("TENERAL_API_KEY")
    return show_timeline(
        options.snapshot,
        output=options.output,
        form=options.format,
        width=options.width,
        color=options.color,
        api_key=parse_keys(keys)[0] if keys else None,
        page=standalone,
    )


def _pool(options: argparse.Namespace) -> int:
    from .cli_pool import run_pool_command

    return run_pool_command(options)


def _synth(options: argparse.Namespace) -> int:
    from .loader.tools.progress_bar import ProgressBar
    from .runtime.synth import synthesize

    with ProgressBar("writing", quiet=options.quiet) as bar:
        result = synthesize(
            options.like,
            options.directory,
            seed=options.seed,
            num_layers=options.layers,
            residual_scale=options.residual_scale,
            progress=bar.update,
        )
    print_result(result, as_json=options.json)
    return 0


def _settings(options: argparse.Namespace) -> dict[str, Any]:
    from .runtime.config import SETTINGS

    return {name: value for name, value in vars(options).items() if name in SETTINGS}


def _completion(options: argparse.Namespace) -> int:
    from .cli_completion import completion

    print(completion(options.shell), end="")
    return 0


def _print_json(value: Any) -> None:
    import json

    print(json.dumps(value, indent=2))


COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "pack": _pack,
    "unpack": _unpack,
    "verify": _verify,
    "gc": _gc,
    "inspect": _inspect,
    "eval-draft": _eval_draft,
    "eval": _eval,
    "serve": _serve,
    "standby": _standby,
    "invoke": _invoke,
    "batch": _batch,
    "kv": _kv,
    "pool": _pool,
    "timeline": _timeline,
    "completion": _completion,
    "synth": _synth,
}
