"""Calls in XML as GLM's models write them: `<tool_call>NAME`, `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for
each argument, `</tool_call>`.

Values are as Qwen3-Coder's: text as it is where a parameter is a string, and JSON elsewhere.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from ....runtime.errors import RequestError
from ....runtime.grammar.spec import GrammarSpec
from .format import CallShape, NotACallError, ToolFormat
from .functions import Property
from .json_objects import CLOSER, OPENER
from .qwen3_coder import XmlBlock, XmlPlace, takes_text

KEY, END_KEY, VALUE, END_VALUE = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_NAME = re.compile(r"\s*([^\s<>{}]{1,256})\s*(?=<)")
_BEGUN_NAME = re.compile(r"\s*[^\s<>{}]{0,256}\s*\Z")
MAX_KEY_CHARS = 256


class GlmBlock(XmlBlock):
    """One call; or JSON between its tags, as Hermes' models write it."""

    end_value = END_VALUE
    value_break = ""

    def _step(self, text: str) -> bool:
        match self._place:
            case XmlPlace.START | XmlPlace.FUNCTION:
                self._skip_spaces(text)
                if text.startswith("{", self._index):
                    self._is_json = True
                    return False
                return self._call_name(text)
            case XmlPlace.PARAMETERS:
                self._skip_spaces(text)
                if text.startswith(CLOSER, self._index):
                    self._arguments[-1] += "}"
                return self._tag(text, {KEY: XmlPlace.KEY, CLOSER: XmlPlace.BETWEEN})
            case XmlPlace.KEY:
                end = text.find(END_KEY, self._index)
                if end < 0:
                    if len(text) - self._index > MAX_KEY_CHARS:
                        raise NotACallError
                    return False
                self._key, self._num_open = text[self._index : end].strip(), 0
                self._index, self._place = end + len(END_KEY), XmlPlace.VALUE_TAG
                return True
            case XmlPlace.VALUE_TAG:
                self._skip_spaces(text)
                return self._tag(text, {VALUE: XmlPlace.VALUE})
            case XmlPlace.VALUE:
                return self._value(text)
            case XmlPlace.BETWEEN | XmlPlace.END:
                return False

    def _call_name(self, text: str) -> bool:
        found = _NAME.match(text, self._index)
        if found is None:
            if _BEGUN_NAME.match(text, self._index) is None:
                raise NotACallError
            return False
        self._begin(found[1])
        self._index, self._place = found.end(), XmlPlace.PARAMETERS
        return True

    def _end(self, text: str, *, is_final: bool) -> int | None:
        return self._index  # the closer was read


def argument_rules(rule: str, properties: Sequence[Property] | None) -> list[str]:
    """Parameters in the order of the schema."""
    behind = json.dumps(f"{END_VALUE}\n")
    between = json.dumps(f"{END_KEY}\n{VALUE}")
    rules = [f"{rule}_text[lazy]: {rule.upper()}_TEXT? {behind}", f"{rule.upper()}_TEXT: /(?s:.+)/"]
    if properties is None:
        name = f"{rule.upper()}_NAME"
        return [
            f"{rule}: ({json.dumps(KEY)} {name} {between} {rule}_text)*",
            f"{name}: /[A-Za-z0-9_.-]{{1,64}}/",
            *rules,
        ]
    parts = []
    for number, each in enumerate(properties):
        if not each.name or len(each.name) > MAX_KEY_CHARS or re.search(r"[<>\n]", each.name):
            raise RequestError(
                f"tools have a parameter {each.name[:50]!r}, which a tag cannot name", param="tools"
            )
        value = f"{rule}_text"
        if "enum" in each.schema and takes_text(each.schema):
            value = f"({' | '.join(map(json.dumps, each.schema['enum']))}) {behind}"
        elif not takes_text(each.schema):
            schema = GrammarSpec.json_schema(each.schema, param="tools", closes=False)
            value = f"{rule}_{number}_value {behind}"
            rules.append(f"{rule}_{number}_value: {schema.embedded_schema()}")
        rules.append(f"{rule}_{number}: {json.dumps(KEY + each.name)} {between} {value}")
        parts.append(f"{rule}_{number}{'' if each.is_required else '?'}")
    return [f"{rule}: {' '.join(parts)}" if parts else f'{rule}: ""', *rules]


GLM = ToolFormat(
    name="glm",
    shape=CallShape(before_name=OPENER, before_arguments="\n", after_arguments=CLOSER, separator="\n"),
    openers=(OPENER,),
    is_bare=False,
    block=GlmBlock,
    argument_rules=argument_rules,
    markers=(OPENER, CLOSER, KEY, END_KEY, VALUE, END_VALUE),
)
