"""The document at /openapi.json: valid, complete, and true of real answers."""

from __future__ import annotations

import re
from typing import Any

import jsonschema_rs
import msgspec
import pytest
from openapi_spec_validator import OpenAPIV31SpecValidator
from tests.support.instances import StagedInstance, TinyParts

from teneral.handlers.anthropic.bodies import ROUTES as ANTHROPIC_FIELDS
from teneral.handlers.api_document.document import MODEL_HEADER, document
from teneral.handlers.api_document.routes import has_route, server_routes
from teneral.handlers.app import create_app, edge_rules
from teneral.handlers.console.files import PATHS as CONSOLE_PATHS
from teneral.handlers.console.routes import PAGES
from teneral.handlers.openai.fields import ROUTES as OPENAI_FIELDS
from teneral.handlers.platforms import HTTP
from teneral.handlers.platforms.kserve import schemas
from teneral.handlers.platforms.kserve.metadata import _STATES
from teneral.handlers.platforms.kserve.tensors import DATATYPES
from teneral.handlers.pool.overview import OPEN_PATHS as POOL_OPEN_PATHS
from teneral.handlers.pool.overview import ROUTES as POOL_ROUTES
from teneral.handlers.pool.overview import Overview
from teneral.runtime.state import State

OPEN_PATHS = edge_rules(HTTP).open_paths
DOCUMENT = document(OPEN_PATHS)
OF_A_POOL = document(POOL_OPEN_PATHS, (*POOL_ROUTES, *PAGES))
SCHEMAS = DOCUMENT["components"]["schemas"]
STRUCTS = [
    each for each in vars(schemas).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)
]


def documented(described: dict[str, Any] = DOCUMENT) -> set[tuple[str, str]]:
    return {(method.upper(), path) for path, item in described["paths"].items() for method in item}


def check(answer: Any, path: str, method: str = "get") -> None:
    """Raises unless the body is valid by the schema of its status."""
    described = DOCUMENT["paths"][path][method]["responses"]
    response = described.get(str(answer.status), described["default"])
    schema = response["content"]["application/json"]["schema"]
    jsonschema_rs.Draft202012Validator({**schema, "components": DOCUMENT["components"]}).validate(answer.json)


@pytest.mark.parametrize("described", [DOCUMENT, OF_A_POOL], ids=["server", "pool"])
def test_it_is_valid_openapi(described: dict[str, Any]) -> None:
    OpenAPIV31SpecValidator(described).validate()


def test_it_has_the_routes_of_a_server_and_no_others(tiny_parts: TinyParts) -> None:
    served = {
        (route.method, route.resource.canonical)
        for route in create_app(StagedInstance(tiny_parts)).router.routes()
        if route.resource and route.method != "HEAD"
    }
    assert documented() == served == {(each.method, each.canonical) for each in server_routes()}


def test_a_path_has_a_route_or_none(tiny_parts: TinyParts) -> None:
    for route in create_app(StagedInstance(tiny_parts)).router.routes():
        assert route.resource is not None
        assert has_route(re.sub(r"{\w+}", "org/m", route.resource.canonical)), route
    assert has_route("/v2/models/org/m/versions/8/generate_stream")
    for path in (
        "/favicon.ico",
        "/v1",
        "/v1/completions/",
        "/v1/completions/render",
        "/v2/models",
        "/v1.models",
        "",
    ):
        assert not has_route(path), path


def test_a_pools_has_its_own_routes_and_those_that_it_passes_on() -> None:
    routes = Overview(None, None, may_control=True).routes()  # type: ignore[arg-type]
    served = {(route.method, re.sub(r"{(\w+):[^{}]*}", r"{\1}", route.path)) for route in routes}
    assert documented(OF_A_POOL) == served | documented()
    for path, item in OF_A_POOL["paths"].items():
        for method, operation in item.items():
            names = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "header"}
            is_own = (method.upper(), path) in served or (method == "get" and path in CONSOLE_PATHS)
            assert names == (set() if is_own else {MODEL_HEADER}), path


def test_routes_without_a_key_are_those_of_the_edge() -> None:
    without = {
        path
        for path, item in DOCUMENT["paths"].items()
        if any(operation.get("security") == [] for operation in item.values())
    }
    assert without == OPEN_PATHS


@pytest.mark.parametrize("path", [*OPENAI_FIELDS, *ANTHROPIC_FIELDS])
def test_a_body_has_the_fields_of_its_table(path: str) -> None:
    schema = DOCUMENT["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    body = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    fields = {**OPENAI_FIELDS, **ANTHROPIC_FIELDS}[path]
    assert set(body["properties"]) == set(fields)


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_it_has_each_body_of_the_open_inference_protocol(struct: type[msgspec.Struct]) -> None:
    fields = msgspec.structs.fields(struct)
    assert set(SCHEMAS[struct.__name__]["properties"]) == {field.name for field in fields}


def test_it_has_every_state_and_datatype() -> None:
    assert set(SCHEMAS["RequestInput"]["properties"]["datatype"]["enum"]) == set(DATATYPES)
    assert set(SCHEMAS["ModelIndex"]["properties"]["state"]["enum"]) == set(_STATES.values())
    ready = DOCUMENT["paths"]["/readyz"]["get"]["responses"]["200"]["content"]["application/json"]["schema"]
    assert set(ready["properties"]["state"]["enum"]) == {str(state) for state in State}


async def test_a_server_sends_it_behind_its_key(start: Any) -> None:
    async with start(api_key="secret") as server:
        assert (await server.get("/openapi.json")).status == 401
        answer = await server.get("/openapi.json", headers={"Authorization": "Bearer secret"})
        assert answer.json["paths"].keys() == DOCUMENT["paths"].keys()
        check(await server.get("/v1/models"), "/v1/models")  # an error


async def test_answers_are_as_documented(start: Any) -> None:
    chat = {"messages": [{"role": "user", "content": "Once"}], "max_tokens": 4, "logprobs": True}
    turns = {"messages": [{"role": "user", "content": "Once"}], "model": "x"}
    prompt = {"prompt": "Once", "max_tokens": 4, "logprobs": 2, "n": 2}
    tensor = {"name": "text_input", "shape": [1], "datatype": "BYTES", "data": ["Once"]}
    async with start() as server:
        name = server.instance.model_name
        for path in (
            "/livez",
            "/readyz",
            "/health",
            "/version",
            "/timeline",
            "/debug/kv",
            "/v1/models",
            "/v2",
        ):
            answer = await server.get(path)
            assert answer.status == 200, path
            check(answer, path)
        check(await server.get(f"/v1/models/{name}"), "/v1/models/{id}")
        check(await server.get("/v1/models/other"), "/v1/models/{id}")
        check(await server.get(f"/v2/models/{name}"), "/v2/models/{name}")
        check(await server.get(f"/v2/models/{name}/ready"), "/v2/models/{name}/ready")
        check(await server.get("/v2/models/other/config"), "/v2/models/{name}/config")
        for path, body, status in (
            ("/v1/chat/completions", chat, 200),
            ("/v1/completions", prompt, 200),
            ("/v1/completions", {"suffix": "x", "prompt": "y"}, 400),
            ("/v1/responses", {"input": "Once", "max_output_tokens": 4}, 200),
            ("/v1/messages", {**turns, "model": name, "max_tokens": 4}, 200),
            ("/v1/messages", {"max_tokens": 4}, 400),
            ("/v1/messages/count_tokens", {**turns, "model": name}, 200),
            ("/tokenize", {"prompt": "Once"}, 200),
            ("/detokenize", {"tokens": [5, 6]}, 200),
            ("/v1/embeddings", {"input": 7}, 400),
        ):
            answer = await server.post(path, body)
            assert answer.status == status, (path, answer.body)
            check(answer, path, "post")
        infer = {"inputs": [tensor], "parameters": {"max_tokens": 4}}
        check(await server.post(f"/v2/models/{name}/infer", infer), "/v2/models/{name}/infer", "post")
        whole = await server.post(f"/v2/models/{name}/generate", {"text_input": "Once"})
        check(whole, "/v2/models/{name}/generate", "post")


async def test_vectors_are_as_documented(start: Any, encoder_parts: TinyParts) -> None:
    async with start(parts=encoder_parts) as server:
        answer = await server.post("/v1/embeddings", {"input": ["a", "b"]})
        assert answer.status == 200
        check(answer, "/v1/embeddings", "post")


async def test_what_needs_no_key_is_marked_so_for_its_method_alone(start: Any) -> None:
    async with start(api_key="secret") as server:
        for path, item in DOCUMENT["paths"].items():
            if "{" in path or path == "/timeline/events":
                continue
            if "get" in item:
                is_open = (await server.get(path)).status != 401
                assert is_open is (item["get"].get("security") == []), path
            if "post" in item:
                assert (await server.post(path, {})).status == 401, path
                assert "security" not in item["post"]


@pytest.mark.parametrize("kind", ["decoder", "encoder"])
async def test_its_examples_are_answered(start: Any, encoder_parts: TinyParts, kind: str) -> None:
    served = []
    async with start(**({"parts": encoder_parts} if kind == "encoder" else {})) as server:
        for each in server_routes():
            if (
                each.example is not None
                and each.tag != "function"
                and (each.tag in ("encode",)) is (kind == "encoder")
            ):
                path = each.canonical.replace("{name}", server.instance.model_name)
                body = {
                    **each.example,
                    **({"model": server.instance.model_name} if "model" in each.example else {}),
                }
                answer = await server.post(path, body)
                if path == "/infill":
                    assert "no tokens for filling in" in answer.error["message"]
                    continue
                if "classify" in path:
                    assert "has no labels" in answer.error["message"]
                    continue
                assert answer.status == 200, (path, answer.body)
                served.append(each.canonical)
    assert len(served) >= (6 if kind == "encoder" else 9)
