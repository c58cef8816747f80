"""Images at addresses: from the operator's origins and public addresses alone, within bounds."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from tests.support.instances import TinyParts
from tests.support.vision_models import data_url, file_of, picture, save_vision

from teneral.handlers.openai import remote_images
from teneral.handlers.openai.remote_images import fetch_image, is_public
from teneral.loader.errors import UsageError
from teneral.runtime.errors import RequestError

FILE = file_of(picture(40, 40))
Answer = Callable[[BaseHTTPRequestHandler], None]


def send(data: bytes, *, status: int = 200, **headers: str) -> Answer:
    def answer(request: BaseHTTPRequestHandler) -> None:
        request.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            request.send_header(name, value)
        request.end_headers()
        request.wfile.write(data)

    return answer


@contextmanager
def store(answers: dict[str, Answer]) -> Iterator[str]:
    """A server with these answers by path; its origin."""

    class Requests(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers[self.path](self)

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Requests) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def fetched(url: str, *origins: str, max_bytes: int = 1 << 20) -> bytes:
    return fetch_image(url, frozenset(origins), "messages[0].content[0]", max_bytes)


def test_a_file_is_fetched_from_a_named_origin_through_its_redirects() -> None:
    answers = {"/a?b=c": send(FILE), "/old": send(b"", status=302, Location="/a?b=c")}
    with store(answers) as origin:
        assert fetched(f"{origin}/a?b=c", origin) == FILE
        assert fetched(f"{origin}/old", origin) == FILE


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("https://example.com/secret-path", "fetches no images from https://example.com\n"),
        ("http://127.0.0.1:1@example.com/", "without a user"),
        ("file:///etc/passwd", "must be http or https"),
        ("http://[::1", "is invalid"),
        ("http://named.example:99999/", "is invalid"),
    ],
)
def test_other_addresses_are_refused_without_a_connection(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_images.socket, "getaddrinfo", None)
    with pytest.raises(RequestError, match=message) as caught:
        fetched(url, "https://named.example")
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("origins", [("*",), ("http://localhost:{port}",)])
def test_names_of_private_addresses_are_refused(origins: tuple[str, ...]) -> None:
    with store({"/": send(FILE)}) as origin:
        port = origin.rpartition(":")[2]
        url = f"http://localhost:{port}/"
        with pytest.raises(RequestError, match="is no public address"):
            fetched(url, *(each.format(port=port) for each in origins))


def test_any_origin_does_not_admit_private_literals() -> None:
    with store({"/": send(FILE)}) as origin, pytest.raises(RequestError, match="is no public address"):
        fetched(f"{origin}/", "*")


def test_a_redirect_to_another_origin_is_not_followed() -> None:
    with (
        store({"/": send(FILE)}) as inner,
        store({"/": send(b"", status=307, Location=f"{inner}/")}) as origin,
    ):
        with pytest.raises(RequestError, match="fetches no images from http://127"):
            fetched(f"{origin}/", origin)
        assert fetched(f"{origin}/", origin, inner) == FILE


def hang(request: BaseHTTPRequestHandler) -> None:
    request.send_response(200)
    request.send_header("Content-Length", "100")
    request.end_headers()
    request.wfile.write(b"x")
    request.wfile.flush()
    request.rfile.read(1)  # until the client leaves


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (send(b"", status=404), "status 404"),
        (send(bytes(2_001)), "more than 2000 bytes"),
        (send(b"short", **{"Content-Length": "100"}), "cannot be fetched"),
        (send(b"", status=302, Location="/"), "more than 3 redirects"),
        (send(b"", status=302), "more than 3 redirects"),
        (hang, "cannot be fetched"),
    ],
)
def test_answers_that_are_no_file_are_refused(
    answer: Answer, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_images, "FETCH_S", 1.0)
    with store({"/": answer}) as origin, pytest.raises(RequestError, match=message):
        fetched(f"{origin}/", origin, max_bytes=2_000)


def test_a_closed_port_is_an_error_of_the_request() -> None:
    with store({}) as origin:
        pass
    with pytest.raises(RequestError, match="cannot be fetched: ConnectionRefusedError"):
        fetched(f"{origin}/", origin)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("10.0.0.1", False),
        ("127.0.0.1", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.0", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("fe80::1%eth0", False),
        ("fd00::1", False),
        ("::ffff:169.254.169.254", False),
        ("64:ff9b::a9fe:a9fe", False),
        ("2002:a9fe:a9fe::1", False),
    ],
)
def test_public_addresses(address: str, expected: bool) -> None:
    assert is_public(address) is expected


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory, one_thread: None) -> Iterator[TinyParts]:
    directory: Path = tmp_path_factory.mktemp("vision")
    made = TinyParts.read(directory, save_vision(directory))
    with closing(made.tokenizer):
        yield made


def bodies(url: str) -> dict[str, dict[str, Any]]:
    """Of each API, a request about the image."""
    options = {"temperature": 0}
    part = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "url", "url": url}
    return {
        "/v1/chat/completions": {
            "messages": [{"role": "user", "content": [part]}],
            "max_tokens": 4,
            **options,
        },
        "/v1/responses": {
            "input": [{"role": "user", "content": [{"type": "input_image", "image_url": url}]}],
            "max_output_tokens": 4,
            **options,
        },
        "/v1/messages": {
            "messages": [{"role": "user", "content": [{"type": "image", "source": source}]}],
            "max_tokens": 4,
            **options,
        },
    }


@pytest.mark.parametrize("path", list(bodies("")))
async def test_answers_are_those_of_the_image_as_a_data_url(start: Any, parts: TinyParts, path: str) -> None:
    with store({"/cat": send(FILE)}) as origin:
        async with start(parts=parts, image_origins=origin) as server:
            named = {"model": server.instance.config.served_name}
            answer = await server.post(path, {**bodies(f"{origin}/cat")[path], **named})
            assert answer.status == 200, answer.body
            usage = answer.json["usage"]
            data = bodies(data_url(FILE))["/v1/chat/completions"]
            expected = (await server.post("/v1/chat/completions", data)).json["usage"]
    num_tokens = usage.get("prompt_tokens") or usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)
    assert num_tokens == expected["prompt_tokens"]
    # The same bytes, so the same prefix.
    assert expected["prompt_tokens_details"]["cached_tokens"] == num_tokens // 16 * 16


async def test_nothing_is_fetched_without_the_setting(start: Any, parts: TinyParts) -> None:
    with store({}) as origin:
        async with start(parts=parts) as server:
            answer = await server.post(
                "/v1/chat/completions", bodies(f"{origin}/cat")["/v1/chat/completions"]
            )
    assert answer.status == 400
    assert "this server fetches no images from" in answer.json["error"]["message"]


async def test_a_model_of_text_fetches_nothing(start: Any) -> None:
    with store({}) as origin:
        async with start(image_origins=origin) as server:
            answer = await server.post(
                "/v1/chat/completions", bodies(f"{origin}/cat")["/v1/chat/completions"]
            )
    assert answer.status == 400
    assert "this model takes text only" in answer.json["error"]["message"]


async def test_a_setting_that_names_no_origins_is_refused_at_the_start(start: Any) -> None:
    with pytest.raises(UsageError, match="image_origins must be"):
        async with start(image_origins="not an origin"):
            await asyncio.sleep(0)
