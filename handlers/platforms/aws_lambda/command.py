"""`teneral serve` on AWS Lambda: instead of a port, the Runtime API, from which it takes
invocations.

The weights are requested first, as everywhere. The first invocation is requested as soon as the
handler is imported, while the weights are loading: Lambda interrupts an init phase longer than 10
s, but an invocation may take 15 minutes. Instances that Lambda starts ahead of time, without that
limit, request one once everything is loaded.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ....loader.errors import TeneralError, UsageError
from ....loader.timeline import Timeline
from ....runtime.config import ServeConfig
from ....runtime.instance.helpers import LaunchedHelpers, launch_helpers
from .. import platform_of

if TYPE_CHECKING:
    from ....runtime.instance.instance import Instance
    from ...function.handler import Handler
    from .. import MakeApp

NAME = "lambda"  # of the platform
ADDRESS_VARIABLE = "AWS_LAMBDA_RUNTIME_API"
KIND_VARIABLE = "AWS_LAMBDA_INITIALIZATION_TYPE"
CONCURRENCY_VARIABLE = "AWS_LAMBDA_MAX_CONCURRENCY"
MAX_CONCURRENCY = 1_000
SNAP_START = "snap-start"
DEFAULT_HANDLER = "teneral.handlers.plain:handler"
# Time in which a missing model is reported as such: an instance that cannot start.
OPENED_WITHIN_S = 3.0
# An instance started ahead of time has 130 s.
AHEAD_WITHIN_S = 100.0
EXIT_INIT_FAILED = 1

_DOTTED = re.compile(r"([\w./-]+)\.([A-Za-z_]\w*)")


def run_lambda(config: ServeConfig, make_app: MakeApp) -> int:
    """Answer invocations until Lambda ends the instance. Blocks.

    Returns the exit status; raises the error that ended the instance after its start. Changes the
    process: logging, and X-Ray's trace variable.
    """
    timeline = Timeline()
    timeline.add("process", "start interpreter", 0.0, timeline.now_s())
    address = os.environ.get(ADDRESS_VARIABLE, "")
    try:
        launched = launch_helpers(config, timeline, fork=True)
    except TeneralError as error:
        return _could_not_start(address, error)
    return _run(address, config, timeline, launched, make_app)


def _run(
    address: str, config: ServeConfig, timeline: Timeline, launched: LaunchedHelpers | None, make_app: MakeApp
) -> int:
    with timeline.span("process", "import runtime"):
        from ....runtime.instance.instance import Instance
        from .logs import set_up_logging
    set_up_logging(config.log_level, os.environ)
    with Instance(config, timeline=timeline, launched=launched) as instance:
        instance.kind.add_done_callback(lambda _: _collect_garbage())
        with timeline.span("process", "import handler"):
            from ...function.handler import load_handler
        handler = None
        try:
            num_workers = concurrency(os.environ)
            handler = load_handler(handler_spec(config, os.environ) or DEFAULT_HANDLER)
            _wait(instance, os.environ)
        except TeneralError as error:
            if handler is not None:
                handler.close()
            return _could_not_start(address, error)
        try:
            return _serve(address, instance, handler, num_workers, make_app)
        finally:
            handler.close()


def _serve(address: str, instance: Instance, handler: Handler, num_workers: int, make_app: MakeApp) -> int:
    # Here, not above: the first reads start before it is needed.
    import asyncio
    import logging

    if os.environ.get(KIND_VARIABLE) == SNAP_START:
        from .loop import checkpoint

        status = checkpoint(address, instance, say=logging.getLogger("teneral.lambda").error)
        if status != 0:
            return status
    instance.timeline.mark("process", "requests an invocation")
    asyncio.run(_answer_invocations(address, instance, handler, num_workers, make_app))
    return 0


async def _answer_invocations(
    address: str, instance: Instance, handler: Handler, num_workers: int, make_app: MakeApp
) -> None:
    import asyncio
    import time

    from .answers import LoopAnswers
    from .loop import InvocationLoop

    config = instance.config
    own_handler = handler if handler.name != DEFAULT_HANDLER else None

    platform = platform_of(NAME, {})
    answers = LoopAnswers(
        instance,
        handler,
        lambda: make_app(instance, own_handler, platform),
        environment=os.environ,
        is_streaming=config.lambda_streaming,
    )
    drain_s = config.drain_timeout_s
    drain_s = platform.drain_timeout_s if drain_s is None else drain_s
    loop = InvocationLoop(address, instance, answers.answer, num_workers=num_workers, drain_timeout_s=drain_s)
    instance.ended.add_done_callback(lambda _: loop.request_stop())
    try:
        await loop.run()
    finally:
        await answers.close()
        if loop.ends_by_s is not None:
            await asyncio.to_thread(instance.save_snapshot, loop.ends_by_s - time.monotonic())


def handler_spec(config: ServeConfig, environment: Mapping[str, str]) -> str | None:
    """The function to serve: that of --handler, or the image's CMD (`_HANDLER`), in our form or in
    Lambda's `module.function`; None if neither names one.
    """
    given = config.handler or environment.get("_HANDLER", "")
    if config.handler is None and (given in sys.argv or given == config.model):
        # CMD holds arguments of this program, the first of which Lambda shows.
        return None
    if ":" in given:
        return None if "://" in given else given
    if given.endswith(".py"):
        return given if config.handler else None
    found = _DOTTED.fullmatch(given)
    if found is None:
        return given if config.handler else None  # its error names the right form
    return f"{found[1].strip('/').replace('/', '.')}:{found[2]}"


def concurrency(environment: Mapping[str, str]) -> int:
    """The number of concurrent invocations. Raises `UsageError`."""
    given = environment.get(CONCURRENCY_VARIABLE, "1")
    if not given.isdecimal() or not 1 <= int(given) <= MAX_CONCURRENCY:
        raise UsageError(
            f"{CONCURRENCY_VARIABLE} is {given!r}, not a number from 1 to {MAX_CONCURRENCY}",
            key=CONCURRENCY_VARIABLE,
        )
    return int(given)


def _wait(instance: Instance, environment: Mapping[str, str]) -> None:
    """Wait until the first invocation may be requested. Raises the instance's failure."""
    kind = environment.get(KIND_VARIABLE, "on-demand")
    if kind == "on-demand" and CONCURRENCY_VARIABLE not in environment:
        instance.wait_opened(OPENED_WITHIN_S)
    else:
        instance.wait_exact(None if kind == SNAP_START else AHEAD_WITHIN_S)
    if instance.failure is not None:
        raise instance.failure


def _could_not_start(address: str, error: TeneralError) -> int:
    """Report the error to Lambda and the log. Returns the exit status."""
    import asyncio

    from .errors import init_report
    from .runtime_api import RuntimeApi, RuntimeApiError

    print(f"teneral: {error}", file=sys.stderr, flush=True)
    failure = init_report(error)

    async def tell() -> None:
        async with RuntimeApi(address) as api:
            await api.init_error(failure.body(), failure.error_type)

    try:
        asyncio.run(tell())
    except RuntimeApiError as lost:
        print(f"teneral: {lost}", file=sys.stderr, flush=True)
    return EXIT_INIT_FAILED


def _collect_garbage() -> None:
    """Enable garbage collection, as in `handlers/serve.py`."""
    gc.freeze()
    gc.enable()
