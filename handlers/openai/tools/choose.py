"""The table of call formats, and the choice of one by a model's chat template."""

from __future__ import annotations

from collections.abc import Mapping

from .format import ToolFormat
from .harmony import HARMONY, has_channels
from .json_objects import GENERIC_JSON, HERMES, LLAMA3
from .mistral import ARGUMENTS, LIST, NAMED
from .pythonic import PYTHONIC
from .qwen3_coder import FUNCTION, QWEN3_CODER

AUTO, OFF = "auto", "off"
_FORMATS = (HERMES, QWEN3_CODER, LLAMA3, PYTHONIC, LIST, HARMONY, GENERIC_JSON)
_BY_NAME = {each.name: each for each in _FORMATS}
SETTINGS = (AUTO, *_BY_NAME, OFF)

# GLM puts calls of its own in Hermes' tags; those are not read.
_GLM = "<arg_key>"
# Of Llama's templates for calls in Python: their example.
_PYTHONIC = "func_name1("
# Of Llama's templates for calls in JSON.
_PARAMETERS = '"parameters"'


def tool_format(templates: Mapping[str, str], setting: str = AUTO) -> ToolFormat | None:
    """The model's format; None where the setting is "off"."""
    if setting == OFF:
        return None
    text = templates.get("tool_use") or templates.get("default", "")
    if setting == AUTO:
        return _of_template(text)
    return _mistral(text) if setting == LIST.name else _BY_NAME[setting]


def answers_in_channels(templates: Mapping[str, str], setting: str = AUTO) -> bool:
    """True if the model's answers are messages on channels, with or without calls among them."""
    return setting == HARMONY.name or (setting in (AUTO, OFF) and has_channels(templates))


def _of_template(text: str) -> ToolFormat:
    if has_channels({"": text}):
        return HARMONY
    if LIST.openers[0] in text:
        return _mistral(text)
    if any(opener in text for opener in HERMES.openers) and _GLM not in text:
        return QWEN3_CODER if FUNCTION in text else HERMES
    if _PYTHONIC in text:
        return PYTHONIC
    if any(opener in text for opener in LLAMA3.openers) and _PARAMETERS in text:
        return LLAMA3
    if PYTHONIC.openers[0] in text:
        return PYTHONIC
    if LLAMA3.openers[0] in text or ("<|start_header_id|>" in text and _PARAMETERS in text):
        return LLAMA3
    return GENERIC_JSON


def _mistral(text: str) -> ToolFormat:
    return NAMED if ARGUMENTS in text else LIST
