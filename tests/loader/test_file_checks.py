"""Plain files are compared with the SHA-256 that their store states, before the load is exact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest
from tests.loader.test_mapped_load import padded
from tests.support.checkpoints import llama_contents, model_objects
from tests.support.hub_server import HubServer, use_hub
from tests.support.paced import WAIT_S
from tests.support.weight_loads import start_process_load

import teneral
from teneral.loader.artifact import open_artifact, open_model
from teneral.loader.errors import IntegrityError
from teneral.loader.load.accounting import LoadState
from teneral.loader.load.load import WeightLoad
from teneral.loader.load.options import LoadOptions
from teneral.loader.load.process_load import ProcessLoad

FILES = {
    name: padded(data) if name.endswith(".safetensors") else data
    for name, data in model_objects(llama_contents(num_layers=2), num_shards=2).items()
}
SHARD = min(name for name in FILES if name.endswith(".safetensors"))
SHA256 = hashlib.sha256(FILES[SHARD]).hexdigest()
each_load = pytest.mark.parametrize("kind", ["thread", "process"])


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        use_hub(patch, server, tmp_path / "home")
        server.repository("org/tiny", FILES)
        yield server


def damaged(content: bytes) -> bytes:
    """With another last bit."""
    return content[:-1] + bytes([content[-1] ^ 1])


@contextmanager
def begun(
    kind: str, options: LoadOptions | None = None, *, address: str = "org/tiny"
) -> Iterator[WeightLoad | ProcessLoad]:
    with ExitStack() as stack:
        load: WeightLoad | ProcessLoad
        if kind == "process":
            load = start_process_load(address, options=options)
        else:
            source = stack.enter_context(closing(open_model(address)))
            load = WeightLoad(source, open_artifact(source), options=options)
            load.start()
        yield stack.enter_context(load)


def wait_groups(load: WeightLoad | ProcessLoad) -> None:
    for group in load.manifest.groups:
        load.wait(group.index, timeout_s=WAIT_S)


@each_load
def test_files_with_the_stated_digest_are_verified(hub: HubServer, kind: str) -> None:
    with begun(kind) as load:
        wait_groups(load)
        load.wait_checks(WAIT_S)
        assert load.join(WAIT_S)
        assert load.failure is None
        progress, statistics = load.progress(), load.statistics()
        assert (progress.state, progress.unchecked_files) == (LoadState.EXACT, 0)
        assert statistics is not None
        assert statistics.unverified_bytes == 0
        assert statistics.verify.size_bytes == statistics.stored_bytes > 0


@each_load
def test_another_digest_fails_the_load_with_both(hub: HubServer, kind: str) -> None:
    hub.contents[SHA256] = damaged(FILES[SHARD])
    with begun(kind) as load:
        with pytest.raises(IntegrityError, match="its SHA-256 is") as caught:
            load.wait_checks(WAIT_S)
        assert SHARD in caught.value.message
        assert caught.value.expected == SHA256
        assert caught.value.got == hashlib.sha256(hub.contents[SHA256]).hexdigest()
        assert load.join(WAIT_S)
        assert isinstance(load.failure, IntegrityError)


@each_load
def test_turned_off_nothing_is_compared(hub: HubServer, kind: str) -> None:
    hub.contents[SHA256] = damaged(FILES[SHARD])
    with begun(kind, LoadOptions(verify_files=False)) as load:
        wait_groups(load)
        load.wait_checks(WAIT_S)
        assert load.join(WAIT_S)
        statistics = load.statistics()
        assert statistics is not None
        assert statistics.unverified_bytes == statistics.stored_bytes > 0


def test_a_header_that_is_another_one_when_it_is_read_again_is_refused(hub: HubServer) -> None:
    hub.contents[SHA256] = FILES[SHARD].replace(b"[300, 64]", b"[64, 300]", 1)
    with closing(open_model("org/tiny")) as source:
        manifest = open_artifact(source)
    hub.contents[SHA256] = FILES[SHARD]
    with closing(open_model("org/tiny")) as source, WeightLoad(source, manifest) as load:
        load.start()
        with pytest.raises(IntegrityError, match="its header differs in two reads"):
            load.wait_checks(WAIT_S)


def test_a_load_that_is_closed_early_waits_for_no_check(hub: HubServer) -> None:
    with begun("thread") as load:
        pass
    assert load.progress().state in (LoadState.CANCELLED, LoadState.EXACT)


def test_load_file_and_its_like_raise_the_mismatch(hub: HubServer) -> None:
    pytest.importorskip("torch")
    hub.contents[SHA256] = damaged(FILES[SHARD])
    with pytest.raises(IntegrityError, match="its SHA-256 is"):
        teneral.load_file("org/tiny")
