"""The same wrong values get the same refusal on every route that generates text. Batch lines in OpenAI's form are
requests of these routes.
"""

from __future__ import annotations

from typing import Any

import pytest

HELLO = [{"role": "user", "content": "Hello"}]
# The least body of each route, its own names of fields, and the fields below that it does not have.
ROUTES: dict[str, tuple[dict[str, Any], dict[str, str], set[str]]] = {
    "/v1/completions": ({"prompt": "x", "max_tokens": 1}, {}, {"tools", "messages", "metadata"}),
    "/v1/chat/completions": ({"messages": HELLO, "max_tokens": 1}, {}, set()),
    "/v1/responses": (
        {"input": "x", "max_output_tokens": 1},
        {"max_tokens": "max_output_tokens"},
        {"messages"},
    ),
    "/v1/messages": ({"messages": HELLO, "max_tokens": 1}, {"stop": "stop_sequences"}, set()),
}
WRONG: list[tuple[str, Any, str]] = [
    # field, value, the message's text behind the name
    ("max_tokens", -1, " is -1, but must be from 0 to 2,147,483,648"),
    ("max_tokens", "1", " is invalid: expected 'int"),
    ("max_tokens", True, " is invalid: expected 'int"),
    ("max_tokens", 10**30, f" is {10**30}, but must be from 0 to"),
    ("temperature", -0.1, " is -0.1, but must be from 0 to 100"),
    ("temperature", "1", " is invalid: expected 'float | null', got 'str'"),
    ("top_p", 1.1, " is 1.1, but must be from 0 to 1"),
    ("top_k", -2, " is -2, but must be from 0 to"),
    ("stop", [""], " must have up to 16 strings of 1 to 1024 characters"),
    ("stop", ["x"] * 17, " must have up to 16 strings of 1 to 1024 characters"),
    ("stop", ["x" * 1025], " must have up to 16 strings of 1 to 1024 characters"),
    ("stop", [1], "[0] is invalid: expected 'str', got 'int'"),
    ("stream", 1, " is invalid: expected 'bool | null', got 'int'"),
    ("model", 1, " is invalid: expected 'str | null', got 'int'"),
    ("teneral", {"first_token": "never"}, ".first_token is invalid: invalid enum value 'never'"),
    ("teneral", {"unknown": 1}, ".unknown is invalid: object contains unknown field"),
    ("metadata", 1, " is invalid: expected 'object | null', got 'int'"),
    ("tools", [1], "[0] is invalid: expected 'object', got 'int'"),
    ("messages", [], " is empty"),
    ("messages", "x", " is invalid: expected 'array', got 'str'"),
    ("no_such_field", 1, " is invalid: object contains unknown field 'no_such_field'"),
]


@pytest.mark.parametrize("route", ROUTES)
async def test_the_same_wrong_value_has_the_same_refusal_on_every_route(start: Any, route: str) -> None:
    least, own_names, missing = ROUTES[route]
    async with start() as server:
        assert (await server.post(route, least)).status == 200
        for field, value, words in WRONG:
            name = own_names.get(field, field)
            if field in missing:
                name, words = field, f" is invalid: object contains unknown field {field!r}"
            answer = await server.post(route, {**least, name: value})
            message = answer.json["error"]["message"]
            assert (answer.status, message[: len(name + words)]) == (400, name + words)
            if route != "/v1/messages":  # Anthropic's errors name the field in the message alone
                assert answer.error["param"] == message.partition(" ")[0]
        unknown = await server.post(route, {**least, "model": "another"})
        assert unknown.status == 404
        assert unknown.json["error"]["message"].startswith("the model 'another' does not exist here")
