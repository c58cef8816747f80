"""Bounds of numbers, without those that the library gets wrong; formats of strings as expressions,
and the expression for all strings but a few.

The library compares digits, and validators compare doubles, so exclusive bounds become inclusive
ones next to them. Bounds have 15 digits, of which the library reads the exact double. Its ranges have
integers of 64 bits: bounds beyond them are narrowed, or, where no number that `number_matcher.py`
allows is as large, have no effect.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Decimal
from itertools import islice
from typing import Any

from ..number_matcher import MAX_MAGNITUDE
from .algebra import SchemaError
from .values import Values

NARROWER = 1e-6  # distance of an exclusive 0
# Of bounds
NUM_DIGITS = 15
NUM_PLACES = 22
# The largest integer of 64 bits that is a double.
MAX_INTEGER = (1 << 63) - 1024
# A lower bound alone makes the library's range end at the next power of ten, which must have 64 bits.
_MAX_OPEN = 10**17
MAX_MULTIPLE = (
    1 << 53
) - 1  # of a number that must be a multiple of another: doubles have all integers up to it
MAX_FACTOR = 2_000  # of `multipleOf`, in units of its last digit: an automaton has many states for each
MAX_PLACES = 9
MAX_FOLLOWED = 100  # schemas of one value
MAX_EXCLUDED_CHARS = 2_000  # of the strings that an expression excludes
ANY = r"(?:.|\n)"
_D = "[0-9]"
_LEAP_YEAR = f"(?:{_D}{{2}}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_D}{{4}}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]{_D}|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]{_D}|30)"
    f"|02-(?:0[1-9]|1{_D}|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_TIME = f"(?:[01]{_D}|2[0-3]):[0-5]{_D}"
# RFC 3986, with the characters that every host may have.
_SEGMENT = r"(?:[A-Za-z0-9\-._~!$&'()*+,;=@]|%[0-9A-Fa-f]{2})"
_PATH = f"(?:/(?:{_SEGMENT}|:)*)"
_REST = rf"(?:\?(?:{_SEGMENT}|[:/?])*)?(?:#(?:{_SEGMENT}|[:/?])*)?"
_HOST = r"(?:[A-Za-z0-9](?:[A-Za-z0-9]{0,30}[A-Za-z0-9])?)(?:\.[A-Za-z](?:[A-Za-z0-9]{0,30}[A-Za-z0-9])?)*"
_URI = f"[A-Za-z][A-Za-z0-9+.\\-]*:(?://{_HOST}(?::{_D}{{1,4}})?{_PATH}*|(?:/?{_SEGMENT}(?:{_SEGMENT}|[:])*{_PATH}*))"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_UUID = "[0-9a-f]{8}-[0-9a-f]{4}-%s[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}"
# RFC 3339, section 5.6, without leap seconds. The library's own `date` has a 29 February in every year.
FORMATS = {
    "date": f"^{_DATE}$",
    "date-time": f"^{_DATE}T{_TIME}:[0-5]{_D}(?:\\.{_D}{{1,9}})?(?:Z|[+-]{_TIME})$",
    # OpenAPI's name for base64 with its padding (RFC 4648, section 4).
    "byte": "^(?:[A-Za-z0-9+/]{4})*(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?$",
    "uri-reference": f"^(?:{_URI}|{_PATH}+|{_SEGMENT}+{_PATH}*)?{_REST}$",
    "iri": f"^{_URI}{_REST}$",
    "iri-reference": f"^(?:{_URI}|{_PATH}+|{_SEGMENT}+{_PATH}*)?{_REST}$",
    "json-pointer": f"^{_POINTER}$",
    "relative-json-pointer": f"^(?:0|[1-9]{_D}*)(?:#|{_POINTER})$",
    "uri-template": r"^(?:[A-Za-z0-9\-._~:/?#@!$&()*+,;=]|\{[+#./;?&]?[A-Za-z0-9_]+(?:,[A-Za-z0-9_]+)*\})*$",
    # Literals, classes, groups and repetitions that every dialect has.
    "regex": (
        r"^\^?(?:(?:[A-Za-z0-9 _:,@/.\-]|\\[dDsSwW.*+?^$()\[\]{}|\\/]|\[\^?(?:[A-Za-z0-9_]|\\[dsw])+\]"
        r"|\((?:[A-Za-z0-9_]|\\[dsw])+(?:\|(?:[A-Za-z0-9_]|\\[dsw])+)*\))(?:[*+?]|\{[1-9]\})?)*\$?$"
    ),
    "idn-hostname": f"^{_HOST}$",
    "idn-email": f"^[A-Za-z0-9_+\\-]+(?:\\.[A-Za-z0-9_+\\-]+)*@{_HOST}$",
    **{f"uuid{version}": "^" + _UUID % version + "$" for version in (1, 3, 4, 5)},
}
# OpenAPI's formats of numbers as bounds, and formats that are hints and exclude nothing.
NUMBER_FORMATS: dict[str, dict[str, Any]] = {
    "int32": {"minimum": -(1 << 31), "maximum": (1 << 31) - 1},
    # Those that a double has exactly: beyond them readers of JSON differ.
    "int64": {"minimum": 1 - (1 << 53), "maximum": (1 << 53) - 1},
}
HINTS = frozenset({"password", "binary", "float", "double", "path", "file-path", "directory-path"})
# Formats of JSON Schema and OpenAPI are written so. Names with other characters are those of a program, such as
# AWS::EC2::VPC.Id, which JSON Schema takes for annotations.
_STANDARD_NAME = re.compile(r"[a-z0-9-]+")


def bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`minimum` and `maximum` in place of all four keywords for bounds. Raises `SchemaError`."""
    types = schema.get("type", ())
    is_integer = "integer" in (types, *types) and "number" not in (types, *types)
    least = _tighter("minimum", schema, max, is_integer=is_integer)
    most = _tighter("maximum", schema, min, is_integer=is_integer)
    if "multipleOf" in schema:
        least = -MAX_MULTIPLE if least is None else max(least, -MAX_MULTIPLE)
        most = MAX_MULTIPLE if most is None else min(most, MAX_MULTIPLE)
    if least is not None and most is None and least > _MAX_OPEN:
        most = MAX_INTEGER
    if most is not None and least is None and most < -_MAX_OPEN:
        least = -MAX_INTEGER
    return {key: value for key, value in (("minimum", least), ("maximum", most)) if value is not None}


def _tighter(
    key: str, schema: Mapping[str, Any], choose: Callable[..., Any], *, is_integer: bool
) -> float | None:
    """The bound of `key` and its exclusive form, as the library takes it; None: none."""
    exclusive = f"exclusive{key.capitalize()}"
    sign = 1 if key == "minimum" else -1
    found = [schema[key]] if key in schema else []
    if exclusive in schema:
        bound = schema[exclusive]
        if is_integer:
            found.append(math.floor(bound) + 1 if sign > 0 else math.ceil(bound) - 1)
        else:
            found += (above if sign > 0 else below)(bound).values()
    if not found:
        return None
    value = choose(found)
    if -value * sign >= MAX_MAGNITUDE:
        return None
    if value * sign > MAX_INTEGER:
        raise SchemaError(
            f"{key} {value} is not supported: numbers have up to 64 bits where they have bounds"
        )
    if abs(value) > MAX_INTEGER:
        return -sign * MAX_INTEGER
    return _with_few_digits(value, sign)


class Multiples:
    """The factors of one schema, which are bounded: a grammar of one of seven digits takes many seconds."""

    def __init__(self, values: Values, schemas: Iterable[Any]) -> None:
        """`schemas` are all of the document. Raises `SchemaError` for a factor that is too large alone."""
        self._values = values
        factors: set[tuple[int, int]] = set()
        pending = list(schemas)
        while pending:
            each = pending.pop()
            if isinstance(each, Mapping):
                if isinstance(value := each.get("multipleOf"), int | float):
                    factors.add(_factor(value))
                pending += each.values()
            elif isinstance(each, list):
                pending += each
        self._may_meet = len(factors) > 1

    def check(self, schema: dict[str, Any]) -> None:
        """Raise `SchemaError` if the factors of all schemas of this schema's value have no small multiple."""
        if not self._may_meet or not any(key in schema for key in ("allOf", "anyOf", "oneOf", "$ref")):
            return
        found = {
            _factor(each["multipleOf"])
            for each in islice(self._values.together(schema), MAX_FOLLOWED)
            if "multipleOf" in each
        }
        places = max((exponent for _, exponent in found), default=0)
        common = math.lcm(*(coefficient * 10 ** (places - exponent) for coefficient, exponent in found))
        if common > MAX_FACTOR:
            raise SchemaError(f"multipleOf of several schemas of one value has a multiple above {MAX_FACTOR}")


def _factor(value: float) -> tuple[int, int]:
    """Coefficient and places, as the library finds them in doubles. Raises `SchemaError`."""
    places, scaled = 0, float(value)
    while scaled % 1 and places < MAX_PLACES:
        places, scaled = places + 1, scaled * 10
    coefficient = int(scaled)
    while places and coefficient % 10 == 0:
        coefficient, places = coefficient // 10, places - 1
    if scaled % 1 or coefficient > MAX_FACTOR:
        raise SchemaError(
            f"multipleOf {value} is not supported: its digits may make a number up to {MAX_FACTOR}, and some decimals, "
            "such as 0.07, are none that the grammar's doubles have"
        )
    return coefficient, places


def above(bound: float) -> dict[str, Any]:
    """Numbers greater than this one."""
    return {"minimum": bound + NARROWER if bound == 0 else _with_few_digits(bound, 1, is_other=True)}


def below(bound: float) -> dict[str, Any]:
    """Numbers less than this one."""
    return {"maximum": bound - NARROWER if bound == 0 else _with_few_digits(bound, -1, is_other=True)}


def _with_few_digits(bound: float, sign: int, *, is_other: bool = False) -> float:
    """The bound with `NUM_DIGITS` digits: itself, or a number next to it, above it for `sign` 1 and below it for -1;
    with `is_other` never itself.
    """
    exact = Decimal(str(bound))
    step = Decimal(1).scaleb(max(exact.adjusted() - NUM_DIGITS + 1, -NUM_PLACES))
    steps = (exact / step).to_integral_value(ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    if steps * step == exact and not is_other:
        return bound
    # Ten more, since a bound of more digits may be a double beyond its first 15.
    rounded = (steps + (10 * sign if is_other else 0)) * step
    return int(rounded) if rounded == rounded.to_integral_value() else float(rounded)


def is_annotation(format_name: str) -> bool:
    """True if this `format` excludes no text. A misspelt name of a standard format is none."""
    return format_name in HINTS or _STANDARD_NAME.fullmatch(format_name) is None


def other_than_strings(texts: Iterable[str]) -> str:
    """An expression that matches every text but these. Raises `SchemaError` if it would be too long."""
    chosen = sorted(set(texts))
    if sum(map(len, chosen)) > MAX_EXCLUDED_CHARS or max(map(len, chosen)) > MAX_EXCLUDED_CHARS // 20:
        raise SchemaError(f"not excludes strings of more than {MAX_EXCLUDED_CHARS} characters together")
    return f"^{_other_than(chosen)}$"


def _other_than(texts: list[str]) -> str:
    """The same for sorted texts, of which several may begin alike."""
    by_first: dict[str, list[str]] = {}
    for text in texts:
        if text:
            by_first.setdefault(text[0], []).append(text[1:])
    parts = [f"[^{''.join(map(_in_class, by_first))}]{ANY}*"] if by_first else [f"{ANY}+"]
    parts += [f"{_in_class(first)}{_other_than(rest)}" for first, rest in by_first.items()]
    return f"(?:{'|'.join(parts)})" + ("" if "" in texts else "?")


def _in_class(character: str) -> str:
    return character if character.isalnum() or character in " _" else f"\\x{{{ord(character):x}}}"


def length_pattern(least: int, most: int | None) -> str:
    """An expression for texts of `least` to `most` characters."""
    return f"^{ANY}{{{least},{'' if most is None else most}}}$"
