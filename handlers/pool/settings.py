"""The configuration of one instance on this machine, from the pool file and the environment."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...runtime.config import PREFIX, ServeConfig
from .codes import Code
from .memory import DEFAULT_KV_BYTES
from .repository import Release
from .values import Model, Pool


def instance_config(
    pool: Pool,
    model: Model,
    release: Release,
    state_folder: Path,
    environment: Mapping[str, str],
    *,
    log_format: str = "text",
) -> ServeConfig:
    """Settings of a release's instances. What was computed is kept below `state_folder` when one ends; logs have
    `log_format` unless the file says another.

    Raises `PoolFileError` where a secret's variable is not set.
    """
    settings = model.serve_settings()
    for name, variable in model.secrets.items():
        if not environment.get(variable):
            place = ("models", model.name, "serve", f"{name}_env")
            raise pool.error(Code.E2, f"names the variable {variable}, which is not set", *place)
        settings[name] = environment[variable]
    settings.setdefault("log_format", log_format)
    settings.setdefault("kv_bytes", DEFAULT_KV_BYTES)
    version = "" if release.version is None else f"@{release.version}"
    settings.setdefault("kv_snapshot_sessions", True)
    settings.setdefault("kv_snapshot", str(state_folder / "kv" / f"{model.name}{version}"))
    return ServeConfig(model=release.address, platform="http", **settings)


def inherited_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of instances: everything except server settings, which come from the file."""
    return {name: value for name, value in environment.items() if not name.startswith(PREFIX)}
