"""A stand-in for SageMaker, between a client and a container: it takes requests as the service's API has them and asks
the container as the service does.

Only what the API names goes through, both ways, and a container has 60 s.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
from aiohttp import web

TO_CONTAINER = (
    "Content-Type",
    "Accept",
    "X-Amzn-SageMaker-Custom-Attributes",
    "X-Amzn-SageMaker-Session-Id",
    "X-Amzn-SageMaker-Inference-Id",
)
TO_CLIENT = (
    "Content-Type",
    "X-Amzn-SageMaker-Custom-Attributes",
    "X-Amzn-SageMaker-New-Session-Id",
    "X-Amzn-SageMaker-Closed-Session-Id",
)


@asynccontextmanager
async def sagemaker_endpoint(container_url: str) -> AsyncIterator[str]:
    """The endpoint's address, for `boto3.client("sagemaker-runtime", endpoint_url=…)`."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(60)) as container:

        async def invoke(request: web.Request) -> web.Response:
            headers = {name: request.headers[name] for name in TO_CONTAINER if name in request.headers}
            async with container.post(
                f"{container_url}/invocations", data=await request.read(), headers=headers
            ) as answer:
                body = await answer.read()
                if answer.status >= 300:
                    return web.json_response(
                        {"OriginalStatusCode": answer.status, "OriginalMessage": body.decode()},
                        status=424,
                        headers={"x-amzn-ErrorType": "ModelError"},
                    )
                passed = {name: answer.headers[name] for name in TO_CLIENT if name in answer.headers}
                return web.Response(body=body, headers=passed)

        app = web.Application()
        app.router.add_post("/endpoints/{name}/invocations", invoke)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()
