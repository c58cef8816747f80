"""Names that come from outside (sessions, tenants, salts): refused by name, or harmless."""

from __future__ import annotations

import json
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.checkpoints import model_store, random_content
from tests.support.engine_rig import EngineRig, finish
from tests.support.format_artifacts import Shapes, build_format_artifact
from tests.support.manifest_documents import document_of

from teneral.handlers.function.context import Context
from teneral.handlers.http.json_bodies import JsonDecoder
from teneral.handlers.openai.chat import ChatFormat
from teneral.handlers.openai.completions import CompletionFormat
from teneral.handlers.openai.prompts import ChatSettings
from teneral.handlers.openai.schemas import ChatBody, CompletionBody
from teneral.loader.errors import CheckpointError, ManifestError, UsageError
from teneral.loader.format.checkpoint import open_checkpoint
from teneral.loader.format.manifest import Manifest
from teneral.loader.format.manifest_json import dump_manifest, parse_manifest
from teneral.loader.sources.base import check_name
from teneral.runtime.errors import RequestError
from teneral.runtime.step.requests import (
    MAX_CACHE_SALT_CHARS,
    MAX_NAME_CHARS,
    FirstToken,
    GenerationRequest,
    check_owner,
)

HOSTILE = {
    "too long": "x" * (MAX_NAME_CHARS + 1),
    "NUL": "a\0b",
    "line break": "a\nb",
    "ends in a line break": "a\n",
    "space": "a b",
    "half of a pair": "a\ud800",
    "lone combining character": "\u0301",
    "right to left": "\u202egpj",
    "looks like ASCII": "\uff41\uff42",
    "digits of another script": "\u0661\u0662",
    "quotes": 'a"b',
    "format string": "{0.__class__}",
    "percent": "%s%n",
    "shell": "$(reboot)",
    "markup": "<script>",
}
INJECTIONS = {
    "escape": "\x1b[2Jx",
    "delete": "a\x7f",
    "C1 escape": "a\x9b2Jx",
    "C1 line break": "a\x85b",
    "turned around": "a\u202egpj.exe",
    "isolated": "a\u2066b",
    "left-to-right mark": "a\u200eb",
    "Arabic letter mark": "a\u061cb",
    "line separator": "a\u2028b",
    "paragraph separator": "a\u2029b",
    "byte order mark": "\ufeffa",
    "half of a pair": "a\ud800",
}
FOREIGN = ("naïve", "名前", "é", "слой.0", "שכבה", "a\u00a0b", "🦋", "👩\u200d🚀")
HARMLESS_PATHS = ("../../etc/passwd", "/dev/null", "..", "a/b", "C:/", "a@b.example", "sha256:ab+/=")


@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
@pytest.mark.parametrize("field", ["session", "tenant"])
def test_a_hostile_name_is_refused_by_the_fields_name(field: str, name: str) -> None:
    with pytest.raises(RequestError) as caught:
        GenerationRequest("r", (1,), **{field: name})
    assert caught.value.param == field
    assert name not in caught.value.message, "an error does not repeat it"


@pytest.mark.parametrize("name", HARMLESS_PATHS)
def test_a_name_that_looks_like_a_path_is_only_a_name(name: str) -> None:
    with EngineRig() as rig:
        for _ in range(2):
            finish(rig.submit(range(20), max_tokens=2, session=name, tenant=name))
        statistics = rig.engine.statistics()
        assert (statistics.sessions, statistics.pinned_blocks) == (1, 5)


@pytest.mark.parametrize(
    "salt",
    ["\0", "a\0", "\u0301", "../../etc", " ", "\n", "\u202e", "x" * MAX_CACHE_SALT_CHARS, "\U0010ffff"],
)
def test_any_text_is_a_salt_of_its_own(salt: str) -> None:
    with EngineRig() as rig:
        finish(rig.submit(range(20), max_tokens=1))
        for expected in (0, 19):
            generation = rig.submit(range(20), max_tokens=1, cache_salt=salt)
            finish(generation)
            assert generation.num_cached_tokens == expected


@pytest.mark.parametrize("salt", ["\ud800", "a\udfff", "x" * (MAX_CACHE_SALT_CHARS + 1)])
def test_a_salt_that_is_no_text_or_too_long_is_refused_by_name(salt: str) -> None:
    with pytest.raises(RequestError) as caught:
        GenerationRequest("r", (1,), cache_salt=salt)
    assert caught.value.param == "cache_salt"


def test_salts_that_look_alike_share_nothing() -> None:
    composed, decomposed = (unicodedata.normalize(form, "\u00e9") for form in ("NFC", "NFD"))
    with EngineRig() as rig:
        finish(rig.submit(range(20), max_tokens=1, cache_salt=composed))
        for salt in (decomposed, composed + "\0", "\u00e9 "):
            generation = rig.submit(range(20), max_tokens=1, cache_salt=salt)
            finish(generation)
            assert generation.num_cached_tokens == 0


@given(st.text(st.characters(exclude_categories=()), max_size=200))
def test_any_text_is_a_name_or_refused(text: str) -> None:
    for field in ("session", "tenant", "cache_salt"):
        try:
            check_owner(**{field: text})
        except RequestError as error:
            refused_param = error.param
        else:
            refused_param = None
            assert field == "cache_salt" or text.isascii()
            assert len(text) <= MAX_CACHE_SALT_CHARS
        assert refused_param in (None, field)


# -- from outside --------------------------------------------------------------------------------------------


def completion(extras: dict[str, Any]) -> CompletionFormat:
    body = JsonDecoder(CompletionBody).decode(json.dumps({"prompt": "x", "teneral": extras}).encode())
    return CompletionFormat(body, model="m", max_sequences=4, first_token=FirstToken.EXACT)


def chat(extras: dict[str, Any]) -> ChatFormat:
    messages = [{"role": "user", "content": "x"}]
    body = JsonDecoder(ChatBody).decode(json.dumps({"messages": messages, "teneral": extras}).encode())
    return ChatFormat(body, model="m", settings=ChatSettings(max_sequences=4))


@pytest.mark.parametrize("make", [completion, chat])
@pytest.mark.parametrize("field", ["session", "tenant"])
@pytest.mark.parametrize("name", HOSTILE.values(), ids=HOSTILE.keys())
def test_a_body_with_a_hostile_name_is_refused_before_its_prompt_is_looked_at(
    make: Any, field: str, name: str
) -> None:
    with pytest.raises(RequestError):
        make({field: name})


@pytest.mark.parametrize(
    ("extras", "param"),
    [
        ({"priority": "urgent"}, "teneral.priority"),
        ({"session": 5}, "teneral.session"),
        ({"tenant": ["a"]}, "teneral.tenant"),
        ({"sesion": "a"}, "teneral.sesion"),
    ],
)
def test_an_invalid_extra_field_is_refused_with_the_way_to_it(extras: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as caught:
        completion(extras)
    assert caught.value.param == param


@pytest.mark.parametrize("extras", [{}, {"session": "", "tenant": "", "cache_salt": ""}, {"session": None}])
def test_empty_names_are_none(extras: dict[str, Any]) -> None:
    completion(extras)


def test_a_handlers_context_refuses_a_hostile_session() -> None:
    no_host: Any = None
    with pytest.raises(RequestError, match="session"):
        Context(no_host, request_id="r", session="a\0b")


# Names in manifests, safetensors and stores: they are printed by `inspect`, and in errors


@pytest.mark.parametrize("place", ["tensor", "group", "file", "alias", "generator"])
@pytest.mark.parametrize("name", INJECTIONS.values(), ids=INJECTIONS.keys())
def test_a_manifest_with_a_name_that_writes_elsewhere_is_refused(place: str, name: str) -> None:
    document = document_of(dump_manifest(_manifest()))
    match place:
        case "tensor":
            document["groups"][0]["tensors"][0]["name"] = name
        case "group":
            document["groups"][0]["name"] = name
        case "file":
            document["files"][0]["name"] = name
        case "alias":
            document["aliases"] = {name: "a.weight"}
        case _:
            document["generator"] = name
    with pytest.raises(ManifestError) as caught:
        parse_manifest(json.dumps(document).encode())
    assert name not in caught.value.message


@pytest.mark.parametrize("name", INJECTIONS.values(), ids=INJECTIONS.keys())
def test_safetensors_and_stores_have_the_same_rule(name: str) -> None:
    with pytest.raises(UsageError) as refused:
        check_name(name)
    assert name not in refused.value.message
    if name.isascii() or "\ud800" not in name:  # no header can hold half of a pair
        with pytest.raises(CheckpointError) as caught:
            open_checkpoint(model_store({name: random_content("F32", (4,))}))
        assert name not in caught.value.message


@pytest.mark.parametrize("name", FOREIGN)
def test_names_in_any_script_are_fine_everywhere(name: str) -> None:
    assert check_name(name) == name
    assert name in open_checkpoint(model_store({name: random_content("F32", (4,))})).tensors
    document = document_of(dump_manifest(_manifest()))
    document["groups"][0]["tensors"][0]["name"] = name
    assert parse_manifest(json.dumps(document).encode()).tensors[0].name == name


def _manifest() -> Manifest:
    layout: Shapes = {"a": {"a.weight": ("F32", (4,))}}
    return build_format_artifact(layout, files={"config.json": b"{}"}).manifest
