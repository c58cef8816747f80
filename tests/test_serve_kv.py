"""`teneral kv` and `serve --kv-snapshot`, as a user types them."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
from tests.support.tiny_models import save_tiny
from tests.test_serve import COMPLETION, Server

from teneral.cli import run
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.kv.snapshots.parts import open_snapshot

SYSTEM = "You answer in verse, and never in prose, whatever anybody may ask you to do.\n"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("serve kv")
    save_tiny("llama", directory / "model")
    pack(FileStore(directory / "model"), FileStore(directory / "artifact"))
    return directory / "artifact"


@pytest.fixture(scope="module")
def snapshot(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exported")
    (directory / "system.txt").write_text(SYSTEM)
    arguments = ["kv", "export", str(artifact), str(directory / "kv")]
    given = [f"--prefix=plain={directory}/system.txt", f"--chat-system=chat={directory}/system.txt"]
    assert run([*arguments, *given, "--kv-bytes", "8MiB", "--threads", "1"]) == 0
    return directory / "kv"


def usage(server: Server, prompt: str) -> int:
    status, data = server.ask("POST", "/v1/completions", {**COMPLETION, "prompt": prompt})
    assert status == 200
    return int(json.loads(data)["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_server_that_ends_leaves_what_the_next_one_begins_with(artifact: Path, snapshot: Path) -> None:
    """Both prefixes that were exported stay, and what several requests began with comes to them."""
    for expected in (0, 96):
        server = Server(artifact, "--name", "tiny", "--kv-snapshot", str(snapshot))
        try:
            assert usage(server, "x" * 100) in (0, expected)  # 0: it was there before the snapshot was
            assert usage(server, "x" * 100) == 96
            assert usage(server, SYSTEM + "?") == 64
            assert server.end(signal.SIGTERM) == 0
        finally:
            server.close()
        stored, _ = open_snapshot(FileStore(snapshot))
        assert [prefix.name for prefix in stored.prefixes] == ["plain", "chat", "recent-1"]
        assert len(stored.prefixes[2].blocks) == 6


def test_a_snapshot_is_shown_verified_and_copied(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["kv", "inspect", str(snapshot)]) == 0
    assert "plain" in capsys.readouterr().out
    assert run(["kv", "inspect", str(snapshot), "--json"]) == 0
    pin = json.loads(capsys.readouterr().out)["pin"]
    assert run(["kv", "verify", pin, "--quiet"]) == 0
    assert "intact" in capsys.readouterr().out
    assert run(["kv", "verify", pin, "--quiet", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["problems"], pin.endswith(report["digest"])) == ([], True)
    assert run(["kv", "import", pin, str(tmp_path / "copy"), "--quiet"]) == 0
    assert run(["kv", "import", pin, str(tmp_path / "copy"), "--quiet"]) == 6
    assert "--force" in capsys.readouterr().err
    assert run(["kv", "verify", str(tmp_path / "copy"), "--quiet"]) == 0


def test_what_is_wrong_with_a_snapshot_is_an_exit_code(
    snapshot: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["kv", "inspect", str(tmp_path / "none")]) == 3
    assert run(["kv", "verify", f"{snapshot}@b3:{'0' * 64}", "--quiet"]) == 8
    (tmp_path / "snapshot.json").write_text("{}")
    assert run(["kv", "inspect", str(tmp_path)]) == 9
    assert run(["kv", "export", "model", str(tmp_path / "kv"), "--prefix", "a"]) == 2
    assert run(["kv", "export", "model", str(tmp_path / "kv")]) == 2
    assert "NAME=FILE" in capsys.readouterr().err
