"""`context.model`: the model as a handler sees it, in text, vectors and tokens.

Every call waits for as little as it needs: tokenising for the tokenizer, a generation for the layers that it
reaches. Blocking calls are for handlers written with `def`; those with an `a` before their name are for
`async def`. Every call ends with its invocation: at the deadline, or when the client goes away. It knows no
HTTP; errors are those of `runtime.errors`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any, Literal, Protocol, Unpack

from ...runtime.errors import RequestError
from ...runtime.step.requests import FirstToken, GenerationRequest
from .lifetime import Lifetime, refuse_to_block_a_loop
from .options import GenerateOptions, ParsedOptions, parse_options
from .streams import AsyncTextStream, Completion, TextStream

if TYPE_CHECKING:
    import numpy as np

    from ...runtime.config import ServeConfig
    from ...runtime.engine.embedder import Embedder
    from ...runtime.engine.engine import Engine
    from ...runtime.onnx.runner import OnnxRunner
    from ...runtime.onnx.spec import Value
    from ...runtime.text.tokenizer import TextTokenizer

MAX_EMBEDDED_TEXTS = 2_048

Prompt = str | Sequence[Mapping[str, Any]]  # a text to go on from, or chat messages {"role": …, "content": …}


class ModelHost(Protocol):
    """What serves a model: `runtime.instance.Instance`. The futures fail when loading does, or for the wrong
    kind of model.
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
    """One invocation's view of the model. Thread-safe.

    All calls raise `CancelledError` when the invocation has ended, `RequestError` for invalid
    arguments, `CapacityError` when the instance has too much to do, `ModelError` when this kind of model
    cannot do it, and the load's own error when loading failed.
    """

    def __init__(
        self, host: ModelHost, lifetime: Lifetime, request_id: str, *, session: str | None = None
    ) -> None:
        """`session` is that of generations which name none."""
        self._session = session or ""
        self._host = host
        self._lifetime = lifetime
        self._request_id = request_id

    @property
    def name(self) -> str:
        return self._host.model_name

    # -- text ------------------------------------------------------------------------------------------------

    def generate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """Go on from a text, or answer chat messages. Blocks until all is there."""
        return self.stream(prompt, **options).read()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TextStream:
        """As `generate`, in pieces of text as they are decided. Returns when the request is in the engine's
        queue.
        """
        refuse_to_block_a_loop()
        tokenizer = self._lifetime.wait(self._host.tokenizer)
        request = self._request(tokenizer, prompt, parse_options(options))
        engine = self._lifetime.wait(self._host.engine)
        return TextStream(engine.submit, request, self._lifetime)

    async def agenerate(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> Completion:
        """As `generate`, for async handlers."""
        stream = await self.astream(prompt, **options)
        return await stream.read()

    async def astream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncTextStream:
        """As `stream`, for async handlers: `async for text in await context.model.astream(prompt)`."""
        tokenizer = await self._lifetime.wait_async(self._host.tokenizer)
        # A long prompt takes a while to tokenise, and a chat template is rendered by another process.
        request = await asyncio.to_thread(self._request, tokenizer, prompt, parse_options(options))
        engine = await self._lifetime.wait_async(self._host.engine)
        return AsyncTextStream(engine.submit, request, self._lifetime)

    # -- vectors ---------------------------------------------------------------------------------------------

    def embed(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One vector a text: (N, dim) float32, the caller's own. Raises `ContextLengthError` for a text that
        is too long.
        """
        return self._rows(texts, "embed")

    async def aembed(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """As `embed`, for async handlers."""
        return await self._arows(texts, "embed")

    # -- scores ----------------------------------------------------------------------------------------------

    def classify(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A score for each label: (N, num_labels) float32 logits, the caller's own. Raises `ContextLengthError` for a
        text that is too long.
        """
        return self._rows(texts, "classify")

    async def aclassify(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """As `classify`, for async handlers."""
        return await self._arows(texts, "classify")

    def labels(self) -> tuple[str, ...]:
        """A classifier's labels, in the order of its scores; () of a model that embeds. Blocks until the model is
        there. An ONNX model's are those of its config.json.
        """
        if self._lifetime.wait(self._host.kind) == "onnx":
            return self._lifetime.wait(self._host.onnx).labels
        return self._lifetime.wait(self._host.embedder).labels

    async def alabels(self) -> tuple[str, ...]:
        """As `labels`, for async handlers."""
        if await self._lifetime.wait_async(self._host.kind) == "onnx":
            return (await self._lifetime.wait_async(self._host.onnx)).labels
        return (await self._lifetime.wait_async(self._host.embedder)).labels

    # -- tensors ---------------------------------------------------------------------------------------------

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """An ONNX model's outputs by name, the caller's own arrays. `inputs` are arrays of the model's types, or what
        numpy makes arrays of. Blocks while the weights that it needs arrive. Raises `RequestError` naming the input
        that does not fit.
        """
        refuse_to_block_a_loop()
        runner = self._lifetime.wait(self._host.onnx)
        outputs = runner.submit(inputs)
        try:
            return self._lifetime.wait(outputs)
        finally:
            runner.give_up(outputs)  # does nothing once it is done

    async def arun(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """As `run`, for async handlers."""
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
        """As `inputs`, for async handlers."""
        return (await self._lifetime.wait_async(self._host.onnx)).spec.inputs

    # -- tokens ----------------------------------------------------------------------------------------------

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens, by default with those that the model wants around a prompt. Blocks until the
        tokenizer is there.
        """
        return self._lifetime.wait(self._host.tokenizer).encode(text, add_special_tokens=add_special_tokens)

    async def atokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """As `tokenize`, for async handlers."""
        tokenizer = await self._lifetime.wait_async(self._host.tokenizer)
        return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=add_special_tokens)

    def token_offsets(self, text: str) -> list[tuple[int, int]]:
        """Which characters of the text each of its tokens stands for, half-open, without special tokens."""
        return self._lifetime.wait(self._host.tokenizer).offsets(text)

    async def atoken_offsets(self, text: str) -> list[tuple[int, int]]:
        """As `token_offsets`, for async handlers."""
        tokenizer = await self._lifetime.wait_async(self._host.tokenizer)
        return await asyncio.to_thread(tokenizer.offsets, text)

    # --------------------------------------------------------------------------------------------------------

    def _rows(
        self, texts: str | Sequence[str], method: Literal["embed", "classify"]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        refuse_to_block_a_loop()
        tokenizer = self._lifetime.wait(self._host.tokenizer)
        embedder = self._lifetime.wait(self._host.embedder)
        rows = getattr(embedder, method)(_tokenize_texts(tokenizer, texts, embedder.max_tokens))
        try:
            return self._lifetime.wait(rows)
        finally:
            embedder.give_up(rows)  # does nothing once it is done

    async def _arows(
        self, texts: str | Sequence[str], method: Literal["embed", "classify"]
    ) -> np.ndarray[Any, np.dtype[np.float32]]:
        tokenizer = await self._lifetime.wait_async(self._host.tokenizer)
        embedder = await self._lifetime.wait_async(self._host.embedder)
        token_lists = await asyncio.to_thread(_tokenize_texts, tokenizer, texts, embedder.max_tokens)
        rows = getattr(embedder, method)(token_lists)
        try:
            return await self._lifetime.wait_async(rows)
        finally:
            embedder.give_up(rows)

    def _request(self, tokenizer: TextTokenizer, prompt: Prompt, options: ParsedOptions) -> GenerationRequest:
        engine = self._host.engine
        max_tokens = engine.result().max_context if engine.done() and engine.exception() is None else None
        if isinstance(prompt, str):
            tokens = tokenizer.encode(prompt, max_tokens=max_tokens)
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
        )


def _tokenize_texts(tokenizer: TextTokenizer, texts: str | Sequence[str], max_tokens: int) -> list[list[int]]:
    items = [texts] if isinstance(texts, str) else texts
    if not isinstance(items, list | tuple) or not all(isinstance(text, str) for text in items):
        raise RequestError(
            "what is embedded or classified must be a string or a list of strings", param="input"
        )
    if len(items) > MAX_EMBEDDED_TEXTS:
        raise RequestError(
            f"{len(items)} texts were given, but {MAX_EMBEDDED_TEXTS} is the most", param="input"
        )
    return [tokenizer.encode(text, max_tokens=max_tokens) for text in items]
