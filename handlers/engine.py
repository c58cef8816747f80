"""`teneral.Engine` and `teneral.AsyncEngine`: a model in a program of the user's own, without a port.

Both start an instance as `teneral serve` does, and call it through the `Model` of function handlers; they only choose
how a caller waits. They know no HTTP: `asgi.py` serves an engine's instance.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, Unpack, overload

from ..loader.errors import UsageError
from ..runtime.errors import RequestError
from ..runtime.instance.instance import Instance
from ..runtime.resolve import keyword_values, resolve
from .function.context import Model, Prompt
from .function.lifetime import Lifetime
from .function.options import GenerateOptions, check_options
from .function.streams import AsyncTextStream, Completion, TextStream

if TYPE_CHECKING:
    import numpy as np

    from ..runtime.config import ServeConfig

Messages = Sequence[Mapping[str, Any]]
# Of a process that Teneral runs itself.
PROCESS_SETTINGS = frozenset({
    "host", "port", "health_port", "platform", "log_format", "log_level", "lambda_streaming", "standby",
    "standby_socket", "batch_output", "batch_answers", "batch_audio",
})  # fmt: skip
# Of HTTP requests.
HTTP_SETTINGS = frozenset({
    "handler", "api_key", "cors_origin", "allowed_hosts", "console", "model_control", "max_body_bytes", "emf", "otel",
})  # fmt: skip
SAVE_TIMEOUT_S = 8.0  # for a KV snapshot, where one is configured


def checked_settings(
    model: str | os.PathLike[str], settings: Mapping[str, Any], *, without: frozenset[str]
) -> dict[str, Any]:
    """The values of keyword arguments. Raises `UsageError`, also for a setting in `without`, which would do nothing."""
    for name in settings:
        if name in without:
            raise UsageError(
                f"the setting {name} has no effect here",
                key=name,
                hint="It is for `teneral serve`"
                + (" and `teneral.asgi_app`." if name in HTTP_SETTINGS else "."),
            )
    return keyword_values(model, settings)


class EngineInstance:
    """The instance of an engine, of one process. Thread-safe."""

    def __init__(self, config: ServeConfig) -> None:
        self._instance = Instance(config).start()
        self._process = os.getpid()

    @property
    def name(self) -> str:
        """The model's name, as servers give it to clients."""
        return self._instance.model_name

    @property
    def instance(self) -> Instance:
        """The instance, for other parts of Teneral. Raises `UsageError` in a process forked from the engine's."""
        if os.getpid() != self._process:
            raise UsageError(
                f"this engine belongs to process {self._process}, and a fork of it has none of its threads",
                hint="Make an engine after the fork, or start processes with multiprocessing's 'spawn'.",
            )
        return self._instance

    def statistics(self) -> dict[str, Any]:
        """The figures of every part that exists so far: sizes in bytes, times in seconds."""
        return self.instance.statistics()

    def _model(self, options: Mapping[str, Any] | None = None, *, may_block_loops: bool = False) -> Model:
        """The model for one call, of at most `request_timeout_s`. Raises `RequestError` for an unknown option."""
        check_options(options or {})
        lifetime = Lifetime(self.instance.config.request_timeout_s, may_block_loops=may_block_loops)
        return Model(self._instance, lifetime, f"engine-{secrets.token_hex(8)}")

    @property
    def _max_ahead(self) -> int:
        """Prompts of one call that may be with the engine at a time: those of a full batch, and enough that wait."""
        config = self._instance.config
        return config.max_running + config.max_queued // 4

    def release(self) -> None:
        """`close`, in the calling thread."""
        if os.getpid() == self._process:  # a fork has no threads to end, and the helpers are not its own
            self._instance.drain(self._instance.config.drain_timeout_s or 0.0)
            self._instance.save_snapshot(SAVE_TIMEOUT_S)
            self._instance.close()
            self._instance.release()


class Engine(EngineInstance):
    """A model in this process, called by blocking methods. Thread-safe. Close it with `close`, or use
    it as a context manager.

    It returns at once and starts as `teneral serve` does: a call waits for the weights that it needs,
    and computes with them while the rest arrives. There may be several in a process. `AsyncEngine` is
    for code with an event loop, which these methods block.

    All calls raise `RequestError` for invalid arguments, `CapacityError` if too much is running
    already, `ModelError` for what this kind of model does not do, `CancelledError` after the setting
    `request_timeout_s`, `DrainingError` once the engine was closed, and the load's own error if
    loading failed. All are a `TeneralError`.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        """Start the model at an address: a path, `org/name` on the Hub, `s3://`, `https://` and so on.

        `settings` are those of `teneral serve` (docs/settings.md): sizes are bytes or a text such as
        "2GiB", times are seconds, None is the default. Those that are not given come from the
        environment (`TENERAL_*`), as a server's do. Raises `UsageError` for an unknown or invalid one.
        """
        values = checked_settings(model, settings, without=PROCESS_SETTINGS | HTTP_SETTINGS)
        super().__init__(resolve(values, os.environ))

    @overload
    def generate(self, prompt: str, **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    def generate(
        self, prompt: list[str] | tuple[str, ...], **options: Unpack[GenerateOptions]
    ) -> list[Completion]: ...
    def generate(
        self, prompt: str | Sequence[str], **options: Unpack[GenerateOptions]
    ) -> Completion | list[Completion]:
        """Continue a text; or each of several, which are computed together, in their order. Blocks
        until all are complete. The first error ends the others.
        """
        if isinstance(prompt, str):
            return self.stream(prompt, **options).read()
        _check_texts(prompt)
        done: list[Completion] = []
        running: deque[TextStream] = deque()
        try:
            for each in prompt:
                if len(running) >= self._max_ahead:
                    done.append(running.popleft().read())
                running.append(self.stream(each, **options))
            while running:
                done.append(running.popleft().read())
        finally:
            for stream in running:
                stream.close()
        return done

    def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Completion:
        """Answer messages {"role": …, "content": …}, rendered by the model's chat template. Blocks
        until the answer is complete.
        """
        return self.stream(messages, **options).read()

    def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> TextStream:
        """Continue a text, or answer messages, in pieces of text as they are decided. Returns once
        the request is in the queue. Closing the stream cancels the rest.
        """
        return self._blocking_model(options).stream(prompt, **options)

    def embed(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One vector for each text: (N, dim) float32, owned by the caller. Raises
        `ContextLengthError` for a text that is too long.
        """
        return self._blocking_model().embed(texts)

    def classify(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A score for each label: (N, num_labels) float32 logits, owned by the caller."""
        return self._blocking_model().classify(texts)

    def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """An ONNX model's outputs by name, as arrays owned by the caller."""
        return self._blocking_model().run(inputs)

    def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens, by default with the special tokens around a prompt. Waits for the
        tokenizer alone.
        """
        return self._blocking_model().tokenize(text, add_special_tokens=add_special_tokens)

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until all weights are exact, for which calls need not wait. Raises the load's error, or
        `TimeoutError`.
        """
        self.instance.exact.result(timeout_s)

    def close(self) -> None:
        """End running calls with `DrainingError`, at once or after the setting `drain_timeout_s`; then
        end all threads and processes, and free the memory. Idempotent.
        """
        self.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _blocking_model(self, options: Mapping[str, Any] | None = None) -> Model:
        # A notebook runs a cell on its event loop, and a blocking call there blocks that cell alone.
        return self._model(options, may_block_loops=True)


class AsyncEngine(EngineInstance):
    """`Engine` for code with an event loop: the same arguments and errors, and the same methods, which
    are coroutines. `async for text in await engine.stream(prompt)` reads a stream, which belongs to
    the loop that it was made on; other calls may be made on any loop.
    """

    def __init__(self, model: str | os.PathLike[str], **settings: Any) -> None:
        """Start the model, as `Engine` does."""
        values = checked_settings(model, settings, without=PROCESS_SETTINGS | HTTP_SETTINGS)
        super().__init__(resolve(values, os.environ))

    @overload
    async def generate(self, prompt: str, **options: Unpack[GenerateOptions]) -> Completion: ...
    @overload
    async def generate(
        self, prompt: list[str] | tuple[str, ...], **options: Unpack[GenerateOptions]
    ) -> list[Completion]: ...
    async def generate(
        self, prompt: str | Sequence[str], **options: Unpack[GenerateOptions]
    ) -> Completion | list[Completion]:
        """Continue a text; or each of several, which are computed together, in their order. The first
        error ends the others.
        """
        if isinstance(prompt, str):
            return await self._model(options).agenerate(prompt, **options)
        _check_texts(prompt)
        done: list[Completion] = []
        running: deque[AsyncTextStream] = deque()
        try:
            for each in prompt:
                if len(running) >= self._max_ahead:
                    done.append(await running.popleft().read())
                running.append(await self.stream(each, **options))
            while running:
                done.append(await running.popleft().read())
        finally:
            for stream in running:
                await stream.aclose()
        return done

    async def chat(self, messages: Messages, **options: Unpack[GenerateOptions]) -> Completion:
        """Answer messages {"role": …, "content": …}, rendered by the model's chat template."""
        return await self._model(options).agenerate(messages, **options)

    async def stream(self, prompt: Prompt, **options: Unpack[GenerateOptions]) -> AsyncTextStream:
        """Continue a text, or answer messages, in pieces of text as they are decided:
        `async for text in await engine.stream(prompt)`. Closing the stream cancels the rest.
        """
        return await self._model(options).astream(prompt, **options)

    async def embed(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """One vector for each text: (N, dim) float32, owned by the caller. Raises
        `ContextLengthError` for a text that is too long.
        """
        return await self._model().aembed(texts)

    async def classify(self, texts: str | Sequence[str]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """A score for each label: (N, num_labels) float32 logits, owned by the caller."""
        return await self._model().aclassify(texts)

    async def run(self, inputs: Mapping[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
        """An ONNX model's outputs by name, as arrays owned by the caller."""
        return await self._model().arun(inputs)

    async def tokenize(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """A text's tokens, by default with the special tokens around a prompt. Waits for the
        tokenizer alone.
        """
        return await self._model().atokenize(text, add_special_tokens=add_special_tokens)

    async def wait(self, timeout_s: float | None = None) -> None:
        """Wait until all weights are exact, for which calls need not. Raises the load's error, or
        `TimeoutError`.
        """
        async with asyncio.timeout(timeout_s):
            # The shield: others may wait for the same future.
            await asyncio.shield(asyncio.wrap_future(self.instance.exact))

    async def close(self) -> None:
        """End running calls with `DrainingError`, at once or after the setting `drain_timeout_s`; then
        end all threads and processes, and free the memory. Idempotent.
        """
        await asyncio.to_thread(self.release)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


def _check_texts(prompts: object) -> None:
    if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, str) for prompt in prompts):
        raise RequestError(
            "prompt must be a text or a list of texts", param="prompt", hint="Pass messages to `chat`."
        )
