"""docs/openapi-kserve.yaml says what the server does: the same paths, and the same fields."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from tests.support.instances import StagedInstance, TinyParts

from teneral.handlers.app import create_app, edge_rules
from teneral.handlers.openai.routes import COHERE_RERANK
from teneral.handlers.platforms import HTTP
from teneral.handlers.platforms.kserve import metadata
from teneral.handlers.platforms.kserve.metadata import _STATES
from teneral.handlers.platforms.kserve.tensors import DATATYPES

DOCUMENT: dict[str, Any] = yaml.safe_load(
    (Path(__file__).parents[4] / "docs" / "openapi-kserve.yaml").read_text(encoding="utf-8")
)
SCHEMAS = DOCUMENT["components"]["schemas"]
STRUCTS = [
    each for each in vars(metadata).values() if isinstance(each, type) and issubclass(each, msgspec.Struct)
]

OPEN_PATHS = edge_rules(HTTP).open_paths


def test_it_has_the_paths_and_methods_of_the_server(tiny_parts: TinyParts) -> None:
    served = {
        (route.method.lower(), re.sub(r"/{action}$", f"/{action}", route.resource.canonical))
        for route in create_app(StagedInstance(tiny_parts)).router.routes()
        if route.resource and route.resource.canonical.startswith("/v2") and route.method != "HEAD"
        if route.resource.canonical != COHERE_RERANK
        for action in ("load", "unload")
    }
    documented = {
        (method, path)
        for path, item in DOCUMENT["paths"].items()
        for method in item
        if method != "parameters"
    }
    assert documented == served


def test_it_says_which_paths_ask_for_no_key() -> None:
    documented = {
        path for path, item in DOCUMENT["paths"].items() if item.get("get", {}).get("security") == []
    }
    assert documented == {path for path in OPEN_PATHS if path.startswith("/v2")}


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
def test_it_has_the_fields_of_every_body(struct: type[msgspec.Struct]) -> None:
    documented = SCHEMAS[struct.__name__]
    fields = msgspec.structs.fields(struct)
    assert set(documented["properties"]) == {field.name for field in fields}
    assert set(documented.get("required", ())) == {field.name for field in fields if field.required}


def test_it_has_every_datatype_and_state() -> None:
    assert set(SCHEMAS["Datatype"]["enum"]) == set(DATATYPES)
    assert set(SCHEMAS["ModelIndex"]["properties"]["state"]["enum"]) == set(_STATES.values())
