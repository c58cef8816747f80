"""Settings from a platform: its variables for ports, and the folder of its model.

`runtime/config.py` knows no platform; this module passes the rows of `platforms/__init__.py` to it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...runtime import resolve as configuration
from ...runtime.config import ServeConfig
from .. import platforms

if TYPE_CHECKING:
    from pathlib import Path


def resolve(
    flags: Mapping[str, Any], environment: Mapping[str, str], config_file: str | Path | None = None
) -> ServeConfig:
    """`runtime.resolve.resolve` with the platforms' settings. Their variables override the file, and
    are overridden by ours.

    Raises `UsageError`, naming the unknown or invalid flag, variable or key.
    """
    variables = tuple(pair for row in platforms.PLATFORMS for pair in row.variables)

    def defaults(settings: Mapping[str, Any]) -> Mapping[str, Any]:
        found = _model_folder(settings)
        platform = found.get("platform", settings.get("platform", platforms.AUTO))
        if not platforms.is_hosted(environment, platform):
            return found
        return {"host": platforms.EVERY_ADDRESS, "allowed_hosts": "*"} | dict(settings) | dict(found)

    return configuration.resolve(
        flags, environment, config_file, platform_variables=variables, defaults=defaults
    )


def _model_folder(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """The model of a container that was started without one, if its platform supplies one.

    With `--platform auto` the folder must contain a model, and the platform is then the folder's.
    """
    if settings.get("model"):
        return {}
    named = settings.get("platform", platforms.AUTO)
    for row in platforms.PLATFORMS:
        if not row.model_folder:
            continue
        if row.name == named:
            found = os.path.isdir(row.model_folder)
        else:
            found = any(
                os.path.isfile(os.path.join(row.model_folder, name)) for name in platforms.MODEL_SIGNS
            )
        if found:
            return {"model": row.model_folder} | ({"platform": row.name} if named == platforms.AUTO else {})
    return {}
