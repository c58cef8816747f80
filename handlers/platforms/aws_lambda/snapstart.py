"""SnapStart: this process's memory is kept once everything is there, and instances go on from copies of it.

What must be a copy's own is made anew after the restore: seeds of random numbers, connections, credentials. Ids and the
engine's seeds come from the kernel, whenever they are needed, and need nothing. It knows no invocations.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from collections.abc import Callable
from typing import Any

from ...lifecycle import HOOKS, Hooks
from .errors import AFTER_RESTORE, BEFORE_CHECKPOINT, report
from .loop import Served
from .runtime_api import RuntimeApi

EXIT_BEFORE = 64  # as AWS's runtime for Python ends
EXIT_AFTER = 65


def checkpoint(
    address: str, instance: Served, *, hooks: Hooks = HOOKS, say: Callable[..., Any] = lambda *_, **__: None
) -> int:
    """Hand the process over to be kept, and return in a copy of it: 0, or the status to end with when a hook failed.
    Blocks. `say` is a logger's `error`.
    """
    try:
        hooks.run_before()
        instance.quiesce()
        asyncio.run(_call(address, lambda api: api.restore_next()))
    except Exception as error:  # noqa: BLE001 - the user's hooks
        say("before the checkpoint: %s", error, exc_info=error)
        told = report(error)
        asyncio.run(_call(address, lambda api: api.init_error(told.body(), BEFORE_CHECKPOINT)))
        return EXIT_BEFORE
    try:
        seed_anew()
        instance.quiesce()
        hooks.run_after()
    except Exception as error:  # noqa: BLE001 - as above
        say("after the restore: %s", error, exc_info=error)
        told = report(error)
        asyncio.run(_call(address, lambda api: api.restore_error(told.body(), AFTER_RESTORE)))
        return EXIT_AFTER
    return 0


def seed_anew() -> None:
    """Other random numbers than every other copy has, in whatever libraries are here that keep a state for them."""
    random.seed(os.urandom(32))
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed(list(os.urandom(32)))  # the old generator, which users' code may draw from
    if "torch" in sys.modules:
        import torch

        torch.seed()
    if "ssl" in sys.modules:
        import ssl

        ssl.RAND_add(os.urandom(32), 32.0)


async def _call(address: str, ask: Callable[[RuntimeApi], Any]) -> None:
    async with RuntimeApi(address) as api:
        await ask(api)
