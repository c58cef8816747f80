"""OpenAI's agents SDK against a server: CLIENTS_PYTHON openai_agents_calls.py URL MODEL MODE. Fails by an assertion.

The server's model answers every request with one call of `weather` in the mode `call`, and with "Hi." in the mode
`text`.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import sys

import agents
import openai

agents.set_tracing_disabled(True)
SETTINGS = agents.ModelSettings(max_tokens=60, temperature=0)


@agents.function_tool(strict_mode=False)
def weather(city: str) -> str:
    """The weather of a city"""
    return f"sunny in {city}"


async def call(client: openai.AsyncOpenAI, model: str) -> None:
    for kind in (agents.OpenAIResponsesModel, agents.OpenAIChatCompletionsModel):
        agent = agents.Agent(
            name="agent",
            model=kind(model, client),
            tools=[weather],
            model_settings=SETTINGS,
            tool_use_behavior="stop_on_first_tool",
        )
        assert (await agents.Runner.run(agent, "Weather?")).final_output == "sunny in Bern"


async def text(client: openai.AsyncOpenAI, model: str) -> None:
    responses = agents.OpenAIResponsesModel(model, client)
    # The search is OpenAI's own: it is left out.
    searching = agents.Agent(
        name="agent", model=responses, tools=[weather, agents.WebSearchTool()], model_settings=SETTINGS
    )
    assert (await agents.Runner.run(searching, "Hello")).final_output == "Hi."
    streamed = agents.Runner.run_streamed(searching, "Hello")
    kinds = {event.type async for event in streamed.stream_events()}
    assert "raw_response_event" in kinds
    assert streamed.final_output == "Hi."

    agent = agents.Agent(name="agent", model=responses, model_settings=SETTINGS)
    session = agents.OpenAIConversationsSession(openai_client=client)
    previous = None
    for turn in range(10):
        await agents.Runner.run(agent, f"Turn {turn}", session=session)
        result = await agents.Runner.run(agent, f"Turn {turn}", previous_response_id=previous)
        previous = result.last_response_id
    assert len(await session.get_items()) == 20
    assert previous is not None
    assert len((await client.responses.input_items.list(previous, limit=100)).data) == 19
    await session.clear_session()


async def main(url: str, model: str, mode: str) -> None:
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
        await (call if mode == "call" else text)(client, model)
    print(f"openai-agents {importlib.metadata.version('openai-agents')}: {mode} is understood")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
