"""`pool.toml`: what it describes, and the code, line and words of everything that can be wrong with it."""

from __future__ import annotations

import json
import random
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from teneral import cli
from teneral.handlers.pool import keys
from teneral.handlers.pool.file import MAX_FILE_BYTES, parse_pool, read_pool
from teneral.handlers.pool.process import inherited_environment, standby_flags
from teneral.handlers.pool.values import (
    Code,
    InstanceSize,
    KeyLines,
    PoolFileError,
    PoolWarning,
    Shadow,
    Versions,
)
from teneral.runtime.config import ServeConfig

EXAMPLE = """\
version = 1

[defaults]                      # any key of [models.*], and [instance]'s
idle_timeout_s = 60
cpu = 1.5

[models.my-model]
source = "s3://bucket/models/my-model"
min_warm = 1
max_instances = 4
buffer = 1
target_concurrency = 8

[models.helper]                 # several versions
source = "s3://bucket/models/helper/{version}"
versions = { latest = 2 }
traffic = { "7" = 90, "8" = 10 }
[models.helper.pins]
"7" = "PIN"
[models.helper.serve]
max_running = 4
api_key_env = "HELPER_KEY"
[models.helper.instance]
memory = "8GiB"

[aliases]
assistant = "my-model"
split = { my-model = 25, "helper@8" = 75 }

[instance]
image = "registry/teneral@sha256:0"
memory = "4GiB"

[node]
memory = "16GiB"
standby = 2
standby_memory = "1GiB"

[slo]
ttft_p99_s = 2.0

[[patch]]
platform = "knative"
kind = "Service"
merge = { metadata = { labels = { team = "search" } } }
""".replace("PIN", "ab" * 32)


def refused(text: str) -> PoolFileError:
    with pytest.raises(PoolFileError) as caught:
        parse_pool(text)
    return caught.value


def test_a_file_is_read_with_defaults_and_overrides_applied() -> None:
    pool = parse_pool(EXAMPLE)
    model, helper = pool.models["my-model"], pool.models["helper"]
    assert (model.min_warm, model.max_instances, model.buffer, model.max_concurrency) == (1, 4, 1, 32)
    assert model.idle_timeout_s == helper.idle_timeout_s == 60
    assert "idle_timeout_s" in model.given
    assert "priority" not in model.given
    assert helper.versions == Versions(latest=2)
    assert helper.traffic == {7: 90, 8: 10}
    assert helper.address(7) == f"s3://bucket/models/helper/7@b3:{'ab' * 32}"
    assert helper.address(8) == "s3://bucket/models/helper/8"
    assert helper.secrets == {"api_key": "HELPER_KEY"}
    assert model.instance == InstanceSize("registry/teneral@sha256:0", 1.5, 4 << 30, 0)
    assert helper.instance.memory_bytes == 8 << 30
    assert pool.aliases["split"] == {"my-model": 25, "helper@8": 75}
    assert (pool.node.memory_bytes, pool.node.standby, pool.node.standby_memory_bytes) == (
        16 << 30,
        2,
        1 << 30,
    )
    assert pool.slo.ttft_p99_s == 2.0
    assert pool.patches[0].merge == {"metadata": {"labels": {"team": "search"}}}


def test_the_settings_of_an_instance_are_those_of_serve() -> None:
    helper = parse_pool(EXAMPLE).models["helper"]
    settings = helper.serve_settings()
    assert settings["max_running"] + settings["max_queued"] == helper.max_concurrency == 32
    assert ServeConfig(model="m", **settings).max_running == 4
    assert helper.serve_environment()["TENERAL_MAX_QUEUED"] == "28"


def test_instances_inherit_all_but_the_settings_which_are_the_file_s() -> None:
    own = {"PATH": "/bin", "TENERAL_ISA": "x86_64_v3"}
    settings = {"TENERAL_API_KEY": "key", "TENERAL_THREADS": "2", "TENERAL_CONFIG": "server.toml"}
    assert inherited_environment({**own, **settings}) == own


def test_a_base_reaches_every_instance() -> None:
    text = EXAMPLE.replace("idle_timeout_s = 60", 'base = "s3://bucket/base"', 1)
    pool = parse_pool(text.replace("buffer = 1", 'base = "../bases/own"'))
    assert pool.models["my-model"].serve_settings()["base"] == "../bases/own"
    assert pool.models["helper"].serve_environment()["TENERAL_BASE"] == "s3://bucket/base"
    assert "TENERAL_BASE" not in parse_pool(EXAMPLE).models["helper"].serve_environment()


def test_standby_processes_get_their_base_and_the_settings_of_its_store() -> None:
    text = EXAMPLE.replace("standby = 2", 'standby = 2\nstandby_base = "bases/own"')
    store = '[defaults.serve]\nendpoint_url = "http://store:9000"\nanonymous = true\nrequester_pays = false\n'
    flags = standby_flags(parse_pool(text + store + "kv_bytes = 4096\n", "/pools/pool.toml"))
    assert flags == [
        *("--processes", "2", "--memory", str(1 << 30), "--base", "/pools/bases/own"),
        *("--endpoint-url", "http://store:9000", "--anonymous"),
    ]
    assert "--base" not in standby_flags(parse_pool(EXAMPLE))


def test_keys_that_come_from_elsewhere_are_found_there() -> None:
    pool = parse_pool(EXAMPLE)
    assert str(pool.place("models", "my-model", "idle_timeout_s")) == "pool.toml:4: defaults.idle_timeout_s"
    assert str(pool.place("models", "helper", "instance", "cpu")) == "pool.toml:5: defaults.cpu"
    assert str(pool.place("models", "helper", "min_warm")) == "pool.toml:14: models.helper.min_warm"
    assert str(pool.place("patch", "0", "merge")).endswith("patch[0].merge")


CASES: list[tuple[Code, str, str, str]] = [
    # code, text of the example, text in its place, part of the message
    (Code.E0, "[node]", "[node", "is not TOML"),
    (
        Code.E1,
        "buffer = 1",
        "bufer = 1",
        "models.my-model.bufer: is not a known key [E1]\n  Did you mean buffer?",
    ),
    (Code.E1, "[slo]", "[sloo]", "Did you mean slo?"),
    (Code.E1, "max_running = 4", "max_runing = 4", "Did you mean max_running?"),
    (Code.E1, "max_running = 4", "max_queued = 4", "Write max_concurrency."),
    (Code.E1, "max_running = 4", 'base = "s3://bucket/base"', "Write base of the model"),
    (Code.E2, "buffer = 1", 'base = "s3://bucket/{version}"', "models.my-model.base: must contain no braces"),
    (Code.E2, "buffer = 1", 'base = "ftp://bucket/base"', "models.my-model.base: has an unknown kind"),
    (
        Code.E2,
        "buffer = 1",
        'base = "s3://b/base@b3:12"',
        "models.my-model.base: does not end in a whole pin",
    ),
    (Code.E2, "buffer = 1", "base = 1", "models.my-model.base: must be a text"),
    (Code.E1, "standby = 2", "standbys = 2", "node.standbys: is not a known key"),
    (Code.E2, "version = 1", "version = 0", "version: must be 1"),
    (Code.E2, "min_warm = 1", 'min_warm = "1"', "must be a whole number from 0 to 1,000; it is '1'"),
    (Code.E2, "min_warm = 1", "min_warm = true", "must be a whole number from 0 to 1,000; it is True"),
    (
        Code.E2,
        "idle_timeout_s = 60",
        "idle_timeout_s = 86401",
        "must be a number of seconds from 1 to 86,400",
    ),
    (Code.E2, "idle_timeout_s = 60", "idle_timeout_s = nan", "must be a number of seconds"),
    (Code.E2, 'memory = "4GiB"', 'memory = "4 apples"', "must be a size such as 512MiB"),
    (Code.E2, 'memory = "16GiB"', "memory = 4", 'node.memory: must be at least 1 MiB, such as "8GiB"'),
    (Code.E2, 'memory = "16GiB"', 'memory = "4"', "a number without a unit is in bytes; it is '4'"),
    (Code.E2, 'standby_memory = "1GiB"', "standby_memory = 1", "must be at least 1 MiB"),
    (Code.E2, 'memory = "8GiB"', "memory = 8", "models.helper.instance.memory: must be at least 1 MiB"),
    (Code.E2, 'memory = "4GiB"', "memory = 4096", "instance.memory: must be at least 1 MiB"),
    (Code.E2, 'standby_memory = "1GiB"', 'standby_base = "ftp://b/x"', "has an unknown kind of address"),
    (Code.E2, 'standby_memory = "1GiB"', 'standby_base = "s3://b/{version}"', "must contain no braces"),
    (Code.E2, "standby = 2", 'standby_base = "s3://b/x"', "node.standby_base: needs standby processes"),
    (Code.E2, 'source = "s3://bucket/models/my-model"', "", "models.my-model: needs a source"),
    (Code.E2, '"s3://bucket/models/my-model"', '"ftp://bucket/my-model"', "unknown kind of address, ftp://"),
    (Code.E2, "helper/{version}", "{version}/{version}", "must contain {version} at most once"),
    (Code.E2, "helper/{version}", "helper/{ver}", "no braces but those of {version}"),
    (Code.E2, "helper/{version}", f"helper/{{version}}@b3:{'0' * 64}", "Pin them in [models.helper.pins]"),
    (Code.E2, "models/my-model", "models/my-model@b3:12", "does not end in a whole pin"),
    (Code.E2, 'api_key_env = "HELPER_KEY"', 'api_key = "hunter2"', 'api_key_env = "API_KEY"'),
    (Code.E2, "max_running = 4", 'cors_origin = "app.example"', "must be 1 to 64 origins such as https://"),
    (
        Code.E2,
        "max_running = 4",
        'allowed_hosts = "http://a/b"',
        "must be 1 to 64 host names such as models.",
    ),
    (Code.E2, "[models.my-model]", '[models."my model"]', "must be a name of letters"),
    (Code.E2, 'platform = "knative"', 'platform = "nomad"', "must be one of knative"),
    (Code.E2, 'kind = "Service"', "", "patch[0]: needs the key kind"),
    (
        Code.E2,
        "versions = { latest = 2 }",
        "versions = { latest = 17 }",
        "must be a whole number from 1 to 16",
    ),
    (Code.E2, '"7" = 90', '"07" = 90', "without leading zeros"),
    (Code.E3, "min_warm = 1", "min_warm = 5", "is 5, more than max_instances, which is 4"),
    (
        Code.E4,
        "target_concurrency = 8",
        "target_concurrency = 8\nmax_concurrency = 7",
        "is 7, less than target_con",
    ),
    (Code.E5, '"8" = 10', '"8" = 11', "has weights that sum to 101, not 100"),
    (Code.E5, "{ latest = 2 }", "[7]", "traffic: names version 8, which versions does not serve"),
    (
        Code.E5,
        "{ latest = 2 }",
        '"latest"',
        "names 2 versions with the shadow's, but versions serves the latest 1",
    ),
    (Code.E5, "min_warm = 1", 'traffic = { "7" = 100 }', "names versions, but source has no {version}"),
    (Code.E5, "my-model = 25", "my-modle = 25", "Did you mean my-model?"),
    (Code.E5, "helper@8", "my-model@8", "names version 8 of my-model, which is not served"),
    (
        Code.E8,
        "buffer = 1",
        "buffer = 4",
        "with min_warm, which is 1, that is more than max_instances, which is 4",
    ),
    (Code.E9, "assistant =", "My-Model =", "aliases.My-Model: is served already, as my-model"),
    (Code.E11, "version = 1", "version = 2", "is 2; this program reads 1"),
]


@pytest.mark.parametrize(("code", "old", "new", "words"), CASES)
def test_an_error_names_its_code_its_line_and_what_to_do(code: Code, old: str, new: str, words: str) -> None:
    assert EXAMPLE.count(old) >= 1
    text = EXAMPLE.replace(old, new, 1)
    error = refused(text)
    assert error.code is code
    assert words in str(error)
    assert f"[{code}]" in str(error)
    if code is not Code.E0 and new:
        changed = EXAMPLE[: EXAMPLE.index(old)].count("\n") + 1
        assert abs(error.place.line - changed) <= 2, f"line {error.place.line}, changed {changed}"


def test_the_line_of_an_error_is_that_of_the_key() -> None:
    error = refused(EXAMPLE.replace("min_warm = 1", "min_warm = -1"))
    assert EXAMPLE.splitlines()[error.place.line - 1] == "min_warm = 1"
    assert error.as_json()["key"] == "models.my-model.min_warm"


# Random files: each is made of a valid one by one change that must be refused with one code.


def _rewritten(
    key: str, value: Callable[[random.Random], str]
) -> Callable[[random.Random, dict[str, str]], None]:
    def change(rng: random.Random, model: dict[str, str]) -> None:
        model[key] = value(rng)

    return change


def _word(rng: random.Random) -> str:
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyz_") for _ in range(rng.randint(3, 12)))


def _unknown(rng: random.Random, model: dict[str, str]) -> None:
    word = _word(rng)
    model[f"x{word}"] = "1"


def _out_of_range(rng: random.Random, model: dict[str, str]) -> None:
    key, value = rng.choice(
        [
            ("min_warm", str(rng.randint(1001, 10**9))),
            ("max_instances", rng.choice(["0", str(-rng.randint(1, 99)), "1.5"])),
            ("buffer", rng.choice(["-1", "101", '"two"'])),
            ("idle_timeout_s", rng.choice(["0.5", "inf", "[1]", str(rng.randint(86_401, 10**6))])),
            ("target_concurrency", rng.choice(["0", "1025", "true"])),
            ("queue_timeout_s", rng.choice(["0", "601", "-1.0"])),
            ("request_timeout_s", rng.choice(["0.5", "3601"])),
            ("drain_s", rng.choice(["0", "3601", '"8s"'])),
            ("policy", rng.choice(['"Hybrid"', '""', "true", '"histogram"'])),
            ("ready_when", rng.choice(['"soon"', "1", '"Exact"'])),
            ("priority", rng.choice(["-101", "101", "0.5"])),
            ("versions", rng.choice(["[]", "[1, 1]", "{ newest = 1 }", '"newest"', "[0]"])),
            ("shadow", rng.choice(["{ version = 1 }", "{ version = 1, percent = 0 }", "1"])),
        ]
    )
    model[key] = value


def _too_warm(rng: random.Random, model: dict[str, str]) -> None:
    model["max_instances"] = str(most := rng.randint(1, 500))
    model["min_warm"] = str(most + rng.randint(1, 500))
    model["buffer"] = str(rng.randint(0, 100))


def _too_few_places(rng: random.Random, model: dict[str, str]) -> None:
    model["target_concurrency"] = str(target := rng.randint(2, 1024))
    model["max_concurrency"] = str(rng.randint(1, target - 1))


def _too_much_buffer(rng: random.Random, model: dict[str, str]) -> None:
    model["max_instances"] = str(most := rng.randint(1, 50))
    model["min_warm"] = str(warm := rng.randint(0, most))
    model["buffer"] = str(most - warm + rng.randint(1, 50))


def _wrong_weights(rng: random.Random, model: dict[str, str]) -> None:
    model["source"] = '"s3://b/{version}"'
    model["versions"] = '"all"'
    model["traffic"] = f'{{ "1" = {rng.randint(0, 49)}, "2" = {rng.randint(0, 50)} }}'


def _stray_version(rng: random.Random, model: dict[str, str]) -> None:
    model["source"] = '"s3://b/{version}"'
    model["versions"] = "[1, 2]"
    model["traffic"] = f'{{ "{rng.randint(3, 10**6)}" = 100 }}'


MUTATIONS: list[tuple[Code, Callable[[random.Random, dict[str, str]], None]]] = [
    (Code.E1, _unknown),
    (Code.E2, _out_of_range),
    (Code.E3, _too_warm),
    (Code.E4, _too_few_places),
    (Code.E5, _wrong_weights),
    (Code.E5, _stray_version),
    (Code.E8, _too_much_buffer),
]


def _random_file(rng: random.Random) -> tuple[Code, str]:
    models = {f"m{number}": {"source": f'"/models/{number}"'} for number in range(rng.randint(1, 5))}
    code, mutate = rng.choice(MUTATIONS)
    head = "version = 1\n"
    chosen = rng.choice(list(models))
    match rng.random():
        case draw if draw < 0.08:
            code, head = Code.E11, f"version = {rng.randint(2, 10**6)}\n"
        case draw if draw < 0.16:
            code, models[chosen.upper()] = Code.E9, dict(models[chosen])
        case draw if draw < 0.2:
            code, head = Code.E0, head + "[" * rng.randint(1, 9) + "\n"
        case _:
            mutate(rng, models[chosen])
    for model in models.values():
        for key in ("priority", "queue_timeout_s"):
            if key not in model and rng.random() < 0.5:
                model[key] = str(rng.randint(1, 100))
    lines = [head]
    for name, model in models.items():
        items = list(model.items())
        rng.shuffle(items)
        lines += [
            f"[models.{name}]",
            *("\n" * rng.randint(0, 2) + f"{key} = {value}" for key, value in items),
        ]
    return code, "\n".join(lines) + "\n"


@pytest.mark.parametrize("seed", range(100))
def test_a_random_invalid_file_is_refused_with_the_right_code(seed: int) -> None:
    code, text = _random_file(random.Random(seed))
    error = refused(text)
    assert error.code is code, text
    assert error.place.file == "pool.toml"
    if code is not Code.E0:
        assert 1 <= error.place.line <= text.count("\n")
        assert error.place.key


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=200) | st.binary(max_size=100).map(lambda data: data.decode("latin-1")))
def test_any_text_is_read_or_refused_with_a_code(text: str) -> None:
    try:
        parse_pool(text)
    except PoolFileError as error:
        assert error.code in Code  # noqa: PT017 - both ends are fine


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    assert refused("x = " + "[" * 100_000).code is Code.E0


def test_a_large_or_missing_file_is_refused(tmp_path: Path) -> None:
    large = tmp_path / "pool.toml"
    large.write_bytes(b"#" * (MAX_FILE_BYTES + 1))
    for path in (large, tmp_path / "none.toml", tmp_path):
        with pytest.raises(PoolFileError, match="E0"):
            read_pool(path)


def test_lines_are_found_whatever_the_values_hold() -> None:
    text = (
        'a = """\nb = 1\n[x]\n"""\n'
        "[t] # [[u]]\n"
        "c = [ # =\n  1,\n  '=',\n]\n"
        'd."e f" = { g = 1 }\n'
        "[[r]]\nh = 1\n[[r]]\nh = 2\n[r.s]\ni = 1\n"
        "'q' = '''\n]'''\nlast = 1\n"
    )
    tomllib.loads(text)
    lines = KeyLines(text)
    found = {
        path: lines.line_of(path)
        for path in [("a",), ("t",), ("t", "c"), ("t", "d", "e f"), ("t", "d", "e f", "g")]
    }
    assert list(found.values()) == [1, 5, 6, 10, 10]
    assert lines.line_of(("r", "0", "h")) == 12
    assert lines.line_of(("r", "1", "h")) == 14
    assert lines.line_of(("r", "1", "s", "i")) == 16
    assert lines.line_of(("r", "1", "s", "last")) == 19
    assert lines.line_of(("nowhere",)) == 0


def test_versions_are_chosen_as_triton_does() -> None:
    present = {1, 2, 10, 9}
    assert Versions().chosen(present) == (10,)
    assert Versions(latest=2).chosen(present) == (9, 10)
    assert Versions(latest=None).chosen(present) == (1, 2, 9, 10)
    assert Versions(latest=None, numbers=(2, 3)).chosen(present) == (2,)


def test_a_shadow_is_a_version_that_is_served() -> None:
    text = EXAMPLE.replace("{ latest = 2 }", "[7, 8, 9]").replace(
        "[models.helper.pins]", "SHADOW[models.helper.pins]"
    )
    shadow = "shadow = { version = 9, percent = 10 }\n"
    assert parse_pool(text.replace("SHADOW", shadow)).models["helper"].shadow == Shadow(9, 10)
    assert refused(text.replace("SHADOW", shadow.replace("9", "6"))).code is Code.E5


def test_check_prints_the_models_or_the_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "pool.toml"
    path.write_text(EXAMPLE)
    assert cli.run(["pool", "check", str(path)]) == 0
    assert "my-model: 1 to 4 instances and 1 spare while busy" in capsys.readouterr().out
    path.write_text(EXAMPLE.replace("buffer = 1", "bufer = 1"))
    assert cli.run(["pool", "check", str(path)]) == 2
    assert re.search(
        r"pool.toml:11: models.my-model.bufer: is not a known key \[E1\]", capsys.readouterr().err
    )
    assert cli.run(["pool", "check", str(path), "--json"]) == 2
    assert json.loads(capsys.readouterr().out)["errors"][0] == {
        "code": "E1",
        "file": str(path),
        "key": "models.my-model.bufer",
        "line": 11,
        "message": "is not a known key",
        "hint": "Did you mean buffer?",
    }


def test_a_warning_becomes_an_error_when_asked() -> None:
    pool = parse_pool(EXAMPLE)
    warning = pool.warning(Code.W1, "is not available there, and is left out", "models", "my-model", "buffer")
    assert isinstance(warning, PoolWarning)
    assert (
        str(warning) == "pool.toml:11: models.my-model.buffer: is not available there, and is left out [W1]"
    )
    assert warning.as_error().code is Code.W1


def test_the_page_has_every_key_with_its_default_and_its_bounds() -> None:
    page = (Path(__file__).parents[3] / "docs" / "pool.md").read_text(encoding="utf-8")
    rows = {found[2]: found[1] for found in re.finditer(r"^(\| `(\w+)` \|.*)$", page, re.MULTILINE)}
    assert list(rows) == list(keys.MODEL_KEYS)
    for name, key in keys.MODEL_KEYS.items():
        if not isinstance(key.default, int | float):
            continue
        unit, default = (cell.strip() for cell in rows[name].split(" | ")[1:3])
        assert float(default) == key.default, name
        bounds = re.search(r"(−?[\d.,]+) to ([\d.,]+)", unit)
        assert bounds is not None, name
        step = 0.01 if isinstance(key.default, float) else 1
        for text, beyond in zip(bounds.groups(), (-step, step), strict=True):
            value = type(key.default)(text.replace("−", "-").replace(",", ""))
            assert key.parse(value) == value
            with pytest.raises(ValueError, match="must be a"):
                key.parse(value + beyond)


def test_the_page_has_every_code() -> None:
    page = (Path(__file__).parents[3] / "docs" / "pool.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| ([EW]\d+) \|", page, re.MULTILINE) == [str(code) for code in Code]
