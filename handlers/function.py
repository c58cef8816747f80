"""The user's function, whatever its kind, run the same way: values come out one after another.

    def handler(event, context): return …        one value
    def handler(event, context): yield …         any number of values
    async def handler(event, context): …         either

Users' code never runs on the event loop of whoever asks: plain functions and generators run in a thread of
their own, async ones on one loop that belongs to the `Handler`, so that clients which they keep between
invocations go on working. It knows no HTTP and no models.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import functools
import inspect
import json
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

from ..loader.errors import TeneralError
from ..runtime.errors import CancelledError, HandlerError, ResultError
from .calls import DEFAULT_MAX_CALLS, FunctionCall, FunctionCalls
from .context import LOGGER_NAME, Context
from .loop_thread import LoopThread
from .outlet import Outlet, OutletClosedError
from .threads import CallThreads
from .user_code import find_function

MAX_MESSAGE_CHARS = 1_000

logger = logging.getLogger(LOGGER_NAME)


class HandlerKind(enum.StrEnum):
    SYNC = "sync"
    GENERATOR = "generator"
    ASYNC = "async"
    ASYNC_GENERATOR = "async generator"

    @property
    def is_async(self) -> bool:
        return self in (HandlerKind.ASYNC, HandlerKind.ASYNC_GENERATOR)

    @property
    def is_generator(self) -> bool:
        """By its definition. A plain function may return an iterator all the same, which shows when it does."""
        return self in (HandlerKind.GENERATOR, HandlerKind.ASYNC_GENERATOR)


class Handler:
    """A function that was found to take (event, context). Serves any number of invocations at a time; close
    it at the end.
    """

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, max_calls: int = DEFAULT_MAX_CALLS
    ) -> None:
        """`name` is what errors call it; `max_calls` bounds the calls that have not ended. Raises `HandlerError` when
        it does not take two positional arguments.
        """
        self.function = function
        self.name = name or str(getattr(function, "__qualname__", type(function).__name__))
        self.kind = kind_of(function)
        self.calls = FunctionCalls(self.name, max_calls)
        self.threads = CallThreads(f"teneral-handler-{self.name}")
        self._loop_thread: LoopThread | None = None
        self._lock = threading.Lock()
        try:
            inspect.signature(function).bind("event", "context")
        except (TypeError, ValueError) as error:
            raise HandlerError(
                f"{self.name} cannot be called with (event, context): {error}",
                hint="Define it as def handler(event, context).",
            ) from error

    @property
    def loop_thread(self) -> LoopThread:
        """The loop of this handler's coroutines, started when the first one runs."""
        with self._lock:
            if self._loop_thread is None:
                self._loop_thread = LoopThread(f"teneral-handler-{self.name}")
            return self._loop_thread

    def close(self) -> None:
        """Cancel async invocations that still run, and end their loop. Threads end with the calls that they
        are in; the log has those that go on.
        """
        self.threads.close()
        with self._lock:
            loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is not None:
            loop_thread.close()
        if self.calls.statistics().abandoned_calls:
            logger.warning("calls of %s do not end: %s", self.name, self.calls.describe())


def load_handler(spec: str, *, max_calls: int = DEFAULT_MAX_CALLS) -> Handler:
    """The handler that `module:function` or `path/file.py:function` names. Raises `HandlerError`."""
    return Handler(find_function(spec), name=spec, max_calls=max_calls)


async def run(
    handler: Handler, event: Any, context: Context, *, on_stream: Callable[[], object] = lambda: None
) -> AsyncIterator[Any]:
    """Invoke the handler and yield its results as they come: JSON-ready values, str or bytes.

    A plain function gives one; one that yields, or that returns an iterator, any number. At most a few
    results are made ahead of their reader. `on_stream` is called before the first result of one that yields or returns
    an iterator, of which nothing says yet whether more will come. Leaving early (`aclose`, or cancelling the task)
    cancels the context, and with it every generation that was begun. Raises `HandlerError` for whatever the function
    raises (`__cause__` is that), except errors of Teneral itself, which pass through as they are; and
    `CancelledError` when the deadline passes first. A function whose reader has left counts until it has ended:
    `HandlerBusyError` when there are too many of them.
    """
    outlet = Outlet()
    call = handler.calls.begin(context.request_id)
    stop = _begin(handler, event, context, outlet, call)
    is_told = False
    try:
        while True:
            try:
                async with asyncio.timeout(context.remaining_time_s()):
                    value = await anext(outlet)
            except StopAsyncIteration:
                return
            except TimeoutError:
                raise CancelledError(f"{handler.name} did not end before its deadline") from None
            if outlet.is_stream and not is_told:
                is_told = True
                on_stream()
            yield value
    finally:
        outlet.close()
        context.cancel()
        stop()
        handler.calls.abandon(call)


async def up_to(count: int, values: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The first values, so many or fewer; the rest can still be read from `values`."""
    while count > 0:
        try:
            yield await anext(values)
        except StopAsyncIteration:
            return
        count -= 1


def kind_of(function: Callable[..., Any]) -> HandlerKind:
    """What calling it gives; sees through `functools.partial` and objects with `__call__`."""
    while isinstance(function, functools.partial):
        function = function.func
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = type(function).__call__
    if inspect.isasyncgenfunction(function):
        return HandlerKind.ASYNC_GENERATOR
    if inspect.iscoroutinefunction(function):
        return HandlerKind.ASYNC
    return HandlerKind.GENERATOR if inspect.isgeneratorfunction(function) else HandlerKind.SYNC


def _begin(
    handler: Handler, event: Any, context: Context, outlet: Outlet, call: FunctionCall
) -> Callable[[], object]:
    """Start the invocation beside the caller's loop. Returns what asks it to stop: threads have no such
    thing.
    """
    try:
        if handler.kind.is_async:
            return handler.loop_thread.submit(
                _invoke_async(handler, event, context, outlet),
                ended=functools.partial(handler.calls.end, call),
            )
        inside = contextvars.copy_context()
        handler.threads.run(
            functools.partial(inside.run, _invoke_and_end, handler, event, context, outlet, call)
        )
        return lambda: None
    except BaseException:  # no thread can be started
        handler.calls.end(call)
        raise


def _invoke_and_end(
    handler: Handler, event: Any, context: Context, outlet: Outlet, call: FunctionCall
) -> None:
    try:
        _invoke(handler, event, context, outlet)
    finally:
        handler.calls.end(call)


def _invoke(handler: Handler, event: Any, context: Context, outlet: Outlet) -> None:
    """The body of a plain function's thread. Raises nothing; ends the outlet."""
    try:
        result = handler.function(event, context)
        if not isinstance(result, Iterator):
            outlet.finish(_checked(handler, result))
            return
        try:
            for value in result:
                outlet.put(_checked(handler, value))
        finally:
            if hasattr(result, "close"):  # a generator has, and its `finally` runs now
                result.close()
    except OutletClosedError:
        return
    except BaseException as error:  # noqa: BLE001 - not even a SystemExit may end the process
        outlet.end(_as_error(handler, error, context))
    else:
        outlet.end()


async def _invoke_async(handler: Handler, event: Any, context: Context, outlet: Outlet) -> None:
    """The same for coroutines, on the handler's loop."""
    try:
        result = handler.function(event, context)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, AsyncIterator):
            outlet.finish(_checked(handler, result))
            return
        try:
            async for value in result:
                await outlet.put_async(_checked(handler, value))
        finally:
            if hasattr(result, "aclose"):
                await result.aclose()
    except OutletClosedError:
        return
    except asyncio.CancelledError:
        outlet.end(CancelledError(f"{handler.name} was cancelled"))
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        outlet.end(_as_error(handler, error, context))
    else:
        outlet.end()


def _checked(handler: Handler, value: Any) -> Any:
    """The value itself when it can be sent. To encode it is the check, made in the user's thread, not on the
    server's loop.
    """
    if isinstance(value, bytes):
        return value
    if inspect.iscoroutine(value):
        value.close()  # or Python warns of a coroutine that was never awaited, on top of our error

    def refuse(part: object) -> None:
        raise ResultError(
            f"{handler.name} gave {_type_name(part)}, which is not JSON",
            hint="Give dicts, lists, strings, numbers, booleans and None (numpy: .tolist()), or bytes alone.",
        )

    try:
        # As UTF-8, which half of a surrogate pair, as in a text that was cut, has no form in.
        text = (
            value
            if isinstance(value, str)
            else json.dumps(value, default=refuse, allow_nan=False, ensure_ascii=False)
        )
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ResultError(f"{handler.name} gave a value that is not JSON: {error}") from error
    return value


def _said(error: BaseException) -> str:
    """The exception's own text. To make it is users' code as well, and what that raises must not end the thread, or
    nobody would ever be told.
    """
    try:
        return str(error)
    except BaseException as another:  # noqa: BLE001 - as above
        return f"(its text raises {type(another).__name__})"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _as_error(handler: Handler, error: BaseException, context: Context) -> TeneralError:
    """As it is told to the caller. The developer's own errors go to the log, with their tracebacks."""
    if isinstance(error, HandlerError) or not isinstance(error, TeneralError):
        logger.error("request %s: %s failed", context.request_id, handler.name, exc_info=error)
    if isinstance(error, TeneralError):
        return error
    told = f"{handler.name} raised {type(error).__name__}: {_said(error)}"
    failure = HandlerError(told if len(told) <= MAX_MESSAGE_CHARS else f"{told[:MAX_MESSAGE_CHARS]}…")
    failure.__cause__ = error
    return failure
