"""Calls as Gemma's models write them: `<|tool_call>call:NAME{key:VALUE,…}<tool_call|>`, and with other marks in
FunctionGemma's. Keys have no quotes, and texts stand between two marks.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence

from ....runtime.errors import RequestError
from ....runtime.grammar.spec import GrammarSpec
from ....runtime.text.detokenizer import open_length
from .format import (
    MAX_DEPTH,
    SPACES,
    CallShape,
    Functions,
    NotACallError,
    ParsedCall,
    ToolBlock,
    ToolFormat,
    is_json,
    object_text,
)
from .functions import Property
from .qwen3_coder import takes_text

MAX_WORD_CHARS = 4096
_HEAD = re.compile(r"\s*call:([A-Za-z0-9_.:/-]{1,128})\{")
_BEGUN_HEAD = re.compile(r"\s*(?:c(?:a(?:l(?:l(?::[A-Za-z0-9_.:/-]{0,128})?)?)?)?)?\Z")
_WORD = re.compile(r'[^,:{}\[\]"]+')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_KEY = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class GemmaBlock(ToolBlock):
    """One call, read into JSON as it comes."""

    def __init__(self, opener: str, functions: Functions, closer: str, quote: str) -> None:
        self._functions, self._closer, self._quote = functions, closer, quote
        self._index = len(opener)
        self._name = ""
        self._json: list[str] = []  # the arguments so far
        self._depth = 0
        self._is_text = False
        self._is_given = False

    def read(self, text: str, *, is_final: bool) -> tuple[list[ParsedCall], int] | None:
        self._advance(text)
        if not self._name or self._depth:
            if is_final:
                raise NotACallError
            return None
        end = self._index
        while end < len(text) and text[end] in SPACES:
            end += 1
        if text.startswith(self._closer, end):
            end += len(self._closer)
        elif self._closer.startswith(text[end:]):
            if not is_final:
                return None
            end = len(text)
        else:
            end = self._index
        arguments = "".join(self._json)
        try:
            return [ParsedCall(self._name, object_text(arguments.encode()))], end
        except NotACallError:
            if not self._is_given:
                raise
            return [ParsedCall(self._name, arguments)], end

    def partial(self, text: str) -> tuple[list[ParsedCall], int]:
        with contextlib.suppress(NotACallError):
            self._advance(text)
        if not self._name:
            return [], 0
        self._is_given = True
        return [ParsedCall(self._name, "".join(self._json))], len(text) if self._depth else self._index

    def _advance(self, text: str) -> None:
        """Read as far as the text goes. Raises `NotACallError`."""
        if not self._name:
            found = _HEAD.match(text, self._index)
            if found is None:
                if _BEGUN_HEAD.match(text, self._index) is None:
                    raise NotACallError
                return
            if found[1] not in self._functions:
                raise NotACallError
            self._name, self._index, self._depth = found[1], found.end(), 1
            self._json.append("{")
        while self._depth and self._index < len(text) and self._step(text):
            pass

    def _step(self, text: str) -> bool:
        """One token of the arguments; False: more text is needed."""
        if self._is_text:
            return self._more_text(text)
        character = text[self._index]
        if character in SPACES:
            self._index += 1
        elif text.startswith(self._quote, self._index):
            self._index += len(self._quote)
            self._json.append('"')
            self._is_text = True
        elif self._quote.startswith(text[self._index :]):
            return False
        elif character in "{[":
            self._depth += 1
            if self._depth > MAX_DEPTH:
                raise NotACallError
            self._give(character)
        elif character in "}]":
            self._depth -= 1
            self._give(character)
        elif character in ",:":
            self._give(f"{character} ")
        else:
            return self._word(text)
        return True

    def _give(self, written: str) -> None:
        self._json.append(written)
        self._index += 1

    def _more_text(self, text: str) -> bool:
        end = text.find(self._quote, self._index)
        is_over = end >= 0
        if not is_over:
            end = len(text) - open_length(text[self._index :], self._quote)
        self._json.append(json.dumps(text[self._index : end], ensure_ascii=False)[1:-1])
        self._index = end
        if is_over:
            self._json.append('"')
            self._index += len(self._quote)
            self._is_text = False
        return is_over

    def _word(self, text: str) -> bool:
        """A key, a number or a name of JSON; or a text as JSON has it."""
        found = (_STRING if text[self._index] == '"' else _WORD).match(text, self._index)
        end = len(text) if found is None else found.end()
        if end == len(text):
            if end - self._index > MAX_WORD_CHARS:
                raise NotACallError
            return False
        word = text[self._index : end].strip()
        is_key = text[end] == ":"
        self._json.append(word if is_json(word) and not (is_key and word[:1] != '"') else json.dumps(word))
        self._index = end
        return True


def _argument_rules(quote: str, rule: str, properties: Sequence[Property] | None) -> list[str]:
    """Arguments in the order of the schema; values that are no text in JSON."""
    text = f"{rule}_text"
    rules = [
        f"{text}: {json.dumps(quote)} {text}_end",
        f"{text}_end[lazy]: {rule.upper()}_TEXT? {json.dumps(quote)}",
    ]
    rules.append(f"{rule.upper()}_TEXT: /(?s:.+)/")
    if properties is None:
        key = f"{rule.upper()}_KEY"
        one = f'{key} ":" {text}'
        return [f'{rule}: ({one} ("," {one})*)?', f"{key}: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/", *rules]
    # The rules of what may follow where an argument came before, and where none did, from the last to the first.
    after, start = '""', '""'
    for number, each in reversed(list(enumerate(properties))):
        if not _KEY.fullmatch(each.name):
            raise RequestError(
                f"tools have a parameter {each.name[:50]!r}, which calls of this model cannot name",
                param="tools",
            )
        one = f"{rule}_{number}"
        value = _value_rule(each.schema, quote, text)
        rules.append(f"{one}: {json.dumps(each.name + ':')} {one}_value")
        rules.append(f"{one}_value: {value}")
        skipped_after, skipped_start = ("", "") if each.is_required else (f" | {after}", f" | {start}")
        rules.append(f'{rule}_after_{number}: "," {one} {after}{skipped_after}')
        rules.append(f"{rule}_from_{number}: {one} {after}{skipped_start}")
        after, start = f"{rule}_after_{number}", f"{rule}_from_{number}"
    return [f"{rule}: {start}", *rules]


def _value_rule(schema: Mapping[str, object], quote: str, text: str) -> str:
    if not takes_text(schema):
        return GrammarSpec.json_schema(dict(schema), param="tools", closes=False).embedded_schema()
    choices = schema.get("enum")
    if not isinstance(choices, list):
        return text
    return " | ".join(json.dumps(f"{quote}{choice}{quote}") for choice in choices)


def _format(opener: str, closer: str, quote: str) -> ToolFormat:
    return ToolFormat(
        name="gemma",
        shape=CallShape(
            before_name=f"{opener}call:",
            before_arguments="{",
            after_arguments=f"}}{closer}",
            separator="",
        ),
        openers=(opener,),
        is_bare=False,
        block=lambda given, functions: GemmaBlock(given, functions, closer, quote),
        argument_rules=lambda rule, properties: _argument_rules(quote, rule, properties),
        markers=(opener, closer, quote),
    )


GEMMA = _format("<|tool_call>", "<tool_call|>", '<|"|>')
FUNCTION_GEMMA = _format("<start_function_call>", "<end_function_call>", "<escape>")
