"""The tests' own Hub, judged by Hugging Face's library."""

from __future__ import annotations

from pathlib import Path

from tests.support.hub_library import failure, run
from tests.support.hub_server import HubServer

FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model-00001-of-00002.safetensors": bytes(70_000),
    "model-00002-of-00002.safetensors": b"x" * 50_000,
    "sub/a b+c.json": b"{}",
    "tokenizer.json": b"{}",
}


def test_the_librarys_snapshot_is_what_was_committed(tmp_path: Path) -> None:
    with HubServer() as server:
        commit = server.repository("org/tiny", FILES).refs["main"]
        folder = Path(run("hub.snapshot_download('org/tiny')", server, tmp_path))
        assert folder == tmp_path / "hub" / "models--org--tiny" / "snapshots" / commit
        assert {name: (folder / name).read_bytes() for name in FILES} == FILES


def test_the_library_lists_the_files_and_finds_their_addresses(tmp_path: Path) -> None:
    with HubServer() as server:
        server.repository("org/tiny", FILES)
        assert run("hub.list_repo_files('org/tiny')", server, tmp_path) == sorted(FILES)
        url = run("hub.hf_hub_url('org/tiny', 'config.json')", server, tmp_path)
        assert url == f"{server.url}/org/tiny/resolve/main/config.json"
        size = run(
            "hub.get_hf_file_metadata(hub.hf_hub_url('org/tiny', 'tokenizer.json')).size", server, tmp_path
        )
        assert size == 2


def test_the_library_reads_gated_models_with_a_token_that_may(tmp_path: Path) -> None:
    with HubServer() as server:
        repository = server.repository("org/tiny", FILES)
        server.tokens, repository.readers = {"hf_good", "hf_other"}, {"hf_good"}
        program = "open(hub.hf_hub_download('org/tiny', 'config.json')).read()"
        assert run(program, server, tmp_path / "good", HF_TOKEN="hf_good") == FILES["config.json"].decode()
        assert "GatedRepoError" in failure(program, server, tmp_path / "other", HF_TOKEN="hf_other")
        assert "Invalid credentials" in failure(program, server, tmp_path / "bad", HF_TOKEN="hf_bad")
