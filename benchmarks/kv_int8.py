"""The effect of 8-bit keys and values on a model's predictions, and the cost of reading them.

    python -m benchmarks.kv_int8 [MODEL_DIRECTORY] [--text FILE] [--tokens N] [--context N] [--threads N]

Both decoders are the same weights over the same text; only the storage of keys and values differs. Errors are over all
predictions: of the logits, of the distribution at temperature 1, of the perplexity. Time is that of one decode step's
attention, in a layer of the shape of Qwen2.5-0.5B, over a context in consecutive blocks and in scattered ones.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tests.support.models import DictWeights, build_model

from teneral.runtime.backends.torch.attention import paged_attention, plan_attention
from teneral.runtime.backends.torch.storage import TorchInt8KVStorage, TorchKVStorage, TorchPool
from teneral.runtime.kv.storage import KVKind
from teneral.runtime.models.decoder import Decoder
from teneral.runtime.quality.text import read_text
from teneral.runtime.step.batch import SequenceSpan, StepBatch
from teneral.runtime.tensors import DType
from teneral.runtime.text.tokenizer import TextTokenizer

BLOCK_SIZE = 16
HEADS, KV_HEADS, HEAD_DIM = 14, 2, 64


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", nargs="?", type=Path, default=Path("demo/model"))
    parser.add_argument("--text", default=None)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = options.model
    decoder = build_model(
        json.loads((model / "config.json").read_text()), DictWeights(load_file(model / "model.safetensors"))
    )
    assert isinstance(decoder, Decoder)
    tokenizer = TextTokenizer.from_files(
        lambda name: path.read_bytes() if (path := model / name).exists() else None
    )
    tokens = tokenizer.encode(read_text(options.text).content)[: options.tokens]
    tokenizer.close()
    compare(decoder, tokens)
    measure(options.context)


def compare(decoder: Decoder, tokens: list[int]) -> None:
    """Print how far the predictions are from each other, over windows of the model's context."""
    window = decoder.config.max_context
    rows: list[torch.Tensor] = []
    for start in range(0, len(tokens) - 1, window):
        inputs = tokens[start : start + window]
        targets = torch.tensor(tokens[start + 1 : start + window + 1])
        exact, stored = (logits(decoder, inputs, kind)[: len(targets)] for kind in KVKind)
        log_p, log_q = exact.log_softmax(-1), stored.log_softmax(-1)
        rows.append(
            torch.stack(
                [
                    -log_p.gather(1, targets[:, None])[:, 0],
                    -log_q.gather(1, targets[:, None])[:, 0],
                    (exact - stored).abs().amax(-1),
                    (log_p.exp() * (log_p - log_q)).sum(-1),
                    (exact.argmax(-1) == stored.argmax(-1)).float(),
                    exact.std(-1),
                ],
                dim=1,
            ).double()
        )
    exact_loss, loss, difference, divergence, agrees, spread = torch.cat(rows).unbind(1)
    whole, half = (decoder.kv_block_bytes(BLOCK_SIZE, kind=kind) for kind in KVKind)
    print(f"predictions                 {len(loss)}, windows of {window} tokens, {decoder.dtype}")
    print(
        f"bytes a token               {half // BLOCK_SIZE} instead of {whole // BLOCK_SIZE}: {half / whole:.3f}"
    )
    print(f"perplexity                  {math.exp(exact_loss.mean()):.4f} → {math.exp(loss.mean()):.4f}")
    print(f"perplexity ratio            {math.exp((loss - exact_loss).mean()):.6f}")
    print(
        f"largest logit difference    {difference.max():.4f} (mean of the largest ones {difference.mean():.4f};"
    )
    print(f"                            standard deviation of the logits {spread.mean():.2f})")
    print(f"KL divergence               mean {divergence.mean():.2e}, largest {divergence.max():.2e} nats")
    print(f"the same likeliest token    {agrees.mean():.4%}")


@torch.inference_mode()
def logits(decoder: Decoder, tokens: list[int], kind: KVKind) -> torch.Tensor:
    """(tokens, vocab_size) Of one pass, in which every token reads what those before it have stored."""
    count = len(tokens)
    num_blocks = -(-count // BLOCK_SIZE)
    everything = np.arange(count)
    span = SequenceSpan(0, count, count, tuple(range(num_blocks)))
    batch = StepBatch(np.array(tokens), everything, everything, (span,), everything)
    return torch.from_numpy(decoder.forward(batch, decoder.new_kv(num_blocks, BLOCK_SIZE, kind=kind)))


@torch.inference_mode()
def measure(context: int) -> None:
    """Print the time of a decode step's attention and of storing a prompt, medians in microseconds."""
    num_blocks = -(-context // BLOCK_SIZE)
    consecutive = tuple(range(num_blocks))
    scattered = tuple((7 * block) % num_blocks if num_blocks % 7 else block for block in consecutive)
    queries = torch.randn(1, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    prompt = torch.randn(context, 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
    print(f"\none layer, {context} tokens of context, bf16: µs")
    print(f"{'':14}{'consecutive':>12}{'scattered':>12}{'store all':>12}")
    kinds: list[tuple[str, type[TorchKVStorage] | type[TorchInt8KVStorage]]] = [
        ("model", TorchKVStorage),
        ("int8", TorchInt8KVStorage),
    ]
    for name, storage in kinds:
        kv: TorchPool = storage(
            1, KV_HEADS, HEAD_DIM, num_blocks=num_blocks, block_size=BLOCK_SIZE, dtype=DType.BF16
        )
        kv.write(0, torch.arange(context), prompt)
        times = [
            median_us(partial(attend, queries, kv, context, blocks)) for blocks in (consecutive, scattered)
        ]
        times.append(median_us(partial(kv.write, 0, torch.arange(context), prompt)))
        print(f"{name:14}" + "".join(f"{each:12.0f}" for each in times))


def attend(queries: torch.Tensor, kv: TorchPool, context: int, blocks: tuple[int, ...]) -> torch.Tensor:
    plans = plan_attention([SequenceSpan(0, 1, context, blocks)], kv, num_heads=HEADS, window=None)
    return paged_attention(queries, kv, 0, plans, HEAD_DIM**-0.5)


def median_us(work: Callable[[], object], rounds: int = 200) -> float:
    times = []
    for _ in range(rounds):
        start_s = time.perf_counter()
        work()
        times.append(time.perf_counter() - start_s)
    return statistics.median(times) * 1e6


if __name__ == "__main__":
    main()
