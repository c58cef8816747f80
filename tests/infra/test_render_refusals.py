"""An unsupported key is refused with a code, or reported: E5, E6, E7, W1 to W5."""

from __future__ import annotations

import pytest
import yaml
from tests.support.pool_files import DIGEST, IMAGE, PLAIN, VERSIONED, render_text
from tests.support.tiny_models import save_tiny

from teneral.cli import run
from teneral.handlers.pool.keys import MODEL_KEYS
from teneral.handlers.pool.values import PoolFileError
from teneral.infra.render.limits import LIMITS, ONLY_SCRATCH
from teneral.infra.render.render import RENDERERS


def refused(text, platform):
    with pytest.raises(PoolFileError) as caught:
        render_text(text, platform)
    return caught.value


def with_key(key, value):
    return PLAIN.replace("min_warm = 1\n", "" if key == "min_warm" else "min_warm = 1\n").replace(
        "[instance]", f"{key} = {value}\n[instance]"
    )


@pytest.mark.parametrize(
    ("platform", "key", "value"),
    [
        ("knative", "idle_timeout_s", 3601),
        ("knative", "request_timeout_s", 601),
        ("knative", "drain_s", 301),
        ("kserve", "max_concurrency", 1001),
        ("kubernetes", "idle_timeout_s", 4000),
        ("cloud-run", "drain_s", 9),
        ("cloud-run", "max_concurrency", 1001),
        ("lambda", "request_timeout_s", 901),
        ("lambda", "drain_s", 2),
        ("sagemaker", "drain_s", 26),
        ("fargate", "drain_s", 116),
    ],
)
def test_a_value_beyond_the_platforms_limit_is_e6_and_names_key_line_and_limit(platform, key, value):
    error = refused(with_key(key, value), platform)
    assert error.code == "E6"
    assert key in error.place.key
    assert error.place.line > 0
    assert str(value) in error.detail.replace(",", "")


@pytest.mark.parametrize("platform", LIMITS)
def test_each_limit_has_a_source(platform):
    assert all(limit.source and limit.low <= limit.high for limit in LIMITS[platform])


@pytest.mark.parametrize(
    ("platform", "old", "new"),
    [
        ("cloud-run", "cpu = 2", "cpu = 3"),
        ("cloud-run", '"4GiB"', '"10GiB"'),
        ("cloud-run", "cpu = 2", "cpu = 2\ngpu = 1"),
        ("lambda", '"4GiB"', '"11GiB"'),
        ("lambda", "cpu = 2", "cpu = 2\ngpu = 1"),
        ("lambda", IMAGE, "docker.io/teneral:1"),
        ("sagemaker", '"4GiB"', '"500GiB"'),
        ("sagemaker", IMAGE, "docker.io/teneral:1"),
        ("fargate", '"4GiB"', '"121GiB"'),
        ("fargate", "cpu = 2", "cpu = 17"),
    ],
)
def test_an_instance_that_the_platform_does_not_have_is_e6(platform, old, new):
    assert refused(PLAIN.replace(old, new), platform).code == "E6"


def test_zero_where_nothing_holds_a_request_is_e7():
    zero = PLAIN.replace("min_warm = 1", "min_warm = 0")
    assert refused(zero, "fargate").code == "E7"
    for platform in ("kubernetes", "sagemaker"):
        assert refused(VERSIONED.replace("min_warm = 1", "min_warm = 0"), platform).code == "E7"
        render_text(zero, platform)
    for platform in ("knative", "kserve", "cloud-run", "lambda"):
        render_text(zero, platform)


@pytest.mark.parametrize("platform", sorted(ONLY_SCRATCH))
def test_a_folder_that_the_containers_user_cannot_make_is_e6(platform):
    for folder in ("/var/cache/teneral", "/tmp", "/tmp/../var", "cache"):
        text = PLAIN + f'[models.m.serve]\ncache_dir = "{folder}"\ncache_bytes = "1GiB"\n'
        error = refused(text, platform)
        assert error.code == "E6"
        assert error.place.key == "models.m.serve.cache_dir"
        assert error.place.line > 0
    render_text(PLAIN + '[models.m.serve]\ncache_dir = "/tmp/teneral"\ncache_bytes = "1GiB"\n', platform)


def test_files_on_cloud_run_are_counted_as_memory_and_reported():
    files = '[models.m.serve]\ncache_dir = "/tmp/teneral"\ncache_bytes = "SIZE"\n'
    rendered = render_text(PLAIN + files.replace("SIZE", "1GiB"), "cloud-run")
    assert any("1,024 MiB" in str(each) for each in rendered.warnings if each.code == "W2")
    error = refused(PLAIN + files.replace("SIZE", "4GiB"), "cloud-run")
    assert error.code == "E6"
    assert error.place.key == "instance.memory"


def test_a_cache_that_goes_with_its_instance_is_reported():
    text = PLAIN + '[models.m.serve]\ncache_dir = "/tmp/teneral"\ncache_bytes = "1GiB"\n'
    for platform in RENDERERS:
        warnings = [each for each in render_text(text, platform).warnings if "its folder goes" in str(each)]
        assert [each.code for each in warnings] == ([] if platform == "ray" else ["W2"]), platform


def test_a_small_instance_of_a_model_whose_size_is_unknown_is_rendered():
    for platform in ("kubernetes", "knative", "ray", "kuberay", "sagemaker"):
        render_text(PLAIN.replace('"4GiB"', '"256MiB"'), platform)


def test_files_on_sagemaker_get_a_volume():
    files = '[models.m.serve]\ncache_dir = "/tmp/teneral"\ncache_bytes = "SIZE"\n'
    template = yaml.safe_load(render_text(PLAIN + files.replace("SIZE", "40GiB"), "sagemaker").stream())
    (variant,) = template["Resources"]["Config"]["Properties"]["ProductionVariants"]
    assert variant["VolumeSizeInGB"] > 40
    assert refused(PLAIN + files.replace("SIZE", "600GiB"), "sagemaker").code == "E6"


# Two values of each key of a model. A platform renders both, or reports what it makes of the second, or refuses it.
OF_A_KEY = {
    "source": ('"s3://bucket/a"', '"s3://bucket/b"'),
    "base": ('"s3://bucket/a"', '"s3://bucket/b"'),
    "min_warm": ("1", "2"),
    "max_instances": ("5", "9"),
    "buffer": ("0", "1"),
    "idle_timeout_s": ("100", "200"),
    "policy": ('"fixed"', '"hybrid"'),
    "target_concurrency": ("2", "4"),
    "max_concurrency": ("20", "40"),
    "queue_timeout_s": ("10", "20"),
    "request_timeout_s": ("100", "200"),
    "drain_s": ("10", "50"),
    "ready_when": ('"first-layer"', '"exact"'),
    "priority": ("0", "7"),
}
OF_VERSIONS = {
    "versions": ("[7, 8]", "[7, 8, 9]"),
    "traffic": ('{ "7" = 90, "8" = 10 }', '{ "7" = 50, "8" = 50 }'),
    "shadow": (None, "{ version = 9, percent = 20 }"),
    "pins": (None, f'{{ "8" = "{DIGEST}" }}'),
}


def test_every_key_of_a_model_is_among_them():
    assert set(OF_A_KEY) | set(OF_VERSIONS) >= set(MODEL_KEYS) - {"serve", "instance"}


@pytest.mark.parametrize("platform", RENDERERS)
@pytest.mark.parametrize("key", [*OF_A_KEY, *OF_VERSIONS])
def test_no_key_is_dropped_in_silence(platform, key):
    values = (OF_A_KEY | OF_VERSIONS)[key]
    table = {"source": '"s3://bucket/m"', "min_warm": "1", "max_instances": "5", "max_concurrency": "32"}
    if key in OF_VERSIONS:
        table |= {"source": '"s3://bucket/m/{version}"', "versions": "[7, 8, 9]"}
        table["traffic"] = '{ "7" = 90, "8" = 10 }'
    outcomes, refusals = [], []
    for value in values:
        lines = [f"{name} = {text}" for name, text in {**table, key: value}.items() if text is not None]
        text = f'version = 1\n[instance]\nimage = "{IMAGE}"\ncpu = 2\nmemory = "4GiB"\n[models.m]\n'
        try:
            outcomes.append(render_text(text + "\n".join(lines) + "\n", platform))
        except PoolFileError as error:
            refusals.append(error)
    if refusals:
        assert all(key in each.place.key or key in OF_VERSIONS for each in refusals)
        return
    first, second = outcomes
    reported = [each for each in second.warnings if each.place.key.endswith(f".{key}")]
    assert first.texts() != second.texts() or reported


def test_names_that_only_a_running_pool_has_are_reported():
    for platform in RENDERERS:
        rendered = render_text(PLAIN + '[aliases]\nother = "m"\n', platform)
        assert [each.code for each in rendered.warnings if each.place.key == "aliases.other"] == ["W1"]


LOCAL_KEYS = {
    "source": PLAIN.replace('"s3://bucket/m"', '"PATH"'),
    "base": PLAIN.replace("[instance]", 'base = "PATH"\n[instance]'),
    "serve.adapters": PLAIN + '[models.m.serve]\nadapters = "PATH/{name}"\n',
    "serve.kv_snapshot": PLAIN + '[models.m.serve]\nkv_snapshot = "PATH"\n',
    "serve.chat_template": PLAIN + '[models.m.serve]\nchat_template = "PATH"\n',
}


@pytest.mark.parametrize("platform", RENDERERS)
@pytest.mark.parametrize("key", LOCAL_KEYS)
def test_a_path_that_only_this_machine_has_is_e6(platform, key):
    for path in ("models/m", "./m", "../m", "~/m", f"m@b3:{DIGEST}"):
        error = refused(LOCAL_KEYS[key].replace("PATH", path), platform)
        assert (error.code, error.place.key) == ("E6", f"models.m.{key}")
        assert error.place.line > 0
        assert path in error.detail
        assert platform in error.detail


@pytest.mark.parametrize("platform", RENDERERS)
@pytest.mark.parametrize("key", LOCAL_KEYS)
def test_a_path_that_the_image_may_have_is_w5(platform, key):
    for path in ("/models/m", "file:///models/m"):
        rendered = render_text(LOCAL_KEYS[key].replace("PATH", path), platform)
        (warning,) = (each for each in rendered.warnings if each.code == "W5")
        assert warning.place.key == f"models.m.{key}"
        assert warning.place.line > 0
        assert path in warning.message
        assert path in rendered.stream()
    for path in ("s3://b/m", "gs://b/m", "az://account/c/m", "https://example.com/m"):
        rendered = render_text(LOCAL_KEYS[key].replace("PATH", path), platform)
        assert not [each for each in rendered.warnings if each.code == "W5"]


def test_a_pool_of_this_machine_may_have_relative_paths(tmp_path):
    file = tmp_path / "pool.toml"
    file.write_text(LOCAL_KEYS["source"].replace("PATH", "models/m"))
    assert run(["pool", "check", str(file)]) == 0
    assert run(["pool", "check", "--for", "knative", str(file)]) == 2


def test_requests_that_fail_while_sagemaker_wakes_are_w3():
    rendered = render_text(PLAIN.replace("min_warm = 1", "min_warm = 0"), "sagemaker")
    assert [warning.code for warning in rendered.warnings] == ["W3"]


def test_more_versions_than_the_platform_divides_traffic_among_is_e5():
    three = VERSIONED.replace("[7, 8]", "[7, 8, 9]")
    for platform in ("kserve", "sagemaker"):
        assert refused(three, platform).code == "E5"
    assert refused(VERSIONED, "lambda").code == "E5"


def test_versions_that_only_a_running_pool_can_find_are_e5():
    text = PLAIN.replace('"s3://bucket/m"', '"s3://bucket/m/{version}"')
    for platform in RENDERERS:
        assert refused(text, platform).code == "E5"


@pytest.mark.parametrize("key", ["image", "cpu", "memory"])
def test_an_instance_without_its_size_is_e2(key):
    lines = [line for line in PLAIN.splitlines() if not line.startswith(f"{key} =")]
    for platform in RENDERERS:
        assert refused("\n".join(lines), platform).code == "E2"


@pytest.mark.parametrize(
    ("platform", "key", "value", "code"),
    [
        ("knative", "buffer", 1, "W1"),
        ("knative", "queue_timeout_s", 5, "W2"),
        ("kserve", "priority", 3, "W1"),
        ("kubernetes", "buffer", 1, "W1"),
        ("cloud-run", "idle_timeout_s", 60, "W1"),
        ("lambda", "target_concurrency", 4, "W2"),
        ("lambda", "queue_timeout_s", 4, "W1"),
        ("sagemaker", "request_timeout_s", 100, "W2"),
        ("fargate", "target_concurrency", 4, "W2"),
    ],
)
def test_an_omitted_or_approximated_key_is_reported_with_its_line(platform, key, value, code):
    warnings = render_text(with_key(key, value), platform).warnings
    found = [warning for warning in warnings if warning.place.key.endswith(key)]
    assert [warning.code for warning in found] == [code]
    assert found[0].place.line > 0
    assert not [
        warning for warning in render_text(PLAIN, platform).warnings if warning.place.key.endswith(key)
    ]


def test_a_patch_is_applied_last_and_one_that_changes_a_rendered_value_is_w4():
    patch = """
[[patch]]
platform = "knative"
kind = "Service"
merge = { metadata = { labels = { team = "search" } } }

[[patch]]
platform = "knative"
kind = "Service"
name = "m"
merge = { spec = { template = { spec = { timeoutSeconds = 42 } } } }

[[patch]]
platform = "kserve"
kind = "InferenceService"
merge = { metadata = { labels = { team = "other" } } }
"""
    rendered = render_text(PLAIN + patch, "knative")
    service = next(each.body for each in rendered.documents if each.kind == "Service")
    assert service["metadata"]["labels"]["team"] == "search"
    assert service["spec"]["template"]["spec"]["timeoutSeconds"] == 42
    assert [warning.code for warning in rendered.warnings] == ["W4"]
    assert "spec.template.spec.timeoutSeconds" in str(rendered.warnings[0])


def test_a_patch_that_fits_nothing_is_e2_and_names_what_there_is():
    error = refused(
        PLAIN + '[[patch]]\nplatform = "knative"\nkind = "Deployment"\nmerge = { a = 1 }\n', "knative"
    )
    assert error.code == "E2"
    assert "Service m" in error.hint


def test_the_command_writes_checks_and_names_what_differs(tmp_path, capsys):
    file = tmp_path / "pool.toml"
    file.write_text(PLAIN)
    out = tmp_path / "out"
    arguments = ["pool", "render", "knative", str(file)]
    assert run([*arguments, "-o", str(out)]) == 0
    written = {"m.service.yaml", "m.service-account.yaml", "deploy.sh", "README.md"}
    assert {path.name for path in out.iterdir()} == written
    assert run([*arguments, "--check", str(out)]) == 0
    file.write_text(PLAIN.replace("min_warm = 1", "min_warm = 2"))
    capsys.readouterr()
    assert run([*arguments, "--check", str(out)]) == 1
    printed = capsys.readouterr().out
    assert '+        autoscaling.knative.dev/min-scale: "2"' in printed
    (out / "old.service.yaml").write_text((out / "m.service.yaml").read_text())
    assert run([*arguments, "-o", str(out)]) == 0
    assert "old.service.yaml is not rendered any more" in capsys.readouterr().err
    assert run([*arguments, "--check", str(out)]) == 1


@pytest.mark.parametrize(("family", "parts", "lower", "memory"), [
    ("llama", " MiB), the KV pool and the process", "Give more, or lower kv_bytes in", "1Gi"),
    ("bert", " MiB) and the process", "Give more.\n", "768Mi"),
])  # fmt: skip
def test_the_least_memory_has_a_kv_pool_where_the_model_generates(
    family, parts, lower, memory, tmp_path, capsys
):
    save_tiny(family, tmp_path / "model", vocab_size=400)
    file = tmp_path / "pool.toml"
    file.write_text(PLAIN.replace("s3://bucket/m", str(tmp_path / "model")).replace("4GiB", "1MiB"))
    arguments = ["pool", "render", "kubernetes", str(file), "--read-manifests"]
    assert run(arguments) == 2
    refused = capsys.readouterr().err
    assert parts in refused
    assert lower in refused
    file.write_text(file.read_text().replace('memory = "1MiB"\n', ""))
    assert run(arguments) == 0
    assert f'memory: "{memory}"' in capsys.readouterr().out


def test_strict_makes_warnings_errors_and_a_name_that_is_unknown_is_one(tmp_path, capsys):
    file = tmp_path / "pool.toml"
    file.write_text(with_key("buffer", 1))
    assert run(["pool", "render", "knative", str(file), "--strict"]) == 2
    assert "W1" in capsys.readouterr().err
    assert run(["pool", "render", "knative", str(file), "--model", "other"]) == 2
    assert run(["pool", "render", "nomad", str(file)]) == 2
    assert "knative" in capsys.readouterr().err
    assert run(["pool", "check", "--for", "lambda", str(file)]) == 0
    assert run(["pool", "render", "knative", "-o", str(tmp_path / "out"), str(file)]) == 0
    assert list((tmp_path / "out").iterdir())
    file.write_text(with_key("drain_s", 30))
    assert run(["pool", "check", "--for", "lambda", str(file)]) == 2
    assert "E6" in capsys.readouterr().err
