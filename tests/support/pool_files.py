"""Random pool files that are valid on a platform, as texts; and rendering for tests."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from teneral.handlers.pool.file import parse_pool
from teneral.handlers.pool.values import Pool
from teneral.infra.render.documents import Options
from teneral.infra.render.limits import FILES_IN_MEMORY, LIMITS, MAX_VERSIONS, ONLY_SCRATCH
from teneral.infra.render.render import Rendered, render

DIGEST = "0123456789abcdef" * 4
IMAGE = f"123456789012.dkr.ecr.eu-central-1.amazonaws.com/teneral@sha256:{DIGEST}"
# One model, as little of it as there can be; and the same in two versions.
PLAIN = f"""
version = 1
[models.m]
source = "s3://bucket/m"
min_warm = 1
[instance]
image = "{IMAGE}"
cpu = 2
memory = "4GiB"
"""
VERSIONED = PLAIN.replace(
    '"s3://bucket/m"', '"s3://bucket/m/{version}"\nversions = [7, 8]\ntraffic = { "7" = 90, "8" = 10 }'
)
OPTIONS = Options(project="my-project")
SIZES = [(1, "2GiB"), (2, "4GiB"), (2, "8GiB"), (4, "8GiB"), (8, "16GiB")]  # that every platform has
NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,60}[A-Za-z0-9])?", fullmatch=True)
WARM_ONLY = ("fargate",)  # nothing holds a request there
VERSIONS_WARM = ("kubernetes", "helm", "sagemaker", *WARM_ONLY)  # several versions need an instance each


def toml(value: Any) -> str:
    """A pool file as nested dicts, in TOML."""
    lines: list[str] = []
    _table(value, (), lines)
    return "\n".join(lines) + "\n"


def _table(table: dict[str, Any], path: tuple[str, ...], lines: list[str]) -> None:
    if path:
        lines.append(f"[{'.'.join(map(json.dumps, path))}]")
    nested = {key: value for key, value in table.items() if isinstance(value, dict) and len(path) < 2}
    lines += [f"{json.dumps(key)} = {_inline(value)}" for key, value in table.items() if key not in nested]
    for key, value in nested.items():
        _table(value, (*path, key), lines)


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{json.dumps(key)} = {_inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    return json.dumps(value)


def render_text(text: str, platform: str) -> Rendered:
    return render(parse_pool(text, "pool.toml"), platform, options=OPTIONS)


def parsed(value: dict[str, Any]) -> Pool:
    return parse_pool(toml(value), "pool.toml")


def bound(platform: str, key: str, low: float, high: float) -> tuple[float, float]:
    """A key's own range, narrowed to the platform's."""
    for limit in LIMITS[platform]:
        if limit.key == key:
            low, high = max(low, limit.low), min(high, limit.high)
    return low, high


@st.composite
def pool_files(draw: st.DrawFn, platform: str) -> str:
    names = draw(st.lists(NAMES, min_size=1, max_size=3, unique_by=str.lower))
    cpu, memory = draw(
        st.sampled_from([size for size in SIZES if size[1] != "16GiB" or platform != "lambda"])
    )
    instance: dict[str, Any] = {"image": IMAGE, "cpu": cpu, "memory": memory}
    return toml(
        {
            "version": 1,
            "instance": instance,
            "models": {name: draw(models(platform)) for name in names},
        }
    )


@st.composite
def models(draw: st.DrawFn, platform: str) -> dict[str, Any]:
    """Any of the model's keys, within what the platform can do."""

    def whole(key: str, low: int, high: int) -> int:
        low, high = map(int, bound(platform, key, low, high))
        return draw(st.integers(low, high))

    def seconds(key: str, low: float, high: float) -> float:
        low, high = bound(platform, key, low, high)
        return round(draw(st.floats(low, high, allow_nan=False)), 3)

    versioned = MAX_VERSIONS[platform] > 1 and draw(st.booleans())
    least = 1 if platform in WARM_ONLY or (versioned and platform in VERSIONS_WARM) else 0
    target = draw(st.integers(1, 200))
    model: dict[str, Any] = {
        "source": draw(
            st.sampled_from(["s3://bucket/models/m", f"s3://bucket/m@b3:{DIGEST}", "https://example.com/m"])
        ),
        "min_warm": draw(st.integers(least, 3)),
        "max_instances": draw(st.integers(4, 50)),
        "target_concurrency": target,
        "max_concurrency": whole("max_concurrency", target, 1000),
        "ready_when": draw(st.sampled_from(["first-layer", "exact"])),
    }
    optional = {
        "buffer": st.just(draw(st.integers(0, 1))),
        "idle_timeout_s": st.just(seconds("idle_timeout_s", 1, 86_400)),
        "queue_timeout_s": st.just(seconds("queue_timeout_s", 0.1, 600)),
        "request_timeout_s": st.just(seconds("request_timeout_s", 60, 3600)),
        "drain_s": st.just(seconds("drain_s", 1, 60)),
        "priority": st.integers(-100, 100),
        "serve": st.just(draw(serve_tables(platform))),
    }
    model |= {key: draw(value) for key, value in optional.items() if draw(st.booleans())}
    if versioned:
        model["source"] = "s3://bucket/models/m/{version}"
        count = draw(st.integers(2, MAX_VERSIONS[platform]))
        first = draw(st.integers(1, 20))
        weight = draw(st.integers(1, 100 - count))
        rest = [1] * (count - 2)
        weights = [weight, *rest, 100 - weight - len(rest)]
        model["traffic"] = {str(first + number): weights[number] for number in range(count)}
        if draw(st.booleans()) and count < MAX_VERSIONS[platform]:
            model["shadow"] = {"version": first + count, "percent": draw(st.integers(1, 100))}
            count += 1
        model["versions"] = list(range(first, first + count))
    return model


@st.composite
def serve_tables(draw: st.DrawFn, platform: str) -> dict[str, Any]:
    table: dict[str, Any] = {}
    if draw(st.booleans()):
        table["api_key_env"] = "MY_KEY"
    if draw(st.booleans()):
        table |= {"kv_snapshot": "s3://bucket/kv", "kv_bytes": "512MiB"}
    if draw(st.booleans()):
        folder = "/tmp/teneral" if platform in ONLY_SCRATCH else "/var/cache/teneral"
        table |= {"cache_dir": folder, "cache_bytes": "1GiB" if platform in FILES_IN_MEMORY else "4GiB"}
    if draw(st.booleans()):
        table["handler"] = draw(st.sampled_from(["app.py:handler", 'quote"d: #x', "päckage.mod:händler"]))
    return table
