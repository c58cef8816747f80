"""The commands' flags. Only those of the command that was given are made: parsing is a part of every cold start."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from functools import partial

from .cli_parser import Parser, PrintVersion, add, add_base_flag, add_settings, add_source_flags, switch

SOURCE_HELP = (
    "directory with config.json and *.safetensors, or an .onnx file; path, s3://, gs://, az://, http(s)://"
)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The parsed flags; `command` names the command, and is "" where none was given, after the help was printed. Ends
    the process, as argparse does, on invalid ones.
    """
    # Made anew for every flag. Left to itself, it imports what reads archives to learn how wide the terminal is.
    formatter = partial(argparse.HelpFormatter, width=_columns() - 2)
    parser = Parser(
        prog="teneral",
        formatter_class=formatter,
        description="Serve models from object storage that answer while their weights are still arriving.",
    )
    parser.add_argument(
        "-V", "--version", action=PrintVersion, nargs=0, help="print the version and its commit"
    )
    switch(parser, "--debug", "show the traceback of an error")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", prog="teneral", parser_class=Parser
    )
    chosen = next((argument for argument in arguments if not argument.startswith("-")), "")
    # A command given by name loads no other's flags or help.
    names = (chosen,) if arguments[:1] == [chosen] and chosen in COMMANDS else tuple(COMMANDS)
    for name in names:
        help_text, add_flags = COMMANDS[name]
        command = commands.add_parser(
            name,
            help=help_text,
            description=help_text[0].upper() + help_text[1:] + ".",
            formatter_class=formatter,
        )
        if name == chosen:
            switch(command, "--debug", argparse.SUPPRESS, default=argparse.SUPPRESS)
            command.shows_all = "--help-all" in arguments
            add_flags(command)
    options, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.chosen(options).error(f"unrecognized arguments: {' '.join(unknown)}")
    if options.command is None:
        parser.print_help()
        options.command = ""
    return options


def _columns() -> int:
    """Of the terminal; COLUMNS says otherwise."""
    text = os.environ.get("COLUMNS", "")
    if text.isascii() and text.isdigit() and int(text[:6]) > 0:
        return int(text[:6])
    try:
        return os.get_terminal_size(sys.__stdout__.fileno() if sys.__stdout__ else -1).columns or 80
    except (OSError, ValueError):  # no terminal, or no output at all
        return 80


def _pack(command: argparse.ArgumentParser) -> None:
    add(command, "model", "MODEL", SOURCE_HELP)
    add(
        command, "artifact", "ARTIFACT", "where to write it: a path, s3://bucket/prefix or gs://bucket/prefix"
    )
    switch(command, "--force", "replace the artifact that is there, atomically")
    tiers = command.add_argument_group(
        "tiers", "mantissa bits: more make a better draft, which is there later"
    )
    for flag, help_text in (
        ("--draft-bits", "in the draft, 0 to 7 (default: 3, of fp32 7)"),
        ("--embed-bits", "in the draft of the embeddings (default: as all)"),
        ("--head-bits", "in the draft of the head (default: 2 more than all)"),
        (
            "--sketch-bits",
            "in a sketch, a tier before the draft, 0 to 6; 1 is 29 %% of bf16 (default: no sketch)",
        ),
    ):
        add(tiers, flag, "N", help_text, type=_natural)
    _add_smaller_weights(command)
    add(
        command,
        "--base",
        "ARTIFACT",
        "store only what differs from this artifact, of which the model is a fine-tune, and which is needed to "
        "load it; of a LoRA adapter: its base",
    )
    _add_zeros(command)
    command.add_argument(
        "--no-verify-files",
        dest="verify_files",
        action="store_false",
        help="of a model of the Hub: do not read its files a second time, to compare them with their SHA-256",
    )
    _add_json(command)
    _add_work_flags(command)


def _add_smaller_weights(command: argparse.ArgumentParser) -> None:
    weights = command.add_argument_group("smaller weights, of a decoder; without tiers")
    weights.add_argument(
        "--quantize",
        choices=("int8", "int4"),
        help="integers for the matrices (default: as they are)",
    )
    add(
        weights,
        "--group-size",
        "N",
        "columns that share a scale: 32, 64 or 128 (default: of int8 all of a row, of int4 32)",
        type=_natural,
    )
    switch(weights, "--asymmetric", "of int4: every group has a zero of its own")
    add(
        weights,
        "--int8",
        "NAMES",
        "of int4: projections that get 8 bits, of q,k,v,o,gate,up,down (default: v)",
    )
    add(
        weights,
        "--calibrate",
        "FILE",
        "of int4: text like what the model will read, UTF-8: integers are chosen by their effect on its products "
        "with such inputs (default: a text that the model makes; needs memory for the model)",
    )
    switch(weights, "--no-calibrate", "of int4: choose integers by the weights alone")
    add(
        weights,
        "--calibrate-tokens",
        "N",
        "how much of that text to use (default: 8192; of the model's own, as much as its matrices need)",
        type=_natural,
    )
    switch(
        weights,
        "--dequantize",
        "a GGUF file's integers become bf16: larger, and in tiers, so that there is a draft",
    )


def _add_zeros(command: argparse.ArgumentParser) -> None:
    zeros = command.add_argument_group("zeros: weights that are mostly zero are stored without them")
    add(
        zeros,
        "--prune",
        "SHARE",
        "make this share of each matrix of the layers zero first, the smallest weights, or 2:4: two of each four",
    )
    switch(zeros, "--prune-all", "prune the embeddings and the head, too")
    switch(zeros, "--dense", "store zeros like all weights: for GPUs, and for versions before 2026-11-23")


def _unpack(command: argparse.ArgumentParser) -> None:
    command.add_argument("artifact", metavar="ARTIFACT")
    add_base_flag(command)
    command.add_argument("directory", metavar="DIRECTORY")
    switch(command, "--force", "write into a directory that has files of these names")
    _add_json(command)
    _add_work_flags(command)


def _verify(command: argparse.ArgumentParser) -> None:
    command.add_argument("artifact", metavar="ARTIFACT")
    add_base_flag(command)
    _add_json(command)
    _add_work_flags(command)


def _gc(command: argparse.ArgumentParser) -> None:
    command.add_argument("artifact", metavar="ARTIFACT")
    add(
        command,
        "--older-than",
        "AGE",
        "remove what has been unused for so long, as in 90m, 24h or 7d (default: 24h); 0 for all of it",
        type=_age_s,
        default=24 * 3600.0,
    )
    switch(command, "--dry-run", "list what is unused, and remove nothing")
    _add_json(command)
    add_source_flags(command)


def _age_s(text: str) -> float:
    """Seconds. Raises `ArgumentTypeError`."""
    found = re.fullmatch(r"([0-9]{1,6})([smhd]?)", text)
    if not found or (not found[2] and found[1] != "0"):
        raise argparse.ArgumentTypeError(f"{text!r} is not an age: write 90m, 24h or 7d")
    return float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86_400}[found[2]]


def _inspect(command: argparse.ArgumentParser) -> None:
    add(command, "artifact", "ARTIFACT", "an artifact, or a directory of safetensors")
    add_base_flag(command)
    _add_json(command)
    add_source_flags(command)


def _eval_draft(command: argparse.ArgumentParser) -> None:
    command.add_argument("artifact", metavar="ARTIFACT")
    add_base_flag(command)
    _add_text_flags(command)


def _add_text_flags(command: argparse.ArgumentParser) -> None:
    """For commands that let models read a text."""
    add(command, "--text", "FILE", "text like your own, UTF-8 (default: a small one in here)")
    add(
        command,
        "--max-tokens",
        "N",
        "how much of the text to use (default: 2048)",
        type=_natural,
        default=2048,
    )
    _add_json(command)
    _add_work_flags(command)


def _eval(command: argparse.ArgumentParser) -> None:
    add(command, "artifact", "ARTIFACT", "an artifact, or a directory of safetensors")
    add_base_flag(command)
    add(command, "--against", "ORIGINAL", "the original model (artifact or directory)", required=True)
    command.add_argument(
        "--kv-dtype", choices=("model", "int8"), default="model", help="of ARTIFACT's keys and values"
    )
    _add_text_flags(command)


def _serve(command: Parser) -> None:
    add(command, "model", "MODEL", "an artifact or a model directory", nargs="?", default=argparse.SUPPRESS)
    add_settings(command)


def _standby(command: argparse.ArgumentParser) -> None:
    add(command, "socket", "SOCKET", "where `teneral serve --standby-socket` finds them")
    add(command, "--processes", "N", "how many (default: 1)", type=_natural, default=1)
    add(
        command,
        "--memory",
        "SIZE",
        "memory for weights that each of them takes from the system ahead, such as 2GiB (default: none)",
    )
    add(
        command,
        "--base",
        "ARTIFACT",
        "an artifact whose weights are in memory once for all of them, perhaps with …@b3:DIGEST (default: none)",
    )
    switch(command, "--status", "print the figures of the pool at SOCKET as JSON, and end")
    add_source_flags(command)


def _invoke(command: Parser) -> None:
    add(command, "function", "FUNCTION", "module:function or path/file.py:function")
    add(command, "--event", "FILE", "JSON file with the event, - for standard input", default="-")
    add(
        command,
        "--timeout-s",
        "SECONDS",
        "time the handler has (default: that of --request-timeout-s)",
        type=float,
    )
    add_settings(command, model_flag=True)


def _batch(command: Parser) -> None:
    add(command, "artifact", "ARTIFACT", "an artifact or a model directory")
    add(
        command,
        "input",
        "INPUT",
        "JSONL, a request a line, or sound: a path, s3://bucket/key or a folder/ of sound",
    )
    add(command, "output", "OUTPUT", "a folder, s3://bucket/prefix/ or gs://bucket/prefix/, or a name.jsonl")
    switch(command, "--json", "print the report for machines, at a terminal, too")
    add(
        command,
        "--worker",
        "I/N",
        "do the parts of worker I of N, from 0 (default: all, or of an array job of AWS Batch the child's)",
    )
    add(command, "--deadline-s", "SECONDS", "stop in time before, and exit with 75", type=float)
    add(command, "--part-lines", "N", "lines a part (default: by the engine)", type=_natural)
    add(command, "--max-line-bytes", "N", "longest line (default: 1 MiB)", type=_natural, default=1 << 20)
    add(command, "--max-lines", "N", "most lines (default: 1,000,000)", type=_natural, default=1_000_000)
    switch(command, "--quiet", "no progress")
    add_settings(command)


def _kv(command: argparse.ArgumentParser) -> None:
    actions = command.add_subparsers(title="actions", required=True, metavar="ACTION", dest="action")
    export = actions.add_parser("export", help="compute prefixes and store their keys and values")
    export.add_argument("artifact", metavar="ARTIFACT")
    add(export, "snapshot", "SNAPSHOT", "where to write it: a path, s3://bucket/prefix or gs://bucket/prefix")
    for flag, help_text in (
        ("--prefix", "a text that prompts begin with"),
        ("--chat-system", "a system prompt, as the model's chat template writes it"),
    ):
        add(export, flag, "NAME=FILE", f"{help_text}; may be given again", action="append", default=[])
    add(export, "--cache-salt", "SALT", "that of the requests which may find them", default="")
    switch(export, "--force", "replace what was made for something else")
    export.add_argument(
        "--kv-dtype", choices=("model", "int8"), default="model", help="that of the servers that will use it"
    )
    add(export, "--kv-bytes", "SIZE", "memory for the longest prefix")
    add(export, "--threads", "N", "threads that compute (default: the cores at hand)")
    add_source_flags(export)
    _add_json(export)
    inspect = actions.add_parser("inspect", help="print what a snapshot is for, and its prefixes")
    inspect.add_argument("snapshot", metavar="SNAPSHOT")
    _add_json(inspect)
    add_source_flags(inspect)
    verify = actions.add_parser("verify", help="read a whole snapshot and name every part that is damaged")
    verify.add_argument("snapshot", metavar="SNAPSHOT")
    importing = actions.add_parser("import", help="copy a snapshot from one store to another, verified")
    importing.add_argument("source", metavar="SOURCE")
    importing.add_argument("snapshot", metavar="DESTINATION")
    switch(importing, "--force", "replace the snapshot that is there")
    for action in (verify, importing):
        switch(action, "--quiet", "no progress")
        _add_json(action)
        add_source_flags(action)


def _pool(command: argparse.ArgumentParser) -> None:
    from .cli_pool import add_flags

    add_flags(command)


def _timeline(command: argparse.ArgumentParser) -> None:
    add(command, "snapshot", "URL-OR-FILE", "a server's address, or a saved /timeline")
    command.add_argument("-o", "--output", metavar="FILE", help="write a self-contained page there instead")
    command.add_argument(
        "--format",
        choices=("text", "html", "perfetto"),
        help="text, html, or a trace for Perfetto and chrome://tracing (default: html with -o, else text)",
    )
    command.add_argument("--width", type=int, default=None, help="columns (default: the terminal's)")
    command.add_argument("--color", choices=("auto", "always", "never"), default="auto")


def _completion(command: argparse.ArgumentParser) -> None:
    command.add_argument("shell", choices=("bash", "zsh", "fish"), help="of which the script is")


def _synth(command: argparse.ArgumentParser) -> None:
    _add_json(command)
    command.add_argument("directory", metavar="DIRECTORY")
    add(
        command,
        "--like",
        "SHAPE",
        "qwen2.5-0.5b, qwen3-0.6b, llama-3.2-1b, llama-3.1-8b or minilm",
        required=True,
    )
    command.add_argument("--seed", type=_natural, default=0)
    command.add_argument("--layers", type=int, default=None, help="fewer layers than the real one has")
    add(
        command,
        "--residual-scale",
        "SCALE",
        "of what each layer adds, up to 1: the smaller, the more often the model's draft agrees with it",
        type=float,
        default=1.0,
    )
    switch(command, "--quiet", "no progress")


def _natural(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise argparse.ArgumentTypeError(f"must be a whole number from 0 on; it is {text!r}")
    return int(text)


def _add_json(command: argparse.ArgumentParser) -> None:
    switch(command, "--json", "print the result for machines")


def _add_work_flags(command: argparse.ArgumentParser) -> None:
    add(command, "--threads", "N", "threads (default: the cores at hand)", type=int)
    switch(command, "--quiet", "no progress")
    add_source_flags(command)


COMMANDS: dict[str, tuple[str, Callable[[Parser], None]]] = {
    "pack": ("turn a Hugging Face directory into an artifact", _pack),
    "unpack": ("turn an artifact back into safetensors, each tensor bit for bit", _unpack),
    "verify": ("read a whole artifact and name every part that is damaged", _verify),
    "gc": ("remove what replaced artifacts and killed packs have left", _gc),
    "inspect": ("print layers, tiers, bytes and ratios", _inspect),
    "eval-draft": ("measure the quality of a model's draft", _eval_draft),
    "eval": ("measure the quality of a smaller version of a model", _eval),
    "serve": ("serve a model over HTTP, as OpenAI's API does", _serve),
    "standby": ("keep processes that have imported everything and hold no model", _standby),
    "invoke": ("call a function handler once, here", _invoke),
    "batch": ("answer all requests of a file, each exactly once", _batch),
    "kv": ("precompute and manage KV snapshots of shared prompt prefixes", _kv),
    "pool": ("run, check and plan warm pools of several models, from one file", _pool),
    "timeline": ("draw a cold start as a waterfall", _timeline),
    "completion": ("print a script that completes commands and flags in a shell", _completion),
    "synth": ("write a model of a real architecture's shape with random weights", _synth),
}
