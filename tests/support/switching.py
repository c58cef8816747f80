"""Servers that switch to fine-tunes: packed models, requests, and the answers of servers that began with a model."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from teneral.handlers.http.limits import Limits
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance

from .http_server import Server, running_server
from .tiny_models import save_tiny

LOAD, UNLOAD = "/v2/repository/models/m/load", "/v2/repository/models/m/unload"
BODY = {"model": "m", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0, "logprobs": 1}
DRAFT = {"teneral": {"first_token": "draft"}}


def fine_tune(model: Path, directory: Path, *, seed: int, scale: float = 0.02) -> Path:
    """A model whose layers differ a little from another's, and whose embeddings are the same."""
    shutil.copytree(model, directory)
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if "layers" in name:
            noise = torch.randn(tensor.shape, generator=generator)
            weights[name] = (tensor.float() * (1 + scale * noise)).to(tensor.dtype)
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Models:
    """A packed base, and fine-tunes of it: as differences, and whole."""

    def __init__(self, folder: Path, family: str = "llama") -> None:
        self.folder = folder
        self.plain = save_tiny(family, folder / "plain", dtype=torch.bfloat16)
        self.base = folder / "base"
        pack(FileStore(self.plain), FileStore(self.base))

    def tuned(self, name: str, *, seed: int, change: Callable[[Path], object] = lambda folder: None) -> Path:
        model = fine_tune(self.plain, self.folder / f"{name}-plain", seed=seed)
        change(model)
        pack(FileStore(model), FileStore(self.folder / name), base=Base(FileStore(self.base)))
        pack(FileStore(model), FileStore(self.whole(name)))
        return self.folder / name

    def whole(self, name: str) -> Path:
        return self.folder / f"{name}-whole"


def config_of(address: Path, **settings: Any) -> ServeConfig:
    defaults = {"name": "m", "kv_bytes": 8 << 20, "threads": 1, "model_control": True}
    return ServeConfig(model=str(address), **{**defaults, **settings})


def serving(address: Path, *, limits: Limits | None = None, **settings: Any) -> Any:
    config = config_of(address, **settings)
    return running_server(Instance(config), limits=limits or Limits.from_config(config))


async def switch(server: Server, address: Path) -> Any:
    return await server.post(LOAD, {"parameters": {"model": str(address)}})


async def answer(server: Server, **changes: Any) -> dict[str, Any]:
    """The text and its log-probabilities, which are equal only where all weights are."""
    found = await server.post("/v1/completions", {**BODY, **changes})
    assert found.status == 200, found.body
    return dict(found.json["choices"][0])


async def alone(address: Path, **changes: Any) -> dict[str, Any]:
    async with serving(address) as server:
        return await answer(server, **changes)
