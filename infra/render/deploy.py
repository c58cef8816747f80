"""The commands that deploy a rendered folder: `deploy.sh`, by the platform's own tools, and its README.

A script is a head of tables, which are rendered (`each_model`, `each_file`, …: shell functions that call a command with
each row), and parts that are the same for every pool: the files of `shell/`. The tables are pure functions of a
rendering; the parts are read when the folder is written.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import NamedTuple

from ...handlers.pool.values import Model
from . import kubernetes
from .aws import image_of_ecr
from .cloud_run import account_name, secret_name
from .documents import RenderedDocument, Rendering
from .limits import Unit, units_of

SCRIPT, README = "deploy.sh", "README.md"
SHELL = Path(__file__).with_name("shell")
Rows = Sequence[tuple[str, ...]]
# Group of a custom resource → what brings it.
OPERATORS = {
    "keda.sh": "KEDA",
    "http.keda.sh": "KEDA's HTTP add-on",
    "gateway.networking.k8s.io": "the Gateway API",
    "serving.knative.dev": "Knative Serving",
    "serving.kserve.io": "KServe",
    "ray.io": "the KubeRay operator",
}


class Table(NamedTuple):
    """A shell function `each_<name>`, which calls its arguments with each row. `columns` is for the reader."""

    columns: str
    rows: Rows


class DeployPlan(NamedTuple):
    """Deployment by the script of a platform. `settings` are defaults of its variables."""

    tables: Mapping[str, Table]
    settings: Mapping[str, str]
    models: tuple[str, ...]
    resource: str  # the first model's name on the platform, for examples


Tables = Callable[[Rendering, list[list[Unit]], Sequence[RenderedDocument]], dict[str, Table]]


class PlatformScript(NamedTuple):
    """A platform's script: the files of `shell/` that it is made of, in addition to the common ones, and its tables."""

    title: str
    parts: tuple[str, ...]
    tables: Tables


def plan(rendering: Rendering, models: Sequence[Model], documents: Sequence[RenderedDocument]) -> DeployPlan:
    """The tables of the platform's script, from the documents in the order in which they are applied."""
    units = [units_of(rendering, model) for model in models]
    events = [(_served_name(each[0]), each[0].model.instance.example_event or "") for each in units]
    tables = {
        "file": Table("FILE", [(document.file,) for document in documents]),
        "event": Table("MODEL EXAMPLE_EVENT", [row for row in events if row[1]]),
    }
    if "http" in PLATFORMS[rendering.platform].parts:
        keys = [(_served_name(each[0]), _key_variable(each[0])) for each in units]
        tables["api_key"] = Table("MODEL VARIABLE", [row for row in keys if row[1]])
    tables |= PLATFORMS[rendering.platform].tables(rendering, units, documents)
    settings = {"PROJECT": rendering.options.project} if rendering.platform == "cloud-run" else {}
    names = tuple(_served_name(each[0]) for each in units)
    return DeployPlan(
        tables, {name: value for name, value in settings.items() if value}, names, units[0][0].base
    )


def texts(deployment: DeployPlan, platform: str, file: str) -> dict[str, str]:
    """The script and its README, by file name."""
    named = {"platform": platform, "file": PurePath(file).name, "title": PLATFORMS[platform].title}
    named |= {"models": _listed(deployment.models), "resource": deployment.resource}
    return {SCRIPT: _script(deployment, platform, named), README: _readme(deployment, platform, named)}


def _script(deployment: DeployPlan, platform: str, named: Mapping[str, str]) -> str:
    parts = [_part("head.sh").format(**named)]
    if deployment.settings:
        defaults = deployment.settings.items()
        parts.append("".join(f'{name}="${{{name}:-{value}}}"\n' for name, value in defaults))
    parts += [_table(name, table) for name, table in deployment.tables.items()]
    parts += [_part(f"{name}.sh") for name in ("common", *PLATFORMS[platform].parts, "main")]
    return "\n".join(parts)


def _table(name: str, table: Table) -> str:
    rows = [f'  "$@" {shlex.join(row)}\n' for row in table.rows] or ["  :\n"]
    return f"each_{name}() {{ # calls its arguments with {table.columns}\n{''.join(rows)}}}\n"


def _readme(deployment: DeployPlan, platform: str, named: Mapping[str, str]) -> str:
    files = [f"- `{file}`" for (file,) in deployment.tables["file"].rows]
    own = _part(f"{platform}.md").replace("{file}", named["file"]).replace("{resource}", named["resource"])
    return _part("readme.md").format(**named, files="\n".join(files), settings=own.rstrip("\n"))


def _part(name: str) -> str:
    return (SHELL / name).read_text(encoding="utf-8")


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _served_name(unit: Unit) -> str:
    return unit.environment.get("TENERAL_NAME", unit.model.name)


def _key_variable(unit: Unit) -> str:
    """The variable with the model's API key, of the store of secrets and of the caller; "" without one."""
    return unit.secrets.get("TENERAL_API_KEY", "")


def _unique(rows: Iterable[tuple[str, ...]]) -> Rows:
    return list(dict.fromkeys(rows))


def _models(units: list[list[Unit]], resource: Callable[[list[Unit]], str]) -> Table:
    rows = [(_served_name(each[0]), resource(each), _key_variable(each[0])) for each in units]
    return Table("MODEL RESOURCE API_KEY_VARIABLE", rows)


def _base(versions: list[Unit]) -> str:
    return versions[0].base


def _cluster(units: list[list[Unit]], documents: Iterable[RenderedDocument]) -> dict[str, Table]:
    """The variable with the model's API key, by its name in the store of secrets; "" without one."""
    custom: list[tuple[str, ...]] = []
    for document in documents:
        group = str(document.body.get("apiVersion", "")).rpartition("/")[0]
        if group in OPERATORS:
            custom.append((f"{document.kind.lower()}s.{group}", OPERATORS[group]))
    secrets: Rows = [
        (f"{each[0].base}-secrets", *sorted(set(each[0].secrets.values())))
        for each in units
        if each[0].secrets
    ]
    return {
        "custom_resource": Table("NAME WHAT_BRINGS_IT", _unique(custom)),
        "secret": Table("SECRET KEY...", secrets),
    }


def _deployments(
    rendering: Rendering, units: list[list[Unit]], documents: Sequence[RenderedDocument]
) -> dict[str, Table]:
    """Of Kubernetes and the chart, which makes the same documents."""
    versions = [unit for each in units for unit in each]
    rows = [(_served_name(unit), unit.name, _key_variable(unit), str(unit.min_warm)) for unit in versions]
    if rendering.platform == "helm":
        quiet = Rendering(rendering.pool, "kubernetes", rendering.options, rendering.sizes)
        documents = [body for each in units for body in kubernetes.render_model(quiet, each[0].model)]
    return {**_cluster(units, documents), "model": Table("MODEL RESOURCE API_KEY_VARIABLE WARM", rows)}


def _of_cluster(resource: Callable[[list[Unit]], str]) -> Tables:
    return lambda rendering, units, documents: {
        **_cluster(units, documents),
        "model": _models(units, resource),
    }


def _knative_resource(versions: list[Unit]) -> str:
    kind = "service" if len(versions) == 1 else "route"
    return f"{kind}.serving.knative.dev/{versions[0].base}"


def _cloud_run(
    rendering: Rendering, units: list[list[Unit]], documents: Sequence[RenderedDocument]
) -> dict[str, Table]:
    accounts: list[tuple[str, ...]] = []
    if project := rendering.options.project:
        accounts = [(f"{account_name(each[0].base)}@{project}.iam.gserviceaccount.com",) for each in units]
    secrets = [(secret_name(key),) for each in units for key in each[0].secrets.values()]
    return {
        "account": Table("EMAIL", accounts),
        "secret": Table("SECRET", _unique(secrets)),
        "image": Table("IMAGE", _unique((each[0].image,) for each in units)),
        "model": _models(units, _base),
    }


def _stacks(
    rendering: Rendering, units: list[list[Unit]], documents: Sequence[RenderedDocument]
) -> dict[str, Table]:
    """Of AWS's platforms: a stack a model. The last column is what the platform's own call needs."""
    columns = {"sagemaker": " COMPONENT", "fargate": " API_KEY_VARIABLE"}
    rows: list[tuple[str, ...]] = []
    for each, document in zip(units, documents, strict=True):
        keys = ", ".join(sorted({key for unit in each for key in unit.secrets.values()}))
        row: tuple[str, ...] = (_served_name(each[0]), each[0].base, keys)
        if rendering.platform == "sagemaker":
            row = (*row, each[0].base if "Component" in document.body.get("Resources", ()) else "")
        elif rendering.platform == "fargate":
            row = (*row, _key_variable(each[0]))
        rows.append(row)
    images = [image for each in units if (image := image_of_ecr(each[0].image))]
    return {
        "image": Table("ACCOUNT REGION REPOSITORY IMAGE_ID", _unique(images)),
        "model": Table(f"MODEL STACK KEYS{columns.get(rendering.platform, '')}", rows),
    }


PLATFORMS: dict[str, PlatformScript] = {
    "knative": PlatformScript(
        "Knative", ("http", "kubectl", "files", "knative_urls"), _of_cluster(_knative_resource)
    ),
    "kserve": PlatformScript(
        "KServe",
        ("http", "kubectl", "knative_urls", "kserve"),
        _of_cluster(lambda versions: f"inferenceservice/{versions[0].base}"),
    ),
    "kubernetes": PlatformScript(
        "Kubernetes with KEDA", ("http", "kubectl", "files", "deployments"), _deployments
    ),
    "helm": PlatformScript("Kubernetes with Helm", ("http", "kubectl", "deployments", "helm"), _deployments),
    "cloud-run": PlatformScript("Cloud Run", ("http", "cloud-run"), _cloud_run),
    "lambda": PlatformScript("AWS Lambda", ("aws", "stacks", "lambda"), _stacks),
    "sagemaker": PlatformScript("SageMaker", ("aws", "stacks", "sagemaker"), _stacks),
    "fargate": PlatformScript("ECS on Fargate", ("http", "aws", "fargate"), _stacks),
    "ray": PlatformScript(
        "Ray Serve", ("http", "ray"), lambda _, units, __: {"model": _models(units, _base)}
    ),
    "kuberay": PlatformScript("KubeRay", ("http", "kubectl", "files", "kuberay"), _of_cluster(_base)),
}
