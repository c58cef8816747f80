"""The tensors for vLLM's models: every name, bit for bit, from any address; and the log."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import safetensors.torch
import torch
from tests.support.store_server import StoreServer

from teneral.handlers.contrib.vllm.settings import LoaderSettings, parse_settings
from teneral.handlers.contrib.vllm.weight_stream import WeightStream
from teneral.loader.errors import CheckpointError, IntegrityError, NotFoundError, UsageError
from teneral.loader.load.options import MIB
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.content import Base
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.plan import TierOptions

SMALL = LoaderSettings(memory_bytes=MIB)


def model(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)

    def weights(*shape: int) -> torch.Tensor:
        return (0.02 * torch.randn(shape, generator=generator)).to(dtype)

    tensors = {"model.embed_tokens.weight": weights(300, 128), "model.norm.weight": weights(128)}
    for number in range(4):
        tensors[f"model.layers.{number}.mlp.up_proj.weight"] = weights(512, 128)
        tensors[f"model.layers.{number}.mlp.down_proj.weight"] = weights(128, 512)
        tensors[f"model.layers.{number}.input_layernorm.weight"] = weights(128)
    tensors["model.layers.0.mlp.empty"] = torch.empty(0, 4, dtype=dtype)
    tensors["model.layers.0.mlp.scale"] = torch.tensor(3.5, dtype=dtype)
    return tensors


def save(tensors: dict[str, torch.Tensor], folder: Path) -> Path:
    folder.mkdir()
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def taken(stream: WeightStream) -> dict[str, torch.Tensor]:
    """Copies, as vLLM makes them. A name that comes twice is an error."""
    copies: dict[str, torch.Tensor] = {}
    for name, tensor in stream:
        assert name not in copies
        copies[name] = tensor.clone()
    return copies


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (got[name].dtype, got[name].shape) == (tensor.dtype, tensor.shape), name
        assert got[name].flatten().view(torch.uint8).equal(tensor.flatten().view(torch.uint8)), name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model(torch.bfloat16), tmp_path_factory.mktemp("plain") / "model")


@pytest.fixture(scope="module")
def pin(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A packed artifact's pinned address."""
    return pack(FileStore(folder), FileStore(tmp_path_factory.mktemp("packed"))).pin


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_an_artifact_gives_every_tensor_bit_for_bit(tmp_path, dtype):
    tensors = model(dtype)
    packed = pack(FileStore(save(tensors, tmp_path / "plain")), FileStore(tmp_path / "packed"))
    assert_same(taken(WeightStream(packed.pin, SMALL)), tensors)


@pytest.mark.parametrize("num_tiers", [1, 3])
def test_however_many_tiers_it_has_only_exact_values_come(folder, tmp_path, num_tiers):
    tiers = TierOptions(draft_bits=7) if num_tiers == 1 else TierOptions(sketch_bits=1)
    packed = pack(FileStore(folder), FileStore(tmp_path), tiers=tiers)
    assert_same(taken(WeightStream(packed.pin, SMALL)), model(torch.bfloat16))


def test_tied_tensors_come_under_all_their_names(tmp_path):
    tensors = model(torch.bfloat16)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    packed = pack(FileStore(save(tensors, tmp_path / "plain")), FileStore(tmp_path / "packed"))
    assert_same(taken(WeightStream(packed.pin, SMALL)), tensors)


def test_plain_safetensors_are_read_too_and_logged_as_unverified(folder):
    stream = WeightStream(str(folder), SMALL)
    assert_same(taken(stream), model(torch.bfloat16))
    assert "NOT verified" in stream.summary()
    assert stream.statistics.unverified_bytes == stream.statistics.stored_bytes > 0


def test_tensors_come_in_the_order_of_a_forward_pass(pin):
    names = [name for name, _ in WeightStream(pin, SMALL)]
    assert names[0] == "model.embed_tokens.weight"
    assert names[-1] == "model.norm.weight"
    assert [name.split(".")[2] for name in names[1:-1]] == sorted(name.split(".")[2] for name in names[1:-1])


def test_an_artifact_is_read_over_http_once_and_the_summary_says_what_it_took(pin):
    packed, _, digits = pin.partition("@b3:")
    with StoreServer(Path(packed).parent) as server:
        stream = WeightStream(f"{server.url}/{Path(packed).name}@b3:{digits}", SMALL)
        assert_same(taken(stream), model(torch.bfloat16))
        weights = [entry for entry in server.log() if entry.key.endswith(".bin")]
    assert sum(entry.sent_bytes for entry in weights) == stream.statistics.stored_bytes
    assert f"verified by b3:{digits[:12]}" in stream.summary()
    assert "/s)" in stream.summary()


def test_another_artifact_than_the_pinned_one_is_refused(pin):
    with pytest.raises(IntegrityError):
        taken(WeightStream(pin[:-64] + "0" * 64, SMALL))


def test_a_flipped_bit_is_found_before_its_tensor_is_given(pin, tmp_path):
    packed = tmp_path / "copy"
    shutil.copytree(pin.partition("@b3:")[0], packed)
    blob = next(path for path in packed.rglob("refine-*.bin"))
    data = bytearray(blob.read_bytes())
    data[-20] ^= 1
    blob.write_bytes(data)
    given = []
    with pytest.raises(IntegrityError, match="wrong digest") as caught:
        given.extend(name for name, _ in WeightStream(str(packed), SMALL))
    assert "model.norm.weight" not in given
    assert "teneral verify" in caught.value.hint


def test_a_missing_model_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises((NotFoundError, CheckpointError)) as caught:
        taken(WeightStream(str(tmp_path / "nothing"), SMALL))
    assert caught.value.hint


def test_leaving_early_ends_all_threads(pin):
    before = set(threading.enumerate())
    stream = iter(WeightStream(pin, SMALL))
    next(stream)
    stream.close()
    assert not set(threading.enumerate()) - before


def test_the_second_reader_of_a_node_reads_its_cache(pin, tmp_path):
    settings = LoaderSettings(memory_bytes=MIB, cache_dir=str(tmp_path))
    first = WeightStream(pin, settings)
    taken(first)
    for thread in _cache_writers():
        thread.join()
    second = WeightStream(pin, settings)
    assert_same(taken(second), model(torch.bfloat16))
    assert first.statistics.cached_bytes == 0
    assert second.statistics.cached_bytes == second.statistics.stored_bytes
    assert "from this node's cache" in second.summary()


def _cache_writers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "teneral-cache"]


MEASURE = """
import re, sys
from pathlib import Path
from teneral.handlers.contrib.vllm.settings import LoaderSettings
from teneral.handlers.contrib.vllm.weight_stream import WeightStream

def peak_bytes():
    return 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def resident_bytes():
    return 1024 * int(re.search(r"VmRSS:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

def take(address, settings):
    return sum(tensor.nbytes for _, tensor in WeightStream(address, settings))

address, memory_bytes = sys.argv[1], int(sys.argv[2])
settings = LoaderSettings(memory_bytes=memory_bytes)
take(sys.argv[3], settings)  # what is imported on the way
Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
before = resident_bytes()
total = take(address, settings)
print(total, peak_bytes() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is Linux' to tell")
def test_memory_stays_bounded_however_large_the_model_is(tmp_path, pin):
    block = torch.randn(2048, 2048).bfloat16()  # 8 MiB
    tensors = {f"model.layers.{number}.mlp.up_proj.weight": block.roll(number + 1) for number in range(32)}
    packed = pack(FileStore(save(tensors, tmp_path / "plain")), FileStore(tmp_path / "packed"))
    result = subprocess.run(
        [sys.executable, "-c", MEASURE, packed.pin, str(32 * MIB), pin],
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    total_bytes, peak_bytes = map(int, result.stdout.split())
    assert total_bytes == 32 * block.nbytes == 256 * MIB
    # Two windows of 16 MiB, the bytes on their way into each, and what the threads decode in.
    assert peak_bytes < 96 * MIB


def test_invalid_settings_are_refused_by_name():
    assert parse_settings(None) == LoaderSettings()
    assert parse_settings({"artifact": "s3://bucket/model", "share": False}).artifact == "s3://bucket/model"
    with pytest.raises(UsageError, match="'artefact'") as caught:
        parse_settings({"artefact": "s3://bucket/model"})
    assert "artifact" in caught.value.hint
    with pytest.raises(UsageError, match="share must be a bool"):
        parse_settings({"share": 1})
    with pytest.raises(UsageError, match="connections must be a int, not True"):
        parse_settings({"connections": True})
    with pytest.raises(UsageError, match="memory_bytes must be between"):
        parse_settings({"memory_bytes": 5})
    with pytest.raises(UsageError, match="connections must be between"):
        parse_settings({"connections": 0})


@pytest.mark.parametrize("memory_bytes", [MIB, 64 * MIB])
def test_a_fine_tune_streams_over_its_base(tmp_path, memory_bytes):
    base = model(torch.bfloat16)
    tuned = {name: tensor * 1.01 if "layers.1" in name else tensor for name, tensor in base.items()}
    pack(FileStore(save(base, tmp_path / "plain")), FileStore(tmp_path / "base"))
    pack(
        FileStore(save(tuned, tmp_path / "tuned")),
        FileStore(tmp_path / "differences"),
        base=Base(FileStore(tmp_path / "base")),
    )
    settings = parse_settings({"base": str(tmp_path / "base"), "memory_bytes": memory_bytes})
    assert_same(taken(WeightStream(str(tmp_path / "differences"), settings)), tuned)
    with pytest.raises(UsageError, match="only the differences to"):
        taken(WeightStream(str(tmp_path / "differences"), SMALL))
