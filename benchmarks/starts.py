"""Time from `exec` to the first answer with the model on the node, of Teneral and of common alternatives.

    python -m benchmarks.starts [--rounds 5] [--only PATTERN] [--save]

Every row is one new process; the files are in the page cache, and rows take turns. `teneral serve` and llama.cpp's own
server answer over HTTP: the request is sent as soon as the port is open, as the one that woke the container would be.
`onnxruntime` is a bare process without a server that loads a tokenizer and a session, embeds one text and prints
(`peers/embed_onnx.py`). `import torch` is an interpreter that imports torch and ends: what every cold start through
torch pays before it reads a weight. Weights of the 0.5B and of the MiniLM shape are random, which changes no time.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import cold_starts, peer_environment
from benchmarks.answers import Answer
from benchmarks.cold_starts import ColdStart
from benchmarks.peer_environment import PROGRAMS, PeerEnvironment
from benchmarks.processes import RunError, environment
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.rounds import Start, Turns, failures, selected
from benchmarks.store import prepare, read_once, warm

DEMO = Path(__file__).parent.parent / "demo" / "model"
ENCODER = "minilm"
TORCH = "import torch"
GOALS_S = {
    "teneral, demo": 0.30,
    "teneral, plain": 0.45,
    "teneral, packed": 0.85,
    "teneral, embedding": 0.30,
}


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    options = parser.parse_args()
    decoder, encoder = options.work / options.like / "store", options.work / ENCODER / "store"
    prepare(options.like, decoder)
    prepare(ENCODER, encoder)
    demo = options.work / "demo"
    _pack_demo(demo)
    peers = peer_environment.find(options.work)
    left_out: list[str] = []
    systems = _systems(options.work, decoder / "models", encoder / "models", demo, peers, left_out)
    turns = Turns(selected(systems, options.only), before=partial(_warm, decoder, encoder))
    report = begin("starts", model=options.like, rounds=options.rounds, peers=peers.versions, goals_s=GOALS_S)
    report["results"] = turns.time(options.rounds)
    report["failed"], report["left_out"] = turns.failed, left_out
    finish(report, render(report), save=options.save)


def _systems(
    work: Path,
    decoder: Path,
    encoder: Path,
    demo: Path,
    peers: PeerEnvironment,
    left_out: list[str],
) -> dict[str, Start]:
    def serve(model: Path, *flags: str) -> Start:
        return lambda watch: cold_starts.serve(str(model), *flags, variables={}, watch=watch)

    systems: dict[str, Start] = {
        TORCH: lambda _: _bare([sys.executable, "-c", "import torch"]),
        "teneral, demo": serve(demo),
        "teneral, plain": serve(decoder / "plain"),
        "teneral, packed": serve(decoder / "packed"),
        "teneral, embedding": lambda watch: cold_starts.embed(
            str(encoder / "plain"), variables={}, watch=watch
        ),
    }
    if (program := peers.llama_server()) is None:
        left_out.append("llama.cpp's server: it is not in the peers' environment")
    else:
        gguf = _gguf(peers, decoder / "plain", decoder.parent.parent / "gguf")
        systems["llama.cpp's server, bf16"] = lambda watch: cold_starts.llama_server(
            program, gguf, watch=watch
        )
    if missing := peers.lacks("onnxruntime", "onnx"):
        left_out.append(f"onnxruntime: {', '.join(missing)} not in the peers' environment")
    else:
        model = _onnx(peers, encoder / "plain", work / "onnx-starts" / "model.onnx")
        command = [
            str(peers.python),
            str(PROGRAMS / "embed_onnx.py"),
            "embed",
            str(model),
            str(encoder / "plain"),
        ]
        systems["onnxruntime, embedding, no server"] = lambda _: _bare(command)
    return systems


def _warm(*roots: Path) -> None:
    for root in roots:
        warm(root)


def _bare(command: list[str]) -> ColdStart:
    """A process from its start to its end, as one answer. Raises `RunError`."""
    started_s = time.monotonic()
    done = subprocess.run(command, env=environment(), capture_output=True, check=False)
    took_s = time.monotonic() - started_s
    if done.returncode:
        raise RunError(done.stderr.decode(errors="replace")[-500:])
    return ColdStart(Answer((took_s,)), 0, None)


def _pack_demo(target: Path) -> None:
    if not (target / "manifest.json").exists():
        command = [sys.executable, "-m", "teneral", "pack", str(DEMO), str(target), "--force"]
        subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL)
    read_once(target)


def _gguf(peers: PeerEnvironment, plain: Path, folder: Path) -> Path:
    if not (folder / "bf16.gguf").exists():
        note("converting the model for llama.cpp")
        subprocess.run(
            [str(peers.python), str(PROGRAMS / "to_gguf.py"), str(plain), str(folder)],
            check=True,
            env=environment(),
        )
    read_once(folder)
    return folder / "bf16.gguf"


def _onnx(peers: PeerEnvironment, plain: Path, target: Path) -> Path:
    if not target.exists():
        note("exporting the encoder for onnxruntime")
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [str(peers.python), str(PROGRAMS / "embed_onnx.py"), "export", str(target), str(plain)]
        subprocess.run(command, check=True, env=environment())
    read_once(target.parent)
    return target


def render(report: Mapping[str, Any]) -> str:
    """The report as a table for people."""
    results: dict[str, dict[str, Any]] = report["results"]
    torch_s = results.get(TORCH, {}).get("first_token_s")
    rows = []
    for name, row in results.items():
        goal = report["goals_s"].get(name)
        rows.append(
            [
                name,
                f"{row['first_token_s']:.2f}",
                f"{min(row['all_s']):.2f}–{max(row['all_s']):.2f}",
                f"{goal:.2f}" if goal else "–",
                f"{row['first_token_s'] / torch_s:.2f}x" if torch_s else "–",
            ]
        )
    words = [json.dumps(report["model"]).strip('"'), f"medians of {report['rounds']} rounds"]
    columns = ["exec → first answer", "s", "from–to", "goal", "of `import torch`"]
    return "\n".join(
        [title(report, *words), table(columns, rows), failures(report["failed"], report["left_out"])]
    )


if __name__ == "__main__":
    main()
