"""The rules that rewrite schemas, as the files of single keywords use them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from .algebra import Schema
from .values import Values


class Rules(Protocol):
    """All methods return schemas in the library's keywords, and raise `SchemaError`."""

    values: Values

    def step(self) -> None:
        """Count one schema more. Raises `SchemaError` beyond the bound."""

    def positive(self, schema: Schema) -> Schema:
        """Values that fulfil the schema."""

    def negative(self, schema: Schema) -> Schema:
        """Values that do not fulfil the schema."""

    def own(self, schema: Mapping[str, Any]) -> Schema:
        """`positive` of a schema whose `unevaluated…` concern its own keywords alone."""

    def exclusive(self, alternatives: list[Schema]) -> list[tuple[Schema, list[Schema]]]:
        """Each alternative, with the opposites of those that it may overlap."""

    def reference(self, given: str, *, is_negated: bool) -> Schema:
        """A reference to a definition, or to its opposite."""
