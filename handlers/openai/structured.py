"""The requested form of an answer, from any of the fields that can state it, as one `GrammarSpec`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from ...runtime.errors import RequestError
from .schemas import ChatBody, GenerationBody, ResponseFormat, StructuredOutputs

if TYPE_CHECKING:
    from ...runtime.grammar.spec import GrammarSpec

Make = Callable[[type["GrammarSpec"]], "GrammarSpec"]


def grammar_of(body: GenerationBody) -> GrammarSpec | None:
    """The requested form; None: any text. Raises `RequestError` for two forms at once, and for those
    that `GrammarSpec` refuses.
    """
    asked = dict(_asked(body))
    if len(asked) > 1:
        names = " and ".join(sorted(asked))
        raise RequestError(f"an answer has one form, but the request has {names}", param=max(asked))
    if not asked:
        whitespace = _whitespace(body)
        if whitespace is not None:
            raise RequestError(
                "a whitespace pattern is for JSON schemas, and there is none", param=whitespace
            )
        return None
    from ...runtime.grammar.spec import GrammarSpec  # of few requests

    (make,) = asked.values()
    return make(GrammarSpec)


def has_schema(body: GenerationBody) -> bool:
    """True if the body has schemas, tools' included, which may take seconds of CPU time to rewrite."""
    fmt, outputs = body.response_format, body.structured_outputs
    return (
        body.guided_json is not None
        or body.json_schema is not None
        or (fmt is not None and (fmt.json_schema is not None or fmt.schema_ is not None))
        or (outputs is not None and outputs.json is not None)
        or (isinstance(body, ChatBody) and bool(body.tools))
    )


def _asked(body: GenerationBody) -> Iterator[tuple[str, Make]]:
    """Each requested form, by its field."""
    whitespace = body.guided_whitespace_pattern
    if body.response_format is not None and body.response_format.type != "text":
        yield from _of_response_format(body.response_format)
    if body.structured_outputs is not None:
        yield from _of_structured_outputs(body.structured_outputs)
    for param, schema in (("guided_json", body.guided_json), ("json_schema", body.json_schema)):
        if schema is not None:
            yield param, _json(schema, param, whitespace)
    for param, expression in (("guided_regex", body.guided_regex), ("regex", body.regex)):
        if expression is not None:
            yield param, _regex(expression, param)
    if body.guided_choice is not None:
        yield "guided_choice", _choice(body.guided_choice, "guided_choice")
    for param, grammar in (
        ("guided_grammar", body.guided_grammar),
        ("ebnf", body.ebnf),
        ("grammar", body.grammar),
    ):
        if grammar is not None:
            yield param, _grammar(grammar, param)


def _of_response_format(fmt: ResponseFormat) -> Iterator[tuple[str, Make]]:
    param = "response_format"
    if fmt.type == "json_object":
        if fmt.json_schema is not None:
            raise RequestError("response_format of type 'json_object' takes no json_schema", param=param)
        if fmt.schema_ is not None:
            yield param, _json(fmt.schema_, f"{param}.schema")
        else:
            yield param, lambda spec: spec.json_object(param=param)
    elif fmt.type == "json_schema":
        if fmt.json_schema is None or fmt.json_schema.schema_ is None:
            raise RequestError(
                "response_format.json_schema.schema is missing", param="response_format.json_schema.schema"
            )
        yield param, _json(fmt.json_schema.schema_, "response_format.json_schema.schema")
    else:
        raise RequestError(
            f"response_format of type {fmt.type[:50]!r} is not supported; "
            "'text', 'json_object' and 'json_schema' are",
            param="response_format.type",
        )


def _of_structured_outputs(given: StructuredOutputs) -> Iterator[tuple[str, Make]]:
    name = "structured_outputs"
    if given.json is not None:
        yield f"{name}.json", _json(given.json, f"{name}.json", given.whitespace_pattern)
    if given.regex is not None:
        yield f"{name}.regex", _regex(given.regex, f"{name}.regex")
    if given.choice is not None:
        yield f"{name}.choice", _choice(given.choice, f"{name}.choice")
    if given.grammar is not None:
        yield f"{name}.grammar", _grammar(given.grammar, f"{name}.grammar")
    if given.json_object:
        yield f"{name}.json_object", lambda spec: spec.json_object(param=f"{name}.json_object")


def _whitespace(body: GenerationBody) -> str | None:
    """The field that gives a whitespace pattern."""
    if body.guided_whitespace_pattern is not None:
        return "guided_whitespace_pattern"
    if body.structured_outputs is not None and body.structured_outputs.whitespace_pattern is not None:
        return "structured_outputs.whitespace_pattern"
    return None


def _json(schema: dict[str, Any] | bool | str, param: str, whitespace: str | None = None) -> Make:
    """By default there is no whitespace between the tokens of JSON."""
    return lambda spec: spec.json_schema(schema, param=param, whitespace=whitespace or "")


def _regex(expression: str, param: str) -> Make:
    return lambda spec: spec.regex(expression, param=param)


def _choice(texts: list[str], param: str) -> Make:
    return lambda spec: spec.choice(texts, param=param)


def _grammar(grammar: str, param: str) -> Make:
    return lambda spec: spec.grammar(grammar, param=param)
