"""Web addresses mean what `urllib.parse` says, whether or not it is asked."""

from __future__ import annotations

import subprocess
import sys
from urllib.parse import quote, urlsplit

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from teneral.loader.sources.http.address import (
    Origin,
    WebAddress,
    encode_path,
    encode_value,
    parse_address,
)

SCHEMES = st.sampled_from(("http", "https", "HTTP", "ftp", "", "httpx"))
HOSTS = st.one_of(
    st.sampled_from(
        ("h", "a.example.com", "H.Example", "127.0.0.1", "[::1]", "", "u:p@h", "h_x", "-h", "h.")
    ),
    st.text("ab.-_1@[:]%é", max_size=8),
)
PORTS = st.one_of(
    st.just(""), st.integers(-1, 70_000).map(lambda port: f":{port}"), st.sampled_from((":", ":x", ":080"))
)
TAILS = st.text("/ab.~%?#=& +é\t", max_size=12).map(lambda tail: tail and f"/{tail}")
TEXTS = st.text(max_size=20)


def by_the_library(url: str) -> WebAddress | None:
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    if parts.scheme not in ("http", "https") or not parts.hostname or "@" in parts.netloc:
        return None
    origin = Origin(parts.scheme, parts.hostname, port or {"http": 80, "https": 443}[parts.scheme])
    path, query = (quote(text, safe="/?:@-._~!$&'()*+,;=%") for text in (parts.path, parts.query))
    return WebAddress(origin, path, query)


@given(SCHEMES, HOSTS, PORTS, TAILS)
@example("http", "127.0.0.1", ":9000", "/models/packed")
@example("https", "h", ":65536", "")
@example("http", "h", ":0", "/")
def test_an_address_is_what_the_library_takes_it_for(scheme: str, host: str, port: str, tail: str) -> None:
    url = f"{scheme}://{host}{port}{tail}"
    assert parse_address(url) == by_the_library(url)


@given(st.text(max_size=30))
def test_any_text_is_what_the_library_takes_it_for(text: str) -> None:
    assert parse_address(text) == by_the_library(text)
    assert parse_address(f"http://h/{text}") == by_the_library(f"http://h/{text}")


@given(TEXTS)
@example("blobs/aebeeac94027/draft-000.bin")
@example("model-00001-of-00002.safetensors")
def test_names_are_encoded_as_the_library_does(text: str) -> None:
    assert encode_path(text) == quote(text, safe="/-_.~")
    assert encode_value(text) == quote(text, safe="-_.~")


def test_the_host_field_carries_a_port_only_where_it_is_unusual() -> None:
    urls = (
        "http://h/",
        "http://h:80/",
        "https://h:443",
        "https://h:80",
        "http://[::1]:9000/",
        "http://[::1]",
    )
    hosts = [address.origin.authority for url in urls if (address := parse_address(url))]
    assert hosts == ["h", "h", "h", "h:80", "[::1]:9000", "[::1]"]


def test_the_target_of_a_request_is_the_path_with_the_query() -> None:
    targets = [
        address.target for url in ("http://h", "http://h/a b?c=%20 d#e") if (address := parse_address(url))
    ]
    assert targets == ["/", "/a%20b?c=%20%20d"]


@pytest.mark.parametrize("url", ["s3://bucket/model", "http://127.0.0.1:9000/models/m"])
def test_what_is_spelt_plainly_needs_no_library(url: str) -> None:
    """The first request of a cold start waits for everything that is imported here."""
    code = (
        "import sys; from teneral.loader.sources.open import open_source; "
        f"source = open_source({url!r}); source.request('blobs/0a1b/draft-000.bin', ()).encode(); "
        "print(*sys.modules)"
    )
    environment = {
        "PATH": "",
        "HOME": "/nonexistent",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9000",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
    }
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert not {"urllib.parse", "ipaddress", "ssl", "hashlib"} & set(done.stdout.split())
