"""Generation options, as keyword arguments of `context.model` and as keys of an event.

`GenerateOptions` is the type for people and type checkers; `parse_options` is the check at run
time, because events are untrusted. Neither knows tokens or the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import Any, Literal, TypedDict, TypeVar

from msgspec import Struct, field

from ...runtime.errors import HandlerError, RequestError
from ...runtime.step.requests import FirstToken, Priority, SamplingParams

MAX_LOGIT_BIASES = 1_024

Choice = TypeVar("Choice", bound=StrEnum)


class GenerateOptions(TypedDict, total=False):
    """The options. Every one has a default, which None selects, too. See `SamplingParams` for
    ranges and the order of application.
    """

    max_tokens: int | None  # None: until the context is full
    temperature: float | None
    top_k: int | None
    top_p: float | None
    min_p: float | None
    repetition_penalty: float | None
    presence_penalty: float | None
    frequency_penalty: float | None
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str] | None
    ignore_eos: bool | None
    # Of each token, and of that many top alternatives; None: none.
    logprobs: int | None
    first_token: Literal["exact", "draft", "sketch"] | None  # None: the instance's default
    # Keeps the KV cache for the next call with the same session; None: the invocation's.
    session: str | None
    # Calls of one tenant share their turns in the queue.
    tenant: str | None
    # Only calls with the same salt share keys and values.
    cache_salt: str | None
    priority: Literal["interactive", "batch"] | None  # None: interactive
    adapter: str | None  # the name of an adapter of the model; None: none
    tools: Sequence[Mapping[str, Any]] | None  # for a prompt of messages
    template: Mapping[str, Any] | None  # further variables of the chat template, such as enable_thinking


class ParsedOptions(Struct, frozen=True):
    """Checked options."""

    max_tokens: int | None = None
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    first_token: FirstToken | None = None
    session: str = ""
    tenant: str = ""
    cache_salt: str = ""
    priority: Priority = Priority.INTERACTIVE
    adapter: str = ""
    tools: list[dict[str, Any]] | None = None
    template: dict[str, Any] = field(default_factory=dict)


def check_options(options: Mapping[str, Any]) -> None:
    """Check untrusted options: raises `RequestError` for an unknown one."""
    for name in options:
        if name not in _PARSERS:
            raise RequestError(f"unknown option {name[:100]!r}", param=name[:100], hint=_known_options())


def parse_options(options: Mapping[str, Any]) -> ParsedOptions:
    """Parse options.

    Raises `HandlerError` for an unknown option, which is in the developer's code, and
    `RequestError` naming the first option with an invalid value, because values often come from the
    caller.
    """
    sampling: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in options.items():
        if name not in _PARSERS:
            raise HandlerError(
                f"context.model has no option {str(name)[:100]!r}",
                hint=_known_options(),
            )
        if value is not None:
            target = others if name in ParsedOptions.__struct_fields__ else sampling
            target[name] = _PARSERS[name](name, value)
    return ParsedOptions(sampling=SamplingParams(**sampling), **others)


def _known_options() -> str:
    return f"Options are {', '.join(sorted(_PARSERS))}."


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _wrong(name, "a whole number", value)
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(name, "a number", value)
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _wrong(name, "true or false", value)
    return value


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(name, "a string", value)
    return value


def _one_of(kind: type[Choice]) -> Callable[[str, Any], Choice]:
    def parse(name: str, value: Any) -> Choice:
        try:
            return kind(value)
        except ValueError:
            *others, last = (repr(each.value) for each in kind)
            shown = repr(value[:50]) if isinstance(value, str) else type(value).__name__
            wanted = f"{', '.join(others)} or {last}"
            raise RequestError(f"{name} must be {wanted}, not {shown}", param=name) from None

    return parse


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise _wrong(name, "a string or a list of strings", value)
    return tuple(texts)


def _biases(name: str, value: Any) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise _wrong(name, "a mapping of token ids to numbers", value)
    if len(value) > MAX_LOGIT_BIASES:
        raise RequestError(f"{name} may have {MAX_LOGIT_BIASES} entries", param=name)
    biases = []
    for key, bias in value.items():
        # JSON has only string keys.
        token = (
            int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 10 else key
        )
        biases.append((_integer(name, token), _number(name, bias)))
    return tuple(biases)


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise _wrong(name, "a mapping with names for keys", value)
    return dict(value)


def _mappings(name: str, value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list | tuple):
        raise _wrong(name, "a list of mappings", value)
    return [_mapping(name, item) for item in value]


def _wrong(name: str, wanted: str, value: Any) -> RequestError:
    return RequestError(f"{name} must be {wanted}, not {type(value).__name__}", param=name)


_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _integer,
    "temperature": _number,
    "top_k": _integer,
    "top_p": _number,
    "min_p": _number,
    "repetition_penalty": _number,
    "presence_penalty": _number,
    "frequency_penalty": _number,
    "logit_bias": _biases,
    "seed": _integer,
    "stop": _texts,
    "ignore_eos": _flag,
    "logprobs": _integer,
    "first_token": _one_of(FirstToken),
    "session": _text,
    "tenant": _text,
    "cache_salt": _text,
    "priority": _one_of(Priority),
    "adapter": _text,
    "tools": _mappings,
    "template": _mapping,
}
