"""Logits from llama.cpp: `logits.py MODEL.gguf OUT.npy` reads windows of tokens, [[…], …] as JSON, and writes
(windows, tokens of the longest, vocab_size) fp32. Each window is a sequence of its own. It prints the bytes of the
model's weights.

It uses llama.cpp's C interface, with its defaults, in the peers' environment, and knows nothing of Teneral.
"""

from __future__ import annotations

import json
import sys

import gguf
import llama_cpp as api
import numpy as np


def main() -> None:
    windows = json.load(sys.stdin)
    api.llama_backend_init()
    api.llama_log_set(_silent, None)
    model = api.llama_model_load_from_file(sys.argv[1].encode(), api.llama_model_default_params())
    if not model:
        raise SystemExit(f"{sys.argv[1]} could not be loaded")
    vocab_size = api.llama_vocab_n_tokens(api.llama_model_get_vocab(model))
    longest = max(map(len, windows))
    settings = api.llama_context_default_params()
    settings.n_ctx = settings.n_batch = -(-longest // 256) * 256
    context = api.llama_init_from_model(model, settings)
    batch = api.llama_batch_init(longest, 0, 1)
    shape = (len(windows), longest, vocab_size)
    out = np.lib.format.open_memmap(sys.argv[2], mode="w+", dtype=np.float32, shape=shape)
    for number, window in enumerate(windows):
        api.llama_memory_clear(api.llama_get_memory(context), True)
        batch.n_tokens = len(window)
        for place, token in enumerate(window):
            batch.token[place] = token
            batch.pos[place] = place
            batch.n_seq_id[place] = 1
            batch.seq_id[place][0] = 0
            batch.logits[place] = True
        if api.llama_decode(context, batch):
            raise SystemExit("llama_decode failed")
        rows = np.ctypeslib.as_array(api.llama_get_logits(context), shape=(len(window), vocab_size))
        out[number, : len(window)] = rows
    out.flush()
    print(sum(int(tensor.n_bytes) for tensor in gguf.GGUFReader(sys.argv[1]).tensors))


@api.llama_log_callback
def _silent(level: int, text: bytes, data: object) -> None:
    pass


if __name__ == "__main__":
    main()
