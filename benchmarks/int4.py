"""The loss of quantised weights on a real model, ours and llama.cpp's, at their sizes, and their speed.

    python -m benchmarks.int4 [--tokens 4096] [--rounds 3] [--only PATTERN] [--as-stored] [--repack] [--save]

The model is SmolLM2-135M-Instruct (`demo/smollm2.py`). Both sides quantise the same bf16 weights, and every system
computes with its own: Teneral's native core rounds no inputs, llama.cpp rounds those of quantised matrices to 8 bits.
All logits are compared with those of the original weights computed in fp32, over held-out docstrings of Python's
standard library in windows of 512 tokens (`docs/draft-quality.md` defines the figures). Calibration with a text reads
other docstrings; llama.cpp's importance matrix is of the same tokens in the same windows: the mean squares of the
inputs of projections, as Teneral's calibration finds them. Tokens a second are of one answer; `--rounds 0` leaves them
out. Bytes are those of all weights in memory.

The package has the weights in 4 bits of its own, Q4_1 in groups of 32 columns, so that another grid in the same groups
might meet the same numbers. Therefore columns are put into another, random order first, where that leaves the function
of the model as it is: hidden states, inner states of the MLPs, values within heads, and groups of heads. `--as-stored`
leaves them where they are.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks import peer_environment, real_model
from benchmarks.peer_environment import PROGRAMS, PeerEnvironment
from benchmarks.processes import environment
from benchmarks.report import begin, finish, machine, new_parser, note, table, title
from benchmarks.rounds import failures, selected
from benchmarks.tasks import TaskTurns, decode_rate, random_prompt
from safetensors import safe_open

from teneral.loader.artifact import open_artifact
from teneral.loader.sources.open import open_source
from teneral.runtime.quality.calibration import calibrate
from teneral.runtime.quality.decoders import WINDOW_TOKENS, judge
from teneral.runtime.quality.evaluate import PartCounter, WholeDecoder
from teneral.runtime.quality.sequences import Sequences
from teneral.runtime.quality.text import read_text
from teneral.runtime.text.tokenizer import TextTokenizer

OWN = {  # flags of `teneral pack`; TEXT is the text to calibrate with
    "teneral bf16": [],
    "teneral int8": ["--quantize", "int8"],
    "teneral int4": ["--quantize", "int4"],
    "teneral int4, calibrated with a text": ["--quantize", "int4", "--calibrate", "TEXT"],
    "teneral int4, 8 bits for k, v and down": ["--quantize", "int4", "--int8", "k,v,down"],
    "teneral int4, 8 bits for k, v and down, calibrated with a text": [
        *("--quantize", "int4", "--int8", "k,v,down", "--calibrate", "TEXT")
    ],
    "teneral int4, not calibrated": ["--quantize", "int4", "--no-calibrate"],
}
PEERS = {  # files that `peers/to_gguf.py` writes
    "llama.cpp BF16": "bf16",
    "llama.cpp Q8_0": "q8_0",
    "llama.cpp Q4_K_M": "q4_k_m",
    "llama.cpp Q4_0": "q4_0",
    "llama.cpp Q4_K_M, importance by the text": "q4_k_m-imatrix",
    "llama.cpp Q4_0, importance by the text": "q4_0-imatrix",
}
PROMPT_TOKENS = 128
ANSWER_TOKENS = 64
CALIBRATION_TOKENS = 8192  # as `teneral pack` reads
REFERENCE = "reference"

Floats = npt.NDArray[np.float32]


def main() -> None:
    options = _options()
    folder = options.work / ("smollm2-as-stored" if options.as_stored else "smollm2")
    folder.mkdir(parents=True, exist_ok=True)
    plain = real_model.prepare(folder, shuffled=not options.as_stored)
    texts = real_model.write_texts(folder)
    left_out: list[str] = []
    own = {
        name: _pack(plain, folder / _file_name(name), flags, texts.calibration, anew=options.repack)
        for name, flags in selected(OWN, options.only).items()
    }
    peers = peer_environment.find(options.work)
    files = _peer_files(peers, plain, folder / "gguf", texts.calibration, options.only, left_out)
    report = begin(
        "int4",
        model="smollm2-135m",
        columns="as stored" if options.as_stored else "in random order",
        rounds=options.rounds,
        peers=peers.versions,
    )
    windows = _windows(plain, texts.held_out, options.tokens)
    report["tokens"] = sum(map(len, windows))
    report["results"] = _judge_all(
        plain,
        windows,
        own,
        files,
        peers,
        folder,
        left_out,
    )
    rates, failed = _speeds(own, files, peers, options)
    for name, rate in rates.items():
        report["results"].setdefault(name, {})["tokens_s"] = rate
    report["failed"], report["left_out"] = failed, left_out
    finish(report, render(report), save=options.save)


def _options() -> argparse.Namespace:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, default=4096, help="of the held-out text (default: 4096)")
    parser.add_argument("--as-stored", action="store_true", help="leave the columns in the package's order")
    parser.add_argument("--repack", action="store_true", help="make artifacts anew that are there already")
    parser.add_argument("--threads", type=int, default=machine()["cores"])
    return parser.parse_args()


def _file_name(name: str) -> str:
    return name.removeprefix("teneral ").replace(",", "").replace(" ", "-")


def _pack(plain: Path, target: Path, flags: list[str], text: Path, *, anew: bool) -> Path:
    """The artifact, made where it is not there."""
    if (target / "manifest.json").exists() and not anew:
        return target
    note(f"packing {target.name}")
    given = [str(text) if flag == "TEXT" else flag for flag in flags]
    command = [sys.executable, "-m", "teneral", "pack", str(plain), str(target), "--force", "--quiet", *given]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    return target


def _peer_files(
    peers: PeerEnvironment, plain: Path, folder: Path, text: Path, only: str | None, left_out: list[str]
) -> dict[str, Path]:
    missing = peers.lacks("llama-cpp-python", "gguf")
    if missing:
        left_out.append(
            f"llama.cpp: {', '.join(missing)} is not there: python -m benchmarks.peer_environment"
        )
        return {}
    wanted = selected(PEERS, only)
    if not wanted:
        return {}
    files = {name: folder / f"{kind}.gguf" for name, kind in wanted.items()}
    if any(kind.endswith("-imatrix") for kind in wanted.values()):
        _write_importance(plain, text, folder / "importance.npz")
    kinds = [kind for kind in wanted.values() if kind != "bf16"]
    command = [str(peers.python), str(PROGRAMS / "to_gguf.py"), str(plain), str(folder), *(kinds or ["q8_0"])]
    subprocess.run(command, check=True, env=environment(), stderr=subprocess.DEVNULL)
    return files


def _write_importance(plain: Path, text: Path, target: Path) -> None:
    """The mean square of each input of the layers' projections, made where it is not there."""
    if target.exists():
        return
    note("reading the text for llama.cpp's importance matrix")
    with safe_open(plain / "model.safetensors", framework="np") as file:
        names = [name for name in file.keys() if name.endswith("_proj.weight")]  # noqa: SIM118 - it is no dict
    names.sort(key=lambda name: int(name.split(".")[2]))
    calibration = calibrate(
        open_source(str(plain)), read_text(str(text)), names, max_tokens=CALIBRATION_TOKENS
    )
    found: dict[str, Floats] = {}
    for name in names:
        inputs = calibration.inputs_of(name)
        assert inputs is not None
        found[name] = inputs.importance
    target.parent.mkdir(parents=True, exist_ok=True)
    np.savez(target, **found)  # type: ignore[arg-type]


def _windows(plain: Path, text: Path, num_tokens: int) -> list[list[int]]:
    tokenizer = TextTokenizer.from_files(
        lambda name: path.read_bytes() if (path := plain / name).exists() else None
    )
    tokens = tokenizer.encode(text.read_text())[:num_tokens]
    tokenizer.close()
    return [tokens[begin : begin + WINDOW_TOKENS] for begin in range(0, len(tokens) - 1, WINDOW_TOKENS)]


def _judge_all(
    plain: Path,
    windows: list[list[int]],
    own: Mapping[str, Path],
    files: Mapping[str, Path],
    peers: PeerEnvironment,
    folder: Path,
    left_out: list[str],
) -> dict[str, Any]:
    """The figures of each system. Logits of one and of the reference are on disk at a time."""
    exact, ours = folder / f"{REFERENCE}.npy", folder / "logits.npy"
    _write_logits(plain, windows, exact, compute_dtype="float32")
    results: dict[str, Any] = {}
    for name, path in own.items():
        _write_logits(path, windows, ours)
        manifest = open_artifact(open_source(str(path)))
        results[name] = {"bytes": manifest.weight_bytes, **_figures(ours, exact, windows)}
        note(f"{name}: {results[name]}")
    for name, path in files.items():
        command = [str(peers.python), str(PROGRAMS / "logits.py"), str(path), str(ours)]
        done = subprocess.run(
            command, input=json.dumps(windows), env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            left_out.append(f"{name}: {done.stderr.strip()[-200:]}")
            continue
        results[name] = {"bytes": int(done.stdout), **_figures(ours, exact, windows)}
        note(f"{name}: {results[name]}")
    for path in (exact, ours):
        path.unlink(missing_ok=True)
    return results


def _write_logits(path: Path, windows: list[list[int]], target: Path, compute_dtype: str = "auto") -> None:
    """(windows, tokens of the longest, vocab_size) fp32, as `peers/logits.py` writes them."""
    source = open_source(str(path))
    manifest = open_artifact(source)
    model = WholeDecoder(
        source, manifest, threads=None, on_part=PartCounter(None, 0), compute_dtype=compute_dtype
    )
    vocab_size, longest = model.decoder.config.vocab_size, max(map(len, windows))
    shape = (len(windows), longest, vocab_size)
    out = np.lib.format.open_memmap(target, mode="w+", dtype=np.float32, shape=shape)
    for number, window in enumerate(windows):
        run = Sequences(model.decoder, 1, len(window))
        out[number, : len(window)] = run.feed({0: window}, num_logits=len(window))
    out.flush()


def _figures(ours: Path, exact: Path, windows: list[list[int]]) -> dict[str, float]:
    """The measures of the next tokens within each window."""
    rows = np.concatenate(list(_judged(ours, exact, windows)))
    exact_loss, loss, agrees, variation, divergence = rows.T
    ratio = math.exp(float((loss - exact_loss).mean()))
    error = float((loss - exact_loss).std(ddof=1)) / math.sqrt(len(rows))
    return {
        "kl_nats": float(divergence.mean()),
        "kl_error": float(divergence.std(ddof=1)) / math.sqrt(len(rows)),
        "perplexity_ratio": ratio,
        "perplexity_ratio_error": ratio * error,
        "same_next_token": float(agrees.mean()),
        "total_variation": float(variation.mean()),
        "exact_perplexity": math.exp(float(exact_loss.mean())),
        "predictions": len(rows),
    }


def _judged(ours: Path, exact: Path, windows: list[list[int]]) -> Iterator[npt.NDArray[np.float64]]:
    approximate, reference = (np.load(path, mmap_mode="r") for path in (ours, exact))
    for number, window in enumerate(windows):
        targets = np.array(window[1:])
        for first in range(0, len(targets), 64):
            rows = slice(first, min(first + 64, len(targets)))
            yield judge(np.array(approximate[number, rows]), np.array(reference[number, rows]), targets[rows])


def _speeds(
    own: Mapping[str, Path], files: Mapping[str, Path], peers: PeerEnvironment, options: argparse.Namespace
) -> tuple[dict[str, float], dict[str, str]]:
    """Tokens a second of one answer, medians of the rounds."""
    if not options.rounds:
        return {}, {}
    program = [sys.executable, "-m", "benchmarks.own_engine"]
    commands = {name: [*program, str(path)] for name, path in own.items()}
    commands |= {
        name: [str(peers.python), str(PROGRAMS / "llama.py"), str(path)] for name, path in files.items()
    }
    task = {
        "threads": options.threads,
        "num_tokens": ANSWER_TOKENS,
        "prefill": {},
        "decode": {"1": [random_prompt(random.Random(0), PROMPT_TOKENS)]},
    }
    turns = TaskTurns(commands)
    answers = turns.run(options.rounds, dict.fromkeys(commands, task))
    rates = {
        name: float(np.median([decode_rate(row["decode"]["1"]) for row in rows]))
        for name, rows in answers.items()
    }
    return rates, turns.failed


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for people."""
    columns = ["", "bytes", "KL, nats", "perplexity", "same next token", "total variation", "tokens/s"]
    rows = []
    for name, found in report["results"].items():
        rate = f"{found['tokens_s']:.1f}" if "tokens_s" in found else "–"
        rows.append(
            [
                name,
                f"{found['bytes']:,}",
                f"{found['kl_nats']:.4f} ± {found['kl_error']:.4f}",
                f"{found['perplexity_ratio']:.4f} ± {found['perplexity_ratio_error']:.4f}",
                f"{found['same_next_token']:.1%}",
                f"{found['total_variation']:.3f}",
                rate,
            ]
        )
    base = next(iter(report["results"].values()), {"exact_perplexity": math.nan})
    words = [
        f"{report['model']}, columns {report['columns']}",
        f"{report['tokens']:,} tokens",
        f"perplexity {base['exact_perplexity']:.2f} in fp32",
    ]
    return "\n".join(
        [title(report, *words), table(columns, rows), failures(report["failed"], report["left_out"])]
    )


if __name__ == "__main__":
    main()
