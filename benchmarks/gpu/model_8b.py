"""A model in the shape of Llama-3.1-8B, of random bf16 weights made on the device, and its benchmarks' helpers."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks.report import machine, note, versions

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
STD = 0.02  # of the weights
GROUP_SIZE = 128  # of 4 bits
COPY_BYTES = 4 << 30
DEADLINE_S = 80.0  # of a benchmark, from its start: what has not begun by then is left out


class Bytes:
    """In place of a tokenizer: each token is a letter."""

    def decode(self, tokens: Sequence[int]) -> str:
        return "x" * len(tokens)


def require_device() -> bool:
    """False, and a word why, where there is none."""
    import torch

    if not torch.cuda.is_available():
        note("no device: torch sees no CUDA device; scripts/gpu-check runs this where there is one")
        return False
    return True


def parse(doc: str | None) -> argparse.Namespace:
    return parser(doc).parse_args()


def parser(doc: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=None, metavar="FILE")
    parser.add_argument(
        "--layers", type=int, default=CONFIG["num_hidden_layers"], help="number of layers; fewer for a trial"
    )
    return parser


def keep(path: Path | None, benchmark: str, measured: dict[str, Any], claims: list[dict[str, Any]]) -> None:
    """Writes the results so far, since the run may be ended early."""
    if path is not None:
        report = {
            "benchmark": f"gpu_{benchmark}",
            "machine": machine(),
            "versions": versions(("torch", "triton", "transformers")),
            **measured,
            "claims": claims,
        }
        path.write_text(json.dumps(report, indent=2) + "\n")


def copy_bytes_s() -> float:
    """Bytes a second that the device reads and writes together when it copies: the best of several."""
    import torch

    source = torch.empty(COPY_BYTES // 2, dtype=torch.uint8, device="cuda").zero_()
    target = torch.empty_like(source)
    return COPY_BYTES / device_s(lambda: target.copy_(source), num=10)


def device_s(work: Callable[[], object], *, num: int = 20) -> float:
    """Seconds on the device for one call, the least of several."""
    import torch

    for _ in range(3):
        work()
    best_ms = float("inf")
    for _ in range(num):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        best_ms = min(best_ms, begin.elapsed_time(end))
    return best_ms / 1e3


def recorded(work: Callable[[], object]) -> Callable[[], None]:
    """A graph's replay of the kernels that `work` launches: what a step pays for them, without the host's part."""
    import torch

    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):  # what is made once
            work()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        work()
    return graph.replay  # which keeps the graph


def tensors(num_layers: int, bits: int) -> dict[str, Any]:
    """By their names in a checkpoint; of a layer q, k and v lie behind one another, and so do gate and up. With less
    than 16 bits as `teneral pack --quantize` lays them out.
    """
    import torch

    hidden, inner = CONFIG["hidden_size"], CONFIG["intermediate_size"]
    key = hidden // CONFIG["num_attention_heads"] * CONFIG["num_key_value_heads"]
    made: dict[str, Any] = {}

    def stacked(prefix: str, parts: list[tuple[str, int]], num_in: int, *, bits: int = bits) -> None:
        rows = sum(size for _, size in parts)
        group_size = GROUP_SIZE if bits == 4 else num_in
        if bits == 16:
            whole = {
                "weight": torch.empty((rows, num_in), dtype=torch.bfloat16, device="cuda").normal_(0, STD)
            }
        else:
            low, high, dtype = (0, 256, torch.uint8) if bits == 4 else (-128, 128, torch.int8)
            levels = torch.randint(low, high, (rows, num_in * bits // 8), dtype=dtype, device="cuda")
            scale = torch.full((rows, num_in // group_size), STD * 3.46 / (1 << bits), device="cuda")
            whole = {"weight": levels, "weight_scale": scale.to(torch.bfloat16)}
        for kind, tensor in whole.items():
            for (name, _), part in zip(parts, tensor.split([size for _, size in parts]), strict=True):
                made[f"{prefix}{name}.{kind}"] = part

    def norm(name: str) -> None:
        made[name] = torch.ones(hidden, dtype=torch.bfloat16, device="cuda")

    for index in range(num_layers):
        prefix = f"model.layers.{index}."
        qkv = [("self_attn.q_proj", hidden), ("self_attn.k_proj", key), ("self_attn.v_proj", key)]
        stacked(prefix, qkv, hidden)
        stacked(prefix, [("self_attn.o_proj", hidden)], hidden)
        stacked(prefix, [("mlp.gate_proj", inner), ("mlp.up_proj", inner)], hidden)
        stacked(prefix, [("mlp.down_proj", hidden)], inner)
        norm(f"{prefix}input_layernorm.weight")
        norm(f"{prefix}post_attention_layernorm.weight")
    for name in ("model.embed_tokens", "lm_head"):
        stacked("", [(name, CONFIG["vocab_size"])], hidden, bits=16 if bits == 16 else 8)
    norm("model.norm.weight")
    return made


def decoder(num_layers: int, bits: int = 16) -> Any:
    from tests.support.models import build_model, dtype_of

    from teneral.runtime.backends.cuda.executor import CudaModelBackend
    from teneral.runtime.backends.cuda.weights import DeviceTensor
    from teneral.runtime.weights import DictWeights

    on_device = {
        name: DeviceTensor(dtype_of(tensor.dtype), tensor, str(tensor.device))
        for name, tensor in tensors(num_layers, bits).items()
    }
    config = {**CONFIG, "num_hidden_layers": num_layers}
    if bits < 16:
        layout = {"bits": bits, "group_size": GROUP_SIZE if bits == 4 else None, "symmetric": True}
        config["quantization_config"] = {"quant_method": "teneral", **layout}
    return build_model(config, DictWeights(on_device), backends=[CudaModelBackend()])


def engine(model: Any, *, max_running: int, max_context: int, records: bool, kv_gib: float = 8) -> Any:
    """Started. Without `records` every step is launched kernel by kernel."""
    from teneral.runtime.backends.choose import step_backend
    from teneral.runtime.backends.cuda.backend import CudaBackend
    from teneral.runtime.engine.engine import Engine, EngineOptions

    def make_backend(model: Any, kv: Any, options: Any, timeline: Any) -> Any:
        guarded = step_backend(model, kv, options, timeline)
        backend = getattr(guarded, "backend", guarded)  # its own methods are looked into here
        if not isinstance(backend, CudaBackend):
            raise RuntimeError("there are no kernels for this device: see the warning above")
        if not records:
            backend._graphs = None
        return backend

    made = Engine(
        model,
        Bytes(),
        options=EngineOptions(
            kv_bytes=int(kv_gib * (1 << 30)),
            max_running=max_running,
            max_context=max_context,
            max_step_tokens=8192,
            max_prefill_tokens=8192,
        ),
        make_backend=make_backend,
    )
    made.start()
    return made


def wait_for_graphs(own: Any, timeout_s: float = 30.0) -> float:
    """Seconds until all sizes are recorded, which begins when the engine is idle."""
    begin_s = time.monotonic()
    backend = own._backend
    while backend._graphs is not None and backend._graphs.missing:
        if time.monotonic() - begin_s > timeout_s:
            raise TimeoutError("not all steps were recorded")
        time.sleep(0.02)
    return time.monotonic() - begin_s


def generate(own: Any, prompts: Sequence[Sequence[int]], num_tokens: int) -> dict[str, Any]:
    """All together, greedily. Seconds to each one's first token, and of a step after all have one."""
    from teneral.runtime.step.requests import GenerationRequest, SamplingParams

    times_s: list[list[float]] = [[] for _ in prompts]
    begin_s = time.perf_counter()
    generations = [
        own.submit(
            GenerationRequest(
                str(number), tuple(prompt), num_tokens, SamplingParams(temperature=0), ignore_eos=True
            ),
            lambda event, number=number: times_s[number].append(time.perf_counter()),
        )
        for number, prompt in enumerate(prompts)
    ]
    for generation in generations:
        generation.result(60.0)
    all_begun_s = max(each[0] for each in times_s)
    gaps_s = [late - early for each in times_s for early, late in pairwise(each) if early >= all_begun_s]
    return {
        "first_token_s": [each[0] - begin_s for each in times_s],
        "step_s": statistics.median(gaps_s) if gaps_s else 0.0,
    }


def prompts(num: int, length: int, *, seed: int = 0) -> list[list[int]]:
    import random

    generator = random.Random(seed)
    return [[generator.randrange(1000, CONFIG["vocab_size"]) for _ in range(length)] for _ in range(num)]


def leave(status: int) -> None:
    sys.stdout.flush()
    sys.exit(status)
