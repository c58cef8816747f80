"""Anthropic's own client, which we did not write, against a real server.

It has an environment of its own, which scripts/conformance-anthropic makes; TENERAL_ANTHROPIC_CLIENT names its Python.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_families import family_parts

CLIENT = os.environ.get("TENERAL_ANTHROPIC_CLIENT", "")
CALLS = Path(__file__).parents[2] / "support" / "anthropic_calls.py"

pytestmark = [
    pytest.mark.skipif(not CLIENT, reason="needs anthropic: run scripts/conformance-anthropic"),
    pytest.mark.slow,
]


async def test_anthropics_client_understands_every_answer(
    start: Any, tmp_path: Path, one_thread: None
) -> None:
    parts = family_parts("hermes", tmp_path)
    async with start(parts=parts, api_key="secret") as server:
        process = await asyncio.create_subprocess_exec(
            *(CLIENT, str(CALLS), server.url, "tiny/model", "secret"),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await process.communicate()
        print(output.decode())
        assert process.returncode == 0, output.decode()
    parts.tokenizer.close()
