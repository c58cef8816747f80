"""The files of sentence-transformers, which define an encoder's pooling and dense layers.

This module knows the files, but not the meaning of their fields.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..loader.errors import CheckpointError
from .errors import ModelError
from .files import ModelFiles
from .tensors import DType, Tensor, aligned_empty
from .weights import DictWeights

_FILES = {
    "modules": "modules.json",
    "pooling": "1_Pooling/config.json",
    "sentence_bert": "sentence_bert_config.json",
    "logit_score": "1_LogitScore/config.json",
}


def sentence_files(files: ModelFiles) -> dict[str, Any]:
    """The arguments of `build_model` for pooling and the layers after it; None for missing files.

    Reads the weights of Dense modules, a few megabytes at most. Raises the errors of
    `ModelFiles.json`, and `ModelError` for a modules.json that is not supported.
    """
    found: dict[str, Any] = {key: files.json(name) for key, name in _FILES.items()}
    if found["modules"] is None:
        return found
    from .models.pooling_config import DENSE_WEIGHTS, dense_folders  # of few models

    if folders := dense_folders(found["modules"]):
        found["dense"] = {folder: files.json(f"{folder}/config.json") for folder in folders}
        read = {folder: files.read(f"{folder}/{DENSE_WEIGHTS}") for folder in folders}
        found["dense_weights"] = {
            folder: _weights_of(data, f"{folder}/{DENSE_WEIGHTS}")
            for folder, data in read.items()
            if data is not None
        }
    return found


def _weights_of(data: bytes, name: str) -> DictWeights:
    """The tensors of a safetensors file, copied to aligned memory. Raises `CheckpointError` if it
    is damaged.
    """
    from ..loader.format.safetensors import PREFIX_BYTES, header_size, parse_header  # of few models

    if len(data) < PREFIX_BYTES:
        raise CheckpointError(f"{name} has {len(data)} bytes and no header", where=name)
    end = PREFIX_BYTES + header_size(data[:PREFIX_BYTES], len(data), where=name)
    tensors: dict[str, Tensor] = {}
    for entry in parse_header(data[PREFIX_BYTES:end], len(data), where=name).entries.values():
        if entry.dtype not in DType.__members__:
            raise ModelError(f"tensor {entry.name} of {name} is {entry.dtype}, which is not supported")
        dtype = DType(entry.dtype)
        array = aligned_empty(entry.shape, dtype.numpy)
        array[...] = np.frombuffer(data[entry.begin : entry.end], dtype.numpy).reshape(entry.shape)
        tensors[entry.name] = Tensor(dtype, array)
    return DictWeights(tensors)
