"""The formats there are, and which one a model's chat template says that it writes."""

from __future__ import annotations

from collections.abc import Mapping

from .format import ToolFormat
from .generic_json import GENERIC_JSON
from .hermes import HERMES
from .llama3 import LLAMA3
from .mistral import ARGUMENTS, LIST, NAMED

AUTO, OFF = "auto", "off"
_BY_NAME = {each.name: each for each in (HERMES, LLAMA3, LIST, GENERIC_JSON)}
SETTINGS = (AUTO, *_BY_NAME, OFF)

# Other families put calls of their own in Hermes' tags; those are not read.
_NOT_HERMES = ("<function=", "<arg_key>")


def tool_format(templates: Mapping[str, str], setting: str = AUTO) -> ToolFormat | None:
    """The model's format; None where the setting is "off"."""
    if setting == OFF:
        return None
    text = templates.get("tool_use") or templates.get("default", "")
    if setting == AUTO:
        return _of_template(text)
    return _mistral(text) if setting == LIST.name else _BY_NAME[setting]


def _of_template(text: str) -> ToolFormat:
    if LIST.openers[0] in text:
        return _mistral(text)
    if any(opener in text for opener in HERMES.openers) and not any(mark in text for mark in _NOT_HERMES):
        return HERMES
    if any(opener in text for opener in LLAMA3.openers) or (
        "<|start_header_id|>" in text and '"parameters"' in text
    ):
        return LLAMA3
    return GENERIC_JSON


def _mistral(text: str) -> ToolFormat:
    return NAMED if ARGUMENTS in text else LIST
