"""The configuration of an instance, made once from flags, environment and a TOML file.

Flags override the environment, the environment overrides the file, the file overrides the defaults.
Unknown keys are errors, and every error names the key as the user wrote it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..loader.errors import UsageError
from ..loader.sources.open import model_address
from .config import PREFIX, SETTINGS, ServeConfig

if TYPE_CHECKING:
    from pathlib import Path

MAX_CONFIG_FILE_BYTES = 1 << 20
NO_SETTINGS = (
    PREFIX + "CONFIG",
    PREFIX + "ISA",
)  # the second is the native library's (loader/native/library.py)


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
        values[name] = parse_flag(name, value)
    values.update(defaults(values))
    for name in ("model", "base"):
        if values.get(name):
            values[name] = model_address(values[name])
    if not values.get("model"):
        raise UsageError(
            "no model was named",
            key="model",
            hint="Name an artifact or a model directory: teneral serve s3://bucket/models/my-model",
        )
    return ServeConfig(**values)


def keyword_values(model: str | os.PathLike[str], settings: Mapping[str, Any]) -> dict[str, Any]:
    """The `flags` of `resolve` for a program's call with keyword arguments, of which None is the default. Raises
    `UsageError`, naming the unknown or invalid one.
    """
    values: dict[str, Any] = {}
    for name, value in {"model": model, **settings}.items():
        if name not in SETTINGS:
            raise _unknown(name, list(SETTINGS))
        if value is not None:
            values[name] = _parse(name, os.fspath(value) if isinstance(value, os.PathLike) else value, name)
    return values


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for variable, value in environment.items():
        if variable.startswith(PREFIX) and variable not in NO_SETTINGS:
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


def parse_flag(name: str, value: Any) -> Any:
    """The value of a setting that was given as a flag. Raises `UsageError`, which names that."""
    return _parse(name, value, f"--{name.replace('_', '-')}")


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
