"""The metadata of the server and its model, Triton's configuration and statistics, and its model
repository extension: the list of models, and loading and unloading the server's one.

Load and unload are refused unless the server was started with `--model-control`: permission to send
requests does not include permission to unload the model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from aiohttp import web
from msgspec import Struct

from .... import __version__
from ....runtime.state import State
from ...http.errors import ApiError
from ...http.json_bodies import JsonDecoder, encode
from ...http.service import CALL, Service
from .schemas import ChangeRequest, IndexRequest, ModelIndex, ModelMetadata, ServerMetadata, TensorMetadata
from .tensors import BYTES
from .texts import flag

if TYPE_CHECKING:
    from ....runtime.onnx.spec import OnnxSpec, Value


MAX_ADDRESS_CHARS = 2048
VERSION = "1"  # artifacts do not number theirs
PLATFORM = "teneral"
EXTENSIONS = [
    "binary_tensor_data",
    "generate",
    "model_configuration",
    "model_repository",
    "parameters",
    "statistics",
]

_TEXT_INPUT = TensorMetadata("text_input", BYTES, [-1])
_TENSORS: dict[str, tuple[list[TensorMetadata], list[TensorMetadata]]] = {
    "decoder": (
        [_TEXT_INPUT],
        [TensorMetadata("text_output", BYTES, [-1]), TensorMetadata("finish_reason", BYTES, [-1])],
    ),
    "encoder": ([_TEXT_INPUT], [TensorMetadata("embedding", "FP32", [-1, -1])]),
    "function": ([], []),  # any tensors
}


class Counts(Struct):
    """The number of inferences, and their duration. On the event loop only."""

    succeeded: int = 0
    succeeded_ns: int = 0
    failed: int = 0
    failed_ns: int = 0
    last_unix_ms: int = 0


def server_metadata() -> ServerMetadata:
    return ServerMetadata("teneral", __version__, EXTENSIONS)


def model_metadata(name: str, kind: str, spec: OnnxSpec | None = None) -> ModelMetadata:
    """`kind`: decoder, encoder, function, or onnx, which has a `spec`."""
    inputs, outputs = _tensors(kind, spec)
    return ModelMetadata(name, [VERSION], PLATFORM, inputs, outputs)


def model_config(name: str, kind: str, spec: OnnxSpec | None = None, *, max_in_flight: int) -> dict[str, Any]:
    """Triton's model configuration of such a model, as JSON."""
    inputs, outputs = _tensors(kind, spec)
    return {
        "name": name,
        "platform": PLATFORM,
        "backend": PLATFORM,
        "version_policy": {"specific": {"versions": [int(VERSION)]}},
        # Each request has shapes of its own: running requests are batched anyway.
        "max_batch_size": 0,
        "input": [_config_tensor(tensor) for tensor in inputs],
        "output": [_config_tensor(tensor) for tensor in outputs],
        "model_transaction_policy": {"decoupled": False},
        "parameters": {"max_in_flight": {"string_value": str(max_in_flight)}},
    }


def model_statistics(name: str, counts: Counts) -> dict[str, Any]:
    """Triton's statistics of `infer`. The phases of an inference are not measured, and given as 0."""
    unmeasured = {"count": 0, "ns": 0}
    parts = ("queue", "compute_input", "compute_infer", "compute_output", "cache_hit", "cache_miss")
    return {
        "model_stats": [
            {
                "name": name,
                "version": VERSION,
                "last_inference": counts.last_unix_ms,
                "inference_count": counts.succeeded,
                "execution_count": counts.succeeded,
                "inference_stats": {
                    "success": {"count": counts.succeeded, "ns": counts.succeeded_ns},
                    "fail": {"count": counts.failed, "ns": counts.failed_ns},
                    **dict.fromkeys(parts, unmeasured),
                },
                "batch_stats": [],
            }
        ]
    }


def datatype_of(type_name: str) -> str:
    """The protocol's name of one of ONNX Runtime's types: "tensor(float16)" is FP16."""
    word = type_name.removeprefix("tensor(").removesuffix(")")
    floats = {"float": "FP32", "float16": "FP16", "double": "FP64", "string": BYTES}
    return floats.get(word, word.upper())


def _tensors(kind: str, spec: OnnxSpec | None) -> tuple[list[TensorMetadata], list[TensorMetadata]]:
    if spec is None:
        return _TENSORS[kind]

    def described(values: Sequence[Value]) -> list[TensorMetadata]:
        return [
            TensorMetadata(
                value.name,
                datatype_of(value.type),
                [size if isinstance(size, int) else -1 for size in value.shape or ()],
            )
            for value in values
        ]

    return described(spec.inputs), described(spec.outputs)


def _config_tensor(tensor: TensorMetadata) -> dict[str, Any]:
    kind = "STRING" if tensor.datatype == BYTES else tensor.datatype
    return {"name": tensor.name, "data_type": f"TYPE_{kind}", "dims": tensor.shape}


# Triton's names.
_STATES = {
    State.LOADING: "LOADING",
    State.PARTIAL: "READY",
    State.READY: "READY",
    State.DRAINING: "UNLOADING",
    State.FAILED: "UNAVAILABLE",
    State.UNLOADED: "UNAVAILABLE",
}


class Repository:
    def __init__(self, service: Service) -> None:
        self._service = service
        self._index = JsonDecoder(IndexRequest)
        self._change = JsonDecoder(ChangeRequest)

    async def index(self, request: web.Request, *, version: str) -> web.Response:
        service = self._service
        async with service.admission.body(request) as data:
            asked = self._index.decode(data) if data else IndexRequest()
        state, failure = service.state, service.instance.failure
        reason = service.slot.reason if failure is None else failure.message
        entry = ModelIndex(service.instance.model_name, version, _STATES[state], reason)
        entries = [entry] if state.can_answer or not asked.ready else []
        return web.Response(body=encode(entries), content_type="application/json")

    async def change(self, request: web.Request, action: str) -> web.Response:
        """Change the model, and return when done. Raises 403, and the error of a load."""
        service, call = self._service, CALL.get()
        async with service.admission.body(request) as data:
            asked = self._change.decode(data) if data else ChangeRequest()
        address = self._check(action, asked)
        if action == "unload":
            await service.slot.unload(call.work, drain_timeout_s=service.limits.unload_drain_s)
        elif address is not None:
            await service.slot.switch(call.work, address, drain_timeout_s=service.limits.unload_drain_s)
        else:
            await service.slot.load(call.work)
        return web.Response(status=200)

    def _check(self, action: str, asked: ChangeRequest) -> str | None:
        """The address of a fine-tune to switch to, if there is one. Raises what is wrong."""
        if not self._service.instance.config.model_control:
            raise ApiError(
                403,
                "this server does not let its model be loaded and unloaded: start it with --model-control",
                code="model_control_off",
            )
        parameters = dict(asked.parameters or {})
        if action == "unload":
            flag(parameters, "unload_dependents")
            parameters.pop("unload_dependents", None)  # there are none
        address = parameters.pop("model", None) if action == "load" else None
        if address is not None and (
            not isinstance(address, str) or not 0 < len(address) <= MAX_ADDRESS_CHARS or "\0" in address
        ):
            raise ApiError(
                400, "model must be the address of a fine-tune of the model in memory", param="model"
            )
        for name in parameters:
            message = f"{name[:100]!r} is not a parameter of {action}: the server's configuration determines the model"
            raise ApiError(400, message, param="parameters")
        return address
