"""A GGUF file's own bytes, made again from what is loaded of it, and compared with the SHA-256 of its store."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from gguf import GGUFReader
from tests.loader.test_file_checks import begun, damaged, each_load, wait_groups
from tests.loader.test_gguf import NAME, NUMBERS, tensors_of
from tests.support.gguf_files import gguf_file, metadata
from tests.support.gguf_models import write_gguf
from tests.support.hub_server import HubServer, use_hub
from tests.support.memory_store import MemoryStore
from tests.support.paced import WAIT_S
from tests.support.tiny_models import tiny_model

from teneral.loader.artifact import open_artifact, open_model
from teneral.loader.errors import IntegrityError
from teneral.loader.format.gguf.directory import WEIGHTS_NAME, GgufDirectory
from teneral.loader.format.gguf.model import Keeps
from teneral.loader.load.accounting import LoadState
from teneral.loader.sources.base import ObjectInfo

ADDRESS = "org/tiny:Q4_0"


class DigestStore(MemoryStore):
    """One file, whose SHA-256 it states, and the number of bytes that were read of it."""

    def __init__(self, content: bytes) -> None:
        super().__init__({NAME: content})
        self.content, self.num_read_bytes = content, 0

    def stat(self, name: str) -> ObjectInfo:
        return super().stat(name)._replace(sha256=hashlib.sha256(self.content).digest())

    def read_into(
        self, name: str, start: int, buffer: memoryview, *, version: str | None = None
    ) -> str | None:
        self.num_read_bytes += len(buffer)
        buffer[:] = self.content[start : start + len(buffer)]
        return version


def loaded(source: GgufDirectory) -> bytes:
    return source.read(WEIGHTS_NAME, max_bytes=1 << 28)[0]


def restored(source: GgufDirectory, weights: bytes) -> str:
    """The digest of what is made again from model.safetensors."""

    def values(begin: int, end: int) -> Iterator[memoryview]:
        for start in range(begin, end, 5000):
            yield memoryview(weights)[start : min(end, start + 5000)]

    digest, pieces = source.original(values)
    for piece in pieces:
        digest.update(piece)
    return digest.hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


# Any exponent occurs in random blocks of MXFP4, and embeddings of theirs become floats.
@pytest.mark.parametrize("name", sorted(NUMBERS.keys() - {"MXFP4"}))
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_the_bytes_of_a_file_are_made_again_and_none_is_read_twice(name: str, architecture: str) -> None:
    store = DigestStore(gguf_file(metadata(architecture), tensors_of(name, architecture)))
    source = GgufDirectory(store, NAME)
    weights, num_read_bytes = loaded(source), store.num_read_bytes
    assert restored(source, weights) == sha256(store.content)
    assert store.num_read_bytes - num_read_bytes < 100, "what fills the gaps between tensors"
    assert restored(source, weights) == sha256(store.content), "also with what is not kept any more"


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("gemma2", "Q8_0"),
        ("gemma3_text", "F16"),
        ("qwen3_moe", "Q4_0"),
        ("gpt_oss", "MXFP4"),
        ("mixtral", "Q5_0"),
        ("glm", "Q8_0"),
        ("deepseek_v3", "Q8_0"),
        ("qwen3_5_text", "Q8_0"),
        ("gemma4_text", "Q8_0"),
    ],
)
def test_so_are_those_of_other_families(family: str, kind: str, tmp_path: Path) -> None:
    write_gguf(tmp_path / NAME, tiny_model(family), kind)
    store = DigestStore((tmp_path / NAME).read_bytes())
    source = GgufDirectory(store, NAME)
    assert restored(source, loaded(source)) == sha256(store.content)
    assert source.stat(WEIGHTS_NAME).sha256 is not None


def test_no_digest_is_stated_where_a_file_would_be_read_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teneral.loader.format.gguf.original.MAX_KEPT_TENSOR_BYTES", 1000)
    store = DigestStore(gguf_file(metadata(), tensors_of("Q4_1")))
    assert GgufDirectory(store, NAME, keeps=Keeps.FLOATS).stat(WEIGHTS_NAME).sha256 is None
    assert GgufDirectory(store, NAME).stat(WEIGHTS_NAME).sha256 is not None
    plain = MemoryStore({NAME: store.content})
    assert GgufDirectory(plain, NAME).stat(WEIGHTS_NAME).sha256 is None


def test_a_tensor_that_is_another_one_when_it_is_read_again_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("teneral.loader.format.gguf.original.MAX_KEPT_BYTES", 0)
    tensors = tensors_of("Q4_1", "qwen2")
    (bias,) = (each for each in tensors if each.name.endswith("attn_k.bias"))
    content = gguf_file(metadata("qwen2"), tensors)
    store = DigestStore(content.replace(bias.data, damaged(bias.data)))
    source = GgufDirectory(store, NAME)
    weights = loaded(source)
    store.content = content
    with pytest.raises(IntegrityError, match=r"attn_k\.bias .* differs in two reads"):
        restored(source, weights)


def test_latents_that_are_others_when_they_are_read_again_are_refused(tmp_path: Path) -> None:
    write_gguf(tmp_path / NAME, tiny_model("deepseek_v3"), "F16")
    content = (tmp_path / NAME).read_bytes()
    store = DigestStore(content)
    source = GgufDirectory(store, NAME)
    weights = loaded(source)
    (values,) = (each for each in GGUFReader(tmp_path / NAME).tensors if each.name == "blk.1.attn_v_b.weight")
    begin = int(values.data_offset)
    store.content = content[:begin] + damaged(content[begin : begin + 2]) + content[begin + 2 :]
    with pytest.raises(IntegrityError, match=r"blk\.1\.attn_v_b\.weight .* differs in two reads"):
        restored(source, weights)


# ---- loads ----


@pytest.fixture
def content() -> bytes:
    return gguf_file(metadata("qwen2"), tensors_of("Q4_0", "qwen2"))


@pytest.fixture
def hub(content: bytes, tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        use_hub(patch, server, tmp_path / "home")
        server.repository("org/tiny", {"tiny-Q4_0.gguf": content, "README.md": b""})
        yield server


@each_load
def test_a_file_with_the_stated_digest_is_verified(hub: HubServer, kind: str) -> None:
    with begun(kind, address=ADDRESS) as load:
        wait_groups(load)
        load.wait_checks(WAIT_S)
        assert load.join(WAIT_S)
        assert load.failure is None
        assert load.progress().state is LoadState.EXACT
        assert len(load.manifest.stated_blobs) == 1
        statistics = load.statistics()
        assert statistics is not None
        assert statistics.unverified_bytes == 0


@each_load
@pytest.mark.parametrize("name", ["token_embd.weight", "attn_q.weight", "attn_v.bias", "output_norm.weight"])
def test_another_digest_fails_the_load_with_both(
    hub: HubServer, content: bytes, kind: str, name: str
) -> None:
    (tensor,) = (each for each in tensors_of("Q4_0", "qwen2") if each.name.endswith(name))
    wrong = content.replace(tensor.data, damaged(tensor.data))
    assert wrong != content
    hub.contents[sha256(content)] = wrong
    with begun(kind, address=ADDRESS) as load:
        with pytest.raises(IntegrityError, match="its SHA-256 is") as caught:
            load.wait_checks(WAIT_S)
        assert "tiny-Q4_0.gguf" in caught.value.message
        assert (caught.value.expected, caught.value.got) == (sha256(content), sha256(wrong))
        assert load.join(WAIT_S)


def test_a_changed_name_in_the_metadata_is_found(hub: HubServer, content: bytes) -> None:
    hub.contents[sha256(content)] = content.replace(b"<|start|>", b"<|other|>")
    with begun("thread", address=ADDRESS) as load, pytest.raises(IntegrityError, match="its SHA-256 is"):
        load.wait_checks(WAIT_S)


def test_the_address_of_a_file_is_checked_too(hub: HubServer, content: bytes) -> None:
    with closing(open_model("hf://org/tiny/tiny-Q4_0.gguf")) as source:
        (blob,) = open_artifact(source).blobs
        assert blob.stated is not None
        assert blob.stated.sha256.hex() == sha256(content)
