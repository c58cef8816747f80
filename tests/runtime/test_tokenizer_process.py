"""A tokenizer in a process of its own gives what one in this process gives, and comes back when it is killed."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.support.inspection import lines_of, piece_table_of, text_backend_of, tokenizer_child_of
from tests.support.load import patience_s
from tests.support.tiny_models import save_tiny

from teneral.loader.artifact import open_artifact
from teneral.loader.errors import NotFoundError
from teneral.loader.format.manifest import Manifest
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.base import SourceOptions
from teneral.loader.sources.file.store import FileStore
from teneral.loader.timeline import Timeline
from teneral.runtime.errors import ModelError, RequestError
from teneral.runtime.synth import tokenizer_files
from teneral.runtime.text.backend import LocalBackend
from teneral.runtime.text.launch import PreparedTokenizer, TokenizerTask
from teneral.runtime.text.remote import TokenizerProcess
from teneral.runtime.text.tokenizer import TextTokenizer

TEXTS = ["", "a", "The dragonfly, newly emerged, is soft.", "C'est l'été 蜻蛉 🐉\n", " \t" * 50]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_tiny("llama", path)
    return path


def manifest_of(folder: Path) -> Manifest:
    return open_artifact(FileStore(folder))


def process_for(folder: Path, timeline: Timeline | None = None) -> TokenizerProcess:
    timeline = timeline or Timeline()
    task = TokenizerTask(str(folder), SourceOptions(), LoadOptions(), timeline.started_at)
    return TokenizerProcess(PreparedTokenizer().launch(task), timeline=timeline)


@pytest.fixture(scope="module")
def remote(folder: Path) -> Iterator[TextTokenizer]:
    tokenizer = process_for(folder).load(manifest_of(folder))
    yield tokenizer
    tokenizer.close()


@pytest.fixture(scope="module")
def local(folder: Path) -> Iterator[TextTokenizer]:
    tokenizer = TextTokenizer.from_files(
        lambda name: path.read_bytes() if (path := folder / name).exists() else None
    )
    yield tokenizer
    tokenizer.close()


def test_it_gives_what_a_tokenizer_in_this_process_gives(remote: TextTokenizer, local: TextTokenizer) -> None:
    pairs = [("one", "another"), ("alone", None), ("x" * 40_000, "long")]
    assert remote.encode_pairs(pairs) == local.encode_pairs(pairs)
    assert remote.vocab_size == local.vocab_size
    assert remote.eos_token_ids == local.eos_token_ids
    assert remote.special_tokens == local.special_tokens
    for text in TEXTS:
        for add_special_tokens in (True, False):
            tokens = local.encode(text, add_special_tokens=add_special_tokens)
            assert remote.encode(text, add_special_tokens=add_special_tokens) == tokens
            assert remote.decode(tokens) == local.decode(tokens)
            assert remote.decode(tokens, skip_special_tokens=False) == local.decode(
                tokens, skip_special_tokens=False
            )
    for token in (0, 1, 5, local.vocab_size - 1, local.vocab_size, -1):
        assert remote.id_to_piece(token) == local.id_to_piece(token)
    assert remote.piece_to_id("no such piece") is None
    messages = [{"role": "user", "content": "Hello"}]
    assert remote.chat(messages) == local.chat(messages)


def test_invalid_values_are_refused_as_here(remote: TextTokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        remote.encode("\ud83d")
    with pytest.raises(RequestError, match="characters"):
        remote.encode("x" * (1 << 20) + "x")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose vocabulary is parsed while texts are tokenised already."""
    path = tmp_path_factory.mktemp("large")
    save_tiny("llama", path)
    files = tokenizer_files(32_000, encoder=False)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (path / name).write_text(json.dumps(files[name], ensure_ascii=False))
    return path


def test_a_large_vocabulary_is_parsed_once_a_text_was_generated(large: Path) -> None:
    timeline = Timeline()
    process = process_for(large, timeline)
    tokenizer = process.load(manifest_of(large))
    whole = LocalBackend.from_file((large / "tokenizer.json").read_bytes(), {})
    (loaded,) = [span for span in timeline.spans() if span.name == "load"]
    assert loaded.attributes["vocabulary"] == "as texts need it"
    long_text = "a long text " * 20_000  # which needs all of it at once

    def says_the_same(text: str) -> bool:
        tokens = whole.encode(text, add_special_tokens=True)
        return tokenizer.encode(text) == tokens and tokenizer.decode(tokens[:50]) == whole.decode(
            tokens[:50], skip_special_tokens=True
        )

    assert all(says_the_same(text) for text in TEXTS)
    assert tokenizer.vocab_size == whole.vocab_size
    until_s = time.monotonic() + patience_s(60)
    while piece_table_of(process) is None:  # the first text was decoded
        assert time.monotonic() < until_s
        time.sleep(0.05)
    assert all(says_the_same(text) for text in (*TEXTS, long_text))
    os.kill(process.pid, signal.SIGKILL)
    assert all(says_the_same(text) for text in (long_text, *TEXTS))
    tokenizer.close()


def test_many_threads_may_ask_at_once(remote: TextTokenizer, local: TextTokenizer) -> None:
    texts = [f"text number {number} " * (number % 7) for number in range(200)]
    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(remote.encode, texts)) == [local.encode(text) for text in texts]


def test_its_time_is_on_the_timeline(folder: Path) -> None:
    timeline = Timeline()
    tokenizer = process_for(folder, timeline).load(manifest_of(folder))
    tokenizer.close()
    spans = [span for span in timeline.spans() if span.lane == "tokenizer"]
    assert [span.name for span in spans] == ["settings", "import", "fetch", "load"]
    assert all(0 <= span.start_s <= span.end_s <= timeline.now_s() for span in spans)


def test_a_child_that_was_killed_is_started_again(folder: Path, local: TextTokenizer) -> None:
    process = process_for(folder)
    tokenizer = process.load(manifest_of(folder))
    for _ in range(2):
        os.kill(process.pid, signal.SIGKILL)
        with ThreadPoolExecutor(8) as pool:
            encoded = list(pool.map(tokenizer.encode, TEXTS * 4))
        assert encoded == [local.encode(text) for text in TEXTS * 4]
    tokenizer.close()


def test_a_child_that_is_killed_while_it_loads_is_an_error(folder: Path) -> None:
    process = process_for(folder)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ModelError, match="status -9") as caught:
        process.load(manifest_of(folder))
    assert "memory" in caught.value.hint
    process.close()


def test_the_error_names_the_fault_of_the_files(folder: Path, tmp_path: Path) -> None:
    save_tiny("llama", tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json cannot be read"):
        process_for(tmp_path).load(manifest_of(tmp_path))
    manifest = manifest_of(folder)
    with pytest.raises(NotFoundError):
        process_for(tmp_path / "nowhere").load(manifest)


def test_one_that_is_closed_when_it_has_just_loaded_is_an_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = process_for(folder)
    child = tokenizer_child_of(process)
    receive, received = child.receive, []

    def receive_and_close() -> Any:
        received.append(receive())
        if len(received) == 2:  # the settings, and the facts that end a load
            process.close()
        return received[-1]

    monkeypatch.setattr(child, "receive", receive_and_close)
    with pytest.raises(ModelError, match="closed"):
        process.load(manifest_of(folder))


def test_closing_ends_the_child_and_waiting_callers(folder: Path) -> None:
    process = process_for(folder)
    tokenizer = process.load(manifest_of(folder))
    pid = process.pid
    errors: list[BaseException] = []

    def ask() -> None:
        try:
            while True:
                tokenizer.encode("a text " * 10_000)
        except ModelError as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    tokenizer.close()
    for thread in threads:
        thread.join(patience_s(30))
    assert len(errors) == len(threads)
    assert not Path(f"/proc/{pid}").exists()


def test_long_texts_leave_a_line_for_short_ones(folder: Path) -> None:
    tokenizer = process_for(folder).load(manifest_of(folder))
    backend = text_backend_of(tokenizer)
    assert isinstance(backend, TokenizerProcess)
    lines = lines_of(backend)
    os.kill(backend.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(8) as threads:
        try:
            asked = [threads.submit(tokenizer.encode, "x" * 100_000) for _ in range(6)]
            while lines.qsize() > 1:
                time.sleep(0.01)
            time.sleep(0.1)
            assert lines.qsize() == 1
        finally:
            os.kill(backend.pid, signal.SIGCONT)
        assert {len(each.result()) for each in asked} == {100_000}
    tokenizer.close()


def test_a_closed_tokenizer_leaves_no_descriptor(folder: Path) -> None:
    """A socket that is closed stays open for the files made of it."""
    process_for(folder).load(manifest_of(folder)).close()  # what is opened once
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(2):
        process = process_for(folder)
        process.load(manifest_of(folder)).close()
        assert len(os.listdir("/proc/self/fd")) == before
        del process
