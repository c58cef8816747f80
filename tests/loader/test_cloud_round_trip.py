"""An artifact packed into Cloud Storage and into Blob Storage, verified there, and unpacked: by the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.az_server import ACCOUNT, AzServer, use_az_account
from tests.support.checkpoints import llama_contents, model_objects
from tests.support.gs_server import GsServer, use_gs_account
from tests.support.load import patience_s


@pytest.mark.parametrize("kind", ["gs", "az"])
def test_a_packed_model_comes_back(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    objects = model_objects(llama_contents())
    for name, data in objects.items():
        (tmp_path / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / name).write_bytes(data)
    with AzServer() if kind == "az" else GsServer() as server:
        server.objects["models"] = {}
        if isinstance(server, AzServer):
            use_az_account(monkeypatch, server)
            address, endpoint = f"az://{ACCOUNT}/models/chat", server.endpoint
        else:
            use_gs_account(monkeypatch, server)
            address, endpoint = "gs://models/chat", server.url
        for arguments in (
            ["pack", tmp_path / "model", address],
            ["verify", address],
            ["unpack", address, tmp_path / "back"],
        ):
            command = [sys.executable, "-m", "teneral", *map(str, arguments), "--endpoint-url", endpoint]
            done = subprocess.run(
                command, capture_output=True, text=True, check=False, timeout=patience_s(60)
            )
            assert done.returncode == 0, done.stderr
    for name, data in objects.items():
        if not name.endswith((".safetensors", "index.json")):
            assert (tmp_path / "back" / name).read_bytes() == data
    assert list((tmp_path / "back").glob("*.safetensors"))
