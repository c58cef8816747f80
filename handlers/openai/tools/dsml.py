"""Calls in DSML, the markup of DeepSeek V3.2 and V4: a block of `<｜DSML｜invoke name="NAME">`, each with its
`<｜DSML｜parameter name="KEY" string="true">` VALUE `</｜DSML｜parameter>`.

The attribute `string` tells whether a value is text as it is or JSON; without it the function's schema does. The
block's tag is `function_calls` in V3.2, and `tool_calls` in V4.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from .format import CallShape, Functions, NotACallError, ParsedCall, ToolFormat
from .functions import Property
from .qwen3_coder import MAX_NAME_CHARS, XmlBlock, XmlPlace, parameter_rules

DSML = "｜DSML｜"
TAGS = ("function_calls", "tool_calls")  # of a block, V3.2's and V4's
INVOKE, END_INVOKE = f'<{DSML}invoke name="', f"</{DSML}invoke>"
PARAMETER, END_PARAMETER = f'<{DSML}parameter name="', f"</{DSML}parameter>"
_KEY = re.compile(r'([^"]+)(?:"\s+string="(true|false))?')


class DsmlBlock(XmlBlock):
    """All calls of an answer."""

    end_value = END_PARAMETER
    value_break = ""

    def __init__(self, opener: str, functions: Functions) -> None:
        super().__init__(opener, functions)
        self._closer = opener.replace("<", "</")
        self._place = XmlPlace.START
        self._is_text: bool | None = None  # the open value, as its tag says

    def read(self, text: str, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        self._advance(text)
        if self._place is XmlPlace.END:
            return self._calls(), self._index
        if not is_final:
            return None
        if self._place is not XmlPlace.BETWEEN:
            raise NotACallError
        return self._calls(), len(text)  # without its closing tag

    def _step(self, text: str) -> bool:
        match self._place:
            case XmlPlace.START | XmlPlace.BETWEEN:
                self._skip_spaces(text)
                ends = {self._closer: XmlPlace.END} if self._place is XmlPlace.BETWEEN else {}
                return self._tag(text, {INVOKE: XmlPlace.FUNCTION, **ends})
            case XmlPlace.FUNCTION:
                return self._function(text)
            case XmlPlace.PARAMETERS:
                self._skip_spaces(text)
                if text.startswith(END_INVOKE, self._index):
                    self._arguments[-1] += "}"
                return self._tag(text, {PARAMETER: XmlPlace.KEY, END_INVOKE: XmlPlace.BETWEEN})
            case XmlPlace.KEY:
                attributes = self._name(text)
                if attributes is None:
                    return False
                found = _KEY.fullmatch(attributes)
                if found is None:
                    raise NotACallError
                self._key, self._num_open, self._place = found[1], 0, XmlPlace.VALUE
                self._is_text = None if found[2] is None else found[2] == "true"
                return True
            case XmlPlace.VALUE:
                return self._value(text)
            case _:
                return False

    def _name(self, text: str) -> str | None:
        """The tag's text from its first attribute's value on, without the last quote."""
        name = super()._name(text)
        if name is not None and not name.endswith('"'):
            raise NotACallError
        return None if name is None else name[:-1]

    def _takes_text(self) -> bool:
        return super()._takes_text() if self._is_text is None else self._is_text


def argument_rules(rule: str, properties: Sequence[Property] | None) -> list[str]:
    return parameter_rules(
        rule,
        properties,
        name=re.compile(rf'[^<>"\n]{{1,{MAX_NAME_CHARS // 2}}}'),
        before=PARAMETER,
        between=lambda is_text: _attribute(is_text=is_text),
        behind=f"{END_PARAMETER}\n",
    )


def _attribute(*, is_text: bool) -> str:
    return f'" string="{"true" if is_text else "false"}">'


def _format(tag: str) -> ToolFormat:
    opener, others = f"<{DSML}{tag}>", [f"<{DSML}{each}>" for each in TAGS if each != tag]
    return ToolFormat(
        name="dsml",
        shape=CallShape(
            before_name=INVOKE,
            before_arguments='">\n',
            after_arguments=f"{END_INVOKE}\n",
            separator="",
            first=f"{opener}\n",
            last=f"</{DSML}{tag}>",
        ),
        openers=(opener, *others),
        is_bare=False,
        block=DsmlBlock,
        argument_rules=argument_rules,
        markers=(opener,),
    )


DSML_V32, DSML_V4 = map(_format, TAGS)
