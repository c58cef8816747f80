from __future__ import annotations

from pathlib import Path

import pytest

from teneral.handlers import platforms
from teneral.handlers.platforms.settings import resolve
from teneral.loader.errors import UsageError


def test_the_platforms_port_is_taken_unless_ours_is_set() -> None:
    assert resolve({"model": "m"}, {"PORT": "8081"}).port == 8081
    assert resolve({"model": "m"}, {"PORT": "8081", "TENERAL_PORT": "9000"}).port == 9000
    assert resolve({"model": "m"}, {"PORT": "8081", "SAGEMAKER_BIND_TO_PORT": "8083"}).port == 8083
    assert resolve({"model": "m"}, {"PORT": "80", "PORT_HEALTH": "81"}).health_port == 81
    assert resolve({"model": "m"}, {"PORT": "", "PORT_HEALTH": ""}).health_port is None


def test_the_folder_that_sagemaker_fills_is_the_model_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        row._replace(model_folder=str(tmp_path)) if row.model_folder else row for row in platforms.PLATFORMS
    ]
    monkeypatch.setattr(platforms, "PLATFORMS", tuple(rows))
    with pytest.raises(UsageError, match="no model was named"):  # an empty folder says nothing
        resolve({}, {})
    assert resolve({}, {"TENERAL_PLATFORM": "sagemaker"}).model == str(tmp_path)
    (tmp_path / "config.json").touch()
    found = resolve({}, {})
    assert (found.model, found.platform) == (str(tmp_path), "sagemaker")
    assert resolve({"platform": "http"}, {}).platform == "http"
    assert resolve({}, {"TENERAL_MODEL": "s3://bucket/m"}).model == "s3://bucket/m"
    (tmp_path / "config.json").rename(tmp_path / "manifest.json")
    assert resolve({}, {}).model == str(tmp_path)


@pytest.mark.parametrize("variable", ["PORT", "PORT_HEALTH"])
def test_a_platforms_variable_is_refused_by_its_own_name(variable: str) -> None:
    with pytest.raises(UsageError, match=variable) as caught:
        resolve({"model": "m"}, {variable: "abc"})
    assert caught.value.key == variable
