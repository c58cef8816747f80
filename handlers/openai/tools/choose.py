"""The table of call formats, and the choice of one by a model's chat template."""

from __future__ import annotations

from collections.abc import Mapping

from ..deltas import has_channels
from .dsml import DSML, DSML_V4, DSML_V32, TAGS
from .format import ToolFormat
from .gemma import FUNCTION_GEMMA, GEMMA
from .glm import GLM, KEY
from .harmony import HARMONY
from .json_objects import GENERIC_JSON, GRANITE, HERMES, LLAMA3
from .mistral import ARGUMENTS, LIST, NAMED
from .pythonic import PYTHONIC
from .qwen3_coder import FUNCTION, QWEN3_CODER
from .sections import DEEPSEEK, DEEPSEEK_FENCED, KIMI

AUTO, OFF = "auto", "off"
_FORMATS = (
    *(HERMES, QWEN3_CODER, GLM, LLAMA3, PYTHONIC, LIST, HARMONY, DEEPSEEK, DSML_V32, KIMI, GRANITE, GEMMA),
    GENERIC_JSON,
)
_BY_NAME = {each.name: each for each in _FORMATS}
SETTINGS = (AUTO, *_BY_NAME, OFF)

# Of DeepSeek's templates with arguments in a fence.
_FENCE = "```json"
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
    return _variant(_BY_NAME[setting], text)


def _of_template(text: str) -> ToolFormat:
    if has_channels({"": text}):
        return HARMONY
    if LIST.openers[0] in text:
        return _variant(LIST, text)
    if DSML in text:
        return _variant(DSML_V32, text)
    for fmt in (DEEPSEEK, KIMI, FUNCTION_GEMMA, GEMMA):
        if fmt.openers[0] in text:
            return _variant(fmt, text)
    if HERMES.openers[0] in text:
        return GLM if KEY in text else QWEN3_CODER if FUNCTION in text else HERMES
    if GRANITE.openers[0] in text:
        return GRANITE
    if _PYTHONIC in text:
        return PYTHONIC
    if any(opener in text for opener in LLAMA3.openers) and _PARAMETERS in text:
        return LLAMA3
    if PYTHONIC.openers[0] in text:
        return PYTHONIC
    if LLAMA3.openers[0] in text or ("<|start_header_id|>" in text and _PARAMETERS in text):
        return LLAMA3
    return GENERIC_JSON


def _variant(fmt: ToolFormat, text: str) -> ToolFormat:
    """The form of a format that a template has."""
    if fmt is LIST and ARGUMENTS in text:
        return NAMED
    if fmt is DSML_V32 and TAGS[0] not in text and TAGS[1] in text:
        return DSML_V4
    if fmt is DEEPSEEK and _FENCE in text:
        return DEEPSEEK_FENCED
    return FUNCTION_GEMMA if fmt is GEMMA and FUNCTION_GEMMA.openers[0] in text else fmt
