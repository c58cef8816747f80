"""Prompts and generated texts: the decoder's side of `infer` and of Triton's `generate`, and the
options of a request.

Options are the protocol's parameters, Triton's, and those of a generation, whose names are those of
/v1/completions, with Teneral's own on the same level. Unsupported options that would change the
answer are refused, not ignored. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET

from ....runtime.errors import RequestError
from ....runtime.step.requests import FirstToken, GenerationRequest
from ...http.json_bodies import JsonDecoder, encode, invalid_field
from ...http.sse import SSE, Framing
from ...openai.generation import SequenceOutcome, Step
from ...openai.parameters import check_extras, prompt_tokens, sequences, wanted_first_token
from ...openai.responses import Usage
from ...openai.schemas import Extras, GenerationBody
from ...openai.structured import grammar_of
from .routes import error_body
from .schemas import GenerateResponse
from .tensors import BYTES, Tensor

if TYPE_CHECKING:
    from ....runtime.text.tokenizer import TextTokenizer


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


TEXT_INPUTS = ("text_input", "text")  # the names of a prompt's tensor
FRAMING = Framing(
    SSE.content_type, SSE.prefix, SSE.suffix, SSE.has_comments, b"", error_body
)  # Triton has no [DONE]

# Inputs of Triton's vLLM backend that are not options.
_STREAM, _NO_ECHO, _SAMPLING = "stream", "exclude_input_in_output", "sampling_parameters"
_decode_object: Callable[[bytes], dict[str, Any]] = JsonDecoder(dict[str, Any]).decode


class TextRequest:
    """Some prompts and one set of options: `respond.Asked`. Raises `RequestError` for invalid ones."""

    needs_context = False

    def __init__(
        self, prompts: Sequence[str], body: GenerationBody, *, first_token: FirstToken, request_id: str
    ) -> None:
        check_extras(body)
        self.body = body
        self.grammar = grammar_of(body)
        self.max_tokens: int | None = DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
        self.first_token = wanted_first_token(body, default=first_token)
        self.num_sequences = len(prompts)
        self.num_prompt_tokens = 0
        self._prompts = prompts
        self._request_id = request_id

    def prepare(self, tokenizer: TextTokenizer, max_tokens: int | None) -> list[GenerationRequest]:
        body = self.body
        prompts = [
            prompt_tokens(
                body,
                prompt,
                tokenizer,
                max_prompt_tokens=max_tokens,
                max_tokens=self.max_tokens,
                param=TEXT_INPUTS[0],
            )
            for prompt in self._prompts
        ]
        self.num_prompt_tokens = sum(map(len, prompts))
        return sequences(
            body,
            prompts,
            tokenizer,
            request_id=self._request_id,
            n=1,
            max_tokens=self.max_tokens,
            num_top_logprobs=None,
            first_token=self.first_token,
            grammar=None if self.grammar is None else tokenizer.compile_grammar(self.grammar),
        )


class GenerateFormat(TextRequest):
    """One `generate` or `generate_stream`: `respond.Format`."""

    looks_up_tokens = counts_reasoning = False
    begins_with_grammar = None

    def __init__(
        self,
        prompt: str,
        body: GenerationBody,
        *,
        first_token: FirstToken,
        request_id: str,
        model: str,
        version: str,
        given_id: str | None,
        echo: bool,
    ) -> None:
        super().__init__([prompt], body, first_token=first_token, request_id=request_id)
        self._model, self._version = model, version
        self._given_id = UNSET if given_id is None else given_id
        self._unsent_prompt = prompt if echo else ""

    def chunks(self, step: Step) -> list[bytes]:
        _, event = step
        text, self._unsent_prompt = self._unsent_prompt + event.text, ""
        reason = None if event.finish_reason is None else str(event.finish_reason)
        return [self._answer(text, reason)] if text or reason else []

    def usage_chunk(self, usage: Usage) -> bytes:
        raise NotImplementedError("Triton's streams have no usage")

    def whole(self, outcomes: Sequence[SequenceOutcome], usage: Usage) -> bytes:
        (outcome,) = outcomes
        return self._answer(self._unsent_prompt + outcome.text, str(outcome.finish_reason))

    def _answer(self, text: str, reason: str | None) -> bytes:
        return encode(
            GenerateResponse(
                self._model, self._version, text, UNSET if reason is None else reason, self._given_id
            )
        )


def prompts_of(tensors: dict[str, Tensor], *, max_prompts: int) -> tuple[str, list[str], tuple[int, ...]]:
    """Remove the prompt's tensor from `tensors`: its name, its texts and its shape. Raises
    `RequestError`.
    """
    names = [name for name in TEXT_INPUTS if name in tensors]
    if len(names) != 1:
        raise RequestError(
            f"there must be one input {TEXT_INPUTS[0]!r}, with the texts as BYTES", param="inputs"
        )
    tensor = tensors.pop(names[0])
    if tensor.datatype != BYTES:
        raise RequestError(
            f"input {names[0]!r}: it is {tensor.datatype}, but texts are BYTES", param="inputs"
        )
    if not 0 < len(tensor.elements) <= max_prompts:
        raise RequestError(
            f"input {names[0]!r}: it has {len(tensor.elements)} texts, but may have 1 to {max_prompts}",
            param="inputs",
        )
    return names[0], tensor.texts(), tensor.shape


def options_of(tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the generation, from inputs and parameters. An input applies to all texts.
    Raises `RequestError` for an input that the model does not have.
    """
    options = dict(parameters)
    for name, tensor in tensors.items():
        if name not in OPTIONS and name not in (_STREAM, _NO_ECHO, _SAMPLING):
            raise RequestError(f"the model has no input {name!r}", param="inputs")
        options[name] = _value(tensor)
    more = options.pop(_SAMPLING, None)
    if more is not None:
        options = {**_sampling_parameters(more), **options}
    return options


def takes_prompt_back(options: dict[str, Any]) -> bool:
    """True if the answer begins with the prompt, by `exclude_input_in_output` = false. Removes that
    from the options, and `stream`, which the path determines.
    """
    flag(options, _STREAM)
    echo = not flag(options, _NO_ECHO, default=True)
    for name in (_STREAM, _NO_ECHO):
        options.pop(name, None)
    return echo


def wants_stream(options: Mapping[str, Any]) -> bool:
    return flag(options, _STREAM)


def _value(tensor: Tensor) -> Any:
    """An option's value, of one element; several texts are a list, for stop strings."""
    if isinstance(tensor.elements, list):
        texts = tensor.texts()
        return texts[0] if len(texts) == 1 else texts
    if len(tensor.elements) != 1:
        raise RequestError(f"input {tensor.name!r}: an option has one element", param="inputs")
    return tensor.elements[0].item()


def _sampling_parameters(given: Any) -> dict[str, Any]:
    """Options as one JSON text, in the form of Triton's vLLM backend."""
    if not isinstance(given, str):
        raise RequestError(f"{_SAMPLING} must be a JSON object in a text", param=_SAMPLING)
    try:
        return _decode_object(given.encode())
    except RequestError as error:
        raise RequestError(f"{_SAMPLING} is not a JSON object: {error.message}", param=_SAMPLING) from None


def read_generate(data: bytes | bytearray) -> tuple[str, str | None, dict[str, Any]]:
    """The body of a `generate`: its text, its id, and its options, in `parameters` or on the same
    level.
    """
    body = _decode_object(bytes(data))
    text, given_id, parameters = (
        body.pop("text_input", None),
        body.pop("id", None),
        body.pop("parameters", None),
    )
    if not isinstance(text, str):
        raise RequestError("text_input must be a string", param="text_input")
    if not isinstance(given_id, str | None):
        raise RequestError("id must be a string", param="id")
    if not isinstance(parameters, dict | None):
        raise RequestError("parameters must be an object", param="parameters")
    return text, given_id, {**body, **(parameters or {})}
