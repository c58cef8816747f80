"""The chart makes what `render kubernetes` makes: by the real helm, which `scripts/conformance-infra` brings."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from tests.support.helm_values import values_schema
from tests.support.infra_validators import check_kubernetes, read_documents
from tests.support.pool_files import PLAIN, VERSIONED, pool_files, render_text

CHART = Path(__file__).parents[2] / "infra" / "helm" / "teneral"
REFERENCE = Path(__file__).parents[2] / "infra" / "examples" / "reference.pool.toml"
HELM = os.environ.get("TENERAL_TEST_HELM", "")
POOLS = int(os.environ.get("TENERAL_TEST_POOLS", "20"))
ZERO = PLAIN.replace("min_warm = 1", "min_warm = 0\nbuffer = 2\nmax_instances = 3")
SHADOWED = VERSIONED.replace("[7, 8]", "[7, 8, 9]\nshadow = { version = 9, percent = 20 }")
FULL = (
    PLAIN
    + '[models.m.serve]\napi_key_env = "KEY"\ncache_dir = "/cache"\nkv_disk_dir = "/kv"\nkv_disk_bytes = "3GiB"\n'
)
needs_helm = pytest.mark.skipif(not HELM, reason="needs helm: scripts/conformance-infra")


def test_the_charts_schema_is_the_one_that_the_limits_give():
    assert json.loads((CHART / "values.schema.json").read_text()) == values_schema()


@pytest.mark.parametrize(
    "text", [REFERENCE.read_text(), ZERO, SHADOWED, FULL], ids=["reference", "zero", "shadow", "full"]
)
def test_rendered_values_are_what_the_schema_takes(text):
    import jsonschema

    values = yaml.safe_load(render_text(text, "helm").stream())
    jsonschema.Draft7Validator(values_schema()).validate(values)
    broken = json.loads(json.dumps(values))
    next(iter(broken["models"].values()))["idle_timeout_s"] = 3601
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.Draft7Validator(values_schema()).validate(broken)


def helm(*arguments: str, values: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [HELM, *arguments, "-f", "-"], input=values, capture_output=True, text=True, timeout=60
    )


def assert_equal_documents(text: str) -> None:
    result = helm("template", "release", str(CHART), values=render_text(text, "helm").stream())
    assert result.returncode == 0, result.stderr
    made = {(each["kind"], each["metadata"]["name"]): each for each in read_documents(result.stdout) if each}
    rendered = read_documents(render_text(text, "kubernetes").stream())
    assert made == {(each["kind"], each["metadata"]["name"]): each for each in rendered}


@needs_helm
@pytest.mark.parametrize("text", [REFERENCE.read_text(), PLAIN, ZERO, VERSIONED, SHADOWED, FULL])
def test_the_chart_makes_the_rendered_documents(text):
    assert_equal_documents(text)


@needs_helm
@pytest.mark.slow
@pytest.mark.timeout(3600)
@settings(
    max_examples=min(POOLS, 200),
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    database=None,
)
@given(pool_files("helm"))
def test_the_chart_makes_the_rendered_documents_of_random_pools(text):
    assert_equal_documents(text)


@needs_helm
def test_helm_lints_the_chart():
    result = helm("lint", "--strict", str(CHART), values=render_text(REFERENCE.read_text(), "helm").stream())
    assert result.returncode == 0, result.stdout


@needs_helm
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"idle_timeout_s": 3601}, "idle_timeout_s"),
        ({"min_warm": "many"}, "min_warm"),
        ({"minWarm": 2}, "minWarm"),
    ],
)
def test_helm_refuses_what_the_schema_does_not_have(change, message):
    values = yaml.safe_load(render_text(PLAIN, "helm").stream())
    values["models"]["m"] |= change
    result = helm("template", "release", str(CHART), values=json.dumps(values))
    assert result.returncode != 0
    assert message in result.stderr


@needs_helm
def test_helm_refuses_zero_for_several_versions_as_the_renderer_does():
    values = yaml.safe_load(render_text(VERSIONED, "helm").stream())
    values["models"]["m"]["min_warm"] = 0
    result = helm("template", "release", str(CHART), values=json.dumps(values))
    assert result.returncode != 0
    assert "[E7]" in result.stderr


@needs_helm
def test_the_shortest_values_are_enough():
    model = {"image": "teneral:1", "cpu": "1", "memory": "2Gi", "versions": [{"source": "s3://models/chat"}]}
    result = helm("template", "release", str(CHART), values=json.dumps({"models": {"chat": model}}))
    assert result.returncode == 0, result.stderr
    kinds = sorted(each["kind"] for each in yaml.safe_load_all(result.stdout) if each)
    assert kinds == [
        *("Deployment", "InterceptorRoute", "NetworkPolicy", "PodDisruptionBudget"),
        *("ScaledObject", "Service", "Service", "ServiceAccount"),
    ]


@needs_helm
def test_the_clusters_own_keys_of_a_pod_reach_it():
    values = yaml.safe_load(render_text(PLAIN, "helm").stream())
    pod = {
        "imagePullSecrets": [{"name": "registry"}],
        "tolerations": [{"key": "models", "operator": "Exists", "effect": "NoSchedule"}],
    }
    values["models"]["m"]["pod"] = pod
    result = helm("template", "release", str(CHART), values=json.dumps(values))
    assert result.returncode == 0, result.stderr
    documents = [each for each in read_documents(result.stdout) if each]
    check_kubernetes(documents)
    (spec,) = [each["spec"]["template"]["spec"] for each in documents if each["kind"] == "Deployment"]
    assert {name: spec[name] for name in pod} == pod
    values["models"]["m"]["pod"] = {"hostNetwork": True}
    result = helm("template", "release", str(CHART), values=json.dumps(values))
    assert result.returncode != 0
    assert "hostNetwork" in result.stderr
