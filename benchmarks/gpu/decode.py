"""Generating on a GPU: an 8B-shaped bf16 model at several batch sizes, against memory's bandwidth and transformers.

    python -m benchmarks.gpu.decode [--json FILE] [--layers N] [--bits 16|8|4] [--compiled | --no-peers]

Whole engine steps are timed, from token to token, with recorded steps and without. A step must read every weight once,
so weights over time, relative to a copy's bandwidth in the same run, is the used share of the memory's bandwidth.
transformers runs the same shape: eagerly at all sizes, and with --compiled also with a static cache at batch 1, which
it compiles for each length: that takes minutes. With --bits 8 or 4 the weights are integers, and transformers is left
out.
"""

from __future__ import annotations

import gc
import time
from typing import Any

from benchmarks.gpu import model_8b
from benchmarks.gpu.check import claim
from benchmarks.report import note, table

BATCHES = (1, 8, 32, 64, 128)
PROMPT_TOKENS = 128
NUM_TOKENS = 96
PEER_TOKENS = 24
BANDWIDTH_GOAL = 0.8


def main() -> int:
    parser = model_8b.parser(__doc__)
    parser.add_argument("--compiled", action="store_true", help="compare with compiled transformers, too")
    parser.add_argument("--no-peers", action="store_true", help="leave transformers out")
    parser.add_argument("--bits", type=int, choices=(16, 8, 4), default=16)
    options = parser.parse_args()
    if not model_8b.require_device():
        return 2
    begin_s = time.monotonic()
    import torch

    copy_bytes_s = model_8b.copy_bytes_s()
    model = model_8b.decoder(options.layers, options.bits)
    # All but the table of embeddings, of which a step reads a few rows.
    read_bytes = model.weights.size_bytes - model.executor.embeddings.weight.nbytes
    measured: dict[str, Any] = {
        "copy_bytes_s": copy_bytes_s,
        "read_bytes": read_bytes,
        "layers": options.layers,
        "bits": options.bits,
    }
    for records in (True, False):
        name = "recorded" if records else "launched"
        own = model_8b.engine(model, max_running=max(BATCHES), max_context=512, records=records)
        model_8b.generate(own, model_8b.prompts(1, PROMPT_TOKENS), 4)
        if records:
            measured["recording_s"] = model_8b.wait_for_graphs(own)
        measured[name] = {
            batch: model_8b.generate(own, model_8b.prompts(batch, PROMPT_TOKENS, seed=batch), NUM_TOKENS)[
                "step_s"
            ]
            for batch in BATCHES
        }
        if records:
            measured["device"] = {
                name: getattr(own.statistics().device, name)
                for name in ("graph_bytes", "num_graphs", "reserved_bytes")
            }
        own.stop(10.0)
        del own
        gc.collect()
        torch.cuda.empty_cache()
        model_8b.keep(options.json, "decode", measured, [])
    del model
    gc.collect()
    torch.cuda.empty_cache()
    if options.bits == 16 and not options.no_peers:
        measured["transformers"] = peers(options.layers, begin_s)
    claims = judge(measured) if options.bits == 16 else []
    model_8b.keep(options.json, "decode", measured, claims)
    if options.compiled:
        measured["transformers_compiled"] = compiled_peer(options.layers)
        claims = judge(measured)
        model_8b.keep(options.json, "decode", measured, claims)
    show(measured)
    return 0


def peers(num_layers: int, begin_s: float) -> dict[int, float]:
    """Seconds a step of transformers, run eagerly, by batch; fewer batches when time runs out."""
    found: dict[int, float] = {}
    try:
        model = peer_model(num_layers)
        for batch in BATCHES:
            if time.monotonic() - begin_s < model_8b.DEADLINE_S:
                found[batch] = peer_step_s(model, batch)
    except Exception as error:
        note(f"transformers: {type(error).__name__}: {error}")
    return found


def peer_model(num_layers: int) -> Any:
    import torch
    import transformers

    config = transformers.AutoConfig.for_model(**{**model_8b.CONFIG, "num_hidden_layers": num_layers})
    with torch.device("cuda"):
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    return model.eval()


def peer_step_s(model: Any, batch: int, **options: Any) -> float:
    """From the time for some tokens and the time for twice as many: what comes before the first one cancels out."""
    import torch

    tokens = torch.tensor(model_8b.prompts(batch, PROMPT_TOKENS), device="cuda")

    def run_s(num: int) -> float:
        torch.cuda.synchronize()
        start_s = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=num,
                min_new_tokens=num,
                do_sample=False,
                pad_token_id=0,
                **options,
            )
        torch.cuda.synchronize()
        return time.perf_counter() - start_s

    for num in (PEER_TOKENS, 2 * PEER_TOKENS):  # what is made once, for a length
        run_s(num)
    return (run_s(2 * PEER_TOKENS) - run_s(PEER_TOKENS)) / PEER_TOKENS


def compiled_peer(num_layers: int) -> dict[int, float]:
    """Batch 1 with a static cache, which transformers compiles by itself."""
    try:
        return {1: peer_step_s(peer_model(num_layers), 1, cache_implementation="static")}
    except Exception as error:
        note(f"transformers, compiled: {type(error).__name__}: {error}")
        return {}


def judge(measured: dict[str, Any]) -> list[dict[str, Any]]:
    used = measured["read_bytes"] / measured["recorded"][1] / measured["copy_bytes_s"]
    claims = [claim("decoding at batch 1, of the bandwidth of a copy", used, BANDWIDTH_GOAL)]
    for batch in BATCHES:
        both = [measured.get(name, {}).get(batch) for name in ("transformers", "transformers_compiled")]
        best = min((each for each in both if each), default=None)
        if best is not None:
            ratio = best / measured["recorded"][batch]
            claims.append(
                claim(f"decoding at batch {batch}, relative to transformers' best here", ratio, 1.0, unit="x")
            )
    return claims


def show(measured: dict[str, Any]) -> None:
    def rate(name: str, batch: int) -> str:
        step_s = measured.get(name, {}).get(batch)
        return "–" if not step_s else f"{batch / step_s:,.0f}"

    names = ("recorded", "launched", "transformers", "transformers_compiled")
    rows = [
        [
            str(batch),
            f"{measured['recorded'][batch] * 1e3:.2f}",
            *(rate(name, batch) for name in names),
            f"{measured['read_bytes'] / measured['recorded'][batch] / measured['copy_bytes_s']:.0%}",
        ]
        for batch in BATCHES
    ]
    print(
        f"a copy reads and writes {measured['copy_bytes_s'] / 1e9:,.0f} GB/s; a step reads at least", end=" "
    )
    print(f"{measured['read_bytes'] / 1e9:.1f} GB of weights")
    print(
        table(
            ["batch", "ms a step", *(f"tokens/s, {name}" for name in names), "weights / s of a copy's"], rows
        )
    )


if __name__ == "__main__":
    model_8b.leave(main())
