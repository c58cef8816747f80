"""Every store through a forward proxy, and the certificates of networks that have an authority of their own."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.aws_environment import use_test_credentials
from tests.support.az_server import ACCOUNT, AzServer, use_az_account
from tests.support.gs_server import GsServer, use_gs_account
from tests.support.hub_server import HubServer, use_hub
from tests.support.proxy_server import ProxyServer, use_proxy
from tests.support.store_certificate import write_certificate
from tests.support.store_server import StoreServer

from teneral.loader.errors import SourceError, UnavailableError, UsageError
from teneral.loader.sources.base import Source, SourceOptions
from teneral.loader.sources.http.address import Origin
from teneral.loader.sources.http.head import Request
from teneral.loader.sources.http.proxy import Proxies
from teneral.loader.sources.http.source import HttpSource
from teneral.loader.sources.http.tokens import exchange
from teneral.loader.sources.open import open_source, open_store

DATA = bytes(range(256)) * 400
LOGIN = "Basic " + base64.b64encode(b"user:p@ss:word").decode()
BUCKET = "models"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_certificate(tmp_path_factory.mktemp("proxies") / "authority.pem")


@pytest.fixture
def proxy(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProxyServer]:
    """One in whose network https ends, with an authority of its own, and that asks for a password."""
    with ProxyServer(certificate=certificate, credentials=LOGIN) as server:
        use_proxy(monkeypatch, server, server.url.replace("://", "://user:p%40ss%3Aword@"))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(certificate))
        yield server


@contextmanager
def s3(proxy: ProxyServer, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    use_test_credentials(patch)
    with StoreServer(folder) as server:
        server.objects.make_bucket(BUCKET)
        yield f"s3://{BUCKET}/m", f"https://{proxy.lead('s3', server.url)}"


@contextmanager
def gs(proxy: ProxyServer, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    with GsServer() as server:
        use_gs_account(patch, server)
        server.objects[BUCKET] = {}
        yield f"gs://{BUCKET}/m", f"https://{proxy.lead('gs', server.url)}"


@contextmanager
def az(proxy: ProxyServer, folder: Path, patch: pytest.MonkeyPatch) -> Iterator[tuple[str, str]]:
    with AzServer() as server:
        use_az_account(patch, server)
        server.objects[BUCKET] = {}
        yield f"az://{ACCOUNT}/{BUCKET}/m", f"https://{proxy.lead('az', server.url)}/{ACCOUNT}"


def read(source: Source, name: str = "blob.bin") -> bytes:
    buffer = bytearray(len(DATA))
    source.read_into(name, 0, memoryview(buffer))
    return bytes(buffer)


def read_at(url: str, **options: Any) -> bytes:
    with closing(HttpSource(url, SourceOptions(**options))) as source:
        return read(source)


@pytest.mark.parametrize("kind", [s3, gs, az])
def test_stores_are_read_and_written_through_a_tunnel(
    kind: Callable[..., object], proxy: ProxyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with kind(proxy, tmp_path, monkeypatch) as (address, endpoint):  # type: ignore[attr-defined]
        store = open_store(address, SourceOptions(endpoint_url=endpoint, max_attempts=1))
        store.put("blob.bin", DATA)
        assert store.stat("blob.bin").size_bytes == len(DATA)
        assert read(store) == DATA
        assert [info.name for info in store.list()] == ["blob.bin"]
        store.close()
    assert {call.method for call in proxy.calls} == {"CONNECT"}
    assert all(call.target.endswith(".store.example:443") for call in proxy.calls)


def test_the_hub_and_its_content_network_are_read_through_tunnels(
    proxy: ProxyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with HubServer() as server:
        use_hub(monkeypatch, server, tmp_path / "home")
        server.repository("org/tiny", {"config.json": b"{}", "model.safetensors": DATA})
        monkeypatch.setenv("HF_ENDPOINT", f"https://{proxy.lead('hub', server.url)}")
        server.content_url = f"https://{proxy.lead('content', server.content_url)}"
        monkeypatch.setenv("HF_TOKEN", "hf_good")
        server.tokens = {"hf_good"}
        source = open_source("hf://org/tiny", SourceOptions(max_attempts=1))
        assert read(source, "model.safetensors") == DATA
        assert source.stat("model.safetensors").sha256 == hashlib.sha256(DATA).digest()
        source.close()
    assert {call.target for call in proxy.calls} == {
        "hub.store.example:443",
        "content.store.example:443",
    }
    assert not any("authorization" in call.headers for call in proxy.calls), "the Hub's token"


def test_plain_http_goes_to_the_proxy_with_the_whole_address(
    proxy: ProxyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "blob.bin").write_bytes(DATA)
    with StoreServer(tmp_path) as server:
        source = HttpSource(f"http://{proxy.lead('web', server.url)}/m", SourceOptions(max_attempts=1))
        for _ in range(3):
            assert read(source) == DATA
        source.close()
    (target,) = {call.target for call in proxy.calls}
    assert target == "http://web.store.example/m/blob.bin"
    assert proxy.calls[0].headers["host"] == "web.store.example"
    assert proxy.calls[0].headers["proxy-authorization"] == LOGIN


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_a_refusal_names_the_proxy_and_never_its_password(
    scheme: str, proxy: ProxyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_proxy(monkeypatch, proxy, proxy.url.replace("://", "://user:secret-word@"))
    with pytest.raises(SourceError, match="asks for other credentials") as caught:
        read_at(f"{scheme}://web.store.example/m", hedge_after_s=0.0)
    assert not isinstance(caught.value, UnavailableError)
    assert len(proxy.calls) == 1, "no other attempt helps"
    assert f"the proxy {proxy.url}" in caught.value.message
    assert "HTTPS_PROXY" in caught.value.hint
    assert "secret-word" not in f"{caught.value} {caught.value.__cause__!r} {proxy.url}"


def test_a_proxy_that_lets_none_through_is_no_outage(proxy: ProxyServer) -> None:
    proxy.status = 403
    with pytest.raises(SourceError, match=r"refuses the connection to https://web.store.example \(403\)"):
        read_at("https://web.store.example/m", hedge_after_s=0.0)
    assert len(proxy.calls) == 1


def test_a_proxy_that_does_not_reach_the_store_is_asked_again(proxy: ProxyServer) -> None:
    with pytest.raises(UnavailableError, match="after 3 attempts"):
        read_at("https://unknown.store.example/m", max_attempts=3, outage_s=0.0, hedge_after_s=0.0)
    assert len(proxy.calls) == 3


def test_a_proxy_that_is_down_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with ProxyServer() as server:
        pass
    use_proxy(monkeypatch, server)
    with pytest.raises(
        UnavailableError, match=f"web.store.example could be made through the proxy {server.url}"
    ):
        read_at("https://web.store.example/m", max_attempts=1, outage_s=0.0)


def test_token_services_are_asked_through_the_proxy_too(
    proxy: ProxyServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with GsServer() as server:
        use_gs_account(monkeypatch, server)
        host = proxy.lead("tokens", server.url)
        target = "/computeMetadata/v1/instance/service-accounts/default/token"
        headers = (("Metadata-Flavor", "Google"),)
        head, _ = exchange(Request("GET", Origin("https", host, 443), target, headers))
    assert head.status == 200
    assert [call.target for call in proxy.calls] == [f"{host}:443"]


# ---- certificates ----


def test_certificates_come_from_a_folder_too(
    proxy: ProxyServer, certificate: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "blob.bin").write_bytes(DATA)
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    (trusted / f"{subject_hash(certificate)}.0").write_bytes(certificate.read_bytes())
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(trusted))
    with StoreServer(tmp_path) as server:
        assert read_at(f"https://{proxy.lead('web', server.url)}/m") == DATA


def test_an_authority_that_is_not_trusted_is_refused_and_a_missing_bundle_named(
    proxy: ProxyServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proxy.targets["web.store.example"] = ("127.0.0.1", 1)
    monkeypatch.delenv("REQUESTS_CA_BUNDLE")
    with pytest.raises(SourceError, match="no valid certificate") as caught:
        read_at("https://web.store.example/m", hedge_after_s=0.0)
    assert "REQUESTS_CA_BUNDLE" in caught.value.hint
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "absent.pem"))
    with pytest.raises(SourceError, match=r"cannot be read from .*absent\.pem"):
        read_at("https://web.store.example/m")


def subject_hash(certificate: Path) -> str:
    """The name by which OpenSSL finds a certificate in a folder."""
    import subprocess

    command = ["openssl", "x509", "-hash", "-noout", "-in", str(certificate)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


# ---- which proxy ----

STORE = Origin("https", "bucket.s3.amazonaws.com", 443)


def proxy_of(origin: Origin = STORE, **environment: str) -> str | None:
    found = Proxies(environment).of(origin)
    return None if found is None else str(found.origin)


def test_small_letters_go_first_and_all_proxy_last() -> None:
    assert proxy_of(HTTPS_PROXY="http://a:1", https_proxy="http://b:2") == "http://b:2"
    assert proxy_of(HTTPS_PROXY="a:3128", ALL_PROXY="http://c:3") == "http://a:3128"
    assert proxy_of(all_proxy="http://c:3/") == "http://c:3"
    assert proxy_of(HTTP_PROXY="http://a:1") is None
    plain = Origin("http", "store.example", 80)
    assert proxy_of(plain, HTTP_PROXY="http://a:1") == "http://a:1"
    assert proxy_of(plain, HTTP_PROXY="http://a:1", REQUEST_METHOD="GET") is None, "a client's header"
    assert (
        proxy_of(plain, http_proxy="http://[fd00::1]:3128", REQUEST_METHOD="GET") == "http://[fd00::1]:3128"
    )


@pytest.mark.parametrize(
    ("entries", "host", "is_direct"),
    [
        ("*", "a.example", True),
        ("amazonaws.com", "bucket.s3.amazonaws.com", True),
        (".amazonaws.com", "bucket.s3.amazonaws.com", True),
        ("*.amazonaws.com", "bucket.s3.amazonaws.com", True),
        ("Store.Example", "store.example", True),
        ("ore.example", "store.example", False),
        ("other, store.example", "store.example", True),
        ("store.example:443", "store.example", True),
        ("store.example:80", "store.example", False),
        ("10.0.0.0/8", "10.1.2.3", True),
        ("10.0.0.0/8", "11.1.2.3", False),
        ("10.1.2.3", "10.1.2.3", True),
        ("fd00::/8", "fd00::5", True),
        ("[fd00::5]:443", "fd00::5", True),
        ("10.0.0.0/8", "ten.example", False),
        ("10.0.0.0/99,::/x,[,:", "10.1.2.3", False),
        ("", "store.example", False),
    ],
)
def test_no_proxy_names_hosts_domains_ports_and_networks(entries: str, host: str, is_direct: bool) -> None:
    found = proxy_of(Origin("https", host, 443), HTTPS_PROXY="http://a:1", NO_PROXY=entries)
    assert (found is None) is is_direct


@pytest.mark.parametrize(
    "host",
    [
        "127.0.0.1",
        "localhost",
        "::1",
        "169.254.169.254",
        "169.254.170.2",
        "fd00:ec2::254",
        "metadata.google.internal",
    ],
)
def test_this_machine_and_metadata_services_are_asked_directly(host: str) -> None:
    assert proxy_of(Origin("http", host, 80), HTTP_PROXY="http://a:1", ALL_PROXY="http://a:1") is None


@pytest.mark.parametrize(
    "value",
    [
        "socks5://user:secret-word@a:1",
        "https://a:1",
        "http://user:secret-word@",
        "http://a:1/x",
        "http://a:99999",
    ],
)
def test_a_proxy_that_cannot_be_used_is_an_error_without_its_password(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("https_proxy", value)
    with pytest.raises(UsageError, match="https_proxy") as caught:
        read_at("https://web.store.example/m")
    assert "secret-word" not in str(caught.value)
    monkeypatch.setenv("no_proxy", "*")
    assert Proxies({"https_proxy": value, "no_proxy": "*"}).of(STORE) is None


def test_a_proxys_credentials_are_not_shown() -> None:
    found = Proxies({"HTTPS_PROXY": "http://user:p%40ss%3Aword@a:1"}).of(STORE)
    assert found is not None
    assert found.headers == (("Proxy-Authorization", LOGIN),)
    assert repr(found) == "Proxy(http://a:1)"
