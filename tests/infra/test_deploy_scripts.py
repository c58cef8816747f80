"""Rendered `deploy.sh` scripts, run by bash against fakes of the platforms' tools, which record what they would do."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.support.aws_commands import check_aws_command
from tests.support.fake_tools import FakeTools
from tests.support.load import patience_s
from tests.support.pool_files import IMAGE, PLAIN, VERSIONED

from teneral.cli import run
from teneral.infra.render.deploy import PLATFORMS, SHELL
from teneral.infra.render.render import RENDERERS

ROOT = Path(__file__).parents[2]
REFERENCE = (ROOT / "infra" / "examples" / "reference.pool.toml").read_text()
ZERO = PLAIN.replace("min_warm = 1", "min_warm = 0")
KEY = 'a "key" with $(signs)'
SECRET = "arn:aws:secretsmanager:eu-central-1:123456789012:secret:teneral-AbCdEf"
TOOLS = {
    "knative": ("kubectl", "curl"),
    "kserve": ("kubectl", "curl"),
    "kubernetes": ("kubectl", "curl"),
    "helm": ("helm", "kubectl", "curl"),
    "kuberay": ("kubectl", "curl"),
    "ray": ("serve", "curl"),
    "cloud-run": ("gcloud", "curl"),
    "lambda": ("aws",),
    "sagemaker": ("aws",),
    "fargate": ("aws", "curl"),
}
# What a person sets on each platform.
VARIABLES = {
    "cloud-run": {"REGION": "europe-west3"},
    "lambda": {"SECRET_ARN": SECRET},
    "sagemaker": {"SECRET_ARN": SECRET},
    "fargate": {"SECRET_ARN": SECRET, "VPC": "vpc-0123456789abcdef0", "SUBNETS": "subnet-0a,subnet-0b"},
}
# Calls that change nothing, by their beginnings.
READING = (
    r"kubectl (--namespace \S+ )?(get|version)|helm show|serve status|aws sts get-caller-identity|aws \w+ describe-|"
    r"gcloud( --project \S+)? (auth list|services list|\w+ describe|\w+ [\w-]+ describe|\w+ \w+ \w+ describe)"
)


def answer_as_a_platform(tools: FakeTools) -> None:
    """Tools that are all there, and succeed."""
    tools.answer("kubectl .*go-template", "yes")
    tools.answer("kubectl .*status.url", "https://chat.models.example.com")
    tools.answer("serve status", "applications:\n  chat:\n    status: RUNNING\n")
    tools.answer("gcloud auth list", "me@example.com\n")
    tools.answer("gcloud .*services list", "run.googleapis.com\n")
    tools.answer("gcloud .*status.conditions", "True\n")
    tools.answer("gcloud .*status.url", "https://chat-0123456789.europe-west3.run.app\n")
    tools.answer("gcloud auth print-identity-token", "a-token\n")
    tools.answer("aws .*StackStatus", "CREATE_COMPLETE\n")
    tools.answer("aws .*OutputKey=='Function'", "chat-Function-a1b2\n")
    tools.answer("aws .*OutputKey=='Endpoint'", "Endpoint-a1b2\n")
    tools.answer("aws .*OutputKey=='Url'", "http://internal-chat.elb.amazonaws.com\n")
    tools.answer("aws lambda invoke", "None\n")
    tools.answer("aws (lambda|sagemaker-runtime) invoke", "None\n")
    tools.answer("curl", '{"choices": [{"text": " there"}]}')


class Folder:
    """A rendered folder with its fakes."""

    def __init__(self, platform: str, text: str, folder: Path, *programs: str) -> None:
        self.platform, self.path, self.tools = platform, folder / "rendered", FakeTools(folder, *programs)
        (folder / "pool.toml").write_text(text)
        arguments = ["pool", "render", platform, str(folder / "pool.toml"), "-o", str(self.path)]
        assert run([*arguments, "--project", "my-project"]) == 0
        answer_as_a_platform(self.tools)

    def deploy(self, *steps: str, **variables: str) -> subprocess.CompletedProcess[str]:
        given = {"CHAT_API_KEY": KEY, "POLL_S": "0", **VARIABLES.get(self.platform, {}), **variables}
        return self.tools.run([self.path / "deploy.sh", *steps], cwd=self.path.parent, **given)

    def changes(self) -> list[str]:
        return [call.line for call in self.tools.calls() if not re.match(READING, call.line)]


Render = Callable[..., Folder]


@pytest.fixture
def render(tmp_path: Path) -> Render:
    def make(platform: str, text: str = REFERENCE, *, without: str = "") -> Folder:
        programs = [name for name in TOOLS[platform] if name != without]
        return Folder(platform, text, tmp_path, *programs)

    return make


def test_every_platform_has_a_script() -> None:
    assert set(PLATFORMS) == set(RENDERERS) == set(TOOLS)
    used = {name for platform in PLATFORMS.values() for name in platform.parts}
    assert {path.stem for path in SHELL.glob("*.sh")} == used | {"head", "common", "main"}


@pytest.mark.parametrize(
    ("platform", "text"),
    [
        *((platform, REFERENCE) for platform in PLATFORMS),
        *((platform, VERSIONED) for platform in PLATFORMS if platform != "lambda"),
        *((platform, ZERO) for platform in PLATFORMS if platform != "fargate"),
    ],
)
def test_a_script_has_no_findings(platform: str, text: str, render: Render) -> None:
    script = render(platform, text).path / "deploy.sh"
    judge = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run([judge, script], capture_output=True, text=True, timeout=patience_s(60))
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize(
    "script",
    [path for path in sorted((ROOT / "scripts").iterdir()) if path.is_file() and not path.suffix],
    ids=lambda path: path.name,
)
def test_our_own_scripts_have_no_warnings(script: Path) -> None:
    judge = Path(sys.executable).with_name("shellcheck")
    found = subprocess.run(
        [judge, "--severity=warning", script], capture_output=True, text=True, timeout=patience_s(60)
    )
    assert found.returncode == 0, found.stdout


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_folder_is_applied_called_and_removed(platform: str, render: Render) -> None:
    folder = render(platform)
    done = folder.deploy()
    assert done.returncode == 0, done.stderr
    assert "chat: " in done.stdout
    assert "embed: " in done.stdout
    lines = "\n".join(folder.changes())
    for document in folder.path.glob("*.yaml"):
        assert document.name in lines
    for call in folder.tools.calls():
        assert KEY not in call.line, "others on the machine can see arguments"
        if call.words[0] == "curl" and '"chat"' in call.line:
            assert f"authorization: Bearer {KEY}\n" in call.piped
        if call.words[0] == "aws":
            check_aws_command(call.words)
    folder.tools.forget()
    removed = folder.deploy("remove")
    assert removed.returncode == 0, removed.stderr
    assert re.search("delete|uninstall|shutdown", "\n".join(folder.changes()))
    for call in folder.tools.calls("aws "):
        check_aws_command(call.words)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_checking_changes_nothing(platform: str, render: Render) -> None:
    folder = render(platform)
    assert folder.deploy("check").returncode == 0
    assert folder.changes() == []
    assert folder.tools.calls()


@pytest.mark.parametrize(
    ("platform", "program"), [(name, program) for name in TOOLS for program in TOOLS[name]]
)
def test_a_missing_program_is_named_before_anything_changes(
    platform: str, program: str, render: Render
) -> None:
    folder = render(platform, without=program)
    done = folder.deploy()
    assert done.returncode == 1
    assert f"missing: the program {program}" in done.stderr
    assert folder.changes() == []


CLUSTER = [
    ("kubectl version", "a cluster that kubectl reaches", "kubectl config use-context"),
    ("get namespace models", "the namespace models", "kubectl create namespace models"),
    ("go-template", "the key CHAT_API_KEY of the secret chat-secrets", "--from-file CHAT_API_KEY=FILE"),
]
ECR = "the image teneral (imageDigest=sha256:4c7d1f0a9be2834d5f60718293a4b5c6d7e8f9000112233445566778899aabbc) in ECR"
AWS = [
    ("get-caller-identity", "a login at AWS", "aws sso login"),
    ("ecr describe-images", ECR, "docker push"),
    ("describe-secret", f"the secret {SECRET}", "aws secretsmanager create-secret"),
]
PREREQUISITES = {
    "knative": [
        *CLUSTER,
        ("customresourcedefinition services.serving", "services.serving.knative.dev", "Knative Serving"),
    ],
    "kserve": [
        *CLUSTER,
        ("customresourcedefinition inferences", "inferenceservices.serving.kserve.io", "install KServe"),
    ],
    "kubernetes": [*CLUSTER, ("customresourcedefinition scaled", "scaledobjects.keda.sh", "install KEDA")],
    "helm": [
        *CLUSTER,
        ("helm show chart", "the chart infra/helm/teneral", "oci://"),
        ("customresourcedefinition scaled", "scaledobjects.keda.sh", "install KEDA"),
    ],
    "kuberay": [*CLUSTER, ("customresourcedefinition ray", "rayservices.ray.io", "the KubeRay operator")],
    "ray": [("serve status", "a Ray cluster at http://localhost:8265", "ray start --head")],
    "cloud-run": [
        (
            "service-accounts describe chat",
            "the account chat-6db39790@my-project.iam.gserviceaccount.com",
            "create chat-6db39790",
        ),
        ("secrets describe", "the secret chat-api-key", "gcloud secrets create chat-api-key"),
    ],
    "lambda": AWS,
    "sagemaker": AWS,
    "fargate": AWS,
}


@pytest.mark.parametrize(
    ("platform", "fails", "what", "remedy"),
    [(platform, *each) for platform, needed in PREREQUISITES.items() for each in needed],
)
def test_what_must_exist_before_is_named_with_a_remedy(
    platform: str, fails: str, what: str, remedy: str, render: Render
) -> None:
    folder = render(platform)
    folder.tools.answer(fails, status=1, stderr="not found\n")
    done = folder.deploy()
    assert done.returncode == 1
    assert f"missing: {what}" in done.stderr
    assert remedy in done.stderr
    assert folder.changes() == []


@pytest.mark.parametrize(
    ("platform", "variable"),
    [
        *((platform, "CHAT_API_KEY") for platform in TOOLS if platform not in ("lambda", "sagemaker")),
        ("cloud-run", "REGION"),
        *((platform, "SECRET_ARN") for platform in ("lambda", "sagemaker", "fargate")),
        ("fargate", "VPC"),
        ("fargate", "SUBNETS"),
    ],
)
def test_a_variable_that_is_not_set_is_named_before_anything_changes(
    platform: str, variable: str, render: Render
) -> None:
    folder = render(platform)
    done = folder.deploy(**{variable: ""})
    assert done.returncode == 1
    assert f"missing: the variable {variable}" in done.stderr
    assert folder.changes() == []


def test_all_that_is_missing_is_named_at_once(render: Render) -> None:
    folder = render("kubernetes")
    folder.tools.answer("get (namespace|customres)|go-template", status=1)
    done = folder.deploy("check", CHAT_API_KEY="")
    assert done.stderr.count("missing: ") == 4


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_document_that_is_refused_ends_the_script(platform: str, render: Render) -> None:
    folder = render(platform)
    folder.tools.answer(
        "kubectl .*apply|helm upgrade|serve deploy|services replace|cloudformation deploy",
        status=1,
        stderr="it is refused\n",
    )
    done = folder.deploy()
    assert done.returncode != 0
    assert "it is refused" in done.stderr
    assert len(folder.changes()) == 1
    assert "chat: " not in done.stdout


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_model_that_does_not_answer_is_an_error(platform: str, render: Render) -> None:
    folder = render(platform)
    folder.tools.answer("curl", '{"error": "no such model"}', status=22)
    folder.tools.answer("aws (lambda|sagemaker-runtime) invoke", "Unhandled\n", status=1)
    done = folder.deploy("call")
    assert done.returncode == 1
    assert "chat does not answer" in done.stderr


def test_a_failed_function_is_an_error_although_the_call_succeeds(render: Render) -> None:
    folder = render("lambda")
    folder.tools.answer("aws lambda invoke", "Unhandled\n")
    assert folder.deploy("call").returncode == 1


@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_encoder_is_asked_for_a_vector(platform: str, render: Render) -> None:
    folder = render(platform)
    folder.tools.answer("/v1/completions|invoke.*prompt", status=22)
    done = folder.deploy("call")
    assert done.returncode == 0, done.stderr
    assert "embed: a vector" in done.stdout


@pytest.mark.parametrize("platform", PLATFORMS)
def test_a_function_is_sent_the_event_that_the_file_gives_it(platform: str, render: Render) -> None:
    event = """{ text = "it's \\"$(5)\\"", pages = [1, 2] }"""
    folder = render(platform, REFERENCE + f"\n[models.chat.instance]\nexample_event = {event}\n")
    done = folder.deploy("call")
    assert done.returncode == 0, done.stderr
    bodies = [
        json.loads(call.words[index + 1])
        for call in folder.tools.calls()
        for index, word in enumerate(call.words)
        if word in ("-d", "--payload", "--body")
    ]
    assert bodies[0] == {"text": 'it\'s "$(5)"', "pages": [1, 2]}
    assert [body.get("prompt") for body in bodies[1:]] == ["Hello"], "the other model's"
    if "http" in PLATFORMS[platform].parts:
        assert "/invoke" in folder.tools.calls("curl")[0].line


def test_a_stack_that_went_back_is_not_ready(render: Render) -> None:
    folder = render("fargate")
    folder.tools.answer("StackStatus", "UPDATE_ROLLBACK_COMPLETE\n")
    done = folder.deploy("ready")
    assert done.returncode == 1
    assert "the stack chat is UPDATE_ROLLBACK_COMPLETE" in done.stderr


def test_a_model_that_sleeps_on_kubernetes_is_called_through_the_interceptor(render: Render) -> None:
    folder = render("kubernetes", ZERO)
    forwarding = "port-forward --namespace keda service/keda-add-ons-http-interceptor-proxy"
    folder.tools.answer("^curl", behind=forwarding)  # which is ended once there is an answer
    done = folder.deploy()
    assert done.returncode == 0, done.stderr
    (called,) = folder.tools.calls("curl")
    assert "host: m\n" in called.piped
    assert folder.tools.calls("customresourcedefinition interceptorroutes.http.keda.sh")
    assert folder.tools.calls("wait --for condition=Ready scaledobject/m")


def test_versions_on_kserve_are_applied_one_after_the_other(render: Render) -> None:
    folder = render("kserve", VERSIONED)
    assert folder.deploy("apply").returncode == 0
    order = [line.split("models ")[1].split(" ")[0] for line in folder.changes()]
    assert order == ["apply", "apply", "wait", "apply", "wait"]


def test_ray_is_waited_for_and_its_failures_are_shown(render: Render) -> None:
    folder = render("ray")
    folder.tools.answer("serve status", "status: DEPLOYING\n", times=2)
    assert folder.deploy("ready").returncode == 0
    assert len(folder.tools.calls("serve status")) == 3
    folder.tools.answer("serve status", "status: DEPLOY_FAILED\nmessage: no cores\n")
    done = folder.deploy("ready")
    assert done.returncode == 1
    assert "no cores" in done.stderr
    folder.tools.answer("serve status", "status: DEPLOYING\n")
    done = folder.deploy("ready", TIMEOUT_S="0")
    assert "not all applications are running after 0 s" in done.stderr


def test_an_unknown_step_is_an_error(render: Render) -> None:
    folder = render("kubernetes")
    done = folder.deploy("aply")
    assert done.returncode == 2
    assert "unknown step 'aply'" in done.stderr
    assert folder.tools.calls() == []


@pytest.mark.parametrize("platform", PLATFORMS)
def test_the_readme_names_the_documents_and_how_to_go_back(platform: str, render: Render) -> None:
    folder = render(platform)
    text = (folder.path / "README.md").read_text()
    for document in folder.path.glob("*.yaml"):
        assert f"`{document.name}`" in text
    assert text.startswith(f"# chat and embed on {PLATFORMS[platform].title}\n")
    assert "## Before" in text
    assert "Back" in text
    assert "{" not in re.sub("'{.*}'", "", text)


def test_a_check_sees_a_changed_script_and_the_script_may_be_run(
    render: Render, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = render("kubernetes", PLAIN)
    script = folder.path / "deploy.sh"
    assert script.stat().st_mode & 0o111 == 0o111
    command = [
        "pool",
        "render",
        "kubernetes",
        str(folder.path.parent / "pool.toml"),
        "--check",
        str(folder.path),
    ]
    assert run(command) == 0
    script.write_text(script.read_text().replace("keda", "kida"))
    assert run(command) == 1
    assert "kida" in capsys.readouterr().out


def test_an_image_of_another_registry_is_not_asked_for_in_ecr(render: Render) -> None:
    folder = render("fargate", PLAIN.replace(IMAGE, "registry.example.com/teneral:1"))
    assert folder.deploy("check").returncode == 0
    assert folder.tools.calls("ecr") == []


def test_a_served_name_is_data_in_a_request(render: Render) -> None:
    folder = render("knative", PLAIN.replace("[models.m]", '[models."Qwen/Qwen2.5-0.5B"]'))
    assert folder.deploy("call").returncode == 0
    (called,) = folder.tools.calls("curl")
    body = called.words[called.words.index("-d") + 1]
    assert json.loads(body)["model"] == "Qwen/Qwen2.5-0.5B"
