"""Models of the Hub as a source: one commit, signed addresses, tokens, refusals, digests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.hub_server import Call, HubServer, Reply, use_hub
from tests.support.tiny_models import save_tiny

import teneral
from teneral.loader.errors import (
    AccessDeniedError,
    ChangedError,
    FormatError,
    IntegrityError,
    NotFoundError,
    SourceError,
    TeneralError,
    UnavailableError,
    UsageError,
)
from teneral.loader.sources.base import Source, SourceOptions
from teneral.loader.sources.hub.address import parse_url
from teneral.loader.sources.hub.quantisation import choose_file
from teneral.loader.sources.open import model_address, open_source, open_store

WEIGHTS = bytes(range(256)) * 1200
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "empty.txt": b"", "draft/config.json": b"{ }"}
ONCE = SourceOptions(max_attempts=1)
OPENED: list[Source] = []  # to be closed behind the test


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubServer]:
    with HubServer() as server, pytest.MonkeyPatch.context() as patch:
        use_hub(patch, server, tmp_path / "home")
        server.repository("org/tiny", FILES)
        yield server
        while OPENED:
            OPENED.pop().close()


def opened(url: str, options: SourceOptions | None = None) -> Source:
    OPENED.append(open_source(url, options))
    return OPENED[-1]


def read(source: Source, name: str, start: int = 0, size: int = 1000) -> bytes:
    buffer = bytearray(size)
    source.read_into(name, start, memoryview(buffer))
    return bytes(buffer)


# ---- addresses ----


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("hf://org/name", ("org/name", "main", "", "")),
        ("hf://org/name@v1.0/a b/c", ("org/name", "v1.0", "a b/c", "")),
        ("hf://org/name@refs/pr/3/folder", ("org/name", "refs/pr/3", "folder", "")),
        ("hf://Org-1/n.a_me@main:Q4_K_M", ("Org-1/n.a_me", "main", "", "Q4_K_M")),
        ("HF://org/name/", ("org/name", "main", "", "")),
    ],
)
def test_an_address_names_a_repository_a_revision_and_a_folder(url: str, expected: tuple[str, ...]) -> None:
    assert tuple(parse_url(url)) == expected


@pytest.mark.parametrize(
    "url",
    [
        "hf://name", "hf://", "hf://org/../name", "hf://org/na..me", "hf://org/name@..", "hf://org/name/../x",
        "hf://org/name@a b", "hf://org/name:Q4/folder", "hf://org/name?x=1", "hf://or\ng/name", "hf://-org/name",
        "hf://org/name@/x", f"hf://org/{'n' * 97}",
    ],
)  # fmt: skip
def test_other_addresses_are_refused_with_the_form(url: str) -> None:
    with pytest.raises(UsageError, match="not the address of a model on the Hub") as caught:
        opened(url)
    assert "hf://org/name" in caught.value.hint


def test_a_name_without_a_scheme_is_the_hubs_unless_there_is_such_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (
        "org/name",
        "org/name@main",
        "org/name@refs/pr/1",
        "org/name:Q4_K_M",
        f"org/name@b3:{'0' * 64}",
    ):
        assert model_address(name) == f"hf://{name}"
    for other in (
        "name",
        "./org/name",
        "/org/name",
        "~/name",
        "a/b/c",
        "s3://bucket/name",
        "..",
        "org/",
        "a/b.c:",
    ):
        assert model_address(other) == other
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert model_address("org/name") == "org/name"
    assert model_address(f"org/name@b3:{'0' * 64}") == f"org/name@b3:{'0' * 64}"
    assert model_address("org/name@main") == "hf://org/name@main"


def test_nothing_is_written_to_the_hub() -> None:
    with pytest.raises(UsageError, match="can only be read from"):
        open_store("hf://org/name")


# ---- one commit ----


def test_all_that_is_read_is_of_the_commit_that_was_there_first(hub: HubServer) -> None:
    source = opened("hf://org/tiny")
    assert source.url == "hf://org/tiny"
    info = source.stat("model.safetensors")
    hub.repositories["org/tiny"].commit({"model.safetensors": b"other", "config.json": b"[]"})
    assert source.read("config.json", max_bytes=100)[0] == b"{}"
    assert read(source, "model.safetensors") == WEIGHTS[:1000]
    commit = next(iter(hub.repositories["org/tiny"].commits))
    assert source.url == f"hf://org/tiny@{commit}"
    newer = opened("hf://org/tiny")
    with pytest.raises(ChangedError):
        newer.read_into("model.safetensors", 0, memoryview(bytearray(2)), version=info.version)
    pinned = opened(f"hf://org/tiny@{commit}")
    assert pinned.read_into("model.safetensors", 5, memoryview(bytearray(9)), version=info.version)
    assert len(hub.calls_of("hub", "/api/models/")) == 3, "each source asks once"


def test_a_folder_of_a_branch_is_a_source(hub: HubServer) -> None:
    hub.repositories["org/tiny"].commit({"a b/config.json": b"[1]"}, branch="refs/pr/1")
    source = opened("hf://org/tiny@refs/pr/1/a b")
    assert [info.name for info in source.list()] == ["config.json"]
    assert source.read("config.json", max_bytes=10)[0] == b"[1]"


# ---- the content network ----


def test_a_redirects_address_is_used_again_and_renewed_when_it_has_expired(hub: HubServer) -> None:
    source = opened("hf://org/tiny")
    for start in (0, 1000, 2000):
        assert read(source, "model.safetensors", start) == WEIGHTS[start : start + 1000]
    assert len(hub.calls_of("hub", "/resolve/")) == 1
    assert len(hub.calls_of("content")) == 3
    hub.expire()
    assert read(source, "model.safetensors", 3000) == WEIGHTS[3000:4000]
    assert len(hub.calls_of("hub", "/resolve/")) == 2
    hub.expire()
    assert read(source, "model.safetensors", 4000) == WEIGHTS[4000:5000]


def test_a_redirects_address_is_not_used_for_longer_than_it_is_signed(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("teneral.loader.sources.hub.store.LOCATION_S", 0.0)
    source = opened("hf://org/tiny")
    for _ in range(2):
        read(source, "model.safetensors")
    assert len(hub.calls_of("hub", "/resolve/")) == 2


def test_a_content_network_that_refuses_every_address_ends_the_read(hub: HubServer) -> None:
    def refuse(call: Call) -> Reply | None:
        return (403, {}, b"no") if call.server == "content" else None

    hub.fault = refuse
    with pytest.raises(UnavailableError, match="again and again"):
        read(opened("hf://org/tiny", ONCE), "model.safetensors")


def test_the_token_goes_to_the_hub_alone(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens.add("hf_secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    source = opened("hf://org/tiny")
    read(source, "model.safetensors")
    assert {call.headers.get("authorization") for call in hub.calls_of("hub")} == {"Bearer hf_secret"}
    assert {call.headers.get("authorization") for call in hub.calls_of("content")} == {None}


# ---- tokens ----


def test_the_token_is_that_of_the_environment_or_of_the_login(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.tokens |= {"hf_file", "hf_set"}
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "token").write_text("hf_file\n")

    def sent(options: SourceOptions | None = None) -> str | None:
        hub.calls.clear()
        opened("hf://org/tiny", options).stat("config.json")
        return hub.calls[0].headers.get("authorization")

    assert sent() == "Bearer hf_file"
    assert sent(SourceOptions(anonymous=True)) is None
    monkeypatch.setenv("HF_TOKEN", "hf_set")
    assert sent() == "Bearer hf_set"


@pytest.mark.parametrize(
    ("endpoint", "token"), [("http://hub.example", "hf_secret"), ("", "hf_sec ret"), ("", "ü")]
)
def test_a_token_that_would_be_exposed_or_misread_is_not_sent(
    hub: HubServer, endpoint: str, token: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
    monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UsageError) as caught:
        opened("hf://org/tiny").stat("config.json")
    assert token not in str(caught.value)
    assert not hub.calls


# ---- refusals ----


def refusal(url: str) -> TeneralError:
    with pytest.raises(TeneralError) as caught:
        read(opened(url, ONCE), "model.safetensors")
    return caught.value


def test_a_gated_model_says_where_its_terms_are(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.tokens |= {"hf_good", "hf_other"}
    hub.repositories["org/tiny"].readers = {"hf_good"}
    for token in ("", "hf_other"):
        monkeypatch.setenv("HF_TOKEN", token)
        error = refusal("hf://org/tiny")
        assert isinstance(error, AccessDeniedError)
        assert "org/tiny is gated" in error.message
        assert f"{hub.url}/org/tiny" in error.hint
        assert "HF_TOKEN" in error.hint
        assert not token or token not in str(error)
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    assert read(opened("hf://org/tiny"), "model.safetensors") == WEIGHTS[:1000]


def test_a_private_model_and_none_look_alike(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repository("org/private", FILES).is_private = True
    for name in ("org/private", "org/absent"):
        error = refusal(f"hf://{name}")
        assert isinstance(error, NotFoundError)
        assert f"there is no model {name} on the Hub" in error.message
        assert f"no folder {name} here" in error.message
        assert "HF_TOKEN" in error.hint


def test_a_token_that_is_good_no_longer_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_expired")
    error = refusal("hf://org/tiny")
    assert isinstance(error, AccessDeniedError)
    assert "does not accept the token" in error.message
    assert "hf_expired" not in str(error)


def test_a_missing_revision_and_a_missing_file_are_named(hub: HubServer) -> None:
    error = refusal("hf://org/tiny@v2")
    assert isinstance(error, NotFoundError)
    assert "org/tiny has no revision v2" in error.message
    num_calls = len(hub.calls)
    source = opened("hf://org/tiny")
    with pytest.raises(NotFoundError, match=r"there is no absent\.json in hf://org/tiny@[0-9a-f]{40}"):
        source.read("absent.json", max_bytes=10)
    assert len(hub.calls) == num_calls + 1, "the list says so, without a request"


def test_a_rate_limit_is_waited_for_as_long_as_the_hub_asks(hub: HubServer) -> None:
    replies = iter([(429, {"Retry-After": "0", "X-Error-Message": "slow down"}, b""), None, None])
    hub.fault = lambda call: next(replies, None)
    assert read(opened("hf://org/tiny"), "model.safetensors") == WEIGHTS[:1000]
    hub.fault = lambda call: (429, {"X-Error-Message": "slow down"}, b"")
    error = refusal("hf://org/tiny")
    assert isinstance(error, UnavailableError)
    assert "slow down" in error.message
    assert "With a token" in error.hint


@pytest.mark.parametrize(
    "body",
    [
        b"<html>", b"[]", b"{}", b'{"sha": "main", "siblings": []}', b'{"sha": "%s"}' % (b"0" * 40),
        b'{"sha": "%s", "siblings": [1]}' % (b"0" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "a"}]}' % (b"0" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "a", "size": -1}]}' % (b"0" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "a", "size": true}]}' % (b"0" * 40),
        b'{"sha": "%s", "siblings": [{"rfilename": "a", "size": 1, "lfs": {"sha256": "x"}}]}' % (b"0" * 40),
        b"[" * 100_000,
    ],
)  # fmt: skip
def test_a_malformed_list_is_refused(hub: HubServer, body: bytes) -> None:
    hub.fault = lambda call: (200, {}, body)
    assert isinstance(refusal("hf://org/tiny"), FormatError)


def test_names_that_lead_elsewhere_are_left_out(hub: HubServer) -> None:
    hub.repository(
        "org/hostile", {"../../etc/passwd": b"x", "/abs": b"x", "a\x1b[2J": b"x", "config.json": b"{}"}
    )
    assert [info.name for info in opened("hf://org/hostile").list()] == ["config.json"]


def test_an_unusable_endpoint_is_named(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "ftp://hub")
    with pytest.raises(UsageError, match="HF_ENDPOINT is not a web address"):
        opened("hf://org/tiny")


def test_an_endpoint_may_be_a_folder_of_a_mirror(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", f"{hub.url}/mirror/")
    hub.fault = lambda call: (
        None
        if call.server == "content" or not call.path.startswith("/mirror/")
        else hub.hub_answer(call._replace(path=call.path.removeprefix("/mirror")))
    )
    assert read(opened("hf://org/tiny"), "model.safetensors") == WEIGHTS[:1000]


# ---- digests ----


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_small_file_is_checked_against_the_hubs_digest(hub: HubServer, name: str) -> None:
    damaged = bytes(len(FILES[name]))
    hub.fault = lambda call: (200, {}, damaged) if call.server == "content" or name in call.path else None
    with pytest.raises(IntegrityError, match="digest the Hub states") as caught:
        opened("hf://org/tiny").read(name, max_bytes=1 << 20)
    assert caught.value.expected != caught.value.got
    assert name in caught.value.where


def test_bits_that_flipped_on_the_way_are_read_again(hub: HubServer) -> None:
    replies = iter([(200, {}, b"[]")])
    hub.fault = lambda call: next(replies, None) if "config.json" in call.path else None
    assert opened("hf://org/tiny").read("config.json", max_bytes=10)[0] == b"{}"


# ---- GGUF ----

GGUF = (
    "tiny-q4_k_m.gguf", "tiny-Q8_0.gguf", "tiny.F16.gguf", "mmproj-F16.gguf", "imatrix.gguf", "README.md",
    "big/tiny-Q6_K-00001-of-00002.gguf", "big/tiny-Q6_K-00002-of-00002.gguf", "a/x-Q5_0.gguf", "b/x-Q5_0.gguf",
)  # fmt: skip


def test_a_gguf_file_is_chosen_by_its_quantisation() -> None:
    assert choose_file(GGUF, "Q4_K_M", where="w") == "tiny-q4_k_m.gguf"
    assert choose_file(GGUF, "q8_0", where="w") == "tiny-Q8_0.gguf"
    assert choose_file(GGUF, "F16", where="w") == "tiny.F16.gguf"
    for wanted, hint in (
        ("Q4_K", "It has F16, Q4_K_M, Q5_0, Q6_K, Q8_0."),
        ("Q6_K", "llama-gguf-split --merge"),
        ("Q5_0", "a/x-Q5_0.gguf, b/x-Q5_0.gguf"),
    ):
        with pytest.raises(NotFoundError) as caught:
            choose_file(GGUF, wanted, where="w")
        assert hint in caught.value.hint
    with pytest.raises(SourceError, match="no GGUF file of the quantisation Q4"):
        choose_file([], "Q4", where="w")


# ---- wherever a model's address is taken ----


def test_weights_are_loaded_into_any_program_by_their_name(hub: HubServer, tmp_path: Path) -> None:
    model = save_tiny("llama", tmp_path / "model")
    hub.repository("org/llama", model)
    loaded = teneral.load_file("org/llama")
    expected = teneral.load_file(model)
    assert loaded.keys() == expected.keys()
    assert all(loaded[name].equal(expected[name]) for name in expected)
