"""Calls in XML as Qwen3-Coder writes them: `<tool_call><function=NAME><parameter=KEY>` VALUE `</parameter></function>
</tool_call>`, each tag on a line of its own.

Values are text as it is where a parameter is a string, and JSON elsewhere: the function's schema tells which.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ....runtime.errors import RequestError
from ....runtime.grammar.spec import GrammarSpec
from ....runtime.text.detokenizer import open_length
from .format import (
    CallShape,
    Functions,
    JsonBlock,
    NotACallError,
    ParsedCall,
    SteppedBlock,
    ToolFormat,
    is_json,
)
from .functions import Property
from .json_objects import CLOSER, OPENER

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
_NAME = re.compile(r"([^<>\n]{1,256})>")
_ANNOTATIONS = frozenset({"title", "description", "default", "examples", "$defs", "$comment", "deprecated"})


class XmlPlace(enum.Enum):
    START = enum.auto()  # behind the opener
    FUNCTION = enum.auto()  # at a function's name
    PARAMETERS = enum.auto()  # at a parameter or the function's end
    KEY = enum.auto()  # at a parameter's name
    VALUE_TAG = enum.auto()  # between a name and its value, where they are apart
    VALUE = enum.auto()
    BETWEEN = enum.auto()  # behind a function
    END = enum.auto()  # behind the closer, where one closes several functions


class XmlBlock(SteppedBlock):
    """Functions between the tags of a call; or JSON there, as Hermes' models write it."""

    end_value = END_PARAMETER
    value_break = "\n"  # around a value

    def __init__(self, opener: str, functions: Functions) -> None:
        super().__init__(opener, functions)
        self._json = JsonBlock(opener, CLOSER, functions)
        self._is_json = False
        self._place = XmlPlace.START if opener == OPENER else XmlPlace.FUNCTION
        self._key = ""
        self._num_open = 0  # characters of the open value that its arguments have already

    def read(self, text: str, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        self._advance(text)
        if self._is_json:
            return self._json.read(text, is_final=is_final)
        if self._place is XmlPlace.BETWEEN and (end := self._end(text, is_final=is_final)) is not None:
            return self._calls(), end
        if is_final:
            raise NotACallError
        return None

    def partial(self, text: str) -> tuple[list[ParsedCall], int]:
        try:
            self._advance(text)
        except NotACallError:
            return self._calls(), self._index
        if self._is_json:
            return self._json.partial(text)
        if self._place is XmlPlace.VALUE and self._takes_text():
            self._give_open(text)
        return self._calls(), len(text) if self._place is not XmlPlace.BETWEEN else self._index

    def _advance(self, text: str) -> None:
        """Read as far as the text goes. Raises `NotACallError`."""
        while not self._is_json and self._step(text):
            pass

    def _step(self, text: str) -> bool:
        match self._place:
            case XmlPlace.START:
                self._skip_spaces(text)
                if text.startswith("{", self._index):
                    self._is_json = True
                    return False
                return self._tag(text, {FUNCTION: XmlPlace.FUNCTION})
            case XmlPlace.FUNCTION:
                return self._function(text)
            case XmlPlace.PARAMETERS:
                self._skip_spaces(text)
                if text.startswith(END_FUNCTION, self._index):
                    self._arguments[-1] += "}"
                return self._tag(text, {PARAMETER: XmlPlace.KEY, END_FUNCTION: XmlPlace.BETWEEN})
            case XmlPlace.KEY:
                name = self._name(text)
                if name is None:
                    return False
                self._key, self._num_open, self._place = name, 0, XmlPlace.VALUE
                return True
            case XmlPlace.VALUE:
                return self._value(text)
            case XmlPlace.BETWEEN | XmlPlace.VALUE_TAG | XmlPlace.END:
                self._skip_spaces(text)
                if text.startswith(FUNCTION, self._index) and self._opener == OPENER:
                    self._index += len(FUNCTION)
                    self._place = XmlPlace.FUNCTION
                    return True
                return False

    def _tag(self, text: str, tags: Mapping[str, XmlPlace]) -> bool:
        """Go to the place behind the tag that follows; False: more text is needed."""
        rest = text[self._index : self._index + max(map(len, tags))]
        for tag, place in tags.items():
            if rest.startswith(tag):
                self._index += len(tag)
                self._place = place
                return True
        if not any(tag.startswith(rest) for tag in tags):
            raise NotACallError
        return False

    def _name(self, text: str) -> str | None:
        """The name up to the tag's end; None: more text is needed."""
        found = _NAME.match(text, self._index)
        if found is None:
            rest = text[self._index : self._index + MAX_NAME_CHARS + 1]
            if len(rest) > MAX_NAME_CHARS or re.search(r"[<>\n]", rest):
                raise NotACallError
            return None
        self._index = found.end()
        return found[1].strip()

    def _function(self, text: str) -> bool:
        name = self._name(text)
        if name is None:
            return False
        self._begin(name)
        self._place = XmlPlace.PARAMETERS
        return True

    def _value(self, text: str) -> bool:
        end = text.find(self.end_value, self._index)
        if end < 0:
            return False
        if self._key not in self._keys:  # a name that is repeated counts once
            value = text[self._index : end].removeprefix(self.value_break).removesuffix(self.value_break)
            if self._num_open:
                self._arguments[-1] += json.dumps(value, ensure_ascii=False)[self._num_open :]
            else:
                self._arguments[-1] += self._before_value(self._key) + self._as_json(value)
            self._keys.add(self._key)
        self._index = end + len(self.end_value)
        self._num_open = 0
        self._place = XmlPlace.PARAMETERS
        return True

    def _give_open(self, text: str) -> None:
        """Add what is certain of the open value, a text, to its arguments."""
        ending = f"{self.value_break}{self.end_value}"
        held = max(open_length(text, ending), open_length(text, self.end_value))
        value = text[self._index : max(self._index, len(text) - held)].removeprefix(self.value_break)
        if not value or self._key in self._keys:
            return
        if not self._num_open:
            self._arguments[-1] += self._before_value(self._key)
        written = json.dumps(value, ensure_ascii=False)[:-1]
        self._arguments[-1] += written[self._num_open :]
        self._num_open = len(written)

    def _schema(self) -> Any:
        properties = self._functions[self._names[-1]].get("properties")
        return properties.get(self._key) if isinstance(properties, Mapping) else None

    def _takes_text(self) -> bool:
        return takes_text(self._schema())

    def _as_json(self, value: str) -> str:
        if not self._takes_text():
            written = value.strip()
            written = {"True": "true", "False": "false", "None": "null"}.get(written, written)
            if is_json(written):
                return written
        return json.dumps(value, ensure_ascii=False)

    def _end(self, text: str, *, is_final: bool) -> int | None:
        """The index behind the block. Its closer may be missing where the text ends or the next block opens."""
        rest = text[self._index : self._index + len(OPENER) + len(CLOSER)]
        if rest.startswith(CLOSER):
            return self._index + len(CLOSER)
        if rest.startswith((OPENER, FUNCTION)) or (self._opener != OPENER and rest):
            return None if CLOSER.startswith(rest) and not is_final else self._index
        if CLOSER.startswith(rest) or OPENER.startswith(rest) or FUNCTION.startswith(rest):
            return len(text) if is_final else None
        raise NotACallError


def takes_text(schema: Any) -> bool:
    """True if a parameter of this schema is written as text without quotes."""
    if not isinstance(schema, Mapping) or not schema.keys() <= _ANNOTATIONS | {"type", "enum"}:
        return False
    choices = schema.get("enum")
    if schema.get("type", "string" if choices else None) != "string":
        return False
    return choices is None or (
        isinstance(choices, list) and all(isinstance(each, str) and "\n" not in each for each in choices)
    )


def parameter_rules(
    rule: str,
    properties: Sequence[Property] | None,
    *,
    name: re.Pattern[str],
    before: str,
    between: Callable[[bool], str],
    behind: str,
) -> list[str]:
    """The rules of parameters in the order of the schema, each `before` NAME `between` VALUE `behind`. What is between
    them depends on whether the value is text.
    """
    end = json.dumps(behind)
    rules = [f"{rule}_text[lazy]: {rule.upper()}_TEXT? {end}", f"{rule.upper()}_TEXT: /(?s:.+)/"]
    if properties is None:
        any_name = f"{rule.upper()}_NAME"
        any_of_them = f"({json.dumps(before)} {any_name} {json.dumps(between(True))} {rule}_text)*"
        return [f"{rule}: {any_of_them}", f"{any_name}: /[A-Za-z0-9_.-]{{1,64}}/", *rules]
    parts = []
    for number, each in enumerate(properties):
        if not name.fullmatch(each.name):
            raise RequestError(
                f"tools have a parameter {each.name[:50]!r}, which a tag cannot name", param="tools"
            )
        is_text = takes_text(each.schema)
        value = f"{rule}_text"
        if is_text and "enum" in each.schema:
            value = f"({' | '.join(map(json.dumps, each.schema['enum']))}) {end}"
        elif not is_text:
            schema = GrammarSpec.json_schema(each.schema, param="tools", closes=False)
            value = f"{schema.embedded_schema()} {end}"
        rules.append(f"{rule}_{number}: {json.dumps(before + each.name + between(is_text))} {value}")
        parts.append(f"{rule}_{number}{'' if each.is_required else '?'}")
    return [f"{rule}: {' '.join(parts)}" if parts else f'{rule}: ""', *rules]


def argument_rules(rule: str, properties: Sequence[Property] | None) -> list[str]:
    return parameter_rules(
        rule,
        properties,
        name=re.compile(r"[^<>\n]{1,256}"),
        before=PARAMETER,
        between=lambda _: ">\n",
        behind=f"\n{END_PARAMETER}\n",
    )


QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    shape=CallShape(
        before_name=f"{OPENER}\n{FUNCTION}",
        before_arguments=">\n",
        after_arguments=f"{END_FUNCTION}\n{CLOSER}",
        separator="\n",
    ),
    openers=(OPENER, FUNCTION),
    is_bare=False,
    block=XmlBlock,
    argument_rules=argument_rules,
    markers=(OPENER, CLOSER),
)
