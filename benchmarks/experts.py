"""Experts on demand, on weights made to be skewed: a mixture whose router keeps to some experts for each topic.

    python -m benchmarks.experts [--billions 6] [--rate 200] [--rounds 3] [--spread 0.3] [--save]

No mixture of this size is at hand here, so one is made: random weights in the shape of a Qwen3 MoE, whose embeddings
are one of 16 topics' directions plus each token's own, and whose routers score an expert by the topic, normally
distributed, plus --spread times as much by the token. A prompt of 32 tokens is three quarters of one topic, the rest of
the words that all topics share. The share of experts that it chooses decides every figure, and is shown.

A store gives --rate MB/s; rows take turns, each in a new process. By the wire time of the whole artifact, and the
bytes that the store had sent by the bytes of the whole, which other work on the machine does not change:

    first token             `teneral serve`, from its start to the first exact token of a request that waits for it
    with a snapshot         the same with a KV snapshot of the prompt's first 16 tokens
    half the memory         the same with --weights-bytes of half of the weights
    all                     from the start until all weights are there

And of the server with half of the memory: 64 tokens of each of several prompts, equal to those of the whole model, the
time of a token with both, and the bytes that came for the first token and were of no use to it.
"""

from __future__ import annotations

import json
import math
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from benchmarks.processes import RunError
from benchmarks.report import begin, finish, new_parser, note, table, title
from benchmarks.server import Server
from benchmarks.store import StoreProcess, read_once

from teneral.loader.artifact import open_artifact
from teneral.loader.format.layout import is_expert
from teneral.loader.format.safetensors import SafetensorsWriter, TensorSpec
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.synth import tokenizer_files

VOCAB_SIZE = 50_304
NUM_TOPICS = 16  # the first is that of the words which all share
PROMPT_TOKENS, PREFIX_TOKENS, ANSWER_TOKENS = 32, 16, 64
NUM_PROMPTS = 4
COMMON_SHARE = 0.25  # of a prompt's tokens
TOPIC_PART = 0.8  # of an embedding; the rest, in squares, is the token's own
RESIDUAL_SCALE = 0.1  # of what attention and experts add to a token's row
ROW_SPREAD = 0.3  # deviation of the logarithm of a row's scale, as trained weights have it
POOL_ELEMENTS = 1 << 24  # of normal numbers, from which each weight's is taken
BLOCK_ELEMENTS = 1 << 22
FIRST_TEXT_TOKEN = 1_000
HEAD_DIM = 128

Floats = npt.NDArray[np.float32]


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--billions", type=float, default=6.0, help="of weights")
    parser.add_argument("--rate", type=float, default=200.0, help="of the store, in 10**6 bytes a second")
    parser.add_argument(
        "--spread", type=float, default=0.3, help="of scores by tokens; 1: as much as by topics"
    )
    options = parser.parse_args()
    root = options.work / "experts" / f"{options.billions:g}b-{options.spread:g}"
    prepare(root, options.billions, options.spread)
    manifest = open_artifact(FileStore(root / "models" / "mixture"))
    stored_bytes = sum(part.size_bytes for part in manifest.parts)
    report = begin(
        "experts",
        billions=options.billions,
        spread=options.spread,
        rounds=options.rounds,
        rate_mb_s=options.rate,
        weight_bytes=manifest.weight_bytes,
        stored_bytes=stored_bytes,
        expert_bytes=sum(
            part.size_bytes for part in manifest.parts if is_expert(manifest.groups[part.group].name)
        ),
        shape={key: value for key, value in shape_of(options.billions).items() if isinstance(value, int)},
    )
    with StoreProcess(root, rate_mb_s=options.rate) as store:
        report["results"] = measure(store, options.rounds, manifest.weight_bytes // 2)
    finish(report, render(report), save=options.save)


# ---- the model ----


def shape_of(billions: float) -> dict[str, Any]:
    """Its config.json."""
    hidden, size, num_experts, num_used = (
        (2048, 1024, 64, 8) if billions >= 3 else (1024, 512, 64, 8) if billions >= 0.8 else (256, 128, 32, 4)
    )
    num_heads = max(2, hidden // HEAD_DIM)
    num_kv_heads = max(1, num_heads // 4)
    attention = 2 * hidden * HEAD_DIM * (num_heads + num_kv_heads)
    layer = num_experts * 3 * hidden * size + attention
    return {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": size,
        "moe_intermediate_size": size,
        "num_experts": num_experts,
        "num_experts_per_tok": num_used,
        "num_hidden_layers": max(2, round((billions * 1e9 - 2 * VOCAB_SIZE * hidden) / layer)),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }


def topic_of(token: int) -> int:
    """0 for a token that all topics share: one in eight."""
    return 0 if token % 8 == 0 else 1 + token % (NUM_TOPICS - 1)


class Chance:
    """Normal numbers, each stretch from a random place of one pool: entropy coding finds no more in them than in new
    ones, and a model of 12 GB is made in minutes.
    """

    def __init__(self, hidden: int) -> None:
        self._random = np.random.default_rng(0)
        self._pool = self._random.standard_normal(POOL_ELEMENTS, np.float32)
        self.topics: Floats = self._random.standard_normal((NUM_TOPICS, hidden)).astype(np.float32)

    def normal(self, rows: int, columns: int) -> Floats:
        start = int(self._random.integers(0, POOL_ELEMENTS - rows * columns + 1))
        return self._pool[start : start + rows * columns].reshape(rows, columns).copy()

    def row_scales(self, rows: int) -> Floats:
        return np.exp(ROW_SPREAD * self._random.standard_normal((rows, 1))).astype(np.float32)

    def affinities(self, num_experts: int) -> Floats:
        return self._random.standard_normal((num_experts, NUM_TOPICS)).astype(np.float32)


def tensor_specs(config: dict[str, Any]) -> list[TensorSpec]:
    hidden, size, head_dim = config["hidden_size"], config["moe_intermediate_size"], config["head_dim"]
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB_SIZE, hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        for name, heads in (("q", num_heads), ("k", num_kv_heads), ("v", num_kv_heads)):
            shapes[f"{prefix}.self_attn.{name}_proj.weight"] = (heads * head_dim, hidden)
        for name in ("q_norm", "k_norm"):
            shapes[f"{prefix}.self_attn.{name}.weight"] = (head_dim,)
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (hidden, num_heads * head_dim)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.mlp.gate.weight"] = (config["num_experts"], hidden)
        for expert in range(config["num_experts"]):
            own = f"{prefix}.mlp.experts.{expert}"
            shapes[f"{own}.gate_proj.weight"] = shapes[f"{own}.up_proj.weight"] = (size, hidden)
            shapes[f"{own}.down_proj.weight"] = (hidden, size)
    shapes["model.norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (VOCAB_SIZE, hidden)
    return [TensorSpec(name, "BF16", shape) for name, shape in shapes.items()]


def content(spec: TensorSpec, chance: Chance, spread: float) -> Iterator[Floats]:
    """A tensor in blocks of whole rows."""
    if len(spec.shape) == 1:
        yield 1 + np.float32(0.05) * chance.normal(1, spec.shape[0])
        return
    rows, columns = spec.shape
    if spec.name.endswith("mlp.gate.weight"):
        # Of a row of length sqrt(columns): a product with a topic is 1, one with the token's part is spread by chance.
        own_part = math.sqrt(1 - TOPIC_PART**2)
        by_topic = chance.affinities(rows) @ chance.topics / (TOPIC_PART * columns)
        yield by_topic + spread / own_part / math.sqrt(columns) * chance.normal(rows, columns)
        return
    step = max(1, BLOCK_ELEMENTS // columns)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        block = chance.normal(count, columns)
        if spec.name in ("model.embed_tokens.weight", "lm_head.weight"):
            block *= np.float32(math.sqrt(1 - TOPIC_PART**2))
            topics = [topic_of(token) for token in range(first, first + count)]
            block += np.float32(TOPIC_PART) * chance.topics[topics]
            if spec.name == "lm_head.weight":
                block /= np.float32(math.sqrt(columns))
        else:
            scale = RESIDUAL_SCALE if spec.name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            block *= chance.row_scales(count) * np.float32(scale / math.sqrt(columns))
        yield block


def rounded(values: Floats) -> memoryview:
    """The values' bytes in bf16, rounded to the nearest even."""
    bits = np.ascontiguousarray(values, np.float32).reshape(-1).view(np.uint32)
    return ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16).view(np.uint8).data


def prepare(root: Path, billions: float, spread: float) -> None:
    """Write and pack the model once, and export the snapshot of the prompt's beginning."""
    models = root / "models"
    if not (models / "done").exists():
        shutil.rmtree(root, ignore_errors=True)
        plain = root / "plain"
        plain.mkdir(parents=True)
        config = shape_of(billions)
        files = tokenizer_files(VOCAB_SIZE, encoder=False)
        files["config.json"] = config | files.pop("special_ids")
        for name, value in files.items():
            (plain / name).write_text(json.dumps(value))
        specs, chance = tensor_specs(config), Chance(config["hidden_size"])
        with (plain / "model.safetensors").open("wb") as file:
            writer = SafetensorsWriter(file, specs, {"format": "pt"})
            for spec in specs:
                for block in content(spec, chance, spread):
                    writer.write(rounded(block))
            writer.finish()
        pack(FileStore(plain), FileStore(models / "mixture"))
        shutil.rmtree(plain)
        export_snapshot(models)
        (models / "done").touch()
    read_once(models)


def export_snapshot(models: Path) -> None:
    """Leave a snapshot of the prompt's first tokens, which two requests have in common."""
    with Server(str(models / "mixture"), "--kv-snapshot", str(models / "kv")) as server:
        for seed in (1, 2):
            others = prompt_of(2 + seed, seed)[PREFIX_TOKENS:]
            server.complete([*prompt_of(1, 0)[:PREFIX_TOKENS], *others], 1)


def prompt_of(topic: int, seed: int) -> list[int]:
    chance = random.Random(f"{topic} {seed}")
    own = [token for token in range(FIRST_TEXT_TOKEN, VOCAB_SIZE - 1_000) if topic_of(token) == topic]
    shared = [token for token in range(FIRST_TEXT_TOKEN, VOCAB_SIZE - 1_000) if topic_of(token) == 0]
    return [chance.choice(shared if chance.random() < COMMON_SHARE else own) for _ in range(PROMPT_TOKENS)]


# ---- measuring ----


class Fetched(NamedTuple):
    """Stored bytes of experts that were asked of the store before the first token, and their groups."""

    size_bytes: int
    groups: dict[str, int]  # bytes by name


def measure(store: StoreProcess, rounds: int, half_bytes: int) -> dict[str, Any]:
    found: dict[str, list[float]] = {}
    variables, address = store.environment(), "s3://models/mixture"
    snapshot = ("--kv-snapshot", "s3://models/kv", "--no-kv-snapshot-save")
    half = ("--weights-bytes", str(half_bytes))
    figures: dict[str, Any] = {"sent_bytes": {}}
    texts: dict[str, list[Any]] = {}

    def add(row: str, value: float) -> None:
        found.setdefault(row, []).append(value)
        note(f"{row:16} {value:.3f}")

    def first_token(server: Server, row: str, num_cached: int = 0) -> float:
        before_bytes = store.sent_bytes()
        answer = server.complete(prompt_of(1, 0), 1, since_s=server.started_s)
        figures["sent_bytes"].setdefault(row, []).append(store.sent_bytes() - before_bytes)
        if answer.num_cached != num_cached:
            raise RunError(f"{answer.num_cached} tokens of the prompt were known, and {num_cached} should be")
        add(row, answer.token_times_s[0])
        return answer.token_times_s[0]

    for number in range(rounds):
        is_last = number == rounds - 1
        with Server(address, variables=variables) as server:
            fetched = experts_fetched(server, first_token(server, "first token"))
            server.wait_ready()
            add("all", time.monotonic() - server.started_s)
            if is_last:
                texts["whole"] = answers(server, add, "token, whole")
        with Server(address, *snapshot, variables=variables) as server:
            first_token(server, "with a snapshot", PREFIX_TOKENS)
        with Server(address, *half, variables=variables) as server:
            # No other experts are read.
            chosen = experts_fetched(server, first_token(server, "half the memory"))
            figures["chosen_bytes"] = chosen.size_bytes
            figures["in_vain_bytes"] = sum(
                size for group, size in fetched.groups.items() if group not in chosen.groups
            )
            figures["num_chosen"] = len(chosen.groups)
            if is_last:
                texts["half"] = answers(server, add, "token, half")
                figures["half"] = {
                    name: metric(server, f"teneral_experts_{name}")
                    for name in (
                        "hits_total",
                        "misses_total",
                        "evictions_total",
                        "fetched_bytes_total",
                        "refetched_bytes_total",
                        "resident_bytes",
                    )
                }
    if texts["whole"] != texts["half"]:
        raise RunError("with half of the memory other tokens came")
    return {"seconds": found, **figures}


def experts_fetched(server: Server, first_s: float) -> Fetched:
    groups: dict[str, int] = {}
    for span in json.loads(get(server, "/timeline"))["spans"]:
        group = span.get("attributes", {}).get("group", "")
        if span["lane"] == "fetch" and is_expert(group) and span["start_s"] < first_s:
            groups[group] = groups.get(group, 0) + span["attributes"]["bytes"]
    return Fetched(sum(groups.values()), groups)


def answers(server: Server, add: Any, row: str) -> list[Any]:
    """Of several topics' prompts, one after the other, and the seconds that each token took."""
    found = []
    for topic in range(1, NUM_PROMPTS + 1):
        body = {"prompt": prompt_of(topic, 0), "max_tokens": ANSWER_TOKENS, "temperature": 0}
        begun_s = time.monotonic()
        answer = server.post("/v1/completions", {"model": "model", "ignore_eos": True, "logprobs": 0, **body})
        add(row, (time.monotonic() - begun_s) / ANSWER_TOKENS)
        found.append(answer["choices"][0]["logprobs"])
    return found


def get(server: Server, path: str) -> str:
    connection = server.connect()
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    finally:
        connection.close()


def metric(server: Server, name: str) -> float:
    lines = (line.rpartition(" ") for line in get(server, "/metrics").splitlines())
    return next(float(value) for label, _, value in lines if label == name)


def render(report: dict[str, Any]) -> str:
    results, rate = report["results"], report["rate_mb_s"]
    wire_s = report["stored_bytes"] / rate / 1e6
    rows = []
    for row, values in results["seconds"].items():
        median = statistics.median(values)
        wire = "" if row.startswith("token") else f"{median / wire_s:.2f}x"
        sent = results["sent_bytes"].get(row)
        share = f"{statistics.median(sent) / report['stored_bytes']:.2f}x" if sent else ""
        rows.append([row, f"{median:.3f}", f"{min(values):.3f}–{max(values):.3f}", wire, share])
    shape, half = report["shape"], results["half"]
    num_experts = shape["num_hidden_layers"] * shape["num_experts"]
    words = [
        f"{report['billions']:g} B weights made to be skewed",
        f"{report['stored_bytes'] / 1e6:.0f} MB stored, {report['expert_bytes'] / 1e6:.0f} of experts",
        f"wire {wire_s:.2f} s",
        f"{report['rounds']} rounds",
    ]
    lines = [
        title(report, *words),
        table(["row", "median (s)", "from–to", "by wire time", "bytes until then"], rows),
        f"\nThe prompt chose {results['num_chosen']} of {num_experts} experts, "
        f"{results['chosen_bytes'] / 1e6:.0f} MB; {results['in_vain_bytes'] / 1e6:.1f} MB of others, "
        f"{results['in_vain_bytes'] / report['stored_bytes']:.2%} of the artifact, were asked for before its token.",
        f"With half of the memory: the same tokens; {half['hits_total']:.0f} hits, {half['misses_total']:.0f} misses, "
        f"{half['evictions_total']:.0f} evictions, {half['fetched_bytes_total'] / 1e6:.0f} MB fetched, "
        f"{half['refetched_bytes_total'] / 1e6:.0f} of them again.",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
