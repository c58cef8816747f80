"""A FastAPI program with a model in it: its own routes, and all of `teneral serve` below /llm.

pip install fastapi uvicorn
MODEL=Qwen/Qwen2.5-0.5B-Instruct uvicorn --app-dir examples fastapi_app:app
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.responses import StreamingResponse

import teneral


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with teneral.AsyncEngine(os.environ["MODEL"]) as engine:
        app.state.engine = engine
        # OpenAI's clients find it at http://localhost:8000/llm/v1
        llm = teneral.asgi_app(engine)
        app.mount("/llm", llm)
        async with llm.lifespan():
            yield


app = FastAPI(lifespan=lifespan)


@app.get("/summary")
async def summary(text: str) -> StreamingResponse:
    """A route of the program's own. A client that disconnects cancels the generation."""
    messages = [{"role": "user", "content": f"Summarise in one sentence: {text}"}]
    return StreamingResponse(
        await app.state.engine.stream(messages, max_tokens=60), media_type="text/plain; charset=utf-8"
    )
