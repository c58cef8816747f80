"""A platform is one file and one row: `tests/support/toy_platform.py` is both."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.support.tiny_models import save_tiny
from tests.support.toy_platform import ROW
from tests.test_serve import Server

from teneral.handlers import platforms
from teneral.handlers.platforms import platform_of, resolve_settings


@pytest.fixture(autouse=True)
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platforms, "PLATFORMS", (*platforms.PLATFORMS, ROW))


def test_it_is_found_by_its_sign_and_gives_settings() -> None:
    assert platform_of("auto", {"TOY_FUNCTION_NAME": "f"}) is ROW
    assert platform_of("toy", {}) is ROW
    assert resolve_settings({"model": "m"}, {"TOY_PORT": "8089"}).port == 8089


async def test_its_events_reach_the_function_and_its_errors_have_its_shape(start: Any) -> None:
    def handler(event: Any, context: Any) -> Any:
        if event == "fail":
            raise RuntimeError("no")
        return {"event": event, "on": context.platform["name"]}

    async with start(handler=handler, platform=ROW) as server:
        answer = await server.post("/toy/run", {"toy": 5})
        assert (answer.status, answer.json) == (200, {"toy": [{"event": 5, "on": "toy"}]})
        failed = await server.post("/toy/run", {"toy": "fail"})
        assert failed.status == 500
        assert failed.body.decode().startswith("toy trouble: ")


def test_a_server_takes_its_port_from_it_and_answers_its_events(tmp_path: Path) -> None:
    save_tiny("llama", tmp_path / "model")
    (tmp_path / "function.py").write_text(
        "def handler(event, context):\n    return context.platform['name'] + event\n"
    )
    server = Server(
        tmp_path / "model",
        "--handler",
        f"{tmp_path / 'function.py'}:handler",
        program=(sys.executable, "-m", "tests.support.toy_platform"),
        variables={"TOY_FUNCTION_NAME": "f", "TOY_PORT": "0"},
    )
    try:
        assert server.ask("GET", "/toy/alive") == (200, b"alive")
        status, answer = server.ask("POST", "/toy/run", {"toy": "!"})
        assert (status, json.loads(answer)) == (200, {"toy": ["toy!"]})
        assert server.end() == 0
    finally:
        server.close()
