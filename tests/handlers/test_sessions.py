"""The sessions, tenants and salts that a function may give its generations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.support.small_host import SmallHost

from teneral.handlers.function.context import Context
from teneral.handlers.generate import handler as generate
from teneral.runtime.errors import RequestError
from teneral.runtime.step.requests import GenerationRequest, Priority


@pytest.fixture
def asked(host: SmallHost, monkeypatch: pytest.MonkeyPatch) -> list[GenerationRequest]:
    """What the engine was asked."""
    engine = host.engine.result()
    requests: list[GenerationRequest] = []
    submit = engine.submit

    def note(request: GenerationRequest, *args: Any) -> Any:
        requests.append(request)
        return submit(request, *args)

    monkeypatch.setattr(engine, "submit", note)
    return requests


def test_generations_are_of_the_invocations_session(
    make_context: Callable[..., Context], asked: list[GenerationRequest]
) -> None:
    make_context(session="s").model.generate("x", max_tokens=1)
    make_context().model.generate("x", max_tokens=1)
    assert [request.session for request in asked] == ["s", ""]


def test_options_say_whose_a_generation_is(
    make_context: Callable[..., Context], asked: list[GenerationRequest]
) -> None:
    options = {"session": "own", "tenant": "t", "cache_salt": "some salt", "priority": "batch"}
    make_context(session="s").model.generate("x", max_tokens=1, **options)
    (request,) = asked
    assert (request.session, request.tenant, request.cache_salt) == ("own", "t", "some salt")
    assert request.priority is Priority.BATCH


def test_an_event_may_say_it_too(
    make_context: Callable[..., Context], asked: list[GenerationRequest]
) -> None:
    generate({"prompt": "x", "max_tokens": 1, "session": "s", "priority": "batch"}, make_context())
    assert (asked[0].session, asked[0].priority) == ("s", Priority.BATCH)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("priority", "urgent"),
        ("priority", 1),
        ("session", 5),
        ("session", "a b"),
        ("tenant", "\0"),
        ("cache_salt", b"x"),
    ],
)
def test_invalid_values_are_refused_by_name(
    make_context: Callable[..., Context], option: str, value: Any
) -> None:
    with pytest.raises(RequestError) as caught:
        make_context().model.generate("x", **{option: value})
    assert caught.value.param == option
