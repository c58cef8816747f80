"""The options of a request: the protocol's parameters, Triton's, and those of a generation.

The names of generation options are those of /v1/completions, with Teneral's own on the same level.
Unsupported options that would change the answer are refused, not ignored. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ....runtime.errors import RequestError
from ...http.json_bodies import invalid_field
from ...openai.schemas import Extras, GenerationBody

# The default of /v1/completions, and of Triton's text models.
DEFAULT_MAX_TOKENS = 16
MAX_TIMEOUT_S = 86_400.0

_EXTRAS = frozenset(Extras.__struct_fields__)
_NOT_THERE = {"model", "n", "stream", "stream_options", "prompt_logprobs", "teneral"}
OPTIONS = (frozenset(GenerationBody.__struct_fields__) - _NOT_THERE) | _EXTRAS
# Those of the protocol itself; the third is that of a request, the rest are Triton's.
_REFUSED = ("sequence_id", "sequence_start", "sequence_end")
_IGNORED = ("binary_data_output", "timeout", "headers")
_IGNORED_PREFIX = "triton_"


def split_parameters(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The model's own parameters, without the protocol's. Raises `RequestError` for unsupported
    ones.
    """
    given = dict(parameters or {})
    for name in _REFUSED:
        if given.pop(name, None):
            raise RequestError(
                "sequences of requests are not supported", param=name, hint="Name a session instead."
            )
    if isinstance(given.get("priority"), int):
        del given["priority"]  # Triton's is a level; ours has names
    return {
        name: value
        for name, value in given.items()
        if name not in _IGNORED and not name.startswith(_IGNORED_PREFIX)
    }


def timeout_s(parameters: Mapping[str, Any] | None) -> float | None:
    """Triton's `timeout`, which is in microseconds; None without one."""
    given = (parameters or {}).get("timeout")
    if given is None or given == 0:
        return None
    if isinstance(given, bool) or not isinstance(given, int) or given < 0:
        raise RequestError("timeout must be a whole number of microseconds", param="timeout")
    return min(given / 1e6, MAX_TIMEOUT_S)


def flag(parameters: Mapping[str, Any] | None, name: str, *, default: bool = False) -> bool:
    """A boolean parameter. Raises `RequestError` for any other value."""
    given = (parameters or {}).get(name)
    if given is None:
        return default
    if not isinstance(given, bool):
        raise RequestError(f"{name} must be true or false", param=name)
    return given


def generation_body(options: Mapping[str, Any], *, stream: bool) -> GenerationBody:
    """The options of a generation. Raises `RequestError`, naming the first that is unknown or of
    the wrong type.
    """
    for name in options:
        if name not in OPTIONS:
            raise RequestError(
                f"unknown parameter {name[:100]!r}",
                param=name[:100],
                hint=f"There are {', '.join(sorted(OPTIONS))}.",
            )
    own = {name: value for name, value in options.items() if name not in _EXTRAS}
    extras = {name: value for name, value in options.items() if name in _EXTRAS}
    try:
        return msgspec.convert({**own, "teneral": extras, "stream": stream}, GenerationBody, str_keys=True)
    except msgspec.ValidationError as error:
        raise invalid_field(error) from None
