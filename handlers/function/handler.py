"""The user's function: its import by name, and calls by its kind.

A function may be plain, a coroutine, or a generator of either kind. All of them run outside the
caller's event loop, so that a blocking one blocks only itself, and every kind returns its values
through the same channel.
"""

from __future__ import annotations

import asyncio
import contextvars
import enum
import functools
import importlib
import importlib.util
import inspect
import json
import logging
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from ...loader.errors import TeneralError
from ...runtime.errors import CancelledError, HandlerError, ResultError
from .calls import DEFAULT_MAX_CALLS, CallThreads, FunctionCalls, FunctionInvocation, LoopThread
from .channel import ChannelClosedError, ThreadToLoopChannel
from .context import LOGGER_NAME, Context

MAX_MESSAGE_CHARS = 1_000
MAX_AHEAD = 8  # results of a stream that its reader has not taken

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
        """True if it is defined as a generator. A plain function may still return an iterator,
        which is only known then.
        """
        return self in (HandlerKind.GENERATOR, HandlerKind.ASYNC_GENERATOR)


class Handler:
    """A function that takes (event, context). Serves concurrent invocations; close it at the end."""

    def __init__(
        self, function: Callable[..., Any], *, name: str | None = None, max_calls: int = DEFAULT_MAX_CALLS
    ) -> None:
        """`name` is the function's name in errors; `max_calls` bounds the running calls. Raises
        `HandlerError` if it does not take two positional arguments.
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
        """The loop of this handler's coroutines, started with the first one."""
        with self._lock:
            if self._loop_thread is None:
                self._loop_thread = LoopThread(f"teneral-handler-{self.name}")
            return self._loop_thread

    def close(self) -> None:
        """Cancel running async invocations, and end their loop. Threads end with their calls; the
        log names those still running.
        """
        self.threads.close()
        with self._lock:
            loop_thread, self._loop_thread = self._loop_thread, None
        if loop_thread is not None:
            loop_thread.close()
        if self.calls.statistics().abandoned_calls:
            logger.warning("calls of %s do not end: %s", self.name, self.calls.describe())


def load_handler(spec: str, *, max_calls: int = DEFAULT_MAX_CALLS) -> Handler:
    """Load the handler named by `module:function` or `path/file.py:function`. Raises
    `HandlerError`.
    """
    return Handler(find_function(spec), name=spec, max_calls=max_calls)


async def run(
    handler: Handler, event: Any, context: Context, *, on_stream: Callable[[], object] = lambda: None
) -> AsyncIterator[Any]:
    """Invoke the handler and yield its results as they are made: JSON-ready values, str or bytes.

    A plain function gives one; a generator, or a function that returns an iterator, any number. At
    most a few results are made ahead of their reader. `on_stream` is called before the first
    result, or the end, of a generator or an iterator. Leaving early (`aclose`, or cancelling the
    task) cancels the context, and with it all its generations. Raises `HandlerError` for the
    function's exceptions (as `__cause__`), except errors of Teneral itself, which pass through; and
    `CancelledError` if the deadline passes first. A function whose reader has left counts until it
    has ended: `HandlerBusyError` if there are too many.
    """
    results: ThreadToLoopChannel[Any] = ThreadToLoopChannel(max_items=MAX_AHEAD)
    call = handler.calls.begin(context.request_id)
    stop = _begin(handler, event, context, results, call)
    is_announced = False
    try:
        while True:
            try:
                async with asyncio.timeout(context.remaining_time_s()):
                    value = await anext(results, results)
            except TimeoutError:
                raise CancelledError(f"{handler.name} did not end before its deadline") from None
            if results.is_stream and not is_announced:
                is_announced = True
                on_stream()
            if value is results:
                return
            yield value
    finally:
        results.close()
        context.cancel()
        stop()
        handler.calls.abandon(call)


async def up_to(count: int, values: AsyncIterator[Any]) -> AsyncIterator[Any]:
    """The first `count` values, or fewer; the rest can still be read from `values`."""
    while count > 0:
        try:
            yield await anext(values)
        except StopAsyncIteration:
            return
        count -= 1


def kind_of(function: Callable[..., Any]) -> HandlerKind:
    """The kind of a call's result; handles `functools.partial` and objects with `__call__`."""
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
    handler: Handler,
    event: Any,
    context: Context,
    results: ThreadToLoopChannel[Any],
    call: FunctionInvocation,
) -> Callable[[], object]:
    """Start the invocation outside the caller's loop. Returns a function that requests its end;
    threads ignore it.
    """
    try:
        if handler.kind.is_async:
            return handler.loop_thread.submit(
                _invoke_async(handler, event, context, results, call),
                ended=functools.partial(handler.calls.end, call),
            )
        inside = contextvars.copy_context()
        handler.threads.run(
            functools.partial(inside.run, _invoke_and_end, handler, event, context, results, call)
        )
        return lambda: None
    except BaseException:  # no thread can be started
        handler.calls.end(call)
        raise


def _invoke_and_end(
    handler: Handler,
    event: Any,
    context: Context,
    results: ThreadToLoopChannel[Any],
    call: FunctionInvocation,
) -> None:
    try:
        _invoke(handler, event, context, results, call)
    finally:
        handler.calls.end(call)


def _invoke(
    handler: Handler,
    event: Any,
    context: Context,
    results: ThreadToLoopChannel[Any],
    call: FunctionInvocation,
) -> None:
    """The body of a plain function's thread. Raises nothing; ends the results.

    The call has ended before its reader learns that: else the reader's next call could be refused.
    """
    try:
        result = handler.function(event, context)
        if not isinstance(result, Iterator):
            value = _checked(handler, result)
            handler.calls.end(call)
            results.finish(value)
            return
        try:
            for value in result:
                results.put(_checked(handler, value))
        finally:
            # A generator has one; its `finally` runs now.
            if hasattr(result, "close"):
                result.close()
    except ChannelClosedError:
        return
    except BaseException as error:  # noqa: BLE001 - not even a SystemExit may end the process
        failure = _as_error(handler, error, context)
        handler.calls.end(call)
        results.end(failure)
    else:
        handler.calls.end(call)
        results.end()


async def _invoke_async(
    handler: Handler,
    event: Any,
    context: Context,
    results: ThreadToLoopChannel[Any],
    call: FunctionInvocation,
) -> None:
    """The body of a coroutine's task, on the handler's loop."""
    try:
        result = handler.function(event, context)
        if inspect.isawaitable(result):
            result = await result
        if not isinstance(result, AsyncIterator):
            value = _checked(handler, result)
            handler.calls.end(call)
            results.finish(value)
            return
        try:
            async for value in result:
                await results.put_async(_checked(handler, value))
        finally:
            if hasattr(result, "aclose"):
                await result.aclose()
    except ChannelClosedError:
        return
    except asyncio.CancelledError:
        results.end(CancelledError(f"{handler.name} was cancelled"))
        raise
    except BaseException as error:  # noqa: BLE001 - as above
        failure = _as_error(handler, error, context)
        handler.calls.end(call)
        results.end(failure)
    else:
        handler.calls.end(call)
        results.end()


def _checked(handler: Handler, value: Any) -> Any:
    """The value itself if it can be sent. The check is encoding it, in the user's thread, not on
    the server's loop.
    """
    if isinstance(value, bytes):
        return value
    if inspect.iscoroutine(value):
        # Otherwise Python warns of a coroutine that was never awaited, in addition to our error.
        value.close()

    def refuse(part: object) -> None:
        raise ResultError(
            f"{handler.name} returned {_type_name(part)}, which is not JSON",
            hint="Return dicts, lists, strings, numbers, booleans and None (numpy: .tolist()), or bytes alone.",
        )

    try:
        # UTF-8 cannot encode a lone surrogate, as in a truncated text.
        text = (
            value
            if isinstance(value, str)
            else json.dumps(value, default=refuse, allow_nan=False, ensure_ascii=False)
        )
        text.encode()
    except (ValueError, TypeError, RecursionError) as error:
        raise ResultError(f"{handler.name} returned a value that is not JSON: {error}") from error
    return value


def _text_of(error: BaseException) -> str:
    """The exception's own text. It is made by users' code too, whose errors must not end the thread
    without a reply.
    """
    try:
        return str(error)
    except BaseException as another:  # noqa: BLE001 - as above
        return f"(its text raises {type(another).__name__})"


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _as_error(handler: Handler, error: BaseException, context: Context) -> TeneralError:
    """The error for the caller. The developer's own errors are logged, with their tracebacks."""
    if isinstance(error, HandlerError) or not isinstance(error, TeneralError):
        context.logger.error("request %s: %s failed", context.request_id, handler.name, exc_info=error)
    if isinstance(error, TeneralError):
        return error
    message = f"{handler.name} raised {type(error).__name__}: {_text_of(error)}"
    failure = HandlerError(
        message if len(message) <= MAX_MESSAGE_CHARS else f"{message[:MAX_MESSAGE_CHARS]}…"
    )
    failure.__cause__ = error
    return failure


_HINT = "Name it as package.module:function or path/file.py:function."


def find_function(spec: str) -> Callable[..., Any]:
    """Find the object that `spec` names. Raises `HandlerError`.

    The file's folder (or the working directory, for a module) is put on `sys.path`, so that
    neighbouring modules can be imported: last, not first as Python does for a script, because a
    file called `http.py` there must not replace the standard library's for a server that is still
    importing.
    """
    place, separator, attribute = spec.rpartition(":")
    if not (separator and place and attribute):
        raise HandlerError(f"{spec!r} does not name a function", hint=_HINT)
    module = _import_file(Path(place)) if place.endswith(".py") or "/" in place else _import_module(place)
    found: Any = module
    for name in attribute.split("."):
        try:
            found = getattr(found, name)
        except AttributeError:
            raise HandlerError(f"{place} has no {attribute!r}", hint=_functions_in(module)) from None
    if not callable(found):
        raise HandlerError(f"{spec} is {_a(found)}, not a function", hint=_functions_in(module))
    return found  # type: ignore[no-any-return]


def _import_file(path: Path) -> ModuleType:
    path = path.absolute()
    if not path.is_file():
        raise HandlerError(f"there is no file {path}", hint=_HINT)
    # A name of its own: a file called json.py must not become the module `json` for all other
    # importers.
    name = f"teneral_handler_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise HandlerError(f"{path} is not a Python file", hint="Its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    _put_on_path(path.parent)
    # Dataclasses and pickle look a class's module up there.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _import_failed(str(path), error) from error
    return module


def _import_module(name: str) -> ModuleType:
    _put_on_path(Path.cwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise HandlerError(f"there is no module {error.name!r}", hint=_HINT) from error
        raise _import_failed(name, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failed(name, error) from error


def _import_failed(place: str, error: BaseException) -> HandlerError:
    return HandlerError(f"{place} could not be imported: {type(error).__name__}: {error}")


def _put_on_path(folder: Path) -> None:
    if str(folder) not in sys.path:
        sys.path.append(str(folder))


def _functions_in(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if callable(value)
        and not name.startswith("_")
        and getattr(value, "__module__", "") == module.__name__
    ]
    return f"It has {', '.join(names[:8])}." if names else "It defines no functions."


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[0] in 'aeiou' else 'a'} {name}"
