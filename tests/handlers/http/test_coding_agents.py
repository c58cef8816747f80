"""The Codex CLI and Claude Code, which we did not write, against real servers whose model's answers are written.

scripts/conformance-coding-agents installs them; TENERAL_CODING_AGENTS names the folder.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace
from tests.support.chat_families import family_parts

from teneral.runtime.grammar.spec import GrammarSpec

FOLDER = os.environ.get("TENERAL_CODING_AGENTS", "")
MODEL = "tiny/model"
CONTEXT = 1 << 18  # the first prompts of these programs have some 10,000 words, of a token a byte here
COMMAND = "echo made >> made.txt; echo RESULT"
DONE = "All is done."
TIMEOUT_S = 120

pytestmark = [
    pytest.mark.skipif(not FOLDER, reason="needs the programs: run scripts/conformance-coding-agents"),
    pytest.mark.slow,
]


class Agent(NamedTuple):
    program: str  # in the folder's node_modules; `{platform}` is npm's name of this one
    begin: tuple[str, ...]
    resume: tuple[str, ...]
    call: str  # of its shell


_PROVIDER = '{{name="teneral",base_url="{url}/v1",env_key="TENERAL_KEY",wire_api="responses"}}'
_CODEX = (
    *("--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL),
    *("-c", f"model_providers.teneral={_PROVIDER}", "-c", 'model_provider="teneral"'),
)
_CLAUDE = ("--model", MODEL, "--allowedTools", "Bash", "-p")
AGENTS = {
    "codex": Agent(
        ".bin/codex",
        ("exec", *_CODEX),
        ("exec", "resume", "--last", *_CODEX),
        f'[exec_command(cmd="{COMMAND}")]',
    ),
    "claude": Agent(
        "@anthropic-ai/claude-code-{platform}/claude",
        _CLAUDE,
        ("--continue", *_CLAUDE),
        f'[Bash(command="{COMMAND}", description="Make a file")]',
    ),
}


@contextmanager
def answering(server: Any, call: str) -> Iterator[list[str]]:
    """While it lasts, the model calls the shell once in each turn, and then says that it is done. Gives the prompts."""
    engine = server.instance.engine.result()
    tokenizer = server.instance.tokenizer.result()
    submit, prompts = engine.submit, []

    def submit_written(request: Any, *arguments: Any, **more: Any) -> Any:
        prompt = tokenizer.decode(list(request.prompt_tokens))
        prompts.append(prompt)
        has_tools = "func_name1" in prompt  # of the template
        text = call if has_tools and "RESULT" not in prompt.rpartition("TURN")[2] else DONE
        grammar = tokenizer.compile_grammar(GrammarSpec.choice([text]))
        # The end of the prompt is enough for an answer that is written.
        tokens = request.prompt_tokens[-64:]
        return submit(replace(request, grammar=grammar, prompt_tokens=tokens), *arguments, **more)

    engine.submit = submit_written
    try:
        yield prompts
    finally:
        del engine.submit


async def run(agent: Agent, arguments: tuple[str, ...], server: Any, folder: Path) -> str:
    """Run the program in `folder/work`, and return its output."""
    platform = f"{os.uname().sysname.lower()}-{'arm64' if os.uname().machine == 'aarch64' else 'x64'}"
    for name in ("home", "codex", "work"):
        (folder / name).mkdir(exist_ok=True)
    process = await asyncio.create_subprocess_exec(
        str(Path(FOLDER, "node_modules", agent.program.format(platform=platform))),
        *(each.replace("{url}", server.url).replace("{{", "{").replace("}}", "}") for each in arguments),
        cwd=folder / "work",
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder / "home"),
            "CODEX_HOME": str(folder / "codex"),
            "TENERAL_KEY": "unused",
            "ANTHROPIC_BASE_URL": server.url,
            "ANTHROPIC_API_KEY": "unused",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()
    return output.decode()


@pytest.mark.parametrize("name", AGENTS)
async def test_a_session_of_a_coding_agent_with_a_restart(
    start: Any, tmp_path: Path, one_thread: None, name: str
) -> None:
    agent, folder = AGENTS[name], tmp_path / "agent"
    folder.mkdir()
    parts = family_parts("pythonic", tmp_path / "model", context=CONTEXT)
    for turn in range(3):
        # A server of its own for each turn
        async with start(parts=parts) as server:
            with answering(server, agent.call) as prompts:
                arguments = agent.begin if turn == 0 else agent.resume
                output = await run(agent, (*arguments, f"TURN {turn}: make a file"), server, folder)
            metrics = (await server.get("/metrics")).body.decode()
        assert DONE in output
        assert (folder / "work" / "made.txt").read_text() == (turn + 1) * "made\n"
        assert all(f"TURN {each}:" in prompts[-1] for each in range(turn + 1))
        counted = re.findall(r'teneral_requests_total{route="(.*)",status="(\d+)"} (.*)', metrics)
        print(f"{name}, turn {turn}: {len(prompts)} prompts; {counted}")
        assert {status for route, status, _ in counted if route.startswith("/v1/")} == {"200"}
    parts.tokenizer.close()
