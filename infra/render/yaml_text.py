"""YAML text of plain documents: mappings with text keys, lists, texts, numbers, booleans and null.

The text depends on the value alone: keys stay in their order, nothing is wrapped, every text that any YAML version
could read as something else is quoted. PyYAML's emitter writes it; its own choice of quotes knows YAML 1.1 only, and
would leave 1e3 bare, which a reader of YAML 1.2 takes for a number. It is part of the extra `render`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...loader.errors import UsageError

if TYPE_CHECKING:
    from yaml import Node

_PLAIN = re.compile(r"[A-Za-z_/][A-Za-z0-9_./-]*(?: [A-Za-z0-9_./-]+)*")
_LITERAL = re.compile(r"[!-~][ -~]*\n(?:[ -~]*\n)*[ -~]*[!-~]\n?")  # printable ASCII in several lines
# Words that YAML 1.1 or 1.2 reads as something else than a text, in any case of their letters.
_RESERVED = frozenset({"y", "n", "yes", "no", "on", "off", "true", "false", "null", "nan", "inf"})


def yaml_text(documents: Iterable[Any]) -> str:
    """The documents as one YAML stream, each after the first behind `---`. Raises TypeError or ValueError for
    values that are outside the subset, and UsageError without PyYAML.
    """
    try:
        import yaml  # only where something is rendered
    except ImportError:
        raise UsageError("rendering needs PyYAML", hint="pip install 'teneral[render]'") from None

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, data: Any) -> bool:
            return True

        def represent_data(self, value: Any) -> Node:
            tag = "tag:yaml.org,2002:"
            if isinstance(value, str):
                value.encode()  # raises ValueError for halves of surrogate pairs
                style = None if _is_plain(value) else "|" if _LITERAL.fullmatch(value) else '"'
                return self.represent_scalar(f"{tag}str", value, style)
            if isinstance(value, Mapping):
                if not all(isinstance(key, str) for key in value):
                    raise TypeError("keys of YAML documents are texts")
                return self.represent_mapping(f"{tag}map", value.items())
            if isinstance(value, list | tuple):
                return self.represent_sequence(f"{tag}seq", value)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError("a number is finite")
            if value is not None and not isinstance(value, bool | int | float):
                raise TypeError(f"YAML is written of plain values, not of {type(value).__name__}")
            return super().represent_data(value)

    return "---\n".join(
        yaml.dump(each, Dumper=Dumper, default_flow_style=False, allow_unicode=True, width=math.inf)
        for each in documents
    )


def _is_plain(text: str) -> bool:
    return _PLAIN.fullmatch(text) is not None and text.lower() not in _RESERVED
