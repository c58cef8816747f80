"""The configuration of one instance: one frozen value, made once from flags, environment and a TOML
file.

A setting has one name everywhere: the field `max_queued` is the flag `--max-queued`, the variable
`TENERAL_MAX_QUEUED` and the TOML key `max_queued`. Flags override the environment, the environment
overrides the file, the file overrides the defaults. Unknown keys are errors, and every error names
the key as the user wrote it. The environment is read here and nowhere else, except for the standard
variables of AWS, which the S3 source reads like every AWS program. A platform's variables are
passed in.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn, Self

from ..loader.device.detect import parse_device
from ..loader.errors import UsageError
from ..loader.load.options import LoadOptions, Order
from ..loader.sources.base import SourceOptions

if TYPE_CHECKING:
    from pathlib import Path

PREFIX = "TENERAL_"
MAX_CONFIG_FILE_BYTES = 1 << 20
# Of a server's processes without weights and keys: 212 MiB with a small vocabulary, 185 of them the
# server's own, and about 40 more for parsing a large one (docs/reliability.md).
SERVING_BYTES = 256 << 20
READY_S = 0.5  # from a process's start until it can compute
_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_LOG_LEVELS = ("debug", "info", "warning", "error")


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ValueError("must be a text")
    return value


def _flag(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    table = {
        "1": True,
        "true": True,
        "yes": True,
        "on": True,
        "0": False,
        "false": False,
        "no": False,
        "off": False,
    }
    if not isinstance(value, str) or value.lower() not in table:
        raise ValueError("must be true or false")
    return table[value.lower()]


def _integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, str) and re.fullmatch(r"[+-]?\d{1,18}", value.strip()):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low} to {high}")
        return value

    return parse


def _seconds(low: float, high: float) -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                value = None
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"must be a number of seconds from {low:g} to {high:g}")
        return float(value)

    return parse


def parse_bytes(value: Any) -> int:
    """Bytes from a whole number or a text like '512MiB' or '2 GB'. Raises ValueError saying what is
    allowed.
    """
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 1 << 50:
        return value
    if isinstance(value, str):
        match = re.fullmatch(r"\s*(\d{1,15})(\.\d{1,6})?\s*([A-Za-z]{0,3})\s*", value)
        if match and match[3].lower() in _SIZE_UNITS:
            size_bytes = int(float(match[1] + (match[2] or "")) * _SIZE_UNITS[match[3].lower()])
            if 0 < size_bytes < 1 << 50:
                return size_bytes
    raise ValueError("must be a size such as 512MiB, 2GB or a number of bytes")


def _choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return str(value)

    return parse


def _names(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        names = [name.strip().lower() for name in value.split(",")] if isinstance(value, str) else []
        if not names or len(set(names)) != len(names) or not set(names) <= set(allowed):
            raise ValueError(f"must be some of {', '.join(allowed)}, with commas between them")
        return ",".join(names)

    return parse


def _template(*allowed: str, required: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        # Few configurations have such a setting.
        from .address_template import AddressTemplate

        return AddressTemplate.parse(value, allowed=allowed, required=required).text

    return parse


class Setting(NamedTuple):
    """A setting. `parse` makes its value from the user's text, or raises ValueError with the
    allowed values.
    """

    default: Any
    parse: Callable[[Any], Any]
    help: str
    metavar: str
    secret: bool  # masked in output


def _setting(
    default: Any, parse: Callable[[Any], Any], help: str, *, metavar: str = "", secret: bool = False
) -> Any:
    return Setting(default, parse, help, metavar, secret)


class ServeConfig:
    """Settings of an instance. Sizes are bytes, times are seconds. Made by `resolve`, which
    validates.

    A frozen value, like a dataclass: importing dataclasses, and having one made, takes a tenth of
    the time until the first range is requested.
    """

    model: str = _setting(
        "",
        _text,
        "artifact or model directory: a path, s3://, gs://, az://, http(s)://; may end in @b3:DIGEST",
    )
    # What is served, and where
    name: str | None = _setting(None, _text, "the model's name for clients (default: the last part of MODEL)")
    host: str = _setting("0.0.0.0", _text, "address to listen on")  # noqa: S104 - a container is reached from outside
    port: int = _setting(8080, _integer(0, 65535), "port to listen on; 0 takes a free one", metavar="PORT")
    health_port: int | None = _setting(
        None,
        _integer(0, 65535),
        "another port to listen on, for a platform that sends its probes elsewhere (default: none)",
        metavar="PORT",
    )
    handler: str | None = _setting(
        None, _text, "function to serve at /invoke: module:function or file.py:function"
    )
    platform: str = _setting(
        "auto",
        _text,
        "where this runs: http, cloud-run, kserve, sagemaker, runpod, runpod-queue, lambda; auto looks",
        metavar="NAME",
    )
    api_key: str | None = _setting(
        None, _text, "bearer token that requests must carry; several with commas, or @FILE", secret=True
    )
    cors_origin: str | None = _setting(
        None,
        _text,
        "origins of web pages that may call this server, with commas; * is any (default: none)",
        metavar="ORIGIN",
    )
    console: bool = _setting(True, _flag, "a page at / that shows the start, the KV pool and the load")
    model_control: bool = _setting(
        False,
        _flag,
        "let clients unload the model and load it again, through /v2/repository, and load and unload adapters",
    )
    # The store
    base: str | None = _setting(
        None,
        _text,
        "the base of a fine-tune that is stored as differences to it, perhaps with …@b3:DIGEST",
        metavar="ARTIFACT",
    )
    endpoint_url: str | None = _setting(None, _text, "address of an S3-compatible store", metavar="URL")
    region: str | None = _setting(None, _text, "region of the bucket")
    profile: str | None = _setting(None, _text, "AWS profile to take credentials from")
    addressing_style: str = _setting(
        "auto", _choice("auto", "path", "virtual"), "how a bucket is addressed: auto, path or virtual"
    )
    anonymous: bool = _setting(False, _flag, "send unsigned requests")
    requester_pays: bool = _setting(False, _flag, "agree to pay for the requests")
    read_timeout_s: float = _setting(
        10.0, _seconds(0.1, 600), "silence after which a request has failed", metavar="SECONDS"
    )
    outage_s: float = _setting(
        30.0,
        _seconds(0, 3600),
        "how long a store that gives nothing is waited for; 0: only as many attempts as anything else",
        metavar="SECONDS",
    )
    hedge_after_s: float = _setting(
        0.25,
        _seconds(0, 600),
        "how long a read may be behind the others before it is asked for again; 0: never",
        metavar="SECONDS",
    )
    min_rate_bytes_s: int = _setting(
        4096,
        _integer(0, 1 << 40),
        "bytes a second below which a request has failed; 0: none",
        metavar="BYTES",
    )
    # Loading
    loader: str = _setting(
        "auto",
        _choice("auto", "process", "thread"),
        "where weights are read and decoded: in a process of its own, or in the server's threads; auto: in threads, "
        "but for a GPU and where torch is imported; thread: the tokenizer, too, is parsed in one",
        metavar="WHERE",
    )
    mmap: bool = _setting(
        True,
        _flag,
        "use plain safetensors of a local folder where they lie, without a copy, on a CPU; --no-… reads them, so that "
        "files may be overwritten in place while they are served",
    )
    connections: int = _setting(
        32, _integer(1, 256), "most connections that fetch at the same time; fewer where these are as fast"
    )
    staging_bytes: int | None = _setting(
        None,
        parse_bytes,
        "memory for bytes in flight (default: 96 MiB, or less where memory is short)",
        metavar="SIZE",
    )
    cache_dir: str | None = _setting(
        None, _text, "folder of this node to keep verified parts in, for the next container", metavar="DIR"
    )
    cache_bytes: int = _setting(20 << 30, parse_bytes, "most that is kept there", metavar="SIZE")
    first_token: str = _setting(
        "exact",
        _choice("exact", "draft", "sketch"),
        "what chooses the first tokens while weights arrive: the exact weights, or their draft or sketch",
        metavar="WEIGHTS",
    )
    draft_ahead: bool = _setting(
        True,
        _flag,
        "compute with the draft tier while the exact weights arrive, where there is time for it",
    )
    verify_exact: bool = _setting(
        False, _flag, "when all weights are there, compare each tensor with the digest of its original"
    )
    # Chats
    chat_template: str | None = _setting(
        None, _text, "file with a chat template in place of the model's own", metavar="FILE"
    )
    trust_request_chat_template: bool = _setting(
        False, _flag, "let requests bring chat templates of their own"
    )
    tool_parser: str = _setting(
        "auto",
        _choice("auto", "hermes", "llama3", "mistral", "json", "off"),
        "how the model writes calls of functions (auto: by its chat template)",
        metavar="NAME",
    )
    reasoning_parser: str = _setting(
        "auto",
        _choice("auto", "off"),
        "whether reasoning is taken out of answers (auto: where the chat template has tags for it)",
        metavar="NAME",
    )
    # The engine
    max_context: int | None = _setting(
        None, _integer(1, 1 << 24), "tokens a sequence may have (default: what the model was made for)"
    )
    kv_bytes: int | None = _setting(
        None, parse_bytes, "memory for the KV pool (default: a share of what is free)", metavar="SIZE"
    )
    kv_dtype: str = _setting(
        "model",
        _choice("model", "int8"),
        "how the KV pool stores: in the model's dtype, or in half of its memory as int8",
    )
    prefix_cache: bool = _setting(
        True, _flag, "keep what was computed of past requests, for those that begin in the same way"
    )
    kv_host_bytes: int | None = _setting(
        None,
        parse_bytes,
        "memory for what the KV pool gives up; of use where the pool is on another device",
        metavar="SIZE",
    )
    kv_disk_bytes: int | None = _setting(
        None, parse_bytes, "the same on a local disk: needs --kv-disk-dir", metavar="SIZE"
    )
    kv_disk_dir: str | None = _setting(None, _text, "folder on a local disk for that", metavar="DIR")
    kv_snapshot: str | None = _setting(
        None,
        _text,
        "where computed prefixes are kept between instances; may end in @b3:DIGEST",
        metavar="ADDRESS",
    )
    kv_snapshot_bytes: int = _setting(
        256 << 20, parse_bytes, "most that is read from and left there", metavar="SIZE"
    )
    kv_snapshot_save: bool = _setting(
        True, _flag, "at the end, leave there what several requests began with; --no-… only reads"
    )
    kv_snapshot_sessions: bool = _setting(
        False, _flag, "leave there what sessions keep as well, for when they go on elsewhere"
    )
    session_kv_bytes: int | None = _setting(
        None,
        parse_bytes,
        "most of it that sessions may keep for their next turn (default: half)",
        metavar="SIZE",
    )
    session_idle_s: float = _setting(
        900.0, _seconds(0, 86_400), "time after which a session keeps it no longer", metavar="SECONDS"
    )
    # Adapters
    adapters: str | None = _setting(
        None,
        _text,
        "where LoRA adapters are, by name: s3://bucket/adapters/{name} (default: there are none)",
        metavar="ADDRESS",
    )
    adapters_bytes: int = _setting(
        1 << 30, parse_bytes, "most memory for adapters; those used longest ago make way", metavar="SIZE"
    )
    max_running: int = _setting(32, _integer(1, 4096), "sequences that decode at the same time")
    max_queued: int = _setting(256, _integer(0, 1 << 20), "requests that may wait; beyond, clients get 429")
    max_queued_per_tenant: int | None = _setting(
        None, _integer(0, 1 << 20), "requests of one tenant that may wait (default: half of --max-queued)"
    )
    max_wait_s: float | None = _setting(
        None, _seconds(0, 3_600), "longest wait for a place; beyond, clients get 429", metavar="SECONDS"
    )
    embed_delay_s: float = _setting(
        0.0,
        _seconds(0, 10),
        "longest time that a text waits for others to share its batch; one that is alone never does",
        metavar="SECONDS",
    )
    backend: str = _setting(
        "auto",
        _choice("auto", "native", "torch", "transformers"),
        "what computes (auto: on a CPU native, torch for what that lacks, where it is installed; on a GPU torch)",
    )
    compute_dtype: str = _setting(
        "auto",
        _choice("auto", "bfloat16", "float16", "float32"),
        "what to compute in (auto: bf16 weights in bf16 and others in fp32; torch: what the CPU is fast in)",
        metavar="DTYPE",
    )
    device: str = _setting(
        "auto",
        parse_device,
        "what computes: cpu, cuda or cuda:N (auto: the first GPU, where there is one and CuPy is installed)",
        metavar="DEVICE",
    )
    kernel_dir: str | None = _setting(
        None,
        _text,
        "folder with kernels that were compiled for a GPU, so that none is at the start",
        metavar="DIR",
    )
    threads: int | None = _setting(
        None, _integer(1, 1024), "threads that compute (default: the cores at hand)"
    )
    trim_imports: bool = _setting(
        False,
        _flag,
        "leave out of torch what only tracing needs (torch.compile, meta tensors): starts 0.2 s sooner",
    )
    # ONNX models
    ort_providers: str | None = _setting(
        None,
        _names("cpu", "openvino", "cuda", "tensorrt"),
        "what computes an ONNX model once it is loaded, in order of preference, with commas: cpu, openvino, cuda, "
        "tensorrt (default: cpu)",
        metavar="NAMES",
    )
    ort_batch: int = _setting(
        8,
        _integer(1, 4096),
        "most rows of an ONNX model's batch dimension that calls share a run with; 1: calls run alone",
    )
    # Standby processes
    standby: int = _setting(
        0, _integer(0, 256), "processes to keep that have imported everything and hold no model", metavar="N"
    )
    standby_socket: str | None = _setting(
        None,
        _text,
        "local socket of a standby pool: serve from a process of it, if one is there",
        metavar="PATH",
    )
    # Batch jobs that events start
    batch_output: str | None = _setting(
        None,
        _template("account", "bucket", "key", "etag", required="key"),
        "where a job writes whose event names only its input: s3://results/{bucket}/{key}/{etag}.jsonl",
        metavar="ADDRESS",
    )
    batch_answers: str | None = _setting(
        None,
        _template("queue", "id", required="id"),
        "where the answers to single requests from a queue go: s3://answers/{queue}/{id}.json",
        metavar="ADDRESS",
    )
    # Requests and shutdown
    max_body_bytes: int = _setting(8 << 20, parse_bytes, "largest request body", metavar="SIZE")
    request_timeout_s: float = _setting(
        600.0, _seconds(0.1, 86_400), "longest time for one request", metavar="SECONDS"
    )
    drain_timeout_s: float | None = _setting(
        None,
        _seconds(0, 3_600),
        "time for running requests at shutdown (default: what the platform allows, 8 s where none is known)",
        metavar="SECONDS",
    )
    lambda_streaming: bool = _setting(
        False,
        _flag,
        "on AWS Lambda, stream answers: for function URLs with InvokeMode RESPONSE_STREAM",
    )
    emf: bool = _setting(
        False, _flag, "figures of requests and starts for CloudWatch, one JSON line each on standard output"
    )
    otel: bool = _setting(False, _flag, "export OpenTelemetry spans of requests, as the OTEL_* variables say")
    log_format: str = _setting("text", _choice("text", "json"), "a line as text, or as a JSON object")
    log_level: str = _setting("info", _choice(*_LOG_LEVELS), "debug, info, warning or error")

    def __init__(self, **values: Any) -> None:
        """Make a configuration with these values and defaults; they are valid, or come from
        `resolve`.
        """
        if unknown := values.keys() - SETTINGS.keys():
            raise TypeError(f"there are no settings {', '.join(sorted(unknown))}")
        for name, setting in SETTINGS.items():
            object.__setattr__(self, name, values.get(name, setting.default))

    def replace(self, **changes: Any) -> Self:
        """A copy with these changes."""
        return type(self)(**self.as_dict() | changes)

    def as_dict(self) -> dict[str, Any]:
        """The arguments that make an equal configuration."""
        return dict(vars(self))

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"a configuration is immutable: {name}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"a configuration is immutable: {name}")

    def __eq__(self, other: object) -> bool:
        return vars(self) == vars(other) if isinstance(other, ServeConfig) else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(vars(self).values()))

    def __repr__(self) -> str:
        shown = (f"{name}={value!r}" for name, value in vars(self).items() if not SETTINGS[name].secret)
        return f"ServeConfig({', '.join(shown)})"

    @property
    def source_options(self) -> SourceOptions:
        return SourceOptions(
            endpoint_url=self.endpoint_url,
            region=self.region,
            profile=self.profile,
            addressing_style=self.addressing_style,
            anonymous=self.anonymous,
            requester_pays=self.requester_pays,
            base=self.base,
            max_connections=self.connections,
            read_timeout_s=self.read_timeout_s,
            outage_s=self.outage_s,
            hedge_after_s=self.hedge_after_s,
            min_rate_bytes_s=self.min_rate_bytes_s,
        )

    @property
    def load_options(self) -> LoadOptions:
        return LoadOptions(
            connections=self.connections,
            staging_bytes=self.staging_bytes,
            reserved_bytes=(self.kv_bytes or 0) + (self.kv_host_bytes or 0),
            serving_bytes=SERVING_BYTES,
            order=Order.AUTO if self.draft_ahead else Order.EXACT,
            ready_s=READY_S,
            sends_drafts=self.first_token != "exact",  # noqa: S105 - not that kind of token
            rows_on_demand=True,
            cache_dir=self.cache_dir,
            cache_bytes=self.cache_bytes,
        )

    @property
    def served_name(self) -> str:
        """The model's name for clients: `name`, or the last part of the address without its pin."""
        if self.name:
            return self.name
        address = self.model.partition("@b3:")[0].partition("?")[0].rstrip("/")
        return address.rpartition("/")[2] or "model"


SETTINGS = {name: value for name, value in vars(ServeConfig).items() if isinstance(value, Setting)}


def resolve(
    flags: Mapping[str, Any],
    environment: Mapping[str, str],
    config_file: str | Path | None = None,
    *,
    platform_variables: Sequence[tuple[str, str]] = (),
    defaults: Callable[[Mapping[str, Any]], Mapping[str, Any]] = lambda _: {},
) -> ServeConfig:
    """Make the configuration. `flags` holds only the values given on the command line, by field
    name.

    `platform_variables` are a platform's variables and their settings; of two for one setting the
    later one counts, and `TENERAL_*` overrides both. `defaults` returns further settings, derived
    from the given ones. Raises `UsageError`, naming the unknown or invalid flag, variable or key.
    """
    path = config_file or environment.get(PREFIX + "CONFIG")
    values: dict[str, Any] = {}
    if path:
        values.update(_from_file(path))
    for variable, name in platform_variables:
        if (
            environment.get(variable) and PREFIX + name.upper() not in environment
        ):  # our own variable takes precedence
            values[name] = _parse(name, environment[variable], variable)
    values.update(_from_environment(environment))
    for name, value in flags.items():
        values[name] = _parse(name, value, f"--{name.replace('_', '-')}")
    values.update(defaults(values))
    if not values.get("model"):
        raise UsageError(
            "no model was named",
            key="model",
            hint="Name an artifact or a model directory: teneral serve s3://bucket/models/my-model",
        )
    return ServeConfig(**values)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and variable != PREFIX + "CONFIG":
            name = variable.removeprefix(PREFIX).lower()
            if name not in SETTINGS:
                raise _unknown(variable, [PREFIX + known.upper() for known in SETTINGS])
            values[name] = _parse(name, value, variable)
    return values


def _from_file(path: str | Path) -> dict[str, Any]:
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_CONFIG_FILE_BYTES + 1)
    except OSError as error:
        raise UsageError(
            f"cannot read the configuration file {path}: {error.strerror}", key="config"
        ) from error
    if len(data) > MAX_CONFIG_FILE_BYTES:
        raise UsageError(
            f"the configuration file {path} is larger than {MAX_CONFIG_FILE_BYTES} bytes", key="config"
        )
    import tomllib  # rarely used

    try:
        table = tomllib.loads(data.decode("utf-8"))
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the configuration file {path} is not TOML: {error}", key="config") from error
    values = {}
    for key, value in table.items():
        if key not in SETTINGS:
            raise _unknown(f"{path}: {key}", list(SETTINGS), key)
        values[key] = _parse(key, value, f"{path}: {key}")
    return values


def _parse(name: str, value: Any, key: str) -> Any:
    setting = SETTINGS[name]
    try:
        return setting.parse(value)
    except ValueError as error:
        shown = "(a secret)" if setting.secret else repr(value)
        raise UsageError(f"{key} {error}; it is {shown}", key=key, hint=f"{key}: {setting.help}.") from None


def _unknown(key: str, known: list[str], written: str | None = None) -> UsageError:
    import difflib  # only for an error message

    near = difflib.get_close_matches(written or key, known, n=1)
    return UsageError(f"unknown setting {key}", key=key, hint=f"Did you mean {near[0]}?" if near else "")
