"""The results of commands, for people and for machines."""

from __future__ import annotations

import os
from typing import Any, Protocol

OMITTED = frozenset({"manifest", "part"})  # `teneral inspect --json` has them


class Result(Protocol):
    def render(self) -> str: ...


def print_result(result: Result, *, as_json: bool) -> None:
    """Print a command's result: lines for people, or a JSON object of its fields. Bytes are in hexadecimal."""
    if not as_json:
        print(result.render())
        return
    import json  # few ask for it, and `serve` imports this module

    print(json.dumps(_plain(result), indent=2))


def _plain(value: Any) -> Any:
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is not None:
        return {name: _plain(getattr(value, name)) for name in fields if name not in OMITTED}
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, bytes):
        return value.hex()
    return os.fspath(value) if isinstance(value, os.PathLike) else value
