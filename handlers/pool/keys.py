"""The keys of `pool.toml`: name, unit, range, default and meaning of each, as data.

`file.py` reads by these tables, `docs/pool.md` and the Helm schema are compared with them. Values are strict: TOML has
types, so the text "3" is not a number here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from ...loader.errors import UsageError
from ...runtime.setting import parse_bytes

FILE_VERSION = 1
PLATFORMS = (
    "knative",
    "kserve",
    "kubernetes",
    "helm",
    "cloud-run",
    "lambda",
    "sagemaker",
    "fargate",
    "ray",
    "kuberay",
)
MAX_TEXT_CHARS = 4096
MIN_SIZE_BYTES = 1 << 20  # of memory
MAX_VERSIONS = 16  # that are served at the same time
VERSION_NAME = re.compile(r"[1-9][0-9]{0,11}")
SERVED_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._/-]{0,126}[A-Za-z0-9])?")
ENVIRONMENT_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
# Settings of `serve` that are paths or addresses: relative to the pool file, as sources are.
PATH_SETTINGS = frozenset(
    {"adapters", "cache_dir", "chat_template", "kernel_dir", "kv_disk_dir", "kv_snapshot"}
)
# Settings of `teneral serve` that follow from the pool file and from nothing else.
POOL_SETTINGS = frozenset(
    {
        "model",
        "base",
        "name",
        "host",
        "port",
        "health_port",
        "platform",
        "key_limits",
        "max_queued",
        "request_timeout_s",
        "drain_timeout_s",
        "standby",
        "standby_socket",
    }
)

# Where to write such a setting instead.
POOL_HINTS = {
    "model": "Write source.",
    "base": "Write base of the model, above its serve table.",
    "key_limits": "Start the pool with --key-limits.",
    "max_queued": "Write max_concurrency.",
    "request_timeout_s": "Write request_timeout_s of the model, above its serve table.",
    "drain_timeout_s": "Write drain_s.",
    "standby": "Write standby below [node].",
}


class Key(NamedTuple):
    """One key. `parse` makes its value, or raises ValueError with what is allowed: 'must be …'."""

    parse: Callable[[Any], Any]
    default: Any
    unit: str
    help: str


REQUIRED: Any = object()  # the default of a key that has none


def integer(low: int, high: int) -> Callable[[Any], int]:
    def parse(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise ValueError(f"must be a whole number from {low:,} to {high:,}")
        return value

    return parse


def number(low: float, high: float, unit: str = "") -> Callable[[Any], float]:
    def parse(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
            raise ValueError(f"must be a number{unit} from {low:,g} to {high:,g}")
        return float(value)

    return parse


def seconds(low: float, high: float) -> Callable[[Any], float]:
    return number(low, high, " of seconds")


def text(value: Any) -> str:
    if (
        not isinstance(value, str)
        or not value.strip()
        or len(value) > MAX_TEXT_CHARS
        or not value.isprintable()
    ):
        raise ValueError(f"must be a text of 1 to {MAX_TEXT_CHARS:,} printable characters")
    return value


def choice(*allowed: str) -> Callable[[Any], str]:
    def parse(value: Any) -> str:
        if not isinstance(value, str) or value not in allowed:
            raise ValueError(f"must be one of {', '.join(allowed)}")
        return value

    return parse


def size(value: Any) -> int:
    """Of a key without a unit in its name: `memory = 4` is not what its writer means."""
    size_bytes = parse_bytes(value)
    if size_bytes < MIN_SIZE_BYTES:
        raise ValueError('must be at least 1 MiB, such as "8GiB": a number without a unit is in bytes')
    return size_bytes


def size_or_zero(value: Any) -> int:
    return 0 if value == 0 and not isinstance(value, bool) else size(value)


def event(value: Any) -> str:
    """The event of a pool's file, written as JSON. Raises `ValueError`."""
    try:
        written = json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise ValueError("must be a value of JSON, without dates and nan") from None
    if len(written) > MAX_TEXT_CHARS:
        raise ValueError(f"must be at most {MAX_TEXT_CHARS:,} characters of JSON")
    return written


def version_number(value: Any) -> int:
    """Of a version's name: a whole number without a leading zero."""
    if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 10**12:
        return value
    if isinstance(value, str) and VERSION_NAME.fullmatch(value):
        return int(value)
    raise ValueError("must name versions by whole numbers from 1, without leading zeros")


def table(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("must be a table")
    return value


def source(value: Any) -> str:
    """An address, with at most one `{version}`."""
    address = text(value)
    if address.count("{version}") > 1:
        raise ValueError("must contain {version} at most once")
    if set("{}") & set(address.replace("{version}", "")):
        raise ValueError("must contain no braces but those of {version}")
    return address


def base(value: Any) -> str:
    """An address without `{version}`: all versions of a model have the same base."""
    address = text(value)
    if set("{}") & set(address):
        raise ValueError("must contain no braces: it is the address of one artifact")
    return address


def versions(value: Any) -> Any:
    """A text, `{latest = N}` or a list, as `Versions` takes them."""
    if value in ("latest", "all"):
        return value
    if isinstance(value, dict) and set(value) == {"latest"}:
        return {"latest": integer(1, MAX_VERSIONS)(value["latest"])}
    if isinstance(value, list) and 1 <= len(value) <= MAX_VERSIONS:
        numbers = [version_number(item) for item in value]
        if len(set(numbers)) == len(numbers):
            return sorted(numbers)
    raise ValueError(
        f'must be "latest", "all", {{ latest = N }} with N from 1 to {MAX_VERSIONS}, or a list of different versions'
    )


def traffic(value: Any) -> dict[int, int]:
    """Weights by version."""
    if not isinstance(value, dict) or not 1 <= len(value) <= MAX_VERSIONS:
        raise ValueError(f"must be a table of 1 to {MAX_VERSIONS} versions and their weights")
    return {version_number(name): integer(0, 100)(weight) for name, weight in value.items()}


def shadow(value: Any) -> dict[str, int]:
    if not isinstance(value, dict) or set(value) != {"version", "percent"}:
        raise ValueError("must be a table with the keys version and percent")
    return {"version": version_number(value["version"]), "percent": integer(1, 100)(value["percent"])}


def device_of(serve: Mapping[str, Any]) -> str:
    """The GPU that a model's settings name, as "cuda:0"; '' for none."""
    device = str(serve.get("device", ""))
    return f"{device}:0" if device == "cuda" else device if device.startswith("cuda:") else ""


def check_devices(models: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """The faults of models' settings for devices: message, hint and place. `models` are the settings by name.

    An instance without a share would take all that is free of the device, and so others' shares.
    """
    sharing = {device_of(serve): name for name, serve in models.items() if "device_percent" in serve}
    for name, serve in models.items():
        device, place = device_of(serve), ("models", name, "serve")
        if not device and "device_percent" in serve:
            yield (
                "needs the device that is shared",
                'Write device = "cuda:0" as well.',
                (*place, "device_percent"),
            )
        elif device in sharing and "device_percent" not in serve and device:
            hint = "Write device_percent for each model of the device."
            yield f"is {device}, of which {sharing[device]} takes a share", hint, (*place, "device")


MODEL_KEYS: dict[str, Key] = {
    "source": Key(
        source, REQUIRED, "address", "artifact or model folder; {version} at most once; @b3: pins it"
    ),
    "base": Key(base, None, "address", "artifact that the source's holds differences to; @b3: pins it"),
    "versions": Key(
        versions, "latest", "", 'version folders that are served: "latest", {latest=N}, "all" or a list'
    ),
    "traffic": Key(
        traffic, None, "percent", "weights of versions for requests that name none (default: the newest)"
    ),
    "shadow": Key(
        shadow, None, "", "a version that gets copies of a percentage of requests; answers are dropped"
    ),
    "min_warm": Key(integer(0, 1000), 0, "instances", "least that are ready at all times"),
    "max_instances": Key(integer(1, 1000), 3, "instances", "most that run"),
    "buffer": Key(integer(0, 100), 0, "instances", "ready beyond what is busy, while anything is busy"),
    "idle_timeout_s": Key(
        seconds(1, 86_400), 300.0, "s", "time without a request until an instance above min_warm ends"
    ),
    "policy": Key(
        choice("fixed", "hybrid"),
        "fixed",
        "",
        "how long an idle instance is kept: that time, or as gaps show",
    ),
    "target_concurrency": Key(
        integer(1, 1024), 8, "requests", "requests in work for each of which an instance is wanted"
    ),
    "max_concurrency": Key(
        integer(1, 65_536), None, "requests", "most that an instance takes (default: 4 × target_concurrency)"
    ),
    "queue_timeout_s": Key(seconds(0.1, 600), 60.0, "s", "longest wait for an instance; then 503"),
    "request_timeout_s": Key(seconds(1, 3600), 300.0, "s", "longest time for a whole answer"),
    "drain_s": Key(seconds(1, 3600), None, "s", "from SIGTERM to the end (default: the platform's)"),
    "ready_when": Key(choice("first-layer", "exact"), "first-layer", "", "when an instance gets requests"),
    "priority": Key(integer(-100, 100), 0, "", "on one machine, the higher is evicted last"),
}
INSTANCE_KEYS: dict[str, Key] = {
    "image": Key(text, None, "", "container image; needed to render"),
    "cpu": Key(number(0.1, 1024), None, "cores", "cores of one instance; needed to render"),
    "memory": Key(size, None, "bytes", "memory of one instance; needed to render"),
    "gpu": Key(integer(0, 16), 0, "GPUs", "GPUs of one instance"),
    "example_event": Key(
        event, None, "", "an event of the image's function, which `deploy.sh call` sends (default: a prompt)"
    ),
}
NODE_KEYS: dict[str, Key] = {
    "memory": Key(
        size, None, "bytes", "memory of all instances on one machine (default: what the machine has free)"
    ),
    "standby": Key(integer(0, 256), 0, "processes", "standby processes kept ready"),
    "standby_memory": Key(size_or_zero, 0, "bytes", "memory that each of them takes ahead"),
    "standby_base": Key(
        base, None, "address", "packed artifact whose weights they have in memory, once; @b3: pins it"
    ),
}
SLO_KEYS: dict[str, Key] = {
    "ttft_p99_s": Key(seconds(0.001, 3600), None, "s", "objective of the first token's 99th percentile"),
}
PATCH_KEYS: dict[str, Key] = {
    "platform": Key(choice(*PLATFORMS), REQUIRED, "", "platform whose documents it changes"),
    "kind": Key(text, REQUIRED, "", "kind of the document"),
    "name": Key(text, None, "", "metadata.name of the document (default: each of this kind)"),
    "merge": Key(table, REQUIRED, "", "JSON merge patch (RFC 7386)"),
}
TOP_KEYS = ("version", "defaults", "models", "aliases", "instance", "node", "slo", "patch")
MODEL_TABLES = ("pins", "serve", "instance")  # tables below [models.X]


def check_page_setting(name: str, value: Any) -> None:
    """Raise `ValueError` for names of hosts or origins that the pool's own port could not obey."""
    if name not in ("allowed_hosts", "cors_origin"):
        return
    from ..http.web_pages import parse_hosts, parse_origins  # lazy: brings aiohttp along

    try:
        (parse_hosts if name == "allowed_hosts" else parse_origins)(value)
    except UsageError as error:
        raise ValueError(error.message.removeprefix(f"{name} ")) from None
