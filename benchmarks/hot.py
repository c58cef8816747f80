"""Warm engines of Teneral and its peers: tokens a second of prompts and of answers, for one sequence and for several.

    python -m benchmarks.hot [--own bf16=PATH int8=PATH int4=PATH] [--batches 1 8 16] [--prompts 49 128 512]
                             [--avx2] [--busy N] [--save]

Compared are Teneral's engine without HTTP (`own_engine.py`) on the packed model and on what `teneral pack --quantize`
makes of it, llama.cpp through its C interface (`peers/llama.py`), transformers (`peers/generate.py`) with torch's own
products in several layouts and precisions (`peers/torch_linear.py`), and ONNX Runtime (`peers/genai.py`), all with the
same prompts, of random tokens, on the same number of threads, choosing greedily. Every run is a process of its own, and
runs take turns. *Answers* are counted while all sequences of a batch decode, *prompts* from the question to the first
token. Loading and warming up are not counted.

Memory bandwidth is measured in the same rounds (`bandwidth.py`). What is used of it are the weights that one token
reads times the tokens a second, at batch 1.

The last column says how often the first token is the one that transformers has with bf16. Weights are random, so that
runners-up are close: rounding alone changes some.

With `--avx2` all compute as on a processor without AVX-512: llama.cpp is another build, the others have variables for
it. ONNX Runtime and torch's dynamic quantisation have none, and are left out. With `--busy N`, N other processes
compute all the time.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks import peer_environment
from benchmarks.peer_environment import PROGRAMS, PeerEnvironment
from benchmarks.processes import environment
from benchmarks.report import begin, finish, machine, new_parser, note, table, title
from benchmarks.rounds import failures, selected
from benchmarks.store import prepare
from benchmarks.tasks import TaskTurns, decode_rate, medians, random_prompt

from teneral.loader.native.library import library

BANDWIDTH = "memory"
BASE = "transformers"
CONTINUOUS = "transformers, continuous batching"
BEST = "the best of them"
NUM_PREFILLS = 3  # prompts of each length, in each run
# What each of ours is compared with.
RIVALS = {
    "bf16": ("llama.cpp BF16", BASE, f"{BASE}, oneDNN's layout", "onnxruntime fp32"),
    "int8": ("llama.cpp Q8_0", f"{BASE}, int8", "onnxruntime int8"),
    "int4": ("llama.cpp Q4_0", f"{BASE}, int4", "onnxruntime int4"),
}
GGUF_FILES = {
    "llama.cpp BF16": "bf16.gguf",
    "llama.cpp Q8_0": "q8_0.gguf",
    "llama.cpp Q4_0": "q4_0.gguf",
    "llama.cpp Q4_0, head too": "q4_0_pure.gguf",
}
TORCH_KINDS = {
    BASE: [],
    f"{BASE}, oneDNN's layout": ["onednn"],
    f"{BASE}, int8": ["int8"],
    f"{BASE}, int4": ["int4"],
}
# Options of onnxruntime-genai's builder: the head stays in 8 bits, and products may round their inputs to 8 bits.
ONNX_PRECISIONS = {
    "fp32": (),
    "int8": ("block_size=32", "accuracy_level=4"),
    "int4": ("block_size=32", "accuracy_level=4", "algo_config=rtn_last"),
}
AVX2 = {"TENERAL_ISA": "x86_64_v3", "ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
NOT_IN_AVX2 = {
    f"{BASE}, int8": "torch's dynamic quantisation has no setting against AVX-512",
    f"{BASE}, oneDNN's layout": "it refuses bf16",
}
BUSY_LOOP = "while True: pass"


def main() -> None:
    options = _options()
    folder = options.work / options.like
    peers = peer_environment.find(options.work)
    prepare(options.like, folder / "store")
    models = folder / "store" / "models"
    left_out: list[str] = []
    own = _own_models(options.own, models, left_out)
    commands = _own_commands(own)
    commands |= _llama_commands(peers, models / "plain", folder / "gguf", left_out, is_avx2=options.avx2)
    commands |= _torch_commands(peers, models / "plain")
    if options.avx2:
        left_out.append("onnxruntime: it has no setting against AVX-512")
        for name, reason in NOT_IN_AVX2.items():
            del commands[name]
            left_out.append(f"{name}: {reason}")
    else:
        commands |= _onnx_commands(peers, models / "plain", folder / "onnx", left_out)
    commands = selected(commands, options.only)
    if options.avx2:
        variables = [f"{name}={value}" for name, value in AVX2.items()]
        commands = {name: ["env", *variables, *command] for name, command in commands.items()}
    report = begin(
        "hot",
        variant=_variant(options),
        model=options.like,
        rounds=options.rounds,
        threads=options.threads,
        batches=options.batches,
        prompts=options.prompts,
        batch_prompt_tokens=options.batch_prompt,
        answer_tokens=options.tokens,
        peers=peers.versions,
        own={name: str(path) for name, path in own.items()},
    )
    task = _task(options)
    tasks = {name: task if name != CONTINUOUS else {**task, "prefill": {}} for name in commands}
    turns = TaskTurns({BANDWIDTH: [sys.executable, "-m", "benchmarks.bandwidth"], **commands})
    with _busy_processes(options.busy):
        answers = turns.run(options.rounds, {BANDWIDTH: task, **tasks})
    report["bandwidth_gb_s"] = statistics.median(row["gb_s"] for row in answers.pop(BANDWIDTH))
    report["results"] = results(answers, report["bandwidth_gb_s"])
    report["failed"] = turns.failed
    report["left_out"] = left_out
    finish(report, render(report), save=options.save)


def _variant(options: argparse.Namespace) -> str:
    """The variant that keeps this run's results apart: the processor's tiles, and what the options ask for."""
    loaded = library()
    has_tiles = loaded is not None and "amx" in loaded.isa and not options.avx2
    parts = ["avx2"] * options.avx2 + ["amx"] * has_tiles + [f"busy-{options.busy}"] * bool(options.busy)
    return "-".join(parts)


def _options() -> argparse.Namespace:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument(
        "--own",
        nargs="*",
        metavar="NAME=PATH",
        help="artifacts to run, by the name of their precision (default: bf16, int8 and int4, made where missing)",
    )
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 16])
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[49, 128, 512], help="tokens of prompts to time"
    )
    parser.add_argument("--batch-prompt", type=int, default=64, help="tokens of each prompt of a batch")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of each answer")
    parser.add_argument("--threads", type=int, default=machine()["cores"])
    parser.add_argument("--avx2", action="store_true", help="as on a processor without AVX-512")
    parser.add_argument("--busy", type=int, default=0, metavar="N", help="processes that are always busy")
    return parser.parse_args()


def _own_models(given: Sequence[str] | None, models: Path, left_out: list[str]) -> dict[str, Path]:
    if given is not None:
        pairs = (item.partition("=") for item in given)
        return {name: Path(path) for name, _, path in pairs}
    own = {"bf16": models / "packed"}
    for kind in ("int8", "int4"):
        target = models / f"packed-{kind}"
        if not (target / "manifest.json").exists():
            note(f"packing the model as {kind}")
            # Random weights have nothing to calibrate with.
            flags = ["--no-calibrate"] if kind == "int4" else []
            command = [
                sys.executable,
                "-m",
                "teneral",
                "pack",
                str(models / "plain"),
                str(target),
                "--quantize",
                kind,
                *flags,
            ]
            done = subprocess.run(command, env=environment(), capture_output=True, text=True, check=False)
            if done.returncode:
                left_out.append(f"teneral {kind}: {done.stderr.strip().splitlines()[-1]}")
                continue
        own[kind] = target
    return own


def _own_commands(own: Mapping[str, Path]) -> dict[str, list[str]]:
    program = [sys.executable, "-m", "benchmarks.own_engine"]
    return {f"teneral {name}": [*program, str(path)] for name, path in own.items()}


def _llama_commands(
    peers: PeerEnvironment, plain: Path, gguf: Path, left_out: list[str], *, is_avx2: bool
) -> dict[str, list[str]]:
    missing = peers.lacks("llama-cpp-python", "gguf")
    if is_avx2 and not peers.llama_avx2():
        missing.append("its build for AVX2")
    if missing:
        left_out.append(
            f"llama.cpp: {', '.join(missing)} is not there: python -m benchmarks.peer_environment"
        )
        return {}
    note("writing the model as llama.cpp reads it, where it is not there")
    python = str(peers.python)
    command = [python, str(PROGRAMS / "to_gguf.py"), str(plain), str(gguf)]
    subprocess.run(command, check=True, env=environment(), stderr=subprocess.DEVNULL)
    program = [*(["env", f"PYTHONPATH={peers.llama_avx2()}"] if is_avx2 else []), python]
    return {
        name: [*program, str(PROGRAMS / "llama.py"), str(gguf / file_name)]
        for name, file_name in GGUF_FILES.items()
    }


def _torch_commands(peers: PeerEnvironment, plain: Path) -> dict[str, list[str]]:
    program = [str(peers.python), str(PROGRAMS / "generate.py")]
    commands = {name: [*program, "static", str(plain), *kind] for name, kind in TORCH_KINDS.items()}
    return {**commands, CONTINUOUS: [*program, "continuous", str(plain)]}


def _onnx_commands(
    peers: PeerEnvironment, plain: Path, folder: Path, left_out: list[str]
) -> dict[str, list[str]]:
    """The graphs are made where they are missing, by onnxruntime-genai's own builder."""
    missing = peers.lacks("onnxruntime-genai")
    if missing:
        left_out.append("onnxruntime-genai is not there: python -m benchmarks.peer_environment")
        return {}
    commands = {}
    for precision, settings in ONNX_PRECISIONS.items():
        target = folder / precision
        if not (target / "genai_config.json").exists():
            note(f"building the model for ONNX Runtime in {precision}")
            program = [
                str(peers.python),
                "-m",
                "onnxruntime_genai.models.builder",
                "-e",
                "cpu",
                "-p",
                precision,
            ]
            places = ["-i", str(plain), "-o", str(target), "-c", str(folder / "cache")]
            extra = ["--extra_options", *settings] if settings else []
            done = subprocess.run(
                [*program, *places, *extra], env=environment(), capture_output=True, text=True, check=False
            )
            if done.returncode:
                left_out.append(f"onnxruntime {precision}: {done.stderr.strip().splitlines()[-1]}")
                continue
        commands[f"onnxruntime {precision}"] = [
            str(peers.python),
            str(PROGRAMS / "genai.py"),
            str(target),
        ]
    return commands


@contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _task(options: argparse.Namespace) -> dict[str, Any]:
    """The same for all. Its form: `peers/llama.py`."""
    chance = random.Random(0)

    def prompts(count: int, num_tokens: int) -> list[list[int]]:
        return [random_prompt(chance, num_tokens) for _ in range(count)]

    return {
        "threads": options.threads,
        "num_tokens": options.tokens,
        "prefill": {str(length): prompts(NUM_PREFILLS, length) for length in options.prompts},
        "decode": {str(size): prompts(size, options.batch_prompt) for size in options.batches},
    }


def results(
    answers: Mapping[str, Sequence[Mapping[str, Any]]], bandwidth_gb_s: float
) -> dict[str, dict[str, Any]]:
    """Of each system the medians over its rounds, in tokens a second by the size of the batch or the prompt."""
    first = {name: _first_tokens(rows[0]) for name, rows in answers.items()}
    found = {}
    for name, rows in answers.items():
        decode = [{size: decode_rate(times) for size, times in row["decode"].items()} for row in rows]
        prefill = [
            {length: int(length) / statistics.median(times) for length, times in row["prefill"].items()}
            for row in rows
        ]
        result: dict[str, Any] = {
            "decode": medians(decode),
            "prefill": medians(prefill),
            "all_decode": decode,
            "token_bytes": rows[0]["token_bytes"],
        }
        if "1" in result["decode"]:
            read_gb_s = result["decode"]["1"] * result["token_bytes"] / 1e9
            result["bandwidth_share"] = read_gb_s / bandwidth_gb_s
        if BASE in first:
            same = [own == other for own, other in zip(first[name], first[BASE], strict=True)]
            result["first_tokens_agree"] = f"{sum(same)}/{len(same)}"
        found[name] = result
    return found


def _first_tokens(answer: Mapping[str, Any]) -> list[int]:
    return [tokens[0] for sequences in answer["tokens"].values() for tokens in sequences]


def render(report: Mapping[str, Any]) -> str:
    """The report as tables for people."""
    words = [
        *filter(None, [report["variant"]]),
        f"{report['model']}, {report['threads']} threads",
        f"prompts of {report['batch_prompt_tokens']} tokens, {report['answer_tokens']} of each answer",
        f"medians of {report['rounds']} rounds",
        f"memory reads {report['bandwidth_gb_s']:.1f} GB/s",
    ]
    batches, lengths = (
        [str(size) for size in report["batches"]],
        [str(length) for length in report["prompts"]],
    )
    columns = [
        "tokens/s",
        *(f"answers, batch {size}" for size in batches),
        *(f"prompt of {length}" for length in lengths),
        "MB a token",
        "of the bandwidth",
        f"first as {BASE}",
    ]
    rows = []
    for name, result in report["results"].items():
        share = f"{result['bandwidth_share']:.0%}" if "bandwidth_share" in result else "–"
        rows.append(
            [
                name,
                *(_number(result["decode"].get(size)) for size in batches),
                *(_number(result["prefill"].get(length)) for length in lengths),
                f"{result['token_bytes'] / 1e6:,.0f}",
                share,
                result.get("first_tokens_agree", "–"),
            ]
        )
    parts = [title(report, *words), table(columns, rows), ""]
    compared = ratios(report)
    if compared:
        parts += [table(["relative to", *columns[1 : 1 + len(batches) + len(lengths)]], compared), ""]
    parts.append(failures(report["failed"], report["left_out"]))
    return "\n".join(parts)


def ratios(report: Mapping[str, Any]) -> list[list[str]]:
    """Of each precision, ours relative to each rival, and in every cell to the best of them."""
    found, rows = report["results"], []
    for precision, names in RIVALS.items():
        own = found.get(f"teneral {precision}")
        rivals = {name: [found[name]] for name in names if name in found}
        if own is None or not rivals:
            continue
        if len(rivals) > 1:
            rivals[BEST] = [rival for [rival] in rivals.values()]
        for name, group in rivals.items():
            cells = [_ratio(own, group, "decode", str(size)) for size in report["batches"]]
            cells += [_ratio(own, group, "prefill", str(length)) for length in report["prompts"]]
            rows.append([f"teneral {precision} / {name}", *cells])
    return rows


def _ratio(own: Mapping[str, Any], rivals: Sequence[Mapping[str, Any]], what: str, key: str) -> str:
    rates = [rival[what][key] for rival in rivals if key in rival[what]]
    return f"{own[what][key] / max(rates):.2f}x" if key in own[what] and rates else "–"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if value < 100 else f"{value:,.0f}"


if __name__ == "__main__":
    main()
