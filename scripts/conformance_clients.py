"""Client libraries for OpenAI's API against a server: `scripts/conformance-clients` has the environment and the model.

    python conformance_clients.py serve MODEL PYTHON [LIBRARY …]    start a server, and this program with PYTHON
    python conformance_clients.py ask URL [LIBRARY …]               ask the server there, with the libraries of this one

`openai-node` is OpenAI's package for Node: `conformance_clients.mjs`, in the folder that NODE_CLIENTS names.

Each library has to give a structured answer and a call of a function, both valid by their schemas. What a model of this
size says in them is of no concern.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NAME = "smollm2"
START_S = 120.0
QUESTION = "Will it rain in Oslo in the next two days?"
MAX_TOKENS = 200


def main() -> int:
    match sys.argv[1:]:
        case ["serve", model, python, *names]:
            with served(model) as url:
                return subprocess.run([python, __file__, "ask", url, *names], check=False).returncode
        case ["ask", url, *names]:
            here = [name for name in LIBRARIES if name != NODE or "NODE_CLIENTS" in os.environ]
            return ask(url, names or here)
    print(__doc__, file=sys.stderr)
    return 2


@contextmanager
def served(model: str) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--host", "127.0.0.1", "--name", NAME, "--log-level", "warning"]
    server = subprocess.Popen([sys.executable, "-m", "teneral", "serve", model, *options])
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_S
        while not is_ready(url):
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit("the server did not start")
            time.sleep(0.2)
        yield url
    finally:
        server.terminate()
        server.wait()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/readyz", timeout=5) as answer:  # noqa: S310 - our own server
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str, names: list[str]) -> int:
    if NODE not in names:
        print(f"{NODE}: left out")
    os.environ |= {
        "OPENAI_API_KEY": "unused",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # it would look for a newer one
    }
    failed = 0
    print(f"| {'library':20} | {'version':10} | {'structured answer':40} | {'call':40} |")
    print(f"|{'-' * 22}|{'-' * 12}|{'-' * 42}|{'-' * 42}|")
    for name in names:
        results = []
        for check in LIBRARIES[name]:
            try:
                results.append(str(check(f"{url}/v1")))
            except Exception as error:  # noqa: BLE001 - whatever a library raises is its result
                failed += 1
                results.append(f"FAILED {type(error).__name__}: {error}".replace("\n", " ")[:500])
        version = node_version() if name == NODE else importlib.metadata.version(name)
        print(f"| {name:20} | {version:10} | {results[0]:40} | {results[1]:40} |", flush=True)
    return 1 if failed else 0


def weather_model() -> Any:
    """The schema of the answers, and of the function's arguments."""
    from typing import Literal

    import pydantic

    class Weather(pydantic.BaseModel):
        """Weather of a city in the next days."""

        city: Literal["Oslo", "Rome"]
        days: Literal[1, 2, 3]
        rain: bool

    return Weather


def checked(value: Any) -> Any:
    """`value`, as the model's own type. Raises where it is none."""
    return weather_model().model_validate(value if isinstance(value, dict) else value.model_dump())


MESSAGES = [{"role": "user", "content": QUESTION}]


def litellm_structured(url: str) -> Any:
    import litellm

    litellm.suppress_debug_info = True
    answer = litellm.completion(
        model=f"openai/{NAME}",
        api_base=url,
        messages=MESSAGES,
        response_format=weather_model(),
        max_tokens=MAX_TOKENS,
    )
    return weather_model().model_validate_json(answer.choices[0].message.content)


def litellm_call(url: str) -> Any:
    import litellm

    litellm.suppress_debug_info = True
    function = {"name": "weather", "parameters": weather_model().model_json_schema()}
    stream = litellm.completion(
        model=f"openai/{NAME}",
        api_base=url,
        messages=MESSAGES,
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_tokens=MAX_TOKENS,
        stream=True,
    )
    answer = litellm.stream_chunk_builder(list(stream))
    [call] = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    return weather_model().model_validate_json(call.function.arguments)


def langchain(url: str) -> Any:
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(base_url=url, model=NAME, api_key="unused", max_tokens=MAX_TOKENS, max_retries=0)


def langchain_structured(url: str) -> Any:
    return checked(
        langchain(url).with_structured_output(weather_model(), method="json_schema").invoke(QUESTION)
    )


def langchain_call(url: str) -> Any:
    chat = langchain(url).bind_tools([weather_model()], tool_choice="any", parallel_tool_calls=False)
    merged = None
    for chunk in chat.stream(QUESTION):
        merged = chunk if merged is None else merged + chunk
    assert merged is not None
    [call] = merged.tool_calls
    return checked(call["args"])


def pydantic_ai(url: str, output: Any) -> Any:
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(NAME, provider=OpenAIProvider(base_url=url, api_key="unused"))
    agent = Agent(model, output_type=output, retries=0, model_settings={"max_tokens": MAX_TOKENS})
    return checked(agent.run_sync(QUESTION).output)


def pydantic_ai_structured(url: str) -> Any:
    from pydantic_ai import NativeOutput

    return pydantic_ai(url, NativeOutput(weather_model()))


def pydantic_ai_call(url: str) -> Any:
    from pydantic_ai import ToolOutput

    return pydantic_ai(url, ToolOutput(weather_model()))


def instructor_with(url: str, mode: str) -> Any:
    import instructor
    import openai

    client = instructor.from_openai(openai.OpenAI(base_url=url), mode=instructor.Mode[mode])
    return checked(
        client.chat.completions.create(
            model=NAME,
            messages=MESSAGES,
            response_model=weather_model(),
            max_retries=0,
            max_tokens=MAX_TOKENS,
        )
    )


def agents_run(url: str, **options: Any) -> Any:
    import agents
    import openai

    settings = agents.ModelSettings(max_tokens=MAX_TOKENS, tool_choice=options.pop("tool_choice", None))

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=url) as client:
            model = agents.OpenAIChatCompletionsModel(NAME, openai_client=client)
            agent: Any = agents.Agent("weather", model=model, model_settings=settings, **options)
            return (await agents.Runner.run(agent, QUESTION)).final_output

    return asyncio.run(run())


def agents_structured(url: str) -> Any:
    return checked(agents_run(url, output_type=weather_model()))


def agents_call(url: str) -> Any:
    import agents

    calls: list[dict[str, Any]] = []

    async def invoke(_: Any, arguments: str) -> str:
        calls.append(weather_model().model_validate_json(arguments).model_dump())
        return "Sun."

    tool = agents.FunctionTool("weather", "Tells the weather", weather_model().model_json_schema(), invoke)
    agents_run(url, tools=[tool], tool_choice="required", tool_use_behavior="stop_on_first_tool")
    return checked(calls[0])


def node(url: str, kind: str) -> Any:
    program = os.path.join(os.environ["NODE_CLIENTS"], "conformance_clients.mjs")
    command = [shutil.which("node") or "node", program, url, kind]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-400:])
    return checked(json.loads(done.stdout)["answer"])


def node_version() -> str:
    manifest = os.path.join(os.environ["NODE_CLIENTS"], "node_modules", "openai", "package.json")
    with open(manifest, encoding="utf-8") as file:
        return str(json.load(file)["version"])


NODE = "openai-node"
Check = Callable[[str], Any]
LIBRARIES: dict[str, tuple[Check, Check]] = {
    "litellm": (litellm_structured, litellm_call),
    "langchain-openai": (langchain_structured, langchain_call),
    "pydantic-ai-slim": (pydantic_ai_structured, pydantic_ai_call),
    "instructor": (
        lambda url: instructor_with(url, "JSON_SCHEMA"),
        lambda url: instructor_with(url, "TOOLS"),
    ),
    "openai-agents": (agents_structured, agents_call),
    NODE: (lambda url: node(url, "structured"), lambda url: node(url, "call")),
}

if __name__ == "__main__":
    raise SystemExit(main())
