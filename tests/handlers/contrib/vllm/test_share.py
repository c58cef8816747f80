"""Workers that read a model once between them: two real processes with torch's own process groups."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from tests.support.artifacts import build_artifact
from tests.support.load import patience_s
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny

from teneral.handlers.contrib.vllm.weight_stream import WeightStream, assign_groups
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

WORKER = """
import json, sys
import torch, torch.distributed as dist
from blake3 import blake3
from teneral.handlers.contrib.vllm.settings import LoaderSettings
from teneral.handlers.contrib.vllm.weight_stream import Peers
from teneral.handlers.contrib.vllm.weight_stream import WeightStream
from teneral.loader.errors import TeneralError

rank, size, store, address = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4]
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=size)
group = dist.new_group(list(range(size)), backend="gloo")
peers = Peers(rank, tuple(range(size)), group, group, torch.device("cpu"))
stream = WeightStream(address, LoaderSettings(memory_bytes=1 << 20), peers=peers)
try:
    with torch.device("meta"):  # vLLM loads with another default device, too
        digests = {
            name: blake3(tensor.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
            for name, tensor in stream
        }
    print(json.dumps({"digests": digests, "bytes": stream.statistics.stored_bytes, "reports": stream.summary()}))
except TeneralError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
dist.barrier()
dist.destroy_process_group()
"""


def run_workers(address: str, tmp_path: Path, num_workers: int) -> list[dict]:
    """What each of them says. They wait for each other at their end, so none may leave the others alone."""
    command = [sys.executable, "-W", "ignore", "-c", WORKER]
    workers = [
        subprocess.Popen(
            [*command, str(rank), str(num_workers), str(tmp_path / "rendezvous"), address],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(num_workers)
    ]
    reports = [worker.communicate(timeout=patience_s(100)) for worker in workers]
    assert [worker.returncode for worker in workers] == [0] * num_workers, reports
    return [json.loads(output.splitlines()[-1]) for output, _ in reports]


@pytest.fixture(scope="module")
def pin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = save_tiny("llama", tmp_path_factory.mktemp("plain"), hidden_size=128)
    return pack(FileStore(folder), FileStore(tmp_path_factory.mktemp("packed"))).pin


def test_all_have_all_tensors_and_the_store_is_read_once(pin, tmp_path):
    packed, _, digits = pin.partition("@b3:")
    expected = {name: _digest(tensor) for name, tensor in WeightStream(pin)}
    with StoreServer(Path(packed).parent) as server:
        reports = run_workers(f"{server.url}/{Path(packed).name}@b3:{digits}", tmp_path, 2)
        sent = [entry.sent_bytes for entry in server.log() if entry.key.endswith(".bin")]
    assert [each["digests"] for each in reports] == [expected, expected]
    stored_bytes = sum(part.stat().st_size for part in Path(packed).rglob("*.bin"))
    assert 0 <= stored_bytes - sum(sent) < 1000  # but for what aligns the parts
    assert sum(each["bytes"] for each in reports) == sum(sent)
    assert all(0.3 < each["bytes"] / stored_bytes < 0.7 for each in reports)
    assert all("this worker's share of 2" in each["reports"] for each in reports)


def test_a_read_error_of_one_is_an_error_of_all_and_none_waits_for_ever(pin, tmp_path):
    packed = Path(pin.partition("@b3:")[0])
    blob = next(path for path in packed.rglob("draft-*.bin"))
    whole = blob.read_bytes()
    blob.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])  # in the first group
    try:
        reports = run_workers(str(packed), tmp_path, 2)
    finally:
        blob.write_bytes(whole)
    assert sorted(each["error"] for each in reports) == ["IntegrityError", "LoadError"]
    assert all("wrong digest" in each["message"] for each in reports)
    other = next(each["message"] for each in reports if each["error"] == "LoadError")
    assert "worker 0, which reads embed for all" in other


@pytest.mark.parametrize("num_workers", [1, 2, 3, 8])
def test_the_groups_are_dealt_out_evenly_and_neighbours_to_different_workers(num_workers):
    layers = [(f"layers.{number}", {f"w{number}": ("BF16", (64, 64))}) for number in range(24)]
    manifest = build_artifact(layers).manifest
    readers = assign_groups(manifest, num_workers)
    assert sorted(readers) == sorted(list(range(num_workers)) * (24 // num_workers))
    if num_workers > 1:
        assert all(one != other for one, other in pairwise(readers))


def _digest(tensor) -> str:
    import torch
    from blake3 import blake3

    return blake3(tensor.contiguous().flatten().view(torch.uint8).numpy()).hexdigest()
