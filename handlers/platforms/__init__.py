"""The platforms that start containers, one row each: the variable that identifies one, its
differences, and the module of its protocol.

A server speaks every platform's HTTP protocol at once; a row's traits are the differences between
containers. Rows name functions and classes by address ("module:name", relative to this package), so
that a platform's module is imported on its first use: a cold start waits for every import.

`runtime/config.py` knows no platform: `resolve_settings` passes it the rows' variables for ports, and
the folder of a platform's model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from ...loader.errors import UsageError
from ...runtime import resolve as configuration
from ..http.routes import JSON, STREAMED, Route, Schema

if TYPE_CHECKING:
    from pathlib import Path

    from aiohttp import web

    from ...runtime.config import ServeConfig
    from ...runtime.instance.instance import Instance
    from ..function.handler import Handler
    from ..http.errors import ApiError

    # Makes the HTTP application of a platform without a port, for events that are HTTP requests.
    MakeApp = Callable[[Instance, Handler | None, "Platform"], web.Application]

AUTO = "auto"
MODEL_SIGNS = ("manifest.json", "config.json")  # of an artifact, and of a model directory
# Of platforms that are no row because their protocol is plain HTTP.
HOST_SIGNS = ("KUBERNETES_SERVICE_HOST", "ECS_CONTAINER_METADATA_URI_V4", "ECS_CONTAINER_METADATA_URI")
LOOPBACK, EVERY_ADDRESS = "127.0.0.1", "0.0.0.0"  # noqa: S104 - for containers of a platform


_EVENT: Schema = {
    "type": "object",
    "required": ["specversion", "type", "source", "id"],
    "properties": {
        "specversion": {"const": "1.0"},
        **{name: {"type": "string", "minLength": 1} for name in ("type", "source", "id")},
        "data": {},
    },
}
_EXAMPLE = {"specversion": "1.0", "type": "a.b", "source": "/c", "id": "1", "data": {"text": "Hello"}}
_CLOUDEVENTS = (
    *(
        Route(
            "POST", path, "post", "function", "A CloudEvent, also in binary mode, and a push of Pub/Sub",
            _EVENT, {}, (JSON, "application/cloudevents+json"), status=("200", "204"), example=_EXAMPLE,
            body_media="application/cloudevents+json",
        )
        for path in ("/", "/events")
    ),
    Route("OPTIONS", "/events", "permit", "function", "Webhook permission for CloudEvents", media=()),
)  # fmt: skip
_SAGEMAKER = (
    Route("POST", "/invocations", "post", "function", "SageMaker's call", {}, {}, STREAMED, needs_body=False),
)


class Platform(NamedTuple):
    """A platform. `drain_timeout_s` stays below the time between its SIGTERM and its SIGKILL."""

    name: str
    sign: str = ""  # a variable that only this platform sets
    drain_timeout_s: float = 8.0
    ping_while_loading: int = 503  # the status of /ping until requests can be answered
    takes_any_media: bool = False  # bodies of any media type are passed to the function
    # The platform's variable, and its setting.
    variables: tuple[tuple[str, str], ...] = ()
    # The folder in which the platform puts a model's files before it starts the container.
    model_folder: str = ""
    routes: tuple[Route, ...] | str = ()  # or the address of such a tuple
    # Class, made with (Service, Handler | None) by the first request to one of the routes.
    api: str = ""
    error_prefix: str = ""  # paths whose errors have the platform's own shape…
    error_response: str = ""  # …made by this function of an ApiError
    run: str = ""  # function (ServeConfig, MakeApp) -> exit status, for a platform without a port


# Sources: Cloud Run container contract (SIGTERM, 10 s); SageMaker "custom inference code with hosting services" (30 s);
# Kubernetes' terminationGracePeriodSeconds (30 s); RunPod "load balancing endpoints" (204: initialising); Lambda
# "runtime environment lifecycle" (2 s with extensions). SageMaker and KServe set no variable of their own; SageMaker's
# port variable is there only where containers share a host. Of two variables for one setting the later row's wins.
HTTP = Platform("http", variables=(("PORT", "port"),))
PLATFORMS: tuple[Platform, ...] = (
    HTTP,  # any other that starts a container and sends it requests: ECS, Kubernetes, a local machine
    Platform(
        "cloud-run",  # and Knative
        sign="K_SERVICE",
        routes=_CLOUDEVENTS,
        api=".cloudevents:CloudEventRoute",
    ),
    Platform(
        "kserve",
        drain_timeout_s=25.0,
        routes=".kserve.routes:ROUTES",
        api=".kserve.api:KServeRoutes",
        error_prefix="/v2/",
        error_response=".kserve.routes:error_response",
    ),
    Platform(
        "sagemaker",
        drain_timeout_s=25.0,
        takes_any_media=True,
        variables=(("SAGEMAKER_BIND_TO_PORT", "port"),),
        model_folder="/opt/ml/model",
        routes=_SAGEMAKER,
        api=".sagemaker:SageMakerRoute",
    ),
    Platform(  # RunPod's load balancer
        "runpod",
        sign="RUNPOD_ENDPOINT_ID",
        ping_while_loading=204,
        variables=(("PORT_HEALTH", "health_port"),),
    ),
    Platform("runpod-queue", sign="RUNPOD_WEBHOOK_GET_JOB", run=".runpod:run_runpod_queue"),
    Platform(
        "lambda", sign="AWS_LAMBDA_RUNTIME_API", drain_timeout_s=1.2, run=".aws_lambda.command:run_lambda"
    ),
)


def platform_of(setting: str, environment: Mapping[str, str]) -> Platform:
    """The named platform; for 'auto' the one whose variable is set: of several, the last row's.
    Raises `UsageError`.
    """
    if setting == AUTO:
        signed = (row for row in reversed(PLATFORMS) if row.sign and environment.get(row.sign))
        return next(signed, HTTP)
    found = next((row for row in PLATFORMS if row.name == setting), None)
    if found is None:
        names = ", ".join((AUTO, *(row.name for row in PLATFORMS)))
        raise UsageError(f"unknown platform {setting!r}", key="platform", hint=f"Name one of {names}.")
    return found


def is_hosted(environment: Mapping[str, str], setting: str = AUTO) -> bool:
    """True where a platform started this process, sends it requests from outside, and decides who may send any.
    Platforms that have no row may pass a port.
    """
    ports = (variable for row in PLATFORMS for variable, _ in row.variables)
    return platform_of(setting, environment) is not HTTP or any(map(environment.get, (*HOST_SIGNS, *ports)))


def default_host(environment: Mapping[str, str]) -> str:
    """The address to listen on where none is set: a person's machine is reached by its own programs only."""
    return EVERY_ADDRESS if is_hosted(environment) else LOOPBACK


def resolve_settings(
    flags: Mapping[str, Any], environment: Mapping[str, str], config_file: str | Path | None = None
) -> ServeConfig:
    """`runtime.resolve.resolve` with the platforms' settings. Their variables override the file, and
    are overridden by ours.

    Raises `UsageError`, naming the unknown or invalid flag, variable or key.
    """
    variables = tuple(pair for row in PLATFORMS for pair in row.variables)

    def defaults(settings: Mapping[str, Any]) -> Mapping[str, Any]:
        found = _model_folder(settings)
        platform = found.get("platform", settings.get("platform", AUTO))
        if not is_hosted(environment, platform):
            return found
        return {"host": EVERY_ADDRESS, "allowed_hosts": "*"} | dict(settings) | dict(found)

    return configuration.resolve(
        flags, environment, config_file, platform_variables=variables, defaults=defaults
    )


def _model_folder(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model of a container that was started without one, if its platform supplies one.

    With `--platform auto` the folder must contain a model, and the platform is then the folder's.
    """
    if settings.get("model"):
        return {}
    named = settings.get("platform", AUTO)
    for row in PLATFORMS:
        if not row.model_folder:
            continue
        if row.name == named:
            found = os.path.isdir(row.model_folder)
        else:
            found = any(os.path.isfile(os.path.join(row.model_folder, name)) for name in MODEL_SIGNS)
        if found:
            return {"model": row.model_folder} | ({"platform": row.name} if named == AUTO else {})
    return {}


def routes_of(platform: Platform) -> tuple[Route, ...]:
    return imported(platform.routes) if isinstance(platform.routes, str) else platform.routes


def imported(address: str) -> Any:
    """The object at "module:name"; a module that begins with a dot is one of this package."""
    from importlib import import_module

    module, _, name = address.partition(":")
    return getattr(import_module(module, __package__), name)


def shaped_response(path: str, headers: Mapping[str, str], error: ApiError, request_id: str) -> web.Response:
    """An error as a whole answer, in the protocol of the requested path. `headers` ignores case."""
    # lazy: a start needs none of them before its port is open
    from ..anthropic.routes import is_anthropic
    from ..openai.routes import COHERE_RERANK

    if is_anthropic(path, headers):
        from ..anthropic.errors import error_response  # lazy: rarely used

        return error_response(error, request_id)
    for row in () if path == COHERE_RERANK else PLATFORMS:
        if row.error_prefix and f"{path}/".startswith(row.error_prefix):
            response: web.Response = imported(row.error_response)(error)
            return response
    return error.response()
