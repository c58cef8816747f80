"""One setting has one default: the rooms' options, used without a configuration, have that of the table."""

from __future__ import annotations

from typing import Any

import pytest

from teneral.handlers.http.limits import Limits
from teneral.loader.load.options import LoadOptions
from teneral.loader.sources.base import SourceOptions
from teneral.runtime.config import SETTINGS, ServeConfig
from teneral.runtime.engine.options import EngineOptions

# The engine has numbers where the table says "auto" or names, and no default for the pool.
OWN = {"kv_dtype", "look_ahead", "kv_bytes", "kv_host_bytes", "kv_disk_bytes"}


@pytest.mark.parametrize("kind", [SourceOptions, LoadOptions, EngineOptions, Limits])
def test_options_have_the_defaults_of_the_settings_of_these_names(kind: Any) -> None:
    needed = {"kv_bytes": 1} if kind is EngineOptions else {}
    own, config = kind(**needed), ServeConfig(model="m")
    names = getattr(kind, "_fields", ()) or kind.__struct_fields__
    shared = set(names) & set(SETTINGS) - OWN
    assert len(shared) >= 2
    assert {name: getattr(own, name) for name in shared} == {name: getattr(config, name) for name in shared}


def test_the_bounds_of_a_server_by_default_are_those_of_its_limits() -> None:
    assert Limits.from_config(ServeConfig(model="m")) == Limits()
