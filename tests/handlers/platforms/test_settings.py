from __future__ import annotations

from pathlib import Path

import pytest

from teneral.handlers import platforms
from teneral.handlers.platforms import resolve_settings
from teneral.loader.errors import UsageError


def test_the_platforms_port_is_taken_unless_ours_is_set() -> None:
    assert resolve_settings({"model": "m"}, {"PORT": "8081"}).port == 8081
    assert resolve_settings({"model": "m"}, {"PORT": "8081", "TENERAL_PORT": "9000"}).port == 9000
    assert resolve_settings({"model": "m"}, {"PORT": "8081", "SAGEMAKER_BIND_TO_PORT": "8083"}).port == 8083
    assert resolve_settings({"model": "m"}, {"PORT": "80", "PORT_HEALTH": "81"}).health_port == 81
    assert resolve_settings({"model": "m"}, {"PORT": "", "PORT_HEALTH": ""}).health_port is None


def test_the_folder_that_sagemaker_fills_is_the_model_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [
        row._replace(model_folder=str(tmp_path)) if row.model_folder else row for row in platforms.PLATFORMS
    ]
    monkeypatch.setattr(platforms, "PLATFORMS", tuple(rows))
    with pytest.raises(UsageError, match="no model was named"):  # an empty folder says nothing
        resolve_settings({}, {})
    assert resolve_settings({}, {"TENERAL_PLATFORM": "sagemaker"}).model == str(tmp_path)
    (tmp_path / "config.json").touch()
    found = resolve_settings({}, {})
    assert (found.model, found.platform) == (str(tmp_path), "sagemaker")
    assert resolve_settings({"platform": "http"}, {}).platform == "http"
    assert resolve_settings({}, {"TENERAL_MODEL": "s3://bucket/m"}).model == "s3://bucket/m"
    (tmp_path / "config.json").rename(tmp_path / "manifest.json")
    assert resolve_settings({}, {}).model == str(tmp_path)


@pytest.mark.parametrize("variable", ["PORT", "PORT_HEALTH"])
def test_a_platforms_variable_is_refused_by_its_own_name(variable: str) -> None:
    with pytest.raises(UsageError, match=variable) as caught:
        resolve_settings({"model": "m"}, {variable: "abc"})
    assert caught.value.key == variable


HOSTED = (
    {"K_SERVICE": "chat", "PORT": "9090"},
    {"PORT": "9090"},
    {"KUBERNETES_SERVICE_HOST": "10.0.0.1"},
    {"ECS_CONTAINER_METADATA_URI_V4": "http://169.254.170.2/v4/x"},
    {"RUNPOD_ENDPOINT_ID": "x"},
    {"SAGEMAKER_BIND_TO_PORT": "8081"},
    {"TENERAL_PLATFORM": "kserve"},
    {"TENERAL_PLATFORM": "sagemaker"},
)


def test_a_persons_machine_listens_for_itself_alone() -> None:
    config = resolve_settings({"model": "m"}, {})
    assert (config.host, config.allowed_hosts) == ("127.0.0.1", None)
    assert resolve_settings({"model": "m"}, {"TENERAL_HOST": "0.0.0.0"}).host == "0.0.0.0", "the image"
    assert platforms.default_host({}) == "127.0.0.1", "of a pool"


@pytest.mark.parametrize("environment", HOSTED, ids=str)
def test_a_platform_reaches_the_server_by_any_name(environment: dict[str, str]) -> None:
    config = resolve_settings({"model": "m"}, environment)
    assert (config.host, config.allowed_hosts) == ("0.0.0.0", "*")
    own = resolve_settings(
        {"model": "m", "host": "10.0.0.2"}, {**environment, "TENERAL_ALLOWED_HOSTS": "chat.example.com"}
    )
    assert (own.host, own.allowed_hosts) == ("10.0.0.2", "chat.example.com")


def test_the_folder_of_a_platforms_model_is_its_sign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text("{}")
    rows = [
        row._replace(model_folder=str(tmp_path)) if row.model_folder else row for row in platforms.PLATFORMS
    ]
    monkeypatch.setattr(platforms, "PLATFORMS", tuple(rows))
    config = resolve_settings({}, {})
    assert (config.platform, config.host, config.allowed_hosts) == ("sagemaker", "0.0.0.0", "*")
