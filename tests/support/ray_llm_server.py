"""Ray Serve LLM with one model on the CPU, for a Python that has Ray and vLLM; arguments: the model's address and
a port. Prints one line of JSON: the answer to one prompt, and the files in Hugging Face's cache.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.request
from pathlib import Path


def main() -> None:
    import ray
    from ray import serve
    from ray.serve.llm import LLMConfig, build_openai_app

    address, port = sys.argv[1], int(sys.argv[2])
    config = LLMConfig(
        model_loading_config={"model_id": "tiny", "model_source": address},
        engine_kwargs={
            "load_format": "teneral",
            "dtype": "bfloat16",
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 4,
        },
        accelerator_config={"kind": "cpu"},
        placement_group_config={"bundles": [{"CPU": 1}]},
        deployment_config={"num_replicas": 1, "health_check_timeout_s": 600},
        log_engine_metrics=False,
        callback_config={"callback_class": "teneral.handlers.contrib.ray.llm:StreamedWeights"},
    )
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=True)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, proxy_location="HeadOnly")
    serve.run(build_openai_app({"llm_configs": [config]}), name="llm", route_prefix="/")
    body = json.dumps({"model": "tiny", "prompt": "def f", "max_tokens": 8, "temperature": 0}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"content-type": "application/json"}
    )
    began = time.monotonic()
    with urllib.request.urlopen(request, timeout=300) as response:
        answer = json.load(response)
    cached = [str(path) for path in Path(os.environ["HF_HOME"]).rglob("*") if path.is_file()]
    print(
        "ANSWER",
        json.dumps({"answer": answer, "seconds": time.monotonic() - began, "cached": cached}),
        flush=True,
    )
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":  # Ray and vLLM start their processes anew, and they import this
    main()
