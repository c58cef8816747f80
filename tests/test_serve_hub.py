"""`teneral serve org/name` as a process: from the Hub, from its cache, offline, and where the Hub refuses; and the
other commands that take a model.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.gguf_models import write_gguf
from tests.support.hub_library import run
from tests.support.hub_server import Call, HubServer, Reply, hub_variables
from tests.support.pool_runs import PoolRun, pool_file
from tests.support.proxy_server import ProxyServer
from tests.support.store_certificate import write_certificate
from tests.support.tiny_models import save_tiny, tiny_model
from tests.test_serve import TENERAL, WAIT_S, Server

SETTINGS = {"max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama", tmp_path_factory.mktemp("hub") / "model")


@pytest.fixture(scope="module")
def expected(model: Path) -> str:
    """The answer of the same model in a local folder."""
    return answer(model, {}, name="model")


@pytest.fixture
def hub(model: Path) -> Iterator[HubServer]:
    with HubServer() as server:
        server.repository("org/tiny", model)
        yield server


def answer(
    address: Path | str,
    variables: dict[str, str],
    *flags: str,
    name: str = "org/tiny",
    prompt: str | list[int] = "hello",
    log: list[Any] | None = None,
) -> str:
    """The text that a server of the model gives to a client that asks for it by this name. Its timeline is put into
    the `log`.
    """
    # Of variables of their own the class takes it that they are a platform's.
    server = Server(
        address, *flags, program=("/usr/bin/env", *(f"{k}={v}" for k, v in variables.items()), *TENERAL)
    )
    try:
        status, data = server.ask("POST", "/v1/completions", {"model": name, "prompt": prompt, **SETTINGS})
        assert status == 200, data
        listed = json.loads(server.ask("GET", "/v1/models")[1])["data"]
        assert [each["id"] for each in listed] == [name]
        if log is not None:
            log.append(json.loads(server.ask("GET", "/timeline")[1]))
        text = json.loads(data)["choices"][0]["text"]
        assert isinstance(text, str)
        return text
    finally:
        server.close()


def failure(address: str, variables: dict[str, str], *flags: str) -> str:
    """The message of a server that ends by itself."""
    result = subprocess.run(
        [*TENERAL, "serve", address, "--port", "0", *flags],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert result.returncode != 0
    assert "Traceback" not in result.stderr
    return result.stderr


def teneral(variables: dict[str, str], *arguments: str, status: int = 0) -> str:
    """The output of the command."""
    result = subprocess.run(
        [*TENERAL, *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert result.returncode == status, result.stderr
    return result.stdout + result.stderr


def test_a_model_streams_from_the_hub_under_its_own_name(
    hub: HubServer, expected: str, tmp_path: Path
) -> None:
    assert answer("org/tiny", hub_variables(hub, tmp_path)) == expected
    assert not hub.calls_of("hub", "/resolve/main/")
    assert hub.calls_of("content"), "the weights"
    assert not (tmp_path / "hub").exists(), "nothing is downloaded"


def test_a_loader_of_its_own_and_a_pinned_commit_give_the_same(
    hub: HubServer, expected: str, tmp_path: Path
) -> None:
    repository = hub.repositories["org/tiny"]
    commit = repository.refs["main"]
    repository.commit({"README.md": b"the model has moved"})
    variables = hub_variables(hub, tmp_path)
    assert answer(f"org/tiny@{commit}", variables, "--loader", "process") == expected
    assert answer(f"hf://org/tiny@{commit}", variables, "--loader", "thread") == expected
    assert "holds neither manifest.json nor safetensors" in failure("org/tiny", variables)


def test_a_model_in_the_cache_is_mapped_without_the_hub(
    hub: HubServer, expected: str, tmp_path: Path
) -> None:
    variables = hub_variables(hub, tmp_path)
    run("hub.snapshot_download('org/tiny')", hub, tmp_path)
    hub.calls.clear()
    log: list[Any] = []
    assert answer("org/tiny", variables, log=log) == expected
    assert answer("org/tiny@main", variables | {"HF_HUB_OFFLINE": "1"}) == expected
    assert not hub.calls
    assert '"mapped": true' in json.dumps(log)


def test_behind_a_proxy_a_model_streams_through_it_and_its_password_is_not_logged(
    hub: HubServer, expected: str, tmp_path: Path
) -> None:
    credentials = "Basic " + base64.b64encode(b"user:secret-word").decode()
    certificate = write_certificate(tmp_path / "authority.pem")
    with ProxyServer(certificate=certificate, credentials=credentials) as proxy:
        hub.content_url = f"https://{proxy.lead('content', hub.content_url)}"
        variables = hub_variables(hub, tmp_path / "home") | {
            "HF_ENDPOINT": f"https://{proxy.lead('hub', hub.url)}",
            "HTTPS_PROXY": proxy.url.replace("://", "://user:secret-word@"),
            "SSL_CERT_FILE": str(certificate),
        }
        assert answer("org/tiny", variables) == expected
        assert {call.target for call in proxy.calls} == {
            "hub.store.example:443",
            "content.store.example:443",
        }
        proxy.credentials = "Basic others"
        message = failure("org/tiny", variables, "--log-level", "debug")
    assert "asks for other credentials" in message
    assert "secret-word" not in message
    assert credentials not in message


def test_offline_a_model_that_is_not_in_the_cache_ends_the_start(hub: HubServer, tmp_path: Path) -> None:
    message = failure("org/tiny", hub_variables(hub, tmp_path) | {"HF_HUB_OFFLINE": "1"})
    assert "HF_HUB_OFFLINE is set" in message
    assert "hf download org/tiny" in message
    assert not hub.calls


def test_a_gated_model_needs_a_token_of_a_reader(hub: HubServer, expected: str, tmp_path: Path) -> None:
    hub.tokens, hub.repositories["org/tiny"].readers = {"hf_good"}, {"hf_good"}
    message = failure("org/tiny", hub_variables(hub, tmp_path))
    assert "org/tiny is gated" in message
    assert f"{hub.url}/org/tiny" in message
    assert answer("org/tiny", hub_variables(hub, tmp_path) | {"HF_TOKEN": "hf_good"}) == expected


def test_neither_a_folder_nor_a_model_of_the_hub_says_both(hub: HubServer, tmp_path: Path) -> None:
    message = failure("org/absent", hub_variables(hub, tmp_path))
    assert "there is no model org/absent on the Hub" in message
    assert "no folder org/absent here" in message


def test_addresses_that_expire_during_a_load_are_renewed(
    hub: HubServer, expected: str, tmp_path: Path
) -> None:
    def expire(call: Call) -> Reply | None:
        if call.server == "content" and len(hub.calls_of("content")) % 3 == 0:
            return 403, {}, b"Request has expired"
        return None

    hub.fault = expire
    assert answer("org/tiny", hub_variables(hub, tmp_path)) == expected
    assert len(hub.calls_of("hub", "model.safetensors")) > 1


@pytest.mark.parametrize("loader", ["thread", "process"])
def test_weights_with_another_digest_than_the_hubs_end_the_server(
    hub: HubServer, model: Path, expected: str, tmp_path: Path, loader: str
) -> None:
    content = (model / "model.safetensors").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    hub.contents[digest] = content[:-1] + bytes([content[-1] ^ 1])
    message = failure("org/tiny", hub_variables(hub, tmp_path), "--loader", loader)
    assert "model.safetensors in hf://org/tiny@" in message
    assert f"its store states {digest}" in message
    variables = hub_variables(hub, tmp_path)
    assert answer("org/tiny", variables, "--loader", loader, "--no-verify-files") != ""


def test_a_gguf_file_is_chosen_by_its_quantisation(hub: HubServer, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny-F32.gguf", tiny_model("llama"))
    write_gguf(tmp_path / "tiny-Q8_0.gguf", tiny_model("llama"), "Q8_0")
    files = {path.name: path.read_bytes() for path in tmp_path.glob("*.gguf")}
    hub.repository("org/gguf", files)
    variables = hub_variables(hub, tmp_path / "home")
    local = answer(tmp_path / "tiny-Q8_0.gguf", {}, name="tiny-Q8_0.gguf", prompt=[65, 66])
    assert answer("org/gguf:Q8_0", variables, name="org/gguf", prompt=[65, 66]) == local
    message = failure("org/gguf:Q4_K_M", variables)
    assert "has no GGUF file of the quantisation Q4_K_M" in message
    assert "It has F32, Q8_0." in message
    content = files["tiny-Q8_0.gguf"]
    digest = hashlib.sha256(content).hexdigest()
    hub.contents[digest] = content[:-1] + bytes([content[-1] ^ 1])
    message = failure("org/gguf:Q8_0", variables)
    assert "tiny-Q8_0.gguf is damaged" in message
    assert f"its store states {digest}" in message


def test_the_other_commands_take_a_gguf_file_by_its_quantisation(hub: HubServer, tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny-Q8_0.gguf", tiny_model("llama"), "Q8_0")
    hub.repository("org/gguf", {"tiny-Q8_0.gguf": (tmp_path / "tiny-Q8_0.gguf").read_bytes()})
    variables = hub_variables(hub, tmp_path / "home")
    assert "llama" in teneral(variables, "inspect", "org/gguf:Q8_0", "--json")
    teneral(variables, "verify", "hf://org/gguf:Q8_0", "--quiet")
    teneral(variables, "pack", "org/gguf:q8_0", str(tmp_path / "packed"), "--quiet")
    teneral(variables, "verify", str(tmp_path / "packed"), "--quiet")

    body = {"model": "org/gguf", "prompt": [65, 66], **SETTINGS}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    out = tmp_path / "out.jsonl"
    teneral(variables, "batch", "org/gguf:Q8_0", str(tmp_path / "in.jsonl"), str(out), "--quiet")
    (record,) = (json.loads(text) for text in out.read_text().splitlines())
    assert record["response"]["body"]["model"] == "org/gguf"

    tables = '[models."org/gguf"]\nsource = "hf://org/gguf:Q8_0"\n'
    with PoolRun(
        tmp_path, pool_file(tables, node='[node]\nmemory = "8GiB"\n'), environment=variables
    ) as pool:
        reply = pool.ask("POST", "/v1/completions", body)
        assert (reply.status, reply.json["model"]) == (200, "org/gguf"), pool.log
    assert reply.text == record["response"]["body"]["choices"][0]["text"]


def test_a_pool_and_a_batch_name_a_model_of_the_hub_as_it_does(
    hub: HubServer, expected: str, tmp_path: Path
) -> None:
    variables = hub_variables(hub, tmp_path / "home")
    tables = '[models."org/tiny"]\nsource = "hf://org/tiny"\n'
    with PoolRun(
        tmp_path, pool_file(tables, node='[node]\nmemory = "8GiB"\n'), environment=variables
    ) as pool:
        reply = pool.ask("POST", "/v1/completions", {"model": "org/tiny", "prompt": "hello", **SETTINGS})
        assert (reply.status, reply.text, reply.json["model"]) == (200, expected, "org/tiny"), pool.log
        assert [each["id"] for each in pool.ask("GET", "/v1/models").json["data"]] == ["org/tiny"]

    body = {"model": "org/tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line) + "\n")
    teneral(
        variables, "batch", "org/tiny", str(tmp_path / "in.jsonl"), str(tmp_path / "out.jsonl"), "--quiet"
    )
    (record,) = (json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines())
    assert record["response"]["body"]["model"] == "org/tiny"


def test_the_other_commands_take_names_of_the_hub(hub: HubServer, model: Path, tmp_path: Path) -> None:
    def command(*arguments: str, status: int = 0) -> str:
        return teneral(hub_variables(hub, tmp_path / "home"), *arguments, status=status)

    command("pack", "org/tiny", str(tmp_path / "packed"), "--quiet")
    hub.repository("org/packed", tmp_path / "packed")
    command("verify", "org/packed", "--quiet")
    command("pack", str(model), str(tmp_path / "tuned"), "--base", "org/packed", "--quiet")
    assert "llama" in command("inspect", str(tmp_path / "tuned"), "--base", "org/packed", "--json")
    assert "org/tiny@" in command("inspect", "org/tiny")
    assert "there is no model org/absent on the Hub" in command("inspect", "org/absent", status=3)
    assert "have the SHA-256 that their store states" in command("verify", "org/tiny")
    content = (model / "model.safetensors").read_bytes()
    digest = hashlib.sha256(content).hexdigest()
    hub.contents[digest] = content[:-1] + bytes([content[-1] ^ 1])
    for arguments in (("verify", "org/tiny"), ("pack", "org/tiny", str(tmp_path / "damaged"))):
        assert f"its store states {digest}" in command(*arguments, "--quiet", status=8)
    assert not list((tmp_path / "damaged").rglob("*.json"))
    command("pack", "org/tiny", str(tmp_path / "damaged"), "--quiet", "--no-verify-files")
