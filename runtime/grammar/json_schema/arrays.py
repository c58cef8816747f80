"""Keywords of arrays that the library lacks, as arrays that it has: `contains` and `uniqueItems`.

A grammar cannot count, so the forms of an array are enumerated: where the items are that `contains` requires, and every
array of different values out of a few.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import MARK
from .algebra import Schema, SchemaError, any_of, key_of, other_than
from .values import Values

NUM_FREE = 3  # items that need not match, before and between those that must
MAX_LEAST = 15  # items that must match
MAX_FORMS = 40  # of an array with `contains`
MAX_ARRAYS = 512  # of different values

Rewrite = Callable[[Schema], Schema]


def with_contains(schema: Mapping[str, Any], positive: Rewrite, negative: Rewrite) -> Schema:
    """The arrays that `contains`, `minContains` and `maxContains` allow, and all values of other types.

    Those with too many items before the ones that match are left out. Raises `SchemaError`.
    """
    matching, least, most = schema["contains"], schema.get("minContains", 1), schema.get("maxContains")
    others = other_than("array", schema)
    if least == 0 and most is None:
        return True
    if most is not None and most < least:
        return others
    if matching is True or matching == {}:
        bounds = {"minItems": least} if most is None else {"minItems": least, "maxItems": most}
        return any_of([others, {"type": "array", **bounds}])
    if least > MAX_LEAST:
        raise SchemaError(f"minContains {least} is more than {MAX_LEAST}")
    yes = positive(matching)
    no = True if most is None else negative(matching)
    counts = range(least, (least if most is None else min(most, least + NUM_FREE)) + 1)
    forms = (
        _form(chosen, yes, no)
        for count in counts
        for chosen in itertools.combinations(range(count + NUM_FREE), count)
    )
    kept = list(itertools.islice(forms, MAX_FORMS))
    return any_of([others, *(form for form in kept if form is not False)])


def _form(chosen: tuple[int, ...], yes: Schema, no: Schema) -> Schema:
    """Arrays whose items at these positions match; no others do where `no` excludes them."""
    if chosen and (yes is False or (no is False and chosen != tuple(range(len(chosen))))):
        return False
    length = chosen[-1] + 1 if chosen else 0
    prefix = [yes if number in chosen else no for number in range(length)]
    form: dict[str, Any] = {"type": "array", "minItems": length}
    if prefix:
        form["prefixItems"] = prefix
    if no is not True:
        form["items"] = no
    return form


def with_unique_items(schema: Mapping[str, Any], values: Values) -> Schema:
    """The arrays of different values, and all values of other types: listed where these are few, else marked, for the
    matcher to let the items differ. Raises `SchemaError`.
    """
    most = schema.get("maxItems")
    if most is not None and most <= 1:
        return True
    if schema.get("items") is False and len(schema.get("prefixItems", ())) <= 1:
        return True
    items = schema.get("items", True)
    if values.finite(items) is None and all(
        map(values.has_one_text, (*schema.get("prefixItems", ()), items))
    ):
        return {MARK: True}
    least = schema.get("minItems", 0)
    arrays = _listed(_permutations(schema, values, least, most))
    if arrays is None and not schema.get("prefixItems"):
        domain = values.finite(schema["items"]) or []
        sizes = range(least, min(len(domain), most if most is not None else len(domain)) + 1)
        arrays = _listed(list(each) for size in sizes for each in itertools.combinations(domain, size))
    if arrays is None:
        if all(map(values.has_one_text, (*schema.get("prefixItems", ()), items))):
            return {MARK: True}
        raise SchemaError(
            f"uniqueItems of these items has more than {MAX_ARRAYS} arrays; set a smaller maxItems"
        )
    return any_of([other_than("array", schema), {"enum": arrays} if arrays else False])


def _permutations(
    schema: Mapping[str, Any], values: Values, least: int, most: int | None
) -> Iterator[list[Any]]:
    """All arrays of different values, the shortest first."""
    domains = [values.finite(each) for each in schema.get("prefixItems", ())]
    rest = values.finite(schema.get("items", True))
    if rest is None and (most is None or most > len(domains)):
        raise SchemaError(
            "uniqueItems is supported for strings, integers, lists of values, and objects of these that have "
            "additionalProperties false"
        )
    # Each array with the keys of its values.
    level: list[tuple[list[Any], frozenset[str]]] = [([], frozenset())]
    length = 0
    while level and (most is None or length <= most):
        if length >= least:
            yield from (array for array, _ in level)
        domain = domains[length] if length < len(domains) else rest
        if domain is None:
            raise SchemaError(
                "uniqueItems is supported for strings, integers, lists of values, and objects of these that have "
                "additionalProperties false"
            )
        keyed = [(key_of(value), value) for value in domain]
        longer: list[tuple[list[Any], frozenset[str]]] = []
        for array, keys in level:
            longer += [([*array, value], keys | {key}) for key, value in keyed if key not in keys]
            if len(longer) > MAX_ARRAYS:
                break
        level = longer
        length += 1


def _listed(arrays: Iterator[list[Any]]) -> list[list[Any]] | None:
    """All of them; None: there are too many."""
    kept = list(itertools.islice(arrays, MAX_ARRAYS + 1))
    return kept if len(kept) <= MAX_ARRAYS else None
