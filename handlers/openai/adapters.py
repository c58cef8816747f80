"""vLLM's /v1/load_lora_adapter and /v1/unload_lora_adapter: adapters by names of their own, from any store.

Refused unless the server was started with `--model-control`: they read any address that the server can.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import msgspec
from aiohttp import web

from ...runtime.errors import RequestError
from ..http.errors import ApiError
from ..http.json_bodies import JsonDecoder
from ..http.service import Service

if TYPE_CHECKING:
    from ...runtime.adapters.registry import AdapterRegistry

MAX_ADDRESS_CHARS = 2048


class LoadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str
    lora_path: str  # the address of the adapter's folder, as `--model` takes addresses
    load_inplace: bool = False  # in place of one of the same name


class UnloadBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lora_name: str
    lora_int_id: int | None = None  # without effect: names are unique


class AdapterRoutes:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._load = JsonDecoder(LoadBody)
        self._unload = JsonDecoder(UnloadBody)

    async def load(self, request: web.Request) -> web.Response:
        """Returns when the adapter is there. The load ends with the request: when its client leaves,
        and at the end of a drain. Raises 403, and what the load failed with.
        """
        async with self._service.admission.body(request) as data:
            asked = self._load.decode(data)
        registry = await self._registry()
        name, address = asked.lora_name, asked.lora_path
        if not name or not address or len(address) > MAX_ADDRESS_CHARS or "\0" in address:
            raise RequestError("both lora_name and lora_path must be given", param="lora_path")
        if name == self._service.instance.model_name:
            raise RequestError(f"{name[:200]!r} is the name of the base", param="lora_name")
        if asked.load_inplace and registry.is_registered(name):
            registry.unload(name)
        with registry.loading(name, address) as done:
            await asyncio.wrap_future(done)
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def unload(self, request: web.Request) -> web.Response:
        """Requests that use it go on, a load of it ends. Raises 403, and 404 for an unknown name."""
        async with self._service.admission.body(request) as data:
            asked = self._unload.decode(data)
        registry = await self._registry()
        registry.unload(asked.lora_name)
        return web.Response(text=f"Success: LoRA adapter '{asked.lora_name}' removed successfully.")

    async def _registry(self) -> AdapterRegistry:
        service = self._service
        if not service.instance.config.model_control:
            raise ApiError(
                403,
                "this server does not let adapters be loaded and unloaded: start it with --model-control",
                code="model_control_off",
            )
        await service.ready(service.instance.engine)
        registry = service.instance.adapters
        if registry is None:
            raise RequestError("what computes this model does not implement adapters", param="model")
        return registry
