from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from teneral.handlers.function.context import Context
from teneral.handlers.function.handler import Handler, run


@pytest.fixture
def invoke(make_context: Callable[..., Context]) -> Callable[..., Any]:
    """Runs a handler as every platform does, and gives the values that it gave."""

    async def invoke(function: Callable[..., Any], event: Any = None, **options: Any) -> list[Any]:
        handler = Handler(function)
        try:
            return [value async for value in run(handler, event, make_context(**options))]
        finally:
            handler.close()

    return invoke
