"""Calls as Hermes and Qwen models write them: `<tool_call>` JSON `</tool_call>`."""

from __future__ import annotations

from .format import JsonBlock, Shape, ToolFormat

OPENER, CLOSER = "<tool_call>", "</tool_call>"

HERMES = ToolFormat(
    name="hermes",
    shape=Shape(
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
