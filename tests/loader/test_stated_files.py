"""`verify` and `pack` compare plain files with the SHA-256 that their store states."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from tests.loader.test_file_checks import FILES, SHA256, SHARD, damaged
from tests.loader.test_gguf import tensors_of
from tests.support.gguf_files import gguf_file, metadata
from tests.support.hub_library import run
from tests.support.hub_server import Call, HubServer, Reply, use_hub
from tests.support.memory_store import MemoryStore

from teneral.loader.artifact import open_artifact, open_model
from teneral.loader.errors import IntegrityError
from teneral.loader.tools import stated_files
from teneral.loader.tools.pack.pack import pack
from teneral.loader.tools.pack.quantize_plan import QuantizeOptions
from teneral.loader.tools.stated_files import EarlierRead, RecordedReads, StoredFile, compare_file
from teneral.loader.tools.verify import VerifyReport, verify

GGUF = gguf_file(metadata(), tensors_of("Q4_0"))
GGUF_SHA256 = hashlib.sha256(GGUF).hexdigest()
each_model = pytest.mark.parametrize(
    ("address", "content", "name"),
    [("org/tiny", FILES[SHARD], SHARD), ("org/gguf:Q4_0", GGUF, "tiny-Q4_0.gguf")],
    ids=["safetensors", "gguf"],
)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        use_hub(patch, server, tmp_path / "home")
        patch.setattr(stated_files, "RANGE_BYTES", 1 << 14)
        server.repository("org/tiny", FILES)
        server.repository("org/gguf", {"tiny-Q4_0.gguf": GGUF})
        yield server


def verified(address: str) -> VerifyReport:
    with closing(open_model(address)) as source:
        return verify(source)


def packed(address: str, store: MemoryStore, **options: object) -> RecordedReads:
    reads = RecordedReads()
    with closing(open_model(address, around=reads.around)) as source:
        pack(source, store, reads=reads, **options)  # type: ignore[arg-type]
    return reads


def damage(hub: HubServer, content: bytes) -> str:
    """Have the content network give other bytes from now on; their SHA-256."""
    wrong = damaged(content)
    hub.contents[hashlib.sha256(content).hexdigest()] = wrong
    return hashlib.sha256(wrong).hexdigest()


@each_model
def test_files_with_the_stated_digest_are_intact(
    hub: HubServer, address: str, content: bytes, name: str
) -> None:
    report = verified(address)
    assert report.ok
    assert report.is_stated
    assert "intact" in report.render()
    assert "have the SHA-256 that their store states" in report.render()


@each_model
def test_verify_names_a_file_with_another_digest_and_both(
    hub: HubServer, address: str, content: bytes, name: str
) -> None:
    got = damage(hub, content)
    report = verified(address)
    (problem,) = report.problems
    assert problem.where.startswith(f"{name} in hf://org/")
    expected = hashlib.sha256(content).hexdigest()
    assert f"its SHA-256 is {got}, and its store states {expected}" in str(problem)
    assert "damaged" in report.render().splitlines()[0]


def test_in_the_hubs_cache_files_are_compared_with_their_blobs_names(hub: HubServer, tmp_path: Path) -> None:
    for name in ("org/tiny", "org/gguf"):
        run(f"hub.snapshot_download('{name}')", hub, tmp_path / "home")
    hub.calls.clear()
    for address, digest in (("org/tiny", SHA256), ("org/gguf:Q4_0", GGUF_SHA256)):
        assert verified(address).is_stated
        (blob,) = (tmp_path / "home" / "hub").rglob(digest)
        blob.chmod(0o644)
        blob.write_bytes(damaged(blob.read_bytes()))
        (problem,) = verified(address).problems
        assert f"its store states {digest}" in problem.message
    assert not hub.calls


@each_model
def test_a_model_with_the_stated_digests_is_packed(
    hub: HubServer, address: str, content: bytes, name: str
) -> None:
    store = MemoryStore()
    reads = packed(address, store)
    assert reads.total_bytes >= len(content)
    assert verify(store).ok
    plain = MemoryStore()
    with closing(open_model(address)) as source:
        pack(source, plain)
    assert open_artifact(store).digest == open_artifact(plain).digest


@each_model
@pytest.mark.parametrize("quantize", [None, QuantizeOptions(8)])
def test_pack_refuses_a_file_with_another_digest_and_leaves_nothing(
    hub: HubServer, address: str, content: bytes, name: str, quantize: QuantizeOptions | None
) -> None:
    if quantize is not None and "gguf" in address:
        pytest.skip("quantised only from floats")
    got, store = damage(hub, content), MemoryStore()
    with pytest.raises(IntegrityError, match="its SHA-256 is") as caught:
        packed(address, store, quantize=quantize)
    assert name in caught.value.message
    assert (caught.value.expected, caught.value.got) == (hashlib.sha256(content).hexdigest(), got)
    assert not list(store.list())


@each_model
def test_pack_finds_bits_that_flipped_in_the_first_of_its_reads(
    hub: HubServer, address: str, content: bytes, name: str
) -> None:
    wrong, store = damaged(content), MemoryStore()
    num_seen = 0

    def flip(call: Call) -> Reply | None:
        """The last bytes of the file are wrong once."""
        nonlocal num_seen
        begin, _, end = call.headers.get("range", "bytes=0-0").removeprefix("bytes=").partition("-")
        is_last = call.server == "content" and int(end) + 1 == len(content)
        if not is_last or not call.path.endswith(hashlib.sha256(content).hexdigest()):
            return None
        num_seen += 1
        headers = {"Content-Range": f"bytes {begin}-{end}/{len(content)}"}
        return (206, headers, wrong[int(begin) : int(end) + 1]) if num_seen == 1 else None

    hub.fault = flip
    with pytest.raises(IntegrityError, match="it differs in two reads"):
        packed(address, store)
    assert num_seen >= 2
    assert not list(store.list())


def test_what_is_on_this_machine_or_states_nothing_is_not_read_twice(tmp_path: Path) -> None:
    reads = RecordedReads()
    store = MemoryStore(FILES)
    assert reads.around(store) is store
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
    assert not packed(str(tmp_path), MemoryStore()).total_bytes


@given(st.data())
def test_ranges_that_overlap_in_any_way_are_compared(data: st.DataObject) -> None:
    content = bytes(range(256)) * 2
    store = MemoryStore({"file": content})
    place = st.integers(0, len(content))
    spans = data.draw(st.lists(st.tuples(place, place).map(sorted), max_size=8))
    wrong = data.draw(st.sampled_from([None, *(number for number, (a, b) in enumerate(spans) if a < b)]))
    reads = []
    for number, (begin, end) in enumerate(spans):
        seen = damaged(content[begin:end]) if number == wrong else content[begin:end]
        reads.append(EarlierRead(begin, end, blake3(seen).digest()))
    file = StoredFile(store, store.stat("file")._replace(sha256=hashlib.sha256(content).digest()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stated_files, "RANGE_BYTES", data.draw(st.integers(20, 600)))
        if wrong is None:
            compare_file(file, reads=reads)
        else:
            with pytest.raises(IntegrityError, match="it differs in two reads"):
                compare_file(file, reads=reads)
