"""OpenAI's agents SDK, which we did not write, against a real server whose model's answers are written.

It has an environment of its own, which scripts/conformance-clients makes; TENERAL_CLIENTS names its Python.
"""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
from tests.support.chat_families import family_parts, scripted

CLIENT = os.environ.get("TENERAL_CLIENTS", "")
CALLS = Path(__file__).parents[2] / "support" / "openai_agents_calls.py"
ANSWERS = {
    "call": '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>',
    "text": "Hi.",
}

pytestmark = [
    pytest.mark.skipif(not CLIENT, reason="needs openai-agents: run scripts/conformance-agents"),
    pytest.mark.slow,
]


@pytest.mark.parametrize("mode", ANSWERS)
async def test_openais_agents_call_stream_and_continue(
    start: Any, tmp_path: Path, one_thread: None, mode: str
) -> None:
    parts = family_parts("hermes", tmp_path)
    async with start(parts=parts) as server:
        with scripted(server, ANSWERS[mode]):
            process = await asyncio.create_subprocess_exec(
                *(CLIENT, str(CALLS), server.url, "tiny/model", mode),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            output, _ = await process.communicate()
        print(output.decode())
        assert process.returncode == 0, output.decode()
    parts.tokenizer.close()
