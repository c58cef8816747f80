"""Agent libraries against a server: ENVIRONMENT/bin/python agents_calls.py URL MODEL AGENT.

`conformance_agents.py` starts it, and says how answers are written in prompts. Prints `VERSION …`, and `CHECK {…}`
with what failed for each check; `RESTART` asks for another server at the same address, and waits for a line.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any, ClassVar

from agents_clients import Instructor, Litellm, LlamaIndex
from agents_common import STRUCTURED, SUNNY, TOOL, VALUE, WIRE, Weather, called, same, turns, weather


class OpenaiAgents:
    package = "openai-agents"

    def __init__(self, url: str, model: str) -> None:
        import agents
        import openai

        agents.set_tracing_disabled(True)
        self.agents = agents
        self.loop = asyncio.new_event_loop()
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", max_retries=0)
        self.responses = agents.OpenAIResponsesModel(model, self.client)
        self.chats = agents.OpenAIChatCompletionsModel(model, self.client)

    def agent(self, **options: Any) -> Any:
        return self.agents.Agent(**{"name": "agent", "model": self.responses, **options})

    def run(self, agent: Any, text: str, **options: Any) -> Any:
        return self.loop.run_until_complete(self.agents.Runner.run(agent, text, **options))

    def chat(self) -> None:
        for model in (self.responses, self.chats):
            same(self.run(self.agent(model=model), "%%%Hi.%%%").final_output, "Hi.")
        # A search of OpenAI's own is left out.
        searching = self.agent(tools=[self.agents.WebSearchTool()])
        same(self.run(searching, "%%%Hi.%%%").final_output, "Hi.")

    def stream(self) -> None:
        async def read() -> None:
            streamed = self.agents.Runner.run_streamed(self.agent(), "%%%Hi there.%%%")
            kinds = [
                event.data.type
                async for event in streamed.stream_events()
                if event.type == "raw_response_event"
            ]
            same(streamed.final_output, "Hi there.")
            assert "response.output_text.delta" in kinds

        self.loop.run_until_complete(read())

    def structured(self) -> None:
        for model in (self.responses, self.chats):
            same(self.run(self.agent(model=model, output_type=Weather), STRUCTURED).final_output, VALUE)

    def tool(self) -> None:
        """A handoff to an agent with a tool, behind a guardrail."""
        seen: list[str] = []

        @self.agents.function_tool
        def weather(city: str) -> str:
            """The weather of a city"""
            seen.append(city)
            return "sunny"

        @self.agents.input_guardrail
        async def guardrail(context: Any, agent: Any, given: Any) -> Any:
            return self.agents.GuardrailFunctionOutput(None, tripwire_triggered="forbidden" in str(given))

        text = (
            'Weather? %%%CALL transfer_to_expert {}||CALL weather {"city": "Oslo"}||It is sunny in Oslo.%%%'
        )
        for model in (self.responses, self.chats):
            expert = self.agent(name="expert", model=model, tools=[weather])
            triage = self.agent(model=model, handoffs=[expert], input_guardrails=[guardrail])
            result = self.run(triage, text)
            same(result.final_output, SUNNY)
            same(result.last_agent.name, "expert")
            try:
                self.run(triage, f"forbidden {text}")
            except self.agents.InputGuardrailTripwireTriggered:
                pass
            else:
                raise AssertionError("the guardrail did not stop the run")
        same(seen[:1], ["Oslo"])

    def session(self) -> None:
        """By the id of the answer before, and by a conversation that the server keeps."""
        conversation = self.agents.OpenAIConversationsSession(openai_client=self.client)
        previous = None

        def ask(text: str) -> str:
            nonlocal previous
            result = self.run(self.agent(), text, previous_response_id=previous)
            previous = result.last_response_id
            same(self.run(self.agent(), text, session=conversation).final_output, result.final_output)
            return str(result.final_output)

        turns(ask)


class PydanticAi:
    package = "pydantic-ai-slim"

    def __init__(self, url: str, model: str) -> None:
        from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=f"{url}/v1", api_key="unused")
        self.model = OpenAIChatModel(model, provider=provider)
        self.responses = OpenAIResponsesModel(model, provider=provider)

    def agent(self, **options: Any) -> Any:
        from pydantic_ai import Agent

        return Agent(options.pop("model", self.model), retries=0, **options)

    def chat(self) -> None:
        for model in (self.model, self.responses):
            same(self.agent(model=model).run_sync("%%%Hi.%%%").output, "Hi.")

    def stream(self) -> None:
        async def read() -> None:
            for model in (self.model, self.responses):
                async with self.agent(model=model).run_stream("%%%Hi there.%%%") as result:
                    pieces = [piece async for piece in result.stream_text(delta=True, debounce_by=None)]
                same("".join(pieces), "Hi there.")

        asyncio.run(read())

    def structured(self) -> None:
        from pydantic_ai import NativeOutput, PromptedOutput, ToolOutput

        for model in (self.model, self.responses):
            for output, text in (
                (NativeOutput(Weather), STRUCTURED),
                (PromptedOutput(Weather), STRUCTURED),
                (ToolOutput(Weather, name="answer"), called("answer")),
            ):
                same(self.agent(model=model, output_type=output).run_sync(text).output, VALUE)

    def tool(self) -> None:
        for model in (self.model, self.responses):
            agent = self.agent(model=model)
            agent.tool_plain(weather)
            same(agent.run_sync(TOOL).output, SUNNY)

    def session(self) -> None:
        agent, history = self.agent(), []

        def ask(text: str) -> str:
            nonlocal history
            result = agent.run_sync(text, message_history=history)
            history = result.all_messages()
            return str(result.output)

        turns(ask)


class Langchain:
    package = "langchain-openai"
    more: ClassVar[dict[str, Any]] = {}

    def __init__(self, url: str, model: str) -> None:
        from langchain_openai import ChatOpenAI

        self.model = ChatOpenAI(base_url=f"{url}/v1", model=model, max_retries=0, **self.more)

    def agent(self, **options: Any) -> Any:
        from langchain.agents import create_agent

        return create_agent(self.model, **options)

    def chat(self) -> None:
        same(self.model.invoke("%%%Hi.%%%").text, "Hi.")

    def stream(self) -> None:
        same("".join(chunk.text for chunk in self.model.stream("%%%Hi there.%%%")), "Hi there.")

    def structured(self) -> None:
        for method, text in (
            ("json_schema", STRUCTURED),
            ("json_mode", STRUCTURED),
            ("function_calling", called()),
        ):
            same(self.model.with_structured_output(Weather, method=method).invoke(text), VALUE)

    def tool(self) -> None:
        agent = self.agent(tools=[weather])
        same(agent.invoke({"messages": [("user", TOOL)]})["messages"][-1].text, SUNNY)

    def session(self) -> None:
        messages: list[Any] = []

        def ask(text: str) -> str:
            messages.append(("user", text))
            messages.append(self.model.invoke(messages))
            return str(messages[-1].text)

        turns(ask)


class Langgraph(Langchain):
    """Graphs, over responses."""

    package = "langgraph"
    more: ClassVar = {"use_responses_api": True, "output_version": "responses/v1"}

    def agent(self, **options: Any) -> Any:
        from langgraph.prebuilt import create_react_agent

        return create_react_agent(self.model, **{"tools": [], **options})

    def structured(self) -> None:
        super().structured()
        agent = self.agent(response_format=Weather)
        same(agent.invoke({"messages": [("user", STRUCTURED)]})["structured_response"], VALUE)

    def stream(self) -> None:
        for agent in (self.agent(), self.agent(tools=[weather])):
            events = agent.stream({"messages": [("user", "%%%Hi there.%%%")]}, stream_mode="messages")
            same("".join(chunk.text for chunk, _ in events), "Hi there.")

    def session(self) -> None:
        from langgraph.checkpoint.memory import InMemorySaver

        agent = self.agent(checkpointer=InMemorySaver())
        config = {"configurable": {"thread_id": "1"}}
        turns(lambda text: str(agent.invoke({"messages": [("user", text)]}, config)["messages"][-1].text))


class Smolagents:
    package = "smolagents"

    def __init__(self, url: str, model: str) -> None:
        import smolagents

        self.smolagents = smolagents
        self.model = smolagents.OpenAIModel(model, api_base=f"{url}/v1", api_key="unused")

    def messages(self, text: str) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": text}]}]

    def agent(self, kind: str, **options: Any) -> Any:
        tools = [self.smolagents.tool(weather)]
        return getattr(self.smolagents, kind)(
            tools=tools, model=self.model, verbosity_level=0, max_steps=4, **options
        )

    def chat(self) -> None:
        same(self.model(self.messages("%%%Hi.%%%")).content, "Hi.")

    def stream(self) -> None:
        deltas = self.model.generate_stream(self.messages("%%%Hi there.%%%"))
        same("".join(delta.content or "" for delta in deltas), "Hi there.")

    def structured(self) -> None:
        schema = {"type": "json_schema", "json_schema": {"name": "w", "schema": Weather.model_json_schema()}}
        answer = self.model(self.messages(STRUCTURED), response_format=schema)
        same(json.loads(answer.content), VALUE)
        # Its agent of code has a schema of its own.
        step = {"thought": "Look.", "code": "final_answer(weather('Oslo'))"}
        agent = self.agent("CodeAgent", use_structured_outputs_internally=True)
        same(agent.run(f"Weather? %%%{json.dumps(step)}%%%"), "sunny")

    def tool(self) -> None:
        text = 'Weather? %%%CALL weather {"city": "Oslo"}||CALL final_answer {"answer": "It is sunny in Oslo."}%%%'
        same(self.agent("ToolCallingAgent").run(text), SUNNY)
        same(self.agent("ToolCallingAgent", stream_outputs=True).run(text), SUNNY)
        code = "Weather? %%%<code>\nfinal_answer(weather('Oslo'))\n</code>%%%"
        same(self.agent("CodeAgent").run(code), "sunny")

    def session(self) -> None:
        agent = self.agent("ToolCallingAgent")

        def ask(text: str) -> str:
            written = text.replace(
                "%%%I know #turns turns.%%%", '%%%CALL final_answer {"answer": "I know #turns turns."}%%%'
            )
            return str(agent.run(written, reset=False))

        turns(ask)


class Aider:
    """A coding agent without tools: it writes blocks of edits."""

    package = "aider-chat"

    def __init__(self, url: str, model: str) -> None:
        os.environ |= {"OPENAI_API_BASE": f"{url}/v1", "AIDER_ANALYTICS": "false"}
        self.model = f"openai/{model}"
        self.file = Path("made.txt")
        self.file.write_text("old\n")

    def coder(self, **options: Any) -> Any:
        from aider.coders import Coder
        from aider.io import InputOutput
        from aider.models import Model

        model = Model(self.model)
        model.max_chat_history_tokens = 1 << 17
        io = InputOutput(yes=True, pretty=False, fancy_input=False)
        return Coder.create(
            main_model=model, io=io, use_git=False, map_tokens=0, suggest_shell_commands=False, **options
        )

    def chat(self) -> None:
        same(self.coder(edit_format="ask", stream=False).run("%%%Hi.%%%"), "Hi.")

    def stream(self) -> None:
        same(self.coder(edit_format="ask", stream=True).run("%%%Hi there.%%%"), "Hi there.")

    structured = None

    def tool(self) -> None:
        """An edit of a file."""
        edit = "made.txt\n```\n<<<<<<< SEARCH\nold\n=======\nnew\n>>>>>>> REPLACE\n```"
        self.coder(edit_format="diff", fnames=["made.txt"], stream=True).run(f"Change it. %%%{edit}%%%")
        same(self.file.read_text(), "new\n")

    def session(self) -> None:
        coder = self.coder(edit_format="ask", stream=True)
        turns(coder.run)


AGENTS = {
    "openai-agents": OpenaiAgents,
    "pydantic-ai": PydanticAi,
    "langgraph": Langgraph,
    "langchain": Langchain,
    "smolagents": Smolagents,
    "instructor": Instructor,
    "litellm": Litellm,
    "llama-index": LlamaIndex,
    "aider": Aider,
}


def main(url: str, model: str, name: str) -> None:
    kind = AGENTS[name]
    print("VERSION", importlib.metadata.version(kind.package), file=WIRE, flush=True)
    agent = kind(url, model)
    for check in ("chat", "stream", "structured", "tool", "session"):
        run, failure = getattr(agent, check), ""
        try:
            if run is None:
                failure = "none"
            else:
                run()
        except Exception:  # noqa: BLE001 - whatever a library raises is its result
            failure = traceback.format_exc()[-1500:]
        print("CHECK", json.dumps({check: failure}), file=WIRE, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
