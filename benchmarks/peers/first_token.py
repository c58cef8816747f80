"""One cold start as people write it today: fetch a model, load it into transformers, print its first token, or several,
each as soon as it is made.

    python first_token.py WAY MODEL PROMPT [--tokens N]

MODEL is a directory, or `s3://bucket/prefix` at the endpoint that the environment names. No server is started: what
prints the token here would still have to import one. It runs in the peers' environment and knows nothing of Teneral.

    local        AutoModelForCausalLM.from_pretrained(directory)
    local-cuda   the same, straight to a device: `dtype="auto", device_map="cuda"`
    boto3        the same after `download_file` of each object, which reads 8 MiB parts over 10 connections
    runai        the small files by the streamer's own `pull_files`, the weights by SafetensorsStreamer over S3, passed
                 on as `state_dict` without a copy, since the streamer gives its tensors away
    tensorizer   the small files by boto3, then `no_init_or_tensor`, TensorDeserializer over S3 and `load_into_module`
                 with as many readers as it chooses

Tokens are printed by a streamer, which is what `generate` has for it. It always makes N of them.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

Answer = Callable[[Any, str], None]  # takes a model that is loaded, and the directory of its tokenizer


def main() -> None:
    ways: dict[str, Callable[[str, Answer], None]] = {
        "local": local,
        "local-cuda": local_cuda,
        "boto3": boto3_download,
        "runai": runai,
        "tensorizer": tensorizer,
    }
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=ways)
    parser.add_argument("model")
    parser.add_argument("prompt")
    parser.add_argument("--tokens", type=int, default=1)
    options = parser.parse_args()
    ways[options.way](options.model, partial(answer, prompt=options.prompt, num_tokens=options.tokens))


def local(directory: str, give: Answer) -> None:
    from transformers import AutoModelForCausalLM

    give(AutoModelForCausalLM.from_pretrained(directory), directory)


def local_cuda(directory: str, give: Answer) -> None:
    from transformers import AutoModelForCausalLM

    give(AutoModelForCausalLM.from_pretrained(directory, dtype="auto", device_map="cuda"), directory)


def boto3_download(model: str, give: Answer) -> None:
    with tempfile.TemporaryDirectory() as directory:
        download(model, directory)
        local(directory, give)


def runai(model: str, give: Answer) -> None:
    from runai_model_streamer import SafetensorsStreamer, list_safetensors, pull_files
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    with tempfile.TemporaryDirectory() as directory:
        pull_files(model, directory, ignore_pattern=["*.safetensors"])
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(list_safetensors(model))
            weights = dict(streamer.get_tensors())
        config = AutoConfig.from_pretrained(directory)
        family = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the Auto class itself wants a name
        give(family.from_pretrained(None, config=config, state_dict=weights), directory)


def tensorizer(model: str, give: Answer) -> None:
    from tensorizer import TensorDeserializer
    from tensorizer.stream_io import open_stream
    from tensorizer.utils import no_init_or_tensor
    from transformers import AutoConfig, AutoModelForCausalLM

    with tempfile.TemporaryDirectory() as directory:
        download(model, directory, but_not=".tensors")
        with no_init_or_tensor():
            loaded = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory))
        stream = open_stream(
            f"{model}/model.tensors",
            s3_access_key_id=os.environ["AWS_ACCESS_KEY_ID"],
            s3_secret_access_key=os.environ["AWS_SECRET_ACCESS_KEY"],
        )
        with stream, TensorDeserializer(stream, device="cpu") as deserializer:
            deserializer.load_into_module(loaded)
        loaded.tie_weights()
        give(loaded, directory)


def download(model: str, directory: str, *, but_not: str = "/") -> None:
    import boto3

    bucket, _, prefix = model.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for item in client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]:
        if not item["Key"].endswith(but_not):
            client.download_file(bucket, item["Key"], str(Path(directory) / Path(item["Key"]).name))


def answer(model: Any, directory: str, *, prompt: str, num_tokens: int) -> None:
    from transformers import AutoTokenizer
    from transformers.generation.streamers import BaseStreamer

    class Printer(BaseStreamer):
        """Is given the prompt first, then one token at a time."""

        is_prompt = True

        def put(self, value: Any) -> None:
            if not self.is_prompt:
                print("TOKEN", int(value), flush=True)
            self.is_prompt = False

        def end(self) -> None:
            pass

    inputs = AutoTokenizer.from_pretrained(directory)(prompt, return_tensors="pt").to(model.device)
    length = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    model.eval().generate(**inputs, **length, do_sample=False, streamer=Printer())


if __name__ == "__main__":
    main()
