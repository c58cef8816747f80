"""Encoders with the files of sentence-transformers, from a packed folder to /v1/embeddings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.support.encoder_families import save_sentence_model
from tests.support.http_server import running_server
from tests.support.memory_store import MemoryStore

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.config import ServeConfig
from teneral.runtime.instance.instance import Instance
from teneral.runtime.text.tokenizer import TextTokenizer

TEXTS = ["hi", "a nymph climbs a stem", "x" * 70]


@pytest.mark.parametrize(("variant", "dense"), [("modernbert", 0), ("deberta-v3", 24), ("nomic_bert", 32)])
@pytest.mark.parametrize("is_packed", [True, False])
async def test_a_folder_is_served_with_its_pooling_and_its_dense_layer(
    tmp_path: Path, one_thread: None, variant: str, dense: int, is_packed: bool
) -> None:
    saved = save_sentence_model(variant, tmp_path, dense=dense)
    source = FileStore(tmp_path)
    if is_packed:
        source = MemoryStore()
        pack(FileStore(tmp_path), source)
    tokenizer = TextTokenizer.from_files(
        lambda name: path.read_bytes() if (path := tmp_path / name).exists() else None
    )
    config = ServeConfig(model="memory", name="tiny/model", threads=1)

    async with running_server(Instance(config, source=source)) as server:
        answer = await server.post("/v1/embeddings", {"input": TEXTS})

    assert answer.status == 200, answer.body
    ours = torch.tensor([entry["embedding"] for entry in answer.json["data"]])
    right = torch.stack([saved.embed(list(tokenizer.encode(text))) for text in TEXTS])
    assert ours.shape[1] == dense or not dense
    torch.testing.assert_close(ours, right, atol=3e-5, rtol=1e-4)
    tokenizer.close()


async def test_a_dense_layer_without_weights_is_named(tmp_path: Path) -> None:
    save_sentence_model("mpnet", tmp_path, dense=8)
    (tmp_path / "2_Dense" / "model.safetensors").unlink()

    async with running_server(Instance(ServeConfig(model="memory"), source=FileStore(tmp_path))) as server:
        answer = await server.post("/v1/embeddings", {"input": "hi"})

    assert answer.status >= 500
    assert "there is no 2_Dense/model.safetensors" in answer.json["error"]["message"]
