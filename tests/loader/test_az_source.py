"""Blob Storage: addresses, keys, signatures and identities, conditions, blocks, refusals, listings."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.az_server import ACCOUNT, IMDS_PATH, KEY, SAS, AzServer, problem, use_az_account

from teneral.loader.errors import AccessDeniedError, AlreadyExistsError, NotFoundError, UsageError
from teneral.loader.sources.az import credentials, uploads
from teneral.loader.sources.az.address import settings_from
from teneral.loader.sources.az.store import AzStore
from teneral.loader.sources.base import ObjectInfo, SourceOptions
from teneral.loader.sources.http.head import format_date
from teneral.loader.sources.open import open_store

DATA = bytes(range(256)) * 4096  # 1 MiB
URL = f"az://{ACCOUNT}/models/a model"


@pytest.fixture
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzServer]:
    with AzServer(auth=getattr(request, "param", "key")) as server:
        use_az_account(monkeypatch, server)
        server.objects["models"] = {}
        server.put("models", "a model/blob", DATA)
        yield server


@pytest.fixture
def store(server: AzServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[AzStore]:
    monkeypatch.setattr(uploads, "BLOCK_BYTES", 256 * 1024)
    opened = open_at(server)
    yield opened
    opened.close()


def open_at(server: AzServer, url: str = URL, **options: object) -> AzStore:
    return AzStore(url, SourceOptions(endpoint_url=server.endpoint)._replace(**options))  # type: ignore[arg-type]


def stream(store: AzStore, data: bytes, *, if_absent: bool = False) -> ObjectInfo:
    with store.create("streamed", if_absent=if_absent) as writer:
        for start in range(0, len(data), 100_000):
            writer.write(data[start : start + 100_000])
        return writer.commit()


@pytest.mark.parametrize("server", ["key", "sas", "token"], indirect=True)
def test_each_kind_of_credentials_reads_writes_lists_and_deletes(server: AzServer, store: AzStore) -> None:
    assert store.read("blob", max_bytes=len(DATA))[0] == DATA
    info = stream(store, DATA)
    assert server.objects["models"]["a model/streamed"][0] == DATA
    assert list(store.list()) == [store.stat("blob"), info]
    assert store.put("blob", b"x", if_version=store.stat("blob").version).size_bytes == 1
    store.delete("blob")
    with pytest.raises(NotFoundError):
        store.stat("blob")
    assert len(server.token_calls) == (server.auth == "token")


@pytest.mark.parametrize("server", ["none"], indirect=True)
def test_an_anonymous_reader_sends_no_credentials(server: AzServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", KEY)
    store = open_at(server, anonymous=True)
    assert store.stat("blob").size_bytes == len(DATA)
    store.close()
    assert server.token_calls == []


def test_a_connection_string_names_account_key_and_address(
    server: AzServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    text = f"AccountName={ACCOUNT};AccountKey={KEY};BlobEndpoint={server.endpoint}/;"
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)
    for url in ("az://models/a model", URL):
        store = open_store(url)
        assert store.url == URL
        assert store.stat("blob").size_bytes == len(DATA)
        store.close()


@pytest.mark.parametrize("server", ["token"], indirect=True)
def test_the_identity_of_app_service_and_container_apps_is_asked_for(
    server: AzServer, store: AzStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("IDENTITY_ENDPOINT", f"{server.url}/msi/token")
    monkeypatch.setenv("IDENTITY_HEADER", "header")
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    store.stat("blob")
    store.stat("blob")
    (call,) = server.token_calls
    assert (call.path, call.query["client_id"]) == ("/msi/token", "client")


@pytest.mark.parametrize("server", ["token"], indirect=True)
def test_workload_identity_exchanges_a_files_token(
    server: AzServer, store: AzStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "token").write_text("assertion\n")
    monkeypatch.setenv("AZURE_FEDERATED_TOKEN_FILE", str(tmp_path / "token"))
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", f"{server.url}/")
    store.stat("blob")
    assert [call.path for call in server.token_calls] == ["/tenant/oauth2/v2.0/token"]


@pytest.mark.parametrize("server", ["token"], indirect=True)
def test_an_applications_secret_is_exchanged_and_never_shown(
    server: AzServer, store: AzStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_CLIENT_ID", "client")
    monkeypatch.setenv("AZURE_TENANT_ID", "tenant")
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "s=c&r t")
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", f"{server.url}/")
    store.stat("blob")
    assert [call.path for call in server.token_calls] == ["/tenant/oauth2/v2.0/token"]
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "another")
    other = open_at(server)
    with pytest.raises(AccessDeniedError) as caught:
        other.stat("blob")
    other.close()
    assert "another" not in f"{caught.value} {caught.value.hint}"
    monkeypatch.setenv("AZURE_CLIENT_SECRET", "s=c&r t")
    monkeypatch.setenv("AZURE_AUTHORITY_HOST", "http://example.com")
    plain = open_at(server)
    with pytest.raises(UsageError, match="https"):
        plain.stat("blob")
    plain.close()


@pytest.mark.parametrize("server", ["token"], indirect=True)
def test_a_token_that_is_refused_is_renewed_once(server: AzServer, store: AzStore) -> None:
    store.stat("blob")
    server.tokens = {"token-2"}
    assert store.read("blob", max_bytes=len(DATA))[0] == DATA
    server.tokens = {"token-3"}
    store.put("new", b"x")
    assert len(server.token_calls) == 3


@pytest.mark.parametrize("server", ["token"], indirect=True)
@pytest.mark.parametrize(
    "body", [b"", b"[]", b"[" * 200_000, b'{"access_token": "a b", "expires_in": 5}', b'{"access_token": "a"}',
             b'{"access_token": "a", "expires_in": "1e9"}', b'{"access_token": "a", "expires_on": "17"}'],
    ids=range(7),
)  # fmt: skip
def test_what_is_no_token_is_refused(server: AzServer, store: AzStore, body: bytes) -> None:
    server.fault = lambda call: (200, {}, body) if call.path == IMDS_PATH else None
    with pytest.raises(AccessDeniedError):
        store.stat("blob")
    assert all(call.path == IMDS_PATH for call in server.calls)


def test_without_any_credentials_the_ways_to_give_them_are_named(
    server: AzServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("AZURE_STORAGE_KEY")
    monkeypatch.setenv("AZURE_POD_IDENTITY_AUTHORITY_HOST", "http://127.0.0.1:9")
    monkeypatch.setattr(credentials, "PAUSE_S", 0.0)
    store = open_at(server)
    with pytest.raises(AccessDeniedError, match="no credentials") as caught:
        store.stat("blob")
    store.close()
    assert "AZURE_STORAGE_KEY" in caught.value.hint


def test_a_wrong_key_is_denied_and_nothing_secret_is_shown(
    server: AzServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AZURE_STORAGE_KEY", "d3Jvbmc=")
    store = open_at(server)
    with pytest.raises(AccessDeniedError, match="AuthenticationFailed") as caught:
        store.stat("blob")
    store.close()
    assert "d3Jvbmc" not in str(caught.value)
    options = SourceOptions()
    for name, secret in (("AZURE_STORAGE_KEY", KEY), ("AZURE_STORAGE_SAS_TOKEN", SAS)):
        settings = settings_from(URL, options, {name: secret})[0]
        assert secret not in repr(settings)


@pytest.mark.parametrize("size_bytes", [0, 1, 262_143, 262_144, 262_145, 800_000])
def test_streamed_objects_of_all_sizes_arrive(server: AzServer, store: AzStore, size_bytes: int) -> None:
    info = stream(store, DATA[:size_bytes])
    assert server.objects["models"]["a model/streamed"][0] == DATA[:size_bytes]
    assert info == store.stat("streamed")


def test_blocks_are_sent_again_where_the_store_is_busy(server: AzServer, store: AzStore) -> None:
    failures = iter([503, 500])

    def fault(call: object) -> object:
        if getattr(call, "query", {}).get("comp") == "block" and (status := next(failures, None)):
            if status == 500:
                raise ConnectionError
            return problem(status, "ServerBusy")
        return None

    server.fault = fault  # type: ignore[assignment]
    assert stream(store, DATA, if_absent=True).size_bytes == len(DATA)


def test_of_two_writers_of_blocks_the_later_one_loses(server: AzServer, store: AzStore) -> None:
    first, second = (store.create("raced", if_absent=True) for _ in range(2))
    first.write(DATA)
    second.write(DATA)
    first.commit()
    with pytest.raises(AlreadyExistsError):
        second.commit()


def test_a_listing_goes_on_over_pages_and_skips_directories(server: AzServer, store: AzStore) -> None:
    for number in range(5):
        server.put("models", f"a model/part-{number} & <x>", b"x" * number)
    server.put("models", "a models", b"another folder's")
    assert [info.size_bytes for info in store.list("part-")] == list(range(5))
    entry = "<Blob><Name>{}</Name><Properties><Etag>0x1</Etag><Content-Length>0</Content-Length>{}</Properties></Blob>"
    blobs = entry.format("a model/dir", "<ResourceType>directory</ResourceType>")
    blobs += entry.format("a model/../up", "") + entry.format("other/x", "")
    blobs += entry.format("", "").replace("<Name></Name>", '<Name Encoded="true">a%20model%2Fx%26</Name>')
    body = f"<EnumerationResults>{blobs}</EnumerationResults>".encode()
    server.fault = lambda call: (200, {}, body) if "comp" in call.query else None
    assert [info.name for info in store.list()] == ["x&"]


def test_a_container_that_does_not_exist_is_named(server: AzServer) -> None:
    store = open_at(server, f"az://{ACCOUNT}/other/x")
    with pytest.raises(NotFoundError, match="container"):
        store.stat("blob")
    store.close()


@pytest.mark.parametrize(
    ("url", "environment", "expected"),
    [
        ("az://acc/models", {}, ("acc", "models", "")),
        ("AZ://acc/models//a b/", {}, ("acc", "models", "a b")),
        ("az://models/x", {"AZURE_STORAGE_ACCOUNT": "acc"}, ("acc", "models", "x")),
        ("az://acc/models/x", {"AZURE_STORAGE_ACCOUNT": "acc"}, ("acc", "models", "x")),
    ],
)
def test_an_address_has_an_account_a_container_and_a_prefix(
    url: str, environment: dict[str, str], expected: tuple[str, str, str]
) -> None:
    settings, container, prefix = settings_from(url, SourceOptions(), environment)
    assert (settings.account, container, prefix) == expected
    assert str(settings.origin) == f"https://{expected[0]}.blob.core.windows.net"


@pytest.mark.parametrize(
    "url", ["az://", "az://acc", "az://a.example/x", "az://acc/Models", "az://acc/a--b", "az://x@y/models", "az://acc/.."]
)  # fmt: skip
def test_an_address_without_a_usable_account_or_container_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match=r"account|container"):
        settings_from(url, SourceOptions(), {})


@pytest.mark.parametrize(
    "environment",
    [
        {"AZURE_STORAGE_CONNECTION_STRING": "nonsense"},
        {"AZURE_STORAGE_CONNECTION_STRING": "UseDevelopmentStorage=true"},
        {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=acc;EndpointSuffix=x/y?z"},
        {"AZURE_STORAGE_CONNECTION_STRING": "AccountName=acc;BlobEndpoint=http://blobs.example"},
    ],
)
def test_a_connection_string_that_cannot_be_used_is_refused(environment: dict[str, str]) -> None:
    with pytest.raises(UsageError):
        settings_from("az://acc/models", SourceOptions(), environment)


@pytest.mark.parametrize(
    "environment", [{"AZURE_STORAGE_KEY": "not base64!"}, {"AZURE_STORAGE_SAS_TOKEN": "sig=a\r\nX: b"}]
)
def test_a_malformed_secret_is_refused_unshown(environment: dict[str, str]) -> None:
    with pytest.raises(AccessDeniedError, match="malformed") as caught:
        settings_from("az://acc/models", SourceOptions(), environment)
    assert not any(value in str(caught.value) for value in environment.values())


def test_dates_are_written_as_http_has_them() -> None:
    assert format_date(784111777) == "Sun, 06 Nov 1994 08:49:37 GMT"


@pytest.mark.parametrize("server", ["key", "token"], indirect=True)
def test_reading_imports_nothing_heavy(server: AzServer) -> None:
    code = (
        "import sys\n"
        "from teneral.loader.sources.open import open_source\n"
        "from teneral.loader.sources.base import SourceOptions\n"
        f"source = open_source({URL!r}, SourceOptions(endpoint_url={server.endpoint!r}))\n"
        "print(len(source.read('blob', max_bytes=2_000_000)[0]), len(list(source.list())))\n"
        "source.close()\n"
        "print([name for name in ('boto3', 'http.client', 'ssl', 'email', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [f"{len(DATA)} 1", "[]"]
