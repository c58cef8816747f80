"""An unsupported key is refused with a code, or reported: E5, E6, E7, W1 to W4."""

from __future__ import annotations

import pytest
from tests.support.pool_files import IMAGE, PLAIN, VERSIONED, render_text

from teneral.cli import run
from teneral.handlers.pool.values import PoolFileError
from teneral.infra.render.limits import LIMITS
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
        ("cloud-run", "drain_s", 11),
        ("cloud-run", "max_concurrency", 1001),
        ("lambda", "request_timeout_s", 901),
        ("lambda", "drain_s", 3),
        ("sagemaker", "drain_s", 31),
        ("fargate", "drain_s", 121),
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
    assert {path.name for path in out.iterdir()} == {"m.service.yaml", "m.service-account.yaml"}
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


def test_strict_makes_warnings_errors_and_a_name_that_is_unknown_is_one(tmp_path, capsys):
    file = tmp_path / "pool.toml"
    file.write_text(with_key("buffer", 1))
    assert run(["pool", "render", "knative", str(file), "--strict"]) == 2
    assert "W1" in capsys.readouterr().err
    assert run(["pool", "render", "knative", str(file), "--model", "other"]) == 2
    assert run(["pool", "render", "nomad", str(file)]) == 2
    assert "knative" in capsys.readouterr().err
    assert run(["pool", "check", "--for", "lambda", str(file)]) == 0
    file.write_text(with_key("drain_s", 30))
    assert run(["pool", "check", "--for", "lambda", str(file)]) == 2
    assert "E6" in capsys.readouterr().err
