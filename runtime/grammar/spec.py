"""The grammar of an answer as a value, independent of the API that requested it.

Every route and spelling (`response_format`, `structured_outputs`, `guided_json`, `regex`, tools, …)
is converted to a `GrammarSpec`. Its size is checked when it is made. It does not depend on tokens:
`compiler.py` combines it with a vocabulary.
"""

from __future__ import annotations

import enum
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import RequestError

MAX_SCHEMA_BYTES = 64 << 10
MAX_EXPRESSION_CHARS = 4 << 10  # of a regular expression
MAX_GRAMMAR_CHARS = 16 << 10
MAX_CHOICES = 1 << 10
MAX_CHOICES_CHARS = 64 << 10
MAX_WHITESPACE_CHARS = 128
MAX_COMPOSED_CHARS = 256 << 10  # of a grammar composed of several schemas
# Total symbols of nested and consecutive counts such as (a{20}){30}.
MAX_REPETITION = 5_000
MAX_DEPENDENTS = 8  # of one schema: each doubles the forms of an object
# A whitespace pattern: no whitespace between the tokens of JSON.
COMPACT = ""
# Bounded, because a model could otherwise continue with spaces forever.
FREE_WHITESPACE = r"[ \n\t]{0,16}"


class GrammarKind(enum.StrEnum):
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "lark"
    GBNF = "gbnf"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A grammar to compile. Hashable: equal values are compiled once. Make it with one of the class
    methods.
    """

    kind: GrammarKind
    text: str  # the schema as JSON, the expression, the choices as a JSON list, or the grammar
    whitespace: str = COMPACT  # between the tokens of JSON: an expression
    param: str = ""  # the field that requested it, for error messages
    # Texts that may be one special token: see `composed`.
    markers: tuple[str, ...] = ()
    # An embedded grammar, which the text refers to as @answer.
    answer: GrammarSpec | None = None

    @classmethod
    def json_schema(
        cls, schema: Mapping[str, Any] | bool | str, *, param: str = "", whitespace: str = COMPACT
    ) -> GrammarSpec:
        """A JSON value of this schema, given as a mapping or as JSON. Raises `RequestError`."""
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise RequestError(f"{param} is not JSON: {error}", param=param) from None
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping | bool):
            raise RequestError(f"{param} must be a JSON schema: an object", param=param)
        try:
            text = json.dumps(_enforceable(schema), ensure_ascii=False, separators=(",", ":"))
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{param} is not JSON: {error}", param=param) from None
        _check_text(text, MAX_SCHEMA_BYTES, "a JSON schema", param)
        _check_patterns(schema, param)
        _check_text(whitespace, MAX_WHITESPACE_CHARS, "a whitespace pattern", param)
        _check_repetition(whitespace, param)
        return cls(GrammarKind.JSON_SCHEMA, text, whitespace, param)

    @classmethod
    def json_object(cls, *, param: str = "") -> GrammarSpec:
        """Any JSON object."""
        return cls.json_schema({"type": "object"}, param=param, whitespace=FREE_WHITESPACE)

    @classmethod
    def regex(cls, expression: str, *, param: str = "") -> GrammarSpec:
        """A text that matches this expression as a whole. Raises `RequestError`."""
        _check_text(expression, MAX_EXPRESSION_CHARS, "a regular expression", param)
        _check_repetition(expression, param)
        return cls(GrammarKind.REGEX, expression, param=param)

    @classmethod
    def choice(cls, texts: Sequence[str], *, param: str = "") -> GrammarSpec:
        """One of these texts. Raises `RequestError`."""
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise RequestError(f"{param} must be a list of texts that are not empty", param=param)
        if not 0 < len(texts) <= MAX_CHOICES:
            raise RequestError(f"{param} must have 1 to {MAX_CHOICES} choices", param=param)
        text = json.dumps(list(dict.fromkeys(texts)), ensure_ascii=False)
        _check_text(text, MAX_CHOICES_CHARS, "a list of choices", param)
        return cls(GrammarKind.CHOICE, text, param=param)

    @classmethod
    def grammar(cls, grammar: str, *, param: str = "") -> GrammarSpec:
        """A context-free grammar, in GBNF (`root ::= …`) or in Lark's notation (`start: …`). Raises `RequestError`."""
        _check_text(grammar, MAX_GRAMMAR_CHARS, "a grammar", param)
        _check_counts(grammar, param)
        kind = GrammarKind.GBNF if "::=" in grammar else GrammarKind.LARK
        return cls(kind, grammar, param=param)

    @classmethod
    def composed(
        cls, lark: str, *, markers: Sequence[str] = (), answer: GrammarSpec | None = None, param: str = ""
    ) -> GrammarSpec:
        """A grammar made by this server, in Lark's notation, from checked parts.

        Its rules may refer to `marker_N`, which is `markers[N]`: the special token of that text if
        the vocabulary has one, else its characters; to `until_N`, which is any text up to and
        including that marker; and to `@answer`. Special tokens never occur in other text. Raises
        `RequestError` for one that is too long.
        """
        if len(lark) > MAX_COMPOSED_CHARS:
            raise RequestError(
                f"{param} make a grammar of {len(lark)} characters, more than {MAX_COMPOSED_CHARS}",
                param=param,
                hint="Send fewer functions, or smaller schemas.",
            )
        return cls(GrammarKind.LARK, lark, param=param, markers=tuple(markers), answer=answer)

    def embedded_schema(self) -> str:
        """A JSON schema as a part of a composed grammar."""
        schema = json.loads(self.text)
        if not isinstance(schema, dict):
            schema = {"allOf": [schema]}
        compact: dict[str, Any] = {"whitespace_flexible": False}
        whitespace = compact if self.whitespace == COMPACT else {"whitespace_pattern": self.whitespace}
        return "%json " + json.dumps({**schema, "x-guidance": whitespace}, ensure_ascii=False)


DATA_KEYWORDS = frozenset({"const", "enum", "default", "examples"})  # their values are no schemas
NAMING_KEYWORDS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
ANNOTATIONS = frozenset({"type", "title", "description", "default", "examples", "deprecated", "$comment"})
_D = "[0-9]"
_LEAP_YEAR = f"(?:{_D}{{2}}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_D}{{4}}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]{_D}|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]{_D}|30)"
    f"|02-(?:0[1-9]|1{_D}|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = f"(?:[01]{_D}|2[0-3]):[0-5]{_D}"
# RFC 3339, section 5.6, without leap seconds. The library's own `date` has a 29 February in every year.
FORMATS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}:[0-5]{_D}(?:\\.{_D}{{1,9}})?(?:Z|[+-]{_TIME})$",
    # OpenAPI's name for base64 with its padding (RFC 4648, section 4).
    "byte": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
}


def _enforceable(schema: Any) -> Any:
    """An equivalent schema that the library enforces, as far as one is known. Other keywords stay, for the library
    to refuse.
    """
    if isinstance(schema, list | tuple):
        return [_enforceable(each) for each in schema]
    if not isinstance(schema, Mapping):
        return schema
    rewritten: dict[str, Any] = {}
    for key, value in schema.items():
        if key in NAMING_KEYWORDS and isinstance(value, Mapping):
            rewritten[key] = {name: _enforceable(each) for name, each in value.items()}
        else:
            rewritten[key] = value if key in DATA_KEYWORDS else _enforceable(value)
    if isinstance(rewritten.get("oneOf"), list):
        rewritten["oneOf"] = _disjoint(rewritten["oneOf"])
    _drop_without_effect(rewritten)
    _rewrite_applicators(rewritten)
    name = rewritten.get("format")
    if isinstance(name, str) and name in FORMATS and "pattern" not in rewritten:
        del rewritten["format"]
        rewritten["pattern"] = FORMATS[name]
    return rewritten


# With one of these, the properties or items that a schema evaluates are not those of its own keywords alone.
_EVALUATING = frozenset(
    {
        *("allOf", "anyOf", "oneOf", "not", "if", "then", "else", "contains"),
        *("$ref", "$dynamicRef", "$recursiveRef", "dependentSchemas", "dependencies"),
    }
)
_TYPES = ("null", "boolean", "number", "string", "array", "object")


def _drop_without_effect(schema: dict[str, Any]) -> None:
    """Remove the keywords that every value fulfils. A reference into one of them is refused as dangling."""
    counts = {"unevaluatedProperties", "unevaluatedItems"} & schema.keys()  # what `if` evaluates counts there
    if "if" not in schema or (not counts and not {"then", "else"} & schema.keys()):
        for key in ("if", "then", "else"):
            schema.pop(key, None)
    least, most = schema.get("minContains"), schema.get("maxContains")
    if "contains" not in schema or (_is_number(least, 0) and most is None):
        for key in ("contains", "minContains", "maxContains"):
            schema.pop(key, None)
    if schema.get("uniqueItems") is False or _is_number(schema.get("maxItems"), 0, 1):
        schema.pop("uniqueItems", None)
    for key in ("unevaluatedProperties", "unevaluatedItems", "propertyNames"):
        if key in schema and (schema[key] is True or schema[key] == {}):
            del schema[key]
    if schema.get("propertyNames") == {"type": "string"}:
        del schema["propertyNames"]
    if schema.get("not") is False:
        del schema["not"]


def _rewrite_applicators(schema: dict[str, Any]) -> None:
    """Express keywords that the library lacks in those it has."""
    if not _EVALUATING & schema.keys() and not isinstance(schema.get("items"), list):  # a list: older drafts
        for key, own in (("unevaluatedProperties", "additionalProperties"), ("unevaluatedItems", "items")):
            if key in schema:
                rest = schema.pop(key)
                schema.setdefault(own, rest)
    _rewrite_property_names(schema)
    _rewrite_not(schema)
    _rewrite_dependents(schema)


def _rewrite_property_names(schema: dict[str, Any]) -> None:
    """Names of a list or of a pattern, in a schema that names no properties itself."""
    names = schema.get("propertyNames")
    if not isinstance(names, dict) or {"properties", "patternProperties"} & schema.keys():
        return
    rest = schema.get("additionalProperties", True)
    if names.keys() == {"enum"} and isinstance(names["enum"], list):
        schema["properties"] = {name: rest for name in names["enum"] if isinstance(name, str)}
    elif isinstance(names.get("pattern"), str) and names.keys() <= {"type", "pattern"}:
        if names.get("type", "string") != "string":
            return
        schema["patternProperties"] = {names["pattern"]: rest}
    else:
        return
    del schema["propertyNames"]
    schema["additionalProperties"] = False


def _rewrite_not(schema: dict[str, Any]) -> None:
    """`not` of types: the other types. A number that is no integer has no type of its own: `not` integer excludes
    all numbers.
    """
    excluded = schema.get("not")
    if not isinstance(excluded, dict) or "type" not in excluded or not ANNOTATIONS.issuperset(excluded):
        return
    names = excluded["type"] if isinstance(excluded["type"], list) else [excluded["type"]]
    if not names or not all(isinstance(name, str) and name in {*_TYPES, "integer"} for name in names):
        return
    if "type" in schema:
        return
    gone = {"number" if name == "integer" else name for name in names}
    kept = [name for name in _TYPES if name not in gone]
    if kept:
        del schema["not"]
        schema["type"] = kept


def _rewrite_dependents(schema: dict[str, Any]) -> None:
    """Either a property is absent, or what depends on it holds."""
    rules: list[Any] = []
    for key in ("dependentRequired", "dependentSchemas"):
        dependents = schema.get(key)
        if not isinstance(dependents, dict):
            if dependents is not None:
                return
            continue
        if key == "dependentRequired" and not all(isinstance(each, list) for each in dependents.values()):
            return
        for name, each in dependents.items():
            then = {"required": each} if isinstance(each, list) else each
            if then != {"required": []}:
                rules.append({"anyOf": [{"properties": {name: False}}, then]})
    if len(rules) > MAX_DEPENDENTS or not isinstance(schema.get("allOf", []), list):
        return
    schema.pop("dependentRequired", None)
    schema.pop("dependentSchemas", None)
    if rules:
        schema["allOf"] = [*schema.get("allOf", []), *rules]


def _is_number(value: Any, *numbers: int) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value in numbers


def _disjoint(alternatives: list[Any]) -> list[Any]:
    """Alternatives that are types alone, without the types of more than one: a value of those fulfils no `oneOf`.

    Integers are numbers: where both occur, or where an alternative is more than types, nothing changes.
    """
    types: list[list[str]] = []
    for each in alternatives:
        if not isinstance(each, dict) or "type" not in each or not ANNOTATIONS.issuperset(each):
            return alternatives
        named = each["type"] if isinstance(each["type"], list) else [each["type"]]
        if not all(isinstance(name, str) for name in named):
            return alternatives
        types.append(list(dict.fromkeys(named)))
    counts = Counter(name for named in types for name in named)
    if max(counts.values(), default=0) < 2 or {"integer", "number"} <= counts.keys():
        return alternatives
    kept = [[name for name in named if counts[name] == 1] for named in types]
    return [
        {**each, "type": named} for each, named in zip(alternatives, kept, strict=True) if named
    ] or alternatives  # which nothing fulfils, and which is refused as that


def _check_text(text: object, limit: int, what: str, param: str) -> None:
    if not isinstance(text, str):
        raise RequestError(f"{param} must be text", param=param)
    try:
        size = len(text.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{param} contains a lone surrogate", param=param) from None
    if size > limit or "\0" in text:
        raise RequestError(
            f"{param} is invalid: {what} may have {limit} bytes and no zero byte; this has {size}",
            param=param,
        )


def _check_patterns(schema: Any, param: str) -> None:
    """Check the expressions anywhere in a schema."""
    pending = [schema]
    while pending:
        value = pending.pop()
        if isinstance(value, Mapping):
            if isinstance(pattern := value.get("pattern"), str):
                _check_repetition(pattern, param)
            for key in (
                properties if isinstance(properties := value.get("patternProperties"), Mapping) else ()
            ):
                _check_repetition(str(key), param)
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value


def _check_repetition(expression: str, param: str) -> None:
    """Raise `RequestError` if counted repetitions expand to too many symbols.

    Each state of an automaton costs memory and time, and a few characters can request millions.
    """
    # Of the open groups, the whole expression first.
    sizes = [0]
    # The size of the symbol or group that a count would repeat.
    last = 0
    position = 0
    while position < len(expression):
        character = expression[position]
        if character == "(":
            sizes.append(0)
            last = 0
        elif character == ")" and len(sizes) > 1:
            last = sizes.pop()
            sizes[-1] += last
        elif character == "[":
            position = _end_of_class(expression, position)
            last = 1
            sizes[-1] += 1
        elif character == "{" and (count := _count_at(expression, position)) is not None:
            times, position = count
            sizes[-1] += last * max(0, times - 1)
            last *= max(1, times)
        elif character not in "*+?|^$":
            position += character == "\\"
            last = 1
            sizes[-1] += 1
        if sum(sizes) > MAX_REPETITION:
            raise _too_much(param)
        position += 1


def _check_counts(grammar: str, param: str) -> None:
    """Check a grammar likewise: all of its counts together, because rules may repeat one another."""
    total = 1
    position = grammar.find("{")
    while position >= 0:
        if (count := _count_at(grammar, position)) is not None:
            total *= max(1, count[0])
            if total > MAX_REPETITION:
                raise _too_much(param)
        position = grammar.find("{", position + 1)


def _count_at(text: str, position: int) -> tuple[int, int] | None:
    """The maximum of `{n}`, `{n,}` or `{n,m}` at this position, and its end; None without one."""
    end = text.find("}", position, position + 32)
    counts = [part.strip() for part in text[position + 1 : end].split(",")] if end > 0 else []
    if (
        not 0 < len(counts) <= 2
        or not all(part.isdecimal() or not part for part in counts)
        or not any(counts)
    ):
        return None
    return max(int(part) for part in counts if part), end


def _end_of_class(expression: str, position: int) -> int:
    """The position of the bracket that closes the class that begins here."""
    start = position + 1 + (expression[position + 1 : position + 2] == "^")
    end = start + (expression[start : start + 1] == "]")
    while end < len(expression) and expression[end] != "]":
        end += 2 if expression[end] == "\\" else 1
    return end


def _too_much(param: str) -> RequestError:
    return RequestError(
        f"{param} is too complex: its repetitions expand to more than {MAX_REPETITION} symbols",
        param=param,
        hint="Use * or + for long texts, or maxLength for strings of a schema.",
    )
