"""Calls as Llama 3 models write them: a bare object with `parameters`, with or without `<|python_tag|>` before it, and
`;` between several. Llama 4 writes the same behind its text, which `<|python_end|>` ends.
"""

from __future__ import annotations

from .format import SPACES, JsonBlock, Shape, ToolFormat

OPENER, END_OF_TEXT = "<|python_tag|>", "<|python_end|>"

LLAMA3 = ToolFormat(
    name="llama3",
    shape=Shape(
        before_name='{"name": "', before_arguments='", "parameters": ', after_arguments="}", separator="; "
    ),
    openers=(OPENER, END_OF_TEXT),
    is_bare=True,
    block=lambda opener, names: JsonBlock(opener, "", names),
    markers=(OPENER, END_OF_TEXT),
    arguments_key="parameters",
    separators=f"{SPACES};,",
)
