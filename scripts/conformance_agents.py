"""Twelve agents against real servers: `scripts/conformance-agents` has the programs and libraries.

    python conformance_agents.py FOLDER [AGENT …]    FOLDER: as the script made it

Each agent does five things: a chat, a stream, a structured answer, a tool's round trip, and a session of 20 turns
with a server restarted in between. The answers of the model are written in the last `%%%…%%%` of the prompt: a text
for each turn of the model since then, with `||` between them; `CALL NAME JSON` is a call, and `#turns` the number
of turns that the prompt has. Where a grammar guides the answer, it must allow the text. Prints a table; exits with
1 where a check failed.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from msgspec.structs import replace
from tests.support.chat_families import family_parts
from tests.support.http_server import running_server
from tests.support.instances import MODEL_NAME, StagedInstance, TinyParts

from teneral.handlers.app import Limits
from teneral.runtime.engine.engine import Engine, EngineOptions
from teneral.runtime.errors import GrammarError
from teneral.runtime.grammar.spec import GrammarSpec
from teneral.runtime.step.backend import host_backend

CHECKS = ("chat", "stream", "structured", "tool", "session")
TURNS = 20
CONTEXT = 1 << 18  # the first prompts of coding agents have some 10,000 words, of a token a byte here
KV_BYTES = 256 << 20  # for that many
TIMEOUT_S = 300
OPEN = "%%%"
MARKERS = ("<tool_call>", "</tool_call>")
_SCRIPT = re.compile(f"{OPEN}(.*?){OPEN}", re.DOTALL)
_TURN = re.compile(r"\bturn (\d+):")
_STYLES = ({}, {"separators": (",", ":")})  # of JSON


class RoomyInstance(StagedInstance):
    """A `StagedInstance` with room for the whole context."""

    def _make_engine(self) -> Engine:
        return Engine(
            self.model,
            self.parts.tokenizer,
            options=EngineOptions(kv_bytes=KV_BYTES, look_ahead=0),
            timeline=self.timeline,
            eos_token_ids=self.parts.tokenizer.eos_token_ids,
            make_backend=host_backend,
        )


class Scripted:
    """A server whose model answers as prompts say; it can be restarted at its address."""

    def __init__(self, parts: TinyParts, folder: Path) -> None:
        self._parts, self._store = parts, folder / "responses"
        self._store.mkdir(parents=True, exist_ok=True)
        self._running: Any = None
        self._port = 0
        self.refused: list[str] = []

    async def start(self) -> None:
        import socket

        instance = RoomyInstance(self._parts, responses_store=str(self._store)).let_in()
        listener = socket.create_server(("127.0.0.1", self._port))
        self._port = listener.getsockname()[1]
        limits = Limits.from_config(instance.config)
        self._running = running_server(instance, limits=limits, listener=listener)
        server = await self._running.__aenter__()
        engine, tokenizer = instance.engine.result(), instance.tokenizer.result()
        submit = engine.submit

        def submit_written(request: Any, *arguments: Any, **more: Any) -> Any:
            prompt = tokenizer.decode(list(request.prompt_tokens), skip_special_tokens=False)
            grammar = tokenizer.compile_grammar(_written(self._text(prompt, request, tokenizer)))
            # The end of the prompt is enough for an answer that is written.
            return submit(
                replace(request, grammar=grammar, prompt_tokens=request.prompt_tokens[-64:]),
                *arguments,
                **more,
            )

        engine.submit = submit_written
        self._server = server

    @property
    def url(self) -> str:
        return str(self._server.url)

    async def stop(self) -> None:
        # Not 499: the client went away, as Codex may at its end.
        counted = re.findall(
            r'requests_total{route="(/v1/.*?)",status="(?!499)([45]\d\d)"}', self._server.metrics_text()
        )
        self.refused += [f"{status} at {route}" for route, status in counted]
        await self._running.__aexit__(None, None, None)

    async def restart(self) -> None:
        await self.stop()
        await self.start()

    @staticmethod
    def _text(prompt: str, request: Any, tokenizer: Any) -> str:
        """The answer that the prompt has for this turn of the model."""
        found = list(_SCRIPT.finditer(prompt))
        if not found:
            return "Done."  # a title, a summary
        steps = found[-1][1].split("||")
        number = prompt.count("<|assistant|>", found[-1].end()) - 1
        step = steps[min(max(number, 0), len(steps) - 1)].strip("\n")
        step = step.replace("#turns", str(len(set(_TURN.findall(prompt)))))
        candidates = [step]
        if step.startswith("CALL "):
            _, name, arguments = step.split(" ", 2)
            written = [json.dumps(json.loads(arguments), **style) for style in _STYLES]
            head = f'<tool_call>\n{{"name": "{name}", "arguments": '
            candidates = [f"{head}{each}}}\n</tool_call>" for each in written]
        elif step.startswith("{"):
            candidates = [json.dumps(json.loads(step), **style) for style in _STYLES]
        for text in candidates:
            if _allows(request.grammar, tokenizer.encode(text, add_special_tokens=False)):
                return text
        raise AssertionError(f"the grammar allows none of {candidates}")


def _written(text: str) -> GrammarSpec:
    """The grammar of this text alone, with the tokens of calls."""
    parts = [part for part in re.split(f"({'|'.join(MARKERS)})", text) if part]
    names = [f"marker_{MARKERS.index(part)}" if part in MARKERS else json.dumps(part) for part in parts]
    return GrammarSpec.composed(f"start: {' '.join(names)}", markers=MARKERS)


def _allows(grammar: Any, tokens: list[int]) -> bool:
    if grammar is None:
        return True
    matcher = grammar.start()
    try:
        for token in tokens:
            matcher.accept(token)
    except GrammarError:
        return False
    return True


class Place(NamedTuple):
    """The folders, server and environment of one agent."""

    programs: Path  # as the script made it
    folder: Path
    server: Scripted

    @property
    def env(self) -> dict[str, str]:
        home = self.folder / "home"
        home.mkdir(exist_ok=True)
        return {
            "PATH": os.environ["PATH"],
            "HOME": str(home),
            "CODEX_HOME": str(home),
            "OPENAI_API_KEY": "unused",
            "OPENAI_AGENTS_DISABLE_TRACING": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would look for a newer one
            "ANTHROPIC_BASE_URL": self.server.url,
            "ANTHROPIC_API_KEY": "unused",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "PYTHONWARNINGS": "ignore",
            "PYTHONDONTWRITEBYTECODE": "1",
            "NODE_PATH": str(self.programs / "node" / "node_modules"),
            **{name: os.environ[name] for name in ("OMP_NUM_THREADS",) if name in os.environ},
        }


Results = dict[str, str]  # a check's: "" where it passed


async def library(name: str, place: Place) -> tuple[str, Results]:
    """A library's checks, which one process makes; it asks for the server's restart by a line."""
    python = place.programs / PYTHONS.get(name, "agents") / "bin" / "python"
    program = [str(python), str(Path(__file__).with_name("agents_calls.py"))]
    if name in NODE:
        copy = place.programs / "node" / "agents_calls.mjs"
        copy.write_bytes(Path(__file__).with_name("agents_calls.mjs").read_bytes())
        program = ["node", str(copy)]
    work = place.folder / "work"
    work.mkdir()
    process = await asyncio.create_subprocess_exec(
        *(*program, place.server.url, MODEL_NAME, name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        cwd=work,
        env=place.env,
        limit=1 << 22,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    errors = asyncio.create_task(process.stderr.read())
    version, results = "", Results()
    async for line in process.stdout:
        match line.decode().strip().split(" ", 1):
            case ["RESTART"]:
                await place.server.restart()
                process.stdin.write(b"\n")
                await process.stdin.drain()
            case ["VERSION", version]:
                pass
            case ["CHECK", result]:
                results |= json.loads(result)
    await process.wait()
    if missing := [check for check in CHECKS if check not in results]:
        results |= dict.fromkeys(missing, (await errors).decode()[-2000:] or "the process ended")
    return version, results


class Turn(NamedTuple):
    """One run of a program."""

    prompt: str
    is_first: bool = True
    streams: bool = False
    schema: str = ""


SCHEMA = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "enum": [1, 2, 3]},
        "rain": {"type": "boolean"},
    },
    "required": ["city", "days", "rain"],
    "additionalProperties": False,
}
VALUE = {"city": "Oslo", "days": 2, "rain": True}
_NPM = f"{os.uname().sysname.lower()}-{'arm64' if os.uname().machine == 'aarch64' else 'x64'}"
_SHELL = {"codex": "exec_command", "claude-code": "Bash"}
_COMMAND = {"codex": "cmd", "claude-code": "command"}


def command(name: str, turn: Turn, place: Place) -> list[str]:
    modules = place.programs / "node" / "node_modules"
    if name == "codex":
        provider = f'{{name="teneral",base_url="{place.server.url}/v1",env_key="OPENAI_API_KEY",wire_api="responses"}}'
        options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", MODEL_NAME]
        options += ["-c", f"model_providers.teneral={provider}", "-c", 'model_provider="teneral"']
        mcp = json.dumps(str(Path(__file__).with_name("agents_mcp.py")))
        options += ["-c", f"mcp_servers.sky={{command={json.dumps(sys.executable)},args=[{mcp}]}}"]
        if turn.schema:
            path = place.folder / "schema.json"
            path.write_text(turn.schema)
            options += ["--output-schema", str(path)]
        options += ["--json"] if turn.streams else []
        return [
            str(modules / ".bin" / "codex"),
            "exec",
            *([] if turn.is_first else ["resume", "--last"]),
            *options,
            turn.prompt,
        ]
    program = str(modules / "@anthropic-ai" / f"claude-code-{_NPM}" / "claude")
    options = ["--model", MODEL_NAME, "--allowedTools", "Bash"] + ([] if turn.is_first else ["--continue"])
    if turn.streams:
        options += ["--output-format", "stream-json", "--include-partial-messages", "--verbose"]
    if turn.schema:
        options += ["--json-schema", turn.schema, "--output-format", "json"]
    return [program, *options, "-p", turn.prompt]


async def run(name: str, turn: Turn, place: Place) -> str:
    """Run a program in the folder `work`, and return its output."""
    process = await asyncio.create_subprocess_exec(
        *command(name, turn, place),
        cwd=place.folder / "work",
        env=place.env,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    except TimeoutError:
        process.kill()
        output, _ = await process.communicate()
    assert process.returncode == 0, output.decode()[-2000:]
    return output.decode()


async def program(name: str, place: Place) -> tuple[str, Results]:
    """The checks of a coding agent, which is a process for each turn."""
    work = place.folder / "work"
    work.mkdir()
    package = {"codex": "@openai/codex", "claude-code": "@anthropic-ai/claude-code"}[name]
    manifest = place.programs / "node" / "node_modules" / package / "package.json"
    value = json.dumps(VALUE)

    async def chat() -> None:
        assert "All is done." in await run(name, Turn("%%%All is done.%%%"), place)

    async def stream() -> None:
        output = await run(name, Turn("%%%All is streamed.%%%", streams=True), place)
        events = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        assert len(events) > 2
        assert "All is streamed." in output

    async def structured() -> None:
        # Claude Code has a tool for it.
        text = f"%%%CALL StructuredOutput {value}||Done.%%%" if name == "claude-code" else f"%%%{value}%%%"
        output = await run(name, Turn(text, schema=json.dumps(SCHEMA)), place)
        found = re.findall(r'\{[^{}]*"city"[^{}]*\}', output.replace('\\"', '"'))
        assert any(json.loads(each) == VALUE for each in found), output[-1000:]

    async def tool() -> None:
        arguments = {_COMMAND[name]: "echo made >> made.txt; echo RESULT"}
        if name == "claude-code":
            arguments["description"] = "Make a file"
        script = f"%%%CALL {_SHELL[name]} {json.dumps(arguments)}||All is made.%%%"
        assert "All is made." in await run(name, Turn(script), place)
        assert (work / "made.txt").read_text() == "made\n"
        if name == "codex":  # a tool of a server of its own
            call = 'CALL mcp__sky.weather {"city": "Oslo"}'
            output = await run(name, Turn(f"%%%{call}||All is known.%%%", streams=True), place)
            assert "All is known." in output
            assert "It is sunny in Oslo." in output, output[-1000:]

    async def session() -> None:
        for number in range(1, TURNS + 1):
            if number == TURNS // 2:
                await place.server.restart()
            text = f"turn {number}: %%%I know #turns turns.%%%"
            output = await run(name, Turn(text, is_first=number == 1), place)
            assert f"I know {number} turns." in output, output[-1000:]

    results = Results()
    for check in (chat, stream, structured, tool, session):
        results[check.__name__] = await _outcome(check)
    return json.loads(manifest.read_text())["version"], results


async def _outcome(check: Callable[[], Awaitable[None]]) -> str:
    try:
        await check()
    except Exception as error:  # noqa: BLE001 - whatever fails is the result
        return f"{type(error).__name__}: {error}"
    return ""


NODE = ("ai-sdk",)
PYTHONS = {"aider": "aider", "llama-index": "llama-index"}  # the environments of their own
PROGRAMS = ("codex", "claude-code")
AGENTS = (
    *(*PROGRAMS, "openai-agents", "pydantic-ai", "langgraph", "langchain", "smolagents", "instructor"),
    *("litellm", "llama-index", "aider", *NODE),
)


async def main(programs: Path, names: tuple[str, ...]) -> int:
    failures: list[str] = []
    logging.disable()  # a failure is in the agent's result
    print(f"| agent | version | {' | '.join(CHECKS)} |\n|---|---|{'---|' * len(CHECKS)}", flush=True)
    with tempfile.TemporaryDirectory() as made:
        parts = family_parts("hermes", Path(made) / "model", context=CONTEXT)
        for name in names:
            folder = Path(made) / name
            server = Scripted(parts, folder)
            await server.start()
            place = Place(programs, folder, server)
            try:
                version, results = await (program if name in PROGRAMS else library)(name, place)
            finally:
                await server.stop()
            if server.refused:
                failures.append(f"{name}: refused requests: {', '.join(sorted(set(server.refused)))}")
            cells = [results[check] if results[check] in ("", "none") else "FAILED" for check in CHECKS]
            failures += [
                f"{name}, {check}: {results[check]}"
                for check, cell in zip(CHECKS, cells, strict=True)
                if cell == "FAILED"
            ]
            print(f"| {name} | {version} | {' | '.join(cell or 'pass' for cell in cells)} |", flush=True)
        parts.tokenizer.close()
    print("\n".join(failures))
    return 1 if failures else 0


if __name__ == "__main__":
    chosen = tuple(sys.argv[2:]) or AGENTS
    raise SystemExit(asyncio.run(main(Path(sys.argv[1]).resolve(), chosen)))
