"""Clients of models, without loops of their own: the checks of `agents_calls.py`."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from agents_common import STRUCTURED, SUNNY, TOOL, VALUE, Weather, called, same, turns, weather


class Instructor:
    package = "instructor"
    json_modes = ("JSON", "JSON_SCHEMA", "MD_JSON", "JSON_O1")
    call_modes = ("TOOLS", "TOOLS_STRICT", "FUNCTIONS", "RESPONSES_TOOLS")

    def __init__(self, url: str, model: str) -> None:
        import instructor
        import openai

        self.instructor, self.model = instructor, model
        self.client = openai.OpenAI(base_url=f"{url}/v1", max_retries=0)

    def create(self, mode: str, text: str | list[Any], kind: Any, **options: Any) -> Any:
        client = self.instructor.from_openai(self.client, mode=self.instructor.Mode[mode])
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        method = options.pop("method", "create")
        create = getattr(client.chat.completions, method)
        return create(model=self.model, messages=messages, response_model=kind, max_retries=0, **options)

    def chat(self) -> None:
        same(self.create("TOOLS", "%%%Hi.%%%", None).choices[0].message.content, "Hi.")

    def stream(self) -> None:
        for mode, text in (("TOOLS", called("PartialWeather")), ("JSON_SCHEMA", STRUCTURED)):
            same(list(self.create(mode, text, Weather, method="create_partial"))[-1], VALUE)

    def structured(self) -> None:
        modes = {**dict.fromkeys(self.json_modes, STRUCTURED), **dict.fromkeys(self.call_modes, called())}
        modes["MD_JSON"] = f"Rain? %%%```json\n{json.dumps(VALUE)}\n```%%%"
        failed = []
        for mode, text in modes.items():
            try:
                same(self.create(mode, text, Weather), VALUE)
            except Exception as error:  # noqa: BLE001 - each mode's result
                failed.append(f"{mode}: {type(error).__name__}: {error}"[:300])
        assert not failed, failed

    def tool(self) -> None:
        from collections.abc import Iterable

        several = self.create("PARALLEL_TOOLS", called(), Iterable[Weather])
        same([each.model_dump() for each in several], [VALUE])
        answer, whole = self.create("TOOLS", called(), Weather, method="create_with_completion")
        same(answer, VALUE)
        message = whole.choices[0].message
        result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "sunny"}
        history = [{"role": "user", "content": called()}, message.model_dump(), result]
        same(self.create("TOOLS", history, None).choices[0].message.content, "Done.")

    def session(self) -> None:
        messages: list[Any] = []

        def ask(text: str) -> str:
            messages.append({"role": "user", "content": text})
            answer = self.create("TOOLS", messages, None).choices[0].message
            messages.append(answer.model_dump())
            return str(answer.content)

        turns(ask)


class Litellm:
    """Chats as OpenAI's, responses, and messages as Anthropic's."""

    package = "litellm"

    def __init__(self, url: str, model: str) -> None:
        import litellm

        litellm.suppress_debug_info = True
        self.litellm, self.url, self.model = litellm, url, model

    def complete(self, text: str | list[Any], kind: str = "openai", **options: Any) -> Any:
        messages = [{"role": "user", "content": text}] if isinstance(text, str) else text
        base = f"{self.url}/v1" if kind == "openai" else self.url
        return self.litellm.completion(
            model=f"{kind}/{self.model}", api_base=base, api_key="unused", messages=messages, **options
        )

    def chat(self) -> None:
        for kind in ("openai", "anthropic"):
            same(self.complete("%%%Hi.%%%", kind, max_tokens=50).choices[0].message.content, "Hi.")
        answer = self.litellm.responses(
            model=f"openai/{self.model}", api_base=f"{self.url}/v1", api_key="unused", input="%%%Hi.%%%"
        )
        same(answer.output[0].content[0].text, "Hi.")

    def stream(self) -> None:
        for kind in ("openai", "anthropic"):
            pieces = self.complete("%%%Hi there.%%%", kind, max_tokens=50, stream=True)
            same("".join(each.choices[0].delta.content or "" for each in pieces), "Hi there.")

    def structured(self) -> None:
        content = self.complete(STRUCTURED, response_format=Weather).choices[0].message.content
        same(json.loads(content), VALUE)

    def tool(self) -> None:
        function = {
            "name": "weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}},
                "required": ["city"],
            },
        }
        tools = [{"type": "function", "function": function}]
        for kind in ("openai", "anthropic"):
            for stream in (False, True):
                messages: list[Any] = [{"role": "user", "content": TOOL}]
                answer = self.complete(messages, kind, tools=tools, max_tokens=200, stream=stream)
                if stream:
                    answer = self.litellm.stream_chunk_builder(list(answer))
                message = answer.choices[0].message
                [call] = message.tool_calls
                result = weather(**json.loads(call.function.arguments))
                messages += [
                    message.model_dump(),
                    {"role": "tool", "tool_call_id": call.id, "content": result},
                ]
                last = self.complete(messages, kind, tools=tools, max_tokens=200)
                same(last.choices[0].message.content, SUNNY)

    def session(self) -> None:
        messages: list[Any] = []

        def ask(text: str) -> str:
            messages.append({"role": "user", "content": text})
            answer = self.complete(messages).choices[0].message
            messages.append(answer.model_dump())
            return str(answer.content)

        turns(ask)


class LlamaIndex:
    package = "llama-index-llms-openai-like"

    def __init__(self, url: str, model: str) -> None:
        from llama_index.llms.openai_like import OpenAILike

        self.model = OpenAILike(
            model=model,
            api_base=f"{url}/v1",
            api_key="unused",
            is_chat_model=True,
            is_function_calling_model=True,
            should_use_structured_outputs=True,
            context_window=1 << 18,
            max_retries=0,
        )

    def messages(self, text: str) -> list[Any]:
        from llama_index.core.llms import ChatMessage

        return [ChatMessage(role="user", content=text)]

    def chat(self) -> None:
        same(self.model.chat(self.messages("%%%Hi.%%%")).message.content, "Hi.")

    def stream(self) -> None:
        pieces = self.model.stream_chat(self.messages("%%%Hi there.%%%"))
        same("".join(each.delta or "" for each in pieces), "Hi there.")

    def structured(self) -> None:
        same(self.model.as_structured_llm(Weather).chat(self.messages(STRUCTURED)).raw, VALUE)

    def agent(self) -> Any:
        from llama_index.core.agent.workflow import FunctionAgent

        return FunctionAgent(tools=[weather], llm=self.model, system_prompt="Help.")

    def tool(self) -> None:
        async def run() -> None:
            same(str(await self.agent().run(TOOL)), SUNNY)

        asyncio.run(run())

    def session(self) -> None:
        from llama_index.core.memory import ChatMemoryBuffer

        agent, loop = self.agent(), asyncio.new_event_loop()
        memory = ChatMemoryBuffer.from_defaults(token_limit=1 << 18)

        async def run(text: str) -> str:
            return str(await agent.run(text, memory=memory))

        turns(lambda text: loop.run_until_complete(run(text)))
