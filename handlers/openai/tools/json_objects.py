"""Calls as JSON objects: in the tags of Hermes and Qwen models, bare with `parameters` as of Llama 3,
and bare for models whose own way is not known.
"""

from __future__ import annotations

from .format import SPACES, CallShape, JsonBlock, ToolFormat

OPENER, CLOSER = "<tool_call>", "</tool_call>"  # of Hermes
PYTHON_TAG, PYTHON_END = "<|python_tag|>", "<|python_end|>"  # of Llama

HERMES = ToolFormat(
    name="hermes",
    shape=CallShape(
        before_name=f'{OPENER}\n{{"name": "',
        before_arguments='", "arguments": ',
        after_arguments=f"}}\n{CLOSER}",
        separator="\n",
    ),
    openers=(OPENER,),
    is_bare=False,
    block=lambda opener, names: JsonBlock(opener, CLOSER, names),
    markers=(OPENER, CLOSER),
)

# With or without the tag before it, and `;` between several. Llama 4 writes the same behind its text,
# which `<|python_end|>` ends.
LLAMA3 = ToolFormat(
    name="llama3",
    shape=CallShape(
        before_name='{"name": "', before_arguments='", "parameters": ', after_arguments="}", separator="; "
    ),
    openers=(PYTHON_TAG, PYTHON_END),
    is_bare=True,
    block=lambda opener, names: JsonBlock(opener, "", names),
    markers=(PYTHON_TAG, PYTHON_END),
    arguments_key="parameters",
    separators=f"{SPACES};,",
)

# A list behind the tag; Phi 4 closes it, Granite 3 does not.
GRANITE = ToolFormat(
    name="granite",
    shape=CallShape(
        before_name='{"name": "',
        before_arguments='", "arguments": ',
        after_arguments="}",
        separator=", ",
        first="<|tool_call|>[",
        last="]",
    ),
    openers=("<|tool_call|>",),
    is_bare=False,
    block=lambda opener, names: JsonBlock(opener, "<|/tool_call|>", names, needs_closer=False),
    markers=("<|tool_call|>", "<|/tool_call|>"),
)

# A line each.
GENERIC_JSON = ToolFormat(
    name="json",
    shape=CallShape(
        before_name='{"name": "', before_arguments='", "arguments": ', after_arguments="}", separator="\n"
    ),
    openers=(),
    is_bare=True,
    block=lambda opener, names: JsonBlock(opener, "", names),
    separators=f"{SPACES};,",
)
