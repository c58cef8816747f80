"""`teneral serve` while the bytes that refine its weights are held back: what clients get before, and after."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.load import patience_s
from tests.support.store_faults import Fault
from tests.support.store_http import Request
from tests.support.store_server import StoreServer
from tests.support.tiny_models import save_tiny
from tests.test_serve import Server

from teneral.loader.sources.file.store import FileStore
from teneral.loader.tools.pack.pack import pack

WAIT_S = patience_s(60)
LOOK_S = 0.5  # in which a drafted token would have come
NUM_TOKENS = 60
REQUEST = {
    "model": "tiny",
    "prompt": "hello there",
    "max_tokens": NUM_TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "stream_options": {"include_usage": True},
}
DRAFT = {"teneral": {"first_token": "draft"}}


class GatedStore:
    """A bucket, slow enough that the draft is decided to come first, and of which the refine blobs come only after
    `release`. Some of them must come before, or the link's rate would be unknown: those of the draft do.
    """

    def __init__(self, folder: Path) -> None:
        self.may_refine = threading.Event()
        self.server = StoreServer(folder, fault=self._hold, rate_mb_s=2.0)

    def _hold(self, request: Request) -> Fault | None:
        if "refine" in request.key:
            self.may_refine.wait(WAIT_S)
        return None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of a few MB: a link that takes a second or two for it has shown its rate by then."""
    path = tmp_path_factory.mktemp("draft")
    save_tiny("llama", path / "model", hidden_size=256, intermediate_size=512, num_hidden_layers=4)
    pack(FileStore(path / "model"), FileStore(path / "bucket" / "model"))
    return path


@pytest.fixture
def store(folder: Path) -> Iterator[GatedStore]:
    gated = GatedStore(folder)
    with gated.server:
        yield gated
        gated.may_refine.set()


@pytest.fixture
def server(store: GatedStore) -> Iterator[Server]:
    server = Server(f"{store.server.url}/bucket/model", "--name", "tiny")
    yield server
    store.may_refine.set()
    server.close()


class Stream:
    """A streamed completion, whose chunks a thread takes as they come."""

    def __init__(self, server: Server, body: dict[str, Any]) -> None:
        self.chunks: list[dict[str, Any]] = []
        self._changed = threading.Condition()
        self._is_over = False
        self._connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=WAIT_S)
        self._connection.request(
            "POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"}
        )
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def wait_for_chunks(self, number: int, timeout_s: float = WAIT_S) -> bool:
        with self._changed:
            return self._changed.wait_for(lambda: len(self.chunks) >= number, timeout_s)

    def rest(self) -> list[dict[str, Any]]:
        """All chunks, when the last one is there."""
        self._thread.join(WAIT_S)
        assert self._is_over, "the stream did not end with [DONE]"
        self._connection.close()
        return self.chunks

    def _read(self) -> None:
        for line in self._connection.getresponse():
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                self._is_over = True
                return
            with self._changed:
                self.chunks.append(json.loads(line[6:]))
                self._changed.notify_all()


def drafted_of(chunk: dict[str, Any]) -> int:
    return int(chunk.get("teneral", {}).get("drafted_tokens", 0))


def metrics(server: Server) -> dict[str, float]:
    lines = server.ask("GET", "/metrics")[1].decode().splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def test_who_allows_it_gets_drafted_tokens_before_the_refining_bytes_and_exact_ones_after(
    server: Server, store: GatedStore
) -> None:
    stream = Stream(server, REQUEST | DRAFT)
    assert stream.wait_for_chunks(3), "nothing was drafted"
    assert not store.may_refine.is_set()
    assert all(drafted_of(chunk) for chunk in stream.chunks[:3])
    store.may_refine.set()
    chunks = stream.rest()
    usage = chunks[-1]["usage"]
    details = usage["completion_tokens_details"]
    assert usage["completion_tokens"] == NUM_TOKENS
    assert details["drafted_tokens"] == sum(drafted_of(chunk) for chunk in chunks) >= 3
    assert metrics(server)["teneral_drafted_tokens_total"] == details["drafted_tokens"]
    if details["drafted_tokens"] < NUM_TOKENS:
        assert drafted_of(chunks[-2]) == 0


def test_who_wants_exact_tokens_gets_none_before_the_refining_bytes_and_then_many_at_once(
    server: Server, store: GatedStore, folder: Path
) -> None:
    stream = Stream(server, REQUEST)
    drafted = Stream(server, REQUEST | DRAFT)
    assert drafted.wait_for_chunks(3)  # so the draft is there, and used
    assert not stream.wait_for_chunks(1, LOOK_S)
    store.may_refine.set()
    chunks = stream.rest()
    details = chunks[-1]["usage"]["completion_tokens_details"]
    assert details["drafted_tokens"] == 0
    assert details["accepted_prediction_tokens"] > 0
    assert not any(drafted_of(chunk) for chunk in chunks)
    drafted.rest()
    seen = metrics(server)
    assert seen['teneral_proposals_total{outcome="accepted"}'] == details["accepted_prediction_tokens"]
    assert seen['teneral_proposals_total{outcome="rejected"}'] == details["rejected_prediction_tokens"]
    # When all is exact the same request gets the same answer.
    again = Stream(server, REQUEST).rest()
    text = [
        "".join(chunk["choices"][0]["text"] for chunk in each if chunk["choices"]) for each in (chunks, again)
    ]
    assert text[0] == text[1]


def test_the_timeline_tells_of_the_decision_and_of_the_draft(server: Server, store: GatedStore) -> None:
    stream = Stream(server, REQUEST | DRAFT)
    assert stream.wait_for_chunks(3)
    store.may_refine.set()
    stream.rest()
    spans = json.loads(server.ask("GET", "/timeline")[1])["spans"]
    (decision,) = [span for span in spans if span["name"].startswith("draft-first: ")]
    assert decision["attributes"]["order"] == "draft-first"
    drafts = [span["name"] for span in spans if span["lane"] == "draft"]
    assert "draft step 0" in drafts
    assert "draft step 2" in drafts
