"""Calls as bare JSON objects, for models whose own way is not known: a line each."""

from __future__ import annotations

from .format import SPACES, JsonBlock, Shape, ToolFormat

GENERIC_JSON = ToolFormat(
    name="json",
    shape=Shape(
        before_name='{"name": "', before_arguments='", "arguments": ', after_arguments="}", separator="\n"
    ),
    openers=(),
    is_bare=True,
    block=lambda opener, names: JsonBlock(opener, "", names),
    separators=f"{SPACES};,",
)
