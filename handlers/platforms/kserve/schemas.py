"""Requests and responses of the Open Inference Protocol and of Triton's extensions, as values.

Unknown fields are ignored, as by the protocol's servers; parameters are checked where they are
used. The document at /openapi.json is made from these types.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

Parameters = dict[str, Any]


class RequestInput(msgspec.Struct, frozen=True):
    name: str
    shape: list[int]
    datatype: str
    parameters: Parameters | None = None
    data: msgspec.Raw | UnsetType = UNSET  # decoded once its shape is known to be valid


class RequestOutput(msgspec.Struct, frozen=True):
    name: str
    parameters: Parameters | None = None


class InferenceRequest(msgspec.Struct, frozen=True):
    inputs: list[RequestInput]
    id: str | None = None
    parameters: Parameters | None = None
    outputs: list[RequestOutput] | None = None


class ResponseOutput(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: list[int]
    parameters: Parameters | UnsetType = UNSET
    data: list[Any] | UnsetType = UNSET


class InferenceResponse(msgspec.Struct, frozen=True):
    model_name: str
    model_version: str
    outputs: list[ResponseOutput]
    id: str | UnsetType = UNSET


class ServerMetadata(msgspec.Struct, frozen=True):
    name: str
    version: str
    extensions: list[str]


class TensorMetadata(msgspec.Struct, frozen=True):
    name: str
    datatype: str
    shape: list[int]


class ModelMetadata(msgspec.Struct, frozen=True):
    name: str
    versions: list[str]
    platform: str
    inputs: list[TensorMetadata]
    outputs: list[TensorMetadata]


class Live(msgspec.Struct, frozen=True):
    live: bool


class Ready(msgspec.Struct, frozen=True):
    ready: bool


class ModelReady(msgspec.Struct, frozen=True):
    name: str
    ready: bool


class IndexRequest(msgspec.Struct, frozen=True):
    ready: bool | None = None


class ModelIndex(msgspec.Struct, frozen=True):
    name: str
    version: str
    state: str
    reason: str


class ChangeRequest(msgspec.Struct, frozen=True):
    parameters: Parameters | None = None


class GenerateResponse(msgspec.Struct, frozen=True):
    model_name: str
    model_version: str
    text_output: str
    finish_reason: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
