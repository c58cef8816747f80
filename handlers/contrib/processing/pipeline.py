"""`@handler(pre=…, post=…)`: functions before and after a handler.

    pre(event, context) -> event          in order, before the handler
    post(result, context) -> result       in order, on the result, or on each value of a stream
    post_stream(values, context)          on a whole stream instead of `post`: from iterator to iterator

A decorated handler stays of its kind: plain, generator, async, async generator. Only a plain
handler with an async function becomes async, and then runs in a thread, as before. Plain functions
of an async handler also run in a thread, so each may use the model calls of its kind. This module
knows no platform, and does not know the purpose of the functions.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any

from ....loader.errors import TeneralError
from ....runtime.errors import HandlerError
from ...function.context import Context
from ...function.handler import HandlerKind, kind_of

Function = Callable[..., Any]
Functions = Function | Sequence[Function]

_END = object()


@dataclass(frozen=True, slots=True)
class PipelineStage:
    """One function and its name in errors: "pre check_length of summarise"."""

    function: Function
    label: str
    kind: HandlerKind

    def call(self, value: Any, context: Context) -> Any:
        with _naming(self.label):
            return self.function(value, context)

    async def acall(self, value: Any, context: Context) -> Any:
        with _naming(self.label):
            if self.kind is HandlerKind.ASYNC:
                return await self.function(value, context)
            result = await asyncio.to_thread(self.function, value, context)
            return await result if inspect.isawaitable(result) else result

    def naming(self, results: Iterator[Any], known: Sequence[Exception]) -> Iterator[Any]:
        """The values of a `post_stream`, with its errors named, except those `known` to come from
        its input.
        """
        with _naming(self.label, known):
            yield from results

    async def anaming(self, results: AsyncIterator[Any], known: Sequence[Exception]) -> AsyncIterator[Any]:
        with _naming(self.label, known):
            async for result in results:
                yield result


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A handler with its functions."""

    function: Function
    pre: tuple[PipelineStage, ...]
    post: tuple[PipelineStage, ...]
    post_stream: tuple[PipelineStage, ...]

    # -- plain -----------------------------------------------------------------------------------------------

    def prepare(self, event: Any, context: Context) -> Any:
        for stage in self.pre:
            event = stage.call(event, context)
        return event

    def finish(self, result: Any, context: Context) -> Any:
        """Finish one value; a returned iterator is a stream."""
        if isinstance(result, Iterator):
            return self.stream(result, context)
        for stage in self.post:
            result = stage.call(result, context)
        return result

    def stream(self, values: Iterator[Any], context: Context) -> Iterator[Any]:
        """The results of a stream. Closing it closes the handler's own."""
        results = values if self.post_stream else self._each(values, context)
        for stage in self.post_stream:
            known: list[Exception] = []
            results = stage.naming(stage.function(_noting(results, known), context), known)
        try:
            yield from results
        finally:
            if hasattr(values, "close"):
                values.close()

    def _each(self, values: Iterator[Any], context: Context) -> Iterator[Any]:
        for value in values:
            result = value
            for stage in self.post:
                result = stage.call(result, context)
            yield result

    # -- async -----------------------------------------------------------------------------------------------

    async def aprepare(self, event: Any, context: Context) -> Any:
        for stage in self.pre:
            event = await stage.acall(event, context)
        return event

    async def afinish(self, result: Any, context: Context) -> Any:
        if isinstance(result, Iterator):
            result = _as_async(result)
        if isinstance(result, AsyncIterator):
            return self.astream(result, context)
        for stage in self.post:
            result = await stage.acall(result, context)
        return result

    async def astream(self, values: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        results = values if self.post_stream else self._aeach(values, context)
        for stage in self.post_stream:
            known: list[Exception] = []
            results = stage.anaming(stage.function(_anoting(results, known), context), known)
        try:
            async for result in results:
                yield result
        finally:
            for stream in (results, values):
                if hasattr(stream, "aclose"):
                    await stream.aclose()

    async def _aeach(self, values: AsyncIterator[Any], context: Context) -> AsyncIterator[Any]:
        async for value in values:
            result = value
            for stage in self.post:
                result = await stage.acall(result, context)
            yield result


def handler(
    *, pre: Functions = (), post: Functions = (), post_stream: Functions = ()
) -> Callable[[Function], Function]:
    """Decorate a handler with functions before and after it; each may be one function or several.

    Their exceptions become a `HandlerError` that names the function; errors of Teneral, such as a
    `RequestError` for an invalid event, pass through with a note. Raises `HandlerError` for
    functions that cannot be combined.
    """

    def decorate(function: Function) -> Function:
        name = getattr(function, "__qualname__", type(function).__name__)
        pipeline = Pipeline(
            function,
            *(
                tuple(_stage(part, where, name) for part in _as_tuple(parts))
                for where, parts in (("pre", pre), ("post", post), ("post_stream", post_stream))
            ),
        )
        kind = _kind_with(kind_of(function), pipeline, name)
        return functools.wraps(function)(_WRAPPERS[kind](pipeline, kind_of(function)))

    return decorate


def _wrap_sync(pipeline: Pipeline, own: HandlerKind) -> Function:
    def run(event: Any, context: Context) -> Any:
        return pipeline.finish(pipeline.function(pipeline.prepare(event, context), context), context)

    return run


def _wrap_generator(pipeline: Pipeline, own: HandlerKind) -> Function:
    def run(event: Any, context: Context) -> Iterator[Any]:
        yield from pipeline.stream(pipeline.function(pipeline.prepare(event, context), context), context)

    return run


def _wrap_async(pipeline: Pipeline, own: HandlerKind) -> Function:
    async def run(event: Any, context: Context) -> Any:
        event = await pipeline.aprepare(event, context)
        if own is HandlerKind.SYNC:
            result = await asyncio.to_thread(pipeline.function, event, context)
        else:
            result = await pipeline.function(event, context)
        return await pipeline.afinish(result, context)

    return run


def _wrap_async_generator(pipeline: Pipeline, own: HandlerKind) -> Function:
    async def run(event: Any, context: Context) -> AsyncIterator[Any]:
        event = await pipeline.aprepare(event, context)
        values = pipeline.function(event, context)
        stream = pipeline.astream(values if own.is_async else _as_async(values), context)
        async with aclosing(stream):  # type: ignore[type-var]
            async for value in stream:
                yield value

    return run


_WRAPPERS: dict[HandlerKind, Callable[[Pipeline, HandlerKind], Function]] = {
    HandlerKind.SYNC: _wrap_sync,
    HandlerKind.GENERATOR: _wrap_generator,
    HandlerKind.ASYNC: _wrap_async,
    HandlerKind.ASYNC_GENERATOR: _wrap_async_generator,
}


def _stage(function: Function, where: str, name: str) -> PipelineStage:
    own_name = getattr(function, "__name__", type(function).__name__)
    label = f"{where} {own_name} of {name}"
    if not callable(function):
        raise HandlerError(
            f"{label} is not a function", hint="Give functions of two arguments, or lists of them."
        )
    try:
        inspect.signature(function).bind("value", "context")
    except (TypeError, ValueError) as error:
        raise HandlerError(f"{label} cannot be called with (value, context): {error}") from error
    kind = kind_of(function)
    if where != "post_stream" and kind in (HandlerKind.GENERATOR, HandlerKind.ASYNC_GENERATOR):
        raise HandlerError(f"{label} yields", hint="Give it as post_stream, or have it return one value.")
    if where == "post_stream" and kind is HandlerKind.ASYNC:
        raise HandlerError(f"{label} is a coroutine", hint="Write it as `async def` with `yield`.")
    return PipelineStage(function, label, kind)


def _kind_with(own: HandlerKind, pipeline: Pipeline, name: str) -> HandlerKind:
    """The kind of the whole: the handler's own, or its async form if one of the functions needs
    that.
    """
    stages = (*pipeline.pre, *pipeline.post, *pipeline.post_stream)
    if not own.is_async and not any(stage.kind.is_async for stage in stages):
        return own
    plain = next((stage for stage in pipeline.post_stream if stage.kind is HandlerKind.GENERATOR), None)
    if plain is not None:
        raise HandlerError(
            f"{plain.label} takes a plain iterator, but {name} runs as an async handler",
            hint="Write it as an async generator.",
        )
    return HandlerKind.ASYNC if own in (HandlerKind.SYNC, HandlerKind.ASYNC) else HandlerKind.ASYNC_GENERATOR


def _as_tuple(functions: Functions) -> tuple[Function, ...]:
    return tuple(functions) if isinstance(functions, Sequence) else (functions,)


@contextmanager
def _naming(label: str, known: Sequence[Exception] = ()) -> Iterator[None]:
    """Name the stage in errors from within; those that are `known` come from elsewhere."""
    try:
        yield
    except Exception as error:
        if any(error is other for other in known):
            raise
        if isinstance(error, TeneralError):
            error.add_note(f"raised by {label}")
            raise
        raise HandlerError(f"{label} raised {type(error).__name__}: {error}") from error


def _noting(values: Iterator[Any], known: list[Exception]) -> Iterator[Any]:
    """The values; their errors are added to `known`."""
    try:
        yield from values
    except Exception as error:
        known.append(error)
        raise


async def _anoting(values: AsyncIterator[Any], known: list[Exception]) -> AsyncIterator[Any]:
    try:
        async for value in values:
            yield value
    except Exception as error:
        known.append(error)
        raise


async def _as_async(values: Iterator[Any]) -> AsyncIterator[Any]:
    """A plain iterator on an event loop: each of its steps runs in a thread."""
    try:
        while (value := await asyncio.to_thread(next, values, _END)) is not _END:
            yield value
    finally:
        if hasattr(values, "close"):
            await asyncio.to_thread(values.close)
