"""Calls as Llama 3 models write them: a bare object with `parameters`, with or without `<|python_tag|>` before it, and
`;` between several.
"""

from __future__ import annotations

from .format import SPACES, JsonBlock, Shape, ToolFormat

OPENER = "<|python_tag|>"

LLAMA3 = ToolFormat(
    name="llama3",
    shape=Shape(
        before_name='{"name": "', before_arguments='", "parameters": ', after_arguments="}", separator="; "
    ),
    openers=(OPENER,),
    is_bare=True,
    block=lambda opener, names: JsonBlock(opener, "", names),
    markers=(OPENER,),
    arguments_key="parameters",
    separators=f"{SPACES};,",
)
