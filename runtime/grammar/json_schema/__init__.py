"""JSON schemas in the keywords that the grammar library enforces.

`references.py` resolves a schema's references, `rewrite.py` expresses its keywords. The result allows no value that
the schema does not: where the library has no equivalent it may allow fewer.
"""

from __future__ import annotations

from typing import Any

from .algebra import SchemaError
from .references import resolved
from .rewrite import Rewriter

__all__ = ["SchemaError", "enforceable"]


def enforceable(schema: Any) -> dict[str, Any]:
    """The schema in other words: every reference leads to `#/$defs`, and every keyword is one that the library has.

    Raises `SchemaError` for a keyword that is malformed, or that has no equivalent, and `RecursionError` for a schema
    nested too deeply.
    """
    root, definitions = resolved(schema)
    return Rewriter(definitions).document(root)
