"""Calls in XML as GLM's models write them: `<tool_call>NAME`, `<arg_key>KEY</arg_key><arg_value>VALUE</arg_value>` for
each argument, `</tool_call>`.

Values are as Qwen3-Coder's: text as it is where a parameter is a string, and JSON elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .format import CallShape, NotACallError, ToolFormat
from .functions import Property
from .json_objects import CLOSER, OPENER
from .qwen3_coder import XmlBlock, XmlPlace, parameter_rules

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
    return parameter_rules(
        rule,
        properties,
        name=re.compile(rf"[^<>\n]{{1,{MAX_KEY_CHARS}}}"),
        before=KEY,
        between=lambda _: f"{END_KEY}\n{VALUE}",
        behind=f"{END_VALUE}\n",
    )


GLM = ToolFormat(
    name="glm",
    shape=CallShape(before_name=OPENER, before_arguments="\n", after_arguments=CLOSER, separator="\n"),
    openers=(OPENER,),
    is_bare=False,
    block=GlmBlock,
    argument_rules=argument_rules,
    markers=(OPENER, CLOSER, KEY, END_KEY, VALUE, END_VALUE),
)
