"""From a pool and a platform's name to documents and their texts: the table of renderers. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import NamedTuple

from ...handlers.pool.values import Model, Pool, PoolWarning
from ...loader.errors import UsageError
from . import aws_lambda, cloud_run, fargate, helm, knative, kserve, kubernetes, ray, sagemaker
from .documents import Document, Options, Rendering
from .patch import apply_patches
from .yaml_text import yaml_text

Renderer = Callable[[Rendering, Sequence[Model]], list[Document]]


def _each(render_model: Callable[[Rendering, Model], list[Document]]) -> Renderer:
    """Of a platform on which models are deployed one by one."""
    return lambda rendering, models: [
        document for model in models for document in render_model(rendering, model)
    ]


RENDERERS: dict[str, Renderer] = {
    "knative": _each(knative.render_model),
    "kserve": _each(kserve.render_model),
    "kubernetes": _each(kubernetes.render_model),
    "helm": helm.render_pool,
    "cloud-run": _each(cloud_run.render_model),
    "lambda": _each(aws_lambda.render_model),
    "sagemaker": _each(sagemaker.render_model),
    "fargate": _each(fargate.render_model),
    "ray": ray.render_serve,
    "kuberay": ray.render_kuberay,
}
HEADER = "# Rendered by `teneral pool render {platform}` from {file}: change that file, not this one.\n"


class Rendered(NamedTuple):
    """The documents of one pool on one platform, in the order in which they are applied."""

    platform: str
    file: str
    documents: tuple[Document, ...]
    warnings: tuple[PoolWarning, ...]

    def texts(self) -> dict[str, str]:
        """File name → text of each document."""
        header = HEADER.format(platform=self.platform, file=PurePath(self.file).name)
        return {document.file: header + yaml_text([document.body]) for document in self.documents}

    def stream(self) -> str:
        """All of them in one text."""
        header = HEADER.format(platform=self.platform, file=PurePath(self.file).name)
        return header + yaml_text([document.body for document in self.documents])


def render(
    pool: Pool,
    platform: str,
    *,
    options: Options | None = None,
    weight_bytes: Mapping[str, int] | None = None,
    model: str | None = None,
) -> Rendered:
    """Raises `PoolFileError` for what the platform cannot do, `UsageError` for a name that is unknown."""
    if platform not in RENDERERS:
        raise UsageError(
            f"unknown platform {platform!r}", key="platform", hint=f"Name one of {', '.join(RENDERERS)}."
        )
    rendering = Rendering(pool, platform, options or Options(), weight_bytes or {})
    documents = RENDERERS[platform](rendering, chosen_models(pool, model))
    patched = apply_patches(rendering, documents, every=model is None)
    return Rendered(platform, pool.file, tuple(patched), tuple(rendering.warnings))


def chosen_models(pool: Pool, name: str | None) -> Sequence[Model]:
    if name is None:
        return tuple(pool)
    if name not in pool.models:
        raise UsageError(
            f"unknown model {name!r}", key="--model", hint=f"{pool.file} has {', '.join(pool.models)}."
        )
    return (pool.models[name],)
