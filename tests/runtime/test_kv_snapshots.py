"""A prompt that was exported is not computed by the next instance, which says the same as one that computed it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny

from teneral.loader.errors import AlreadyExistsError, UsageError
from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack
from teneral.runtime.config import ServeConfig
from teneral.runtime.errors import SnapshotMismatchError
from teneral.runtime.instance.instance import Instance
from teneral.runtime.kv.snapshots.parts import open_snapshot
from teneral.runtime.kv.snapshots.snapshot import SNAPSHOT_NAME
from teneral.runtime.kv.snapshots.tools import verify_snapshot
from teneral.runtime.kv_export import (
    PrefixText,
    common_beginning,
    export_prefixes,
    prefix_tokens,
    read_prefix,
)
from teneral.runtime.step.requests import GenerationRequest, SamplingParams
from teneral.runtime.text.tokenizer import TextTokenizer

WAIT_S = patience_s(60)
SYSTEM = "You answer in verse, and never in prose, whatever anybody may ask you to do.\n"
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """In fp32: there the same row is the same in passes of different sizes, but for its very last bits."""
    return save_tiny("llama", tmp_path_factory.mktemp("model"), dtype=torch.float32)


@pytest.fixture(scope="module")
def artifact(model, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("artifact")
    pack(FileStore(model), FileStore(folder / "packed"))
    return folder / "packed"


def config(artifact: Path, **settings) -> ServeConfig:
    return ServeConfig(model=str(artifact), loader="thread", kv_bytes=8 << 20, threads=1, **settings)


def ask(instance: Instance, prompt, *, salt: str = ""):
    """The tokens that follow, and how many of the prompt were found; once the snapshot is in the pool or given up."""
    for thread in threading.enumerate():
        if thread.name == "teneral-kv-snapshot":
            thread.join(WAIT_S)
    request = GenerationRequest(
        "r",
        tuple(prompt),
        NUM_TOKENS,
        sampling=SamplingParams(temperature=0),
        ignore_eos=True,
        cache_salt=salt,
    )
    generation = instance.engine.result(WAIT_S).submit(request)
    return generation.result(WAIT_S).tokens, generation.num_cached_tokens


def tokenizer_of(model: Path) -> TextTokenizer:
    return TextTokenizer.from_files(
        lambda name: path.read_bytes() if (path := model / name).exists() else None
    )


@pytest.fixture(scope="module")
def tokenizer(model):
    tokenizer = tokenizer_of(model)
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def snapshot(artifact, tmp_path_factory) -> str:
    address = str(tmp_path_factory.mktemp("snapshot") / "kv")
    texts = [PrefixText("plain", SYSTEM, False), PrefixText("chat", SYSTEM, True)]
    report = export_prefixes(config(artifact), address, texts)
    assert report.tokens == {"plain": 64, "chat": 80}
    return address


@pytest.mark.parametrize("is_chat", [False, True])
def test_the_first_request_of_a_new_instance_begins_behind_the_prefix(artifact, snapshot, tokenizer, is_chat):
    prompt = tokenizer.encode(SYSTEM + "Who are you?")
    if is_chat:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Who are you?"}]
        prompt = tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False)
    with Instance(config(artifact)) as cold:
        expected, num_cached = ask(cold, prompt)
        assert num_cached == 0
    with Instance(config(artifact, kv_snapshot=snapshot, kv_snapshot_save=False)) as warm:
        tokens, num_cached = ask(warm, prompt)
        assert num_cached == (80 if is_chat else 64)
        assert tokens == expected
        assert warm.statistics()["kv_snapshot"]["prefixes"] == 2


def test_only_who_gives_the_salt_finds_what_was_exported_with_it(artifact, tokenizer, tmp_path):
    address = str(tmp_path / "kv")
    export_prefixes(config(artifact), address, [PrefixText("a", SYSTEM, False)], cache_salt="tenant")
    assert b"tenant" not in (tmp_path / "kv" / SNAPSHOT_NAME).read_bytes()
    with Instance(config(artifact, kv_snapshot=address)) as instance:
        prompt = tokenizer.encode(SYSTEM + "?")
        assert ask(instance, prompt)[1] == 0
        assert ask(instance, prompt, salt="tenant")[1] == 64


def test_what_an_instance_computed_for_several_is_there_for_the_next(artifact, tokenizer, tmp_path):
    prompt = tokenizer.encode(SYSTEM + "!")
    settings = {"kv_snapshot": str(tmp_path / "kv")}
    with Instance(config(artifact, **settings)) as first:
        expected, _ = ask(first, prompt)
        # Of its last block, which the answer has filled, all but the prompt's last token.
        assert ask(first, prompt) == (expected, len(prompt) - 1)
        assert first.drain(WAIT_S)
        assert first.statistics()["kv_snapshot"]["saves_total"] == 1
    with Instance(config(artifact, **settings)) as second:
        assert ask(second, prompt) == (expected, 64)


def test_an_export_keeps_what_has_other_names(artifact, tmp_path):
    address = str(tmp_path / "kv")
    export_prefixes(config(artifact), address, [PrefixText("a", SYSTEM, False)])
    export_prefixes(config(artifact), address, [PrefixText("b", SYSTEM * 2, False)])
    stored, _ = open_snapshot(FileStore(address))
    assert {prefix.name: len(prefix.blocks) for prefix in stored.prefixes} == {"b": 9, "a": 4}
    assert len(stored.hashes) == 9  # the second one's beginning was there


@pytest.mark.parametrize("name", ["a", "b"])
def test_an_export_leaves_no_damaged_part_in_the_snapshot(artifact, tmp_path, name):
    address, texts = str(tmp_path / "kv"), {"a": SYSTEM, "b": "To be, or not to be. " * 4}
    export_prefixes(config(artifact), address, [PrefixText("a", texts["a"], False)])
    (blob,) = (tmp_path / "kv" / "kv").iterdir()
    content = bytearray(blob.read_bytes())
    content[len(content) // 2] ^= 1
    blob.write_bytes(content)
    assert not verify_snapshot(FileStore(tmp_path / "kv")).ok
    report = export_prefixes(config(artifact), address, [PrefixText(name, texts[name], False)])
    assert report.written_bytes > 0
    assert verify_snapshot(FileStore(tmp_path / "kv")).ok
    snapshot, _ = open_snapshot(FileStore(tmp_path / "kv"))
    assert [prefix.name for prefix in snapshot.prefixes] == [name], "the damaged one cannot be computed here"


def test_a_prefix_that_does_not_fit_the_pool_with_others_is_exported_whole(artifact, tmp_path):
    texts = [PrefixText(f"p{number}", str(number) * 100 + SYSTEM, False) for number in range(4)]
    settings = ServeConfig(model=str(artifact), loader="thread", kv_bytes=32 * 16 * 2 * 4 * 3 * 16, threads=1)
    report = export_prefixes(settings, str(tmp_path / "kv"), texts)
    stored, _ = open_snapshot(FileStore(tmp_path / "kv"))
    tokens = {prefix.name: len(prefix.blocks) * 16 for prefix in stored.prefixes}
    assert tokens == report.tokens == dict.fromkeys(("p0", "p1", "p2", "p3"), 176)


def test_another_models_snapshot_is_replaced_only_by_force(artifact, tmp_path):
    other = save_tiny("llama", tmp_path / "other", dtype=torch.float32, seed=1)
    pack(FileStore(other), FileStore(tmp_path / "packed"))
    address, texts = str(tmp_path / "kv"), [PrefixText("a", SYSTEM, False)]
    export_prefixes(config(tmp_path / "packed"), address, texts)
    with pytest.raises(SnapshotMismatchError, match="its model is"):
        export_prefixes(config(artifact), address, texts)
    export_prefixes(config(artifact), address, texts, force=True)
    with Instance(config(artifact, kv_snapshot=address)) as instance:
        instance.engine.result(WAIT_S)
        assert instance.statistics()["kv_snapshot"]["refused_total"] == 0


def test_an_instance_goes_on_without_another_models_snapshot(snapshot, tmp_path, caplog):
    other = save_tiny("llama", tmp_path / "other", dtype=torch.float32, seed=1)
    pack(FileStore(other), FileStore(tmp_path / "packed"))
    with Instance(config(tmp_path / "packed", kv_snapshot=snapshot)) as instance:
        tokens, num_cached = ask(instance, range(100))
        assert (len(tokens), num_cached) == (NUM_TOKENS, 0)
    assert "another model" in caplog.text


def test_a_snapshot_in_8_bits_is_for_servers_in_8_bits(artifact, tokenizer, tmp_path, caplog):
    address = str(tmp_path / "kv")
    export_prefixes(config(artifact, kv_dtype="int8"), address, [PrefixText("a", SYSTEM, False)])
    prompt = tokenizer.encode(SYSTEM + "?")
    with Instance(config(artifact, kv_dtype="int8")) as cold:
        expected, _ = ask(cold, prompt)
    with Instance(config(artifact, kv_dtype="int8", kv_snapshot=address)) as warm:
        assert ask(warm, prompt) == (expected, 64)
    with Instance(config(artifact, kv_snapshot=address)) as other:
        assert ask(other, prompt)[1] == 0
    assert "its layout is int8+float32[3, 2, 2, 16, 16+1], here it is float32[3, 2, 2, 16, 16]" in caplog.text


def test_what_is_there_and_is_no_snapshot_is_replaced_only_by_force(artifact, tmp_path):
    store = FileStore(tmp_path / "kv")
    store.put(SNAPSHOT_NAME, b"{}")
    texts = [PrefixText("a", SYSTEM, False)]
    with pytest.raises(AlreadyExistsError, match="--force"):
        export_prefixes(config(artifact), store.url, texts)
    export_prefixes(config(artifact), store.url, texts, force=True)
    assert len(open_snapshot(store)[0].prefixes) == 1


def test_plain_safetensors_are_not_exported(model, tmp_path):
    with pytest.raises(UsageError, match="plain safetensors"):
        export_prefixes(config(model), str(tmp_path / "kv"), [PrefixText("a", SYSTEM, False)])


def test_less_than_a_block_is_not_exported(artifact, tmp_path):
    with pytest.raises(UsageError, match="a block has 16"):
        export_prefixes(config(artifact), str(tmp_path / "kv"), [PrefixText("a", "short", False)])


def test_a_snapshot_needs_the_prefix_cache(artifact, tmp_path):
    with Instance(config(artifact, kv_snapshot=str(tmp_path), prefix_cache=False)) as instance:
        assert isinstance(instance.ended.result(WAIT_S), UsageError)


# Which tokens


@settings(deadline=None, max_examples=60)
@given(user=st.text(st.characters(exclude_categories=["Cs"]), max_size=20), is_system=st.booleans())
def test_every_prompt_with_the_prefix_begins_with_its_tokens(tokenizer, user, is_system):
    tokens = prefix_tokens(PrefixText("a", SYSTEM, is_system), tokenizer)
    if is_system:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": user}]
        prompt = tokenizer.encode(tokenizer.chat(messages), add_special_tokens=False)
    else:
        prompt = tokenizer.encode(SYSTEM + user)
    assert prompt[: len(tokens)] == tokens
    assert len(tokens) >= len(SYSTEM)


@pytest.mark.parametrize(
    ("lists", "common"),
    [
        ([[1, 2, 3], [1, 2, 4]], [1, 2]),
        ([[1], [1, 2]], [1]),
        ([[1], [2]], []),
        ([[], [1]], []),
        ([[1, 2]], [1, 2]),
    ],
)
def test_the_common_beginning_is_as_long_as_it_can_be(lists, common):
    assert common_beginning(lists) == common


@pytest.mark.parametrize(
    ("given_text", "message"),
    [
        ("name", "NAME=FILE"),
        ("name=", "NAME=FILE"),
        ("../x={path}", "not a valid prefix name"),
        ("recent-1={path}", "reserved for servers"),
        ("a=/nowhere/at/all", "cannot read"),
        ("a={empty}", "is empty"),
        ("a={binary}", "not UTF-8"),
    ],
)
def test_an_invalid_prefix_is_refused(tmp_path, given_text, message):
    files = {name: tmp_path / name for name in ("path", "empty", "binary")}
    for name, content in (("path", b"text"), ("empty", b""), ("binary", b"\xff\xfe")):
        files[name].write_bytes(content)
    with pytest.raises(UsageError, match=message):
        read_prefix(given_text.format(**files), is_system=False)
    assert read_prefix(f"a={files['path']}", is_system=True) == PrefixText("a", "text", True)
