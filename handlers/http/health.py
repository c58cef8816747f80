"""What platforms and people ask about an instance: /livez, /readyz, /ping, /metrics, /timeline."""

from __future__ import annotations

import asyncio
from typing import Any

from aiohttp import web

from ...runtime.metrics import CONTENT_TYPE
from ...runtime.state import State
from .errors import retry_after
from .responses import encode
from .retry import expected_wait_s
from .service import Service


class HealthRoutes:
    def __init__(self, service: Service, *, ping_while_loading: int = 503) -> None:
        """`ping_while_loading` is the status of /ping until requests can be answered."""
        self._service = service
        self._ping_while_loading = ping_while_loading

    async def livez(self, request: web.Request) -> web.Response:
        """200 for as long as the event loop turns: loading, draining and even a failed load are no reason to
        be killed.
        """
        return web.Response(body=b'{"status":"ok"}', content_type="application/json")

    async def readyz(self, request: web.Request) -> web.Response:
        """200 when a request that is sent now is worked on at once; else 503. The state and the load's
        progress either way.
        """
        instance, state = self._service.instance, self._service.state
        report: dict[str, Any] = {
            "state": str(state),
            "model": instance.model_name,
            "progress": instance.progress(),
        }
        if instance.failure is not None:
            report["error"] = instance.failure.message
        return web.Response(
            status=200 if state.can_answer else 503,
            body=encode(report),
            content_type="application/json",
            headers={} if state.can_answer else self._retry_after(),
        )

    async def ping(self, request: web.Request) -> web.Response:
        """What SageMaker and RunPod's load balancer ask: 200 when requests can be answered. No body, as SageMaker has
        it. While the instance loads, what the platform knows as that; draining or failed, 503 to all.
        """
        state = self._service.state
        if state.can_answer:
            return web.Response(status=200)
        return web.Response(
            status=self._ping_while_loading if state is State.LOADING else 503, headers=self._retry_after()
        )

    def _retry_after(self) -> dict[str, str]:
        instance = self._service.instance
        return retry_after(expected_wait_s(instance.progress()["fraction"], instance.timeline.now_s()))

    async def metrics(self, request: web.Request) -> web.Response:
        service = self._service
        statistics = {
            **service.instance.statistics(),
            "state": str(service.state),
            "http": {
                "connections": len(service.connections),
                "unsent_bytes": sum(service.connections.unsent_bytes()),
                "in_flight": len(service.in_flight),
                "waiting_sequences": service.admission.num_waiting,
                "body_bytes": service.admission.body_bytes,
            },
        }
        # In a thread: the first time it imports the Prometheus client.
        text = await asyncio.to_thread(service.metrics.render, statistics)
        return web.Response(body=text, headers={"Content-Type": CONTENT_TYPE})

    async def timeline(self, request: web.Request) -> web.Response:
        """Every phase of this instance's life so far; `teneral timeline URL` draws it."""
        return web.Response(
            body=encode(self._service.instance.timeline.snapshot()), content_type="application/json"
        )
