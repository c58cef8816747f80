"""One cold start as people write it today: fetch a model, load it into transformers, print its first token.

    python first_token.py WAY MODEL PROMPT

MODEL is a directory, or `s3://bucket/prefix` at the endpoint that the environment names. No server is started: what
prints the token here would still have to import one. It runs in the peers' environment and knows nothing of Teneral.

    local        AutoModelForCausalLM.from_pretrained(directory)
    boto3        the same after `download_file` of each object, which reads 8 MiB parts over 10 connections
    runai        the small files by the streamer's own `pull_files`, the weights by SafetensorsStreamer over S3, passed
                 on as `state_dict` without a copy, since the streamer gives its tensors away
    tensorizer   the small files by boto3, then `no_init_or_tensor`, TensorDeserializer over S3 and `load_into_module`
                 with as many readers as it chooses
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main() -> None:
    way, model, prompt = sys.argv[1:]
    ways: dict[str, Callable[[str, str], None]] = {
        "local": local,
        "boto3": boto3_download,
        "runai": runai,
        "tensorizer": tensorizer,
    }
    ways[way](model, prompt)


def local(directory: str, prompt: str) -> None:
    from transformers import AutoModelForCausalLM

    answer(AutoModelForCausalLM.from_pretrained(directory), directory, prompt)


def boto3_download(model: str, prompt: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        download(model, directory)
        local(directory, prompt)


def runai(model: str, prompt: str) -> None:
    from runai_model_streamer import SafetensorsStreamer, list_safetensors, pull_files
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

    with tempfile.TemporaryDirectory() as directory:
        pull_files(model, directory, ignore_pattern=["*.safetensors"])
        with SafetensorsStreamer() as streamer:
            streamer.stream_files(list_safetensors(model))
            weights = dict(streamer.get_tensors())
        config = AutoConfig.from_pretrained(directory)
        family = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # the Auto class itself wants a name
        answer(family.from_pretrained(None, config=config, state_dict=weights), directory, prompt)


def tensorizer(model: str, prompt: str) -> None:
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
        answer(loaded, directory, prompt)


def download(model: str, directory: str, *, but_not: str = "/") -> None:
    import boto3

    bucket, _, prefix = model.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for item in client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]:
        if not item["Key"].endswith(but_not):
            client.download_file(bucket, item["Key"], str(Path(directory) / Path(item["Key"]).name))


def answer(model: Any, directory: str, prompt: str) -> None:
    from transformers import AutoTokenizer

    inputs = AutoTokenizer.from_pretrained(directory)(prompt, return_tensors="pt")
    tokens = model.eval().generate(**inputs, max_new_tokens=1, do_sample=False)
    print("TOKEN", int(tokens[0, -1]), flush=True)


if __name__ == "__main__":
    main()
