"""The reference pool on every platform: what lies in infra/rendered, by every validator that is at hand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from tests.support.infra_validators import (
    check_cloudformation,
    check_kubernetes,
    check_pod_security,
    check_policies,
    check_requests,
    lint_cluster,
)
from tests.support.pool_files import DIGEST, PLAIN, VERSIONED, render_text

from teneral.cli import run
from teneral.handlers.pool.file import parse_pool, read_pool
from teneral.infra.render.documents import Options
from teneral.infra.render.render import RENDERERS, render

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "infra" / "examples" / "reference.pool.toml"
CLOUDFORMATION = ("lambda", "sagemaker", "fargate")
CHART = ROOT / "infra" / "helm" / "teneral"
ZERO = PLAIN.replace("min_warm = 1", "min_warm = 0\nbuffer = 1")
KUBERNETES = ("knative", "kserve", "kubernetes", "kuberay")


@pytest.fixture(autouse=True)
def at_the_root(monkeypatch):
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("platform", RENDERERS)
def test_what_is_committed_is_what_is_rendered(platform, capsys):
    folder = f"infra/rendered/{platform}"
    code = run(["pool", "render", platform, str(REFERENCE), "--check", folder, "--project", "my-project"])
    assert code == 0, (
        f"teneral pool render {platform} {REFERENCE} -o {folder} --project my-project\n"
        + capsys.readouterr().out
    )


@pytest.mark.parametrize("platform", KUBERNETES)
def test_kubernetes_takes_the_reference_pool(platform):
    documents = [document.body for document in render(read_pool(REFERENCE), platform).documents]
    if unknown := check_kubernetes(documents):
        pytest.skip(f"no schemas next to the checkout for {', '.join(sorted(unknown))}")


@pytest.mark.parametrize("platform", KUBERNETES)
def test_kubernetes_takes_several_versions_and_zero(platform):
    for text in (VERSIONED, ZERO):
        check_kubernetes([document.body for document in render_text(text, platform).documents])


@pytest.mark.parametrize("platform", KUBERNETES)
def test_every_pod_fits_the_restricted_standard(platform):
    for text in (REFERENCE.read_text(), VERSIONED, ZERO):
        assert sum(check_pod_security(document.body) for document in render_text(text, platform).documents)


@pytest.mark.parametrize("text", [REFERENCE.read_text(), VERSIONED, ZERO])
def test_a_linter_of_clusters_finds_nothing(text):
    """kube-linter knows no custom resources, and so nothing of the other platforms' documents."""
    documents = [document.body for document in render_text(text, "kubernetes").documents]
    assert lint_cluster(documents) == []


@pytest.mark.parametrize(
    ("old", "new", "finding"),
    [
        ("maxUnavailable: 1\n  unhealthy", "maxUnavailable: 0\n  unhealthy", "pdb-max-unavailable"),
        ("kind: ServiceAccount", "kind: Secret", "non-existent-service-account"),
        ("readOnlyRootFilesystem: true", "readOnlyRootFilesystem: false", "no-read-only-root-fs"),
        ("memory: ", "storage: ", "unset-memory-requirements"),
        ("path: /livez\n            port: 8080", "path: /livez\n            port: 8081", "liveness-port"),
        ("name: TENERAL_NAME", "name: TENERAL_API_KEY", "duplicate-env-var"),
        ("@sha256:", ":latest-", "latest-tag"),
    ],
)
def test_the_linter_finds_faults(old, new, finding):
    folder = ROOT / "infra" / "rendered" / "kubernetes"
    text = "\n---\n".join(path.read_text() for path in sorted(folder.glob("chat.*.yaml")))
    assert old in text
    changed = text.replace(old, new).replace(
        ":latest-4c7d1f0a9be2834d5f60718293a4b5c6d7e8f9000112233445566778899aabbc", ""
    )
    assert finding in lint_cluster([each for each in yaml.safe_load_all(changed) if each])


def test_a_model_of_several_instances_is_spread_over_zones_and_keeps_all_but_one_in_a_drain():
    for most in (1, 2):
        text = PLAIN.replace("min_warm = 1", f"min_warm = 1\nmax_instances = {most}")
        documents = {each.kind: each.body.get("spec") for each in render_text(text, "kubernetes").documents}
        pod = documents["Deployment"]["template"]["spec"]
        keys = [each["topologyKey"] for each in pod.get("topologySpreadConstraints", ())]
        assert keys == (["topology.kubernetes.io/zone", "kubernetes.io/hostname"] if most > 1 else [])
        assert ("PodDisruptionBudget" in documents) == (most > 1)
        assert documents["NetworkPolicy"]["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8080}]}]


def test_cloud_run_takes_the_reference_pool_as_a_knative_service():
    documents = render(read_pool(REFERENCE), "cloud-run", options=Options(project="my-project")).documents
    for document in documents:
        body = yaml.safe_load(yaml.safe_dump(dict(document.body)))
        assert body["spec"]["template"]["spec"]["serviceAccountName"].endswith(
            "@my-project.iam.gserviceaccount.com"
        )
        assert body["spec"]["template"]["spec"]["containers"][0]["startupProbe"]["failureThreshold"] <= 240


def test_cloud_runs_identities_can_exist_and_none_is_shared():
    """A service account's name has 6 to 30 characters, as `gcloud iam service-accounts create` asks."""
    long = "a-model-with-a-long-name-of-which-a-cut-is-the-same"
    names = [
        "m",
        "chat",
        "embed",
        "Chat/1",
        "five5",
        "sixsix",
        "x" * 30,
        "x" * 31,
        f"{long}-1",
        f"{long}-2",
        "9-b",
    ]
    accounts = {}
    for name in names:
        text = PLAIN.replace("[models.m]", f'[models."{name}"]')
        rendered = render(parse_pool(text, "pool.toml"), "cloud-run", options=Options(project="my-project"))
        (document,) = rendered.documents
        account, _, rest = document.body["spec"]["template"]["spec"]["serviceAccountName"].partition("@")
        assert re.fullmatch(r"[a-z](?=.{5,29}$)[a-z0-9-]*[a-z0-9]", account), (name, account)
        assert rest == "my-project.iam.gserviceaccount.com"
        accounts[name] = account
        warned = [str(warning) for warning in rendered.warnings if account in str(warning)]
        assert bool(warned) == (account != document.name), (name, rendered.warnings)
        assert all(text.endswith("[W2]") for text in warned)
    assert len(set(accounts.values())) == len(names)
    assert accounts["sixsix"] == "sixsix"


@pytest.mark.parametrize("platform", CLOUDFORMATION)
def test_cloudformation_takes_the_reference_pool(platform):
    rendered = render(read_pool(REFERENCE), platform)
    for name, text in rendered.texts().items():
        check_cloudformation(text)
        template = yaml.safe_load(text)
        check_policies(template)
        check_requests(template)
        assert name.endswith(".template.yaml")


def test_sagemaker_takes_several_versions_and_zero():
    for text in (VERSIONED, PLAIN.replace("min_warm = 1", "min_warm = 0")):
        for template in render_text(text, "sagemaker").texts().values():
            check_cloudformation(template)
            check_requests(yaml.safe_load(template))


def test_fargate_takes_several_versions():
    for template in render_text(VERSIONED, "fargate").texts().values():
        check_cloudformation(template)


def test_a_secret_is_a_reference_on_every_platform():
    text = PLAIN + '[models.m.serve]\napi_key_env = "THE_KEY"\n'
    for platform in RENDERERS:
        body = render_text(text, platform).stream()
        assert "TENERAL_API_KEY" in body
        assert "THE_KEY" in body or "the-key" in body


def test_a_role_reads_its_model_and_nothing_else():
    def statements(source, serve=""):
        text = PLAIN.replace("s3://bucket/m", source) + f"[models.m.serve]\n{serve}\n"
        template = yaml.safe_load(render_text(text, "lambda").stream())
        found = template["Resources"]["Role"]["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
        return [each for each in found if each["Action"][0].startswith("s3:")]

    pinned = statements(f"s3://bucket/models/m@b3:{DIGEST}")
    arn = "arn:${AWS::Partition}:s3:::bucket/models/m/*"
    assert pinned == [{"Effect": "Allow", "Action": ["s3:GetObject"], "Resource": [{"Fn::Sub": arn}]}]
    listed = statements("s3://bucket/models/m")
    assert [each["Action"] for each in listed] == [["s3:GetObject"], ["s3:ListBucket"]]
    assert listed[1]["Condition"] == {"StringLike": {"s3:prefix": "models/m/*"}}
    assert statements("https://example.com/m") == []
    written = statements(
        f"s3://bucket/m@b3:{DIGEST}", 'batch_output = "s3://results/out/{bucket}/{key}.jsonl"'
    )
    assert written[1]["Condition"] == {"StringLike": {"s3:prefix": "out/*"}}
    assert written[2]["Resource"] == [{"Fn::Sub": "arn:${AWS::Partition}:s3:::results/out/*"}]
    assert "s3:PutObject" in written[2]["Action"]
    adapted = statements(f"s3://bucket/m@b3:{DIGEST}", 'adapters = "s3://bucket/adapters/{name}"')
    assert adapted[0]["Resource"][1] == {"Fn::Sub": "arn:${AWS::Partition}:s3:::bucket/adapters/*"}
    assert adapted[1]["Condition"] == {"StringLike": {"s3:prefix": "adapters/*"}}
    whole = statements("s3://bucket")
    assert whole[0]["Resource"] == [{"Fn::Sub": "arn:${AWS::Partition}:s3:::bucket/*"}]
    assert whole[1]["Condition"] == {"StringLike": {"s3:prefix": "*"}}


def test_a_base_reaches_every_platform_and_its_role_may_read_it():
    text = PLAIN.replace('source = "s3://bucket/m"', 'source = "s3://bucket/m"\nbase = "s3://bases/b"')
    assert text != PLAIN
    for platform in RENDERERS:
        body = render_text(text, platform).stream()
        assert "TENERAL_BASE" in body, platform
        assert "s3://bases/b" in body, platform
    template = yaml.safe_load(render_text(text, "lambda").stream())
    statements = template["Resources"]["Role"]["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
    read = next(each for each in statements if each["Action"] == ["s3:GetObject"])
    names = [each["Fn::Sub"].rpartition(":::")[2] for each in read["Resource"]]
    assert names == ["bucket/m/*", "bases/b/*"]


def test_versions_share_instances_by_their_weights():
    text = VERSIONED.replace("min_warm = 1", "min_warm = 4\nmax_instances = 10")
    documents = {document.name: document.body for document in render_text(text, "kubernetes").documents}
    scaled = [
        document.body
        for document in render_text(text, "kubernetes").documents
        if document.kind == "ScaledObject"
    ]
    assert [(each["spec"]["minReplicaCount"], each["spec"]["maxReplicaCount"]) for each in scaled] == [
        (4, 9),
        (1, 1),
    ]
    assert [each["weight"] for each in documents["m"]["spec"]["rules"][0]["backendRefs"]] == [90, 10]


def test_the_time_to_drain_fits_the_platforms_grace():
    text = PLAIN.replace("min_warm = 1", "min_warm = 1\ndrain_s = 40")
    documents = [each.body for each in render_text(text, "kubernetes").documents if each.kind == "Deployment"]
    pod = documents[0]["spec"]["template"]["spec"]
    environment = {each["name"]: each.get("value") for each in pod["containers"][0]["env"]}
    assert pod["containers"][0]["lifecycle"]["preStop"] == {"sleep": {"seconds": 3}}
    assert pod["terminationGracePeriodSeconds"] == 3 + 40 + 5
    assert float(environment["TENERAL_DRAIN_TIMEOUT_S"]) == 40


def test_names_that_platforms_refuse_are_made_different_names():
    text = PLAIN.replace("[models.m]", '[models."Qwen2.5/Q"]')
    text += text[text.index("[models") : text.index("[instance]")].replace("Qwen2.5/Q", "Qwen2-5.Q")
    names = {each.name for each in render_text(text, "knative").documents if each.kind == "Service"}
    assert len(names) == 2
    assert all(name.startswith("qwen2-5-q-") for name in names)
    text = PLAIN.replace("[models.m]", f"[models.{'x' * 100}]")
    assert all(len(each.name) <= 40 for each in render_text(text, "knative").documents)
