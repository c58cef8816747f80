"""LoRA adapters: a cold one's first token by its wire time, eight in a batch, and the cost of having any.

    python -m benchmarks.adapters [--rounds 5] [--rate 200] [--rank 16] [--save]

A warm server of a packed base in a local folder, adapters of all linear modules in a store that gives --rate MB/s:

    cold              the first request for an adapter: its first token
    cold, packed      the same of one that `teneral pack --base` has packed
    warm              the same adapter once more, another prompt
    base              a prompt of the same length for the base
    8 adapters        8 requests at once, each with an adapter of its own: tokens/s of all
    8 of the base     8 requests at once for the base, on the same server
    one, with         tokens/s of one answer of the base, on a server with --adapters
    one, without      the same on a server without

Rows take turns.
"""

from __future__ import annotations

import json
import random
import statistics
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.answers import Answer
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.server import Server
from benchmarks.store import StoreProcess, prepare
from benchmarks.tasks import random_prompt

from teneral.loader.artifact import open_artifact
from teneral.loader.format.safetensors import SafetensorsWriter, TensorSpec
from teneral.loader.sources.file.store import FileStore
from teneral.runtime.adapters.pack import pack_adapter

PROMPT_TOKENS = 32
BATCH = 8
BATCH_TOKENS = 48
ONE_TOKENS = 48
_PLACES = {
    "self_attn.q_proj": ("hidden", "query"),
    "self_attn.k_proj": ("hidden", "key"),
    "self_attn.v_proj": ("hidden", "key"),
    "self_attn.o_proj": ("query", "hidden"),
    "mlp.gate_proj": ("hidden", "inner"),
    "mlp.up_proj": ("hidden", "inner"),
    "mlp.down_proj": ("inner", "hidden"),
}


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--rate", type=float, default=200.0, help="of the store, in 10**6 bytes a second")
    parser.add_argument("--rank", type=int, default=16)
    options = parser.parse_args()
    root = options.work / options.like / "store"
    prepare(options.like, root)
    plain, base = root / "models" / "plain", root / "models" / "packed"
    names = [f"r{options.rank}-{number}" for number in range(BATCH + options.rounds)]
    size_bytes = max(write_adapter(root / "adapters" / name, plain, options.rank) for name in names)
    cold = names[BATCH:]
    packed_bytes = max(pack(root / "adapters" / name, packed_of(root, name, base), base) for name in cold)
    report = begin(
        "adapters",
        model=options.like,
        rounds=options.rounds,
        rate_mb_s=options.rate,
        adapter_bytes=size_bytes,
        packed_bytes=packed_bytes,
    )
    with ExitStack() as stack:
        store = stack.enter_context(StoreProcess(root, rate_mb_s=options.rate))
        flags = ("--adapters", "s3://adapters/{name}")
        server = stack.enter_context(Server(str(base), *flags, variables=store.environment())).wait_ready()
        without = stack.enter_context(Server(str(base))).wait_ready()
        packed = [packed_of(root, name, base).name for name in cold]
        report["results"] = measure(server, without, names, packed)
    report["wire_s"] = size_bytes / options.rate / 1e6
    report["packed_wire_s"] = packed_bytes / options.rate / 1e6
    finish(report, render(report), save=options.save)


def write_adapter(folder: Path, base: Path, rank: int) -> int:
    """As PEFT saves one, with random numbers; the size of its weights' file."""
    path = folder / "adapter_model.safetensors"
    if path.exists():
        return path.stat().st_size
    config = json.loads((base / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    sizes = {
        "hidden": config["hidden_size"],
        "inner": config["intermediate_size"],
        "query": config["num_attention_heads"] * head_dim,
        "key": config["num_key_value_heads"] * head_dim,
    }
    specs = []
    for layer in range(config["num_hidden_layers"]):
        for name, (inner, outer) in _PLACES.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            specs.append(TensorSpec(f"{prefix}.lora_A.weight", "BF16", (rank, sizes[inner])))
            specs.append(TensorSpec(f"{prefix}.lora_B.weight", "BF16", (sizes[outer], rank)))
    folder.mkdir(parents=True, exist_ok=True)
    options = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "target_modules": [*_PLACES]}
    (folder / "adapter_config.json").write_text(json.dumps(options))
    chance = np.random.default_rng(zlib.crc32(folder.name.encode()))  # each of its own
    with path.open("wb") as file:
        writer = SafetensorsWriter(file, specs)
        for spec in specs:
            numbers = chance.normal(0, 0.01, spec.shape).astype(np.float32)
            writer.write((numbers.view(np.uint32) >> 16).astype(np.uint16).tobytes())
        writer.finish()
    return path.stat().st_size


def packed_of(root: Path, name: str, base: Path) -> Path:
    """The folder of an adapter's packed form: another one for each base, whose digest it names."""
    digest = open_artifact(FileStore(base)).digest or b""
    return root / "adapters" / f"packed-{digest.hex()[:8]}-{name}"


def pack(folder: Path, artifact: Path, base: Path) -> int:
    """The stored bytes of the packed adapter, which is made if it is not there."""
    if not (artifact / "manifest.json").exists():
        pack_adapter(FileStore(folder), FileStore(artifact), FileStore(base), force=True)
    return sum(path.stat().st_size for path in artifact.rglob("*") if path.is_file())


def measure(server: Server, without: Server, names: list[str], packed: list[str]) -> dict[str, list[float]]:
    chance = random.Random(0)
    found: dict[str, list[float]] = {}

    def ask(of: Server, model: str, num_tokens: int) -> Answer:
        return of.complete(random_prompt(chance, PROMPT_TOKENS), num_tokens, model=model)

    def add(row: str, value: float) -> None:
        found.setdefault(row, []).append(value)
        note(f"{row:14} {value:.3f}")

    def together(models: list[str]) -> float:
        start_s = time.monotonic()
        with ThreadPoolExecutor(BATCH) as pool:
            answers = list(pool.map(lambda model: ask(server, model, BATCH_TOKENS), models))
        return sum(len(answer.token_times_s) for answer in answers) / (time.monotonic() - start_s)

    for each in (server, without):
        ask(each, "model", 8)
    adapters = [f"model:{name}" for name in names[:BATCH]]
    together(adapters)  # they are there from now on
    for name, packed_name in zip(names[BATCH:], packed, strict=True):
        add("base", ask(server, "model", 1).token_times_s[0])
        add("cold", ask(server, f"model:{name}", 1).token_times_s[0])
        add("cold, packed", ask(server, f"model:{packed_name}", 1).token_times_s[0])
        add("warm", ask(server, f"model:{name}", 1).token_times_s[0])
        add("8 adapters", together(adapters))
        add("8 of the base", together(["model"] * BATCH))
        for row, of in (("one, with", server), ("one, without", without)):
            times_s = ask(of, "model", ONE_TOKENS).token_times_s
            add(row, (len(times_s) - 1) / (times_s[-1] - times_s[0]))
    return found


def render(report: dict[str, Any]) -> str:
    results = report["results"]
    medians = {row: statistics.median(values) for row, values in results.items()}
    ratios = {
        "8 adapters": ratio(results, "8 adapters", "8 of the base"),
        "one, with": ratio(results, "one, with", "one, without"),
        "cold": f"wire {report['wire_s']:.3f} s + {1000 * (medians['cold'] - report['wire_s']):.0f} ms",
    }
    wire_s = report["packed_wire_s"]
    ratios["cold, packed"] = f"wire {wire_s:.3f} s + {1000 * (medians['cold, packed'] - wire_s):.0f} ms"
    rows = [
        [row, f"{medians[row]:.3f}", f"{min(values):.3f}–{max(values):.3f}", ratios.get(row, "")]
        for row, values in results.items()
    ]
    words = [
        report["model"],
        f"adapters of {report['adapter_bytes'] / 1e6:.1f} MB",
        f"{report['rounds']} rounds",
    ]
    columns = ["row", "median (s, or tokens/s)", "from–to", "compared in turns"]
    return "\n".join([title(report, *words), table(columns, rows)])


def ratio(results: dict[str, list[float]], row: str, base: str) -> str:
    """The median of the rounds' ratios: neighbours in time see the same weather."""
    pairs = zip(results[row], results[base], strict=True)
    return f"{statistics.median(own / other for own, other in pairs):.3f}x {base}"


if __name__ == "__main__":
    main()
