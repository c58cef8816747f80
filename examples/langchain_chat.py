"""LangChain's chat model of OpenAI against `teneral serve`, or against a program that mounts `teneral.asgi_app`.

pip install langchain-openai
teneral serve Qwen/Qwen2.5-0.5B-Instruct &
python examples/langchain_chat.py http://127.0.0.1:8080/v1 Qwen/Qwen2.5-0.5B-Instruct
"""

from __future__ import annotations

import sys

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI


def main(url: str, model: str) -> None:
    # A server without a key accepts any, and OpenAI's client wants one.
    chat = ChatOpenAI(base_url=url, model=model, api_key="none", max_tokens=30, temperature=0)
    messages = [SystemMessage("Answer briefly."), HumanMessage("What is a dragonfly?")]
    answer = chat.invoke(messages)
    print(answer.usage_metadata["output_tokens"], "tokens")
    print("".join(str(chunk.content) for chunk in chat.stream(messages)))


if __name__ == "__main__":
    main(*sys.argv[1:])
