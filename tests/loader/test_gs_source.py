"""Cloud Storage: tokens, conditions, sessions that break off, refusals, listings."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from tests.support.gs_server import METADATA_PATH, Call, GsServer, Reply, problem, serving_blob
from tests.support.inspection import kept_for_writing

from teneral.loader.errors import (
    AccessDeniedError,
    AlreadyExistsError,
    ChangedError,
    FormatError,
    NotFoundError,
    SourceClosedError,
    SourceError,
    UnavailableError,
    UsageError,
)
from teneral.loader.sources.base import ObjectInfo, SourceOptions
from teneral.loader.sources.gs import credentials, uploads
from teneral.loader.sources.gs.store import GsStore
from teneral.loader.sources.http import tokens
from teneral.loader.sources.open import open_store

DATA = bytes(range(256)) * 8192  # 2 MiB


CHUNK = 512 * 1024


URL = "gs://models/a model"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[GsServer]:
    with serving_blob(monkeypatch, DATA) as server:
        yield server


@pytest.fixture
def store(server: GsServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[GsStore]:
    monkeypatch.setattr(uploads, "CHUNK_BYTES", CHUNK)
    opened = open_at(server)
    yield opened
    opened.close()


def open_at(server: GsServer, url: str = URL, **options: object) -> GsStore:
    return GsStore(url, SourceOptions(endpoint_url=server.url)._replace(**options))  # type: ignore[arg-type]


# Tokens


def test_one_token_serves_all_requests(server: GsServer, store: GsStore) -> None:
    for _ in range(3):
        assert store.read("blob", max_bytes=len(DATA))[0] == DATA
    store.put("other", b"x")
    assert server.num_tokens_asked == 1


def test_a_token_is_renewed_shortly_before_it_ends(server: GsServer, store: GsStore) -> None:
    server.expires_in = int(credentials.RENEW_S) - 5
    store.stat("blob")
    store.stat("blob")  # asked for again at once: the first one was already old
    assert server.num_tokens_asked == 1  # … but not more than every half minute
    store.quiesce()
    server.expires_in = 3600
    store.stat("blob")
    store.stat("blob")
    assert server.num_tokens_asked == 2


def test_a_good_token_is_kept_while_the_metadata_server_fails(
    server: GsServer, store: GsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens, "AGAIN_S", 0.0)
    monkeypatch.setattr(credentials, "PAUSE_S", 0.0)
    server.expires_in = 100
    store.stat("blob")
    server.fault = lambda call: (503, {}, b"") if call.path == METADATA_PATH else None
    store.stat("blob")


@pytest.mark.parametrize("act", ["read", "put"])
def test_a_token_that_is_refused_is_renewed_once(server: GsServer, store: GsStore, act: str) -> None:
    store.stat("blob")
    server.tokens = {"token-2"}
    if act == "read":
        assert store.read("blob", max_bytes=len(DATA))[0] == DATA
    else:
        store.put("new", b"x")
    assert server.num_tokens_asked == 2


def test_a_token_that_stays_refused_is_an_error_with_a_hint(server: GsServer, store: GsStore) -> None:
    server.fault = lambda call: None if call.path == METADATA_PATH else problem(401, "authError", "Invalid")
    with pytest.raises(AccessDeniedError, match="access token") as caught:
        store.read("blob", max_bytes=10)
    assert "GOOGLE_APPLICATION_CREDENTIALS" in caught.value.hint
    assert "token-1" not in str(caught.value)


def test_without_any_credentials_the_ways_to_give_them_are_named(
    server: GsServer, store: GsStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "127.0.0.1:9")
    monkeypatch.setattr(credentials, "PAUSE_S", 0.0)
    with pytest.raises(AccessDeniedError, match="no credentials") as caught:
        store.stat("blob")
    assert "--anonymous" in caught.value.hint


def test_a_metadata_host_that_is_not_one_is_named(store: GsStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GCE_METADATA_HOST", "host/with/a path")
    with pytest.raises(UsageError) as caught:
        store.stat("blob")
    assert caught.value.key == "GCE_METADATA_HOST"


def test_an_anonymous_reader_sends_no_token(server: GsServer) -> None:
    server.anonymous = True
    store = open_at(server, anonymous=True)
    assert store.stat("blob").size_bytes == len(DATA)
    store.close()
    assert server.num_tokens_asked == 0


def test_an_emulator_gets_no_token(server: GsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.anonymous = True
    for host in (server.url, server.host):
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
        store = open_store(URL)
        assert store.stat("blob").size_bytes == len(DATA)
        store.close()
    assert server.num_tokens_asked == 0


def test_requests_name_the_project_that_pays(server: GsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="billed"):
        open_at(server, requester_pays=True)
    monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "my-project")
    store = open_at(server, requester_pays=True)
    store.stat("blob")
    store.close()
    assert server.calls[-1].headers["x-goog-user-project"] == "my-project"


# Reading


def test_a_range_is_bound_to_the_generation(server: GsServer, store: GsStore) -> None:
    version = store.stat("blob").version
    generation = server.objects["models"]["a model/blob"][1]
    assert version == f'"{generation}"'
    store.read_into("blob", 5, memoryview(bytearray(10)), version=version)
    assert server.calls[-1].query["ifGenerationMatch"] == str(generation)
    assert "if-match" not in server.calls[-1].headers
    server.put("models", "a model/blob", DATA)  # the same bytes, but another object
    with pytest.raises(ChangedError):
        store.read_into("blob", 5, memoryview(bytearray(10)), version=version)


def test_an_object_stored_with_gzip_is_refused(server: GsServer, store: GsStore) -> None:
    server.codings["a model/blob"] = "gzip"
    with pytest.raises(FormatError, match="compressed"):
        store.read_into("blob", 0, memoryview(bytearray(10)))


def test_a_listing_goes_on_over_pages(server: GsServer, store: GsStore) -> None:
    for number in range(7):
        server.put("models", f"a model/part-{number}", b"x" * number)
    server.put("models", "a model/folder/", b"")  # a folder's marker
    server.put("models", "a models", b"another folder's")
    assert [info.size_bytes for info in store.list("part-")] == list(range(7))
    assert [info.name for info in store.list()] == ["blob", *(f"part-{number}" for number in range(7))]
    whole = open_at(server, "gs://models")
    assert list(whole.list("nothing")) == []
    whole.close()


def test_a_busy_store_is_asked_again(server: GsServer, store: GsStore) -> None:
    failures = iter([503, 429, 403])

    def fault(call: Call) -> Reply | None:
        status = None if call.path == METADATA_PATH else next(failures, None)
        return status and problem(status, "rateLimitExceeded", "slow down")  # type: ignore[return-value]

    server.fault = fault
    assert store.read("blob", max_bytes=len(DATA))[0] == DATA


def test_refusals_say_what_is_missing(server: GsServer, store: GsStore) -> None:
    missing = open_at(server, "gs://other-bucket/x")
    with pytest.raises(NotFoundError, match="bucket of gs://other"):
        missing.stat("blob")
    missing.close()
    denied = "x@y.iam does not have storage.objects.get access to the object (or it may not exist)."
    server.fault = lambda call: (
        None if call.path == METADATA_PATH else problem(403, "forbidden", denied + "\x1b[2J")
    )
    with pytest.raises(AccessDeniedError, match=r"storage\.objects\.get") as caught:
        store.stat("blob")
    assert caught.value.may_be_absent
    assert "objectViewer" in caught.value.hint
    assert "\x1b" not in str(caught.value)


# Writing


def test_a_connection_is_kept_for_the_next_write_until_the_process_may_stand_still(store: GsStore) -> None:
    store.put("new", b"x")
    store.put("new", b"y")
    assert kept_for_writing(store) == 1
    store.quiesce()
    assert kept_for_writing(store) == 0
    store.put("new", b"z")


def stream(store: GsStore, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
    with store.create("streamed", if_absent=if_absent) as writer:
        for start in range(0, len(data), 100_000):
            writer.write(data[start : start + 100_000])
        return writer.commit()


@pytest.mark.parametrize("size_bytes", [CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK + 17])
def test_streamed_objects_of_all_sizes_arrive(server: GsServer, store: GsStore, size_bytes: int) -> None:
    data = DATA[:size_bytes]
    info = stream(store, data)
    content, generation = server.objects["models"]["a model/streamed"]
    assert content == data
    assert info == ObjectInfo("streamed", size_bytes, f'"{generation}"')
    assert info == store.stat("streamed")


def is_chunk(call: Call) -> bool:
    return call.method == "PUT" and not call.headers["content-range"].startswith("bytes */")


def test_a_chunk_that_broke_off_is_sent_again(server: GsServer, store: GsStore) -> None:
    """The second chunk's connection breaks after the store has kept half of it, the third's before anything."""
    seen: list[str] = []

    def fault(call: Call) -> Reply | None:
        if is_chunk(call):
            seen.append(call.headers["content-range"])
            if len(seen) == 2:
                server.sessions["1"]["content"] += call.body[: CHUNK // 2]
                raise ConnectionError
            if len(seen) == 4:
                return 503, {}, b""
        return None

    server.fault = fault
    data = DATA[: 3 * CHUNK + 17]
    assert stream(store, data).size_bytes == len(data)
    assert server.objects["models"]["a model/streamed"][0] == data
    assert seen[2] == seen[1]


def test_a_chunk_of_which_a_part_was_kept_goes_on_there(server: GsServer, store: GsStore) -> None:
    """The store keeps half of the second chunk, and then nothing, and says so."""
    seen: list[str] = []

    def fault(call: Call) -> Reply | None:
        if is_chunk(call):
            seen.append(call.headers["content-range"])
            if len(seen) in (2, 3):
                content = server.sessions["1"]["content"]
                content += call.body[: CHUNK // 2] if len(seen) == 2 else b""
                return 308, {"Range": f"bytes=0-{len(content) - 1}"}, b""
        return None

    server.fault = fault
    data = DATA[: 3 * CHUNK + 17]
    assert stream(store, data).size_bytes == len(data)
    assert server.objects["models"]["a model/streamed"][0] == data
    assert seen[2] == seen[3] == f"bytes {CHUNK * 3 // 2}-{2 * CHUNK - 1}/*"


def test_a_session_that_has_expired_is_named(server: GsServer, store: GsStore) -> None:
    server.fault = lambda call: (410, {}, b"") if is_chunk(call) else None
    with pytest.raises(SourceError, match="has expired"):
        stream(store, DATA)


def test_a_store_that_keeps_nothing_of_a_chunk_is_given_up(server: GsServer, store: GsStore) -> None:
    server.fault = lambda call: (308, {}, b"") if is_chunk(call) else None
    with pytest.raises(UnavailableError, match="takes no more"):
        stream(store, DATA)


def test_an_upload_whose_last_answer_was_lost_is_found_complete(server: GsServer, store: GsStore) -> None:
    lost: list[Call] = []

    def fault(call: Call) -> Reply | None:
        if is_chunk(call) and not call.headers["content-range"].endswith("*") and not lost:
            lost.append(call)
            server.sessions["1"]["content"] += call.body
            raise ConnectionError
        return None

    server.fault = fault
    assert stream(store, DATA[: CHUNK + 5], if_absent=True).size_bytes == CHUNK + 5


def test_a_store_that_takes_nothing_is_given_up(server: GsServer) -> None:
    store = open_at(server, max_attempts=2)
    server.fault = lambda call: (503, {}, b"") if call.method in ("PUT", "POST") else None
    with pytest.raises(UnavailableError):
        store.put("new", b"x")
    with pytest.raises(UnavailableError):
        stream(store, bytes(17 << 20))
    store.close()


def test_a_store_that_is_not_there_is_unavailable_for_writing() -> None:
    options = SourceOptions(endpoint_url="http://127.0.0.1:9", anonymous=True, max_attempts=1)
    store = GsStore(URL, options)
    with pytest.raises(UnavailableError, match="new could not be written to gs://models"):
        store.put("new", b"x")
    store.close()


def test_an_aborted_upload_leaves_no_session(server: GsServer, store: GsStore) -> None:
    writer = store.create("new")
    writer.write(DATA)
    assert len(server.sessions) == 1
    writer.abort()
    assert server.sessions == {}


def test_a_session_gets_no_token_and_stays_at_the_store(server: GsServer, store: GsStore) -> None:
    """The server names another host for its session."""
    stream(store, DATA)
    in_session = [call for call in server.calls if "upload_id" in call.query]
    assert in_session
    assert all("authorization" not in call.headers for call in in_session)


def test_a_streamed_object_that_exists_is_refused_at_its_commit(server: GsServer, store: GsStore) -> None:
    writer = store.create("blob", if_absent=True)
    writer.write(DATA + DATA)
    with pytest.raises(AlreadyExistsError):
        writer.commit()
    assert server.objects["models"]["a model/blob"][0] == DATA


def test_a_refusal_that_comes_before_the_whole_body_is_understood() -> None:
    """The server answers the head of the request, and closes with most of the body unread."""
    status, _, body = problem(403, "forbidden", "storage.objects.create is missing")
    head = f"HTTP/1.1 {status} Forbidden\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(head.encode() + body)

        thread = threading.Thread(target=refuse)
        thread.start()
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        store = GsStore(URL, SourceOptions(endpoint_url=url, anonymous=True, max_attempts=1))
        with pytest.raises(AccessDeniedError, match=r"storage\.objects\.create"):
            store.put("new", bytes(16 << 20))
        store.close()
        thread.join()


def test_a_version_of_another_store_never_matches(store: GsStore) -> None:
    with pytest.raises(AlreadyExistsError):
        store.put("blob", b"x", if_version='"0x8D"')


def test_a_closed_store_gives_up_its_upload(server: GsServer, store: GsStore) -> None:
    writer = store.create("new")
    writer.write(DATA[: CHUNK + 1])
    store.close()
    with pytest.raises(SourceClosedError):
        writer.write(DATA)


def test_reading_under_an_account_imports_nothing_heavy(server: GsServer) -> None:
    code = (
        "import sys\n"
        "from teneral.loader.sources.open import open_source\n"
        "from teneral.loader.sources.base import SourceOptions\n"
        f"source = open_source({URL!r}, SourceOptions(endpoint_url={server.url!r}))\n"
        "print(len(source.read('blob', max_bytes=4_000_000)[0]), len(list(source.list())))\n"
        "source.close()\n"
        "print([name for name in ('boto3', 'http.client', 'ssl', 'email', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [f"{len(DATA)} 1", "[]"]
