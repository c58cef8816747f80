"""One configuration from flags, environment and a file; every error names the key as it was written."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest

from teneral.loader.errors import UsageError
from teneral.loader.sources.base import SourceOptions
from teneral.runtime.config import SETTINGS, ServeConfig
from teneral.runtime.resolve import keyword_values, resolve
from teneral.runtime.setting import parse_bytes


def test_flags_win_over_the_environment_over_the_file_over_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "teneral.toml"
    file.write_text('model = "s3://bucket/a"\nport = 1\nconnections = 3\nmax_queued = 7\n')
    config = resolve({"port": "9"}, {"TENERAL_CONNECTIONS": "5", "TENERAL_PORT": "2", "HOME": "/"}, file)
    assert (config.model, config.port, config.connections, config.max_queued) == ("s3://bucket/a", 9, 5, 7)
    assert config.max_running == ServeConfig().max_running


def test_the_variable_of_the_native_library_is_no_setting() -> None:
    assert resolve({"model": "/m"}, {"TENERAL_ISA": "x86_64_v3"}).model == "/m"


def test_the_environment_can_name_the_file(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('model = "m"\n')
    assert resolve({}, {"TENERAL_CONFIG": str(file)}).model == "m"


@pytest.mark.parametrize(
    ("flags", "environment", "named"),
    [
        ({"port": "70000"}, {}, "--port"),
        ({"port": "x"}, {}, "--port"),
        ({"port": True}, {}, "--port"),
        ({"kv_bytes": "-1"}, {}, "--kv-bytes"),
        ({"kv_bytes": "12 parsecs"}, {}, "--kv-bytes"),
        ({"request_timeout_s": "nan"}, {}, "--request-timeout-s"),
        ({"max_wait_s": "-0.1"}, {}, "--max-wait-s"),
        ({}, {"TENERAL_MAX_WAIT_S": "soon"}, "TENERAL_MAX_WAIT_S"),
        ({"addressing_style": "weird"}, {}, "--addressing-style"),
        ({"look_ahead": "65"}, {}, "--look-ahead"),
        ({"look_ahead": "on"}, {}, "--look-ahead"),
        ({}, {"TENERAL_LOOK_AHEAD": "-1"}, "TENERAL_LOOK_AHEAD"),
        ({}, {"TENERAL_PORT": "-1"}, "TENERAL_PORT"),
        ({}, {"TENERAL_ANONYMOUS": "maybe"}, "TENERAL_ANONYMOUS"),
        ({}, {"TENERAL_MAX_QUEUE": "3"}, "TENERAL_MAX_QUEUE"),
    ],
)
def test_an_invalid_value_is_refused_by_name(
    flags: dict[str, object], environment: dict[str, str], named: str
) -> None:
    with pytest.raises(UsageError) as caught:
        resolve({"model": "m"} | flags, environment)
    assert named in caught.value.message


def test_an_unknown_key_of_the_file_is_refused_with_the_nearest_known_one(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('model = "m"\nmax_queue = 3\n')
    with pytest.raises(UsageError, match="max_queue") as caught:
        resolve({}, {}, file)
    assert "max_queued" in caught.value.hint


@pytest.mark.parametrize("content", [b"model = ", b"\xff\xfe", b"[model]\nx = 1\n", b"#" * (1 << 21)])
def test_a_damaged_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "x.toml"
    file.write_bytes(content)
    with pytest.raises(UsageError, match=r"x\.toml"):
        resolve({}, {}, file)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"nowhere\.toml"):
        resolve({}, {}, tmp_path / "nowhere.toml")


def test_a_model_must_be_named() -> None:
    with pytest.raises(UsageError, match="no model") as caught:
        resolve({}, {})
    assert "teneral serve" in caught.value.hint


def test_secrets_are_shown_neither_in_repr_nor_in_errors() -> None:
    config = resolve({"model": "m", "api_key": "sk-secret"}, {})
    assert "sk-secret" not in repr(config)
    with pytest.raises(UsageError) as caught:
        resolve({"model": "m", "api_key": "sk-secret\0"}, {})
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(("value", "found"), [("auto", "auto"), ("off", 0), (False, 0), ("7", 7), (64, 64)])
def test_look_ahead_is_automatic_off_or_a_number(value: object, found: object) -> None:
    assert resolve({"model": "m", "look_ahead": value}, {}).look_ahead == found


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("512MiB", 512 << 20),
        ("2 GB", 2 * 10**9),
        ("1.5gib", 3 << 29),
        ("4096", 4096),
        (77, 77),
        ("1kb", 1000),
    ],
)
def test_sizes_are_read_with_their_units(text: object, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["8Gb", "8 Gib", "1.5Mb", "512Kib"])
def test_sizes_in_bits_are_refused_with_what_is_meant(text):
    with pytest.raises(UsageError, match=r"may be bits; write .*B for bytes") as refused:
        resolve({"model": "m", "kv_bytes": text}, {})
    assert text.replace(" ", "").replace("b", "B") in str(refused.value)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("s3://bucket/models/llama", "llama"),
        ("s3://bucket/models/llama/@b3:" + "0" * 64, "llama"),
        ("./here/", "here"),
        ("https://host/a/b?x=y", "b"),
        ("/", "model"),
    ],
)
def test_a_model_is_served_under_the_last_part_of_its_address(model: str, name: str) -> None:
    assert ServeConfig(model=model).served_name == name
    assert ServeConfig(model=model, name="own").served_name == "own"


def test_every_setting_says_what_it_is_and_has_a_valid_default() -> None:
    for name, setting in SETTINGS.items():
        assert setting.help, name
        if setting.default not in (None, ""):
            assert setting.parse(setting.default) == setting.default, name


STORE_KNOBS = {"read_timeout_s": 2.5, "hedge_after_s": 0.5, "min_rate_bytes_s": 65_536}


@pytest.mark.parametrize("where", ["flags", "environment", "file"])
def test_what_a_faulty_store_is_met_with_is_read_from_everywhere_and_reaches_the_source(
    where: str, tmp_path: Path
) -> None:
    file = None
    if where == "file":
        file = tmp_path / "teneral.toml"
        file.write_text("".join(f"{name} = {value}\n" for name, value in STORE_KNOBS.items()))
    given = {name: str(value) for name, value in STORE_KNOBS.items()}
    flags = given if where == "flags" else {}
    variables = {f"TENERAL_{name.upper()}": value for name, value in given.items()}
    config = resolve({"model": "m"} | flags, variables if where == "environment" else {}, file)
    options = config.source_options
    assert {name: getattr(options, name) for name in STORE_KNOBS} == STORE_KNOBS


def test_what_a_faulty_store_is_met_with_has_the_sources_own_defaults() -> None:
    config, options = ServeConfig(model="m"), SourceOptions()
    assert [getattr(config, name) for name in STORE_KNOBS] == [getattr(options, name) for name in STORE_KNOBS]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("read_timeout_s", "0"),
        ("read_timeout_s", "601"),
        ("hedge_after_s", "-1"),
        ("hedge_after_s", "inf"),
        ("min_rate_bytes_s", "-1"),
        ("min_rate_bytes_s", "4k"),
    ],
)
def test_a_limit_that_no_store_can_be_held_to_is_refused_by_name(name: str, value: str) -> None:
    with pytest.raises(UsageError, match=f"TENERAL_{name.upper()}"):
        resolve({"model": "m"}, {f"TENERAL_{name.upper()}": value})


def test_a_configuration_is_a_frozen_value() -> None:
    config = ServeConfig(model="a", port=1, api_key="hidden")
    assert config == ServeConfig(port=1, model="a", api_key="hidden") != ServeConfig(model="a")
    assert config != "a"
    assert hash(config) == hash(config.replace())
    assert config.replace(port=2) == ServeConfig(model="a", port=2, api_key="hidden")
    assert config.port == 1
    assert ServeConfig(**config.as_dict()) == config == pickle.loads(pickle.dumps(config))
    assert config.as_dict().keys() == SETTINGS.keys()
    assert "model='a'" in repr(config)
    assert "hidden" not in repr(config)
    with pytest.raises(AttributeError, match="port"):
        config.port = 3
    with pytest.raises(AttributeError, match="port"):
        del config.port
    with pytest.raises(TypeError, match="prot"):
        ServeConfig(model="a", prot=1)
    with pytest.raises(TypeError, match="prot"):
        config.replace(prot=1)


def test_keyword_arguments_are_flags_by_name_and_none_is_the_default() -> None:
    values = keyword_values(
        Path("model"), {"kv_bytes": "1MiB", "look_ahead": "off", "threads": None, "cache_dir": Path("x")}
    )
    assert values == {"model": "model", "kv_bytes": 1 << 20, "look_ahead": 0, "cache_dir": "x"}
    config = resolve(values, {"TENERAL_THREADS": "3"})
    assert (config.kv_bytes, config.look_ahead, config.threads) == (1 << 20, 0, 3)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"kv_byte": 1}, "unknown setting kv_byte\n.*Did you mean kv_bytes?"),
        ({"max_running": 0}, "^max_running must be"),
    ],
)
def test_a_keyword_argument_that_is_unknown_or_invalid_is_refused(
    settings: dict[str, object], text: str
) -> None:
    with pytest.raises(UsageError, match=text):
        keyword_values("model", settings)
