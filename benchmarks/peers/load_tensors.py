"""One load of a model's tensors into this process's memory by a peer; prints its time, CPU time and bytes as JSON.

    python load_tensors.py WAY PLACE

PLACE is a file, or `s3://bucket/key` at the endpoint that the environment names. Imports are over before the clock
starts. Afterwards a byte of every page has been read, so that nothing is left to be mapped or fetched. It runs in the
peers' environment and knows nothing of Teneral.

    safetensors  safetensors.torch.load_file, from a file
    runai        SafetensorsStreamer, which gives its tensors away; connections and threads as it chooses (8 and 16)
    tensorizer   TensorDeserializer, with as many readers as it chooses
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Callable

import torch

Tensors = dict[str, torch.Tensor]
PAGE_BYTES = 4096


def main() -> None:
    way, place = sys.argv[1:]
    ways: dict[str, Callable[[str], Callable[[], Tensors]]] = {
        "safetensors": safetensors,
        "runai": runai,
        "tensorizer": tensorizer,
    }
    load = ways[way](place)
    cpu_s, start_s = _cpu_s(), time.monotonic()
    tensors = load()
    for tensor in tensors.values():
        tensor.detach().contiguous().reshape(-1).view(torch.uint8)[::PAGE_BYTES].max()
    elapsed_s = time.monotonic() - start_s
    weight_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors.values()}.values())
    print(json.dumps({"elapsed_s": elapsed_s, "cpu_s": _cpu_s() - cpu_s, "weight_bytes": weight_bytes}))


def safetensors(place: str) -> Callable[[], Tensors]:
    from safetensors.torch import load_file

    return lambda: load_file(place)


def runai(place: str) -> Callable[[], Tensors]:
    from runai_model_streamer import SafetensorsStreamer

    def load() -> Tensors:
        with SafetensorsStreamer() as streamer:
            streamer.stream_file(place)
            return dict(streamer.get_tensors())

    return load


def tensorizer(place: str) -> Callable[[], Tensors]:
    from tensorizer import TensorDeserializer
    from tensorizer.stream_io import open_stream

    def load() -> Tensors:
        key_id, secret = os.environ.get("AWS_ACCESS_KEY_ID"), os.environ.get("AWS_SECRET_ACCESS_KEY")
        stream = open_stream(place, s3_access_key_id=key_id, s3_secret_access_key=secret)
        with stream, TensorDeserializer(stream, device="cpu") as deserializer:
            return dict(deserializer.items())

    return load


def _cpu_s() -> float:
    """Of this process and the helpers that it has waited for."""
    own, helpers = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + helpers.ru_utime + helpers.ru_stime


if __name__ == "__main__":
    main()
