"""SnapStart: this process's memory is saved once everything is loaded, and instances continue from
copies of it.

State that must be unique is renewed after the restore: seeds of random numbers, connections,
credentials. Ids and the engine's seeds come from the kernel on demand, and need no renewal. This
module knows no invocations.
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

# AWS's runtime for Python uses the same status.
EXIT_BEFORE = 64
EXIT_AFTER = 65


def checkpoint(
    address: str, instance: Served, *, hooks: Hooks = HOOKS, say: Callable[..., Any] = lambda *_, **__: None
) -> int:
    """Have the process saved, and return in a copy of it. Blocks.

    Returns 0, or the exit status if a hook failed. `say` is a logger's `error`.
    """
    try:
        hooks.run_before()
        instance.quiesce()
        asyncio.run(_call(address, lambda api: api.restore_next()))
    except Exception as error:  # noqa: BLE001 - the user's hooks
        say("before the checkpoint: %s", error, exc_info=error)
        failure = report(error)
        asyncio.run(_call(address, lambda api: api.init_error(failure.body(), BEFORE_CHECKPOINT)))
        return EXIT_BEFORE
    try:
        seed_anew()
        instance.quiesce()
        hooks.run_after()
    except Exception as error:  # noqa: BLE001 - as above
        say("after the restore: %s", error, exc_info=error)
        failure = report(error)
        asyncio.run(_call(address, lambda api: api.restore_error(failure.body(), AFTER_RESTORE)))
        return EXIT_AFTER
    return 0


def seed_anew() -> None:
    """Reseed the random numbers of all loaded libraries that keep a state, differently in every
    copy.
    """
    random.seed(os.urandom(32))
    if "numpy" in sys.modules:
        import numpy as np

        # The legacy generator, which users' code may use.
        np.random.seed(list(os.urandom(32)))
    if "torch" in sys.modules:
        import torch

        torch.seed()
    if "ssl" in sys.modules:
        import ssl

        ssl.RAND_add(os.urandom(32), 32.0)


async def _call(address: str, ask: Callable[[RuntimeApi], Any]) -> None:
    async with RuntimeApi(address) as api:
        await ask(api)
