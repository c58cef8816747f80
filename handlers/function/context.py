"""The context of a handler's invocation: the client, the time limit, a logger, the KV session, and the model's
API in text, vectors and tokens.

Every call of `context.model` waits for as little as it needs: tokenising for the tokenizer, a generation for the
layers that it reaches. Blocking calls are for handlers written with `def`; those with the prefix `a` are for
`async def`. Every call ends with its invocation: at the deadline, or when the client disconnects. It knows no
platform and no HTTP: the platform's code makes a `Context` for a request, and cancels it when the client
disconnects; errors are those of `runtime.errors`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

from ...runtime.errors import RequestError
from ...runtime.step.requests import FirstToken, GenerationRequest, check_owner
from .lifetime import Lifetime
from .options import GenerateOptions, ParsedOptions, parse_options
from .streams import AsyncTextStream, Completion, TextStream

if TYPE_CHECKING:
    import numpy as np

    from ...runtime.config import ServeConfig
    from ...runtime.engine.embedder import Embedder
    from ...runtime.engine.engine import Engine
    from ...runtime.onnx.runner import OnnxRunner
    from ...runtime.onnx.spec import Value
    from ...runtime.step.images import PromptImage
    from ...runtime.text.tokenizer import TextTokenizer

MAX_EMBEDDED_TEXTS = 2_048

# A text to continue, or chat messages {"role": …, "content": …}. Content is a text, or a list of parts: texts, and
# images as {"type": "image_url", "image_url": {"url": "data:…"}} or {"type": "image", "image": the file's bytes}.
Prompt = str | Sequence[Mapping[str, Any]]
LOGGER_NAME = "teneral.handler"
NO_FACTS: Mapping[str, Any] = MappingProxyType({})


class ModelHost(Protocol):
    """The server of a model: `runtime.instance.Instance`. Its futures fail if loading fails, or for
    the wrong kind of model.
    """

    @property
    def model_name(self) -> str: ...
    @property
    def config(self) -> ServeConfig: ...
    @property
    def tokenizer(self) -> Future[TextTokenizer]: ...
    @property
    def engine(self) -> Future[Engine]: ...
    @property
    def embedder(self) -> Future[Embedder]: ...
    @property
    def onnx(self) -> Future[OnnxRunner]: ...
    @property
    def kind(self) -> Future[str]: ...


class Model:
    """The model in one invocation. Thread-safe.

    All calls raise `CancelledError` when the invocation has ended, `RequestError` for invalid
    arguments, `CapacityError` when the instance is overloaded, `ModelError` for an operation that
    this kind of model does not support, and the load's own error if loading failed.
    """

    def __init__(
        self, host: ModelHost, lifetime: Lifetime, request_id: str, *, session: str | None = None
    ) -> None:
        """`session` is the default of generations."""
        self._session = session or ""
        self._host = host
        self._lifetime = lifetime
        self._request_id = request_id

    @property
    def name(self) -> str:
        """The model's name, as servers give it to clients."""
        return self._host.model_name

    # -- text ------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Continue a text, or answer chat messages. Blocks until it is complete."""
        return self.stream(prompt, **options).read()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TextStream:
        """Generate like `generate`, in pieces of text as they are decided. Returns once the request
        is in the engine's queue.
        """
        self._lifetime.refuse_to_block_a_loop()
        tokenizer = self._lifetime.wait(self._host.tokenizer)
        request = self._request(tokenizer, prompt, parse_options(options))
        engine = self._lifetime.wait(self._host.engine)
        return TextStream(engine.submit, request, self._lifetime)

    async def agenerate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """The async form of `generate`."""
        stream = await self.astream(prompt, **options)
        return await stream.read()

    async def astream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncTextStream:
        """The async form of `stream`: `async for text in await context.model.astream(prompt)`."""
        tokenizer = await self._lifetime.wait_async(self._host.tokenizer)
        # A long prompt takes a while to tokenise, and another process renders the chat template.
        request = await asyncio.to_thread(self._request, tokenizer, prompt, parse_options(options))
        engine = await self._lifetime.wait_async(self._host.engine)
        return AsyncTextStream(engine.submit, request, self._lifetime)

    # -- vectors ---------------------------------------------------------------------------------------------

    def embed(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One vector for each text: (N, dim) float32, owned by the caller. Raises
        `ContextLengthError` for a text that is too long.
        """
        return self._rows(texts, "embed")

    async def aembed(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The async form of `embed`."""
        return await self._arows(texts, "embed")

    # -- scores ----------------------------------------------------------------------------------------------

    def classify(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A score for each label: (N, num_labels) float32 logits, owned by the caller. Raises
        `ContextLengthError` for a text that is too long.
        """
        return self._rows(texts, "classify")

    async def aclassify(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """The async form of `classify`."""
        return await self._arows(texts, "classify")

    def labels(self) -> tuple[str, ...]:
        """A classifier's labels, in the order of its scores; () for a model that embeds. Blocks
        until the model is loaded. An ONNX model's labels are those of its config.json.
        """
        if self._lifetime.wait(self._host.kind) == "onnx":
            return self._lifetime.wait(self._host.onnx).labels
        return self._lifetime.wait(self._host.embedder).labels

    async def alabels(self) -> tuple[str, ...]:
        """The async form of `labels`."""
        if await self._lifetime.wait_async(self._host.kind) == "onnx":
            return (await self._lifetime.wait_async(self._host.onnx)).labels
        return (await self._lifetime.wait_async(self._host.embedder)).labels

    # -- tensors ---------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """An ONNX model's outputs by name, as arrays owned by the caller.

        `inputs` are arrays of the model's types, or values that numpy converts to arrays. Blocks while the weights
        that it needs arrive. Raises `RequestError`, naming the input that does not fit.
        """
        self._lifetime.refuse_to_block_a_loop()
        return self._lifetime.wait(self._host.onnx).run(inputs, self._lifetime)

    async def arun(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """The async form of `run`."""
        runner = await self._lifetime.wait_async(self._host.onnx)
        outputs = runner.submit(inputs)
        try:
            return await self._lifetime.wait_async(outputs)
        finally:
            runner.give_up(outputs)

    def inputs(self) -> tuple[Value, ...]:
        """An ONNX model's inputs: each has a `name`, a `type` and a `shape`. Blocks until they are known."""
        return self._lifetime.wait(self._host.onnx).spec.inputs

    async def ainputs(self) -> tuple[Value, ...]:
        """The async form of `inputs`."""
        return (await self._lifetime.wait_async(self._host.onnx)).spec.inputs

    # -- tokens ----------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens, by default with the special tokens around a prompt. Blocks until the
        tokenizer is loaded.
        """
        return self._lifetime.wait(self._host.tokenizer).encode(text, add_special_tokens=add_special_tokens)

    async def atokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """The async form of `tokenize`."""
        tokenizer = await self._lifetime.wait_async(self._host.tokenizer)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """The half-open range of the text's characters for each of its tokens, without special
        tokens.
        """
        return self._lifetime.wait(self._host.tokenizer).offsets(text)

    async def atoken_offsets(self, text: str) -> list[tuple[int, int]]:
        """The async form of `token_offsets`."""
        tokenizer = await self._lifetime.wait_async(self._host.tokenizer)
        return await asyncio.to_thread(tokenizer.offsets, text)

    # --------------------------------------------------------------------------------------------------------

    def _rows(
        self, texts: str | Sequence[str], method: Literal["embed", "classify"]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        self._lifetime.refuse_to_block_a_loop()
        tokenizer = self._lifetime.wait(self._host.tokenizer)
        embedder = self._lifetime.wait(self._host.embedder)
        token_lists = _tokenize_texts(tokenizer, texts, embedder.max_tokens)
        rows = getattr(embedder, method)(token_lists)
        self._lifetime.count_tokens(sum(map(len, token_lists)), 0)
        try:
            return self._lifetime.wait(rows)
        finally:
            embedder.give_up(rows)  # no effect once it is done

    async def _arows(
        self, texts: str | Sequence[str], method: Literal["embed", "classify"]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        tokenizer = await self._lifetime.wait_async(self._host.tokenizer)
        embedder = await self._lifetime.wait_async(self._host.embedder)
        token_lists = await asyncio.to_thread(_tokenize_texts, tokenizer, texts, embedder.max_tokens)
        rows = getattr(embedder, method)(token_lists)
        self._lifetime.count_tokens(sum(map(len, token_lists)), 0)
        try:
            return await self._lifetime.wait_async(rows)
        finally:
            embedder.give_up(rows)

    def _request(self, tokenizer: TextTokenizer, prompt: Prompt, options: ParsedOptions) -> GenerationRequest:
        engine = self._host.engine
        max_tokens = engine.result().max_context if engine.done() and engine.exception() is None else None
        images: tuple[PromptImage, ...] = ()
        if isinstance(prompt, str):
            tokens = tokenizer.encode(prompt, max_tokens=max_tokens)
        elif has_images(prompt):
            from .images import render  # for the few functions whose prompts have some

            tokens, images = render(
                tokenizer, prompt, {"tools": options.tools, **options.template}, max_tokens
            )
        else:
            text = tokenizer.chat(prompt, **{"tools": options.tools, **options.template})
            # The template wrote the special tokens.
            tokens = tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)
        return GenerationRequest(
            request_id=self._request_id,
            prompt_tokens=tuple(tokens),
            max_tokens=options.max_tokens,
            sampling=options.sampling,
            stop=options.stop,
            ignore_eos=options.ignore_eos,
            num_top_logprobs=options.logprobs,
            first_token=options.first_token or FirstToken(self._host.config.first_token),
            session=options.session or self._session,
            tenant=options.tenant,
            cache_salt=options.cache_salt,
            priority=options.priority,
            adapter=options.adapter,
            images=images,
        )


def has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    """True if a message has a part that is an image."""
    return any(
        isinstance(part, Mapping) and part.get("type") in ("image_url", "image")
        for message in messages
        if isinstance(message, Mapping) and isinstance(message.get("content"), list | tuple)
        for part in message["content"]
    )


def _tokenize_texts(tokenizer: TextTokenizer, texts: str | Sequence[str], max_tokens: int) -> list[list[int]]:
    items = [texts] if isinstance(texts, str) else texts
    if not isinstance(items, list | tuple) or not all(isinstance(text, str) for text in items):
        raise RequestError(
            "the input to embed or classify must be a string or a list of strings", param="input"
        )
    if len(items) > MAX_EMBEDDED_TEXTS:
        raise RequestError(f"{len(items)} texts were given, more than {MAX_EMBEDDED_TEXTS}", param="input")
    return [tokenizer.encode(text, max_tokens=max_tokens) for text in items]


class Context:
    """The context of one invocation. Thread-safe; valid until the invocation ends, which cancels
    its remaining work.
    """

    def __init__(
        self,
        host: ModelHost,
        *,
        request_id: str,
        timeout_s: float | None = None,
        session: str | None = None,
        platform: Mapping[str, Any] = NO_FACTS,
        trace_id: str | None = None,
        on_progress: Callable[[Any], object] | None = None,
        on_tokens: Callable[[int, int], None] = lambda _prompt, _generated: None,
    ) -> None:
        """`host` is the instance that serves the model; `timeout_s` counts from now, None is no
        deadline. `platform` is the platform's information about the invocation; `on_tokens` is as in `Lifetime`.
        Raises RequestError for an invalid `session`.
        """
        check_owner(session=session or "")
        self.request_id = request_id
        # On Lambda: its name, the function's ARN, client context, identity and so on.
        self.platform = platform
        # In the platform's format, such as X-Ray's; None: not traced.
        self.trace_id = trace_id
        # The KV cache is kept for the next invocation with the same session; None: none.
        self.session = session
        self.logger: logging.LoggerAdapter[logging.Logger] = logging.LoggerAdapter(
            logging.getLogger(LOGGER_NAME), {"request_id": request_id}
        )
        # For handlers that are part of Teneral; all others use `model`.
        self.host = host
        self._on_progress = on_progress
        self._lifetime = Lifetime(timeout_s, on_tokens=on_tokens)
        self.model = Model(host, self._lifetime, request_id, session=session)

    @property
    def deadline(self) -> float | None:
        """The deadline on `time.monotonic()`'s clock; None: no limit."""
        return self._lifetime.deadline

    def remaining_time_s(self) -> float:
        """Seconds until the deadline, never below 0; `math.inf` without one."""
        return self._lifetime.remaining_s()

    @property
    def cancelled(self) -> bool:
        """True if the client has disconnected. Calls of the model then raise `CancelledError`; long
        work should stop.
        """
        return self._lifetime.cancelled

    def progress(self, value: Any) -> None:
        """Report progress to the client, where the platform supports it (RunPod's queue); otherwise
        do nothing.

        `value` is JSON; at most one a second is sent.
        """
        if self._on_progress is not None:
            self._on_progress(value)

    def cancel(self) -> None:
        """End the invocation: generations stop within one step, waiting calls raise
        `CancelledError`. Idempotent.
        """
        self._lifetime.cancel()

    def __repr__(self) -> str:
        return f"Context(request_id={self.request_id!r}, model={self.model.name!r})"
