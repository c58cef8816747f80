"""Tokens by llama.cpp: reads {"model": PATH, "texts": […]} as JSON, and prints the tokens of each text, with special
tokens recognised and none added. Runs in the environment of scripts/conformance-gguf, and knows nothing of Teneral.
"""

from __future__ import annotations

import json
import sys

import llama_cpp as api


def main() -> None:
    asked = json.load(sys.stdin)
    api.llama_backend_init()
    settings = api.llama_model_default_params()
    settings.vocab_only = True
    model = api.llama_model_load_from_file(asked["model"].encode(), settings)
    if not model:
        raise SystemExit(f"llama.cpp cannot load {asked['model']}")
    vocab = api.llama_model_get_vocab(model)
    found = []
    for text in asked["texts"]:
        data = text.encode()
        tokens = (api.llama_token * (len(data) + 8))()
        count = api.llama_tokenize(vocab, data, len(data), tokens, len(tokens), False, True)
        if count < 0:
            raise SystemExit(f"a text of {len(data)} bytes has {-count} tokens")
        found.append(list(tokens[:count]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
