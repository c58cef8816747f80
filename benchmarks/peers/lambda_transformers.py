"""A language model on Lambda as it is often written: boto3 and transformers while the handler is imported.

Runs under `awslambdaric`, and knows nothing of Teneral. `STORY_MODEL` is `s3://bucket/prefix`. An event is
`{"prompt": TEXT, "max_tokens": N}`, the answer `{"text": TEXT}`.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import boto3
from transformers import AutoModelForCausalLM, AutoTokenizer


def _download(model: str, folder: str) -> None:
    bucket, _, prefix = model.removeprefix("s3://").partition("/")
    client = boto3.client("s3")
    for item in client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/")["Contents"]:
        client.download_file(bucket, item["Key"], str(Path(folder) / Path(item["Key"]).name))


with tempfile.TemporaryDirectory() as _FOLDER:
    _download(os.environ["STORY_MODEL"], _FOLDER)
    TOKENIZER = AutoTokenizer.from_pretrained(_FOLDER)
    MODEL = AutoModelForCausalLM.from_pretrained(_FOLDER)


def handle(event: dict[str, Any], context: object) -> dict[str, str]:
    prompt = TOKENIZER(event["prompt"], return_tensors="pt")
    length = event["max_tokens"]
    tokens = MODEL.generate(**prompt, max_new_tokens=length, min_new_tokens=length, do_sample=False)
    return {"text": TOKENIZER.decode(tokens[0][prompt["input_ids"].shape[1] :])}
