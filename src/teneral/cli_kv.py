"""`teneral kv`: the function that runs each of its actions."""

from __future__ import annotations

import argparse
import json

from .cli_parser import source_options
from .cli_report import exit_code, print_result
from .loader import errors as loading


def run_kv_command(options: argparse.Namespace) -> int:
    """Run the action that was given. Returns the exit status; raises `TeneralError`."""
    return {"export": _kv_export, "inspect": _kv_inspect, "verify": _kv_verify, "import": _kv_import}[
        options.action
    ](options)


def _kv_export(options: argparse.Namespace) -> int:
    from .runtime.config import SETTINGS
    from .runtime.kv_export import export_prefixes, read_prefix
    from .runtime.resolve import resolve

    prefixes = [read_prefix(given, is_system=False) for given in options.prefix]
    prefixes += [read_prefix(given, is_system=True) for given in options.chat_system]
    settings = {name: value for name, value in vars(options).items() if name in SETTINGS}
    settings |= {"model": options.artifact, "draft_ahead": False}
    config = resolve({name: value for name, value in settings.items() if value is not None}, {})
    report = export_prefixes(
        config, options.snapshot, prefixes, cache_salt=options.cache_salt, force=options.force
    )
    print_result(report, as_json=options.json)
    return 0


def _kv_inspect(options: argparse.Namespace) -> int:
    from .loader.sources.open import open_source, split_pin
    from .runtime.kv.snapshots.parts import open_snapshot
    from .runtime.kv.snapshots.tools import describe, render_table

    address, digest = split_pin(options.snapshot)
    source = open_source(address, source_options(options))
    snapshot, _ = open_snapshot(source, digest=digest)
    description = describe(snapshot, source.url)
    print(json.dumps(description, indent=2) if options.json else render_table(description))
    return 0


def _kv_verify(options: argparse.Namespace) -> int:
    from .loader.sources.open import open_source, split_pin
    from .loader.tools.progress_bar import ProgressBar
    from .runtime.kv.snapshots.tools import verify_snapshot

    address, digest = split_pin(options.snapshot)
    source = open_source(address, source_options(options))
    with ProgressBar("verifying", quiet=options.quiet) as bar:
        report = verify_snapshot(source, digest=digest, progress=bar.update)
    print_result(report, as_json=options.json)
    return 0 if report.ok else exit_code(loading.IntegrityError("damaged"))


def _kv_import(options: argparse.Namespace) -> int:
    from .loader.sources.open import open_source, open_store, split_pin
    from .loader.tools.progress_bar import ProgressBar
    from .runtime.kv.snapshots.tools import copy_snapshot

    address, digest = split_pin(options.source)
    source = open_source(address, source_options(options))
    store = open_store(options.snapshot, source_options(options))
    with ProgressBar("importing", quiet=options.quiet) as bar:
        report = copy_snapshot(source, store, digest=digest, force=options.force, progress=bar.update)
    print_result(report, as_json=options.json)
    return 0
